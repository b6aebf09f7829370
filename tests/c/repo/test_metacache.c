/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_metacache.c - verified extents and pages of recipes: found by what
 * identifies them, exact, and within the budget.
 */
#include "engine/repo/metacache.h"

#include <pthread.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"
#include "tests/c/support/scratch_repository.h"

enum { BLOCKS = 100 };

static fault_env f;
static gd_metacache *cache;
static gd_entry entries[BLOCKS];
static const gd_group group = {.number = 7, .inode = 10, .bounds.seed = 99};
static gd_extent extent;

static void
setup(uint64_t budget)
{
    gd_error err;
    uint64_t seed = 1;
    fault_env_init(&f);
    if (gd_metacache_open(&f.env, budget, &cache, &err) != GD_OK) {
        exit(2);
    }
    extent = (gd_extent){.group = 7, .slot = 50, .blocks = BLOCKS,
                         .kind = GD_EXTENT_BLOCKS_KIND, .digest = 12345};
    for (int i = 0; i < BLOCKS; i++) {
        entries[i] = (gd_entry){
            .checksum = next_random(&seed),
            .segment = (uint32_t)next_random(&seed),
            .plain_offset = (uint32_t)(next_random(&seed) % GD_SEGMENT_MAX),
            .plain_length = 1 + (uint32_t)(next_random(&seed) % 65536),
            .stored_length =
                1 + (uint32_t)(next_random(&seed) % GD_SEGMENT_MAX),
            .codec = (uint8_t)(i % 3),
            .state = GD_ENTRY_LIVE};
        fill_random(entries[i].fingerprint.bytes, GD_FINGERPRINT_SIZE, i);
        extent.length += entries[i].plain_length;
    }
    /* The greatest values that an entry may have. */
    extent.length += 65536 - entries[3].plain_length;
    entries[3].plain_length = 65536;
    entries[3].stored_length = GD_SEGMENT_MAX;
    entries[3].segment = UINT32_MAX;
    entries[3].codec = GD_CODEC_ZSTD;
}

static void
teardown(void)
{
    gd_metacache_close(cache);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

static gd_lru_stats
stats(void)
{
    gd_lru_stats of;
    gd_metacache_get_stats(cache, &of);
    return of;
}

static bool
has(const gd_group *of, const gd_extent *wanted)
{
    gd_cached_extent *found = gd_metacache_get(cache, of, wanted);
    if (found != NULL) {
        gd_metacache_return(cache, found);
    }
    return found != NULL;
}

/* ---- extents ---- */

TEST_WITH(test_entries, setup(1 << 20), teardown())
{
    CHECK(!gd_metacache_has(cache, &group, &extent));
    gd_metacache_keep(cache, &group, &extent, entries);
    CHECK(gd_metacache_has(cache, &group, &extent));
    gd_cached_extent *found = gd_metacache_get(cache, &group, &extent);
    REQUIRE(found != NULL);
    CHECK_INT(sizeof found->blocks[0], 24);
    uint64_t start = 0;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        const gd_entry *entry = &entries[i];
        gd_entry kept = gd_cached_extent_entry(found, i);
        CHECK(kept.checksum == entry->checksum);
        CHECK_INT(kept.segment, entry->segment);
        CHECK_INT(kept.plain_offset, entry->plain_offset);
        CHECK_INT(kept.plain_length, entry->plain_length);
        CHECK_INT(kept.stored_length, entry->stored_length);
        CHECK_INT(kept.codec, entry->codec);
        CHECK_INT(kept.state, GD_ENTRY_LIVE);
        CHECK_INT(gd_cached_extent_find(found, start), i);
        start += entry->plain_length;
        CHECK_INT(gd_cached_extent_find(found, start - 1), i);
    }
    CHECK_INT(start, extent.length);
    gd_metacache_return(cache, found);
}

/* Each part of what identifies an extent. */
TEST_WITH(test_identity, setup(1 << 20), teardown())
{
    gd_metacache_keep(cache, &group, &extent, entries);
    CHECK(has(&group, &extent));
    gd_group groups[3] = {group, group, group};
    groups[0].inode++;
    groups[1].bounds.seed++;
    CHECK(!has(&groups[0], &extent) && !has(&groups[1], &extent));
    gd_extent extents[5] = {extent, extent, extent, extent, extent};
    extents[0].group++;
    extents[1].slot++;
    extents[2].blocks--;
    extents[3].digest++;
    extents[4].length++; /* another recipe claims it */
    for (int i = 0; i < 5; i++) {
        CHECK(!has(&group, &extents[i]));
    }
    gd_extent elsewhere = extent; /* in another image */
    elsewhere.offset = 1 << 30;
    CHECK(has(&group, &elsewhere));
    gd_metacache_drop(cache, &groups[0], &extent);
    CHECK(has(&group, &extent));
    gd_metacache_drop(cache, &group, &elsewhere);
    CHECK(!has(&group, &extent));
    CHECK_INT(stats().weight, 0);
}

/* A damaged block is repaired by its fingerprint, which is not kept. */
TEST_WITH(test_only_live_ones, setup(1 << 20), teardown())
{
    static const gd_entry_state states[] = {
        GD_ENTRY_EMPTY, GD_ENTRY_VOID, GD_ENTRY_FREED, GD_ENTRY_DAMAGED,
        GD_ENTRY_INVALID};
    for (int i = 0; i < 5; i++) {
        entries[BLOCKS - 1].state = (uint8_t)states[i];
        gd_metacache_keep(cache, &group, &extent, entries);
        CHECK(!has(&group, &extent));
    }
}

