/* SPDX-License-Identifier: Apache-2.0 */
/*
 * self_published.c - see self_published.h.
 *
 * Memory order: a thread that finds a word must find its hints, too, and one
 * that sees an epoch must see that the index was emptied before.  Hence
 * releases and acquires.
 */
#include "engine/files/self_published.h"

#include <stdbool.h>

#include "engine/format/address.h"

enum { EPOCH_BITS = 7, SLOT_BITS = 16 };

typedef struct range {
    uint32_t group, first, end;
    uint64_t epoch;
} range;

static uint64_t
encode(range r)
{
    return ((uint64_t)r.group << 2 * SLOT_BITS |
            (uint64_t)r.first << SLOT_BITS | r.end)
               << EPOCH_BITS |
           (r.epoch & ((1 << EPOCH_BITS) - 1));
}

static range
decode(uint64_t word)
{
    uint64_t slots = word >> EPOCH_BITS;
    return (range){
        .group = (uint32_t)(slots >> 2 * SLOT_BITS),
        .first = (uint32_t)(slots >> SLOT_BITS) & ((1 << SLOT_BITS) - 1),
        .end = (uint32_t)slots & ((1 << SLOT_BITS) - 1),
        .epoch = word & ((1 << EPOCH_BITS) - 1),
    };
}

static bool
is_of(range r, uint32_t group, uint64_t epoch)
{
    return (epoch & 1) != 0 && r.group == group &&
           r.epoch == (epoch & ((1 << EPOCH_BITS) - 1)) && r.first < r.end &&
           r.end <= GD_MAX_SLOTS;
}

uint64_t
gd_self_published_epoch(const gd_self_published *own)
{
    return atomic_load_explicit(&own->epoch, memory_order_acquire);
}

void
gd_self_published_add(gd_self_published *own, uint64_t epoch, uint32_t group,
                      uint32_t first,
                      uint32_t end)
{
    _Atomic uint64_t *place = &own->words[group % GD_SELF_PUBLISHED_GROUPS];
    if (first >= end) {
        return;
    }
    range old = decode(atomic_load_explicit(place, memory_order_relaxed));
    if (is_of(old, group, epoch) && old.end == first) {
        first = old.first;
    }
    atomic_store_explicit(place, encode((range){group, first, end, epoch}),
                          memory_order_release);
}

void
gd_self_published_find(const gd_self_published *own, uint32_t group,
                       uint32_t *first,
                       uint32_t *end)
{
    const _Atomic uint64_t *place =
    &own->words[group % GD_SELF_PUBLISHED_GROUPS];
    range r = decode(atomic_load_explicit(place, memory_order_acquire));
    bool believed = is_of(r, group, gd_self_published_epoch(own));
    *first = believed ? r.first : 0;
    *end = believed ? r.end : 0;
}

void
gd_self_published_end_epoch(gd_self_published *own)
{
    uint64_t epoch = gd_self_published_epoch(own);
    atomic_store(&own->epoch, epoch + (epoch & 1));
    for (unsigned i = 0; i < GD_SELF_PUBLISHED_GROUPS; i++) {
        atomic_store_explicit(&own->words[i], 0, memory_order_relaxed);
    }
}

void
gd_self_published_begin_epoch(gd_self_published *own)
{
    atomic_store_explicit(&own->epoch, gd_self_published_epoch(own) | 1,
                          memory_order_release);
}
