/* SPDX-License-Identifier: Apache-2.0 */
/*
 * estimate.h - estimates the space that images would take if they were stored.
 *
 * Images are cut into blocks, blocks seen before are left out, and new ones are
 * compressed.  Only one record is kept for each block that is counted.
 *
 * A block is counted if its hash ends in `level` zero bits.  The level begins
 * at 0 and grows by one whenever the table is full, which halves the table's
 * contents.  So memory is bounded, equal blocks are treated alike, and each
 * block counted stands for 2^level blocks.
 *
 * The hash is not cryptographic: two blocks made to have the same hash spoil an
 * estimate, and nothing else.
 *
 * Belongs to one thread at a time.
 */
#ifndef GD_ESTIMATE_H
#define GD_ESTIMATE_H

#include <stdint.h>

#include "engine/base/env.h"
#include "engine/format/chunker.h"
#include "engine/format/segment.h"

typedef struct gd_estimate gd_estimate;

typedef struct gd_estimate_params {
    size_t segment_size;
    gd_codec codec; /* of uploads */
    int codec_level;
    gd_codec again_codec; /* of recompression */
    int again_level;
    size_t table_bytes; /* at most, also while it grows; 0: no limit */
} gd_estimate_params;

/* Of one image.  Counts are not multiplied yet. */
typedef struct gd_estimated {
    uint64_t new_bytes;    /* counted bytes of blocks first seen in this
                            * image */
    uint64_t new_blocks;
    uint64_t stored_bytes; /* of these, compressed, with segment headers */
    double stored_squares; /* the sum of their squares, for the error */
} gd_estimated;

/* Of all images. */
typedef struct gd_estimate_totals {
    unsigned level;
    uint64_t again_plain;  /* of a sample of segments: before compression */
    uint64_t again_stored; /* as recompression would leave them */
} gd_estimate_totals;

gd_status gd_estimate_open(const gd_env *env, const gd_chunker *chunker,
                           const gd_estimate_params *params,
                           gd_estimate **estimate, gd_error *err);
void gd_estimate_close(gd_estimate *estimate);

/* Takes the blocks that end in these bytes of the image; *used is their
 * length.  The bytes after *used must be given again, with more.  If last is
 * set, no more bytes come, and all are taken. */
gd_status gd_estimate_take(gd_estimate *estimate, const uint8_t *data,
                           size_t length, bool last, size_t *used,
                           gd_error *err);
/* Takes length zeros, as whole blocks of the greatest length. */
void gd_estimate_take_zeros(gd_estimate *estimate, uint64_t length);
/* Ends the image; the next bytes are another's.  *zeros: bytes in its blocks of
 * zeros.  *extents: the least number that its recipe would have. */
gd_status gd_estimate_end(gd_estimate *estimate, uint64_t *zeros,
                          uint64_t *extents, gd_error *err);
/* Fills in the results of all images that ended, in their order; out must have
 * room for them. */
gd_status gd_estimate_sum(gd_estimate *estimate, gd_estimated *out,
                          gd_estimate_totals *totals, gd_error *err);
size_t gd_estimate_images(const gd_estimate *estimate);

#endif
