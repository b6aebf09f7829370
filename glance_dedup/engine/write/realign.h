/* SPDX-License-Identifier: Apache-2.0 */
/*
 * realign.h - finds blocks of fixed size that lie at other offsets than those
 * where the stream is cut.
 *
 * If the partitions of two equal disk images begin at different sectors, the
 * second one's blocks lie at another *phase*: shifted by a multiple of 512
 * bytes from the cuts.  So if hardly any block of a batch was found, a sample
 * of the batch is cut at all other phases, fingerprinted and looked up.
 * Nothing is known of the image's format.
 *
 * Belongs to one transaction, one thread at a time.
 */
#ifndef GD_REALIGN_H
#define GD_REALIGN_H

#include "engine/repo/repo.h"
#include "engine/write/hashing.h"
#include "engine/write/lookup.h"

typedef struct gd_realign gd_realign;

/* *phase is NULL if there is no other phase: blocks are cut by their content,
 * or are no larger than a sector.  The caller keeps lookup and hashing. */
gd_status gd_realign_open(gd_repo *repo, gd_hashing *hashing,
                          gd_lookup *lookup,
                          gd_realign **phase, gd_error *err);
/* phase may be NULL. */
void gd_realign_close(const gd_env *env, gd_realign *phase);

/* Returns whether hardly any blocks were found, and enough were looked for. */
bool gd_realign_is_lost(size_t count, size_t found);
/* Returns how many bytes later this batch should be cut so that its blocks are
 * found; 0 if the cuts should stay.  found is how many of its blocks were
 * found.  Always 0 unless the batch is lost. */
uint32_t gd_realign_choose(gd_realign *phase, const gd_block *blocks,
                           size_t count,
                           size_t found);
/* Notes the result of a batch that was stored.  Blocks found pay for the next
 * samples; blocks not found pay for few. */
void gd_realign_note(gd_realign *phase, size_t count, size_t found);

#endif
