/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv.h - key-value stores for hints, with one interface for all backends.
 *
 * A store leads from a key, the first 8 bytes of a fingerprint, to an address.
 * These are the sparse stores of Dmdedup (Tarasov et al., OLS 2014).  A value
 * is 64 bits and never 0: 0 means that a key is absent.  The last value put for
 * a key is the one that counts.
 *
 * Everything in a store is a hint: the caller verifies what it finds (I5).  A
 * store may therefore lose keys in a crash, and drop keys above its capacity.
 * It must not harm the process, whatever its file holds (I10); hints.rst,
 * "Metadata backends", says how far each backend keeps this.
 *
 * A store belongs to one thread at a time, and to the process that opened it:
 * a child must neither use nor close it after fork.  With LMDB, the thread that
 * puts must commit, too, and other processes that want to change the store wait
 * until it does.
 */
#ifndef GD_KV_H
#define GD_KV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

typedef enum gd_kv_backend {
    GD_KV_INRAM,   /* a table in memory; empty after each open */
    GD_KV_DTB,     /* the same tables on the disk, through a cache */
    GD_KV_LMDB,    /* a copy-on-write B+-tree; several processes may share it */
    GD_KV_LEVELDB, /* log-structured */
    GD_KV_BACKENDS,
} gd_kv_backend;

#define GD_KV_MAX_CAPACITY (UINT64_C(1) << 36)

typedef struct gd_kv_options {
    uint64_t capacity; /* keys that the store holds at least; 1 to
                        * GD_KV_MAX_CAPACITY */
    uint64_t cache;    /* bytes of memory for DTB's and LevelDB's caches */
} gd_kv_options;

typedef struct gd_kv_pair {
    uint64_t key;
    uint64_t value;
} gd_kv_pair;

/* Counts since the store was opened.  LMDB and LevelDB do not report their
 * reads and writes: those counts stay 0. */
typedef struct gd_kv_stats {
    uint64_t gets; /* keys asked for, and found among them */
    uint64_t found;
    uint64_t puts;
    uint64_t dropped;    /* puts that found no room */
    uint64_t damaged;    /* damaged pages that were emptied */
    uint64_t reads;      /* calls to the disk, and their bytes */
    uint64_t writes;
    uint64_t bytes_read;
    uint64_t bytes_written;
    uint64_t syncs;
    uint64_t cache_hits; /* pages asked for that were in memory */
    uint64_t memory;     /* bytes reserved for the table or the cache */
} gd_kv_stats;

typedef struct gd_kv gd_kv;

/* "inram", "dtb", "lmdb" and "leveldb". */
const char *gd_kv_backend_name(gd_kv_backend backend);
/* False: no backend has this name. */
bool gd_kv_backend_parse(const char *name, gd_kv_backend *backend);

/* Opens the store at path, or makes an empty one.  The directory must exist.
 * INRAM uses no path.  A store that is damaged, or was made with other options,
 * is removed, and an empty one is made.  GD_BUSY: another process has it (all
 * but LMDB), or this one.  GD_DENIED: the file at path is not of this user
 * alone.  GD_NOTFOUND: a library is missing; the error names its package. */
gd_status gd_kv_open(const gd_env *env, gd_kv_backend backend,
                     const char *path, const gd_kv_options *options,
                     gd_kv **kv, gd_error *err);
/* Does not commit.  kv may be NULL. */
void gd_kv_close(gd_kv *kv);
/* Removes the store's files, if there are any.
 * REQUIRES: no process has it open, except with LMDB. */
gd_status gd_kv_remove(const gd_env *env, gd_kv_backend backend,
                       const char *path, gd_error *err);

/* Fills in the value of each key, or 0.  After an error the values are not
 * defined.  GD_CORRUPT: the store is damaged; close it and open it again after
 * gd_kv_remove. */
gd_status gd_kv_get_batch(gd_kv *kv, const uint64_t *keys, uint64_t *values,
                          size_t count, gd_error *err);
/* Later gets find the pairs at once; a crash may lose them until they are
 * committed.  After an error some may be in the store.  GD_INVALID: a value is
 * 0. */
gd_status gd_kv_put_batch(gd_kv *kv, const gd_kv_pair *pairs, size_t count,
                          gd_error *err);
/* The same, but no crash leaves one of these pairs in the store without all
 * earlier ones.  The next commit makes both durable: in one step with LMDB,
 * while DTB commits the earlier ones first. */
gd_status gd_kv_put_behind(gd_kv *kv, const gd_kv_pair *pairs, size_t count,
                           gd_error *err);
/* Makes all puts durable.  After a failed sync each later call
 * fails: close the store and open it again. */
gd_status gd_kv_commit(gd_kv *kv, gd_error *err);

void gd_kv_get_stats(const gd_kv *kv, gd_kv_stats *stats);

#endif
