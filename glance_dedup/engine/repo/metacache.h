/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metacache.h - verified metadata that all readers of a handle share: what they
 * need of extents' entries, and pages of recipes; up to a budget of bytes.
 *
 * A read of one block needs one entry.  But the extent's digest, which proves
 * that the entry is of the block meant (I7), is over all entries of the extent,
 * up to 1,024.  So an extent is kept once it was verified.  What is kept
 * of an entry has 24 bytes: where the block is, and its checksum.  The
 * fingerprint is not kept: only repair and replication need it, and they read
 * entries.
 *
 * An extent is identified by its group's number, seed and file, its slots and
 * its digest.  In one file of a group, an entry that was published never names
 * another place, since only the state of published entries changes (I4).  A
 * rewritten group has another file.  Inode numbers are used again, so an extent
 * may be taken for that of another file of the same group.  It still has the
 * checksums of the blocks meant, since the digest is the same.  Its places may
 * be wrong.  Then no block there verifies, and the next try, which does not use
 * the cache, drops the extent.  The same holds for an entry that was not
 * published when it was read, or has been freed or marked as damaged since: the
 * bytes decide, not the entry's state.
 *
 * On a file system that several hosts share, entries are read through the page
 * cache, which may be old (N13.3).  Nothing more is assumed of them there: what
 * is kept was verified against the recipe, whichever host wrote it and
 * whenever it was read.  It is not among the bytes on which anything but a read
 * is decided (N7.2, N13.1): look-ups, collections and the scrub read entries
 * themselves.
 *
 * Of an extent all entries must be live: a damaged block is repaired by its
 * fingerprint.
 *
 * A page of a recipe is identified by the recipe's inode, its transaction and
 * the page's number.  A committed recipe does not change (I3), and no two
 * recipes have the same transaction, except copies with the same bytes.
 *
 * Thread-safe.
 */
#ifndef GD_METACACHE_H
#define GD_METACACHE_H

#include "engine/base/env.h"
#include "engine/base/lru.h"
#include "engine/base/status.h"
#include "engine/files/group.h"
#include "engine/format/recipe.h"

enum {
    /* Extents of 5 GiB that were stored in one go.  A handle that reads images
     * from end to end keeps little (plan.h). */
    GD_METACACHE_BUDGET = 32 << 20,
};

typedef struct gd_metacache gd_metacache;

/* The fields of an entry that a read needs. */
typedef struct gd_cached_block {
    uint64_t checksum;
    uint32_t segment;
    uint32_t plain_offset;
    uint32_t end; /* of the block, in the extent's bytes */
    uint32_t stored_length : 24;
    uint32_t codec : 8;
} gd_cached_block;

typedef struct gd_cached_extent {
    gd_lru_item item; /* the cache's own */
    uint64_t length;  /* of all blocks */
    uint32_t count;
    gd_cached_block blocks[]; /* immutable */
} gd_cached_extent;

gd_status gd_metacache_open(const gd_env *env, uint64_t budget,
                            gd_metacache **cache, gd_error *err);
/* REQUIRES: nothing lent. */
void gd_metacache_close(gd_metacache *cache);
/* Evicts what exceeds the budget.  With 0 nothing is kept. */
void gd_metacache_set_budget(gd_metacache *cache, uint64_t budget);
void gd_metacache_get_stats(gd_metacache *cache, gd_lru_stats *stats);

/* Lends what is kept of an extent of this open group; NULL: nothing. */
gd_cached_extent *gd_metacache_get(gd_metacache *cache, const gd_group *group,
                                   const gd_extent *extent);
/* Returns whether get would find it.  Does not count as a use. */
bool gd_metacache_has(gd_metacache *cache, const gd_group *group,
                      const gd_extent *extent);
void gd_metacache_return(gd_metacache *cache, gd_cached_extent *extent);
/* Keeps an extent, unless an entry is not live or there is no memory.
 * REQUIRES: the entries are all of the extent's, were read from this file, and
 * agree with the extent's digest and length. */
void gd_metacache_keep(gd_metacache *cache, const gd_group *group,
                       const gd_extent *extent, const gd_entry *entries);
/* From now on nobody finds the extent. */
void gd_metacache_drop(gd_metacache *cache, const gd_group *group,
                       const gd_extent *extent);

/* The number of the block that has byte `at` of the extent.
 * REQUIRES: at < extent->length. */
uint32_t gd_cached_extent_find(const gd_cached_extent *extent, uint64_t at);
/* A live entry for the block, without a fingerprint. */
gd_entry gd_cached_extent_entry(const gd_cached_extent *extent, uint32_t block);

/* The cache for the pages of this handle's committed recipes. */
gd_page_cache *gd_metacache_pages(gd_metacache *cache);

#endif
