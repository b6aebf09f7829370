/* SPDX-License-Identifier: Apache-2.0 */
/*
 * filterhead.c - see filterhead.h.
 */
#include "engine/format/filterhead.h"

#include "engine/format/fields.h"

#define HEAD_FIELDS(F)                                                        \
    F(BYTES, 16, 16, repository_id)                                           \
    F(NUMBER, 32, 8, size)                                                    \
    F(NUMBER, 40, 8, buckets)

static const gd_sealed layout = {GD_FILTER_HEAD, "GDFILTER", 2, "filter"};

void
gd_filter_head_encode(const gd_filter_head *value, uint8_t out[GD_FILTER_HEAD])
{
    gd_fields_begin(&layout, out);
    HEAD_FIELDS(GD_ENCODE)
    gd_fields_seal(&layout, 0, out);
}

void
gd_filter_head_decode(const uint8_t in[GD_FILTER_HEAD], gd_filter_head *value)
{
    HEAD_FIELDS(GD_DECODE)
}
