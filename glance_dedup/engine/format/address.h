/* SPDX-License-Identifier: Apache-2.0 */
/*
 * address.h - a block's address: the number of its group, and its slot there.
 *
 * A hint of the filter has 25 bits for the group and 15 for the slot.
 */
#ifndef GD_ADDRESS_H
#define GD_ADDRESS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    GD_MAX_GROUP = (1 << 25) - 1,
    GD_SLOT_BITS = 15,
    GD_MAX_SLOTS = 1 << GD_SLOT_BITS,
};

typedef struct gd_address {
    uint32_t group; /* 1..GD_MAX_GROUP */
    uint32_t slot;  /* 0..GD_MAX_SLOTS-1 */
} gd_address;

/* An address as one number, as it is stored and as Python has it. */
static inline uint64_t
gd_address_number(gd_address address)
{
    return (uint64_t)address.group << GD_SLOT_BITS | address.slot;
}

static inline bool
gd_address_is_valid(uint64_t number)
{
    uint64_t group = number >> GD_SLOT_BITS;
    return group >= 1 && group <= GD_MAX_GROUP;
}

/* REQUIRES: it is one. */
static inline gd_address
gd_address_of(uint64_t number)
{
    return (gd_address){(uint32_t)(number >> GD_SLOT_BITS),
                        (uint32_t)number & (GD_MAX_SLOTS - 1)};
}

#endif
