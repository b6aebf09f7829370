/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_sharedfile.c - files are used or replaced, and of many creators one
 * wins.
 */
#include "engine/base/sharedfile.h"

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum { SIZE = 100032, HEAD = 64, CREATION_LOCK = 1 };

typedef struct fixture {
    fault_env f;
    const gd_env *env; /* its table */
    char *dir;
    char path[256];
    char temporary[256];
    char other[256];
    uint8_t head[HEAD];
    gd_error err;
} fixture;

static void
setup(fixture *x)
{
    memset(x, 0, sizeof *x);
    fault_env_init(&x->f);
    x->env = &x->f.env;
    x->dir = check_mkdir_shm();
    snprintf(x->path, sizeof x->path, "%s/shared", x->dir);
    snprintf(x->temporary, sizeof x->temporary, "%s/shared.new", x->dir);
    snprintf(x->other, sizeof x->other, "%s/other", x->dir);
    for (unsigned i = 0; i < HEAD; i++) {
        x->head[i] = (uint8_t)(i + 1);
    }
}

static void
teardown(fixture *x)
{
    CHECK_INT(fault_env_leaks(&x->f), 0);
    fault_env_destroy(&x->f);
    check_rmdir(x->dir);
}

static gd_status
open_it(fixture *x, int *fd)
{
    return gd_sharedfile_open(x->env, x->path, x->head, HEAD, SIZE, fd,
                              &x->err);
}

static bool
exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

/* Opens, checks that the file is whole, sets a mark behind its head, and
 * closes. Returns true if it had the mark, so if it was there before. */
static bool
open_and_mark(fixture *x)
{
    int fd;
    uint8_t mark = 0, head[HEAD];
    struct stat st;
    if (!CHECK_INT(open_it(x, &fd), GD_OK)) {
        fprintf(stderr, "%s\n", x->err.text);
        return false;
    }
    CHECK_INT(fstat(fd, &st), 0);
    CHECK_INT(st.st_size, SIZE);
    CHECK(st.st_blocks * 512 >= SIZE);
    CHECK_INT(st.st_mode & 0777, 0600);
    CHECK_INT(st.st_uid, geteuid());
    CHECK(gd_same_file(gd_env_posix(), fd, AT_FDCWD, x->path));
    CHECK_INT(pread(fd, head, HEAD, 0), HEAD);
    CHECK(memcmp(head, x->head, HEAD) == 0);
    CHECK_INT(pread(fd, &mark, 1, SIZE - 1), 1);
    CHECK_INT(pwrite(fd, "M", 1, SIZE - 1), 1);
    x->env->close(x->env, fd);
    CHECK(!exists(x->temporary));
    return mark == 'M';
}

static fixture x;

TEST_WITH(test_made_once_then_opened, setup(&x), teardown(&x))
{
    CHECK(!open_and_mark(&x));
    CHECK(open_and_mark(&x));
    CHECK(open_and_mark(&x));
}

/* Writes into the existing file. */
static void
scribble(const fixture *x, const void *data, size_t len, off_t offset)
{
    int fd = open(x->path, O_RDWR);
    CHECK(fd >= 0);
    CHECK_INT(pwrite(fd, data, len, offset), (ssize_t)len);
    close(fd);
}

TEST_WITH(test_any_other_head_is_replaced, setup(&x), teardown(&x))
{
    open_and_mark(&x);
    for (unsigned i = 0; i < HEAD; i++) {
        uint8_t wrong = x.head[i] ^ 0x10;
        scribble(&x, &wrong, 1, i);
        CHECK(!open_and_mark(&x));
        CHECK(open_and_mark(&x));
    }
    x.head[20]++; /* another creator needs another head */
    CHECK(!open_and_mark(&x));
}

TEST_WITH(test_any_other_size_is_replaced, setup(&x), teardown(&x))
{
    static const off_t sizes[] = {0, 1, HEAD - 1, HEAD, 4096, SIZE - 1,
                                  SIZE + 1, 10 * SIZE};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        open_and_mark(&x);
        CHECK_INT(truncate(x.path, sizes[i]), 0);
        CHECK(!open_and_mark(&x));
    }
}

