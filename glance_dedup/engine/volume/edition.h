/* SPDX-License-Identifier: Apache-2.0 */
/*
 * edition.h - writes recipes of a volume: the next edition of a part, its base,
 * and a snapshot (volumes.rst, "Operations").
 */
#ifndef GD_EDITION_H
#define GD_EDITION_H

#include "engine/format/volumehead.h"
#include "engine/volume/fslayout.h"
#include "engine/volume/overlay.h"
#include "engine/volume/parts.h"

/* Hints about the bytes to be stored (volumes.rst, "Hints"). */
typedef struct gd_edition_hints {
    bool no_dedup;      /* look for no block, */
    gd_fslayout layout; /* or for none in these ranges of the volume, */
    gd_fslayout copies; /* or in these, whose blocks stay copies (I14) */
    uint32_t groups[GD_CACHED_STORES]; /* to be looked into first */
    size_t group_count;
} gd_edition_hints;

/* Finds out whether the process is the volume's owner still: GD_BUSY if not.
 * The next owner may have an edition of the same name, with other bytes (V1). */
typedef struct gd_edition_owner {
    struct gd_volume *volume;
    gd_status (*confirm)(struct gd_volume *volume, gd_error *err);
} gd_edition_owner;

/* Editions of several parts, which are committed together. */
typedef struct gd_edition_batch {
    gd_parts *parts; /* the caller sets this, and the next three */
    const gd_volume_head *head;
    const gd_edition_hints *hints;
    gd_edition_owner owner;
    struct gd_transaction *transaction; /* NULL: there is no edition yet */
    uint64_t written, zero, skipped;
    uint64_t compared, equal; /* blocks, with those of the editions before */
} gd_edition_batch;

/* Adds an edition of a part: its bytes up to now, with the overlay's over them.
 * An image of this edition that is there already is of an attempt that failed,
 * and is deleted first.  After an error only gd_edition_end may be called.
 * REQUIRES: nobody changes the overlay. */
gd_status gd_edition_add(gd_edition_batch *batch, const gd_overlay *overlay,
                         gd_volume_mark edition, gd_error *err);
/* Commits the editions.  The counters grow by the stored bytes.  After an error
 * some of them may exist. */
gd_status gd_edition_commit(gd_edition_batch *batch,
                            gd_volume_counters *counters, gd_error *err);
/* Ends the batch, committed or not. */
void gd_edition_end(gd_edition_batch *batch);
/* Commits an image of all parts, without regard to the journal. */
gd_status gd_edition_snapshot(gd_parts *parts, const gd_volume_head *head,
                              const char *image_id, const char *project,
                              gd_recipe_header *header, gd_error *err);
/* Commits an edition of a part with the bytes of an image at the part's place,
 * unless they are all zeros.  The head has the volume's new size: the image's,
 * in whole sectors.  *made: whether it did; *stored grows by the bytes that could
 * not be shared by address. */
gd_status gd_edition_of_image(gd_repo *repo, const gd_edition_owner *owner,
                              const gd_volume_head *head, gd_image *image,
                              gd_volume_mark edition, bool *made,
                              uint64_t *stored, gd_error *err);
/* Commits the base: all of an image.  *stored: bytes that could not be shared
 * by address. */
gd_status gd_edition_base(gd_repo *repo, const gd_volume_head *head,
                          gd_image *image, uint64_t *stored, gd_error *err);

#endif
