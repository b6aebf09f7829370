/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.h - the smallest frame for tests in C.
 *
 * A test is a function without arguments; main runs each with RUN and returns
 * REPORT().  A failed CHECK prints where and what, and counts against the test
 * it is in; the test goes on, so that it can clean up.  REQUIRE leaves the
 * test at once: for what the rest of it depends on.  Checks belong to the
 * thread that runs the tests; other threads count their own failures.
 *
 * With arguments, a program runs only the tests that are named.
 */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct check_state {
    int argc;
    char **argv;
    unsigned failures; /* failed checks of the test under way */
    unsigned passed;   /* tests */
    unsigned failed;
} check_state;

/* One for a program and what supports it: a check counts wherever it fails. */
extern check_state check_all;

static inline bool
check_note(bool good, const char *file, int line, const char *what)
{
    if (!good) {
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
        check_all.failures++;
    }
    return good;
}

static inline bool
check_ints(int64_t got, int64_t wanted, const char *file, int line,
           const char *what)
{
    if (got != wanted) {
        fprintf(stderr, "%s:%d: failed: %s: %" PRId64 ", not %" PRId64 "\n",
                file, line, what, got, wanted);
        check_all.failures++;
    }
    return got == wanted;
}

static inline bool
check_text(const char *text, const char *part, const char *file, int line)
{
    if (strstr(text, part) == NULL) {
        fprintf(stderr, "%s:%d: failed: \"%s\" is not in \"%s\"\n", file, line,
                part, text);
        check_all.failures++;
        return false;
    }
    return true;
}

#define CHECK(condition)                                                      \
    check_note((condition), __FILE__, __LINE__, #condition)

#define CHECK_INT(got, wanted)                                                \
    check_ints((int64_t)(got), (int64_t)(wanted), __FILE__, __LINE__, #got)

#define CHECK_CONTAINS(text, part)                                            \
    check_text((text), (part), __FILE__, __LINE__)

#define REQUIRE(condition)                                                    \
    do {                                                                      \
        if (!CHECK(condition)) {                                              \
            return;                                                           \
        }                                                                     \
    } while (0)

static inline bool
check_wanted(const char *name)
{
    for (int i = 1; i < check_all.argc; i++) {
        if (strcmp(check_all.argv[i], name) == 0) {
            return true;
        }
    }
    return check_all.argc <= 1;
}

static inline void
check_run(void (*test)(void), const char *name)
{
    if (!check_wanted(name)) {
        return;
    }
    check_all.failures = 0;
    test();
    if (check_all.failures == 0) {
        check_all.passed++;
    } else {
        check_all.failed++;
        fprintf(stderr, "FAILED %s\n", name);
    }
}

static inline void
check_begin(int argc, char **argv)
{
    check_all.argc = argc;
    check_all.argv = argv;
}

/* The exit status. */
static inline int
check_report(void)
{
    printf("%u passed, %u failed\n", check_all.passed, check_all.failed);
    return check_all.failed == 0 && check_all.passed > 0 ? 0 : 1;
}

#define BEGIN(argc, argv) check_begin((argc), (argv))
#define RUN(test) check_run((test), #test)
#define REPORT() check_report()

/* For a test of one thread that takes long: in it, the thread sanitizer has
 * nothing to find, and makes it many times slower. */
#ifdef __SANITIZE_THREAD__
#define RUN_SINGLE(test) ((void)(test))
#else
#define RUN_SINGLE(test) RUN(test)
#endif

/* A new empty directory below base; free it with check_rmdir. */
static inline char *
check_mkdir_below(const char *base)
{
    char *path = NULL;
    if (asprintf(&path, "%s/glance-dedup-XXXXXX", base) < 0 ||
        mkdtemp(path) == NULL) {
        perror("cannot make a temporary directory");
        exit(2);
    }
    return path;
}

/* Below TMPDIR, or /tmp. */
static inline char *
check_mkdir(void)
{
    const char *base = getenv("TMPDIR");
    return check_mkdir_below(base != NULL ? base : "/tmp");
}

/* On the host's tmpfs, where there is one. */
static inline char *
check_mkdir_shm(void)
{
    return access("/dev/shm", W_OK) == 0 ? check_mkdir_below("/dev/shm")
                                         : check_mkdir();
}

static inline int
check_remove(const char *path, const struct stat *st, int kind,
             struct FTW *where)
{
    (void)st;
    (void)kind;
    (void)where;
    return remove(path);
}

/* Removes the directory with all that is in it. */
static inline void
check_rmdir(char *path)
{
    if (nftw(path, check_remove, 16, FTW_DEPTH | FTW_PHYS) != 0) {
        perror(path);
    }
    free(path);
}

#endif
