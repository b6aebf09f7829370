/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volumerecord.c - see volumerecord.h.
 */
#include "engine/format/volumerecord.h"

#include "engine/base/coding.h"

enum { RECORD_CHECKED = GD_RECORD_HEAD - 8 };

void
gd_record_encode(const gd_record *record, uint64_t seed,
                 uint8_t out[GD_RECORD_HEAD])
{
    memcpy(out, "GDVR", 4);
    gd_put32(out + 4, record->kind);
    gd_put64(out + 8, record->sequence);
    gd_put64(out + 16, record->offset);
    gd_put64(out + 24, record->length);
    gd_put64(out + 32, record->durable);
    gd_put64(out + 40, record->checksum);
    gd_put64(out + 48, gd_checksum(out, RECORD_CHECKED, seed));
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
                 uint64_t size, gd_record *record)
{
    if (memcmp(in, "GDVR", 4) != 0 ||
        gd_get64(in + 48) != gd_checksum(in, RECORD_CHECKED, seed)) {
        return false;
    }
    record->kind = (gd_record_kind)gd_get32(in + 4);
    record->sequence = gd_get64(in + 8);
    record->offset = gd_get64(in + 16);
    record->length = gd_get64(in + 24);
    record->durable = gd_get64(in + 32);
    record->checksum = gd_get64(in + 40);
    return in_bounds(record, size);
}
