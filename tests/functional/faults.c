/* SPDX-License-Identifier: Apache-2.0 */
/*
 * faults.c - a library to be preloaded: the nth system call of a kind, on a
 * file below a directory, fails; or every one from there on.
 *
 * Unlike the engine's table it also catches the calls of Python and of
 * LevelDB. faults_arm begins it, for the calling process, and not for those it
 * forks; faults_disarm ends it and returns the number of calls of the kind. An
 * error of 0 makes reads and writes short instead: half of the requested
 * bytes.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

/* The order is that of task_faults.py's KINDS. */
enum { OPEN, READ, WRITE, SYNC, ROOM, NAME, LOCK, LOOK, MAP, ANY };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pid_t process;
static char top[PATH_MAX];
static int wanted, error;
static bool forever;
static uint64_t nth, calls, struck;
static char first[PATH_MAX + 64]; /* the first failed call */

void faults_arm(const char *root, int kind, uint64_t number, int sys_errno,
                int for_ever);
uint64_t faults_disarm(uint64_t *hits, char *what, size_t room);

void
faults_arm(const char *root, int kind, uint64_t number, int sys_errno,
           int for_ever)
{
    snprintf(top, sizeof top, "%s", root);
    wanted = kind;
    nth = number;
    error = sys_errno;
    forever = for_ever != 0;
    calls = struck = 0;
    first[0] = '\0';
    process = getpid();
}

uint64_t
faults_disarm(uint64_t *hits, char *what, size_t room)
{
    process = 0;
    *hits = struck;
    snprintf(what, room, "%s", first);
    return calls;
}

static bool
is_below(const char *path)
{
    size_t length = strlen(top);
    return strncmp(path, top, length) == 0 &&
           (path[length] == '/' || path[length] == '\0');
}

/* dir and path are openat's; path NULL: the descriptor itself. */
static bool
is_ours(int dir, const char *path, char out[PATH_MAX])
{
    char link[64];
    if (process == 0 || process != getpid()) {
        return false;
    }
    if (path != NULL && path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return is_below(path);
    }
    if (dir == AT_FDCWD) {
        return false;
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) {
        return false;
    }
    out[n] = '\0';
    bool ours = is_below(out);
    if (path != NULL) {
        snprintf(out + n, (size_t)(PATH_MAX - n), "/%s", path);
    }
    return ours;
}

/* Returns true if this call is to fail. */
static bool
strikes(int kind, const char *name, int dir, const char *path)
{
    char out[PATH_MAX];
    int saved = errno;
    bool due = false;
    if (is_ours(dir, path, out) && (wanted == ANY || wanted == kind)) {
        pthread_mutex_lock(&mutex);
        calls++;
        due = nth != 0 && (calls == nth || (forever && calls > nth));
        if (due && struck++ == 0) {
            snprintf(first, sizeof first, "%s %s", name, out + strlen(top));
        }
        pthread_mutex_unlock(&mutex);
    }
    errno = due && error != 0 ? error : saved;
    return due;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) { \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    }

/* Fails, unless short counts are requested. */
#define FAIL_IF(kind, dir, path, failure) \
    if (strikes(kind, __func__, dir, path) && error != 0) { \
        return failure; \
    }

#define MODE_OF(flags) \
    mode_t mode = 0; \
    if (((flags) & (O_CREAT | O_TMPFILE)) != 0) { \
        va_list args; \
        va_start(args, flags); \
        mode = va_arg(args, mode_t); \
        va_end(args); \
    }

#define DEFINE_OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        REAL(name) \
        MODE_OF(flags) \
        FAIL_IF(OPEN, AT_FDCWD, path, -1) \
        return real(path, flags, mode); \
    }
