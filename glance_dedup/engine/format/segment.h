/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment.h - segments: blocks of a group that are compressed together; the
 * unit of data I/O in a group.
 *
 * The blocks are of consecutive slots or, in a group that allows it, of those
 * in a list behind the header.  In both cases they lie in the plain segment in
 * the order of their slots.
 *
 * The header is 32 bytes (offset table in format.rst, "Segments").  A segment
 * is valid if and only if (1) its magic, fields and list are within their
 * bounds and agree with the entries that name it, (2) its checksum, seeded with
 * the group's seed, covers all of it, (3) the stored bytes decode to exactly
 * the plain length.  A reader may skip (2), since it verifies each block that
 * it returns.
 */
#ifndef GD_SEGMENT_H
#define GD_SEGMENT_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/codec.h"
#include "engine/format/fptable.h"

enum {
    GD_SEGMENT_HEADER = 32,
    GD_LISTED_SLOT = 2, /* bytes of the list for each block */
    GD_SEGMENT_MAX = 1 << 20, /* plain bytes */
    GD_SEGMENT_DEFAULT = 65536,
    /* Minimum of a recompressed segment: neighbours are joined.  To read 4 KiB,
     * all of it must be decoded; maintenance.rst, "Recompression", has the
     * measurements. */
    GD_SEGMENT_JOINED = 256 << 10,
};

/* The size of a joined segment in a repository with segments of this size. */
static inline uint32_t
gd_segment_joined(uint32_t segment_size)
{
    return segment_size > GD_SEGMENT_JOINED ? segment_size : GD_SEGMENT_JOINED;
}

typedef struct gd_segment_header {
    gd_codec codec;
    uint32_t blocks;
    uint32_t first_slot;
    uint32_t plain_length;
    uint32_t stored_length; /* of all behind the header: the list, and what the
                             * codec made */
    const uint8_t *slots; /* the list, ascending; NULL: the slots are
                           * consecutive.  Borrowed: of a header that was
                           * decoded, it lies where the segment was read */
} gd_segment_header;

/* Bytes of the list. */
static inline uint32_t
gd_segment_list_size(const gd_segment_header *header)
{
    return header->slots == NULL ? 0 : GD_LISTED_SLOT * header->blocks;
}

/* Returns whether the segment has the block of this slot. */
bool gd_segment_has_slot(const gd_segment_header *header, uint32_t slot);

/* Fills out[0..GD_SEGMENT_HEADER), including the checksum over all behind the
 * header, the list too, which is given in pieces. */
void gd_segment_header_encode(const gd_segment_header *header, uint64_t seed,
                              const struct iovec *behind, int pieces,
                              uint8_t out[GD_SEGMENT_HEADER]);
/* Decodes and checks everything except the checksum of point (2).  in has
 * `length` bytes of the segment, at least GD_SEGMENT_HEADER; the list must be
 * among them.  file and offset are for the error's words. */
gd_status gd_segment_header_decode(const uint8_t *in, size_t length,
                                   const gd_entry_bounds *bounds,
                                   gd_segment_header *header, const char *file,
                                   uint64_t offset, gd_error *err);
/* Point (2): in holds the header and, after it, stored_length bytes. */
bool gd_segment_intact(const uint8_t *in, const gd_segment_header *header,
                       uint64_t seed);

/* Decodes to exactly header->plain_length bytes; GD_CORRUPT otherwise.  behind
 * is all that follows the header. */
gd_status gd_segment_decode(gd_coder *coder, const gd_segment_header *header,
                            const uint8_t *behind, uint8_t *plain,
                            const char *file, uint64_t offset, gd_error *err);

#endif
