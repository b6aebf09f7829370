/* SPDX-License-Identifier: Apache-2.0 */
/*
 * intake.h - the way of an image's bytes into a transaction: they are cut into
 * blocks, which are taken in batches; each batch is fingerprinted and looked up;
 * what is new is given to the packer; and all is noted in the recipe.  A batch
 * that would be found at another phase is cut anew (phase.h).
 *
 * Belongs to one transaction, one thread at a time.  After an error only
 * gd_intake_close is left.
 */
#ifndef GD_INTAKE_H
#define GD_INTAKE_H

#include "engine/format/chunker.h"
#include "engine/format/recipe.h"
#include "engine/handle/repo.h"
#include "engine/write/hashing.h"
#include "engine/write/lookup.h"
#include "engine/write/packer.h"
#include "engine/write/phase.h"

/* A stretch of the image. */
typedef struct gd_batch {
    uint8_t *data; /* copies of blocks that do not stay where they are */
    size_t used;
    gd_block *blocks;
    size_t count;
    bool borrows; /* some blocks are still the caller's */
    uint64_t zeros_after;
    uint64_t zero_blocks;
    uint8_t *carry; /* the start of a block whose end is still to come */
    size_t carried;
} gd_batch;

/* The transaction may use the parts between two calls, and the batch's blocks
 * while none wait. */
typedef struct gd_intake {
    gd_repo *repo;
    gd_chunker chunker;
    gd_recipe_writer *recipe; /* the transaction's */
    gd_packer *packer;
    gd_lookup *lookup;
    gd_hashing *hashing;
    gd_phase *phase; /* NULL: nothing is cut anew */
    size_t batch_blocks; /* room in a batch */
    gd_batch batch;
    gd_batch other; /* empty: to cut anew into; opened when it is needed */
    size_t short_cut; /* unless 0, the length of the next block */
    bool told; /* by the caller, of blocks: their cuts are not ours to move */
    bool mostly_known; /* hardly a block of the last batch was new */
    gd_address *addresses; /* for that of the next block; NULL: not asked for */
} gd_intake;

/* For blocks of this scope.  To be closed after a failure, too. */
gd_status gd_intake_open(gd_intake *intake, gd_repo *repo,
                         const gd_scope *scope, gd_error *err);
/* Releases all locks, so REQUIRES: the recipe is committed or given up. */
void gd_intake_close(gd_intake *intake);

/* Takes the next bytes.  data is the caller's again on return. */
gd_status gd_intake_take(gd_intake *intake, const uint8_t *data,
                         size_t length, gd_error *err);
/* Takes blocks that lie one behind the other in data, cut as they are, and
 * stores them: *addresses[i] is where; group 0 if it is all zeros.
 * REQUIRES: no block is empty or longer than any here, or half taken; and none
 * wait. */
gd_status gd_intake_take_blocks(gd_intake *intake, const uint8_t *data,
                                const uint32_t *lengths, size_t count,
                                gd_address *addresses, gd_error *err);
/* Stores the blocks that wait, so that what is noted in the recipe next comes
 * behind them. */
gd_status gd_intake_store(gd_intake *intake, gd_error *err);
/* No more bytes will come: stores all. */
gd_status gd_intake_finish(gd_intake *intake, gd_error *err);

#endif
