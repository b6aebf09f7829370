/* SPDX-License-Identifier: Apache-2.0 */
/*
 * witness.c - a library to be preloaded: it reports each system call of
 * interest to a test, over a socket, before and after the call is made, and
 * waits for the answer. So a test sees the order of the calls, does something
 * of its own between any two of them, and makes any of them fail.
 *
 * witness_start(socket, root) begins it for the calling process, and not for
 * those it forks; only calls on files below root are reported.
 *
 * A message is one line: "before" or "after", the call, its arguments, and
 * after it its result, with tabs between them. The answer is one line: 0 to
 * continue, or an errno value for the call to fail with: unmade, if that was
 * the answer to "before".
 *
 * Its second mode sends no messages and does not wait: see journal.h.
 */
#include "tests/functional/journal.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pid_t process;
static int channel = -1;
static char top[PATH_MAX];

int witness_start(const char *address, const char *root);

int
witness_start(const char *address, const char *root)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    snprintf(name.sun_path, sizeof name.sun_path, "%s", address);
    snprintf(top, sizeof top, "%s", root);
    channel = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (channel < 0 ||
        connect(channel, (struct sockaddr *)&name, sizeof name) < 0) {
        return -1;
    }
    process = getpid();
    return 0;
}

static bool
is_active(void)
{
    return process != 0 && process == getpid();
}

/* Returns the part of a path below the root; NULL if it is elsewhere. */
static const char *
below(const char *path)
{
    size_t length = strlen(top);
    if (strncmp(path, top, length) != 0 ||
        (path[length] != '/' && path[length] != '\0')) {
        return NULL;
    }
    return path[length] == '\0' ? "." : path + length + 1;
}

static const char *
path_of(int fd, char out[PATH_MAX])
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) {
        return NULL;
    }
    out[n] = '\0';
    return below(out);
}

static const char *
path_at(int dir, const char *path, char out[PATH_MAX])
{
    if (path[0] == '/') {
        return below(path);
    }
    if (dir == AT_FDCWD || path_of(dir, out) == NULL) {
        return NULL;
    }
    size_t used = strlen(out);
    snprintf(out + used, PATH_MAX - used, "/%s", path);
    return below(out);
}

/* Returns the answer. */
static int
tell(const char *format, ...)
{
    char line[3 * PATH_MAX];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    int saved = errno;
    pthread_mutex_lock(&mutex);
    if (send(channel, line, (size_t)length, MSG_NOSIGNAL) != length) {
        _exit(77);
    }
    char answer[16] = "";
    for (size_t i = 0; i < sizeof answer - 1; i++) {
        if (recv(channel, &answer[i], 1, 0) != 1) {
            _exit(77);
        }
        if (answer[i] == '\n') {
            break;
        }
    }
    pthread_mutex_unlock(&mutex);
    errno = saved;
    return atoi(answer);
}

/* Makes the call between two messages.  WORDS is a format and its values. */
#define WITNESS(type, call, failure, format, ...) \
    do { \
        int fault = tell("before\t" format "\n", __VA_ARGS__); \
        if (fault != 0) { \
            errno = fault; \
            return failure; \
        } \
        type result = call; \
        int found = errno; \
        fault = tell("after\t" format "\t%ld\n", __VA_ARGS__, \
                     result == (type)-1 ? -(long)found : (long)result); \
        if (fault != 0) { \
            errno = fault; \
            return failure; \
        } \
        errno = found; \
        return result; \
    } while (0)

int
openat(int dir, const char *path, int flags, ...)
{
    REAL(openat)
    mode_t mode = 0;
    if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
        va_list args;
        va_start(args, flags);
        mode = va_arg(args, mode_t);
        va_end(args);
    }
    char out[PATH_MAX];
    const char *name = is_active() ? path_at(dir, path, out) : NULL;
    if (name == NULL) {
        return journal_open(dir, path, flags, mode);
    }
    WITNESS(int, real(dir, path, flags, mode), -1, "openat\t%s\t%s", name,
            (flags & O_CREAT) != 0 ? "create" : "open");
}

