/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transaction.h - one image's store operation, from begin to commit or abort
 * (design.rst, "Storing"; N7 and N8).
 *
 * Blocks pass in batches.  All threads fingerprint a batch, directly from the
 * caller's buffer if that is large, and the batch is looked up.  New blocks are
 * copied, then packed and written while the next batch is under way.  Memory is
 * bounded: a batch, the packer's buffers, and the loaded fingerprint stores.
 *
 * A transaction is not thread-safe: only one thread may use it at a time.
 */
#ifndef GD_TRANSACTION_H
#define GD_TRANSACTION_H

#include "engine/format/recipe.h"
#include "engine/repo/repo.h"
#include "engine/write/lookup.h"

typedef struct gd_transaction gd_transaction;
struct gd_image;
struct gd_spool_writer;

/* Everything is found and stored in this scope.  GD_EXISTS if the image is
 * already committed; GD_INVALID for an id, project or scope that is not
 * allowed. */
gd_status gd_transaction_begin(gd_repo *repo, const char *image_id,
                               const char *project, const gd_scope *scope,
                               gd_transaction **out, gd_error *err);
const uint8_t *gd_transaction_upload_id(const gd_transaction *transaction);

/* ---- hints (volumes.rst) ---- */

/* Chooses the blocks that are looked up from the next batch on. */
void gd_transaction_set_lookup_mode(gd_transaction *transaction,
                                    gd_dedup dedup);
/* Looks into these groups first.  Called before the first block. */
void gd_transaction_prefetch_groups(gd_transaction *transaction,
                                    const uint32_t *groups,
                                    size_t count);
/* Plain bytes of blocks found in them. */
uint64_t gd_transaction_prefetched_groups(const gd_transaction *transaction);

/* Appends to the image.  On return the caller may reuse data.  After an error
 * only abort is possible.  The transaction chooses where to cut blocks, and may
 * change that (realign.h), until the first call of a function below. */
gd_status gd_transaction_write(gd_transaction *transaction,
                               const uint8_t *data, size_t length,
                               gd_error *err);
/* ---- blocks by their fingerprints: pulling ---- */

/* Looks blocks up, including this transaction's own.  *addresses[i] is where a
 * block with fps[i] and lengths[i] is stored, or group 0 if that is not known.
 * The shared locks are held until the transaction ends, so the addresses stay
 * valid (I6).  Finds nothing where blocks are compared by value. */
gd_status gd_transaction_find(gd_transaction *transaction,
                              const gd_fingerprint *fps,
                              const uint32_t *lengths, size_t count,
                              gd_address *addresses, gd_error *err);
/* The same for blocks with addresses that another process claims: *addresses[i]
 * stays if the block is there, else it becomes group 0.  Without a claim, it is
 * group 0. */
gd_status gd_transaction_find_at(gd_transaction *transaction,
                                 const gd_fingerprint *fps,
                                 const uint32_t *lengths, size_t count,
                                 gd_address *addresses, gd_error *err);
/* Appends blocks that gd_transaction_find of this transaction found.  The
 * addresses are checked: if one is not of a block that find could return,
 * returns GD_INVALID and appends nothing.  Also GD_INVALID after a write that
 * ended within a block. */
gd_status gd_transaction_add(gd_transaction *transaction,
                             const gd_fingerprint *fps,
                             const uint32_t *lengths,
                             const gd_address *addresses, size_t count,
                             gd_error *err);
/* Appends blocks that were cut elsewhere and lie one behind the other in data;
 * they are not cut again.  old[i] is where an equal block may be, which is
 * verified before the block is looked up, or group 0; old may be NULL.
 * *addresses[i] is each block's address, or group 0 if it is all zeros.  The
 * block can be read there after gd_transaction_sync.
 * GD_INVALID for a block that is empty or longer than the longest allowed, and
 * after a write that ended within a block. */
gd_status gd_transaction_write_blocks(gd_transaction *transaction,
                                      const uint8_t *data,
                                      const uint32_t *lengths,
                                      const gd_address *old, size_t count,
                                      gd_address *addresses, gd_error *err);
/* Appends the plain bytes [from, to) of a stored image, as far as possible by the
 * addresses of its blocks (addruns.h).  *stored is how many bytes had to be
 * read and stored, also after an error.  GD_INVALID, and nothing is appended,
 * for a range that is not within these, for an image that another handle
 * opened, and after a write that ended within a block. */
gd_status gd_transaction_add_runs(gd_transaction *transaction,
                                  struct gd_image *source, uint64_t from,
                                  uint64_t to, uint64_t *stored,
                                  gd_error *err);
