/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compresspolicy.c - see compresspolicy.h.
 *
 * Numbers only grow, whichever thread is first.  So the bound on untried
 * segments holds with any number of threads.
 */
#include "engine/write/compresspolicy.h"

enum {
    /* A stretch that did not pay so far is expected to go on for a quarter of
     * its length. */
    BELIEF = 4,
    /* The pressure is expected to stay as in about the last eight bundles. */
    BUNDLES = 8,
    /* Pressure, in quarters: up to the first all segments are compressed, and
     * from the second on none. */
    NO_PRESSURE = 4 * 4,
    FULL_PRESSURE = 8 * 4,
};

static void
raise_to(atomic_ullong *value, uint64_t least)
{
    unsigned long long now = atomic_load(value);
    while (now < least && !atomic_compare_exchange_weak(value, &now, least)) {
    }
}

/* Spreads the share evenly. */
static bool
is_yielded(uint64_t number, unsigned share)
{
    return (number + 1) * share / GD_COMPRESS_SHARES !=
           number * share / GD_COMPRESS_SHARES;
}

gd_try
gd_compress_policy_next(gd_compress_policy *policy, uint64_t *number)
{
    /* Load in this order: then only segments before this one can have put it
     * off. */
    uint64_t due = atomic_load(&policy->due);
    *number = atomic_fetch_add(&policy->next, 1);
    if (*number < due) {
        return GD_TRY_NOT;
    }
    if (is_yielded(*number, policy->share)) {
        return GD_TRY_YIELD;
    }
    return due > atomic_load(&policy->paid) ? GD_TRY_QUICKLY : GD_TRY_WHOLLY;
}

void
gd_compress_policy_tried(gd_compress_policy *policy, uint64_t number, bool paid)
{
    if (paid) {
        raise_to(&policy->paid, number + 1);
        return;
    }
    uint64_t since = atomic_load(&policy->paid);
    uint64_t stretch = number >= since ? number + 1 - since : 0;
    uint64_t untried = stretch / BELIEF;
    if (untried > GD_COMPRESS_UNTRIED) {
        untried = GD_COMPRESS_UNTRIED;
    }
    raise_to(&policy->due, number + 1 + untried);
}

void
gd_compress_policy_start(const gd_env *env, gd_compress_policy_watch *watch)
{
    watch->began = env->monotonic_ns(env);
    watch->worked = env->thread_ns(env);
}

void
gd_compress_policy_stop(gd_compress_policy *policy, const gd_env *env,
                        const gd_compress_policy_watch *watch)
{
    atomic_fetch_add(&policy->worked, env->thread_ns(env) - watch->worked);
    atomic_fetch_add(&policy->elapsed,
                     env->monotonic_ns(env) - watch->began);
}

void
gd_compress_policy_end_bundle(gd_compress_policy *policy)
{
    uint64_t elapsed = (uint64_t)atomic_exchange(&policy->elapsed, 0);
    uint64_t worked = (uint64_t)atomic_exchange(&policy->worked, 0);
    policy->elapsed_before += elapsed - policy->elapsed_before / BUNDLES;
    policy->worked_before += worked - policy->worked_before / BUNDLES;
    policy->share =
        gd_compress_policy_share(policy->elapsed_before, policy->worked_before);
}

unsigned
gd_compress_policy_share(uint64_t elapsed, uint64_t worked)
{
    uint64_t pressure = worked == 0 ? 0 : elapsed * 4 / worked;
    if (pressure <= NO_PRESSURE) {
        return 0;
    }
    if (pressure >= FULL_PRESSURE) {
        return GD_COMPRESS_SHARES;
    }
    return (unsigned)((pressure - NO_PRESSURE) * GD_COMPRESS_SHARES /
                      (FULL_PRESSURE - NO_PRESSURE));
}
