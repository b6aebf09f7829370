/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ingest.h - takes an image's bytes into a transaction: cuts them into blocks,
 * finds the stored ones and stores the others.
 *
 * Blocks are taken in batches.  Each batch is fingerprinted and looked up, new
 * blocks go to the packer, and all are noted in the recipe.  A batch that would
 * be found at another phase is cut again (realign.h).
 *
 * Belongs to one transaction, one thread at a time.  After an error only
 * gd_ingest_close may be called.
 */
#ifndef GD_INGEST_H
#define GD_INGEST_H

#include "engine/format/chunker.h"
#include "engine/format/recipe.h"
#include "engine/repo/repo.h"
#include "engine/write/hashing.h"
#include "engine/write/lookup.h"
#include "engine/write/packer.h"
#include "engine/write/realign.h"

/* A part of the image. */
typedef struct gd_batch {
    uint8_t *data; /* copies of blocks whose buffers do not stay */
    size_t used;
    gd_block *blocks;
    size_t count;
    bool borrows; /* some blocks are still in the caller's buffer */
    bool hinted; /* some blocks have an address that is to be verified */
    uint64_t zeros_after;
    uint64_t zero_blocks;
    uint8_t *carry; /* the start of a block whose end has not come yet */
    size_t carried;
} gd_batch;

/* Between two calls the transaction may use the parts; the batch's blocks, too,
 * while none wait. */
typedef struct gd_ingest {
    gd_repo *repo;
    gd_chunker chunker;
    gd_recipe_writer *recipe; /* the transaction's */
    gd_packer *packer;
    gd_lookup *lookup;
    gd_hashing *hashing;
    gd_realign *phase; /* NULL: batches are never cut again */
    size_t batch_blocks; /* room in a batch */
    gd_batch batch;
    gd_batch other; /* empty; batches are cut again into it; opened when
                     * needed */
    size_t short_cut; /* if not 0, the length of the next block */
    gd_dedup dedup; /* which blocks are looked for */
    bool told; /* the caller gave blocks: their cuts must not move */
    bool mostly_known; /* hardly any block of the last batch was new */
    gd_address *addresses; /* where the next block's address goes; NULL: not
                            * wanted */
} gd_ingest;

/* For blocks of this scope.  Must be closed after a failure, too. */
gd_status gd_ingest_open(gd_ingest *intake, gd_repo *repo,
                         const gd_scope *scope, gd_error *err);
/* Releases all locks, so REQUIRES: the recipe is committed or given up. */
void gd_ingest_close(gd_ingest *intake);

/* Chooses the blocks that are looked up from the next batch on.  Those of OFF get
 * the mark nodedup. */
void gd_ingest_set_dedup(gd_ingest *intake, gd_dedup dedup);
/* Takes the next bytes.  On return the caller may reuse data. */
gd_status gd_ingest_take(gd_ingest *intake, const uint8_t *data,
                         size_t length, gd_error *err);
/* Takes zeros, which it does not look through. */
gd_status gd_ingest_take_zeros(gd_ingest *intake, uint64_t length,
                               gd_error *err);
/* Takes blocks that were cut already and lie one behind the other in data, and
 * stores them.  old[i] is where an equal block may be, or group 0; old may be
 * NULL.  It is looked at before anything is looked up.  *addresses[i] is where a
 * block is, or group 0 if it is all zeros.
 * REQUIRES: no block is empty or longer than the longest allowed; no block is
 * half taken; and no block waits. */
gd_status gd_ingest_take_blocks(gd_ingest *intake, const uint8_t *data,
                                const uint32_t *lengths,
                                const gd_address *old, size_t count,
                                gd_address *addresses, gd_error *err);
/* Stores the blocks that wait, so that the next note in the recipe comes after
 * them. */
gd_status gd_ingest_store(gd_ingest *intake, gd_error *err);
/* Stores everything; no more bytes will come. */
gd_status gd_ingest_finish(gd_ingest *intake, gd_error *err);

#endif
