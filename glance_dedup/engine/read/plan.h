/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.h - what has to be read for ranges of an image: its blocks, with their
 * entries, to be brought into disk order (design.rst, "Reading").
 *
 * Planning reads metadata only: the recipe's pages and the entries, over which
 * each extent's digest is verified (I7).  Belongs to one thread.
 */
#ifndef GD_PLAN_H
#define GD_PLAN_H

#include "engine/format/recipe.h"
#include "engine/handle/repo.h"

/* A stretch of an image, in bytes. */
typedef struct gd_range {
    uint64_t offset;
    uint64_t length;
} gd_range;

/* A stretch of one block that is wanted. */
typedef struct gd_want {
    gd_group *group;
    gd_entry entry; /* live, or damaged; its fields are within their bounds */
    uint32_t slot;
    uint32_t from; /* in the block */
    uint32_t length;
    uint64_t offset; /* of its first byte, in the image */
} gd_want;

typedef struct gd_plan {
    gd_repo *repo;
    const gd_recipe *recipe;
    bool fresh; /* look group files up by name again */
    bool asked; /* what is needed was asked for, and counted (readahead.h) */
    bool whole; /* only whole blocks: GD_INVALID otherwise */
    uint64_t most;     /* bytes of blocks in all, and */
    size_t most_wants; /* stretches of blocks; then it is */
    bool full;         /* and takes no more, from here on: */
    uint64_t left;     /* in the image, where a block begins if all are whole */
    /* Told of each stretch of zeros, unless it is NULL. */
    void (*zeros)(void *arg, uint64_t offset, uint64_t length);
    void *arg;

    gd_want *wants;
    size_t count, room;
    uint64_t bytes;    /* of all wants */
    gd_entry *entries; /* of the extent read last */
    gd_group **groups; /* lent, one for each run of extents */
    size_t group_count, group_room;
} gd_plan;

gd_status gd_plan_open(gd_plan *plan, gd_repo *repo, const gd_recipe *recipe,
                       gd_error *err);
/* Also where opening failed. */
void gd_plan_close(gd_plan *plan);
/* Forgets all wants and gives the groups back. */
void gd_plan_clear(gd_plan *plan);

/* Adds what a range needs.  REQUIRES: it lies within the image. */
gd_status gd_plan_add(gd_plan *plan, gd_range range, gd_error *err);
/* Reads an extent's entries into plan->entries and verifies that they are those
 * that the recipe was committed with. */
gd_status gd_plan_extent(gd_plan *plan, const gd_extent *extent,
                         gd_group **group, gd_error *err);

/* Sorts the wants by group, segment and slot. */
void gd_plan_sort(gd_plan *plan);
/* Of sorted wants: how many, from the first, are of its segment; and how many
 * one read takes in, at most GD_READ_ONCE bytes (but at least a segment), and
 * where it ends. */
size_t gd_plan_segment(const gd_want *wants, size_t count);
size_t gd_plan_neighbours(const gd_want *wants, size_t count, uint64_t *end);
/* Starts read-ahead for sorted wants. */
void gd_plan_read_ahead(const gd_want *wants, size_t count);
/* Counts a read, unless it was asked for before. */
void gd_plan_count(const gd_plan *plan, const gd_group *group, uint64_t start,
                   uint64_t end);

enum {
    GD_READ_ONCE = 1 << 20,
    GD_READ_GAP = 32768, /* bytes skipped over rather than seeked over */
};

#endif
