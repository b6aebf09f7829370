/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_lru.c - objects that threads share: found by key, within the budget, and
 * there as long as anyone has them.
 */
#include "engine/base/lru.h"

#include <pthread.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"
#include "tests/c/support/scratch_repository.h"

typedef struct object {
    gd_lru_item item;
    uint64_t value;
} object;

static fault_env f;
static gd_lru lru;
static atomic_uint destroyed;

/* Takes the table's lock: it must not be held. */
static void
destroy(const gd_env *env, void *of)
{
    gd_lru_stats stats;
    gd_lru_get_stats(&lru, &stats);
    destroyed++;
    env->release(env, of);
}

static void
setup(uint64_t budget)
{
    fault_env_init(&f);
    gd_lru_init(&lru, &f.env, destroy, budget);
    destroyed = 0;
}

static void
teardown(void)
{
    gd_lru_set_budget(&lru, 0);
    gd_lru_free(&lru);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

static gd_lru_key
key(uint64_t number)
{
    return (gd_lru_key){{number, 0, 0, 0, number * 3}};
}

static object *
make(uint64_t value)
{
    object *made = gd_calloc(&f.env, 1, sizeof *made, NULL);
    if (made != NULL) {
        gd_lru_begin(&made->item);
        made->value = value;
    }
    return made;
}

static void
keep(uint64_t number, uint64_t weight, uint64_t value)
{
    object *made = make(value);
    gd_lru_key of = key(number);
    gd_lru_keep(&lru, &of, weight, made);
    gd_lru_return(&lru, made);
}

static object *
get(uint64_t number)
{
    gd_lru_key of = key(number);
    return gd_lru_get(&lru, &of);
}

static bool
has(uint64_t number)
{
    gd_lru_key of = key(number);
    return gd_lru_has(&lru, &of);
}

/* Uses the object. */
static bool
is(uint64_t number, uint64_t value)
{
    object *found = get(number);
    bool right = found != NULL && found->value == value;
    if (found != NULL) {
        gd_lru_return(&lru, found);
    }
    return right;
}

static gd_lru_stats
stats(void)
{
    gd_lru_stats of;
    gd_lru_get_stats(&lru, &of);
    return of;
}

TEST_WITH(test_found_by_all_words, setup(100), teardown())
{
    keep(1, 1, 7);
    CHECK(is(1, 7));
    for (int i = 0; i < GD_LRU_WORDS; i++) {
        gd_lru_key other = key(1);
        other.words[i]++;
        CHECK(gd_lru_get(&lru, &other) == NULL);
        CHECK(!gd_lru_has(&lru, &other));
    }
    CHECK_INT(stats().hits, 1);
    CHECK_INT(stats().misses, GD_LRU_WORDS);
    CHECK_INT(gd_lru_count(&lru), 1);
}

/* Many more than the first buckets. */
TEST_WITH(test_many, setup(UINT64_MAX), teardown())
{
    enum { MANY = 20000 };
    for (uint64_t i = 0; i < MANY; i++) {
        keep(i, 1, i + 1);
    }
    for (uint64_t i = 0; i < MANY; i++) {
        CHECK(is(i, i + 1));
    }
    CHECK_INT(stats().weight, MANY);
    gd_lru_set_budget(&lru, 10);
    CHECK_INT(gd_lru_count(&lru), 10);
    CHECK(has(MANY - 1) && has(MANY - 10) && !has(MANY - 11));
}

/* The one unused for longest goes first.  A look is no use. */
TEST_WITH(test_budget, setup(10), teardown())
{
    keep(1, 4, 1);
    keep(2, 3, 2);
    keep(3, 3, 3);
    CHECK_INT(stats().weight, 10);
    CHECK(is(1, 1));
    keep(4, 1, 4);
    CHECK(!has(2) && has(1) && has(3) && has(4));
    CHECK_INT(destroyed, 1);
    CHECK(has(3));
    keep(5, 4, 5); /* leaves room for 6 */
    CHECK(!has(3) && has(1) && has(4) && has(5));
    keep(6, 11, 6); /* no room for it at all: nothing goes */
    CHECK(!has(6) && has(1) && has(4) && has(5));
    keep(7, 10, 7);
    CHECK(has(7));
    CHECK_INT(gd_lru_count(&lru), 1);
    gd_lru_set_budget(&lru, 9);
    CHECK_INT(gd_lru_count(&lru), 0);
    CHECK_INT(gd_lru_budget(&lru), 9);
    CHECK_INT(destroyed, 7);
}

TEST_WITH(test_without_a_budget, setup(0), teardown())
{
    keep(1, 1, 1);
    CHECK(!has(1));
    CHECK_INT(destroyed, 1);
}

/* A lent object stays, whatever happens to the table. */
TEST_WITH(test_lent, setup(10), teardown())
{
    keep(1, 10, 1);
    object *first = get(1), *again = get(1);
    REQUIRE(first != NULL && first == again);
    keep(2, 10, 2);
    CHECK(!has(1));
    CHECK_INT(destroyed, 0);
    keep(1, 10, 3); /* another one with its key */
    CHECK_INT(first->value, 1);
    gd_lru_return(&lru, first);
    CHECK_INT(destroyed, 1); /* 2 */
    gd_lru_return(&lru, again);
    CHECK_INT(destroyed, 2);
    CHECK(is(1, 3));
}

TEST_WITH(test_kept_twice, setup(10), teardown())
{
    object *one = make(1), *two = make(2);
    gd_lru_key of = key(5);
    gd_lru_keep(&lru, &of, 1, one);
    gd_lru_keep(&lru, &of, 1, two);
    CHECK_INT(gd_lru_count(&lru), 1);
    gd_lru_return(&lru, two);
    CHECK_INT(destroyed, 1);
    gd_lru_return(&lru, one);
    CHECK(is(5, 1));
}

static bool
is_odd(void *arg, const void *of)
{
    ++*(unsigned *)arg;
    return ((const object *)of)->value % 2 == 1;
}

TEST_WITH(test_dropped, setup(100), teardown())
{
    unsigned asked = 0;
    for (uint64_t i = 1; i <= 6; i++) {
        keep(i, i, i);
    }
    object *held = get(1);
    gd_lru_drop(&lru, held);
    gd_lru_drop(&lru, held); /* twice is once */
    CHECK(!has(1) && held->value == 1);
    CHECK_INT(stats().weight, 20);
    gd_lru_key of = key(2);
    gd_lru_drop_key(&lru, &of);
    gd_lru_drop_key(&lru, &of);
    CHECK(!has(2));
    CHECK_INT(destroyed, 1);
    gd_lru_drop_if(&lru, is_odd, &asked);
    CHECK_INT(asked, 4);
    CHECK(!has(3) && has(4) && !has(5) && has(6));
    CHECK_INT(destroyed, 3);
    CHECK_INT(stats().weight, 10);
    gd_lru_return(&lru, held);
    CHECK_INT(destroyed, 4);
}

/* All come, each once, however many are taken at a time. */
TEST_WITH(test_walk, setup(1000), teardown())
{
    enum { MANY = 500 };
    void *found[MANY];
    size_t place = 0;
    CHECK_INT(gd_lru_walk(&lru, &place, found, MANY), 0);
    CHECK_INT(place, 0);
    for (uint64_t i = 0; i < MANY; i++) {
        keep(i, 1, i);
    }
    for (size_t most = 20; most <= 2 * MANY; most *= 3) {
        bool seen[MANY] = {false};
        size_t total = 0;
        do {
            size_t count = gd_lru_walk(&lru, &place, found,
                                       most < MANY ? most : MANY);
            for (size_t i = 0; i < count; i++) {
                object *of = found[i];
                CHECK(!seen[of->value]);
                seen[of->value] = true;
                CHECK_INT(of->item.users, 1);
                gd_lru_return(&lru, of);
            }
            total += count;
        } while (place != 0);
        CHECK_INT(total, MANY);
    }
    /* An object that was lent by a walk stays, though it is evicted. */
    size_t count = gd_lru_walk(&lru, &place, found, MANY);
    gd_lru_set_budget(&lru, 0);
    CHECK_INT(destroyed, MANY - count);
    for (size_t i = 0; i < count; i++) {
        gd_lru_return(&lru, found[i]);
    }
    CHECK_INT(destroyed, MANY);
}

TEST_WITH(test_out_of_memory, setup(1000), teardown())
{
    fault_env_fail(&f, FAULT_ALLOC, 2, ENOMEM, true); /* no buckets */
    keep(1, 1, 1);
    fault_env_heal(&f);
    CHECK(!has(1));
    for (uint64_t i = 0; i < 64; i++) {
        keep(i, 1, i);
    }
    fault_env_fail(&f, FAULT_ALLOC, 2, ENOMEM, false); /* no more buckets */
    keep(64, 1, 64);
    for (uint64_t i = 0; i <= 64; i++) {
        CHECK(is(i, i));
    }
}

/* ---- threads ---- */

static atomic_uint wrong;

static void *
use(void *arg)
{
    uint64_t seed = (uint64_t)(uintptr_t)arg;
    for (int i = 0; i < 8000 / SWEEP_STRIDE; i++) {
        uint64_t dice = next_random(&seed);
        uint64_t number = dice % 50;
        gd_lru_key of = key(number);
        object *found = gd_lru_get(&lru, &of);
        if (found == NULL) {
            found = make(number);
            gd_lru_keep(&lru, &of, 1 + number % 7, found);
        }
        wrong += found->value != number;
        switch ((dice >> 16) % 64) {
        case 0:
            gd_lru_drop(&lru, found);
            break;
        case 1:
            gd_lru_drop_key(&lru, &of);
            break;
        case 2:
            gd_lru_set_budget(&lru, (dice >> 32) % 150);
            break;
        case 3: {
            void *walked[8];
            size_t place = (dice >> 32) % 64;
            size_t count = gd_lru_walk(&lru, &place, walked, 8);
            while (count > 0) {
                gd_lru_return(&lru, walked[--count]);
            }
            break;
        }
        default:
            break;
        }
        wrong += found->value != number;
        gd_lru_return(&lru, found);
    }
    return NULL;
}

TEST(test_threads)
{
    pthread_t threads[4];
    setup(100);
    for (uintptr_t i = 0; i < 4; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, use, (void *)(i + 1)), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(wrong, 0);
    gd_lru_set_budget(&lru, 20);
    CHECK(stats().weight <= 20);
    teardown();
}