int
close(int fd)
{
    REAL(close)
    char out[PATH_MAX];
    const char *name = is_active() ? path_of(fd, out) : NULL;
    if (name == NULL) {
        return real(fd);
    }
    WITNESS(int, real(fd), -1, "close\t%s", name);
}

int
fsync(int fd)
{
    REAL(fsync)
    journal_gate("fsync", fd, NULL);
    RECORD(int, real(fd), journal_synced(fd))
    char out[PATH_MAX];
    const char *name = is_active() ? path_of(fd, out) : NULL;
    if (name == NULL) {
        return real(fd);
    }
    WITNESS(int, real(fd), -1, "fsync\t%s", name);
}

int
fdatasync(int fd)
{
    REAL(fdatasync)
    journal_gate("fdatasync", fd, NULL);
    RECORD(int, real(fd), journal_synced(fd))
    char out[PATH_MAX];
    const char *name = is_active() ? path_of(fd, out) : NULL;
    if (name == NULL) {
        return real(fd);
    }
    WITNESS(int, real(fd), -1, "fdatasync\t%s", name);
}

int
ftruncate(int fd, off_t length)
{
    REAL(ftruncate)
    RECORD(int, real(fd, length),
           journal_length(JOURNAL_TRUNCATE, fd, (uint64_t)length))
    char out[PATH_MAX];
    const char *name = is_active() ? path_of(fd, out) : NULL;
    if (name == NULL) {
        return real(fd, length);
    }
    WITNESS(int, real(fd, length), -1, "ftruncate\t%s\t%lld", name,
            (long long)length);
}

/* Returns the error itself. */
int
posix_fallocate(int fd, off_t offset, off_t length)
{
    REAL(posix_fallocate)
    if (journal_enter()) {
        int error = real(fd, offset, length);
        if (error == 0) {
            journal_fallocated(fd, 0, offset, length);
        }
        journal_leave();
        return error;
    }
    char out[PATH_MAX];
    const char *name = is_active() ? path_of(fd, out) : NULL;
    if (name == NULL) {
        return real(fd, offset, length);
    }
    WITNESS(int, real(fd, offset, length), errno, "posix_fallocate\t%s", name);
}

ssize_t
pread(int fd, void *buffer, size_t length, off_t offset)
{
    REAL(pread)
    char out[PATH_MAX];
    const char *name = is_active() ? path_of(fd, out) : NULL;
    if (name == NULL) {
        return real(fd, buffer, length, offset);
    }
    WITNESS(ssize_t, real(fd, buffer, length, offset), -1,
            "pread\t%s\t%lld\t%zu", name, (long long)offset, length);
}

ssize_t
pwritev(int fd, const struct iovec *iov, int count, off_t offset)
{
    REAL(pwritev)
    journal_gate("pwritev", fd, NULL);
    RECORD(ssize_t, real(fd, iov, count, offset),
           journal_written(fd, iov, count, offset, result))
    char out[PATH_MAX];
    const char *name = is_active() ? path_of(fd, out) : NULL;
    if (name == NULL) {
        return real(fd, iov, count, offset);
    }
    size_t length = 0;
    for (int i = 0; i < count; i++) {
        length += iov[i].iov_len;
    }
    WITNESS(ssize_t, real(fd, iov, count, offset), -1,
            "pwritev\t%s\t%lld\t%zu", name, (long long)offset, length);
}

int
fallocate(int fd, int mode, off_t offset, off_t length)
{
    REAL(fallocate)
    RECORD(int, real(fd, mode, offset, length),
           journal_fallocated(fd, mode, offset, length))
    char out[PATH_MAX];
    const char *name = is_active() ? path_of(fd, out) : NULL;
    if (name == NULL) {
        return real(fd, mode, offset, length);
    }
    WITNESS(int, real(fd, mode, offset, length), -1, "fallocate\t%s\t%lld",
            name, (long long)offset);
}

