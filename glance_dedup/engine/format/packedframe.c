/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packedframe.c - see packedframe.h.
 */
#include "engine/format/packedframe.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/format/index.h"

enum {
    HEAD = 16,
    CHECKSUM = 8,
    KEY_BITS = 64,
    ADDRESS_BITS = 40,
};

/* ---- the shape ---- */

static unsigned
width_of(uint64_t joined)
{
    return joined == 0 ? 0 : KEY_BITS - (unsigned)__builtin_clzll(joined);
}

/* Bytes of a frame, at most GD_PACKED_ITEMS * 13 and a few. */
static size_t
length_of(size_t count, unsigned key_width, unsigned address_width)
{
    return HEAD + (count * (key_width + address_width) + 7) / 8 + CHECKSUM;
}

bool
gd_frame_shape_add(gd_frame_shape *shape, const uint8_t *record)
{
    gd_frame_shape next = *shape;
    uint64_t key = gd_index_key(record);
    next.count++;
    next.differences |= shape->count == 0 ? 0 : key - shape->last;
    next.addresses |= gd_index_address(record);
    next.last = key;
    if (next.count > GD_PACKED_ITEMS ||
        length_of(next.count, width_of(next.differences),
                  width_of(next.addresses)) > GD_PACKED_FRAME) {
        return false;
    }
    *shape = next;
    return true;
}

/* ---- bits, from the lowest of the first byte on ---- */

/* The place holds zeros from this bit on.  Writes nine bytes: those behind the
 * last bit are the checksum's, which is written later. */
static void
put_bits(uint8_t *out, size_t at, unsigned width, uint64_t value)
{
    uint8_t *bytes = out + at / 8;
    unsigned shift = at % 8;
    if (width == 0) {
        return;
    }
    gd_put64(bytes, gd_get64(bytes) | value << shift);
    if (shift > 0) {
        bytes[8] |= (uint8_t)(value >> (64 - shift));
    }
}

/* Reads nine bytes: those behind the last bit are the checksum. */
static uint64_t
get_bits(const uint8_t *in, size_t at, unsigned width)
{
    if (width == 0) {
        return 0;
    }
    const uint8_t *bytes = in + at / 8;
    unsigned shift = at % 8;
    uint64_t value = gd_get64(bytes) >> shift;
    if (shift > 0) {
        value |= (uint64_t)bytes[8] << (64 - shift);
    }
    return width == 64 ? value : value & ((UINT64_C(1) << width) - 1);
}

/* ---- frames ---- */

size_t
gd_packedframe_pack(const gd_frame_shape *shape, const uint8_t *records,
                    uint64_t seed, bool padded, uint8_t *out)
{
    unsigned key_width = width_of(shape->differences);
    unsigned address_width = width_of(shape->addresses);
    size_t length = padded ? GD_PACKED_FRAME
                           : length_of(shape->count, key_width, address_width);
    uint64_t before = gd_index_key(records);
    memset(out, 0, length);
    gd_put64(out, before);
    gd_put32(out + 8, (uint32_t)shape->count);
    out[12] = (uint8_t)key_width;
    out[13] = (uint8_t)address_width;
    size_t at = 8 * HEAD;
    for (size_t i = 0; i < shape->count; i++) {
        const uint8_t *record = records + i * GD_INDEX_RECORD;
        uint64_t key = gd_index_key(record);
        put_bits(out, at, key_width, key - before);
        put_bits(out, at + key_width, address_width,
                 gd_index_address(record));
        at += key_width + address_width;
        before = key;
    }
    gd_put64(out + length - CHECKSUM,
             gd_checksum(out, length - CHECKSUM, seed));
    return length;
}

bool
gd_packedframe_unpack(const uint8_t *frame, size_t length, uint64_t seed,
                      uint8_t *out, size_t *count)
{
    if (length < HEAD + CHECKSUM ||
        gd_get64(frame + length - CHECKSUM) !=
            gd_checksum(frame, length - CHECKSUM, seed)) {
        return false;
    }
    uint64_t key = gd_get64(frame);
    unsigned key_width = frame[12], address_width = frame[13];
    *count = gd_get32(frame + 8);
    if (*count == 0 || *count > GD_PACKED_ITEMS || key_width > KEY_BITS ||
        address_width > ADDRESS_BITS ||
        length_of(*count, key_width, address_width) > length) {
        return false;
    }
    size_t at = 8 * HEAD;
    for (size_t i = 0; i < *count; i++) {
        key += get_bits(frame, at, key_width);
        gd_index_put_record(out + i * GD_INDEX_RECORD, key,
                            get_bits(frame, at + key_width, address_width));
        at += key_width + address_width;
    }
    return true;
}
