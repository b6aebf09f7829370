/* SPDX-License-Identifier: Apache-2.0 */
/*
 * filterhead.h - the start of the fingerprint filter's file.
 *
 * It is written once, before the file gets its name.  Repository id and size
 * fully determine it:
 *
 *     0   8  magic "GDFILTER"
 *     8   2  version, 2
 *     10  6  zeros
 *     16 16  repository id
 *     32  8  size of the file in bytes
 *     40  8  number of buckets
 *     48  8  zeros
 *     56  8  checksum of bytes 0 to 55
 */
#ifndef GD_FILTERHEAD_H
#define GD_FILTERHEAD_H

#include "engine/format/names.h"

enum { GD_FILTER_HEAD = 64 }; /* bytes */

typedef struct gd_filter_head {
    uint8_t repository_id[GD_ID_SIZE];
    uint64_t size;
    uint64_t buckets;
} gd_filter_head;

void gd_filter_head_encode(const gd_filter_head *value,
                           uint8_t out[GD_FILTER_HEAD]);
/* Judges nothing. */
void gd_filter_head_decode(const uint8_t in[GD_FILTER_HEAD],
                           gd_filter_head *value);

#endif
