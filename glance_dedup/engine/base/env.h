/* SPDX-License-Identifier: Apache-2.0 */
/*
 * env.h - every system call the engine makes, in one table.
 *
 * The table lets a test count, delay or fail any call, and record the order
 * of writes.  Entries return what the system call returns, or -errno on
 * failure (never through errno, so that a fault is a plain value).  An entry
 * that tests replace may keep its state behind the gd_env it is called with:
 * embed a gd_env as the first member of a larger struct.
 *
 * All entries are safe to call from several threads at once.
 */
#ifndef GD_ENV_H
#define GD_ENV_H

#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "engine/base/status.h"

/* Of a parameter that an interface demands. */
#define GD_UNUSED __attribute__((unused))

typedef struct gd_env gd_env;

typedef struct gd_space {
    uint64_t free, total;               /* bytes */
    uint64_t free_files, total_files;   /* inodes; all 0 where the file system
                                         * makes them on demand */
} gd_space;

struct gd_env {
    int (*openat)(const gd_env *env, int dir, const char *path, int flags,
                  mode_t mode);
    int (*close)(const gd_env *env, int fd);
    ssize_t (*pread)(const gd_env *env, int fd, void *buf, size_t len,
                     uint64_t offset);
    ssize_t (*pwritev)(const gd_env *env, int fd, const struct iovec *iov,
                       int count, uint64_t offset);
    int (*fsync)(const gd_env *env, int fd);
    int (*fdatasync)(const gd_env *env, int fd);
    int (*ftruncate)(const gd_env *env, int fd, uint64_t length);
    int (*fallocate)(const gd_env *env, int fd, uint64_t offset,
                     uint64_t length);
    /* Frees the space of a range, which then reads as zeros.  The file's length
     * does not change. */
    int (*punch)(const gd_env *env, int fd, uint64_t offset, uint64_t length);
    int (*linkat)(const gd_env *env, int dir, const char *from, const char *to);
    int (*renameat)(const gd_env *env, int dir, const char *from,
                    const char *to);
    int (*unlinkat)(const gd_env *env, int dir, const char *path);
    /* Removes an empty directory. */
    int (*rmdirat)(const gd_env *env, int dir, const char *path);
    int (*mkdirat)(const gd_env *env, int dir, const char *path, mode_t mode);
    int (*fchmod)(const gd_env *env, int fd, mode_t mode);
    int (*fstat)(const gd_env *env, int fd, struct stat *st);
    /* Does not follow a symbolic link at the end of path. */
    int (*fstatat)(const gd_env *env, int dir, const char *path,
                   struct stat *st);
    /* On a file system that several hosts share, requests from the server the
     * names in path's directory, by opening it.  A file that is opened after
     * that is the one that has the name now, with the content that others have
     * closed or synced.  (A file that was opened before may go on showing what
     * it had been: no call that all file systems know has an open file asked
     * for again.)  On other file systems it costs microseconds. */
    int (*renew)(const gd_env *env, int dir, const char *path);
    /* 1 if other hosts may change files of this directory without this host's
     * page cache following; 0 if not; else -errno. */
    int (*is_shared)(const gd_env *env, int dir);
    /* Space that this user may still use of the file system, and its size. */
    int (*free_space)(const gd_env *env, int fd, gd_space *space);
    /* One OFD byte lock: type is F_RDLCK, F_WRLCK or F_UNLCK.  Never waits:
     * returns -EAGAIN when another open file description holds it. */
    int (*lock)(const gd_env *env, int fd, uint64_t byte, short type);
    /* 1 if another open file description has a lock of this byte, of any type;
     * else 0.  Takes no lock. */
    int (*is_locked)(const gd_env *env, int fd, uint64_t byte);
    /* Calls visit with each name except "." and "..", in no order. */
    int (*list)(const gd_env *env, int dir, const char *path,
                void (*visit)(void *arg, const char *name), void *arg);
    /* Start write-back or read-ahead of a range.  Both are advice: a failure
     * does not matter. */
    void (*start_writeback)(const gd_env *env, int fd, uint64_t offset,
                            uint64_t length);
    void (*start_readahead)(const gd_env *env, int fd, uint64_t offset,
                            uint64_t length);
    /* Drops a range from the page cache, except pages that are dirty or mapped.
     * Only whole pages; advice, too. */
    void (*drop_cache)(const gd_env *env, int fd, uint64_t offset,
                       uint64_t length);
    void *(*mmap_shared)(const gd_env *env, int fd, size_t length);
    /* Asks the system to put a mapping's memory together in large pages, so
     * that finding a place in it takes fewer steps; advice, too. */
    void (*use_large_pages)(const gd_env *env, void *address, size_t length);
    int (*munmap)(const gd_env *env, void *address, size_t length);
    int (*random)(const gd_env *env, void *buf, size_t len);
    /* The number of descriptors that this process may have open; 0 if that is
     * not known. */
    uint64_t (*descriptor_limit)(const gd_env *env);
    pid_t (*getpid)(const gd_env *env);
    uid_t (*geteuid)(const gd_env *env);
    int64_t (*now)(const gd_env *env); /* seconds since the epoch */
    /* Nanoseconds since some fixed moment, and nanoseconds of processor time
     * that the calling thread has used. */
    int64_t (*monotonic_ns)(const gd_env *env);
    int64_t (*thread_ns)(const gd_env *env);
    void (*sleep_ms)(const gd_env *env, unsigned ms);
    /* NULL when out of memory. */
    void *(*alloc)(const gd_env *env, size_t size, bool zeroed);
    void (*release)(const gd_env *env, void *memory);
};

