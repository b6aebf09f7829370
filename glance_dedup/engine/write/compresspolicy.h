/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compresspolicy.h - which of a transaction's segments are worth compressing.
 *
 * An upload that waits for compression waits now, while maintenance can save
 * the same space later.  So compression is left out where it gains nothing and,
 * if so configured, while the processor is busy (speed.rst, "Giving way").
 * The decision changes only how a segment is stored.
 *
 * Threads may request decisions and report at the same time.  They request
 * decisions about segments roughly in order.
 */
#ifndef GD_COMPRESSPOLICY_H
#define GD_COMPRESSPOLICY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/base/env.h"

enum {
    /* The most segments in a row that are not tried because those before them
     * did not gain.  This bounds the loss where data becomes compressible
     * again. */
    GD_COMPRESS_UNTRIED = 7,
    GD_COMPRESS_SHARES = 64,
};

typedef enum gd_try {
    GD_TRY_WHOLLY,
    GD_TRY_QUICKLY, /* the last try did not pay */
    GD_TRY_NOT,
    GD_TRY_YIELD, /* do not compress: the processor is busy */
} gd_try;

typedef struct gd_compress_policy {
    /* Counts segments by number: */
    atomic_ullong next;
    atomic_ullong due;  /* the next segment to try */
    atomic_ullong paid; /* the one after the last that became smaller */
    /* Of the current bundle, in ns: */
    atomic_llong elapsed, worked;
    /* Of earlier bundles, with less weight the older they are: */
    uint64_t elapsed_before, worked_before;
    unsigned share; /* how many of GD_COMPRESS_SHARES segments are stored as
                     * they are */
} gd_compress_policy;

/* When a thread started its work. */
typedef struct gd_compress_policy_watch {
    int64_t began, worked;
} gd_compress_policy_watch;

/* Decides how to store the next segment.  Pass *number to
 * gd_compress_policy_tried. */
gd_try gd_compress_policy_next(gd_compress_policy *policy, uint64_t *number);
void gd_compress_policy_tried(gd_compress_policy *policy, uint64_t number,
                              bool paid);

/* Enclose a piece of work.  They measure how long it took, and for how long the
 * thread had a processor. */
void gd_compress_policy_start(const gd_env *env,
                              gd_compress_policy_watch *watch);
void gd_compress_policy_stop(gd_compress_policy *policy, const gd_env *env,
                             const gd_compress_policy_watch *watch);
/* Decides about the next bundle by the measurements so far.
 * REQUIRES: no thread at work. */
void gd_compress_policy_end_bundle(gd_compress_policy *policy);
/* Returns how many of GD_COMPRESS_SHARES segments are not compressed, given how
 * much of the elapsed time the threads could work. */
unsigned gd_compress_policy_share(uint64_t elapsed, uint64_t worked);

#endif
