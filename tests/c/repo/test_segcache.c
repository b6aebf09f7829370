/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_segcache.c - the segments that all readers share: found by file and
 * place, within the budget, and valid as long as a reader has them.
 */
#include "engine/repo/segcache.h"

#include <pthread.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"
#include "tests/c/support/scratch_repository.h"

enum { LENGTH = 1000 };

static fault_env f;
static gd_segcache *cache;
static gd_group groups[3] = {
    {.number = 1, .inode = 10}, {.number = 2, .inode = 11},
    {.number = 1, .inode = 12} /* the first one, rewritten */};

static void
setup(uint64_t budget)
{
    fault_env_init(&f);
    gd_error err;
    if (gd_segcache_open(&f.env, &cache, &err) != GD_OK) {
        exit(2);
    }
    gd_segcache_set_budget(cache, budget);
}

static void
teardown(void)
{
    gd_segcache_close(cache);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

static gd_cached_segment *
make(uint8_t fill, uint32_t length)
{
    gd_segment_header header = {.codec = GD_CODEC_LZ4,
                                .blocks = 3,
                                .first_slot = fill,
                                .plain_length = length,
                                .stored_length = 7};
    gd_cached_segment *segment = gd_segcache_new(cache, &header);
    if (segment != NULL) {
        memset(segment->plain, fill, length);
    }
    return segment;
}

static void
keep(const gd_group *group, uint32_t offset, uint8_t fill)
{
    gd_cached_segment *segment = make(fill, LENGTH);
    gd_segcache_keep(cache, group, offset, segment);
    gd_segcache_return(cache, segment);
}

static bool
is(gd_cached_segment *segment, uint8_t fill)
{
    bool right = segment->header.first_slot == fill &&
                 segment->header.plain_length == LENGTH;
    for (size_t i = 0; i < LENGTH; i++) {
        right &= segment->plain[i] == fill;
    }
    return right;
}

/* Returns true if the cached segment has this fill. */
static bool
has(const gd_group *group, uint32_t offset, uint8_t fill)
{
    gd_cached_segment *segment = gd_segcache_get(cache, group, offset);
    if (segment == NULL) {
        return false;
    }
    bool right = is(segment, fill);
    gd_segcache_return(cache, segment);
    return right;
}

static gd_segcache_stats
stats(void)
{
    gd_segcache_stats s;
    gd_segcache_get_stats(cache, &s);
    return s;
}

/* The key is number, file and place: a rewritten group has the old one's
 * number, and other segments in the same places. */
TEST_WITH(test_found_by_file_and_place, setup(1 << 20), teardown())
{
    CHECK(!has(&groups[0], 8192, 1));
    keep(&groups[0], 8192, 1);
    keep(&groups[0], 9192, 2);
    keep(&groups[1], 8192, 3);
    CHECK(has(&groups[0], 8192, 1));
    CHECK(has(&groups[0], 9192, 2));
    CHECK(has(&groups[1], 8192, 3));
    CHECK(gd_segcache_get(cache, &groups[2], 8192) == NULL);
    CHECK(gd_segcache_get(cache, &groups[1], 9192) == NULL);
    const gd_group namesake = {.number = 1, .inode = 10, .bounds.seed = 1};
    CHECK(gd_segcache_get(cache, &namesake, 8192) == NULL);
    keep(&groups[2], 8192, 4);
    CHECK(has(&groups[0], 8192, 1));
    CHECK(has(&groups[2], 8192, 4));
    CHECK_INT(stats().hits, 5);
    CHECK_INT(stats().misses, 4);
    CHECK(gd_segcache_has(cache, &groups[0], 8192));
    CHECK(!gd_segcache_has(cache, &groups[0], 1));
    CHECK_INT(stats().hits + stats().misses, 9);
}

/* There are many more than the first buckets, and each is found. */
TEST_WITH(test_many, setup(UINT64_C(1) << 30), teardown())
{
    enum { MANY = 20000 };
    for (uint32_t i = 0; i < MANY; i++) {
        keep(&groups[i % 3], 8192 + i * 96, (uint8_t)i);
    }
    for (uint32_t i = 0; i < MANY; i++) {
        CHECK(has(&groups[i % 3], 8192 + i * 96, (uint8_t)i));
        CHECK(!gd_segcache_has(cache, &groups[(i + 1) % 3], 8192 + i * 96));
    }
    gd_segcache_set_budget(cache, 0);
    CHECK_INT(stats().bytes, 0);
}

/* The segment that was unused longest is removed first. */
TEST_WITH(test_budget, setup(1 << 20), teardown())
{
    keep(&groups[0], 1, 1);
    uint64_t one = stats().bytes;
    CHECK(one >= LENGTH && one < LENGTH + 200);
    gd_segcache_set_budget(cache, 4 * one);
    for (uint8_t i = 2; i <= 4; i++) {
        keep(&groups[0], i, i);
    }
    CHECK_INT(stats().bytes, 4 * one);
    CHECK(has(&groups[0], 1, 1)); /* now 2 is the oldest */
    keep(&groups[0], 5, 5);
    CHECK(!has(&groups[0], 2, 2));
    CHECK(has(&groups[0], 1, 1) && has(&groups[0], 3, 3) &&
          has(&groups[0], 4, 4) && has(&groups[0], 5, 5));
    CHECK_INT(stats().bytes, 4 * one);
    /* gd_segcache_has does not count as a use. */
    CHECK(gd_segcache_has(cache, &groups[0], 1));
    keep(&groups[0], 6, 6);
    CHECK(!gd_segcache_has(cache, &groups[0], 1));
    gd_segcache_set_budget(cache, 2 * one + 1);
    CHECK_INT(stats().bytes, 2 * one);
    CHECK(has(&groups[0], 6, 6) && has(&groups[0], 5, 5));
    gd_cached_segment *large = make(9, 10 * LENGTH);
    gd_segcache_keep(cache, &groups[0], 9, large); /* no room for it at all */
    gd_segcache_return(cache, large);
    CHECK(!gd_segcache_has(cache, &groups[0], 9));
    CHECK(has(&groups[0], 6, 6) && has(&groups[0], 5, 5));
}

TEST_WITH(test_without_a_budget, setup(0), teardown())
{
    CHECK(!gd_segcache_enabled(cache));
    keep(&groups[0], 1, 1);
    CHECK(!has(&groups[0], 1, 1));
    CHECK_INT(stats().bytes, 0);
    gd_segcache_set_budget(cache, 1 << 20);
    CHECK(gd_segcache_enabled(cache));
    keep(&groups[0], 1, 1);
    CHECK(has(&groups[0], 1, 1));
}

/* Then segments with contiguous blocks are not cached, and as long as there is
 * none of the others, no look-up is made. */
TEST_WITH(test_lists_only, setup(1 << 20), teardown())
{
    const gd_segment_header plain = {.codec = GD_CODEC_LZ4, .blocks = 3,
                                     .plain_length = LENGTH,
                                     .stored_length = 7};
    gd_segment_header listed = plain;
    listed.slots = (const uint8_t *)"a list";
    CHECK(gd_segcache_enabled(cache));
    CHECK(gd_segcache_takes(cache, &plain));
    CHECK(gd_segcache_takes(cache, &listed));
    gd_segcache_set_lists_only(cache, true);
    CHECK(!gd_segcache_enabled(cache));
    CHECK(!gd_segcache_takes(cache, &plain));
    CHECK(gd_segcache_takes(cache, &listed));
    keep(&groups[0], 1, 1);
    CHECK(gd_segcache_enabled(cache));
    CHECK(has(&groups[0], 1, 1));
    gd_cached_segment *segment = gd_segcache_get(cache, &groups[0], 1);
    gd_segcache_drop(cache, segment);
    gd_segcache_return(cache, segment);
    CHECK(!gd_segcache_enabled(cache));
    gd_segcache_set_budget(cache, 0);
    CHECK(!gd_segcache_takes(cache, &listed));
    gd_segcache_set_budget(cache, 1 << 20);
    gd_segcache_set_lists_only(cache, false);
    CHECK(gd_segcache_enabled(cache));
    CHECK(gd_segcache_takes(cache, &plain));
}

/* A lent segment stays valid, whatever happens to the cache. */
TEST_WITH(test_lent, setup(1 << 20), teardown())
{
    keep(&groups[0], 1, 1);
    gd_cached_segment *first = gd_segcache_get(cache, &groups[0], 1);
    gd_cached_segment *again = gd_segcache_get(cache, &groups[0], 1);
    REQUIRE(first != NULL && first == again);
    gd_segcache_set_budget(cache, 0);
    CHECK(!gd_segcache_has(cache, &groups[0], 1));
    CHECK(is(first, 1));
    gd_segcache_return(cache, first);
    CHECK(is(again, 1));
    gd_segcache_set_budget(cache, 1 << 20);
    keep(&groups[0], 1, 2);
    CHECK(has(&groups[0], 1, 2));
    gd_segcache_return(cache, again);
    CHECK(has(&groups[0], 1, 2));
    /* A dropped segment is not found; dropping it twice is like once. */
    first = gd_segcache_get(cache, &groups[0], 1);
    gd_segcache_drop(cache, first);
    gd_segcache_drop(cache, first);
    CHECK(!gd_segcache_has(cache, &groups[0], 1));
    CHECK_INT(stats().bytes, 0);
    CHECK(is(first, 2));
    gd_segcache_return(cache, first);
}

/* Two threads decoded the same segment: the first one's is kept. */
TEST_WITH(test_kept_twice, setup(1 << 20), teardown())
{
    gd_cached_segment *one = make(1, LENGTH), *two = make(2, LENGTH);
    gd_segcache_keep(cache, &groups[0], 1, one);
    gd_segcache_keep(cache, &groups[0], 1, two);
    CHECK(is(one, 1) && is(two, 2));
    gd_segcache_return(cache, two);
    gd_segcache_return(cache, one);
    CHECK(has(&groups[0], 1, 1));
    gd_segcache_set_budget(cache, 0);
}

TEST_WITH(test_out_of_memory, setup(1 << 20), teardown())
{
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, true);
    CHECK(make(1, LENGTH) == NULL);
    fault_env_heal(&f);
    gd_cached_segment *segment = make(1, LENGTH);
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, true); /* no buckets */
    gd_segcache_keep(cache, &groups[0], 1, segment);
    fault_env_heal(&f);
    CHECK(!has(&groups[0], 1, 1));
    gd_segcache_keep(cache, &groups[0], 1, segment);
    CHECK(has(&groups[0], 1, 1));
    gd_segcache_return(cache, segment);
}

