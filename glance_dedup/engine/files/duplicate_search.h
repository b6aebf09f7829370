/* SPDX-License-Identifier: Apache-2.0 */
/*
 * duplicate_search.h - finds the duplicates that uploads missed: merges a shard
 * of the exact index with its runs into its next generation, and makes a pair
 * of each two blocks that meet there (merging.rst).
 *
 * Memory: a frame for each input, of which there are at most 64, and for each
 * of two outputs; a bit for each number of a group.
 */
#ifndef GD_DUPLICATE_SEARCH_H
#define GD_DUPLICATE_SEARCH_H

#include "engine/files/shards.h"

typedef struct gd_duplicate_search gd_duplicate_search;

/* When a shard is marked to be split. */
typedef struct gd_split_limits {
    uint64_t ns;      /* the merge took longer */
    uint64_t records; /* it has more records */
} gd_split_limits;

typedef struct gd_search_result {
    uint64_t records; /* in the new generation */
    uint64_t pairs;
    uint64_t bytes;   /* read and written */
    bool split, more; /* more: runs are left */
} gd_search_result;

/* Begins to merge a shard that counts.  *search is NULL if it has no runs.
 * Returns GD_BUSY and leaves `*err` untouched if another merges it; GD_NOTFOUND
 * if the shard does not count (any more). */
gd_status gd_duplicate_search_begin(gd_shards *shards, uint32_t bits,
                                    uint32_t shard, gd_split_limits limits,
                                    gd_duplicate_search **search,
                                    gd_error *err);
/* Merges some records.  *more: there are others.  *bytes: read so far. */
gd_status gd_duplicate_search_step(gd_duplicate_search *search,
                                   size_t records, bool *more,
                                   uint64_t *bytes, gd_error *err);
/* Makes the pairs durable, then the new generation, and removes what went into
 * it.  GD_NOTFOUND if the shard was discarded meanwhile, or if others went on
 * from it because the lock was lost: then the inputs stay.  REQUIRES: there are
 * no more records. */
gd_status gd_duplicate_search_finish(gd_duplicate_search *search,
                                     gd_search_result *result, gd_error *err);
/* Gives up the unfinished search.  Does nothing for NULL. */
void gd_duplicate_search_end(gd_duplicate_search *search);

#endif
