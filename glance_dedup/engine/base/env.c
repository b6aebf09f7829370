/* SPDX-License-Identifier: Apache-2.0 */
/*
 * env.c - the table of the real machine, and the loops around it.
 */
#include "engine/base/env.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

enum {
    LARGE_PAGE = 2 << 20,
    MAX_SCANS = 10,
    LEASE_MS = 60000, /* by default, Linux breaks a lease after 45 s */
    LEASE_STEP_MS = 10,
};

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* since Linux 6.1 */
#endif

static int
result(int rc)
{
    return rc < 0 ? -errno : rc;
}

static int
posix_openat(GD_UNUSED const gd_env *env, int dir, const char *path, int flags,
             mode_t mode)
{
    return result(openat(dir, path, flags, mode));
}

static int
posix_close(GD_UNUSED const gd_env *env, int fd)
{
    return result(close(fd));
}

static ssize_t
posix_pread(GD_UNUSED const gd_env *env, int fd, void *buf, size_t len,
            uint64_t offset)
{
    ssize_t n = pread(fd, buf, len, (off_t)offset);
    return n < 0 ? -errno : n;
}

static ssize_t
posix_pwritev(GD_UNUSED const gd_env *env, int fd, const struct iovec *iov,
              int count, uint64_t offset)
{
    ssize_t n = pwritev(fd, iov, count, (off_t)offset);
    return n < 0 ? -errno : n;
}

static int
posix_fsync(GD_UNUSED const gd_env *env, int fd)
{
    return result(fsync(fd));
}

static int
posix_fdatasync(GD_UNUSED const gd_env *env, int fd)
{
    return result(fdatasync(fd));
}

static int
posix_ftruncate(GD_UNUSED const gd_env *env, int fd, uint64_t length)
{
    return result(ftruncate(fd, (off_t)length));
}

static int
posix_fallocate_range(GD_UNUSED const gd_env *env, int fd, uint64_t offset,
                      uint64_t length)
{
    /* posix_fallocate returns the error itself.  glibc writes zeros where the
     * file system has no fallocate of its own. */
    return -posix_fallocate(fd, (off_t)offset, (off_t)length);
}

static int
posix_punch(GD_UNUSED const gd_env *env, int fd, uint64_t offset,
            uint64_t length)
{
    return result(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                            (off_t)offset, (off_t)length));
}

static int
posix_linkat(GD_UNUSED const gd_env *env, int dir, const char *from,
             const char *to)
{
    return result(linkat(dir, from, dir, to, 0));
}

static int
posix_renameat(GD_UNUSED const gd_env *env, int dir, const char *from,
               const char *to)
{
    return result(renameat(dir, from, dir, to));
}

static int
posix_unlinkat(GD_UNUSED const gd_env *env, int dir, const char *path)
{
    return result(unlinkat(dir, path, 0));
}

static int
posix_rmdirat(GD_UNUSED const gd_env *env, int dir, const char *path)
{
    return result(unlinkat(dir, path, AT_REMOVEDIR));
}

static int
posix_mkdirat(GD_UNUSED const gd_env *env, int dir, const char *path,
              mode_t mode)
{
    return result(mkdirat(dir, path, mode));
}

static int
posix_fchmod(GD_UNUSED const gd_env *env, int fd, mode_t mode)
{
    return result(fchmod(fd, mode));
}

static int
posix_fstat(GD_UNUSED const gd_env *env, int fd, struct stat *st)
{
    return result(fstat(fd, st));
}

static int
posix_fstatat(GD_UNUSED const gd_env *env, int dir, const char *path,
              struct stat *st)
{
    return result(fstatat(dir, path, st, AT_SYMLINK_NOFOLLOW));
}

/* Directories are close-to-open, too: a process that opens one sees the names
 * that others made or removed before. */
