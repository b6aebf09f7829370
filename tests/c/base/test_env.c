/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_env.c - the loops around system calls, the table of the real machine,
 * and the table of faults that other tests rely on.
 */
#include "engine/base/env.h"

#include <limits.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum { SIZE = 5000 };

typedef struct fixture {
    fault_env f;
    const gd_env *env; /* its table */
    char *dir;
    char path[256];
    int fd;
    uint8_t data[SIZE]; /* the bytes to be in the file */
} fixture;

static void
setup(fixture *x)
{
    gd_error err;
    fault_env_init(&x->f);
    x->env = &x->f.env;
    x->dir = check_mkdir();
    snprintf(x->path, sizeof x->path, "%s/file", x->dir);
    for (unsigned i = 0; i < SIZE; i++) {
        x->data[i] = (uint8_t)(i * 31 + i / 256);
    }
    CHECK_INT(gd_open(x->env, AT_FDCWD, x->path, O_RDWR | O_CREAT, 0600,
                      &x->fd, &err),
              GD_OK);
}

static void
teardown(fixture *x)
{
    CHECK_INT(x->env->close(x->env, x->fd), 0);
    CHECK_INT(fault_env_leaks(&x->f), 0);
    fault_env_destroy(&x->f);
    check_rmdir(x->dir);
}

static gd_status
write_data(fixture *x, gd_error *err)
{
    return gd_write_full(x->env, x->fd, x->data, SIZE, 10, x->path, err);
}

static gd_status
read_data(fixture *x, uint8_t *out, gd_error *err)
{
    return gd_read_full(x->env, x->fd, out, SIZE, 10, x->path, err);
}

static fixture x;

TEST_WITH(test_short_and_interrupted, setup(&x), teardown(&x))
{
    gd_error err;
    uint8_t out[SIZE];
    for (size_t most = 1; most <= SIZE; most = most * 5 + 2) {
        memset(out, 0, SIZE);
        fault_env_shorten(&x.f, most);
        fault_env_interrupt(&x.f, 2);
        CHECK_INT(x.env->ftruncate(x.env, x.fd, 0), 0);
        CHECK_INT(write_data(&x, &err), GD_OK);
        CHECK_INT(read_data(&x, out, &err), GD_OK);
        CHECK(memcmp(out, x.data, SIZE) == 0);
    }
    CHECK(fault_env_count(&x.f, FAULT_PREAD) > SIZE);
    fault_env_heal(&x.f);
}

TEST_WITH(test_open_is_interrupted, setup(&x), teardown(&x))
{
    gd_error err;
    int fd;
    fault_env_interrupt(&x.f, 2);
    for (int i = 0; i < 4; i++) {
        CHECK_INT(gd_open(x.env, AT_FDCWD, x.path, O_RDONLY, 0, &fd, &err),
                  GD_OK);
        x.env->close(x.env, fd);
    }
}

static unsigned refusals, slept_ms;

/* A file on which another program has a lease, until it has given it back. */
static int
open_leased(const gd_env *env, int dir, const char *path, int flags,
            mode_t mode)
{
    (void)env;
    CHECK((flags & O_NONBLOCK) != 0); /* the name may be of another file */
    if (refusals > 0) {
        refusals--;
        return -EWOULDBLOCK;
    }
    int fd = openat(dir, path, flags, mode);
    return fd < 0 ? -errno : fd;
}

static void
count_sleep(const gd_env *env, unsigned ms)
{
    (void)env;
    slept_ms += ms;
}

