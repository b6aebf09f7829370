/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pairs.h - arithmetic on pairs of addresses, for merging.
 *
 * A pair is two addresses (group << 15 | slot), 64 bits each, little-endian.
 * Stored pairs are (kept, other): the block that the exact index has, and
 * another with the same fingerprint.  They are sorted.  The index finds pairs
 * as (other, kept), in any order.  No I/O, no state.
 */
#ifndef GD_PAIRS_H
#define GD_PAIRS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/format/index.h"
#include "engine/format/runs.h"

enum {
    GD_PAIR_SIZE = 16,
    GD_REPLACEMENT_SIZE = 32, /* old, new, length, kept; 64 bits each */
};

#define GD_LAST_ADDRESS ((UINT64_C(1) << 40) - 1)

typedef struct gd_pairs {
    const uint8_t *at;
    size_t count;
} gd_pairs;

/* Known facts about blocks; each array is in the order of the addresses. */
typedef struct gd_blocks {
    const uint8_t *addresses; /* sorted, each once */
    const uint8_t *entries;   /* as Maintenance.entries lists them */
    const uint8_t *counts;    /* 32 bits each; NULL if the caller does not need
                               * them */
    size_t count;
} gd_blocks;

/* The addresses in pairs, sorted, each once.  out has room for all. */
gd_status gd_pairs_addresses(const gd_env *env, gd_pairs pairs, uint8_t *out,
                             size_t *out_count, gd_error *err);

/* Returns whether the pairs are sorted, each once, and the first addresses are
 * of this group. */
bool gd_pairs_are_of_group(gd_pairs pairs, uint32_t group);
/* Sorts in place and removes repeated pairs. */
gd_status gd_pairs_sort(const gd_env *env, uint8_t *pairs, size_t *count,
                        gd_error *err);
/* The pairs of a that are not in b.  Both are sorted; out has room for a. */
size_t gd_pairs_subtract(gd_pairs a, gd_pairs b, uint8_t *out);

/* The functions on blocks return false if a pair names an address that is not
 * among the blocks. */

/* Takes pairs (other, kept).  Outputs the pairs of equal blocks, as (kept,
 * other), and the pairs whose kept block is not live, unchanged.  Each output
 * has room for all. */
bool gd_pairs_judge(gd_pairs pairs, const gd_blocks *blocks, uint8_t *equal,
                    size_t *equal_count, uint8_t *stale, size_t *stale_count);

/* Of pairs (kept, other): those to forget because a block is gone, and, where
 * that was the kept one, records for the index of the other blocks. */
bool gd_pairs_revise(gd_pairs pairs, const gd_blocks *blocks, uint8_t *gone,
                     size_t *gone_count, uint8_t *records,
                     size_t *record_count);

/* Takes sorted pairs (kept, other) whose classes are complete, and decides
 * which block replaces which.  The lowest live block in use stays; if no block
 * in use is live, the lowest live one.  out has room for twice as many as there
 * are pairs. */
bool gd_pairs_choose(gd_pairs pairs, const gd_blocks *blocks, uint8_t *out,
                     size_t *out_count);

/* Sorts replacements in place.  Keeps each old address once, and drops those
 * whose new address is the old address of another.  Returns how many are
 * left. */
size_t gd_pairs_sort_replacements(uint8_t *replacements, size_t count);

#endif
