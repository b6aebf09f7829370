/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bitwriter.h - packs bits into bytes, the lowest bit first, as RFC 1951 wants.
 *
 * A drain stores eight bytes, of which up to eight are beyond the last whole
 * byte.  So a writer's room is GD_BITWRITER_SLACK more than it may use.  Nothing
 * here checks the room: the caller knows the size of a block before it writes
 * the block.
 */
#ifndef GD_BITWRITER_H
#define GD_BITWRITER_H

#include "engine/base/coding.h"

enum { GD_BITWRITER_SLACK = 8 };

typedef struct gd_bitwriter {
    uint64_t held; /* bits that are not drained yet */
    unsigned count;
    uint8_t *at;   /* the next byte of the output */
} gd_bitwriter;

/* Leaves at most 7 bits. */
static inline void
gd_bitwriter_drain(gd_bitwriter *w)
{
    gd_put64(w->at, w->held);
    w->at += w->count / 8;
    w->held >>= w->count & ~7u;
    w->count &= 7;
}

/* Adds bits without draining: at most 56 behind the last drain.
 * REQUIRES: value has no other bits. */
static inline void
gd_bitwriter_add(gd_bitwriter *w, uint64_t value, unsigned bits)
{
    w->held |= value << w->count;
    w->count += bits;
}

/* Fills the last byte with zeros. */
static inline void
gd_bitwriter_align(gd_bitwriter *w)
{
    w->count = (w->count + 7) & ~7u;
    gd_bitwriter_drain(w);
}

#endif
