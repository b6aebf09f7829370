/* SPDX-License-Identifier: Apache-2.0 */
/*
 * block.h - the symbols of a deflate block, and the block's bytes.
 *
 * A block is written as stored bytes, with the fixed codes, or with codes of its
 * own, by zlib's choice: the shortest of them in whole bytes.
 */
#ifndef GD_BLOCK_H
#define GD_BLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/deflate/bitwriter.h"
#include "engine/deflate/hufftree.h"

enum {
    GD_BLOCK_LITERALS = 286,
    GD_BLOCK_DISTANCES = 30,
    GD_BLOCK_MIN_MATCH = 3,
    GD_BLOCK_MAX_MATCH = 258,
};

/* A symbol is a literal, or distance * 256 + length - GD_BLOCK_MIN_MATCH. */
typedef struct gd_block {
    uint32_t *symbols;
    size_t count, max_count;
    gd_bitwriter writer;
    const uint8_t *end;  /* of the output's room, slack included */
    bool is_fixed_only;  /* no codes of its own */
    bool overflow;       /* the output's room ended: nothing more is written */
    const uint8_t *expected; /* the output must begin with it; NULL: any */
    size_t expected_length;
    bool is_other;       /* it does not: nothing more is written */
    gd_hufftree literals, distances, lengths;
} gd_block;

static inline bool
gd_block_is_full(const gd_block *block)
{
    return block->count == block->max_count;
}

static inline void
gd_block_add_literal(gd_block *block, uint8_t byte)
{
    block->symbols[block->count++] = byte;
}

static inline void
gd_block_add_match(gd_block *block, uint32_t distance, uint32_t length)
{
    block->symbols[block->count++] =
        distance << 8 | (length - GD_BLOCK_MIN_MATCH);
}

/* Returns whether there is no use in more symbols. */
static inline bool
gd_block_has_failed(const gd_block *block)
{
    return block->overflow || block->is_other;
}

/* Begins an output.  `symbols` has room for max_count.  The caller may set
 * `expected` then. */
void gd_block_begin(gd_block *block, uint32_t *symbols, size_t max_count,
                    uint8_t *out, size_t room);

/* Writes the symbols as a block, which may be empty, and forgets them.
 * `plain` has the block's bytes; `can_store` forbids stored bytes if it is
 * false.  Behind the last block the output is aligned. */
void gd_block_write(gd_block *block, const uint8_t *plain, size_t length,
                    bool can_store, bool is_last);

#endif
