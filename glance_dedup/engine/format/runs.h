/* SPDX-License-Identifier: Apache-2.0 */
/*
 * runs.h - arithmetic on runs: the extents of blocks of a recipe, as the
 * accounts see them.
 *
 * A packed array of runs is `group, slot, blocks`, 32 bits each, little-endian.
 * Addresses are `group << 15 | slot`, 64 bits.  No I/O, no state.
 */
#ifndef GD_RUNS_H
#define GD_RUNS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

enum {
    GD_RUN_SIZE = 12,
    GD_ADDRESS_SIZE = 8,
    GD_COUNTERS = 1024, /* slots counted under one key */
    GD_COUNTERS_SIZE = 4 * GD_COUNTERS,
};

/* One extent of blocks, as the accounts count it. */
typedef struct gd_run {
    uint32_t group;
    uint32_t slot;
    uint32_t blocks;
} gd_run;

/* Adds delta, 1 or -1, to the counters (32 bits each) of the slots of runs in
 * this chunk of the group.  A counter at its maximum stays there, since the
 * true count may have been higher.  Returns false, with nothing changed, if a
 * counter would go below zero. */
bool gd_runs_add(uint8_t counters[GD_COUNTERS_SIZE], uint32_t group,
                 uint32_t chunk, const uint8_t *runs, size_t count, int delta);

/* Counts the addresses that both a and b name, each once. */
gd_status gd_runs_shared(const gd_env *env, const uint8_t *a, size_t a_count,
                         const uint8_t *b, size_t b_count, uint64_t *shared,
                         gd_error *err);

/* Returns whether the runs name any of the addresses, which are sorted. */
bool gd_runs_name_any(const uint8_t *runs, size_t run_count,
                      const uint8_t *addresses, size_t count);

#endif
