/* SPDX-License-Identifier: Apache-2.0 */
/*
 * address.h - a block's address: the number of its group, and its slot there.
 *
 * A hint of the filter has 25 bits for the group and 15 for the slot.
 */
#ifndef GD_ADDRESS_H
#define GD_ADDRESS_H

#include <stdint.h>

enum {
    GD_MAX_GROUP = (1 << 25) - 1,
    GD_MAX_SLOTS = 32768,
};

typedef struct gd_address {
    uint32_t group; /* 1..GD_MAX_GROUP */
    uint32_t slot;  /* 0..GD_MAX_SLOTS-1 */
} gd_address;

#endif
