/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - see check.h.
 */
#include "tests/c/support/check.h"

unsigned check_failures;

static check_test *tests;

void
check_add(check_test *test)
{
    check_test **at = &tests;
    while (*at != NULL && (*at)->line < test->line) {
        at = &(*at)->next;
    }
    test->next = *at;
    *at = test;
}

static bool
is_wanted(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], name) == 0) {
            return true;
        }
    }
    return argc <= 1;
}

int
check_main(int argc, char **argv)
{
    unsigned passed = 0, failed = 0;
    for (const check_test *test = tests; test != NULL; test = test->next) {
        if (!is_wanted(test->name, argc, argv)) {
            continue;
        }
        check_failures = 0;
        test->run();
        if (check_failures == 0) {
            passed++;
        } else {
            failed++;
            fprintf(stderr, "FAILED %s\n", test->name);
        }
    }
    printf("%u passed, %u failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}

__attribute__((weak)) int
main(int argc, char **argv)
{
    return check_main(argc, argv);
}
