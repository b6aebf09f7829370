/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parts.h - what a volume has in recipes: the editions of its parts, and its
 * base.
 *
 * Thread-safe, except opening and closing.
 */
#ifndef GD_PARTS_H
#define GD_PARTS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/base/lru.h"
#include "engine/format/volumehead.h"
#include "engine/read/image.h"
#include "engine/repo/repo.h"

/* An open recipe. */
typedef struct gd_part_image {
    gd_lru_item item; /* the table's own */
    gd_image *image;
    uint64_t part;    /* 0 for the base */
    uint64_t edition; /* 0: the base */
} gd_part_image;

typedef struct gd_parts {
    gd_repo *repo;
    uint8_t volume_id[GD_ID_SIZE];
    gd_scope scope;
    uint64_t part_size;
    gd_lru images; /* open recipes; each weighs 1 */
    pthread_mutex_t mutex; /* guards all below, and is held while a recipe is
                            * opened */
    uint64_t base_size;
    uint64_t *editions; /* of each part; 0: it has none */
    uint64_t count;     /* parts */
} gd_parts;

/* Source of a part's bytes.  Behind length they are zeros. */
typedef struct gd_part_source {
    gd_part_image *held; /* NULL: all is zeros */
    gd_image *image;
    uint64_t from; /* where the part begins in the image */
    uint64_t length;
} gd_part_source;

gd_status gd_parts_open(gd_parts *parts, gd_repo *repo,
                        const gd_volume_head *head,
                        const gd_volume_mark *marks, gd_error *err);
/* Must also be called after a failed open. */
void gd_parts_close(gd_parts *parts);
/* Takes another size and base size; parts behind the size lose their
 * editions.  Fails only for want of memory, and never to become smaller. */
gd_status gd_parts_resize(gd_parts *parts, uint64_t size, uint64_t base_size,
                          gd_error *err);

uint64_t gd_parts_edition(gd_parts *parts, uint64_t part);
/* The part has this edition from now on, and lets go of the one before. */
void gd_parts_set(gd_parts *parts, uint64_t part, uint64_t edition);
/* Returns whether any bytes of the part may be other than zeros. */
bool gd_parts_has_bytes(gd_parts *parts, uint64_t part);
/* The marks of all parts; the caller releases them. */
gd_status gd_parts_marks(gd_parts *parts, gd_volume_mark **marks,
                         uint32_t *count, gd_error *err);

/* Opens the recipe that has the part's bytes; it stays until the release.
 * GD_CORRUPT if a recipe is missing, or does not fit the volume (V7). */
gd_status gd_parts_acquire(gd_parts *parts, uint64_t part,
                           gd_part_source *source, gd_error *err);
void gd_parts_release(gd_parts *parts, gd_part_source *source);

/* Reads bytes of the volume, without regard to its journal.
 * REQUIRES: the range lies within the volume. */
gd_status gd_parts_read(gd_parts *parts, uint8_t *out, uint64_t length,
                        uint64_t offset, gd_error *err);
/* Finds how many bytes from offset on are alike, up to length: zeros or not. */
gd_status gd_parts_extent(gd_parts *parts, uint64_t offset, uint64_t length,
                          uint64_t *alike, bool *zeros, gd_error *err);
/* Closes images whose names lead to other files now. */
void gd_parts_renew(gd_parts *parts);

#endif