/* ---- threads ---- */

static atomic_uint wrong;

static void *
use(void *arg)
{
    uint64_t seed = (uint64_t)(uintptr_t)arg;
    for (int i = 0; i < 4000 / SWEEP_STRIDE; i++) {
        uint64_t dice = next_random(&seed);
        uint32_t offset = (uint32_t)(dice % 50);
        const gd_group *group = &groups[(dice >> 8) % 3];
        uint8_t fill = (uint8_t)(group->inode * 50 + offset);
        gd_cached_segment *segment = gd_segcache_get(cache, group, offset);
        if (segment == NULL) {
            segment = make(fill, LENGTH);
            gd_segcache_keep(cache, group, offset, segment);
        }
        wrong += !is(segment, fill);
        if ((dice >> 16) % 64 == 0) {
            gd_segcache_drop(cache, segment);
        }
        if ((dice >> 24) % 128 == 0) {
            gd_segcache_set_budget(cache, (dice >> 32) % (60 * LENGTH));
        }
        wrong += !is(segment, fill);
        gd_segcache_return(cache, segment);
    }
    return NULL;
}

TEST(test_threads)
{
    pthread_t threads[4];
    setup(60 * LENGTH);
    for (uintptr_t i = 0; i < 4; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, use, (void *)(i + 1)), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(wrong, 0);
    gd_segcache_set_budget(cache, 10 * LENGTH);
    CHECK(stats().bytes <= 10 * LENGTH);
    teardown();
}
