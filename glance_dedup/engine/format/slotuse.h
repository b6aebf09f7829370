/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slotuse.h - how a group's slots are used, by their entries and their counts.
 * No I/O, no state.
 */
#ifndef GD_SLOTUSE_H
#define GD_SLOTUSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A slot is in use if it has a block, or had one that is damaged or not valid
 * now. */
typedef struct gd_slot_use {
    bool is_lost;    /* a slot is counted, and not in use: */
    uint32_t lost;   /* the first one */
    uint32_t in_use;
    uint32_t freed;  /* slots whose block was freed */
    uint32_t unused; /* published slots in use that are not counted */
    uint64_t unused_bytes; /* of their blocks, before compression */
} gd_slot_use;

/* Takes the entries of slots 0 to count - 1, as Maintenance.entries lists them,
 * and their counts, 32 bits each.  unused has room for as many slots, and gets
 * the unused ones, 32 bits each. */
void gd_slot_use_judge(const uint8_t *entries, const uint8_t *counts,
                       size_t count, size_t published, gd_slot_use *use,
                       uint8_t *unused);

#endif
