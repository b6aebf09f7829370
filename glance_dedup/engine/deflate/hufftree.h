/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hufftree.h - the Huffman code that zlib gives to symbols of known frequency.
 *
 * Many codes are optimal, so the order in which nodes of equal weight are joined
 * is part of the contract, and so is the repair of codes that are too long.  The
 * contributors' page on deflate has both.
 */
#ifndef GD_HUFFTREE_H
#define GD_HUFFTREE_H

#include <stdint.h>

enum { GD_HUFFTREE_SYMBOLS = 288, GD_HUFFTREE_MAX_BITS = 15 };

typedef struct gd_hufftree {
    uint32_t frequency[GD_HUFFTREE_SYMBOLS];
    uint16_t code[GD_HUFFTREE_SYMBOLS]; /* with the first bit lowest */
    uint8_t bits[GD_HUFFTREE_SYMBOLS];  /* 0: the symbol has no code */
    unsigned max_symbol;                /* the last one that has a code */
} gd_hufftree;

/* Finds the lengths and the codes of the first `symbols` symbols.  A tree has
 * two codes at least: symbols that do not occur get frequency 1 then.
 * REQUIRES: the frequencies sum to less than 65536. */
void gd_hufftree_build(gd_hufftree *tree, unsigned symbols, unsigned max_bits);

/* Finds the codes that belong to the lengths. */
void gd_hufftree_assign_codes(gd_hufftree *tree, unsigned symbols);

#endif