TEST_WITH(test_open_waits_for_a_lease, setup(&x), teardown(&x))
{
    gd_error err;
    int fd;
    x.f.env.openat = open_leased;
    x.f.env.sleep_ms = count_sleep;
    refusals = 20;
    slept_ms = 0;
    CHECK_INT(gd_open(x.env, AT_FDCWD, x.path, O_RDONLY, 0, &fd, &err), GD_OK);
    CHECK(slept_ms > 0 && slept_ms < 2000);
    close(fd);
    /* The kernel takes a lease away after some 45 seconds; longer is odd. */
    refusals = UINT_MAX;
    slept_ms = 0;
    CHECK_INT(gd_open(x.env, AT_FDCWD, x.path, O_RDWR, 0, &fd, &err), GD_IO);
    CHECK_INT(err.sys_errno, EWOULDBLOCK);
    CHECK_CONTAINS(err.text, "has a lease on it");
    CHECK(slept_ms > 45000 && slept_ms < 120000);
}

TEST_WITH(test_end_of_file_is_damage, setup(&x), teardown(&x))
{
    gd_error err;
    uint8_t out[SIZE];
    CHECK_INT(write_data(&x, &err), GD_OK);
    CHECK_INT(x.env->ftruncate(x.env, x.fd, 1000), 0);
    CHECK_INT(read_data(&x, out, &err), GD_CORRUPT);
    CHECK_CONTAINS(err.text, x.path);
    CHECK_CONTAINS(err.text, "offset 1000");
}

TEST_WITH(test_errors_name_file_and_offset, setup(&x), teardown(&x))
{
    gd_error err;
    uint8_t out[SIZE];
    fault_env_shorten(&x.f, 100);
    fault_env_fail(&x.f, FAULT_PWRITEV, 3, ENOSPC, false);
    CHECK_INT(write_data(&x, &err), GD_NOSPACE);
    CHECK_INT(err.sys_errno, ENOSPC);
    CHECK_CONTAINS(err.text, x.path);
    CHECK_CONTAINS(err.text, "offset 210:");
    CHECK_INT(write_data(&x, &err), GD_OK);
    fault_env_fail(&x.f, FAULT_PREAD, 2, EIO, true);
    CHECK_INT(read_data(&x, out, &err), GD_IO);
    CHECK_CONTAINS(err.text, "offset 110:");
    CHECK_INT(read_data(&x, out, &err), GD_IO);
    CHECK_CONTAINS(err.text, "offset 10:");
}

/* There are more pieces than one call takes, some of them empty. */
TEST(test_many_pieces)
{
    enum { PIECES = 1700, PIECE = 3 };
    fixture x;
    gd_error err;
    uint8_t out[SIZE];
    struct iovec iov[PIECES];
    size_t used = 0;
    setup(&x);
    for (int i = 0; i < PIECES; i++) {
        size_t len = i % 5 == 0 ? 0 : PIECE;
        len = used + len > SIZE ? 0 : len;
        iov[i] = (struct iovec){x.data + used, len};
        used += len;
    }
    fault_env_shorten(&x.f, 401);
    fault_env_interrupt(&x.f, 3);
    CHECK_INT(gd_writev_full(x.env, x.fd, iov, PIECES, 10, x.path, &err),
              GD_OK);
    CHECK_INT(gd_read_full(x.env, x.fd, out, used, 10, x.path, &err), GD_OK);
    CHECK(memcmp(out, x.data, used) == 0);
    struct stat st;
    CHECK_INT(x.env->fstat(x.env, x.fd, &st), 0);
    CHECK_INT(st.st_size, 10 + used);
    teardown(&x);
}

static ssize_t
write_nothing(const gd_env *env, int fd, const struct iovec *iov, int count,
              uint64_t offset)
{
    (void)env, (void)fd, (void)iov, (void)count, (void)offset;
    return 0;
}

TEST_WITH(test_writing_nothing_is_an_end, setup(&x), teardown(&x))
{
    gd_error err;
    x.f.env.pwritev = write_nothing;
    CHECK_INT(write_data(&x, &err), GD_NOSPACE);
}

