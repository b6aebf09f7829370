/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compresspolicy.h - which of a transaction's segments are worth compressing.
 *
 * Compression saves space that maintenance can save later; an upload that
 * waits for it waits now.  So it gives way where there is nothing to gain, and,
 * if that is wished, where there is no processor to spare (design.rst, "Giving
 * way").  What is decided changes how a segment is stored, and nothing else.
 *
 * Threads ask and report at once; segments are asked about in order, more or
 * less.
 */
#ifndef GD_COMPRESSPOLICY_H
#define GD_COMPRESSPOLICY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/base/env.h"

enum {
    /* So many segments in a row, at most, are not tried for what those before
     * them did not gain: what is lost where data begins to compress again. */
    GD_COMPRESS_UNTRIED = 7,
    GD_COMPRESS_SHARES = 64,
};

typedef enum gd_try {
    GD_TRY_WHOLLY,
    GD_TRY_QUICKLY, /* the last one did not pay */
    GD_TRY_NOT,
    GD_TRY_YIELD, /* not for want of a processor */
} gd_try;

typedef struct gd_compress_policy {
    /* Of segments, by their numbers: */
    atomic_ullong next;
    atomic_ullong due;  /* the next one to try */
    atomic_ullong paid; /* behind the last that was made smaller */
    /* Of the bundle under way, ns: */
    atomic_llong elapsed, worked;
    /* Of the bundles before it, the older the less: */
    uint64_t elapsed_before, worked_before;
    unsigned share; /* of GD_COMPRESS_SHARES segments, stored as they are */
} gd_compress_policy;

/* When a thread began to work. */
typedef struct gd_compress_policy_watch {
    int64_t began, worked;
} gd_compress_policy_watch;

/* What to do with the next segment; *number is for gd_compress_policy_tried. */
gd_try gd_compress_policy_next(gd_compress_policy *policy, uint64_t *number);
void gd_compress_policy_tried(gd_compress_policy *policy, uint64_t number,
                              bool paid);

/* Around a piece of work: how long it took, and how long of that the thread had
 * a processor. */
void gd_compress_policy_start(const gd_env *env,
                              gd_compress_policy_watch *watch);
void gd_compress_policy_stop(gd_compress_policy *policy, const gd_env *env,
                             const gd_compress_policy_watch *watch);
/* Decides, by what was measured so far, about the next bundle.  REQUIRES: no
 * thread at work. */
void gd_compress_policy_end_bundle(gd_compress_policy *policy);
/* Of how many out of GD_COMPRESS_SHARES segments compression is given up when
 * so much of the time that passed was had for work. */
unsigned gd_compress_policy_share(uint64_t elapsed, uint64_t worked);

#endif