static int
posix_renew(GD_UNUSED const gd_env *env, int dir, const char *path)
{
    char parent[256] = ".";
    const char *slash = strrchr(path, '/');
    if (slash != NULL && (size_t)(slash - path) >= sizeof parent) {
        return -ENAMETOOLONG;
    }
    if (slash != NULL) {
        snprintf(parent, sizeof parent, "%.*s", (int)(slash - path), path);
    }
    int opened = openat(dir, parent,
                        O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (opened < 0) {
        return -errno;
    }
    close(opened);
    return 0;
}

/* Those whose page cache is the only one, or, of OCFS2 and GFS2, follows the
 * locks of their cluster.  Of all others, nothing is assumed. */
static bool
has_true_pages(uint32_t type)
{
    static const uint32_t types[] = {
        0xef53,     /* ext4 */     0x58465342, /* XFS */
        0x9123683e, /* Btrfs */    0x2fc12fc1, /* ZFS */
        0xca451a4e, /* bcachefs */ 0xf2f52010, /* F2FS */
        0x01021994, /* tmpfs */    0x858458f6, /* ramfs */
        0x794c7630, /* overlayfs */ 0x3153464a, /* JFS */
        0x52654973, /* ReiserFS */ 0x3434,     /* NILFS2 */
        0x4d44,     /* FAT */      0x2011bab0, /* exFAT */
        0x7366746e, /* NTFS */     0x482b,     /* HFS+ */
        0x24051905, /* UBIFS */    0x7461636f, /* OCFS2 */
        0x01161970, /* GFS2 */
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (types[i] == type) {
            return true;
        }
    }
    return false;
}

static int
posix_is_shared(GD_UNUSED const gd_env *env, int dir)
{
    struct statfs found;
    int rc;
    do {
        rc = result(fstatfs(dir, &found));
    } while (rc == -EINTR);
    return rc < 0 ? rc : !has_true_pages((uint32_t)found.f_type);
}

static int
posix_free_space(GD_UNUSED const gd_env *env, int fd, gd_space *space)
{
    struct statvfs found;
    int rc = result(fstatvfs(fd, &found));
    if (rc == 0) {
        *space = (gd_space){
            .free = (uint64_t)found.f_bavail * found.f_frsize,
            .total = (uint64_t)found.f_blocks * found.f_frsize,
            .free_files = found.f_favail,
            .total_files = found.f_files,
        };
    }
    return rc;
}

static struct flock
one_byte(uint64_t byte, short type)
{
    return (struct flock){
        .l_type = type,
        .l_whence = SEEK_SET,
        .l_start = (off_t)byte,
        .l_len = 1,
        .l_pid = 0, /* an OFD lock belongs to no process */
    };
}

static int
posix_lock(GD_UNUSED const gd_env *env, int fd, uint64_t byte, short type)
{
    struct flock lock = one_byte(byte, type);
    int rc = result(fcntl(fd, F_OFD_SETLK, &lock));
    return rc == -EACCES ? -EAGAIN : rc;
}

static int
posix_is_locked(GD_UNUSED const gd_env *env, int fd, uint64_t byte)
{
    struct flock lock = one_byte(byte, F_WRLCK);
    int rc = result(fcntl(fd, F_OFD_GETLK, &lock));
    return rc < 0 ? rc : lock.l_type != F_UNLCK;
}

static int
posix_list(GD_UNUSED const gd_env *env, int dir, const char *path,
           void (*visit)(void *arg, const char *name), void *arg)
{
    int fd = openat(dir, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        return -errno;
    }
    DIR *stream = fdopendir(fd);
    if (stream == NULL) {
        int rc = -errno;
        close(fd);
        return rc;
    }
    int rc = 0;
    for (;;) {
        errno = 0;
        const struct dirent *entry = readdir(stream);
        if (entry == NULL) {
            rc = -errno;
            break;
        }
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            visit(arg, entry->d_name);
        }
    }
    closedir(stream);
    return rc;
}

static void
posix_start_writeback(GD_UNUSED const gd_env *env, int fd, uint64_t offset,
                      uint64_t length)
{
    (void)sync_file_range(fd, (off_t)offset, (off_t)length,
                          SYNC_FILE_RANGE_WRITE);
}

static void
posix_start_readahead(GD_UNUSED const gd_env *env, int fd, uint64_t offset,
                      uint64_t length)
{
    (void)posix_fadvise(fd, (off_t)offset, (off_t)length, POSIX_FADV_WILLNEED);
}

static void
posix_drop_cache(GD_UNUSED const gd_env *env, int fd, uint64_t offset,
                 uint64_t length)
{
    (void)posix_fadvise(fd, (off_t)offset, (off_t)length, POSIX_FADV_DONTNEED);
}

/* Begins at an address where a large page can begin: reserves more than needed,
 * and gives the rest back. */
static void *
posix_mmap_shared(GD_UNUSED const gd_env *env, int fd, size_t length)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t whole = (length + page - 1) / page * page;
    uint8_t *room = mmap(NULL, whole + LARGE_PAGE, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
        return NULL;
    }
    size_t before = LARGE_PAGE - (uintptr_t)room % LARGE_PAGE;
    uint8_t *start = room + before;
    munmap(room, before);
    if (before < LARGE_PAGE) {
        munmap(start + whole, LARGE_PAGE - before);
    }
    void *address = mmap(start, length, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_FIXED, fd, 0);
    if (address == MAP_FAILED) {
        munmap(start, whole);
        return NULL;
    }
    return address;
}

