/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fencerecord.c - see fencerecord.h.
 */
#include "engine/format/fencerecord.h"

#include "engine/format/fields.h"

#define RECORD_FIELDS(F)                                                      \
    F(BYTES, 8, 16, catalog_id)                                               \
    F(NUMBER, 24, 8, sequence)

static const gd_sealed layout = {.size = GD_FENCE_RECORD, .magic = "GDFENCE"};

void
gd_fence_record_encode(const gd_fence *value, uint8_t out[GD_FENCE_RECORD])
{
    gd_fields_begin(&layout, out);
    RECORD_FIELDS(GD_ENCODE)
    gd_fields_seal(&layout, 0, out);
}

bool
gd_fence_record_decode(const uint8_t in[GD_FENCE_RECORD], gd_fence *value)
{
    RECORD_FIELDS(GD_DECODE)
    return gd_fields_verify(&layout, 0, in);
}