TEST_WITH(test_budget, setup(0), teardown())
{
    uint64_t allocated = fault_env_count(&f, FAULT_ALLOC);
    gd_metacache_keep(cache, &group, &extent, entries);
    CHECK(!has(&group, &extent));
    CHECK_INT(fault_env_count(&f, FAULT_ALLOC), allocated);
    gd_metacache_set_budget(cache, 1 << 20);
    gd_metacache_keep(cache, &group, &extent, entries);
    uint64_t one = stats().weight;
    CHECK(one >= 24 * BLOCKS && one < 24 * BLOCKS + 200);
    gd_metacache_set_budget(cache, 3 * one);
    gd_cached_extent *lent = gd_metacache_get(cache, &group, &extent);
    for (uint32_t i = 1; i <= 3; i++) {
        gd_extent other = extent;
        other.slot += i;
        gd_metacache_keep(cache, &group, &other, entries);
        CHECK(stats().weight <= 3 * one);
    }
    CHECK(!has(&group, &extent)); /* evicted while it is lent */
    CHECK(gd_cached_extent_entry(lent, 5).checksum == entries[5].checksum);
    gd_metacache_return(cache, lent);
    gd_metacache_set_budget(cache, 0);
    CHECK_INT(stats().weight, 0);
}

/* ---- pages ---- */

static gd_recipe_page page;
static gd_recipe recipe;

static void
make_page(uint64_t number, uint32_t count)
{
    memset(&page, 0xee, sizeof page);
    page.number = number;
    page.count = count;
    fill_random((uint8_t *)page.extents, count * sizeof page.extents[0],
                number);
    memset(&recipe, 0, sizeof recipe);
    recipe.inode = 5;
    recipe.cache = gd_metacache_pages(cache);
    fill_random(recipe.header.transaction_id, GD_ID_SIZE, 1);
}

static bool
gets(const gd_recipe *of, uint64_t number)
{
    gd_recipe_page found;
    memset(&found, 0xee, sizeof found);
    return recipe.cache->get(recipe.cache, of, number, &found) &&
           memcmp(&found, &page, sizeof found) == 0;
}

TEST_WITH(test_pages, setup(1 << 20), teardown())
{
    static const uint32_t counts[] = {GD_EXTENTS_PER_PAGE, 1};
    for (uint64_t i = 0; i < 2; i++) {
        make_page(i + 1, counts[i]);
        CHECK(!gets(&recipe, i + 1));
        recipe.cache->keep(recipe.cache, &recipe, &page);
        CHECK(gets(&recipe, i + 1));
        gd_recipe others[3] = {recipe, recipe, recipe};
        others[0].inode++;
        others[1].header.transaction_id[0] ^= 1;
        others[2].header.transaction_id[GD_ID_SIZE - 1] ^= 1;
        for (int j = 0; j < 3; j++) {
            CHECK(!gets(&others[j], i + 1));
            recipe.cache->drop(recipe.cache, &others[j], i + 1);
        }
        CHECK(gets(&recipe, i + 1));
    }
    CHECK(stats().weight < sizeof page + 500);
    recipe.cache->drop(recipe.cache, &recipe, 2);
    CHECK(!gets(&recipe, 2));
    gd_metacache_set_budget(cache, 0);
    recipe.cache->keep(recipe.cache, &recipe, &page);
    CHECK(!gets(&recipe, 2));
}

TEST_WITH(test_out_of_memory, setup(1 << 20), teardown())
{
    gd_error err;
    gd_metacache *none;
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK_INT(gd_metacache_open(&f.env, 1, &none, &err), GD_NOMEM);
    make_page(1, 10);
    /* The object, or the first buckets. */
    for (uint64_t n = 1; n <= 2; n++) {
        fault_env_fail(&f, FAULT_ALLOC, n, ENOMEM, false);
        gd_metacache_keep(cache, &group, &extent, entries);
        CHECK(!has(&group, &extent));
        fault_env_fail(&f, FAULT_ALLOC, n, ENOMEM, false);
        recipe.cache->keep(recipe.cache, &recipe, &page);
        CHECK(!gets(&recipe, 1));
    }
    fault_env_heal(&f);
    gd_metacache_keep(cache, &group, &extent, entries);
    recipe.cache->keep(recipe.cache, &recipe, &page);
    CHECK(has(&group, &extent) && gets(&recipe, 1));
}

/* ---- threads ---- */

static atomic_uint wrong;

static void *
use(void *arg)
{
    uint64_t seed = (uint64_t)(uintptr_t)arg;
    for (int i = 0; i < 4000 / SWEEP_STRIDE; i++) {
        uint64_t dice = next_random(&seed);
        gd_extent one = extent;
        one.blocks = 1 + dice % 20;
        one.length = 0;
        for (uint32_t b = 0; b < one.blocks; b++) {
            one.length += entries[b].plain_length;
        }
        gd_cached_extent *found = gd_metacache_get(cache, &group, &one);
        if (found == NULL) {
            gd_metacache_keep(cache, &group, &one, entries);
            continue;
        }
        uint32_t last = one.blocks - 1;
        wrong += found->count != one.blocks ||
                 gd_cached_extent_find(found, one.length - 1) != last ||
                 gd_cached_extent_entry(found, last).checksum !=
                     entries[last].checksum;
        if ((dice >> 16) % 64 == 0) {
            gd_metacache_drop(cache, &group, &one);
        }
        if ((dice >> 24) % 128 == 0) {
            gd_metacache_set_budget(cache, (dice >> 32) % 5000);
        }
        gd_metacache_return(cache, found);
    }
    return NULL;
}

TEST_WITH(test_threads, setup(4000), teardown())
{
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, use, (void *)(i + 1)), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(wrong, 0);
}
