/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_latency.c - the limits of the buckets, and additions by threads.
 *
 * The plugin is no library, so its file is compiled here.
 */
#include "glance_dedup/nbdkit/latency.c"

#include <pthread.h>

#include "tests/c/support/check.h"

enum { THREADS = 4, ADDITIONS = 20000 };

/* Returns whether a time is counted in one bucket, and in no other. */
static bool
is_counted_in(unsigned bucket, uint64_t ns)
{
    static gd_nbdkit_latency latency;
    uint64_t before = latency.sum_ns, all = 0;
    memset(latency.counts, 0, sizeof latency.counts);
    gd_nbdkit_latency_add(&latency, ns);
    for (unsigned i = 0; i < GD_NBDKIT_LATENCY_BUCKETS; i++) {
        all += latency.counts[i];
    }
    return latency.counts[bucket] == 1 && all == 1 &&
           latency.sum_ns - before == ns;
}

TEST(test_limits)
{
    unsigned last = GD_NBDKIT_LATENCY_BUCKETS - 1;
    CHECK(is_counted_in(0, 0));
    CHECK(is_counted_in(0, 1));
    for (unsigned i = 0; i < last; i++) {
        uint64_t limit = UINT64_C(16000) << i;
        CHECK(is_counted_in(i, limit - 1));
        CHECK(is_counted_in(i, limit));
        CHECK(is_counted_in(i + 1, limit + 1));
    }
    CHECK(is_counted_in(last, UINT64_MAX));
}

static void *
add_times(void *arg)
{
    gd_nbdkit_latency *latency = arg;
    for (unsigned i = 0; i < ADDITIONS; i++) {
        gd_nbdkit_latency_add(latency, i % 2 == 0 ? 1000 : 20000);
    }
    return NULL;
}

TEST(test_no_addition_is_lost)
{
    static gd_nbdkit_latency latency;
    pthread_t threads[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, add_times, &latency) == 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK(latency.counts[0] == THREADS * ADDITIONS / 2);
    CHECK(latency.counts[1] == THREADS * ADDITIONS / 2);
    CHECK(latency.sum_ns == UINT64_C(21000) * THREADS * ADDITIONS / 2);
}
