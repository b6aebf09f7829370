/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_compresspolicy.c - compression under pressure: the number of segments
 * that are tried, and the number that is skipped under each pressure.
 */
#include "engine/write/compresspolicy.h"

#include <pthread.h>

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

/* Handles one segment, by one thread. Returns true if it was tried. */
static bool
segment(gd_compress_policy *policy, bool pays)
{
    uint64_t number;
    gd_try try = gd_compress_policy_next(policy, &number);
    if (try == GD_TRY_WHOLLY || try == GD_TRY_QUICKLY) {
        gd_compress_policy_tried(policy, number, pays);
        return true;
    }
    CHECK_INT(try, policy->share > 0 ? GD_TRY_YIELD : GD_TRY_NOT);
    return false;
}

/* ---- incompressible data ---- */

/* However long compression does not pay, little is lost when it does again: a
 * quarter of that time, and never more than seven segments. */
TEST(test_what_is_lost)
{
    for (unsigned noise = 0; noise < 200; noise++) {
        gd_compress_policy policy = {0};
        unsigned tried = 0, lost = 0;
        for (unsigned i = 0; i < 10; i++) {
            CHECK(segment(&policy, true)); /* follows a gain */
        }
        for (unsigned i = 0; i < noise; i++) {
            tried += segment(&policy, false);
        }
        while (lost < 100 && !segment(&policy, true)) {
            lost++;
        }
        CHECK(lost <= noise / 4 && lost <= GD_COMPRESS_UNTRIED);
        CHECK(tried >= noise / 8 && tried <= 14 + noise / 8);
        for (unsigned i = 0; i < 10; i++) {
            CHECK(segment(&policy, true));
        }
    }
}

/* This also holds at the very beginning. */
TEST(test_what_is_saved)
{
    gd_compress_policy policy = {0};
    unsigned tried = 0;
    for (unsigned i = 0; i < 100000; i++) {
        tried += segment(&policy, false);
    }
    CHECK(tried < 100000 / 8 + 20);
}

/* After a segment that did not pay, a quick try decides about the next. */
TEST(test_quick_tries)
{
    gd_compress_policy policy = {0};
    uint64_t number;
    CHECK_INT(gd_compress_policy_next(&policy, &number), GD_TRY_WHOLLY);
    gd_compress_policy_tried(&policy, number, true);
    CHECK_INT(gd_compress_policy_next(&policy, &number), GD_TRY_WHOLLY);
    gd_compress_policy_tried(&policy, number, false);
    CHECK_INT(gd_compress_policy_next(&policy, &number), GD_TRY_QUICKLY);
    gd_compress_policy_tried(&policy, number, false);
    CHECK_INT(gd_compress_policy_next(&policy, &number), GD_TRY_QUICKLY);
    gd_compress_policy_tried(&policy, number, true);
    CHECK_INT(gd_compress_policy_next(&policy, &number), GD_TRY_WHOLLY);
    CHECK_INT(number, 4);
}

enum { THREADS = 4, SEGMENTS = 40000 };

typedef struct crowd {
    gd_compress_policy policy;
    bool tried[SEGMENTS];
} crowd;

static void *
work(void *arg)
{
    crowd *c = arg;
    uint64_t number, dice = (uintptr_t)&number;
    while (atomic_load(&c->policy.next) < SEGMENTS - THREADS) {
        gd_try try = gd_compress_policy_next(&c->policy, &number);
        if (try != GD_TRY_NOT) {
            c->tried[number] = true;
            gd_compress_policy_tried(&c->policy, number,
                                     next_random(&dice) % 64 == 0);
        }
    }
    return NULL;
}

