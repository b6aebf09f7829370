/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plain.h - reads plain bytes: those that a recipe's extents have.
 */
#ifndef GD_PLAIN_H
#define GD_PLAIN_H

#include "engine/read/plan.h"
#include "engine/read/readahead.h"

/* Sources of plain bytes; borrowed. */
typedef struct gd_plain {
    gd_repo *repo;
    const gd_recipe *recipe;
    gd_readahead *ahead;
} gd_plain;

/* Fills out.  After an error its contents are undefined.  fresh: nothing from
 * caches.  REQUIRES: the range lies within the plain bytes. */
gd_status gd_plain_read(const gd_plain *plain, uint8_t *out, gd_range range,
                        bool fresh, gd_error *err);

#endif
