/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.c - see journal.h; and the calls that only it records: those of
 * Python, and of LevelDB.
 */
#include "tests/functional/journal.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pid_t process;
static int journal = -1;
static char top[PATH_MAX];

int
witness_record(const char *path, const char *root)
{
    snprintf(top, sizeof top, "%s", root);
    journal = (int)syscall(SYS_openat, AT_FDCWD, path,
                           O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (journal < 0) {
        return -1;
    }
    process = getpid();
    return 0;
}

bool
journal_enter(void)
{
    if (process == 0 || process != getpid()) {
        return false;
    }
    pthread_mutex_lock(&mutex);
    return true;
}

void
journal_leave(void)
{
    pthread_mutex_unlock(&mutex);
}

static void
append(struct journal_record record, const char *name, const char *other,
       const struct iovec *iov, int count, size_t data)
{
    record.name_length = (uint16_t)strlen(name);
    record.other_length = (uint16_t)strlen(other);
    record.data_length = (uint32_t)data;
    record.size = (uint32_t)(sizeof record + record.name_length +
                             record.other_length + data);
    char *whole = malloc(record.size);
    char *p = whole;
    memcpy(p, &record, sizeof record);
    p += sizeof record;
    memcpy(p, name, record.name_length);
    p += record.name_length;
    memcpy(p, other, record.other_length);
    p += record.other_length;
    for (int i = 0; i < count && data > 0; i++) {
        size_t n = iov[i].iov_len < data ? iov[i].iov_len : data;
        memcpy(p, iov[i].iov_base, n);
        p += n;
        data -= n;
    }
    if (syscall(SYS_write, journal, whole, record.size) !=
        (long)record.size) {
        _exit(77);
    }
    free(whole);
}

static void
append_text(enum journal_kind kind, const char *text)
{
    struct iovec iov = {(void *)text, strlen(text)};
    append((struct journal_record){.kind = kind}, "", "", &iov, 1,
           iov.iov_len);
}

void
witness_mark(const char *text)
{
    if (journal_enter()) {
        append_text(JOURNAL_MARK, text);
        journal_leave();
    }
}

static bool
is_below(const char *path)
{
    size_t length = strlen(top);
    return strncmp(path, top, length) == 0 &&
           (path[length] == '/' || path[length] == '\0');
}

static bool
path_of(int fd, char out[PATH_MAX])
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    out[n < 0 ? 0 : n] = '\0';
    return n > 0 && is_below(out);
}

/* Returns the inode, if it is below the root; else 0. */
static uint64_t
inode_of(int fd)
{
    char path[PATH_MAX];
    struct stat st;
    return path_of(fd, path) && fstat(fd, &st) == 0 ? st.st_ino : 0;
}

/* Returns the whole path, if it is below the root. */
static bool
path_at(int dir, const char *path, char out[2 * PATH_MAX])
{
    out[0] = '\0';
    if (path[0] != '/') {
        if (dir == AT_FDCWD || !path_of(dir, out)) {
            return false;
        }
        strcat(out, "/");
    }
    strncat(out, path, PATH_MAX - 1);
    for (size_t end = strlen(out); end > 1 && out[end - 1] == '/'; end--) {
        out[end - 1] = '\0';
    }
    return is_below(out);
}

/* -- gates ---------------------------------------------------------------- */

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    enum { GATE_NONE, GATE_SET, GATE_REACHED } state;
    pthread_t keeper;
    char call[32];
    char path[2 * PATH_MAX];
} gate = {.mutex = PTHREAD_MUTEX_INITIALIZER,
          .changed = PTHREAD_COND_INITIALIZER};

void
witness_gate(const char *call, const char *path)
{
    pthread_mutex_lock(&gate.mutex);
    snprintf(gate.call, sizeof gate.call, "%s", call);
    snprintf(gate.path, sizeof gate.path, "%s/%s", top, path);
    gate.keeper = pthread_self();
    gate.state = GATE_SET;
    pthread_mutex_unlock(&gate.mutex);
}

/* REQUIRES: gate.mutex. */
static void
wait_while(int state, int milliseconds)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += milliseconds / 1000;
    end.tv_nsec += milliseconds % 1000 * 1000000L;
    end.tv_sec += end.tv_nsec / 1000000000L;
    end.tv_nsec %= 1000000000L;
    while ((int)gate.state == state &&
           pthread_cond_timedwait(&gate.changed, &gate.mutex, &end) == 0) {
    }
}

int
witness_arrived(int milliseconds)
{
    pthread_mutex_lock(&gate.mutex);
    wait_while(GATE_SET, milliseconds);
    int arrived = gate.state == GATE_REACHED;
    pthread_mutex_unlock(&gate.mutex);
    return arrived;
}

void
witness_open(void)
{
    pthread_mutex_lock(&gate.mutex);
    gate.state = GATE_NONE;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.mutex);
}

