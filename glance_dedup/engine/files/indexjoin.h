/* SPDX-License-Identifier: Apache-2.0 */
/*
 * indexjoin.h - finds many fingerprints in the exact index, in one pass over
 * its files (batch.rst, stage 1b).
 *
 * Memory: a frame.
 */
#ifndef GD_INDEXJOIN_H
#define GD_INDEXJOIN_H

#include "engine/files/shards.h"
#include "engine/format/index.h"

/* Fills in addresses[i] for each of the sorted requests whose key the index
 * has, and 0 for the others.  Shards are read, and runs that were not merged
 * yet.  *unread is how many files could not be used: an index is hints, so
 * blocks are missed.  Where the requests are few, frames between them are
 * skipped. */
gd_status gd_indexjoin_shards(gd_shards *shards, const gd_item *requests,
                              size_t count, uint64_t *addresses,
                              uint32_t *unread,
                              gd_error *err);

#endif