TEST_WITH(test_holes_are_replaced, setup(&x), teardown(&x))
{
    open_and_mark(&x);
    CHECK_INT(truncate(x.path, HEAD), 0);
    CHECK_INT(truncate(x.path, SIZE), 0);
    scribble(&x, "M", 1, SIZE - 1);
    CHECK(!open_and_mark(&x));
}

TEST_WITH(test_writable_by_others_is_replaced, setup(&x), teardown(&x))
{
    open_and_mark(&x);
    CHECK_INT(chmod(x.path, 0620), 0);
    CHECK(!open_and_mark(&x));
    CHECK_INT(chmod(x.path, 0602), 0);
    CHECK(!open_and_mark(&x));
}

static uid_t
stranger(const gd_env *env)
{
    (void)env;
    return geteuid() + 1;
}

static void
sleep_not(const gd_env *env, unsigned ms)
{
    (void)env, (void)ms;
}

/* Giving a file away needs root; pretending to be another user is easier. */
TEST_WITH(test_of_another_user_is_replaced, setup(&x), teardown(&x))
{
    int fd;
    open_and_mark(&x);
    if (geteuid() == 0) {
        CHECK_INT(chown(x.path, 65534, 65534), 0);
        CHECK(!open_and_mark(&x));
    }
    /* No file is ever this user's: the call gives up, and leaves no file. */
    x.f.env.geteuid = stranger;
    x.f.env.sleep_ms = sleep_not;
    CHECK_INT(open_it(&x, &fd), GD_BUSY);
    CHECK(!exists(x.temporary));
}

TEST_WITH(test_symbolic_link_is_replaced, setup(&x), teardown(&x))
{
    open_and_mark(&x);
    CHECK_INT(rename(x.path, x.other), 0);
    CHECK_INT(symlink(x.other, x.path), 0);
    CHECK(!open_and_mark(&x));
    struct stat st;
    CHECK_INT(lstat(x.path, &st), 0);
    CHECK(S_ISREG(st.st_mode));
    CHECK(exists(x.other));
}

TEST_WITH(test_fifo_is_replaced, setup(&x), teardown(&x))
{
    alarm(60); /* opening one may wait for its other end */
    CHECK_INT(mkfifo(x.path, 0600), 0);
    CHECK(!open_and_mark(&x));
    alarm(0);
}

TEST_WITH(test_directory_is_an_error, setup(&x), teardown(&x))
{
    int fd;
    CHECK_INT(mkdir(x.path, 0700), 0);
    CHECK_INT(open_it(&x, &fd), GD_IO);
    CHECK_INT(fd, -1);
    CHECK_CONTAINS(x.err.text, x.path);
    CHECK_INT(rmdir(x.path), 0);
    CHECK_INT(rmdir(x.dir), 0);
    CHECK_INT(open_it(&x, &fd), GD_NOTFOUND);
}

