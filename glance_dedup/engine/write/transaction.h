/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transaction.h - one image's store operation, from begin to commit or abort
 * (design.rst, "Storing"; N7 and N8).
 *
 * Blocks pass in batches: each is fingerprinted by all threads, from where the
 * caller has it if that is a large piece, and looked up; what is new is copied,
 * and packed and written while the next batch is under way.  Memory is bounded:
 * a batch, the packer's buffers, and the fingerprint stores at hand.
 *
 * A transaction is not thread-safe: the caller has one thread in it at a time.
 */
#ifndef GD_TRANSACTION_H
#define GD_TRANSACTION_H

#include "engine/format/recipe.h"
#include "engine/handle/repo.h"

typedef struct gd_transaction gd_transaction;

/* All that it finds and stores is of this scope.  GD_EXISTS at once if the image
 * is committed already; GD_INVALID for an id, project or scope that cannot
 * be. */
gd_status gd_transaction_begin(gd_repo *repo, const char *image_id,
                               const char *project, const gd_scope *scope,
                               gd_transaction **out, gd_error *err);
const uint8_t *gd_transaction_upload_id(const gd_transaction *transaction);

/* Appends to the image.  data is the caller's again on return.  After an error
 * only abort is left.  Where blocks are cut is no concern of the caller's, and
 * may change (phase.h), until he first calls one of those below. */
gd_status gd_transaction_write(gd_transaction *transaction,
                               const uint8_t *data, size_t length,
                               gd_error *err);
/* ---- blocks by their fingerprints: pulling ---- */

/* Looks blocks up, those of this transaction too: *addresses[i] is where a block
 * with fps[i] and lengths[i] is stored, group 0 if that is not known.  The
 * shared locks are held until the transaction ends, so the addresses stay good
 * (I6).  Finds nothing where blocks are compared by value. */
gd_status gd_transaction_find(gd_transaction *transaction,
                              const gd_fingerprint *fps,
                              const uint32_t *lengths, size_t count,
                              gd_address *addresses, gd_error *err);
/* Appends blocks that gd_transaction_find of this transaction found.  The
 * addresses are not taken on trust: GD_INVALID, and nothing is appended, if one
 * is not of a block that find could return.  GD_INVALID, too, after a write that
 * ended within a block. */
gd_status gd_transaction_add(gd_transaction *transaction,
                             const gd_fingerprint *fps,
                             const uint32_t *lengths,
                             const gd_address *addresses, size_t count,
                             gd_error *err);
/* Appends blocks that lie one behind the other in data, cut as they are, since
 * they were cut elsewhere.  *addresses[i] is where each is, group 0 if it is all
 * zeros; it can be read there once gd_transaction_keep has returned.  GD_INVALID
 * for one that is empty or longer than any here, and after a write that ended
 * within a block. */
gd_status gd_transaction_write_blocks(gd_transaction *transaction,
                                      const uint8_t *data,
                                      const uint32_t *lengths, size_t count,
                                      gd_address *addresses, gd_error *err);
/* Appends zeros; GD_INVALID after a write that ended within a block. */
gd_status gd_transaction_add_zeros(gd_transaction *transaction,
                                   uint64_t length, gd_error *err);
/* Makes a sync point: what was stored so far stays, and is found by the next
 * transaction, though this one be aborted. */
gd_status gd_transaction_keep(gd_transaction *transaction, gd_error *err);

/* Has the recipe record the hash of all bytes, which the caller computed over
 * what he wrote.  GD_INVALID for one that no recipe has room for. */
gd_status gd_transaction_set_hash(gd_transaction *transaction,
                                  const char *name, const uint8_t *value,
                                  size_t length, gd_error *err);

/* Makes the image exist, durable, and fills in what was stored.  After an
 * error *linked says whether it may exist all the same (N8.6); if it does not,
 * the transaction can only be aborted. */
gd_status gd_transaction_commit(gd_transaction *transaction,
                                gd_recipe_header *header, bool *linked,
                                gd_error *err);
/* Ends the transaction and frees it.  Without a commit that linked the image,
 * the recipe and what was not synced are gone, the rest is left as uncounted
 * blocks: duplicates for the next upload, or garbage. */
void gd_transaction_end(gd_transaction *transaction);

#endif
