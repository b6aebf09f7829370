/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segcache.h - decompressed segments that all readers of a handle share, up to
 * a budget of bytes.
 *
 * A segment is identified by its group's number, the group's seed, the group's
 * file and the place in the file.  A group's number may be reused; the seed
 * distinguishes the groups.  Rewriting a group puts another file in the place
 * of the open one; the inode distinguishes the files.  But an inode's number
 * may be reused too, and memory cannot be trusted for ever.  Therefore a thread
 * that takes a segment out verifies its blocks as if they came from the disk,
 * and drops the segment if they fail.
 *
 * Segments are lent by reference count (lru.h).  Thread-safe.
 */
#ifndef GD_SEGCACHE_H
#define GD_SEGCACHE_H

#include "engine/base/env.h"
#include "engine/base/lru.h"
#include "engine/base/status.h"
#include "engine/files/group.h"
#include "engine/format/segment.h"

typedef struct gd_segcache gd_segcache;

typedef struct gd_cached_segment {
    gd_lru_item item; /* the cache's own */
    gd_segment_header header;
    uint8_t *plain; /* header.plain_length bytes; immutable once kept */
} gd_cached_segment;

typedef struct gd_segcache_stats {
    uint64_t bytes; /* kept now */
    uint64_t hits, misses; /* segments */
} gd_segcache_stats;

/* With a budget of 0 nothing is kept, and callers need not search. */
gd_status gd_segcache_open(const gd_env *env, gd_segcache **cache,
                           gd_error *err);
/* REQUIRES: nothing lent. */
void gd_segcache_close(gd_segcache *cache);

/* Evicts what exceeds the budget.  0 evicts everything. */
void gd_segcache_set_budget(gd_segcache *cache, uint64_t budget);
/* Restricts the cache to segments with lists of slots: a range of an image
 * needs some blocks of each of many, and the next range needs others. */
void gd_segcache_set_lists_only(gd_segcache *cache, bool lists_only);
/* Returns whether a look-up may find something. */
bool gd_segcache_enabled(const gd_segcache *cache);
/* Returns whether the segment would be kept. */
bool gd_segcache_takes(const gd_segcache *cache,
                       const gd_segment_header *header);
void gd_segcache_get_stats(gd_segcache *cache, gd_segcache_stats *stats);

/* Lends the segment at offset of the group's file; NULL if it is not cached. */
gd_cached_segment *gd_segcache_get(gd_segcache *cache, const gd_group *group,
                                   uint32_t offset);
/* Returns whether get would find it.  Does not count as a use. */
bool gd_segcache_has(gd_segcache *cache, const gd_group *group,
                     uint32_t offset);
/* Returns a segment with room for its plain bytes, and with a copy of the
 * header's list.  The caller fills it, then keeps or returns it.  NULL: no memory, which does no harm. */
gd_cached_segment *gd_segcache_new(gd_segcache *cache,
                                   const gd_segment_header *header);
/* Lets others find the segment; it stays lent.  If another thread was faster,
 * or there is no room for it, it is not kept. */
void gd_segcache_keep(gd_segcache *cache, const gd_group *group,
                      uint32_t offset, gd_cached_segment *segment);
/* From now on nobody finds the segment; it stays lent. */
void gd_segcache_drop(gd_segcache *cache, gd_cached_segment *segment);
void gd_segcache_return(gd_segcache *cache, gd_cached_segment *segment);

#endif
