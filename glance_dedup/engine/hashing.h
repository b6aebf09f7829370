/*
 * hashing.h - the fingerprints of many blocks, computed by all threads.
 *
 * Belongs to one transaction, one thread at a time.
 */
#ifndef GD_HASHING_H
#define GD_HASHING_H

#include "lookup.h"
#include "repo.h"

typedef struct gd_hashing gd_hashing;

/* Of blocks of this scope. */
gd_status gd_hashing_open(gd_repo *repo, const gd_scope *scope,
                          gd_hashing **hashing, gd_error *err);
void gd_hashing_close(gd_hashing *hashing);

/* Fills in the blocks' fingerprints.  Where blocks are compared by value, each
 * thread compares those that it has just fingerprinted and still has in its
 * caches, in the look-up's stores at hand. */
gd_status gd_hashing_run(gd_hashing *hashing, gd_lookup *lookup,
                         gd_block *blocks, size_t count, gd_error *err);

#endif
