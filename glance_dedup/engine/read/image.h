/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image.h - reads an image (design.rst, "Reading").
 *
 * A read is planned in windows (plan.h): first the extents that it touches,
 * then the entries of their blocks.  The segments are then read in disk order,
 * and neighbours in one read (fetch.h).  Each block is verified before any
 * of its bytes are handed out (I7).
 *
 * An open image holds a shared lock on its recipe, so that its blocks stay
 * (I12).  Several threads may use it at once.
 */
#ifndef GD_IMAGE_H
#define GD_IMAGE_H

#include "engine/format/recipe.h"
#include "engine/read/plan.h"
#include "engine/read/readahead.h"
#include "engine/repo/repo.h"

/* Immutable while it is open, except for the state of the read-ahead. */
typedef struct gd_image {
    gd_repo *repo;
    gd_recipe recipe;
    gd_readahead ahead;
} gd_image;

/* If upload_id is not NULL, returns GD_NOTFOUND for an image of another
 * upload. */
gd_status gd_image_open(gd_repo *repo, const char *image_id,
                        const uint8_t *upload_id, gd_image **image,
                        gd_error *err);
void gd_image_close(gd_image *image);
const gd_recipe_header *gd_image_header(const gd_image *image);

/* Fills out[0..length) from offset.  *done is less than length only at the end
 * of the image.  After an error the contents of out are undefined. */
gd_status gd_image_read(gd_image *image, uint8_t *out, size_t length,
                        uint64_t offset, size_t *done, gd_error *err);

/* Sets *zeros if a range, which lies in the image, is known to be zeros without
 * reading any block. */
gd_status gd_image_is_zeros(gd_image *image, gd_range range, bool *zeros,
                            gd_error *err);

/* Reads one page of extents, for listing them.  number goes from 1 to
 * gd_image_pages. */
uint64_t gd_image_pages(const gd_image *image);
gd_status gd_image_extents(gd_image *image, uint64_t number,
                           gd_recipe_page *page, gd_error *err);

#endif