void
journal_gate(const char *call, int dir, const char *path)
{
    if (process == 0 || process != getpid()) {
        return;
    }
    pthread_mutex_lock(&gate.mutex);
    char whole[2 * PATH_MAX];
    if (gate.state == GATE_SET && strcmp(call, gate.call) == 0 &&
        !pthread_equal(gate.keeper, pthread_self()) &&
        (path == NULL ? path_of(dir, whole) : path_at(dir, path, whole)) &&
        strncmp(whole, gate.path, strlen(gate.path)) == 0) {
        gate.state = GATE_REACHED;
        pthread_cond_broadcast(&gate.changed);
        wait_while(GATE_REACHED, 30000);
    }
    pthread_mutex_unlock(&gate.mutex);
}

/* -- room ----------------------------------------------------------------- */

static _Atomic uint64_t room = UINT64_MAX;

void
witness_room(uint64_t bytes)
{
    room = bytes;
}

int
fstatvfs(int fd, struct statvfs *found)
{
    REAL(fstatvfs)
    int rc = real(fd, found);
    if (rc == 0 && room != UINT64_MAX) {
        found->f_bavail = room / found->f_frsize;
    }
    return rc;
}

/* -- records -------------------------------------------------------------- */

struct journal_name
journal_find(int dir, const char *path)
{
    struct journal_name found = {.below = false};
    char whole[2 * PATH_MAX];
    struct stat st;
    /* The root itself has no name below it. */
    if (!path_at(dir, path, whole) || strcmp(whole, top) == 0) {
        return found;
    }
    found.below = true;
    found.exists = lstat(whole, &st) == 0;
    found.inode = found.exists ? st.st_ino : 0;
    char *name = strrchr(whole, '/');
    snprintf(found.name, sizeof found.name, "%s", name + 1);
    *name = '\0';
    found.dir = stat(whole, &st) == 0 ? st.st_ino : 0;
    return found;
}

void
journal_written(int fd, const struct iovec *iov, int count, int64_t offset,
                ssize_t written)
{
    uint64_t inode = inode_of(fd);
    if (inode == 0 || written <= 0) {
        return;
    }
    if (offset < 0) {
        offset = lseek(fd, 0, SEEK_CUR) - written;
    }
    append((struct journal_record){.kind = JOURNAL_WRITE,
                                   .inode = inode,
                                   .offset = (uint64_t)offset},
           "", "", iov, count, (size_t)written);
}

void
journal_length(enum journal_kind kind, int fd, uint64_t length)
{
    uint64_t inode = inode_of(fd);
    if (inode != 0) {
        append((struct journal_record){.kind = kind,
                                       .inode = inode,
                                       .length = length},
               "", "", NULL, 0, 0);
    }
}

void
journal_fallocated(int fd, int mode, off_t offset, off_t length)
{
    uint64_t inode = inode_of(fd);
    if (inode == 0) {
        return;
    }
    if (mode == 0) {
        journal_length(JOURNAL_ALLOCATE, fd, (uint64_t)(offset + length));
    } else if (mode == (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE)) {
        append((struct journal_record){.kind = JOURNAL_PUNCH,
                                       .inode = inode,
                                       .offset = (uint64_t)offset,
                                       .length = (uint64_t)length},
               "", "", NULL, 0, 0);
    } else if (mode != FALLOC_FL_KEEP_SIZE) {
        append_text(JOURNAL_UNKNOWN, "fallocate in another mode");
    }
}

void
journal_synced(int fd)
{
    journal_length(JOURNAL_SYNC, fd, 0);
}

static void
append_name(enum journal_kind kind, struct journal_name name)
{
    append((struct journal_record){.kind = kind,
                                   .inode = name.inode,
                                   .dir = name.dir},
           name.name, "", NULL, 0, 0);
}

void
journal_linked(struct journal_name from, int dir, const char *to)
{
    if (from.below) {
        append_name(JOURNAL_LINK, journal_find(dir, to));
    }
}

void
journal_renamed(struct journal_name from, struct journal_name to)
{
    /* Between two names of one file it has no effect. */
    if (!from.below || from.inode == to.inode) {
        return;
    }
    append((struct journal_record){.kind = JOURNAL_RENAME,
                                   .inode = from.inode,
                                   .dir = from.dir,
                                   .other_dir = to.dir},
           from.name, to.name, NULL, 0, 0);
}

void
journal_unlinked(struct journal_name name)
{
    if (name.below) {
        append_name(JOURNAL_UNLINK, name);
    }
}

static int
made_directory(int dir, const char *path)
{
    struct journal_name name = journal_find(dir, path);
    if (name.below) {
        append_name(JOURNAL_MKDIR, name);
    }
    return 0;
}

int
journal_open(int dir, const char *path, int flags, mode_t mode)
{
    static int (*real)(int, const char *, int, ...);
    if (real == NULL) {
        real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat");
    }
    if ((flags & (O_CREAT | O_TRUNC)) == 0 || !journal_enter()) {
        return real(dir, path, flags, mode);
    }
    struct journal_name name = journal_find(dir, path);
    int fd = real(dir, path, flags, mode);
    int found = errno;
    if (fd >= 0 && name.below) {
        if (!name.exists) {
            append_name(JOURNAL_CREATE, journal_find(dir, path));
        } else if ((flags & O_TRUNC) != 0) {
            journal_length(JOURNAL_TRUNCATE, fd, 0);
        }
    }
    journal_leave();
    errno = found;
    return fd;
}

