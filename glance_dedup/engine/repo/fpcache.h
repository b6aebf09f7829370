/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fpcache.h - what a process keeps at hand of the groups: open files and loaded
 * fingerprint stores, each in a bounded LRU (lru.h).
 *
 * The cache lends both by reference count.  All transactions and readers of the
 * handle share them.  Thread-safe.  No file is opened, closed or examined under
 * a lock.
 */
#ifndef GD_FPCACHE_H
#define GD_FPCACHE_H

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/files/group.h"
#include "engine/format/fptable.h"

enum {
    GD_CACHED_STORES = 8, /* of up to 1.3 MiB in memory: fptable.h */
};

typedef struct gd_fpcache gd_fpcache;

/* groups: the number of files that stay open when nobody uses them. */
gd_status gd_fpcache_open(const gd_env *env, int root, const gd_params *params,
                          uint64_t groups, gd_fpcache **cache, gd_error *err);
/* REQUIRES: nothing lent. */
void gd_fpcache_close(gd_fpcache *cache);

/* Lends the open file of a group, and opens it if necessary.  With fresh, opens
 * it again by its name, since a rewrite of the group may have replaced the
 * file, and since a file that was open before may show what it had been: what
 * is then read is no older than the call, whichever host wrote it (N7.2).
 * *group is NULL after an error. */
gd_status gd_fpcache_group(gd_fpcache *cache, uint32_t number, bool fresh,
                           gd_group **group, gd_error *err);
void gd_fpcache_return_group(gd_fpcache *cache, gd_group *group);
/* Closes files whose names are gone, by collection or rewriting.  While they
 * are open, the disk does not get their space back. */
void gd_fpcache_drop_removed(gd_fpcache *cache);
/* The same for up to 64 files, those behind the ones of the last call.  For
 * callers that are in a hurry. */
void gd_fpcache_drop_some_removed(gd_fpcache *cache);
/* The same, unless five seconds have not passed since the last such call, or
 * since the cache was opened.  For callers that come often. */
void gd_fpcache_drop_removed_in_turn(gd_fpcache *cache);

/* Asks the disk to begin reading the group's store, unless one is cached. */
void gd_fpcache_expect_store(gd_fpcache *cache, uint32_t number);
/* Lends the group's fingerprint store as published now.  A cached store is used
 * only if it was loaded from this very file with this very record.  *cold: it
 * was read from the file.  REQUIRES: the shared group lock, so that nothing in
 * it is freed meanwhile (N7.2). */
gd_status gd_fpcache_store(gd_fpcache *cache, uint32_t number,
                           gd_fptable **store, bool *cold, gd_error *err);
void gd_fpcache_return_store(gd_fpcache *cache, gd_fptable *store);

#endif
