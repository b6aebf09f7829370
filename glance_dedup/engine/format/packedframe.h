/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packedframe.h - index records in fewer bits (format-derived.rst).
 *
 * The keys of a shard are sorted and spread evenly.  So the difference of two
 * neighbours needs about as many bits less than 64 as the number of records has,
 * and an address needs about that many.  A frame has all differences in one
 * width, and all addresses in another: about 68 bits a record instead of 104,
 * however large the shard is.
 *
 * Everything here is computation on memory.  Records have GD_INDEX_RECORD bytes.
 */
#ifndef GD_PACKEDFRAME_H
#define GD_PACKEDFRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

enum {
    GD_PACKED_FRAME = 32768, /* bytes of a frame that is not the last */
    GD_PACKED_ITEMS = 4096,  /* records in a frame, at most */
};

/* The records that a frame is to have, as they are added. */
typedef struct gd_frame_shape {
    size_t count;
    uint64_t last;        /* the last key */
    uint64_t differences; /* all of them, joined by or */
    uint64_t addresses;   /* likewise */
} gd_frame_shape;

/* Adds the next record; false, and nothing changed, if the frame is full. */
bool gd_frame_shape_add(gd_frame_shape *shape, const uint8_t *record);
/* Writes the frame of these records, which were all added to the shape.
 * padded: up to GD_PACKED_FRAME bytes.  Returns its length.  out has room for
 * GD_PACKED_FRAME bytes.  REQUIRES: there is a record. */
size_t gd_packedframe_pack(const gd_frame_shape *shape, const uint8_t *records,
                           uint64_t seed, bool padded, uint8_t *out);
/* Writes the records of a frame of this length into out, which has room for
 * GD_PACKED_ITEMS.  False unless it is such a frame, with this seed; the caller
 * judges the records.  REQUIRES: length <= GD_PACKED_FRAME. */
bool gd_packedframe_unpack(const uint8_t *frame, size_t length, uint64_t seed,
                           uint8_t *out, size_t *count);

#endif
