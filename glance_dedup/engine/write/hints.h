/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hints.h - which groups' fingerprint stores are worth loading for a batch.
 *
 * Keeps the hints that the filter gave for the blocks of a batch, and chooses
 * groups: the one that most blocks are hinted to, then the one for most of the
 * rest, and so on.  A group that holds only what another one chosen holds, too,
 * is thus left out.
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

/* Forgets all: a new batch begins. */
void gd_hints_clear(gd_hints *hints);
/* block: where its address will be; as long as the group there is 0, the block
 * is not found.  REQUIRES: the hints of one block are added one after the
 * other, and the block stays in place.  More hints or groups than there is room
 * for are forgotten. */
void gd_hints_add(gd_hints *hints, const gd_address *block, uint32_t group);
/* Chooses groups that were not chosen before, for the blocks not found, at most
 * `most`; the count.  They are in the order of their numbers, in which they were
 * made and mostly lie on the disk. */
size_t gd_hints_choose(gd_hints *hints, size_t most, uint32_t *groups);
/* Whether a block not found is hinted to the group. */
bool gd_hints_want(const gd_hints *hints, uint32_t group);
/* Groups that were not chosen, of blocks not found. */
size_t gd_hints_left(gd_hints *hints);

#endif
