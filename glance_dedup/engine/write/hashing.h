/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hashing.h - the fingerprints of many blocks, computed by all threads.
 *
 * What is stored must be what was fingerprinted, though the caller changes his
 * buffer meanwhile, or memory loses a bit.  So the checksum of each new block is
 * computed before its fingerprint, and that of the copy which is stored must be
 * the same (packer.h): then what was fingerprinted in between was the same, too.
 * A duplicate needs no checksum: of it nothing is stored but where it is.  So
 * checksums are computed at once where blocks are likely to be new, and else with
 * a second fingerprint, of the few that turn out to be.
 *
 * Belongs to one transaction, one thread at a time.
 */
#ifndef GD_HASHING_H
#define GD_HASHING_H

#include "engine/handle/repo.h"
#include "engine/write/lookup.h"

typedef struct gd_hashing gd_hashing;

/* Of blocks of this scope. */
gd_status gd_hashing_open(gd_repo *repo, const gd_scope *scope,
                          gd_hashing **hashing, gd_error *err);
void gd_hashing_close(gd_hashing *hashing);

/* Fills in the blocks' fingerprints, and with checksums these, too.  Where blocks
 * are compared by value, each thread compares those that it has just fingerprinted
 * and still has in its caches, in the look-up's stores at hand. */
gd_status gd_hashing_run(gd_hashing *hashing, gd_lookup *lookup,
                         gd_block *blocks, size_t count, bool checksums,
                         gd_error *err);
/* Fills in the checksums of those blocks that were not found (group 0) by a run
 * without.  GD_IO if the fingerprint of one is another by now. */
gd_status gd_hashing_add_checksums(gd_hashing *hashing, gd_block *blocks,
                                   size_t count, gd_error *err);

#endif