static void
make_temporary(const fixture *x, off_t size)
{
    int fd = open(x->temporary, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(fd >= 0);
    CHECK_INT(pwrite(fd, "garbage", 7, 0), 7);
    CHECK_INT(ftruncate(fd, size), 0);
    close(fd);
}

TEST_WITH(test_takes_over_from_a_dead_creator, setup(&x), teardown(&x))
{
    make_temporary(&x, 7);
    CHECK(!open_and_mark(&x));
    CHECK_INT(unlink(x.path), 0);
    make_temporary(&x, 20 * SIZE);
    CHECK(!open_and_mark(&x));
    CHECK_INT(unlink(x.path), 0);
    CHECK_INT(symlink(x.other, x.temporary), 0);
    CHECK(!open_and_mark(&x));
    CHECK(!exists(x.other));
    CHECK_INT(unlink(x.path), 0);
    CHECK_INT(mkfifo(x.temporary, 0600), 0);
    CHECK(!open_and_mark(&x));
}

/* The steps of another creator while we wait. */
static fixture *waiting;
static int waits;
static int other_fd;

static void
sleep_while_other_works(const gd_env *env, unsigned ms)
{
    (void)env, (void)ms;
    if (++waits == 3) { /* it completes the file */
        const gd_env *real = gd_env_posix();
        CHECK_INT(ftruncate(other_fd, 0), 0);
        CHECK_INT(real->fallocate(real, other_fd, 0, SIZE), 0);
        CHECK_INT(pwrite(other_fd, waiting->head, HEAD, 0), HEAD);
        CHECK_INT(pwrite(other_fd, "M", 1, SIZE - 1), 1);
        CHECK_INT(rename(waiting->temporary, waiting->path), 0);
        close(other_fd);
    }
}

static void
lock_as_other(const fixture *x)
{
    make_temporary(x, 7);
    other_fd = open(x->temporary, O_RDWR);
    CHECK(other_fd >= 0);
    const gd_env *real = gd_env_posix();
    CHECK_INT(real->lock(real, other_fd, CREATION_LOCK, F_WRLCK), 0);
}

TEST_WITH(test_waits_for_another_creator, setup(&x), teardown(&x))
{
    waiting = &x;
    waits = 0;
    lock_as_other(&x);
    x.f.env.sleep_ms = sleep_while_other_works;
    CHECK(open_and_mark(&x)); /* the other's file */
    CHECK_INT(waits, 3);
}

TEST_WITH(test_gives_up_waiting, setup(&x), teardown(&x))
{
    int fd;
    lock_as_other(&x);
    x.f.env.sleep_ms = sleep_not;
    CHECK_INT(open_it(&x, &fd), GD_BUSY);
    CHECK_CONTAINS(x.err.text, x.path);
    CHECK(exists(x.temporary)); /* still the other's */
    close(other_fd);
    CHECK(!open_and_mark(&x));
}

/* Another creator does all of its work just before a call of ours. */
static void
create_as_other(const uint8_t head[HEAD])
{
    gd_error err;
    CHECK_INT(gd_sharedfile_open(gd_env_posix(), waiting->path, head, HEAD,
                                 SIZE, &other_fd, &err),
              GD_OK);
    CHECK_INT(pwrite(other_fd, "M", 1, SIZE - 1), 1);
}

static uint8_t other_head[HEAD];

static int
lock_too_late(const gd_env *env, int fd, uint64_t byte, short type)
{
    (void)env;
    const gd_env *real = gd_env_posix();
    if (waits++ == 0) {
        create_as_other(other_head);
    }
    return real->lock(real, fd, byte, type);
}

/* The PATH.new that we lock is PATH by then, in use by the other one. The
 * other one needed another head, so that we replace it; but its own file stays
 * whole. */
TEST(test_other_is_done_before_the_lock)
{
    fixture x;
    uint8_t mark = 0;
    setup(&x);
    waiting = &x;
    waits = 0;
    memset(other_head, 'o', HEAD);
    x.f.env.lock = lock_too_late;
    CHECK(!open_and_mark(&x));
    CHECK_INT(pread(other_fd, &mark, 1, SIZE - 1), 1);
    CHECK_INT(mark, 'M');
    CHECK_INT(pread(other_fd, &mark, 1, 0), 1);
    CHECK_INT(mark, 'o');
    close(other_fd);
    teardown(&x);
}

static int (*counted_openat)(const gd_env *env, int dir, const char *path,
                             int flags, mode_t mode);

static int
open_too_late(const gd_env *env, int dir, const char *path, int flags,
              mode_t mode)
{
    if ((flags & O_CREAT) != 0 && waits++ == 0) {
        create_as_other(waiting->head);
        close(other_fd);
    }
    return counted_openat(env, dir, path, flags, mode);
}

TEST_WITH(test_other_is_done_before_the_open, setup(&x), teardown(&x))
{
    waiting = &x;
    waits = 0;
    counted_openat = x.f.env.openat;
    x.f.env.openat = open_too_late;
    CHECK(open_and_mark(&x));
    CHECK_INT(waits, 1);
}

TEST_WITH(test_no_room, setup(&x), teardown(&x))
{
    int fd;
    fault_env_fail(&x.f, FAULT_FALLOCATE, 1, ENOSPC, true);
    CHECK_INT(open_it(&x, &fd), GD_NOSPACE);
    CHECK_INT(fd, -1);
    CHECK_CONTAINS(x.err.text, x.path);
    CHECK(!exists(x.path));
    CHECK(!exists(x.temporary));
    fault_env_heal(&x.f);
    CHECK(!open_and_mark(&x));
}

TEST_WITH(test_interrupted_and_short, setup(&x), teardown(&x))
{
    fault_env_interrupt(&x.f, 2);
    fault_env_shorten(&x.f, 5);
    CHECK(!open_and_mark(&x));
    CHECK(open_and_mark(&x));
    fault_env_heal(&x.f);
}

/* Each call of creating, or of replacing, fails in turn. */
static void
check_every_fault(fixture *x, fault_call kind, bool replace, bool forever)
{
    x->f.env.sleep_ms = sleep_not;
    for (uint64_t nth = 1;; nth++) {
        int fd;
        unlink(x->path);
        if (replace) {
            CHECK_INT(symlink("nowhere", x->path), 0);
        }
        uint64_t faults = fault_env_faults(&x->f);
        fault_env_fail(&x->f, kind, nth, EIO, forever);
        gd_status s = open_it(x, &fd);
        bool failed = fault_env_faults(&x->f) > faults;
        fault_env_heal(&x->f);
        CHECK(failed || s == GD_OK);
        if (s == GD_OK) {
            x->env->close(x->env, fd);
        } else {
            CHECK_INT(fd, -1);
            CHECK(strlen(x->err.text) > 0);
        }
        CHECK_INT(fault_env_leaks(&x->f), 0);
        open_and_mark(x);
        if (!failed) {
            CHECK(nth > (kind == FAULT_ALLOC ? 1 : 5));
            return;
        }
    }
}

TEST_WITH(test_every_call_fails, setup(&x), teardown(&x))
{
    for (int replace = 0; replace < 2; replace++) {
        check_every_fault(&x, FAULT_ANY, replace, false);
        check_every_fault(&x, FAULT_ANY, replace, true);
        check_every_fault(&x, FAULT_ALLOC, replace, false);
    }
}

/* Opens, and adds one to a byte of its own. Exits with 0 on success. */
static void
race_child(const fixture *x, int number)
{
    gd_error err;
    int fd;
    alarm(60);
    if (gd_sharedfile_open(gd_env_posix(), x->path, x->head, HEAD, SIZE, &fd,
                           &err) != GD_OK) {
        fprintf(stderr, "%s\n", err.text);
        _exit(1);
    }
    _exit(pwrite(fd, "M", 1, HEAD + number) == 1 ? 0 : 1);
}

/* With no file, or one to be replaced, all processes come to use one file. */
static void
check_race(fixture *x, bool replace)
{
    enum { CHILDREN = 8 };
    pid_t children[CHILDREN];
    unlink(x->path);
    if (replace) {
        FILE *old = fopen(x->path, "w");
        REQUIRE(old != NULL);
        fputs("old", old);
        fclose(old);
    }
    for (int i = 0; i < CHILDREN; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            race_child(x, i);
        }
    }
    for (int i = 0; i < CHILDREN; i++) {
        int status = -1;
        CHECK_INT(waitpid(children[i], &status, 0), children[i]);
        CHECK_INT(status, 0);
    }
    int fd;
    uint8_t marks[CHILDREN];
    CHECK_INT(open_it(x, &fd), GD_OK);
    CHECK_INT(pread(fd, marks, CHILDREN, HEAD), CHILDREN);
    for (int i = 0; i < CHILDREN; i++) {
        CHECK_INT(marks[i], 'M');
    }
    x->env->close(x->env, fd);
    CHECK(!exists(x->temporary));
}

TEST_WITH(test_many_processes_at_once, setup(&x), teardown(&x))
{
    for (int round = 0; round < 25; round++) {
        check_race(&x, round % 2);
    }
}
