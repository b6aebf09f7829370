/* SPDX-License-Identifier: Apache-2.0 */
/*
 * phase.h - where blocks of fixed size would be found, if they are not where
 * the stream is cut.
 *
 * A disk image whose partition begins at another sector has the blocks of its
 * twin at another *phase*: a multiple of 512 bytes behind where cutting looks.
 * So a sample of a batch in which hardly any block was found is cut at all other
 * phases, fingerprinted and looked up.  Of the image's format nothing is known.
 *
 * Belongs to one transaction, one thread at a time.
 */
#ifndef GD_PHASE_H
#define GD_PHASE_H

#include "engine/handle/repo.h"
#include "engine/write/hashing.h"
#include "engine/write/lookup.h"

typedef struct gd_phase gd_phase;

/* NULL where there is no other phase: blocks are cut by their content, or are
 * no larger than a sector.  lookup and hashing stay the caller's. */
gd_status gd_phase_open(gd_repo *repo, gd_hashing *hashing, gd_lookup *lookup,
                        gd_phase **phase, gd_error *err);
/* NULL is good, too. */
void gd_phase_close(const gd_env *env, gd_phase *phase);

/* Whether so many found of so many are hardly any, and enough were looked
 * for. */
bool gd_phase_is_lost(size_t count, size_t found);
/* How many bytes further on the blocks of this batch, of which so many were
 * found, should be cut, for them to be found; 0 if they should stay.  0 is
 * certain unless the batch is lost. */
uint32_t gd_phase_choose(gd_phase *phase, const gd_block *blocks, size_t count,
                         size_t found);
/* Notes what became of a batch that was stored: what was found pays for the next
 * samples, and what was not, for few. */
void gd_phase_note(gd_phase *phase, size_t count, size_t found);

#endif
