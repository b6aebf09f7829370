/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sharedfs.h - what the parts of the shared file system have in common.
 *
 * One process is one host's client.  Its server is a directory that all have
 * in common, the backing directory.  What a client keeps to itself:
 *
 *   pages        in the kernel's page cache, dropped when the file is found to
 *                have changed: at each open, or when its attributes are asked
 *                for anew
 *   blocks       here (blocks.c), if `pages` is `stay`: those that were read
 *                through an open file, until it is closed or this client writes
 *                to the file.  So a process that has a file open for long puts
 *                old bytes into the kernel's page cache, where a process that
 *                has just opened the file finds them.  JuiceFS does so.
 *   attributes   in the kernel, for `attributes` seconds
 *   names        here (nodes.c), also of files that are missing, for `names`
 *                seconds; older ones count if the directory has not changed;
 *                opening a directory asks whether it has
 *   written data here (dirty.c), until fsync, or until the file is closed
 *
 * So a client that is killed loses what was written and not synced, as a host
 * does.  Locks are taken on the server's files, by a descriptor of its own for
 * each open file; so those of a client that is killed fall.
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
     * to read or write through it is an error, as on NFS. */
    enum { LOST_SILENT, LOST_ERROR } lost;
    double attributes; /* seconds */
    double names;
} options;

typedef struct name name;
typedef struct range range;

/* A file or directory of the server that this client knows. */
typedef struct node {
    struct node *next; /* in its bucket */
    dev_t dev;
    ino_t ino;
    int fd;            /* O_PATH */
    uint64_t lookups;  /* the kernel's references */
    struct stat attr;  /* as last asked for */
    double asked;      /* when that was; 0: never */
    uint64_t seen;     /* the version that the kernel's pages are of */
    bool removed_here; /* a name of it, by this client */

    /* Of a directory. */
    name *names;
    double names_asked;
    uint64_t names_seen; /* the version that the names are of */

    /* Of a file: what was written, and is not with the server. */
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

/* When an open file first took a lock; 0: it never did. */
unsigned held_now(void);
/* Whether the server has dropped this client's locks since, and it is told. */
bool is_lost(unsigned held);

/* ---- versions: every change of a file or directory counts ---- */

/* Shared by all clients; -1 and errno on failure. */
int versions_open(const char *path);
uint64_t version_of(const node *n);
/* Something of the node was changed by this client, which knows what. */
void version_bump(node *n, uint64_t *seen);

/* ---- nodes.c ---- */

extern node root;
extern pthread_mutex_t nodes_mutex; /* guards the table and all names */

/* The node of an O_PATH descriptor, which is taken over; one lookup more. */
node *node_of(int fd, const struct stat *st);
void node_forget(node *n, uint64_t lookups);

/* What is remembered of a name: 1 and *child if it is there, with one lookup
 * more, 0 if it is known to be missing, -1 if it has to be asked for. */
int name_recall(node *dir, const char *text, double lifetime, node **child);
/* child NULL: it is missing. */
void name_remember(node *dir, const char *text, const node *child);
void name_forget(node *dir, const char *text);
/* Of a file that is gone: all names that lead to it. */
void name_forget_all(const node *child);
/* As if their time were over. */
void names_expire(node *dir);

/* ---- dirty.c; each but dirty_end takes the node's mutex ---- */

/* held: of the file that is written through.  If its locks are lost before the
 * flush, that is an error, and nothing of it reaches the server. */
int dirty_write(node *n, unsigned held, const char *data, size_t size,
                off_t offset);
/* Puts what is dirty over what was read of the server; returns the bytes that
 * are there. */
ssize_t dirty_read(node *n, int server, char *data, size_t size,
                   off_t offset);
/* 0, or an error's number. */
int dirty_flush(node *n);
/* This client changes the file's content. */
void dirty_count(node *n);
/* How often it did. */
uint64_t dirty_writes(node *n);
/* Where the file ends, if that is behind what the server has; else 0. */
off_t dirty_end(node *n);
void dirty_free(node *n);

/* ---- blocks.c: what was read through an open file ---- */

typedef struct blocks blocks;

blocks *blocks_open(void);
/* REQUIRES, here and below: the caller holds the node's mutex. */
void blocks_share(blocks *b);
/* Whether that was the last open file's. */
bool blocks_close(blocks *b);
/* As dirty_read, of the blocks that are kept; keeps those that it reads.
 * REQUIRES: the caller does not hold the node's mutex. */
ssize_t blocks_read(blocks *b, node *n, int server, char *data, size_t size,
                    off_t offset);

#endif
