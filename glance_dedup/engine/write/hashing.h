/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hashing.h - the fingerprints of many blocks, computed by all threads.
 *
 * The stored bytes must be the fingerprinted ones, even if the caller changes
 * his buffer meanwhile or memory loses a bit.  So the checksum of each new
 * block is computed before its fingerprint, and the copy that is stored must
 * have the same checksum (packer.h).  Then the bytes fingerprinted in between
 * were the same, too.  A duplicate needs no checksum, since only its address is
 * stored.  So checksums are computed at once if blocks are likely to be new.
 * Otherwise they are computed later, for the few blocks that are new, together
 * with a second fingerprint.
 *
 * Belongs to one transaction, one thread at a time.
 */
#ifndef GD_HASHING_H
#define GD_HASHING_H

#include "engine/repo/repo.h"
#include "engine/write/lookup.h"

typedef struct gd_hashing gd_hashing;

/* For blocks of this scope. */
gd_status gd_hashing_open(gd_repo *repo, const gd_scope *scope,
                          gd_hashing **hashing, gd_error *err);
void gd_hashing_close(gd_hashing *hashing);

/* Fills in the blocks' fingerprints and, if asked, their checksums.  Where
 * blocks are compared by value, each thread also compares the blocks that it
 * has just fingerprinted, while its caches still hold them, with the stores
 * that the look-up has at hand; NULL: with none. */
gd_status gd_hashing_run(gd_hashing *hashing, gd_lookup *lookup,
                         gd_block *blocks, size_t count, bool checksums,
                         gd_error *err);
/* Fills in the checksums of blocks that were not found (group 0), after a run
 * without checksums.  GD_IO if a block's fingerprint has changed since. */
gd_status gd_hashing_add_checksums(gd_hashing *hashing, gd_block *blocks,
                                   size_t count, gd_error *err);

#endif
