/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunker.c - fixed blocks.  See chunker.h.
 */
#include "engine/format/chunker.h"

static size_t
next_fixed(const gd_chunker *chunker, const uint8_t *data, size_t len,
           size_t known, bool last)
{
    (void)data; /* a fixed cut does not look at the data */
    (void)known;
    if (len >= chunker->max_length) {
        return chunker->max_length;
    }
    return last ? len : 0;
}

gd_status
gd_chunker_fixed(gd_chunker *chunker, size_t block_size, gd_error *err)
{
    bool power_of_two = (block_size & (block_size - 1)) == 0;
    if (!power_of_two || block_size < GD_BLOCK_MIN ||
        block_size > GD_BLOCK_MAX) {
        return gd_fail(err, GD_INVALID,
                       "the block size is %zu bytes; it must be a power of "
                       "two from %d to %d",
                       block_size, GD_BLOCK_MIN, GD_BLOCK_MAX);
    }
    *chunker = (gd_chunker){.max_length = block_size,
                            .average = block_size,
                            .next = next_fixed};
    return GD_OK;
}
