/* SPDX-License-Identifier: Apache-2.0 */
/*
 * latency.c - see latency.h.
 */
#include "nbdkit/latency.h"

static unsigned
bucket_of(uint64_t ns)
{
    const uint64_t first = GD_NBDKIT_LATENCY_FIRST_NS;
    if (ns <= first) {
        return 0;
    }
    unsigned bucket = 64 - (unsigned)__builtin_clzll((ns - 1) / first);
    return bucket < GD_NBDKIT_LATENCY_BUCKETS ? bucket
                                              : GD_NBDKIT_LATENCY_BUCKETS - 1;
}

void
gd_nbdkit_latency_add(gd_nbdkit_latency *latency, uint64_t ns)
{
    atomic_fetch_add_explicit(&latency->sum_ns, ns, memory_order_relaxed);
    atomic_fetch_add_explicit(&latency->counts[bucket_of(ns)], 1,
                              memory_order_relaxed);
}
