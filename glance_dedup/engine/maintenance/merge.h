/* SPDX-License-Identifier: Apache-2.0 */
/*
 * merge.h - rewrites an image's recipe to other addresses of the same blocks,
 * and replaces the old recipe (N10).
 *
 *     open       the new recipe M: locks, verified, whole, durable   N10.1, 2
 *     (caller)   counts it, before anything can name it              N10.3
 *     exchange   M takes the old recipe's name                       N10.4 to 7
 *
 * A crash or an error anywhere leaves at most entries in the spool.  The
 * accounting settles them by what images/<id> is.  Readers of the old recipe
 * continue.  Belongs to the maintainer, one thread at a time.
 */
#ifndef GD_MERGE_H
#define GD_MERGE_H

#include "engine/format/recipe.h"
#include "engine/repo/repo.h"

typedef struct gd_merge gd_merge;

/* Pairs of an old and a new address, as numbers of 8 bytes each.  They are
 * sorted by the old address, which occurs once. */
typedef struct gd_mapping {
    const uint8_t *pairs;
    size_t count;
} gd_mapping;

typedef struct gd_merge_facts {
    uint64_t replaced;       /* blocks whose address changed; 0: no M */
    uint64_t replaced_bytes; /* their plain bytes */
    /* Old addresses of blocks that have the new block's fingerprint but not its
     * bytes, as far as can be known.  They stay where they are.  There are some
     * only where bytes are compared.  An address occurs here as often as the
     * image names it. */
    uint64_t *collisions;
    size_t collision_count;
} gd_merge_facts;

/* GD_BUSY if a group's lock was refused.  GD_CORRUPT if the image is damaged,
 * if an old and a new block are unequal or of different scopes, or if the new
 * block is not live and published. */
gd_status gd_merge_open(gd_repo *repo, const char *image_id,
                        gd_mapping mapping, gd_merge **merge, gd_error *err);
/* Releases the locks.  The spool's names stay, for the accounting. */
void gd_merge_close(gd_merge *merge);

const gd_merge_facts *gd_merge_facts_of(const gd_merge *merge);
/* M, and its name; NULL if nothing was replaced. */
const gd_recipe *gd_merge_recipe(const gd_merge *merge);

/* *done: M is the image's recipe now, even if an error is returned too.
 * Otherwise the image was deleted or replaced, or somebody is about to do so.
 * REQUIRES: M is counted, and the fence written (N10.3). */
gd_status gd_merge_exchange(gd_merge *merge, bool *done, gd_error *err);

#endif
