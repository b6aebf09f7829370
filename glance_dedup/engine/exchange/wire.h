/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.h - images for other repositories: descriptions, and blocks in frames
 * (the HTTP reference has the layouts).
 *
 * A frame is a run of plain bytes, stored or compressed, together with the
 * places in the image where its parts belong:
 *
 *     0   4  magic "GDFR"
 *     4   1  codec: 0 none, 1 lz4, 2 zstd
 *     5   1  reserved
 *     6   2  places
 *     8   4  plain length, at most 1 MiB
 *     12  4  stored length
 *     16  8  XXH3-64 of bytes 0 to 15, the places and the stored bytes
 *     24     places, 16 bytes each: offset in the image (8), in the plain bytes
 *            (4), length (4); then the stored bytes
 */
#ifndef GD_WIRE_H
#define GD_WIRE_H

#include "engine/read/image.h"
#include "engine/read/plan.h"

enum {
    GD_FRAME_HEADER = 24,
    GD_FRAME_PLACE = 16,
    GD_FRAME_PLAIN = 1 << 20,  /* most bytes in a frame */
    GD_FRAMES_PLAIN = 2 << 20, /* and in all frames of a call */
};

/* Consecutive bytes; `ends` has the end of each frame. */
typedef struct gd_frames {
    const gd_env *env;
    uint8_t *bytes;
    size_t length, room;
    size_t *ends;
    size_t count, end_room;
} gd_frames;

/* Describes one page of extents, numbered from 1 to gd_image_pages, with their
 * blocks' fingerprints.  Each extent's digest is verified over these (I7).  An
 * extent has its offset (8), length (8), blocks (4; 0: zeros) and 4 reserved
 * bytes, then for each block its fingerprint (32) and plain length (4).  The
 * caller must release *out. */
gd_status gd_wire_describe(gd_image *image, uint64_t number, uint8_t **out,
                           size_t *length, gd_error *err);

/* Returns the blocks of ranges.  The ranges must be sorted, must not overlap,
 * and must neither begin nor end within a block: GD_INVALID otherwise.  Stops
 * after GD_FRAMES_PLAIN bytes of blocks.  *end is the offset in the image where
 * the next call must go on, or the end of the last range.  Zeros are left out.
 * Every block is verified (I7).  A segment goes out as it is stored only if all
 * its bytes are of requested blocks: other bytes may be of an image that the
 * client may not read.  Free with gd_frames_free, also after an error. */
gd_status gd_wire_frames(gd_image *image, const gd_range *ranges,
                         size_t count, gd_frames *frames, uint64_t *end,
                         gd_error *err);
void gd_frames_free(gd_frames *frames);

#endif
