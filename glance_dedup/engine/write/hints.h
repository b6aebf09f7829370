/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hints.h - which groups' fingerprint stores are worth loading for a batch.
 *
 * Keeps the filter's hints for the blocks of a batch, and chooses groups: first
 * the one with most hints, then the one with most hints for the other blocks,
 * and so on.  A group is therefore left out if a chosen group has all its
 * blocks.
 */
#ifndef GD_HINTS_H
#define GD_HINTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/address.h"

typedef struct gd_hints gd_hints;

gd_status gd_hints_open(const gd_env *env, gd_hints **hints, gd_error *err);
void gd_hints_close(const gd_env *env, gd_hints *hints);

/* Forgets all hints: a new batch begins. */
void gd_hints_clear(gd_hints *hints);
/* block points to the block's future address; the block is not found as long as
 * the group there is 0.  If hints or groups exceed the room, the excess is
 * forgotten.
 * REQUIRES: the hints of one block are added one after the other, and the block
 * stays in place. */
void gd_hints_add(gd_hints *hints, const gd_address *block, uint32_t group);
/* Returns how many hints to the group were added. */
uint32_t gd_hints_to(gd_hints *hints, uint32_t group);
/* Chooses at most `most` groups for the blocks not found, from those not chosen
 * before.  Returns how many.  They are in the order of their numbers, which is
 * the order in which they were made and mostly that on the disk. */
size_t gd_hints_choose(gd_hints *hints, size_t most, uint32_t *groups);
/* Returns whether a block not found is hinted to the group. */
bool gd_hints_want(const gd_hints *hints, uint32_t group);
/* Returns how many groups, hinted to for blocks not found, were not chosen. */
size_t gd_hints_left(gd_hints *hints);

#endif