TEST_WITH(test_open, setup(&x), teardown(&x))
{
    gd_error err;
    char link[256];
    int fd;
    CHECK((fcntl(x.fd, F_GETFD) & FD_CLOEXEC) != 0);
    snprintf(link, sizeof link, "%s/link", x.dir);
    CHECK_INT(symlink(x.path, link), 0);
    CHECK_INT(gd_open(x.env, AT_FDCWD, link, O_RDONLY, 0, &fd, &err), GD_IO);
    CHECK_INT(err.sys_errno, ELOOP);
    CHECK_INT(fd, -1);
    CHECK_CONTAINS(err.text, link);
    CHECK_INT(gd_open(x.env, AT_FDCWD, "/proc/nonexistent/file", O_RDONLY, 0,
                      &fd, &err),
              GD_NOTFOUND);
    CHECK_INT(gd_open(x.env, AT_FDCWD, x.path, O_RDWR | O_CREAT | O_EXCL, 0600,
                      &fd, &err),
              GD_EXISTS);
}

TEST_WITH(test_sync_dir, setup(&x), teardown(&x))
{
    gd_error err;
    CHECK_INT(gd_sync_dir(x.env, AT_FDCWD, x.dir, &err), GD_OK);
    CHECK_INT(gd_sync_dir(x.env, AT_FDCWD, "/proc/nonexistent", &err),
              GD_NOTFOUND);
    CHECK(gd_sync_dir(x.env, AT_FDCWD, x.path, &err) != GD_OK);
    fault_env_fail(&x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(gd_sync_dir(x.env, AT_FDCWD, x.dir, &err), GD_IO);
    CHECK_CONTAINS(err.text, x.dir);
}

TEST_WITH(test_same_file, setup(&x), teardown(&x))
{
    char other[256];
    snprintf(other, sizeof other, "%s/other", x.dir);
    CHECK(gd_same_file(x.env, x.fd, AT_FDCWD, x.path));
    CHECK_INT(x.env->renameat(x.env, AT_FDCWD, x.path, other), 0);
    CHECK(!gd_same_file(x.env, x.fd, AT_FDCWD, x.path));
    CHECK(gd_same_file(x.env, x.fd, AT_FDCWD, other));
    /* A symbolic link is not the file it leads to. */
    CHECK_INT(symlink(other, x.path), 0);
    CHECK(!gd_same_file(x.env, x.fd, AT_FDCWD, x.path));
}

/* A missing name is looked up again: another host may have made it. */
TEST_WITH(test_missing_names, setup(&x), teardown(&x))
{
    gd_error err;
    int dir, fd;
    CHECK_INT(gd_open(x.env, AT_FDCWD, x.dir, O_RDONLY | O_DIRECTORY, 0, &dir,
                      &err),
              GD_OK);
    CHECK_INT(gd_open(x.env, dir, "file", O_RDONLY, 0, &fd, &err), GD_OK);
    x.env->close(x.env, fd);
    CHECK_INT(fault_env_count(&x.f, FAULT_RENEW), 0);
    CHECK_INT(gd_open(x.env, dir, "none", O_RDONLY, 0, &fd, &err),
              GD_NOTFOUND);
    CHECK_INT(fault_env_count(&x.f, FAULT_RENEW), 1);
    /* A name that cannot be looked up does not count as missing. */
    fault_env_fail(&x.f, FAULT_RENEW, 1, EIO, false);
    CHECK_INT(gd_open(x.env, dir, "none", O_RDONLY, 0, &fd, &err), GD_IO);
    fault_env_fail(&x.f, FAULT_FSTATAT, 1, EIO, false);
    CHECK_INT(gd_open(x.env, dir, "none", O_RDONLY, 0, &fd, &err), GD_IO);
    /* This host's own files are not shared. */
    CHECK_INT(gd_open(x.env, AT_FDCWD, "/proc/nonexistent/none", O_RDONLY, 0,
                      &fd, &err),
              GD_NOTFOUND);
    CHECK_INT(fault_env_count(&x.f, FAULT_RENEW), 3);
    x.env->close(x.env, dir);
}

/* Another host replaced the file after this host looked its name up. */
static void
check_replaced_names(int error, int flags)
{
    fixture x;
    gd_error err;
    int dir, fd;
    setup(&x);
    CHECK_INT(gd_open(x.env, AT_FDCWD, x.dir, O_RDONLY | O_DIRECTORY, 0, &dir,
                      &err),
              GD_OK);
    fault_env_fail(&x.f, FAULT_OPENAT, 1, error, false);
    CHECK_INT(gd_open(x.env, dir, "file", O_RDONLY, 0, &fd, &err), GD_OK);
    x.env->close(x.env, fd);
    CHECK_INT(fault_env_count(&x.f, FAULT_RENEW), 1);
    fault_env_fail(&x.f, FAULT_OPENAT, 1, error, true);
    CHECK_INT(gd_open(x.env, dir, "file", flags, 0600, &fd, &err), GD_IO);
    CHECK_CONTAINS(err.text, "file");
    uint64_t looks = fault_env_count(&x.f, FAULT_RENEW);
    CHECK(looks > 2 && looks < 100);
    fault_env_heal(&x.f);
    x.env->close(x.env, dir);
    teardown(&x);
}

TEST(test_replaced_names)
{
    check_replaced_names(ESTALE, O_RDWR | O_CREAT);
    check_replaced_names(ENOENT, O_RDWR);
}

/* The server decides if a name leads to an open file; a file that it no longer
 * has has no name. */
TEST_WITH(test_same_file_is_asked_anew, setup(&x), teardown(&x))
{
    gd_error err;
    bool same;
    int dir;
    CHECK_INT(gd_open(x.env, AT_FDCWD, x.dir, O_RDONLY | O_DIRECTORY, 0, &dir,
                      &err),
              GD_OK);
    CHECK(gd_same_file(x.env, x.fd, dir, "file"));
    CHECK_INT(fault_env_count(&x.f, FAULT_RENEW), 1);
    fault_env_fail(&x.f, FAULT_RENEW, 1, EIO, false);
    CHECK_INT(gd_find_same(x.env, x.fd, dir, "file", &same, &err), GD_IO);
    CHECK_CONTAINS(err.text, "file");
    static const int gone[] = {ESTALE, ENOENT};
    for (size_t i = 0; i < sizeof gone / sizeof *gone; i++) {
        fault_env_fail(&x.f, FAULT_FSTAT, 1, gone[i], false);
        CHECK_INT(gd_find_same(x.env, x.fd, dir, "file", &same, &err), GD_OK);
        CHECK(!same);
    }
    CHECK_INT(x.env->renew(x.env, dir, "gone/file"), -ENOENT);
    x.env->close(x.env, dir);
}

TEST_WITH(test_locks, setup(&x), teardown(&x))
{
    gd_error err;
    int second;
    CHECK_INT(gd_open(x.env, AT_FDCWD, x.path, O_RDWR, 0, &second, &err),
              GD_OK);
    CHECK_INT(x.env->lock(x.env, x.fd, 5, F_WRLCK), 0);
    CHECK_INT(x.env->lock(x.env, second, 5, F_WRLCK), -EAGAIN);
    CHECK_INT(x.env->lock(x.env, second, 5, F_RDLCK), -EAGAIN);
    CHECK_INT(x.env->lock(x.env, second, 4, F_WRLCK), 0);
    CHECK_INT(x.env->lock(x.env, second, 6, F_WRLCK), 0);
    CHECK_INT(x.env->lock(x.env, x.fd, 5, F_RDLCK), 0);
    CHECK_INT(x.env->lock(x.env, second, 5, F_RDLCK), 0);
    CHECK_INT(x.env->lock(x.env, x.fd, 5, F_WRLCK), -EAGAIN);
    CHECK_INT(x.env->lock(x.env, second, 5, F_UNLCK), 0);
    CHECK_INT(x.env->lock(x.env, x.fd, 5, F_WRLCK), 0);
    /* Closing another descriptor of the file does not drop the lock, as it
     * would with the locks of POSIX. */
    x.env->close(x.env, second);
    CHECK_INT(gd_open(x.env, AT_FDCWD, x.path, O_RDWR, 0, &second, &err),
              GD_OK);
    CHECK_INT(x.env->lock(x.env, second, 5, F_RDLCK), -EAGAIN);
    x.env->close(x.env, second);
}

static void
count_name(void *arg, const char *name)
{
    CHECK(strcmp(name, "file") == 0);
    ++*(int *)arg;
}

TEST(test_list)
{
    fixture x;
    int names = 0;
    setup(&x);
    CHECK_INT(x.env->list(x.env, AT_FDCWD, x.dir, count_name, &names), 0);
    CHECK_INT(names, 1);
    CHECK_INT(x.env->list(x.env, AT_FDCWD, "/proc/nonexistent", count_name,
                          &names),
              -ENOENT);
    CHECK_INT(x.env->list(x.env, AT_FDCWD, x.path, count_name, &names),
              -ENOTDIR);
    teardown(&x);
}

TEST_WITH(test_names, setup(&x), teardown(&x))
{
    char other[256], gone[256];
    struct stat st;
    snprintf(other, sizeof other, "%s/other", x.dir);
    snprintf(gone, sizeof gone, "%s/gone", x.dir);
    CHECK_INT(x.env->linkat(x.env, AT_FDCWD, x.path, other), 0);
    CHECK_INT(x.env->linkat(x.env, AT_FDCWD, x.path, other), -EEXIST);
    CHECK_INT(x.env->fstatat(x.env, AT_FDCWD, other, &st), 0);
    CHECK_INT(st.st_nlink, 2);
    CHECK_INT(x.env->unlinkat(x.env, AT_FDCWD, other), 0);
    CHECK_INT(x.env->unlinkat(x.env, AT_FDCWD, other), -ENOENT);
    CHECK_INT(x.env->renameat(x.env, AT_FDCWD, gone, other), -ENOENT);
    CHECK_INT(x.env->fallocate(x.env, x.fd, 0, 8192), 0);
    CHECK_INT(x.env->fstat(x.env, x.fd, &st), 0);
    CHECK_INT(st.st_size, 8192);
    CHECK_INT(x.env->fallocate(x.env, -1, 0, 8192), -EBADF);
    CHECK_INT(x.env->fdatasync(x.env, x.fd), 0);
    CHECK_INT(x.env->fsync(x.env, -1), -EBADF);
}

TEST(test_calloc)
{
    fault_env f;
    gd_error err;
    fault_env_init(&f);
    uint8_t *memory = gd_calloc(&f.env, 10, 10, &err);
    REQUIRE(memory != NULL);
    for (int i = 0; i < 100; i++) {
        CHECK_INT(memory[i], 0);
    }
    CHECK(gd_calloc(&f.env, SIZE_MAX / 2, 3, &err) == NULL);
    CHECK_INT(err.status, GD_NOMEM);
    void *nothing = gd_calloc(&f.env, 0, 8, &err);
    CHECK(nothing != NULL);
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK(gd_calloc(&f.env, 1, 1, &err) == NULL);
    CHECK_INT(fault_env_leaks(&f), 2);
    f.env.release(&f.env, memory);
    f.env.release(&f.env, nothing);
    f.env.release(&f.env, NULL);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

TEST(test_random_and_clock)
{
    const gd_env *env = gd_env_posix();
    uint8_t a[300] = {0}, b[300] = {0};
    CHECK_INT(env->random(env, a, sizeof a), 0);
    CHECK_INT(env->random(env, b, sizeof b), 0);
    CHECK(memcmp(a, b, sizeof a) != 0);
    CHECK(memcmp(a + 280, a + 260, 20) != 0);
    CHECK(env->now(env) > 1600000000);
    CHECK_INT(env->getpid(env), getpid());
    CHECK_INT(env->geteuid(env), geteuid());
    env->sleep_ms(env, 1);
}

TEST_WITH(test_faults_once_and_forever, setup(&x), teardown(&x))
{
    fault_env_fail(&x.f, FAULT_FSYNC, 2, EIO, false);
    CHECK_INT(x.env->fsync(x.env, x.fd), 0);
    CHECK_INT(x.env->fsync(x.env, x.fd), -EIO);
    CHECK_INT(x.env->fsync(x.env, x.fd), 0);
    fault_env_fail(&x.f, FAULT_FSYNC, 2, EDQUOT, true);
    CHECK_INT(x.env->fsync(x.env, x.fd), 0);
    CHECK_INT(x.env->fsync(x.env, x.fd), -EDQUOT);
    CHECK_INT(x.env->fsync(x.env, x.fd), -EDQUOT);
    CHECK_INT(fault_env_faults(&x.f), 3);
    CHECK_INT(fault_env_count(&x.f, FAULT_FSYNC), 6);
    fault_env_heal(&x.f);
    CHECK_INT(x.env->fsync(x.env, x.fd), 0);
    fault_env_fail(&x.f, FAULT_ANY, 2, EIO, false);
    struct stat st;
    CHECK_INT(x.env->fsync(x.env, x.fd), 0);
    CHECK_INT(x.env->fstat(x.env, x.fd, &st), -EIO);
    CHECK_INT(x.env->fsync(x.env, x.fd), 0);
}

TEST(test_fault_names)
{
    for (fault_call call = 0; call < FAULT_CALLS; call++) {
        REQUIRE(fault_call_name(call) != NULL);
        CHECK_INT(fault_call_by_name(fault_call_name(call)), call);
    }
    CHECK_INT(fault_call_by_name("nonsense"), FAULT_CALLS);
}

TEST_WITH(test_leaks_are_seen, setup(&x), teardown(&x))
{
    gd_error err;
    int fd;
    CHECK_INT(gd_open(x.env, AT_FDCWD, x.path, O_RDWR, 0, &fd, &err), GD_OK);
    CHECK_INT(fault_env_leaks(&x.f), 2); /* this one and the fixture's */
    CHECK_INT(x.env->close(x.env, fd), 0);
    CHECK_INT(fault_env_leaks(&x.f), 1);
    x.env->close(x.env, fd);
    CHECK_INT(fault_env_leaks(&x.f), 2); /* closed twice */
    x.f.bad_closes = 0;
    CHECK_INT(x.env->ftruncate(x.env, x.fd, 4096), 0);
    void *mapping = x.env->mmap_shared(x.env, x.fd, 4096);
    REQUIRE(mapping != NULL);
    CHECK_INT(fault_env_leaks(&x.f), 2);
    CHECK_INT(x.env->munmap(x.env, mapping, 4096), 0);
}

/* A large mapping begins where a large page can; its bytes are in the file,
 * before it uses large pages and after. */
TEST_WITH(test_mapping, setup(&x), teardown(&x))
{
    enum { LARGE = 2 << 20 };
    for (size_t length = LARGE; length <= 3 * LARGE; length += LARGE + 5000) {
        CHECK_INT(x.env->ftruncate(x.env, x.fd, length), 0);
        for (int round = 0; round < 3; round++) {
            uint8_t *mapping = x.env->mmap_shared(x.env, x.fd, length);
            REQUIRE(mapping != NULL);
            CHECK_INT((uintptr_t)mapping % LARGE, 0);
            mapping[length - 1] = (uint8_t)(round + 7);
            x.env->use_large_pages(x.env, mapping, length);
            uint8_t last = 0;
            CHECK_INT(x.env->pread(x.env, x.fd, &last, 1, length - 1), 1);
            CHECK_INT(last, round + 7);
            CHECK_INT(mapping[length - 1], round + 7);
            CHECK_INT(x.env->munmap(x.env, mapping, length), 0);
        }
    }
}
