/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volumerecord.c - see volumerecord.h.
 */
#include "engine/format/volumerecord.h"

#include "engine/format/fields.h"

#define RECORD_FIELDS(F)                                                      \
    F(NUMBER, 4, 4, kind)                                                     \
    F(NUMBER, 8, 8, sequence)                                                 \
    F(NUMBER, 16, 8, offset)                                                  \
    F(NUMBER, 24, 8, length)                                                  \
    F(NUMBER, 32, 8, durable)                                                 \
    F(NUMBER, 40, 8, checksum)

static const gd_sealed layout = {.size = GD_RECORD_HEAD};

void
gd_record_encode(const gd_record *value, uint64_t seed,
                 uint8_t out[GD_RECORD_HEAD])
{
    memcpy(out, "GDVR", 4);
    RECORD_FIELDS(GD_ENCODE)
    gd_fields_seal(&layout, seed, out);
}

static bool
in_bounds(const gd_record *record, uint64_t size)
{
    switch (record->kind) {
    case GD_RECORD_MARK:
        return record->length >= 1;
    case GD_RECORD_STORED:
        return record->offset == 0 && record->length == 0;
    case GD_RECORD_BYTES:
        if (record->length > GD_RECORD_DATA) {
            return false;
        }
        break;
    case GD_RECORD_ZEROS:
        break;
    default:
        return false;
    }
    return record->length >= 1 && record->offset <= size &&
           record->length <= size - record->offset;
}

bool
gd_record_decode(const uint8_t in[GD_RECORD_HEAD], uint64_t seed,
                 uint64_t size, gd_record *value)
{
    if (memcmp(in, "GDVR", 4) != 0 ||
        !gd_fields_verify(&layout, seed, in)) {
        return false;
    }
    RECORD_FIELDS(GD_DECODE)
    return in_bounds(value, size);
}