/* The table of the real machine. */
const gd_env *gd_env_posix(void);

/* Loop over short counts and EINTR.  At the end of the file gd_read_full
 * returns GD_CORRUPT naming file and offset: a caller that reads an exact
 * length expects it to be there.  It also reads ranges that are not aligned
 * from files that were opened with O_DIRECT. */
gd_status gd_read_full(const gd_env *env, int fd, void *buf, size_t len,
                       uint64_t offset, const char *file, gd_error *err);
gd_status gd_write_full(const gd_env *env, int fd, const void *buf, size_t len,
                        uint64_t offset, const char *file, gd_error *err);
/* Like gd_write_full for several pieces in a row; iov is consumed. */
gd_status gd_writev_full(const gd_env *env, int fd, struct iovec *iov,
                         int count, uint64_t offset, const char *file,
                         gd_error *err);
/* Opens without following symbolic links; close-on-exec.  Does not wait for
 * anything that is not a regular file; if another program has a lease on the
 * file, waits a minute at most.  Before it reports a name as missing, it
 * revalidates it with the file system: another host may just have made it. */
gd_status gd_open(const gd_env *env, int dir, const char *path, int flags,
                  mode_t mode, int *fd, gd_error *err);
/* Fsyncs a directory, so that names made or removed in it are durable. */
gd_status gd_sync_dir(const gd_env *env, int dir, const char *path,
                      gd_error *err);
/* Make a file's contents durable. */
gd_status gd_fsync(const gd_env *env, int fd, const char *file, gd_error *err);
gd_status gd_fdatasync(const gd_env *env, int fd, const char *file,
                       gd_error *err);
gd_status gd_random(const gd_env *env, void *out, size_t length, gd_error *err);
/* Zeroed memory for count * size bytes, checked for overflow; NULL on
 * failure with GD_NOMEM in err. */
void *gd_calloc(const gd_env *env, size_t count, size_t size, gd_error *err);
/* The same without the zeros, which cost as much as filling a large buffer: for
 * memory that is filled before it is read. */
void *gd_alloc(const gd_env *env, size_t size, gd_error *err);
/* Returns whether a call for an open file failed since another host has
 * unlinked that file, and the server forgot it: NFS then returns ESTALE,
 * JuiceFS ENOENT. */
bool gd_is_forgotten(gd_status s, const gd_error *err);
/* Returns whether the name still leads to the open file (I4), also on file
 * systems that other hosts share.  What the file contains may still be what
 * this host read of it before. */
bool gd_same_file(const gd_env *env, int fd, int dir, const char *path);
/* The same for callers that must distinguish "no" from "unknown". */
gd_status gd_find_same(const gd_env *env, int fd, int dir, const char *path,
                       bool *same, gd_error *err);

#endif
