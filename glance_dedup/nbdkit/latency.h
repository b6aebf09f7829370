/* SPDX-License-Identifier: Apache-2.0 */
/*
 * latency.h - a histogram of the times of requests.
 *
 * Bucket i counts requests of at most 16 us * 2^i, and of more than the bucket
 * before; the last one has no limit.  So the memory is bounded, and adding a
 * time is two additions without a lock.  The sum and the counts are read one
 * after the other, so they may differ by requests that end meanwhile.
 * Thread-safe.
 */
#ifndef GD_NBDKIT_LATENCY_H
#define GD_NBDKIT_LATENCY_H

#include <stdatomic.h>
#include <stdint.h>

enum {
    GD_NBDKIT_LATENCY_FIRST_NS = 16000,
    GD_NBDKIT_LATENCY_BUCKETS = 21, /* 16 us to 8.4 s, and longer ones */
    GD_NBDKIT_CACHE_LINE = 64,
};

typedef struct gd_nbdkit_latency {
    /* Threads of other requests do not write to the same cache line. */
    _Alignas(GD_NBDKIT_CACHE_LINE) atomic_uint_fast64_t sum_ns;
    atomic_uint_fast64_t counts[GD_NBDKIT_LATENCY_BUCKETS];
} gd_nbdkit_latency;

/* Those of the requests that a guest waits for.  Trims are not among them. */
typedef struct gd_nbdkit_latencies {
    gd_nbdkit_latency reads;
    gd_nbdkit_latency writes;
    gd_nbdkit_latency flushes;
} gd_nbdkit_latencies;

/* Counts a request that took some nanoseconds. */
void gd_nbdkit_latency_add(gd_nbdkit_latency *latency, uint64_t ns);

#endif
