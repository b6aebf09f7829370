/* SPDX-License-Identifier: Apache-2.0 */
/*
 * similar.h - finds blocks that resemble each other, so that they can be
 * compressed together.
 *
 * A block has 12 features.  Two blocks have a feature in common with about the
 * probability that a place sampled from one is also in the other.  Blocks with
 * several features in common become a cluster, and an order puts the blocks of
 * each cluster one behind the other.
 *
 * Everything here is a guess that costs or saves bytes, never correctness.  The
 * features are not stored.  The results depend on the blocks alone.  No I/O, no
 * state.
 *
 * The features are like those of Odess (Zou et al., "The Dynamics of Deduplicated
 * Backups: Delta Compression", 2021): a rolling hash samples the places, which
 * makes them cheap.  They are compared one by one, not joined to super-features:
 * that finds more.
 */
#ifndef GD_SIMILAR_H
#define GD_SIMILAR_H

#include "engine/base/env.h"
#include "engine/base/status.h"

enum { GD_SIMILAR_FEATURES = 12 };

typedef struct gd_similar_features {
    /* 0: the block has none, since no place of it was sampled. */
    uint32_t feature[GD_SIMILAR_FEATURES];
} gd_similar_features;

void gd_similar_features_of(const uint8_t *block, size_t length,
                            gd_similar_features *out);

/* order[0..count) becomes a permutation of the numbers below count.  The blocks
 * of a cluster follow each other, in the order of their numbers; clusters are
 * in the order of their first blocks.  So blocks that resemble no other stay in
 * order.  Takes 200 to 392 bytes of memory for each block, and time in
 * proportion to count, whatever the blocks are. */
gd_status gd_similar_order(const gd_env *env, const gd_similar_features *blocks,
                           uint32_t count, uint32_t *order, gd_error *err);

#endif
