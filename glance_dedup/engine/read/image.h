/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image.h - reads an image (design.rst, "Reading").
 *
 * A read is planned in windows (plan.h): first the extents that it touches,
 * then the entries of their blocks.  The segments are then read in disk order,
 * and neighbours in one read (fetch.h).  Each block is verified before any
 * of its bytes are handed out (I7).
 *
 * An image with a disk has two views: its file, which is made from its plain
 * bytes and a table, and its disk, which is the first of the plain bytes
 * (image-disks.rst).  Without a disk, file and plain bytes are the same.
 *
 * An open image holds a shared lock on its recipe, so that its blocks stay
 * (I12).  Several threads may use it at once.
 */
#ifndef GD_IMAGE_H
#define GD_IMAGE_H

#include "engine/format/recipe.h"
#include "engine/read/derive.h"
#include "engine/read/plan.h"
#include "engine/read/readahead.h"
#include "engine/repo/repo.h"

/* Immutable while it is open, except for the state of the read-ahead, and the
 * derivers. */
typedef struct gd_image {
    gd_repo *repo;
    gd_recipe recipe;
    gd_readahead ahead;
    gd_derivers derivers;
} gd_image;

/* If upload_id is not NULL, returns GD_NOTFOUND for an image of another
 * upload. */
gd_status gd_image_open(gd_repo *repo, const char *image_id,
                        const uint8_t *upload_id, gd_image **image,
                        gd_error *err);
/* The same for a finished recipe in the spool, which this process has made.
 * REQUIRES: the transaction that made it has not ended, and so keeps its
 * blocks. */
gd_status gd_image_open_spooled(gd_repo *repo, const char *name,
                                gd_image **out, gd_error *err);
void gd_image_close(gd_image *image);
const gd_recipe_header *gd_image_header(const gd_image *image);

/* GD_INVALID for an image with a disk, for uses that do not know it yet. */
gd_status gd_image_require_no_disk(const gd_image *image, gd_error *err);

/* Fills out[0..length) from offset in the file.  *done is less than length only at the end
 * of the image.  After an error the contents of out are undefined. */
gd_status gd_image_read(gd_image *image, uint8_t *out, size_t length,
                        uint64_t offset, size_t *done, gd_error *err);

/* The same for the disk, which ends at its size.  GD_INVALID unless the disk is
 * proven (F5). */
gd_status gd_image_read_disk(gd_image *image, uint8_t *out, size_t length,
                             uint64_t offset, size_t *done, gd_error *err);
/* Reads a range of the plain bytes, which lies in them, and counts nothing. */
gd_status gd_image_read_plain(gd_image *image, uint8_t *out, gd_range range,
                              gd_error *err);

/* Sets *zeros if a range, which lies in the file, is known to be zeros without
 * reading any block: never for an image with a disk. */
gd_status gd_image_is_zeros(gd_image *image, gd_range range, bool *zeros,
                            gd_error *err);

/* Reads one page of extents of the plain bytes, for listing them.  number goes from 1 to
 * gd_image_pages. */
uint64_t gd_image_pages(const gd_image *image);
gd_status gd_image_extents(gd_image *image, uint64_t number,
                           gd_recipe_page *page, gd_error *err);

#endif
