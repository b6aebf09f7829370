/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fencerecord.h - a record of the fence (format-derived.rst, "Fence").
 */
#ifndef GD_FENCERECORD_H
#define GD_FENCERECORD_H

#include "engine/format/names.h"

enum { GD_FENCE_RECORD = 512 }; /* bytes */

typedef struct gd_fence {
    uint8_t catalog_id[GD_ID_SIZE];
    uint64_t sequence;
} gd_fence;

void gd_fence_record_encode(const gd_fence *value,
                            uint8_t out[GD_FENCE_RECORD]);
/* False unless it is a valid record. */
bool gd_fence_record_decode(const uint8_t in[GD_FENCE_RECORD],
                            gd_fence *value);

#endif
