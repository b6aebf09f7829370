/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lookup.h - finds the blocks of a batch that are stored already.
 *
 * The index's hints (hintindex.h) name the groups whose fingerprint stores are
 * worth loading.  Whole stores are loaded, a few per batch, and kept while they
 * give hits, as in LiveDFS's prefetching.  The neighbours of a hit are then
 * found without a hint, so a filter that has only 1 in 16 fingerprints loses
 * little.
 *
 * A hit is verified with the full fingerprint, or the bytes (I5), under the
 * shared lock of its group (I6).  The lock is held until the look-up is
 * closed.  Any failure in a look-up counts as a miss: the block is stored
 * again.  Belongs to one transaction, one thread at a time, except for
 * comparing.
 */
#ifndef GD_LOOKUP_H
#define GD_LOOKUP_H

#include "engine/format/address.h"
#include "engine/repo/repo.h"

/* The most stores loaded for one batch. */
enum { GD_COLD_LOADS = 4 };

typedef struct gd_lookup gd_lookup;

/* Choice of the blocks that are looked up (volumes.rst, "Hints"). */
typedef enum gd_dedup {
    GD_DEDUP_ALL,
    GD_DEDUP_PROBE, /* a sample of each batch; all of it if one is found */
    GD_DEDUP_SKIP,  /* only among the transaction's own blocks */
    GD_DEDUP_OFF,   /* none, and no look-up finds these blocks (I14) */
} gd_dedup;

/* A block of a batch. */
typedef struct gd_block {
    uint64_t zeros_before; /* bytes of zeros between the last block and this
                            * one */
    const uint8_t *data;
    uint32_t length;
    gd_address address; /* group 0: not found */
    gd_fingerprint fingerprint;
    uint64_t checksum; /* of a block stored as new (hashing.h) */
} gd_block;

/* Finds blocks of this scope only.  Hints to groups of other scopes are
 * ignored, so those groups are neither read nor locked. */
gd_status gd_lookup_open(gd_repo *repo, const gd_scope *scope,
                         gd_lookup **lookup, gd_error *err);
/* Releases the shared locks.
 * REQUIRES: the recipe is committed or given up. */
void gd_lookup_close(gd_lookup *lookup);

/* If blocks are compared by value, searches the loaded stores for each block,
 * and fills in the address of an equal one, or group 0.  Several threads may
 * call this at once, for different blocks, while nothing else uses the look-up.
 * worker is the number that the pool gives to a job's task. */
void gd_lookup_compare(gd_lookup *lookup, gd_block *blocks, size_t count,
                       unsigned worker);
/* Loads the stores of these groups, at most GD_CACHED_STORES, for the batches to
 * come.  A store that is not available now is left out. */
void gd_lookup_expect(gd_lookup *lookup, const uint32_t *groups, size_t count);
/* Plain bytes of blocks found in these groups. */
uint64_t gd_lookup_expected(const gd_lookup *lookup);
/* Returns whether one of a sample of the blocks is found; all stay without
 * address unless this fills it in. */
bool gd_lookup_probe(gd_lookup *lookup, gd_block *blocks, size_t count);
/* Fills in the address of each block that is found, and group 0 for the
 * others.  Loads at most `loads` stores for this.  data may be NULL only where
 * fingerprints decide.
 * REQUIRES: the address is group 0, or it was just filled in by
 * gd_lookup_compare, where blocks are compared by value, or by
 * gd_lookup_verify, elsewhere. */
void gd_lookup_batch(gd_lookup *lookup, gd_block *blocks, size_t count,
                     unsigned loads);
/* Reads the groups to check each block's address: it must be that of a
 * published, live block of the scope with this fingerprint and length.  Other
 * addresses become group 0.  Runs of consecutive addresses are cheap.  A group
 * that is gone or damaged has no such block.  An error means that not all could
 * be checked.
 * REQUIRES: the shared locks of all groups named. */
gd_status gd_lookup_confirm(gd_lookup *lookup, gd_block *blocks, size_t count,
                            gd_error *err);
/* The same for addresses that come from others, which may be anything: takes
 * the shared locks first.  Addresses become group 0 where a lock is refused, or
 * the block has the mark nodedup (I14), too. */
gd_status gd_lookup_verify(gd_lookup *lookup, gd_block *blocks, size_t count,
                           gd_error *err);
/* Takes the group's shared lock, until the look-up is closed.  Returns false if
 * the scope is another one than the look-up's, or the lock is refused. */
bool gd_lookup_share(gd_lookup *lookup, const gd_scope *scope, uint32_t group);
/* Returns whether the look-up holds the group's shared lock. */
bool gd_lookup_holds(const gd_lookup *lookup, uint32_t group);

#endif
