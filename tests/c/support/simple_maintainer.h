/* SPDX-License-Identifier: Apache-2.0 */
/*
 * simple_maintainer.h - the smallest maintainer, for tests of the engine
 * alone: it keeps no accounts, but counts all recipes' references whenever it
 * collects. The order of its steps is that of N4 to N6, N9 and N10.
 *
 * A maintainer that fails stops where it is; the next one continues. Only one
 * runs at a time in a process.
 */
#ifndef SIMPLE_MAINTAINER_H
#define SIMPLE_MAINTAINER_H

#include <stddef.h>
#include <stdint.h>

#include "engine/format/segment.h"
#include "engine/repo/repo.h"

enum {
    MAINTAINER_REWRITE = 1, /* each group without unpublished entries */
    MAINTAINER_UNLINK = 2,  /* groups that are empty; a placeholder for the
                             * last */
    MAINTAINER_ANNOUNCE = 4, /* intent for busy groups */
    MAINTAINER_SIMILAR = 8,  /* recompression puts similar blocks into one
                              * segment */
};

/* Busy groups are left alone. *spooled: spool files that were left in place.
 * With a codec but none, rewriting compresses again. */
gd_status maintainer_collect(gd_repo *repo, unsigned options, gd_codec codec,
                             size_t *spooled, gd_error *err);
/* Rewrites the image to the lowest addresses that have its blocks'
 * fingerprints. GD_BUSY, GD_NOTFOUND: not done. */
gd_status maintainer_merge(gd_repo *repo, const char *image_id,
                           gd_error *err);
/* Stores the group's live blocks elsewhere, and merges all images to these. */
gd_status maintainer_evacuate(gd_repo *repo, uint32_t group, gd_error *err);
/* Writes spare copies of the live blocks among the group's first slots. */
gd_status maintainer_spare(gd_repo *repo, uint32_t group, uint32_t slots,
                           gd_error *err);
/* Returns GD_CORRUPT if a published slot is not good. */
gd_status maintainer_scrub(gd_repo *repo, gd_error *err);

#endif
