/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lookup.h - finds the blocks of a batch that are stored already.
 *
 * Hints from the filter say which groups are worth their fingerprint store;
 * whole stores are loaded, a few per batch, and kept while they give hits
 * (LiveDFS's prefetching): neighbours of a hit are then found without a hint,
 * so that a filter of 1 in 16 fingerprints loses little.
 *
 * A hit is verified with the full fingerprint, or the bytes (I5), under the
 * shared lock of its group (I6), which is held until the look-up is closed.
 * Whatever goes wrong in a look-up counts as a miss: the block is stored anew.
 * Belongs to one transaction, one thread at a time, but for comparing.
 */
#ifndef GD_LOOKUP_H
#define GD_LOOKUP_H

#include "engine/format/address.h"
#include "engine/handle/repo.h"

/* Stores loaded for one batch, at most. */
enum { GD_COLD_LOADS = 4 };

typedef struct gd_lookup gd_lookup;

/* A block of a batch. */
typedef struct gd_block {
    uint64_t zeros_before; /* bytes of zeros between the last block and this */
    const uint8_t *data;
    uint32_t length;
    gd_address address; /* group 0: not found */
    gd_fingerprint fingerprint;
    uint64_t checksum; /* of what is stored as new (hashing.h) */
} gd_block;

/* Finds blocks of this scope only: a hint to a group of another one counts for
 * nothing, so that nothing of that is read, nor locked. */
gd_status gd_lookup_open(gd_repo *repo, const gd_scope *scope,
                         gd_lookup **lookup, gd_error *err);
/* Releases the shared locks.  REQUIRES: the recipe is committed or given
 * up. */
void gd_lookup_close(gd_lookup *lookup);

/* Where blocks are compared by value, looks for each among the stores at hand,
 * and fills in the address of one that is equal, or group 0.  Any number of
 * threads at once, for different blocks, while nothing else is done with the
 * look-up.  worker: as a job's task is told. */
void gd_lookup_compare(gd_lookup *lookup, gd_block *blocks, size_t count,
                       unsigned worker);
/* Fills in the address of each block found; the others' become group 0.  At
 * most `loads` stores are loaded for it.  Without data (NULL) only where
 * fingerprints decide.
 * REQUIRES: by value, that the address is group 0, or gd_lookup_compare's of
 * just before. */
void gd_lookup_batch(gd_lookup *lookup, gd_block *blocks, size_t count,
                     unsigned loads);
/* Asks the groups themselves whether each block's address is that of a
 * published, live block of the scope, with its fingerprint and length; the
 * others' become
 * group 0.  Runs of consecutive addresses are cheap.  An error says that it could
 * not be found out for all; a group that is gone or damaged is none.
 * REQUIRES: the shared locks of all groups named. */
gd_status gd_lookup_confirm(gd_lookup *lookup, gd_block *blocks, size_t count,
                            gd_error *err);
/* Whether the look-up holds the group's shared lock. */
bool gd_lookup_holds(const gd_lookup *lookup, uint32_t group);

#endif
