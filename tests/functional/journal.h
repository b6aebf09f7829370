/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.h - the mutating calls below a directory, noted with their data.
 *
 * witness_record(journal, root) begins it for the calling process, and not for
 * those it forks. Each call that succeeded becomes a record at the journal's
 * end, in the order in which the calls took effect: two of them are never made
 * at the same time. Files and directories are named by their inode's number,
 * which may be used again, names by their directory's. The journal must not be
 * below root.
 *
 * A record is a struct journal_record, the two names, and the data.
 */
#ifndef WITNESS_JOURNAL_H
#define WITNESS_JOURNAL_H

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) { \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    }

/* Makes a call, and records it if it succeeds, if this process is recorded;
 * else only makes it. */
#define RECORD(type, call, note) \
    if (journal_enter()) { \
        type result = call; \
        int found = errno; \
        if (result != (type)-1) { \
            note; \
        } \
        journal_leave(); \
        errno = found; \
        return result; \
    }

/* The files that the names lead to must be known before. */
#define RECORD_RENAME(from_dir, from, to_dir, to, call) \
    if (journal_enter()) { \
        struct journal_name old = journal_find(from_dir, from); \
        struct journal_name new = journal_find(to_dir, to); \
        int result = call; \
        int found = errno; \
        if (result == 0) { \
            journal_renamed(old, new); \
        } \
        journal_leave(); \
        errno = found; \
        return result; \
    }

#define RECORD_UNLINK(dir, path, call) \
    if (journal_enter()) { \
        struct journal_name old = journal_find(dir, path); \
        int result = call; \
        int found = errno; \
        if (result == 0) { \
            journal_unlinked(old); \
        } \
        journal_leave(); \
        errno = found; \
        return result; \
    }

enum journal_kind {
    JOURNAL_CREATE = 1, /* inode, dir, name */
    JOURNAL_MKDIR,      /* inode, dir, name */
    JOURNAL_WRITE,      /* inode, offset, data */
    JOURNAL_TRUNCATE,   /* inode, length */
    JOURNAL_ALLOCATE,   /* inode, length: of the file at least */
    JOURNAL_PUNCH,      /* inode, offset, length */
    JOURNAL_LINK,       /* inode, dir, name */
    JOURNAL_RENAME,     /* inode, dir, name; other_dir, other: where to */
    JOURNAL_UNLINK,     /* inode, dir, name; of a directory, too */
    JOURNAL_SYNC,       /* inode */
    JOURNAL_MARK,       /* data: the words */
    JOURNAL_UNKNOWN,    /* data: the call */
};

struct journal_record {
    uint32_t size; /* of all of it */
    uint32_t kind;
    uint64_t inode;
    uint64_t dir;
    uint64_t other_dir;
    uint64_t offset;
    uint64_t length;
    uint16_t name_length;
    uint16_t other_length;
    uint32_t data_length;
};

/* The file that a name leads to. */
struct journal_name {
    bool below; /* the root; if not, the rest means nothing */
    bool exists;
    uint64_t inode;
    uint64_t dir;
    char name[256];
};

int witness_record(const char *path, const char *root);
void witness_mark(const char *text);
/* Makes the next call of this name, by any thread but this one, on a file
 * whose path below the root begins so, wait before it is made: until
 * witness_open, or for half a minute. */
void witness_gate(const char *call, const char *path);
/* Returns true if a call waits there, within so many milliseconds. */
int witness_arrived(int milliseconds);
void witness_open(void);
/* From now on file systems have so many bytes free; UINT64_MAX: as many as they
 * have. */
void witness_room(uint64_t bytes);

/* Returns false if this process is not recorded; else no other thread enters
 * until journal_leave. */
bool journal_enter(void);
void journal_leave(void);
/* Waits if there is a gate for this call; path is NULL, or relative to dir. */
void journal_gate(const char *call, int dir, const char *path);

/* REQUIRE: between journal_enter and journal_leave. Functions that take a file
 * do nothing if it is not below the root. */
struct journal_name journal_find(int dir, const char *path);
void journal_written(int fd, const struct iovec *iov, int count,
                     int64_t offset, ssize_t written);
void journal_length(enum journal_kind kind, int fd, uint64_t length);
void journal_fallocated(int fd, int mode, off_t offset, off_t length);
void journal_synced(int fd);
void journal_linked(struct journal_name from, int dir, const char *to);
void journal_renamed(struct journal_name from, struct journal_name to);
void journal_unlinked(struct journal_name name);
int journal_open(int dir, const char *path, int flags, mode_t mode);

#endif
