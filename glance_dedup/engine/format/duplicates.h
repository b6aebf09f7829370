/* SPDX-License-Identifier: Apache-2.0 */
/*
 * duplicates.h - arithmetic on pairs of addresses, for merging.
 *
 * A pair is two addresses (group << 15 | slot), 64 bits each, little-endian.
 * Pairs that are kept are (kept, other): the block that the exact index has,
 * and one with its fingerprint; they are sorted.  The index finds them as
 * (other, kept), in any order.  No I/O, no state.
 */
#ifndef GD_DUPLICATES_H
#define GD_DUPLICATES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/format/index.h"

enum {
    GD_PAIR_SIZE = 16,
    GD_REPLACEMENT_SIZE = 32, /* old, new, length, kept; 64 bits each */
};

#define GD_LAST_ADDRESS ((UINT64_C(1) << 40) - 1)

typedef struct gd_pairs {
    const uint8_t *at;
    size_t count;
} gd_pairs;

/* What is known of blocks, each in the place of its address. */
typedef struct gd_blocks {
    const uint8_t *addresses; /* sorted, each once */
    const uint8_t *entries;   /* as Maintenance.entries lists them */
    const uint8_t *counts;    /* 32 bits; who does not ask for it: NULL */
    size_t count;
} gd_blocks;

/* The addresses of pairs, sorted, each once; out has room for all. */
gd_status gd_pairs_addresses(const gd_env *env, gd_pairs pairs, uint8_t *out,
                             size_t *out_count, gd_error *err);

/* Sorts in place, and leaves each pair once. */
gd_status gd_pairs_sort(const gd_env *env, uint8_t *pairs, size_t *count,
                        gd_error *err);
/* Those of a that b has not; both are sorted; out has room for a. */
size_t gd_pairs_without(gd_pairs a, gd_pairs b, uint8_t *out);

/* The functions on blocks return false if a pair names an address that is not
 * among them. */

/* Of pairs (other, kept): those of equal blocks, as (kept, other), and those
 * whose kept one does not live, as they are.  Each has room for all. */
bool gd_pairs_judge(gd_pairs pairs, const gd_blocks *blocks, uint8_t *equal,
                    size_t *equal_count, uint8_t *stale, size_t *stale_count);

/* Of pairs (kept, other): those of which the other one is in a record.  out has
 * room for all. */
gd_status gd_pairs_named(const gd_env *env, gd_pairs pairs, gd_records records,
                         uint8_t *out, size_t *out_count, gd_error *err);

/* Of pairs (kept, other): those to be forgotten, since a block is gone, and
 * records for the index of the other blocks, if it was the kept one. */
bool gd_pairs_revise(gd_pairs pairs, const gd_blocks *blocks, uint8_t *gone,
                     size_t *gone_count, uint8_t *records,
                     size_t *record_count);

/* Of sorted pairs (kept, other), whose classes are complete: which block is to
 * be replaced by which.  Of the members in use the lowest that lives stays; if
 * none of these lives, the lowest that does.  out has room for twice as many as
 * there are pairs. */
bool gd_pairs_choose(gd_pairs pairs, const gd_blocks *blocks, uint8_t *out,
                     size_t *out_count);

/* Sorts replacements in place; leaves each old address once, and none whose new
 * address is the old one of another.  Returns how many are left. */
size_t gd_replacements_sort(uint8_t *replacements, size_t count);

#endif