/* These three are LevelDB's. */

ssize_t
write(int fd, const void *buffer, size_t length)
{
    REAL(write)
    struct iovec iov = {(void *)buffer, length};
    RECORD(ssize_t, real(fd, buffer, length),
           journal_written(fd, &iov, 1, -1, result))
    char out[PATH_MAX];
    const char *name = is_active() ? path_of(fd, out) : NULL;
    if (name == NULL) {
        return real(fd, buffer, length);
    }
    WITNESS(ssize_t, real(fd, buffer, length), -1, "write\t%s\t%zu", name,
            length);
}

int
rename(const char *from, const char *to)
{
    REAL(rename)
    RECORD_RENAME(AT_FDCWD, from, AT_FDCWD, to, real(from, to))
    const char *name = is_active() ? below(from) : NULL;
    const char *target = name != NULL ? below(to) : NULL;
    if (target == NULL) {
        return real(from, to);
    }
    WITNESS(int, real(from, to), -1, "rename\t%s\t%s", name, target);
}

int
unlink(const char *path)
{
    REAL(unlink)
    RECORD_UNLINK(AT_FDCWD, path, real(path))
    const char *name = is_active() ? below(path) : NULL;
    if (name == NULL) {
        return real(path);
    }
    WITNESS(int, real(path), -1, "unlink\t%s", name);
}

int
linkat(int from_dir, const char *from, int to_dir, const char *to, int flags)
{
    REAL(linkat)
    journal_gate("linkat", to_dir, to);
    RECORD(int, real(from_dir, from, to_dir, to, flags),
           journal_linked(journal_find(from_dir, from), to_dir, to))
    char out[PATH_MAX], other[PATH_MAX];
    const char *name = is_active() ? path_at(from_dir, from, out) : NULL;
    const char *target = name != NULL ? path_at(to_dir, to, other) : NULL;
    if (target == NULL) {
        return real(from_dir, from, to_dir, to, flags);
    }
    WITNESS(int, real(from_dir, from, to_dir, to, flags), -1,
            "linkat\t%s\t%s", name, target);
}

int
renameat(int from_dir, const char *from, int to_dir, const char *to)
{
    REAL(renameat)
    journal_gate("renameat", to_dir, to);
    RECORD_RENAME(from_dir, from, to_dir, to,
                  real(from_dir, from, to_dir, to))
    char out[PATH_MAX], other[PATH_MAX];
    const char *name = is_active() ? path_at(from_dir, from, out) : NULL;
    const char *target = name != NULL ? path_at(to_dir, to, other) : NULL;
    if (target == NULL) {
        return real(from_dir, from, to_dir, to);
    }
    WITNESS(int, real(from_dir, from, to_dir, to), -1, "renameat\t%s\t%s",
            name, target);
}

int
unlinkat(int dir, const char *path, int flags)
{
    REAL(unlinkat)
    journal_gate("unlinkat", dir, path);
    RECORD_UNLINK(dir, path, real(dir, path, flags))
    char out[PATH_MAX];
    const char *name = is_active() ? path_at(dir, path, out) : NULL;
    if (name == NULL) {
        return real(dir, path, flags);
    }
    WITNESS(int, real(dir, path, flags), -1, "unlinkat\t%s", name);
}

int
fcntl(int fd, int command, ...)
{
    REAL(fcntl)
    va_list args;
    va_start(args, command);
    void *argument = va_arg(args, void *);
    va_end(args);
    char out[PATH_MAX];
    const char *name = is_active() && command == F_OFD_SETLK
                           ? path_of(fd, out)
                           : NULL;
    if (name == NULL) {
        return real(fd, command, argument);
    }
    const struct flock *lock = argument;
    WITNESS(int, real(fd, command, argument), -1, "lock\t%s\t%lld\t%s", name,
            (long long)lock->l_start,
            lock->l_type == F_RDLCK   ? "shared"
            : lock->l_type == F_WRLCK ? "exclusive"
                                      : "free");
}
