/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_locks.c - locks that exclude each other: in one handle, in two, and in
 * two processes. Two handles of one process are two open files, so the kernel
 * separates them as it does processes.
 */
#include "engine/files/locks.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

typedef struct fixture {
    scratch x;
    gd_locks *a, *b; /* two handles */
    int raw;         /* a third open file: the collector's */
} fixture;

static void
setup(fixture *t)
{
    scratch_init(&t->x);
    CHECK_INT(gd_locks_open(t->x.env, t->x.root, &t->a, &t->x.err), GD_OK);
    CHECK_INT(gd_locks_open(t->x.env, t->x.root, &t->b, &t->x.err), GD_OK);
    t->raw = openat(t->x.root, GD_FILE_GROUP_LOCKS, O_RDWR | O_CLOEXEC);
    CHECK(t->raw >= 0);
}

static void
teardown(fixture *t)
{
    close(t->raw);
    gd_locks_close(t->a);
    gd_locks_close(t->b);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

static int
raw_lock(const fixture *t, uint64_t byte, short type)
{
    const gd_env *env = gd_env_posix();
    return env->lock(env, t->raw, byte, type);
}

/* Returns true if no other handle holds the byte, which stays unlocked. */
static bool
is_free(const fixture *t, uint64_t byte)
{
    bool got = raw_lock(t, byte, F_WRLCK) >= 0;
    if (got) {
        raw_lock(t, byte, F_UNLCK);
    }
    return got;
}

#define SHARE_BYTE(group) ((UINT64_C(1) << 32) + (group))
#define INTENT_BYTE(group) ((UINT64_C(1) << 33) + (group))
#define FEATURE_BYTE(known) ((UINT64_C(1) << 35) + (known))

static fixture t;

/* The locked bytes are those of format.rst, and no others. */
TEST_WITH(test_which_bytes, setup(&t), teardown(&t))
{
    const uint32_t group = 0x1ffffff;
    CHECK_INT(gd_locks_lock_shared(t.a, group, NULL), GD_OK);
    CHECK(!is_free(&t, SHARE_BYTE(group)));
    CHECK(is_free(&t, SHARE_BYTE(group - 1)));
    CHECK(is_free(&t, SHARE_BYTE(group) + 1));
    CHECK(is_free(&t, INTENT_BYTE(group)));
    CHECK(is_free(&t, group));
    CHECK_INT(raw_lock(&t, SHARE_BYTE(group), F_RDLCK), 0); /* shared */
    raw_lock(&t, SHARE_BYTE(group), F_UNLCK);
    CHECK_INT(gd_locks_lease(t.a, group, NULL), GD_OK);
    CHECK(!is_free(&t, group));
    CHECK(is_free(&t, group - 1));
    CHECK_INT(raw_lock(&t, group, F_RDLCK), -EAGAIN); /* exclusive */
    gd_locks_unlease(t.a, group);
    gd_locks_unlock_shared(t.a, group);
    CHECK(is_free(&t, group));
    CHECK(is_free(&t, SHARE_BYTE(group)));
}

TEST_WITH(test_share_is_counted, setup(&t), teardown(&t))
{
    for (int i = 0; i < 3; i++) {
        CHECK_INT(gd_locks_lock_shared(t.a, 5, NULL), GD_OK);
    }
    CHECK_INT(gd_locks_lock_shared(t.b, 5, NULL), GD_OK);
    gd_locks_unlock_shared(t.a, 5);
    gd_locks_unlock_shared(t.b, 5);
    gd_locks_unlock_shared(t.b, 5); /* one too many: a's locks are not b's */
    CHECK(!is_free(&t, SHARE_BYTE(5)));
    gd_locks_unlock_shared(t.a, 5);
    CHECK(!is_free(&t, SHARE_BYTE(5)));
    gd_locks_unlock_shared(t.a, 5);
    CHECK(is_free(&t, SHARE_BYTE(5)));
    gd_locks_unlock_shared(t.a, 5);
    gd_locks_unlock_shared(t.a, 6); /* never shared */
    CHECK_INT(gd_locks_lock_shared(t.a, 5, NULL), GD_OK);
    CHECK(!is_free(&t, SHARE_BYTE(5)));
}

TEST_WITH(test_the_collector_refuses, setup(&t), teardown(&t))
{
    gd_error err = {.text = "as it was"};
    CHECK_INT(raw_lock(&t, SHARE_BYTE(9), F_WRLCK), 0);
    CHECK_INT(gd_locks_lock_shared(t.a, 9, &err), GD_BUSY);
    CHECK_INT(gd_locks_lock_shared(t.a, 9, &err), GD_BUSY);
    CHECK(strcmp(err.text, "as it was") == 0);
    CHECK_INT(gd_locks_lock_shared(t.a, 8, &err), GD_OK);
    raw_lock(&t, SHARE_BYTE(9), F_UNLCK);
    CHECK_INT(gd_locks_lock_shared(t.a, 9, &err), GD_OK);
    gd_locks_unlock_shared(t.a, 9);
    CHECK(is_free(&t, SHARE_BYTE(9)));
}

/* The mark of intent keeps new sharers out, also of a handle that shares
 * already; locks that are held stay. */
TEST_WITH(test_intent_refuses, setup(&t), teardown(&t))
{
    CHECK_INT(gd_locks_lock_shared(t.a, 9, NULL), GD_OK);
    CHECK_INT(raw_lock(&t, INTENT_BYTE(9), F_WRLCK), 0);
    CHECK_INT(gd_locks_lock_shared(t.b, 9, NULL), GD_BUSY);
    CHECK_INT(gd_locks_lock_shared(t.b, 10, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_shared(t.a, 9, NULL), GD_BUSY);
    CHECK(!is_free(&t, SHARE_BYTE(9)));
    gd_locks_unlock_shared(t.a, 9);
    CHECK_INT(gd_locks_lock_shared(t.a, 9, NULL), GD_BUSY);
    CHECK(is_free(&t, SHARE_BYTE(9)));
    raw_lock(&t, INTENT_BYTE(9), F_UNLCK);
    CHECK_INT(gd_locks_lock_shared(t.a, 9, NULL), GD_OK);
    CHECK(is_free(&t, INTENT_BYTE(9))); /* the query left no lock */
}

TEST_WITH(test_one_lease, setup(&t), teardown(&t))
{
    gd_error err = {.text = "as it was"};
    CHECK_INT(gd_locks_lease(t.a, 3, &err), GD_OK);
    CHECK_INT(gd_locks_lease(t.a, 3, &err), GD_BUSY);
    CHECK_INT(gd_locks_lease(t.b, 3, &err), GD_BUSY);
    CHECK(strcmp(err.text, "as it was") == 0);
    CHECK_INT(gd_locks_lease(t.b, 4, &err), GD_OK);
    gd_locks_unlease(t.b, 3); /* not its own */
    CHECK_INT(gd_locks_lease(t.b, 3, &err), GD_BUSY);
    gd_locks_unlease(t.a, 3);
    gd_locks_unlease(t.a, 3);
    CHECK_INT(gd_locks_lease(t.b, 3, &err), GD_OK);
    CHECK_INT(gd_locks_lease(t.a, 3, &err), GD_BUSY);
    gd_locks_unlease(t.b, 3);
    CHECK_INT(gd_locks_lease(t.a, 3, &err), GD_OK);
    /* Lease and group lock are separate. */
    CHECK_INT(gd_locks_lock_shared(t.b, 3, &err), GD_OK);
}

TEST_WITH(test_closing_releases, setup(&t), teardown(&t))
{
    gd_locks *c;
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &c, &t.x.err), GD_OK);
    CHECK_INT(gd_locks_lease(c, 3, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_shared(c, 3, NULL), GD_OK);
    gd_locks_close(c);
    CHECK(is_free(&t, 3) && is_free(&t, SHARE_BYTE(3)));
}

/* ---- the collector's locks ---- */

TEST_WITH(test_exclude, setup(&t), teardown(&t))
{
    gd_error err = {.text = "as it was"};
    CHECK_INT(gd_locks_lock_exclusive(t.a, 7, &err), GD_OK);
    CHECK_INT(raw_lock(&t, SHARE_BYTE(7), F_RDLCK), -EAGAIN);
    CHECK(is_free(&t, SHARE_BYTE(6)) && is_free(&t, SHARE_BYTE(8)));
    CHECK(is_free(&t, 7) && is_free(&t, INTENT_BYTE(7)));
    CHECK_INT(gd_locks_lock_exclusive(t.a, 7, &err), GD_BUSY);
    CHECK_INT(gd_locks_lock_exclusive(t.b, 7, &err), GD_BUSY);
    CHECK_INT(gd_locks_lock_shared(t.b, 7, &err), GD_BUSY);
    /* Nor does its own handle share it: the kernel would allow that, and would
     * let every process in. */
    CHECK_INT(gd_locks_lock_shared(t.a, 7, &err), GD_BUSY);
    CHECK_INT(raw_lock(&t, SHARE_BYTE(7), F_RDLCK), -EAGAIN);
    gd_locks_unlock_shared(t.a, 7);
    CHECK_INT(raw_lock(&t, SHARE_BYTE(7), F_RDLCK), -EAGAIN);
    CHECK(strcmp(err.text, "as it was") == 0);
    gd_locks_unlock_exclusive(t.b, 7); /* not its own */
    CHECK_INT(raw_lock(&t, SHARE_BYTE(7), F_RDLCK), -EAGAIN);
    gd_locks_unlock_exclusive(t.a, 7);
    gd_locks_unlock_exclusive(t.a, 7);
    CHECK(is_free(&t, SHARE_BYTE(7)));
    CHECK_INT(gd_locks_lock_shared(t.a, 7, &err), GD_OK);
}

/* The exclusive lock is refused if this process shares the group: the kernel
 * would convert the one into the other. */
TEST_WITH(test_exclude_is_refused, setup(&t), teardown(&t))
{
    CHECK_INT(gd_locks_lock_shared(t.a, 7, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_shared(t.a, 7, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_exclusive(t.a, 7, NULL), GD_BUSY);
    CHECK_INT(gd_locks_lock_exclusive(t.b, 7, NULL), GD_BUSY);
    CHECK_INT(raw_lock(&t, SHARE_BYTE(7), F_RDLCK), 0); /* unchanged: shared */
    raw_lock(&t, SHARE_BYTE(7), F_UNLCK);
    gd_locks_unlock_shared(t.a, 7);
    CHECK_INT(gd_locks_lock_exclusive(t.a, 7, NULL), GD_BUSY);
    gd_locks_unlock_shared(t.a, 7);
    CHECK_INT(gd_locks_lock_shared(t.b, 7, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_exclusive(t.a, 7, NULL), GD_BUSY);
    gd_locks_unlock_shared(t.b, 7);
    CHECK_INT(gd_locks_lock_exclusive(t.a, 7, NULL), GD_OK);
}

TEST_WITH(test_announce, setup(&t), teardown(&t))
{
    CHECK_INT(gd_locks_lock_shared(t.b, 7, NULL), GD_OK);
    CHECK_INT(gd_locks_announce(t.a, 7, NULL), GD_OK);
    CHECK_INT(gd_locks_announce(t.a, 7, NULL), GD_BUSY);
    CHECK_INT(gd_locks_announce(t.b, 7, NULL), GD_BUSY);
    CHECK_INT(gd_locks_lock_shared(t.b, 7, NULL), GD_BUSY);
    CHECK_INT(gd_locks_lock_shared(t.a, 7, NULL), GD_BUSY);
    CHECK_INT(raw_lock(&t, INTENT_BYTE(7), F_RDLCK), -EAGAIN); /* still */
    CHECK_INT(gd_locks_lock_shared(t.a, 6, NULL), GD_OK);
    /* The handle with the intent gets the lock when the last sharer has
     * left. */
    CHECK_INT(gd_locks_lock_exclusive(t.a, 7, NULL), GD_BUSY);
    gd_locks_unlock_shared(t.b, 7);
    CHECK_INT(gd_locks_lock_exclusive(t.a, 7, NULL), GD_OK);
    gd_locks_withdraw(t.b, 7); /* not its own */
    CHECK(!is_free(&t, INTENT_BYTE(7)));
    gd_locks_withdraw(t.a, 7);
    gd_locks_withdraw(t.a, 7);
    CHECK(is_free(&t, INTENT_BYTE(7)) && !is_free(&t, SHARE_BYTE(7)));
    for (uint32_t i = 1; i < 200; i++) {
        CHECK_INT(gd_locks_announce(t.a, i, NULL), GD_OK);
    }
    CHECK_INT(gd_locks_announce(t.b, 300, NULL), GD_OK);
    gd_locks_withdraw_all(t.a);
    for (uint32_t i = 1; i < 200; i++) {
        CHECK(is_free(&t, INTENT_BYTE(i)));
    }
    CHECK(!is_free(&t, INTENT_BYTE(300)));
    CHECK_INT(gd_locks_announce(t.b, 7, NULL), GD_OK);
}

static int
lock_and_replace(const gd_env *env, int fd, uint64_t byte, short type)
{
    (void)env;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    char name[4096];
    ssize_t length = readlink(path, name, sizeof name - 1);
    if (CHECK(length > 0)) {
        name[length] = '\0';
        CHECK_INT(unlink(name), 0);
        close(open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    }
    return gd_env_posix()->lock(gd_env_posix(), fd, byte, type);
}

/* I4: a later process would lock the other file. */
TEST_WITH(test_maintainer_lock_of_a_file_that_was_replaced, setup(&t),
          teardown(&t))
{
    gd_error err;
    int fd;
    t.x.f.env.lock = lock_and_replace;
    CHECK_INT(gd_locks_lock_maintainer(t.x.env, t.x.root, &fd, &err), GD_BUSY);
    CHECK_INT(fd, -1);
}

TEST_WITH(test_look_for_intent, setup(&t), teardown(&t))
{
    CHECK_INT(gd_locks_require_no_intent(t.a, 4, NULL), GD_OK);
    CHECK_INT(gd_locks_announce(t.b, 4, NULL), GD_OK);
    CHECK_INT(gd_locks_require_no_intent(t.a, 4, NULL), GD_BUSY);
    CHECK_INT(gd_locks_require_no_intent(t.a, 5, NULL), GD_OK);
    CHECK_INT(gd_locks_require_no_intent(t.b, 4, NULL), GD_BUSY);
    /* While it has the lock, its own intent does not stop it. */
    CHECK_INT(gd_locks_lock_exclusive(t.b, 4, NULL), GD_OK);
    CHECK_INT(gd_locks_require_no_intent(t.b, 4, NULL), GD_OK);
    CHECK_INT(gd_locks_require_no_intent(t.a, 4, NULL), GD_BUSY);
    gd_locks_withdraw(t.b, 4);
    CHECK_INT(gd_locks_require_no_intent(t.a, 4, NULL), GD_OK);
    /* The query leaves no lock. */
    CHECK_INT(gd_locks_announce(t.b, 4, NULL), GD_OK);
}

TEST_WITH(test_confirm, setup(&t), teardown(&t))
{
    CHECK_INT(gd_locks_lease(t.a, 4, NULL), GD_OK);
    CHECK_INT(gd_locks_revalidate(t.a, 4, NULL), GD_OK);
    CHECK_INT(gd_locks_lease(t.b, 4, NULL), GD_BUSY);
    gd_locks_unlease(t.a, 4); /* as a server that drops it */
    CHECK_INT(gd_locks_lease(t.b, 4, NULL), GD_OK);
    CHECK_INT(gd_locks_revalidate(t.a, 4, NULL), GD_BUSY);
    /* The exclusive lock is revalidated, too, if it was taken. */
    CHECK_INT(gd_locks_lease(t.a, 5, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_exclusive(t.a, 5, NULL), GD_OK);
    CHECK_INT(gd_locks_revalidate(t.a, 5, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_shared(t.b, 5, NULL), GD_BUSY);
    scratch_drop_locks();
    CHECK_INT(gd_locks_lock_shared(t.b, 5, NULL), GD_OK);
    CHECK_INT(gd_locks_revalidate(t.a, 5, NULL), GD_BUSY);
}

/* This also holds for a process that assumes that it has the lock. */
TEST_WITH(test_share_after_locks_were_lost, setup(&t), teardown(&t))
{
    CHECK_INT(gd_locks_lock_shared(t.a, 4, NULL), GD_OK);
    scratch_drop_locks();
    CHECK_INT(gd_locks_lock_exclusive(t.b, 4, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_shared(t.a, 4, NULL), GD_BUSY);
    gd_locks_unlock_exclusive(t.b, 4);
    CHECK_INT(gd_locks_lock_shared(t.a, 4, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_exclusive(t.b, 4, NULL), GD_BUSY);
}

TEST_WITH(test_maintainer_lock, setup(&t), teardown(&t))
{
    gd_error err;
    struct stat st;
    int one, two;
    CHECK_INT(gd_locks_lock_maintainer(t.x.env, t.x.root, &one, &err), GD_OK);
    CHECK_INT(fstatat(t.x.root, GD_FILE_MAINTAINER_LOCK, &st, 0), 0);
    CHECK_INT(st.st_mode & 0777, 0600);
    CHECK_INT(gd_locks_lock_maintainer(t.x.env, t.x.root, &two, &err),
              GD_BUSY);
    CHECK_INT(two, -1);
    int raw = openat(t.x.root, GD_FILE_MAINTAINER_LOCK, O_RDWR | O_CLOEXEC);
    const gd_env *env = gd_env_posix();
    CHECK_INT(env->lock(env, raw, 0, F_RDLCK), -EAGAIN);
    CHECK_INT(env->lock(env, raw, 1, F_WRLCK), 0);
    close(raw);
    t.x.env->close(t.x.env, one);
    CHECK_INT(gd_locks_lock_maintainer(t.x.env, t.x.root, &two, &err), GD_OK);
    t.x.env->close(t.x.env, two);
    fault_env_fail(&t.x.f, FAULT_LOCK, 1, ENOLCK, false);
    CHECK_INT(gd_locks_lock_maintainer(t.x.env, t.x.root, &two, &err), GD_IO);
    CHECK_CONTAINS(err.text, "locks/maintainer");
    CHECK_INT(unlinkat(t.x.root, GD_FILE_MAINTAINER_LOCK, 0), 0);
    CHECK_INT(symlinkat("../elsewhere", t.x.root, GD_FILE_MAINTAINER_LOCK), 0);
    CHECK_INT(gd_locks_lock_maintainer(t.x.env, t.x.root, &two, &err), GD_IO);
    CHECK(!scratch_exists(&t.x, "elsewhere"));
}

/* Sends one character, and waits until it is killed. */
static void
tell_and_wait(int to, bool good)
{
    char word = good ? 'y' : 'n';
    if (write(to, &word, 1) == 1) {
        pause();
    }
    _exit(1);
}

/* Another process sees the locks that are held here, and its own go with
 * it. */
TEST(test_across_processes)
{
    fixture t;
    int pipes[2];
    char word = 0;
    setup(&t);
    CHECK_INT(gd_locks_lease(t.a, 3, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_shared(t.a, 3, NULL), GD_OK);
    REQUIRE(pipe(pipes) == 0);
    pid_t child = fork();
    if (child == 0) {
        gd_locks *own;
        bool good = gd_locks_open(t.x.env, t.x.root, &own, NULL) == GD_OK &&
                    gd_locks_lease(own, 3, NULL) == GD_BUSY &&
                    gd_locks_lock_shared(own, 3, NULL) == GD_OK &&
                    gd_locks_lease(own, 4, NULL) == GD_OK;
        tell_and_wait(pipes[1], good);
    }
    CHECK_INT(read(pipes[0], &word, 1), 1);
    CHECK_INT(word, 'y');
    CHECK_INT(gd_locks_lease(t.a, 4, NULL), GD_BUSY);
    gd_locks_unlock_shared(t.a, 3);
    CHECK(!is_free(&t, SHARE_BYTE(3)));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    CHECK(is_free(&t, SHARE_BYTE(3)));
    CHECK_INT(gd_locks_lease(t.a, 4, NULL), GD_OK);
    close(pipes[0]);
    close(pipes[1]);
    teardown(&t);
}

/* ---- the image lock ---- */

static unsigned slept_ms;

static void
count_sleep(const gd_env *env, unsigned ms)
{
    (void)env;
    slept_ms += ms;
}

TEST_WITH(test_image_lock, setup(&t), teardown(&t))
{
    gd_error err;
    int one, two, three;
    t.x.f.env.sleep_ms = count_sleep;
    CHECK_INT(gd_locks_lock_image(t.x.env, t.x.root, "image-1", 0, &one, &err),
              GD_OK);
    CHECK_INT(gd_locks_lock_image(t.x.env, t.x.root, "image-1", 60, &two,
                                  &err),
              GD_BUSY);
    CHECK_CONTAINS(err.text, "image-1");
    CHECK_CONTAINS(err.text, "60 ms");
    CHECK_INT(two, -1);
    CHECK_INT(slept_ms, 60);
    CHECK_INT(gd_locks_lock_image(t.x.env, t.x.root, "image-2", 0, &three,
                                  &err),
              GD_OK);
    /* XXH3-64 of the id, shifted right by 2. */
    const gd_env *env = gd_env_posix();
    int raw = openat(t.x.root, GD_FILE_IMAGE_LOCKS, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->lock(env, raw, UINT64_C(2441164120403282042), F_RDLCK),
              -EAGAIN);
    gd_locks_unlock_image(t.x.env, one);
    CHECK_INT(env->lock(env, raw, UINT64_C(2441164120403282042), F_WRLCK), 0);
    CHECK_INT(gd_locks_lock_image(t.x.env, t.x.root, "image-1", 0, &two, &err),
              GD_BUSY);
    close(raw);
    CHECK_INT(gd_locks_lock_image(t.x.env, t.x.root, "image-1", 0, &two, &err),
              GD_OK);
    gd_locks_unlock_image(t.x.env, two);
    gd_locks_unlock_image(t.x.env, three);
}

static int sleeps;
static int sleeper_holds;

/* The holder releases the lock while the other waits for the third time. */
static void
sleep_and_let_go(const gd_env *env, unsigned ms)
{
    (void)ms;
    if (++sleeps == 3) {
        gd_locks_unlock_image(env, sleeper_holds);
    }
}

TEST_WITH(test_image_lock_is_waited_for, setup(&t), teardown(&t))
{
    gd_error err;
    int fd;
    sleeps = 0;
    t.x.f.env.sleep_ms = sleep_and_let_go;
    CHECK_INT(gd_locks_lock_image(t.x.env, t.x.root, "i", 0, &sleeper_holds,
                                  &err),
              GD_OK);
    CHECK_INT(sleeps, 0);
    CHECK_INT(gd_locks_lock_image(t.x.env, t.x.root, "i", 1000, &fd, &err),
              GD_OK);
    CHECK_INT(sleeps, 3);
    gd_locks_unlock_image(t.x.env, fd);
}

/* A look-up of a volume shares the byte, and keeps a rename out. */
TEST(test_names_lock)
{
    const gd_env *env = gd_env_posix();
    const uint64_t byte = UINT64_C(1) << 62;
    fixture t;
    gd_error err;
    int fd;
    setup(&t);
    int raw = openat(t.x.root, GD_FILE_IMAGE_LOCKS, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->lock(env, raw, byte, F_RDLCK), 0);
    CHECK_INT(gd_locks_lock_names(t.x.env, t.x.root, 20, &fd, &err), GD_BUSY);
    CHECK_CONTAINS(err.text, "20 ms");
    CHECK_INT(fd, -1);
    CHECK_INT(env->lock(env, raw, byte, F_UNLCK), 0);
    CHECK_INT(gd_locks_lock_names(t.x.env, t.x.root, 0, &fd, &err), GD_OK);
    CHECK_INT(env->lock(env, raw, byte, F_RDLCK), -EAGAIN);
    t.x.env->close(t.x.env, fd);
    CHECK_INT(env->lock(env, raw, byte, F_RDLCK), 0);
    close(raw);
    teardown(&t);
}

/* ---- failures ---- */

/* ---- the feature bytes ---- */

TEST_WITH(test_feature_byte_is_shared, setup(&t), teardown(&t))
{
    CHECK_INT(gd_locks_lock_features_shared(t.a, 3, NULL), GD_OK);
    CHECK_INT(gd_locks_lock_features_shared(t.b, 3, NULL), GD_OK);
    CHECK_INT(raw_lock(&t, FEATURE_BYTE(3), F_RDLCK), 0); /* shared */
    raw_lock(&t, FEATURE_BYTE(3), F_UNLCK);
    CHECK(!is_free(&t, FEATURE_BYTE(3)));
    CHECK(is_free(&t, FEATURE_BYTE(2)) && is_free(&t, FEATURE_BYTE(4)));
    gd_locks_close(t.b);
    CHECK(!is_free(&t, FEATURE_BYTE(3)));
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &t.b, NULL), GD_OK);
    CHECK_INT(raw_lock(&t, FEATURE_BYTE(2), F_WRLCK), 0);
    gd_error err = {.text = "as it was"};
    CHECK_INT(gd_locks_lock_features_shared(t.b, 2, &err), GD_BUSY);
    CHECK(strcmp(err.text, "as it was") == 0);
}

/* Programs that know f features or fewer do not know feature number f. */
TEST_WITH(test_excluding_a_feature, setup(&t), teardown(&t))
{
    gd_error err = {.text = "as it was"};
    CHECK_INT(gd_locks_lock_features_shared(t.a, 3, &err), GD_OK);
    CHECK_INT(gd_locks_lock_features_shared(t.b, 3, &err), GD_OK);
    CHECK_INT(gd_locks_lock_features_exclusive(t.a, 2, &err), GD_OK);
    for (unsigned known = 0; known <= 2; known++) {
        CHECK_INT(raw_lock(&t, FEATURE_BYTE(known), F_RDLCK), -EAGAIN);
    }
    CHECK(is_free(&t, FEATURE_BYTE(4)));
    CHECK_INT(raw_lock(&t, FEATURE_BYTE(3), F_RDLCK), 0); /* still shared */
    raw_lock(&t, FEATURE_BYTE(3), F_UNLCK);
    CHECK_INT(gd_locks_lock_features_shared(t.b, 2, &err), GD_BUSY);
    CHECK_INT(gd_locks_lock_features_exclusive(t.b, 0, &err), GD_BUSY);
    gd_locks_unlock_features_exclusive(t.a, 2);
    for (unsigned known = 0; known <= 2; known++) {
        CHECK(is_free(&t, FEATURE_BYTE(known)));
    }
    CHECK(!is_free(&t, FEATURE_BYTE(3)));
    /* A program of each age runs alone: only its own byte stays locked. */
    for (unsigned old = 0; old <= 2; old++) {
        CHECK_INT(raw_lock(&t, FEATURE_BYTE(old), F_RDLCK), 0);
        CHECK_INT(gd_locks_lock_features_exclusive(t.a, 2, &err), GD_BUSY);
        CHECK_INT(raw_lock(&t, FEATURE_BYTE(old), F_UNLCK), 0);
        for (unsigned known = 0; known <= 2; known++) {
            CHECK(is_free(&t, FEATURE_BYTE(known)));
        }
    }
    /* That program knows the feature of number 1. */
    CHECK_INT(raw_lock(&t, FEATURE_BYTE(2), F_RDLCK), 0);
    CHECK_INT(gd_locks_lock_features_exclusive(t.a, 1, &err), GD_OK);
    CHECK(strcmp(err.text, "as it was") == 0);
}

static int
hold_features(const fixture *t)
{
    int go[2];
    CHECK_INT(pipe(go), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        gd_locks *mine;
        gd_error err;
        if (gd_locks_open(t->x.env, t->x.root, &mine, &err) != GD_OK ||
            gd_locks_lock_features_shared(mine, 1, &err) != GD_OK ||
            write(go[1], "x", 1) != 1) {
            _exit(1);
        }
        alarm(60);
        for (;;) {
            pause();
        }
    }
    char byte;
    CHECK_INT(read(go[0], &byte, 1), 1);
    close(go[0]);
    close(go[1]);
    return child;
}

/* A killed process releases its byte; a forked child that closes inherited
 * files does not. */
TEST_WITH(test_feature_byte_across_processes, setup(&t), teardown(&t))
{
    int status;
    pid_t child = hold_features(&t);
    CHECK_INT(gd_locks_lock_features_exclusive(t.a, 1, NULL), GD_BUSY);
    CHECK_INT(kill(child, SIGKILL), 0);
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(gd_locks_lock_features_exclusive(t.a, 1, NULL), GD_OK);
    gd_locks_unlock_features_exclusive(t.a, 1);
    CHECK_INT(gd_locks_lock_features_shared(t.a, 1, NULL), GD_OK);
    fflush(NULL);
    child = fork();
    if (child == 0) {
        for (int fd = 3; fd < 256; fd++) {
            close(fd);
        }
        _exit(0);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(gd_locks_lock_features_exclusive(t.b, 1, NULL), GD_BUSY);
}

/* Each handle holds the byte of its program while it is open. */
TEST_WITH(test_a_handle_holds_its_features, setup(&t), teardown(&t))
{
    gd_repo *one, *two;
    one = scratch_repo(&t.x);
    two = scratch_repo(&t.x);
    CHECK(!is_free(&t, FEATURE_BYTE(GD_FEATURE_COUNT)));
    CHECK(is_free(&t, FEATURE_BYTE(GD_FEATURE_COUNT - 1)) &&
          is_free(&t, FEATURE_BYTE(GD_FEATURE_COUNT + 1)));
    gd_repo_close(one);
    CHECK(!is_free(&t, FEATURE_BYTE(GD_FEATURE_COUNT)));
    gd_repo_close(two);
    CHECK(is_free(&t, FEATURE_BYTE(GD_FEATURE_COUNT)));
    /* While a newer program sets a feature, this one is refused, and does not
     * wait. */
    CHECK_INT(raw_lock(&t, FEATURE_BYTE(GD_FEATURE_COUNT), F_WRLCK), 0);
    CHECK_INT(scratch_try_repo(&t.x, false, &one), GD_BUSY);
    CHECK_CONTAINS(t.x.err.text, t.x.dir);
    CHECK_CONTAINS(t.x.err.text, "a feature that this program does not know");
    raw_lock(&t, FEATURE_BYTE(GD_FEATURE_COUNT), F_UNLCK);
    fault_env_fail(&t.x.f, FAULT_LOCK, 1, ENOLCK, false);
    CHECK_INT(scratch_try_repo(&t.x, false, &one), GD_IO);
    CHECK_CONTAINS(t.x.err.text, "locks/groups");
}

TEST_WITH(test_failures, setup(&t), teardown(&t))
{
    gd_error err;
    gd_locks *c;
    int fd;
    fault_env_fail(&t.x.f, FAULT_LOCK, 1, ENOLCK, true);
    CHECK_INT(gd_locks_lock_shared(t.a, 3, &err), GD_IO);
    CHECK_CONTAINS(err.text, "locks/groups");
    CHECK_INT(gd_locks_lease(t.a, 3, &err), GD_IO);
    CHECK_INT(gd_locks_lock_exclusive(t.a, 3, &err), GD_IO);
    CHECK_INT(gd_locks_announce(t.a, 3, &err), GD_IO);
    CHECK_INT(gd_locks_lock_features_shared(t.a, 3, &err), GD_IO);
    CHECK_INT(gd_locks_lock_features_exclusive(t.a, 2, &err), GD_IO);
    CHECK_INT(gd_locks_lock_image(t.x.env, t.x.root, "i", 50, &fd, &err),
              GD_IO);
    CHECK_CONTAINS(err.text, "image i");
    fault_env_heal(&t.x.f);
    CHECK_INT(gd_locks_lock_shared(t.a, 3, &err), GD_OK);
    CHECK_INT(gd_locks_lease(t.a, 3, &err), GD_OK);
    fault_env_fail(&t.x.f, FAULT_ALLOC, 1, ENOMEM, true);
    CHECK_INT(gd_locks_lock_shared(t.b, 3, &err), GD_NOMEM);
    CHECK_INT(gd_locks_lease(t.b, 4, &err), GD_NOMEM);
    CHECK_INT(gd_locks_lock_exclusive(t.b, 4, &err), GD_NOMEM);
    CHECK_INT(gd_locks_announce(t.b, 4, &err), GD_NOMEM);
    gd_locks_unlock_shared(t.a, 3);
    gd_locks_unlease(t.a, 3);
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &c, &err), GD_NOMEM);
    fault_env_heal(&t.x.f);
    CHECK(is_free(&t, 3) && is_free(&t, 4) && is_free(&t, SHARE_BYTE(3)));
    CHECK_INT(renameat(t.x.root, GD_FILE_GROUP_LOCKS, t.x.root, "elsewhere"),
              0);
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &c, &err), GD_IO);
    CHECK_CONTAINS(err.text, "locks/groups is missing");
    CHECK_INT(symlinkat("../elsewhere", t.x.root, GD_FILE_GROUP_LOCKS), 0);
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &c, &err), GD_IO);
}