/* Appends zeros as gd_transaction_write would, but any number at once. */
gd_status gd_transaction_write_zeros(gd_transaction *transaction,
                                     uint64_t length, gd_error *err);
/* Appends zeros as blocks of their own; GD_INVALID after a write that ended within a block. */
gd_status gd_transaction_add_zeros(gd_transaction *transaction,
                                   uint64_t length, gd_error *err);
/* Makes a sync point.  What was stored so far stays, and the next transaction
 * finds it, even if this one is aborted. */
gd_status gd_transaction_sync(gd_transaction *transaction, gd_error *err);
/* Plain bytes that were stored so far, and what they take on the disk.  Exact
 * right after gd_transaction_sync. */
void gd_transaction_count(const gd_transaction *transaction,
                          uint64_t *new_bytes, uint64_t *stored_bytes);
/* Writes out the appended blocks, without a sync point, and fills in their
 * bytes on the disk, and how many plain bytes of it were found. */
gd_status gd_transaction_measure(gd_transaction *transaction,
                                 uint64_t *stored_bytes, uint64_t *found_bytes,
                                 gd_error *err);
/* Counts the bytes that stay on the disk if the transaction is aborted now. */
uint64_t gd_transaction_kept_bytes(const gd_transaction *transaction);
/* The recipe counts these bytes too: an earlier transaction stored them for
 * this image. */
void gd_transaction_credit(gd_transaction *transaction, uint64_t new_bytes,
                           uint64_t stored_bytes);

/* Records in the recipe the hash of all bytes, which the caller computed over
 * what he wrote.  GD_INVALID if a recipe has no room for it. */
gd_status gd_transaction_set_hash(gd_transaction *transaction,
                                  const char *name, const uint8_t *value,
                                  size_t length, gd_error *err);

/* ---- images with a disk (image-disks.rst) ---- */

/* Begins a recipe of kind M for a stored image (N10.1), which keeps id, upload,
 * project, scope, size and hash.  The caller appends its plain bytes.
 * gd_transaction_finish takes the place of the commit. */
gd_status gd_transaction_begin_conversion(gd_repo *repo, const char *image_id,
                                          gd_transaction **out,
                                          gd_error *err);
/* Ends the plain bytes, and begins the table; only calls of the next function,
 * and the end, may follow.  disk has the disk's size, format, flags and
 * encoders.  GD_INVALID if that is not possible, or if this is an upload. */
gd_status gd_transaction_begin_table(gd_transaction *transaction,
                                     const gd_recipe_disk *disk,
                                     gd_error *err);
/* Adds extents of the table, in the order of the file; their offsets are
 * ignored. */
gd_status gd_transaction_add_derived(gd_transaction *transaction,
                                     const gd_extent *extents, size_t count,
                                     gd_error *err);
/* For an upload that appended all plain bytes of a stored image: adds the
 * table, too.  Does nothing if that image has no disk. */
gd_status gd_transaction_copy_table(gd_transaction *transaction,
                                    const struct gd_image *source,
                                    gd_error *err);
/* Makes the converted recipe durable (N10.2).  From then on its spool file
 * stays.  Without a table the recipe is that of the file. */
gd_status gd_transaction_finish(gd_transaction *transaction,
                                gd_recipe_header *header, gd_error *err);
/* For the exchange: the image's old recipe, and the new one's spool file.
 * GD_INVALID unless a conversion was finished. */
gd_status
gd_transaction_require_finished(const gd_transaction *transaction,
                                const struct gd_spool_writer **spool,
                                gd_error *err);
const gd_recipe *gd_transaction_old(const gd_transaction *transaction);

/* Ends the present image, and begins another one of the same project and scope.
 * They have their sync points together, and the commit makes both exist, one
 * after the other: that takes fewer syncs than a transaction for each.  Small
 * images only: the locks are held until the end.  GD_EXISTS if the image is
 * already committed; then nothing has changed. */
gd_status gd_transaction_next_image(gd_transaction *transaction,
                                    const char *image_id, gd_error *err);

/* Makes the images exist, durably, and fills in the stored bytes of the last
 * one.  After an error *linked is true if any image may exist anyway (N8.6).  If
 * none does, the transaction can only be aborted. */
gd_status gd_transaction_commit(gd_transaction *transaction,
                                gd_recipe_header *header, bool *linked,
                                gd_error *err);
/* Ends the transaction and frees it.  Unless a commit linked the image, removes
 * the recipe and the data that is not synced.  The rest stays as uncounted
 * blocks: duplicates for the next upload, or garbage. */
void gd_transaction_end(gd_transaction *transaction);

#endif