/* -- the calls ------------------------------------------------------------ */

static mode_t
mode_of(int flags, va_list args)
{
    return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(args, mode_t) : 0;
}

#define DEFINE_OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        va_list args; \
        va_start(args, flags); \
        mode_t mode = mode_of(flags, args); \
        va_end(args); \
        return journal_open(AT_FDCWD, path, flags, mode); \
    }

DEFINE_OPEN(open)
DEFINE_OPEN(open64)

int
openat64(int dir, const char *path, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    mode_t mode = mode_of(flags, args);
    va_end(args);
    return journal_open(dir, path, flags, mode);
}

/* Opens LevelDB's log of messages, which has no reader: writes to it through
 * the stream are not recorded. */
static FILE *
open_stream(const char *path, const char *how, FILE *(*real)(const char *,
                                                             const char *))
{
    if (how[0] == 'r' || !journal_enter()) {
        return real(path, how);
    }
    struct journal_name name = journal_find(AT_FDCWD, path);
    FILE *stream = real(path, how);
    int found = errno;
    if (stream != NULL && name.below) {
        if (!name.exists) {
            append_name(JOURNAL_CREATE, journal_find(AT_FDCWD, path));
        } else if (how[0] == 'w') {
            journal_length(JOURNAL_TRUNCATE, fileno(stream), 0);
        }
    }
    journal_leave();
    errno = found;
    return stream;
}

FILE *
fopen(const char *path, const char *how)
{
    REAL(fopen)
    return open_stream(path, how, real);
}

FILE *
fopen64(const char *path, const char *how)
{
    REAL(fopen64)
    return open_stream(path, how, real);
}

#define DEFINE_PWRITE(name) \
    ssize_t name(int fd, const void *buffer, size_t length, off_t offset) \
    { \
        REAL(name) \
        struct iovec iov = {(void *)buffer, length}; \
        RECORD(ssize_t, real(fd, buffer, length, offset), \
               journal_written(fd, &iov, 1, offset, result)) \
        return real(fd, buffer, length, offset); \
    }

DEFINE_PWRITE(pwrite)
DEFINE_PWRITE(pwrite64)

ssize_t
pwritev64(int fd, const struct iovec *iov, int count, off_t offset)
{
    REAL(pwritev64)
    RECORD(ssize_t, real(fd, iov, count, offset),
           journal_written(fd, iov, count, offset, result))
    return real(fd, iov, count, offset);
}

ssize_t
writev(int fd, const struct iovec *iov, int count)
{
    REAL(writev)
    RECORD(ssize_t, real(fd, iov, count),
           journal_written(fd, iov, count, -1, result))
    return real(fd, iov, count);
}

int
ftruncate64(int fd, off_t length)
{
    REAL(ftruncate64)
    RECORD(int, real(fd, length),
           journal_length(JOURNAL_TRUNCATE, fd, (uint64_t)length))
    return real(fd, length);
}

/* Returns the error itself. */
int
posix_fallocate64(int fd, off_t offset, off_t length)
{
    REAL(posix_fallocate64)
    if (!journal_enter()) {
        return real(fd, offset, length);
    }
    int error = real(fd, offset, length);
    if (error == 0) {
        journal_fallocated(fd, 0, offset, length);
    }
    journal_leave();
    return error;
}

int
fallocate64(int fd, int mode, off_t offset, off_t length)
{
    REAL(fallocate64)
    RECORD(int, real(fd, mode, offset, length),
           journal_fallocated(fd, mode, offset, length))
    return real(fd, mode, offset, length);
}

int
link(const char *from, const char *to)
{
    REAL(link)
    RECORD(int, real(from, to),
           journal_linked(journal_find(AT_FDCWD, from), AT_FDCWD, to))
    return real(from, to);
}

int
mkdir(const char *path, mode_t mode)
{
    REAL(mkdir)
    RECORD(int, real(path, mode), made_directory(AT_FDCWD, path))
    return real(path, mode);
}

int
mkdirat(int dir, const char *path, mode_t mode)
{
    REAL(mkdirat)
    RECORD(int, real(dir, path, mode), made_directory(dir, path))
    return real(dir, path, mode);
}

int
rmdir(const char *path)
{
    REAL(rmdir)
    RECORD_UNLINK(AT_FDCWD, path, real(path))
    return real(path);
}

/* No program makes these calls below the root; if one does, the journal
 * records that it does not know them. */
int
renameat2(int from_dir, const char *from, int to_dir, const char *to,
          unsigned flags)
{
    REAL(renameat2)
    RECORD(int, real(from_dir, from, to_dir, to, flags),
           if (journal_find(to_dir, to).below) {
               append_text(JOURNAL_UNKNOWN, "renameat2");
           })
    return real(from_dir, from, to_dir, to, flags);
}

int
symlinkat(const char *target, int dir, const char *path)
{
    REAL(symlinkat)
    RECORD(int, real(target, dir, path), if (journal_find(dir, path).below) {
        append_text(JOURNAL_UNKNOWN, "symlinkat");
    })
    return real(target, dir, path);
}
