/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.h - the smallest frame for tests in C.
 *
 * A program runs its tests, each of which is a function, in their order:
 *
 *     TEST(test_something)
 *     {
 *     }
 *
 * A failed CHECK prints its place and its condition, and counts against its
 * test; the test continues, so that it can clean up.  REQUIRE leaves the test
 * at once: it is for conditions of the test's rest.  Checks belong to the
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

/* The failed checks of the running test. There is one count for a program and
 * its support code: a check counts wherever it fails. */
extern unsigned check_failures;

static inline bool
check_note(bool good, const char *file, int line, const char *what)
{
    if (!good) {
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
        check_failures++;
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
        check_failures++;
    }
    return got == wanted;
}

static inline bool
check_text(const char *text, const char *part, const char *file, int line)
{
    if (strstr(text, part) == NULL) {
        fprintf(stderr, "%s:%d: failed: \"%s\" is not in \"%s\"\n", file, line,
                part, text);
        check_failures++;
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

/* A test of a program, and its line. */
typedef struct check_test {
    const char *name;
    void (*run)(void);
    int line;
    struct check_test *next;
} check_test;

void check_add(check_test *test);
/* Runs the tests, or those that the arguments name; returns the exit status.  It
 * is all that main does, unless the program has a main of its own. */
int check_main(int argc, char **argv);

#define TEST(name)                                                            \
    static void name(void);                                                   \
    __attribute__((constructor)) static void add_##name(void)                 \
    {                                                                         \
        static check_test test = {#name, name, __LINE__, NULL};               \
        check_add(&test);                                                     \
    }                                                                         \
    static void name(void)

/* A test between two calls; the second is made even after a REQUIRE. */
#define TEST_WITH(name, setup, teardown)                                      \
    static void body_of_##name(void);                                         \
    TEST(name)                                                                \
    {                                                                         \
        setup;                                                                \
        body_of_##name();                                                     \
        teardown;                                                             \
    }                                                                         \
    static void body_of_##name(void)

/* A test of one thread that takes long: the thread sanitizer has nothing to
 * find in it, and makes it many times slower. */
#ifdef __SANITIZE_THREAD__
#define TEST_SINGLE(name) __attribute__((unused)) static void name(void)
#else
#define TEST_SINGLE(name) TEST(name)
#endif

/* Makes a new empty directory below base; free it with check_rmdir. */
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

/* Makes a directory below TMPDIR, or /tmp. */
static inline char *
check_mkdir(void)
{
    const char *base = getenv("TMPDIR");
    return check_mkdir_below(base != NULL ? base : "/tmp");
}

/* Makes a directory on the host's tmpfs, if it has one. */
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

/* Removes the directory with all its contents. */
static inline void
check_rmdir(char *path)
{
    if (nftw(path, check_remove, 16, FTW_DEPTH | FTW_PHYS) != 0) {
        perror(path);
    }
    free(path);
}

#endif