static void
posix_use_large_pages(GD_UNUSED const gd_env *env, void *address,
                      size_t length)
{
    (void)madvise(address, length, MADV_COLLAPSE);
}

static int
posix_munmap(GD_UNUSED const gd_env *env, void *address, size_t length)
{
    return result(munmap(address, length));
}

static int
posix_random(GD_UNUSED const gd_env *env, void *buf, size_t len)
{
    uint8_t *p = buf;
    while (len > 0) {
        ssize_t n = getrandom(p, len, 0);
        if (n < 0 && errno != EINTR) {
            return -errno;
        }
        if (n > 0) {
            p += n;
            len -= (size_t)n;
        }
    }
    return 0;
}

static uint64_t
posix_descriptor_limit(GD_UNUSED const gd_env *env)
{
    struct rlimit limit;
    return getrlimit(RLIMIT_NOFILE, &limit) < 0 ? 0 : limit.rlim_cur;
}

static pid_t
posix_getpid(GD_UNUSED const gd_env *env)
{
    return getpid();
}

static uid_t
posix_geteuid(GD_UNUSED const gd_env *env)
{
    return geteuid();
}

static int64_t
posix_now(GD_UNUSED const gd_env *env)
{
    return (int64_t)time(NULL);
}

static int64_t
clock_ns(clockid_t clock)
{
    struct timespec t = {0};
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int64_t
posix_monotonic_ns(GD_UNUSED const gd_env *env)
{
    return clock_ns(CLOCK_MONOTONIC);
}

static int64_t
posix_thread_ns(GD_UNUSED const gd_env *env)
{
    return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

static void
posix_sleep_ms(GD_UNUSED const gd_env *env, unsigned ms)
{
    struct timespec t = {.tv_sec = ms / 1000,
                         .tv_nsec = (long)(ms % 1000) * 1000000L};
    nanosleep(&t, NULL);
}

static void *
posix_alloc(GD_UNUSED const gd_env *env, size_t size, bool zeroed)
{
    return zeroed ? calloc(1, size) : malloc(size);
}

static void
posix_release(GD_UNUSED const gd_env *env, void *memory)
{
    free(memory);
}

const gd_env *
gd_env_posix(void)
{
    static const gd_env table = {
        .openat = posix_openat,
        .close = posix_close,
        .pread = posix_pread,
        .pwritev = posix_pwritev,
        .fsync = posix_fsync,
        .fdatasync = posix_fdatasync,
        .ftruncate = posix_ftruncate,
        .fallocate = posix_fallocate_range,
        .punch = posix_punch,
        .linkat = posix_linkat,
        .renameat = posix_renameat,
        .unlinkat = posix_unlinkat,
        .rmdirat = posix_rmdirat,
        .mkdirat = posix_mkdirat,
        .fchmod = posix_fchmod,
        .fstat = posix_fstat,
        .fstatat = posix_fstatat,
        .renew = posix_renew,
        .is_shared = posix_is_shared,
        .free_space = posix_free_space,
        .lock = posix_lock,
        .is_locked = posix_is_locked,
        .list = posix_list,
        .start_writeback = posix_start_writeback,
        .start_readahead = posix_start_readahead,
        .drop_cache = posix_drop_cache,
        .mmap_shared = posix_mmap_shared,
        .use_large_pages = posix_use_large_pages,
        .munmap = posix_munmap,
        .random = posix_random,
        .descriptor_limit = posix_descriptor_limit,
        .getpid = posix_getpid,
        .geteuid = posix_geteuid,
        .now = posix_now,
        .monotonic_ns = posix_monotonic_ns,
        .thread_ns = posix_thread_ns,
        .sleep_ms = posix_sleep_ms,
        .alloc = posix_alloc,
        .release = posix_release,
    };
    return &table;
}

/* Reads as pread does from a file that was opened with O_DIRECT, at most ROOM
 * bytes at once: whole pages, and copies the wanted bytes of them. */
static ssize_t
read_aligned(const gd_env *env, int fd, void *buf, size_t len, uint64_t offset)
{
    enum { PAGE = 4096, ROOM = 1 << 20 };
    size_t before = offset % PAGE;
    len = len < ROOM - PAGE ? len : ROOM - PAGE;
    size_t whole = (before + len + PAGE - 1) / PAGE * PAGE;
    uint8_t *memory = env->alloc(env, whole + PAGE, false);
    if (memory == NULL) {
        return -ENOMEM;
    }
    uint8_t *pages = memory + PAGE - (uintptr_t)memory % PAGE;
    ssize_t n = env->pread(env, fd, pages, whole, offset - before);
    if (n >= 0) {
        size_t got = (size_t)n > before ? (size_t)n - before : 0;
        len = len < got ? len : got;
        memcpy(buf, pages + before, len);
        n = (ssize_t)len;
    }
    env->release(env, memory);
    return n;
}

gd_status
gd_read_full(const gd_env *env, int fd, void *buf, size_t len, uint64_t offset,
             const char *file, gd_error *err)
{
    uint8_t *p = buf;
    bool aligned = true;
    while (len > 0) {
        ssize_t n = aligned ? env->pread(env, fd, p, len, offset)
                            : read_aligned(env, fd, p, len, offset);
        if (n == -EINVAL && aligned) {
            aligned = false;
            continue;
        }
        if (n == -EINTR) {
            continue;
        }
        if (n < 0) {
            return gd_fail_errno(err, (int)-n,
                                 "cannot read %s at offset %llu", file,
                                 (unsigned long long)offset);
        }
        if (n == 0) {
            return gd_fail(err, GD_CORRUPT,
                           "%s ends at offset %llu, before the %zu bytes that "
                           "should follow",
                           file, (unsigned long long)offset, len);
        }
        p += n;
        offset += (uint64_t)n;
        len -= (size_t)n;
    }
    return GD_OK;
}

gd_status
gd_writev_full(const gd_env *env, int fd, struct iovec *iov, int count,
               uint64_t offset, const char *file, gd_error *err)
{
    enum { AT_ONCE = 512 }; /* below every system's IOV_MAX */
    while (count > 0) {
        if (iov->iov_len == 0) {
            iov++;
            count--;
            continue;
        }
        ssize_t n = env->pwritev(env, fd, iov,
                                 count < AT_ONCE ? count : AT_ONCE, offset);
        if (n == -EINTR) {
            continue;
        }
        if (n <= 0) {
            return gd_fail_errno(err, n == 0 ? ENOSPC : (int)-n,
                                 "cannot write %s at offset %llu", file,
                                 (unsigned long long)offset);
        }
        offset += (uint64_t)n;
        size_t left = (size_t)n;
        while (count > 0 && left >= iov->iov_len) {
            left -= iov->iov_len;
            iov++;
            count--;
        }
        if (left > 0) {
            iov->iov_base = (uint8_t *)iov->iov_base + left;
            iov->iov_len -= left;
        }
    }
    return GD_OK;
}

gd_status
gd_write_full(const gd_env *env, int fd, const void *buf, size_t len,
              uint64_t offset, const char *file, gd_error *err)
{
    struct iovec iov = {.iov_base = (void *)buf, .iov_len = len};
    return gd_writev_full(env, fd, &iov, 1, offset, file, err);
}

/* For messages. */
static const char *
shown(const char *path)
{
    return strcmp(path, ".") == 0 ? "of the repository" : path;
}

/* O_NONBLOCK is there in case a FIFO is in the file's place.  But with it the
 * kernel refuses a file on which another program has a lease (Samba, knfsd),
 * and requests that program to give it up.  So the file is opened again until
 * the lease is gone, always in the same way, since the file's place may be
 * taken by something else meanwhile. */
static int
open_once(const gd_env *env, int dir, const char *path, int flags, mode_t mode)
{
    flags |= O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    int rc = env->openat(env, dir, path, flags, mode);
    unsigned waited = 0;
    while (rc == -EINTR || (rc == -EWOULDBLOCK && waited < LEASE_MS)) {
        if (rc == -EWOULDBLOCK) {
            env->sleep_ms(env, LEASE_STEP_MS);
            waited += LEASE_STEP_MS;
        }
        rc = env->openat(env, dir, path, flags, mode);
    }
    return rc;
}

/* Only files below the repository's directory are shared between hosts.  This
 * host's filter is not; its path is absolute. */
static int
renew(const gd_env *env, int dir, const char *path)
{
    return dir == AT_FDCWD ? 0 : env->renew(env, dir, path);
}

/* Returns whether the server may know better than this host.  A missing name
 * may have come: one more try shows it.  A file that the server has no more was
 * replaced between revalidation and opening: that may happen again and again,
 * but each time another host has replaced it once more. */
static bool
may_be_outdated(int rc, int flags, unsigned looks)
{
    return (rc == -ENOENT && looks == 0 && (flags & O_CREAT) == 0) ||
           (rc == -ESTALE && looks < MAX_SCANS);
}

/* For a file that the server has no more, JuiceFS returns ENOENT, as for a
 * missing name.  A revalidation of the name distinguishes them. */
static int
open_again(const gd_env *env, int dir, const char *path, int flags, mode_t mode)
{
    int rc = renew(env, dir, path);
    rc = rc < 0 ? rc : open_once(env, dir, path, flags, mode);
    if (rc != -ENOENT) {
        return rc;
    }
    struct stat st;
    rc = env->fstatat(env, dir, path, &st);
    return rc < 0 ? rc : -ESTALE;
}

gd_status
gd_open(const gd_env *env, int dir, const char *path, int flags, mode_t mode,
        int *fd, gd_error *err)
{
    int rc = open_once(env, dir, path, flags, mode);
    for (unsigned looks = 0;
         dir != AT_FDCWD && may_be_outdated(rc, flags, looks); looks++) {
        rc = open_again(env, dir, path, flags, mode);
    }
    if (rc < 0) {
        *fd = -1;
        return gd_fail_errno(err, -rc, rc == -EWOULDBLOCK
                             ? "cannot open %s: another program has a lease "
                               "on it"
                             : "cannot open %s", shown(path));
    }
    *fd = rc;
    return GD_OK;
}

gd_status
gd_sync_dir(const gd_env *env, int dir, const char *path, gd_error *err)
{
    int fd;
    GD_TRY(gd_open(env, dir, path, O_RDONLY | O_DIRECTORY, 0, &fd, err));
    int rc = env->fsync(env, fd);
    env->close(env, fd);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot fsync the directory %s",
                             shown(path));
    }
    return GD_OK;
}

