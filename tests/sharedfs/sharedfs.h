/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sharedfs.h - declarations for the parts of the shared file system.
 *
 * One process is one host's client.  Its server is a directory that all share,
 * the backing directory.  A client keeps this to itself:
 *
 *   pages        in the kernel's page cache, dropped when the file is found to
 *                have changed: at each open, or when its attributes are read
 *                again
 *   blocks       here (blocks.c), if `pages` is `stay`: those that were read
 *                through an open file, until it is closed or this client writes
 *                to the file.  So a process that has a file open for long puts
 *                old bytes into the kernel's page cache, where a process that
 *                has just opened the file finds them.  JuiceFS does so.
 *   attributes   in the kernel, for `attributes` seconds
 *   names        here (nodes.c), also of files that are missing, for `names`
 *                seconds; older ones count if the directory has not changed;
 *                opening a directory checks whether it has
 *   written data here (dirty.c), until fsync, or until the file is closed
 *
 * So a killed client loses data that was written and not synced, as a host
 * does.  Locks are taken on the server's files, by a descriptor of its own for
 * each open file; so the locks of a killed client fall.
 */
#ifndef SHAREDFS_H
#define SHAREDFS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

/* How the file system behaves; all but the first of each enum are faults, but
 * of `lost`, where the first is the fault. */
typedef struct options {
    enum { LOCKS_SHARED, LOCKS_REFUSED, LOCKS_LOCAL, LOCKS_IGNORED } locks;
    enum { LINK_EXCLUSIVE, LINK_REPLACES } link;
    enum { RENAME_ATOMIC, RENAME_WITH_GAP } rename;
    enum { FSYNC_WRITES, FSYNC_NOTHING } fsync;
    enum { OPEN_ASKS, OPEN_TRUSTS_CACHE } open;
    enum { UNLINKED_KEPT, UNLINKED_STALE, UNLINKED_MISSING } unlinked;
    enum { PUNCH_WORKS, PUNCH_UNSUPPORTED } punch;
    enum { PAGES_FOLLOW, PAGES_STAY } pages;
    /* Memory that is shared with a file, as mmap gives it, is refused by
     * GlusterFS with direct-io-mode=enable. */
    enum { MAPS_WORK, MAPS_REFUSED } maps;
    enum { DIRECT_WORKS, DIRECT_REFUSED } direct;
    /* An open file whose locks the server has dropped can be used as before; or
     * reading and writing through it are errors, as on NFS. */
    enum { LOST_SILENT, LOST_ERROR } lost;
    double attributes; /* seconds */
    double names;
} options;

typedef struct name name;
typedef struct range range;

/* A file or directory of the server that this client has looked up. */
typedef struct node {
    struct node *next; /* in its bucket */
    dev_t dev;
    ino_t ino;
    int fd;            /* O_PATH */
    uint64_t lookups;  /* the kernel's references */
    struct stat attr;  /* as last read */
    double asked;      /* when that was; 0: never */
    uint64_t seen;     /* the version that the kernel's pages are of */
    bool removed_here; /* a name of it, by this client */

    /* Of a directory. */
    name *names;
    double names_asked;
    uint64_t names_seen; /* the version that the names are of */

    /* Of a file: the data that is not on the server yet. */
    pthread_mutex_t mutex; /* guards the following */
    uint64_t writes;       /* by this client */
    struct blocks *read;   /* through open files; NULL: none are kept */
    int memory;            /* memfd with the bytes, at their offsets; or -1 */
    int server;            /* to write them to; or -1 */
    range *dirty;          /* sorted, apart */
    unsigned held;         /* of the open file that they were written through */
    off_t dirty_end;
} node;

double seconds(void);

/* Returns the mark of a file that takes its first lock; a mark is never 0. */
unsigned held_now(void);
/* Returns whether the server has dropped this client's locks since the mark,
 * and the client may notice it. */
bool is_lost(unsigned held);

/* ---- versions: every change of a file or directory counts ---- */

/* Shared by all clients; -1 and errno on failure. */
int versions_open(const char *path);
uint64_t version_of(const node *n);
/* Counts a change of the node by this client, whose caches stay valid. */
void version_bump(node *n, uint64_t *seen);

/* ---- nodes.c ---- */

extern node root;
extern pthread_mutex_t nodes_mutex; /* guards the table and all names */

/* The node of an O_PATH descriptor, which is taken over; one lookup more. */
node *node_of(int fd, const struct stat *st);
void node_forget(node *n, uint64_t lookups);

/* Returns 1 and *child for a remembered name, with one lookup more, 0 if it is
 * known to be missing, -1 if it has to be looked up on the server. */
int name_recall(node *dir, const char *text, double lifetime, node **child);
/* child NULL: it is missing. */
void name_remember(node *dir, const char *text, const node *child);
void name_forget(node *dir, const char *text);
/* Forgets all names of a file that is gone. */
void name_forget_all(const node *child);
/* Lets the names expire at once. */
void names_expire(node *dir);

/* ---- dirty.c; each but dirty_end takes the node's mutex ---- */

/* held: of the file that is written through.  If its locks are lost before the
 * flush, that is an error, and nothing of it reaches the server. */
int dirty_write(node *n, unsigned held, const char *data, size_t size,
                off_t offset);
/* Puts the dirty data over the data that was read from the server; returns the
 * number of bytes that exist. */
ssize_t dirty_read(node *n, int server, char *data, size_t size,
                   off_t offset);
/* 0, or an error's number. */
int dirty_flush(node *n);
/* Counts a change of the file's content by this client. */
void dirty_count(node *n);
/* Returns the number of these changes. */
uint64_t dirty_writes(node *n);
/* Returns the file's end if it is behind the server's end; else 0. */
off_t dirty_end(node *n);
void dirty_free(node *n);

/* ---- blocks.c: blocks that were read through an open file ---- */

typedef struct blocks blocks;

blocks *blocks_open(void);
/* REQUIRES, here and below: the caller holds the node's mutex. */
void blocks_share(blocks *b);
/* Returns whether that was the last open file. */
bool blocks_close(blocks *b);
/* Reads like dirty_read, from the kept blocks; keeps the blocks that it reads.
 * REQUIRES: the caller does not hold the node's mutex. */
ssize_t blocks_read(blocks *b, node *n, int server, char *data, size_t size,
                    off_t offset);

#endif
