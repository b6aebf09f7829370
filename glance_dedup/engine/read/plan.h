/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - finds the blocks that a read of an image needs, to be read in disk
 * order (design.rst, "Reading").
 *
 * Planning reads only metadata: the recipe's pages and the entries.  Each
 * extent's digest is verified over its entries (I7), unless it was before and
 * the result is kept (metacache.h).  Belongs to one thread.
 */
#ifndef GD_PLAN_H
#define GD_PLAN_H

#include "engine/format/recipe.h"
#include "engine/repo/repo.h"

/* A byte range of an image. */
typedef struct gd_range {
    uint64_t offset;
    uint64_t length;
} gd_range;

/* A wanted part of one block. */
typedef struct gd_want {
    gd_group *group;
    gd_entry entry; /* live or damaged; its fields are within their bounds.
                     * Without a fingerprint, unless the plan is fresh or the
                     * block is damaged */
    uint32_t slot;
    uint32_t from; /* in the block */
    uint32_t length;
    uint64_t offset; /* of the first byte, in the image */
} gd_want;

typedef struct gd_plan {
    gd_repo *repo;
    const gd_recipe *recipe;
    bool fresh; /* open group files by name again, read all metadata from
                 * them, and have the cache drop it */
    bool passing; /* a sequential read: an extent that was read to its end is
                   * not kept */
    bool asked; /* the read was asked for ahead, and counted (readahead.h) */
    bool whole; /* accept only whole blocks: GD_INVALID otherwise */
    uint64_t most;     /* the limits: bytes of blocks in all, */
    size_t most_wants; /* and wants; at either the plan is */
    bool full;         /* and takes no more from here on: */
    uint64_t left;     /* offset in the image, at a block's start if all are
                        * whole */
    /* Called for each range of zeros, unless NULL. */
    void (*zeros)(void *arg, uint64_t offset, uint64_t length);
    void *arg;

    gd_want *wants;
    size_t count, room;
    uint64_t bytes;    /* of all wants */
    gd_entry *entries; /* of the last extent read; NULL: none was */
    gd_group **groups; /* borrowed, one for each run of extents */
    size_t group_count, group_room;
} gd_plan;

void gd_plan_open(gd_plan *plan, gd_repo *repo, const gd_recipe *recipe);
void gd_plan_close(gd_plan *plan);
/* Forgets all wants and gives the groups back. */
void gd_plan_clear(gd_plan *plan);

/* Adds what a range needs.  REQUIRES: the range lies within the image. */
gd_status gd_plan_add(gd_plan *plan, gd_range range, gd_error *err);
/* Reads an extent's entries into plan->entries, whatever the cache has, and
 * verifies that the recipe was committed with these entries. */
gd_status gd_plan_extent(gd_plan *plan, const gd_extent *extent,
                         gd_group **group, gd_error *err);

/* Sorts the wants by group, segment and slot. */
void gd_plan_sort(gd_plan *plan);
/* Both take sorted wants and count from the first.  The first returns how many
 * wants are in the first one's segment.  The second returns how many wants one
 * read covers, which is at most GD_READ_ONCE bytes but at least a segment; *end
 * is where that read ends. */
size_t gd_plan_segment(const gd_want *wants, size_t count);
size_t gd_plan_neighbours(const gd_want *wants, size_t count, uint64_t *end);
/* Starts read-ahead for sorted wants, unless one read covers all of them.
 * asked: it was started before; then what lies in objects is announced once
 * more, since there was perhaps no room for it (slices.h). */
void gd_plan_read_ahead(const gd_want *wants, size_t count, bool asked);
/* Counts a read, unless it was asked for ahead. */
void gd_plan_count(const gd_plan *plan, const gd_group *group, uint64_t start,
                   uint64_t end);

enum {
    GD_READ_GAP = 32768, /* bytes that are read over rather than seeked over */
};

#endif