gd_status
gd_fsync(const gd_env *env, int fd, const char *file, gd_error *err)
{
    int rc = env->fsync(env, fd);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot fsync %s", file) : GD_OK;
}

gd_status
gd_fdatasync(const gd_env *env, int fd, const char *file, gd_error *err)
{
    int rc = env->fdatasync(env, fd);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot fdatasync %s", file)
                  : GD_OK;
}

gd_status
gd_random(const gd_env *env, void *out, size_t length, gd_error *err)
{
    int rc = env->random(env, out, length);
    return rc < 0 ? gd_fail_errno(err, -rc, "no random bytes") : GD_OK;
}

void *
gd_calloc(const gd_env *env, size_t count, size_t size, gd_error *err)
{
    size_t total;
    void *memory = NULL;
    if (!__builtin_mul_overflow(count, size, &total)) {
        memory = env->alloc(env, total == 0 ? 1 : total, true);
    }
    if (memory == NULL) {
        gd_fail(err, GD_NOMEM, "out of memory: %zu times %zu bytes", count,
                size);
    }
    return memory;
}

void *
gd_alloc(const gd_env *env, size_t size, gd_error *err)
{
    void *memory = env->alloc(env, size, false);
    if (memory == NULL) {
        gd_fail(err, GD_NOMEM, "out of memory: %zu bytes", size);
    }
    return memory;
}

bool
gd_is_forgotten(gd_status s, const gd_error *err)
{
    return s != GD_OK && (err->sys_errno == ESTALE || err->sys_errno == ENOENT);
}

gd_status
gd_find_same(const gd_env *env, int fd, int dir, const char *path, bool *same,
             gd_error *err)
{
    struct stat own, named;
    *same = false;
    int rc = renew(env, dir, path);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot look up %s again", path);
    }
    rc = env->fstat(env, fd, &own);
    if (rc == -ESTALE || rc == -ENOENT) {
        return GD_OK; /* the file is gone from the server */
    }
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat the open file of %s",
                             path);
    }
    rc = env->fstatat(env, dir, path, &named);
    if (rc < 0 && rc != -ENOENT) {
        return gd_fail_errno(err, -rc, "cannot stat %s", path);
    }
    *same = rc >= 0 && own.st_ino == named.st_ino &&
            own.st_dev == named.st_dev;
    return GD_OK;
}

bool
gd_same_file(const gd_env *env, int fd, int dir, const char *path)
{
    bool same;
    return gd_find_same(env, fd, dir, path, &same, NULL) == GD_OK && same;
}