/* The same bound holds with any number of threads, in any order of reports. */
TEST(test_many_threads)
{
    static crowd c;
    pthread_t threads[THREADS];
    unsigned untried = 0, longest = 0;
    memset(&c, 0, sizeof c);
    for (int i = 0; i < THREADS; i++) {
        REQUIRE(pthread_create(&threads[i], NULL, work, &c) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    for (uint64_t i = 0; i < atomic_load(&c.policy.next); i++) {
        untried = c.tried[i] ? 0 : untried + 1;
        longest = untried > longest ? untried : longest;
    }
    CHECK(longest > 0 && longest <= GD_COMPRESS_UNTRIED);
}

/* ---- a busy processor ---- */

TEST(test_shares)
{
    unsigned before = 0;
    CHECK_INT(gd_compress_policy_share(0, 0), 0);
    CHECK_INT(gd_compress_policy_share(1000, 0), 0); /* not measured */
    CHECK_INT(gd_compress_policy_share(1000, 1000), 0);
    CHECK_INT(gd_compress_policy_share(4000, 1000), 0);
    CHECK_INT(gd_compress_policy_share(6000, 1000), GD_COMPRESS_SHARES / 2);
    CHECK_INT(gd_compress_policy_share(8000, 1000), GD_COMPRESS_SHARES);
    CHECK_INT(gd_compress_policy_share(INT64_MAX / 4, 1), GD_COMPRESS_SHARES);
    for (uint64_t elapsed = 0; elapsed < 10000; elapsed += 10) {
        unsigned share = gd_compress_policy_share(elapsed, 1000);
        CHECK(share >= before && share <= GD_COMPRESS_SHARES);
        before = share;
    }
}

/* Skipped segments are spread evenly: any run has its share, but for one. */
TEST(test_spread)
{
    for (unsigned share = 0; share <= GD_COMPRESS_SHARES; share++) {
        gd_compress_policy policy = {.share = share};
        unsigned given_up = 0;
        for (unsigned i = 1; i <= 300; i++) {
            given_up += !segment(&policy, true);
            CHECK_INT(given_up, i * share / GD_COMPRESS_SHARES);
        }
    }
}

static void
bundle(gd_compress_policy *policy, int64_t elapsed, int64_t worked)
{
    atomic_store(&policy->elapsed, elapsed);
    atomic_store(&policy->worked, worked);
    gd_compress_policy_end_bundle(policy);
}

/* One bundle that had to wait, or one that did not, is chance; several are
 * not. */
TEST(test_bundles_before)
{
    gd_compress_policy policy = {0};
    for (int i = 0; i < 20; i++) {
        bundle(&policy, 1100, 1000);
        CHECK_INT(policy.share, 0);
    }
    bundle(&policy, 20000, 1000);
    CHECK_INT(policy.share, 0);
    for (int i = 0; i < 8; i++) {
        bundle(&policy, 20000, 1000);
    }
    CHECK_INT(policy.share, GD_COMPRESS_SHARES);
    bundle(&policy, 1100, 1000);
    CHECK(policy.share > 0);
    for (int i = 0; i < 24; i++) {
        bundle(&policy, 1100, 1000);
    }
    CHECK_INT(policy.share, 0);
    bundle(&policy, 0, 0); /* not measured */
    CHECK_INT(policy.share, 0);
}

/* With the real clocks, work takes time of a processor, waiting takes none. */
TEST(test_watch)
{
    const gd_env *env = gd_env_posix();
    gd_compress_policy policy = {0};
    gd_compress_policy_watch watch;
    gd_compress_policy_start(env, &watch);
    while (env->thread_ns(env) - watch.worked < 2000000) {
    }
    gd_compress_policy_stop(&policy, env, &watch);
    CHECK(atomic_load(&policy.worked) >= 2000000);
    CHECK(atomic_load(&policy.elapsed) >= 1000000);
    int64_t worked = atomic_load(&policy.worked);
    gd_compress_policy_start(env, &watch);
    env->sleep_ms(env, 1000);
    gd_compress_policy_stop(&policy, env, &watch);
    CHECK(atomic_load(&policy.elapsed) >= 900000000);
    CHECK(atomic_load(&policy.worked) - worked < 900000000);
}