#define DEFINE_OPENAT(name) \
    int name(int dir, const char *path, int flags, ...) \
    { \
        REAL(name) \
        MODE_OF(flags) \
        FAIL_IF(OPEN, dir, path, -1) \
        return real(dir, path, flags, mode); \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

DIR *
opendir(const char *path)
{
    REAL(opendir)
    FAIL_IF(OPEN, AT_FDCWD, path, NULL)
    return real(path);
}

/* Moves half of it, if counts are to be short. */
#define DEFINE_MOVE(kind, name, declaration, arguments) \
    ssize_t name declaration \
    { \
        REAL(name) \
        if (strikes(kind, #name, fd, NULL)) { \
            if (error != 0) { \
                return -1; \
            } \
            length = (length + 1) / 2; \
        } \
        return real arguments; \
    }
DEFINE_MOVE(READ, read, (int fd, void *to, size_t length), (fd, to, length))
DEFINE_MOVE(READ, pread, (int fd, void *to, size_t length, off_t at),
            (fd, to, length, at))
DEFINE_MOVE(READ, pread64, (int fd, void *to, size_t length, off64_t at),
            (fd, to, length, at))
DEFINE_MOVE(WRITE, write, (int fd, const void *from, size_t length),
            (fd, from, length))
DEFINE_MOVE(WRITE, pwrite, (int fd, const void *from, size_t length, off_t at),
            (fd, from, length, at))
DEFINE_MOVE(WRITE, pwrite64,
            (int fd, const void *from, size_t length, off64_t at),
            (fd, from, length, at))

ssize_t
pwritev(int fd, const struct iovec *iov, int count, off_t offset)
{
    REAL(pwritev)
    if (strikes(WRITE, "pwritev", fd, NULL)) {
        if (error != 0) {
            return -1;
        }
        return pwrite(fd, iov->iov_base, (iov->iov_len + 1) / 2, offset);
    }
    return real(fd, iov, count, offset);
}

#define DEFINE_FD(kind, name, declaration, arguments) \
    int name declaration \
    { \
        REAL(name) \
        FAIL_IF(kind, fd, NULL, -1) \
        return real arguments; \
    }
DEFINE_FD(SYNC, fsync, (int fd), (fd))
DEFINE_FD(SYNC, fdatasync, (int fd), (fd))
DEFINE_FD(ROOM, ftruncate, (int fd, off_t length), (fd, length))
DEFINE_FD(ROOM, ftruncate64, (int fd, off64_t length), (fd, length))
DEFINE_FD(ROOM, fallocate, (int fd, int mode, off_t offset, off_t length),
          (fd, mode, offset, length))
DEFINE_FD(NAME, fchmod, (int fd, mode_t mode), (fd, mode))
DEFINE_FD(LOOK, fstat, (int fd, struct stat *st), (fd, st))
DEFINE_FD(LOOK, fstat64, (int fd, struct stat64 *st), (fd, st))

int
posix_fallocate(int fd, off_t offset, off_t length)
{
    REAL(posix_fallocate)
    FAIL_IF(ROOM, fd, NULL, error)
    return real(fd, offset, length);
}

int
posix_fallocate64(int fd, off64_t offset, off64_t length)
{
    REAL(posix_fallocate64)
    FAIL_IF(ROOM, fd, NULL, error)
    return real(fd, offset, length);
}

#define DEFINE_PATH(kind, name, declaration, dir, path, arguments) \
    int name declaration \
    { \
        REAL(name) \
        FAIL_IF(kind, dir, path, -1) \
        return real arguments; \
    }
DEFINE_PATH(NAME, rename, (const char *from, const char *to), AT_FDCWD, to,
            (from, to))
DEFINE_PATH(NAME, renameat,
            (int from_dir, const char *from, int dir, const char *to), dir, to,
            (from_dir, from, dir, to))
DEFINE_PATH(NAME, link, (const char *from, const char *to), AT_FDCWD, to,
            (from, to))
DEFINE_PATH(NAME, linkat,
            (int from_dir, const char *from, int dir, const char *to,
             int flags), dir, to, (from_dir, from, dir, to, flags))
DEFINE_PATH(NAME, unlink, (const char *path), AT_FDCWD, path, (path))
DEFINE_PATH(NAME, rmdir, (const char *path), AT_FDCWD, path, (path))
DEFINE_PATH(NAME, unlinkat, (int dir, const char *path, int flags), dir, path,
            (dir, path, flags))
DEFINE_PATH(NAME, mkdir, (const char *path, mode_t mode), AT_FDCWD, path,
            (path, mode))
DEFINE_PATH(NAME, mkdirat, (int dir, const char *path, mode_t mode), dir, path,
            (dir, path, mode))
DEFINE_PATH(LOOK, stat, (const char *path, struct stat *st), AT_FDCWD, path,
            (path, st))
DEFINE_PATH(LOOK, stat64, (const char *path, struct stat64 *st), AT_FDCWD,
            path, (path, st))
DEFINE_PATH(LOOK, lstat, (const char *path, struct stat *st), AT_FDCWD, path,
            (path, st))
DEFINE_PATH(LOOK, lstat64, (const char *path, struct stat64 *st), AT_FDCWD,
            path, (path, st))
DEFINE_PATH(LOOK, fstatat,
            (int dir, const char *path, struct stat *st, int flags), dir, path,
            (dir, path, st, flags))
DEFINE_PATH(LOOK, fstatat64,
            (int dir, const char *path, struct stat64 *st, int flags), dir,
            path, (dir, path, st, flags))
DEFINE_PATH(LOOK, access, (const char *path, int how), AT_FDCWD, path,
            (path, how))

/* Unlocking does not fail. */
#define DEFINE_FCNTL(name) \
    int name(int fd, int command, ...) \
    { \
        REAL(name) \
        va_list args; \
        va_start(args, command); \
        void *argument = va_arg(args, void *); \
        va_end(args); \
        const struct flock *lock = argument; \
        if ((command == F_OFD_SETLK || command == F_SETLK) && \
            lock->l_type != F_UNLCK) { \
            FAIL_IF(LOCK, fd, NULL, -1) \
        } \
        return real(fd, command, argument); \
    }
DEFINE_FCNTL(fcntl)
DEFINE_FCNTL(fcntl64)

#define DEFINE_MMAP(name, offset) \
    void *name(void *address, size_t length, int protection, int flags, \
               int fd, offset at) \
    { \
        REAL(name) \
        if (fd >= 0) { \
            FAIL_IF(MAP, fd, NULL, MAP_FAILED) \
        } \
        return real(address, length, protection, flags, fd, at); \
    }
DEFINE_MMAP(mmap, off_t)
DEFINE_MMAP(mmap64, off64_t)
