/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment.c - see segment.h.
 */
#include "engine/format/segment.h"

#include <string.h>

#include "engine/format/fields.h"

#define SEGMENT_MAGIC UINT32_C(0x47534447) /* "GDSG" */

#define HEADER_FIELDS(F)                                                      \
    F(NUMBER, 4, 1, codec)                                                    \
    F(NUMBER, 6, 2, blocks)                                                   \
    F(NUMBER, 8, 4, first_slot)                                               \
    F(NUMBER, 12, 4, plain_length)                                            \
    F(NUMBER, 16, 4, stored_length)

enum {
    CONSECUTIVE = 0, /* layouts */
    LISTED = 1,
    LIST_CHECKSUM = 20, /* its offset */
};

static uint64_t
segment_checksum(const uint8_t header[GD_SEGMENT_HEADER],
                 const struct iovec *behind, int pieces, uint64_t seed)
{
    /* The streaming state needs an alignment that its type carries, so it lies
     * on the stack.  Initialise it first: otherwise, if the same seed happens
     * to lie there already, a reset would trust the secret beside it. */
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset_withSeed(&state, seed);
    XXH3_64bits_update(&state, header, GD_SEGMENT_HEADER - 8);
    for (int i = 0; i < pieces; i++) {
        XXH3_64bits_update(&state, behind[i].iov_base, behind[i].iov_len);
    }
    return XXH3_64bits_digest(&state);
}

/* The checksum that a listed segment has in bytes 20 to 23.  Without it one
 * would have to read all of a segment to know that its list is right. */
static uint32_t
list_checksum(const uint8_t header[GD_SEGMENT_HEADER], const uint8_t *slots,
              uint32_t blocks, uint64_t seed)
{
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset_withSeed(&state, seed);
    XXH3_64bits_update(&state, header, LIST_CHECKSUM);
    XXH3_64bits_update(&state, slots, (size_t)GD_LISTED_SLOT * blocks);
    return (uint32_t)XXH3_64bits_digest(&state);
}

void
gd_segment_header_encode(const gd_segment_header *value, uint64_t seed,
                         const struct iovec *behind, int pieces,
                         uint8_t out[GD_SEGMENT_HEADER])
{
    memset(out, 0, GD_SEGMENT_HEADER);
    gd_put32(out, SEGMENT_MAGIC);
    HEADER_FIELDS(GD_ENCODE)
    out[5] = value->slots == NULL ? CONSECUTIVE : LISTED;
    if (value->slots != NULL) {
        gd_put32(out + LIST_CHECKSUM,
                 list_checksum(out, value->slots, value->blocks, seed));
    }
    gd_put64(out + 24, segment_checksum(out, behind, pieces, seed));
}

/* Returns whether the slots ascend, begin with the first slot, and are in the
 * group. */
static bool
is_list_of(const gd_segment_header *header, const uint8_t *slots,
           uint32_t group_slots)
{
    bool good = gd_get16(slots) == header->first_slot;
    for (uint32_t i = 1; i < header->blocks; i++) {
        const uint8_t *at = slots + (size_t)GD_LISTED_SLOT * i;
        good &= gd_get16(at) > gd_get16(at - GD_LISTED_SLOT);
    }
    const uint8_t *last = slots + (size_t)GD_LISTED_SLOT * (header->blocks - 1);
    return good && gd_get16(last) < group_slots;
}

/* Finds the list, and checks it.  REQUIRES: there are blocks. */
static gd_status
decode_list(const uint8_t *in, size_t length, const gd_entry_bounds *bounds,
            gd_segment_header *header, const char *file, uint64_t offset,
            gd_error *err)
{
    const uint8_t *slots = in + GD_SEGMENT_HEADER;
    size_t size = (size_t)GD_LISTED_SLOT * header->blocks;
    if (size > length - GD_SEGMENT_HEADER || size >= header->stored_length) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: the segment at offset %llu has a longer list of "
                       "slots than bytes", file, (unsigned long long)offset);
    }
    if (!is_list_of(header, slots, bounds->slots) ||
        gd_get32(in + LIST_CHECKSUM) !=
            list_checksum(in, slots, header->blocks, bounds->seed)) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: the segment at offset %llu has a list of slots "
                       "that is not right", file, (unsigned long long)offset);
    }
    header->slots = slots;
    return GD_OK;
}

gd_status
gd_segment_header_decode(const uint8_t *in, size_t length,
                         const gd_entry_bounds *bounds,
                         gd_segment_header *value, const char *file,
                         uint64_t offset, gd_error *err)
{
    if (gd_get32(in) != SEGMENT_MAGIC) {
        return gd_fail(err, GD_CORRUPT,
                       "%s has no segment at offset %llu, where one should be",
                       file, (unsigned long long)offset);
    }
    HEADER_FIELDS(GD_DECODE)
    value->slots = NULL;
    /* Without lists, the byte is reserved. */
    uint8_t layout = bounds->has_lists ? in[5] : CONSECUTIVE;
    gd_status s = GD_OK;
    if (layout == LISTED && value->blocks > 0) {
        s = decode_list(in, length, bounds, value, file, offset, err);
    }
    if (s != GD_OK) {
        return s;
    }
    uint32_t packed = value->stored_length - gd_segment_list_size(value);
    if (value->codec > GD_CODEC_ZSTD || layout > LISTED || value->blocks == 0 ||
        value->plain_length == 0 || value->plain_length > GD_SEGMENT_MAX ||
        packed == 0 || packed > value->plain_length ||
        (value->codec == GD_CODEC_NONE && packed != value->plain_length)) {
        return gd_fail(err, GD_CORRUPT,
                       "%s has an impossible segment header at offset %llu",
                       file, (unsigned long long)offset);
    }
    return GD_OK;
}

bool
gd_segment_has_slot(const gd_segment_header *header, uint32_t slot)
{
    if (header->slots == NULL) {
        return slot >= header->first_slot &&
               slot - header->first_slot < header->blocks;
    }
    uint32_t low = 0, high = header->blocks;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        uint32_t found = gd_get16(header->slots + GD_LISTED_SLOT * middle);
        if (found == slot) {
            return true;
        }
        if (found < slot) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return false;
}

bool
gd_segment_intact(const uint8_t *in, const gd_segment_header *header,
                  uint64_t seed)
{
    struct iovec behind = {(void *)(in + GD_SEGMENT_HEADER),
                           header->stored_length};
    return gd_get64(in + 24) == segment_checksum(in, &behind, 1, seed);
}

gd_status
gd_segment_decode(gd_coder *coder, const gd_segment_header *header,
                  const uint8_t *behind, uint8_t *plain, const char *file,
                  uint64_t offset, gd_error *err)
{
    uint32_t list = gd_segment_list_size(header);
    bool complete;
    GD_TRY(gd_codec_decompress(coder, header->codec, behind + list,
                               header->stored_length - list, plain,
                               header->plain_length, &complete, err));
    if (!complete) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: the segment at offset %llu does not decode", file,
                       (unsigned long long)offset);
    }
    return GD_OK;
}
