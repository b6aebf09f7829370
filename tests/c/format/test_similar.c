/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_similar.c - an order is a permutation, whatever the blocks are, and
 * similar blocks are adjacent.
 */
#include "engine/format/similar.h"

#include <stdlib.h>
#include <string.h>

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { BLOCK = 4096, MAX_COUNT = 4096 };

static gd_similar_features features[MAX_COUNT];
static uint32_t order[MAX_COUNT];

static void
check_permutation(uint32_t count)
{
    static bool seen[MAX_COUNT];
    gd_error err;
    memset(seen, 0, sizeof seen);
    memset(order, 0xff, sizeof order);
    REQUIRE(gd_similar_order(gd_env_posix(), features, count, order, &err) ==
            GD_OK);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(order[i] < count && !seen[order[i]]);
        seen[order[i] % MAX_COUNT] = true;
    }
}

/* The order is unchanged, as there is no reason for another one. */
static void
check_unchanged(uint32_t count)
{
    check_permutation(count);
    for (uint32_t i = 0; i < count; i++) {
        CHECK_INT(order[i], i);
    }
}

TEST(test_few)
{
    memset(features, 0, sizeof features);
    for (uint32_t count = 0; count < 20; count++) {
        check_unchanged(count);
    }
}

TEST(test_all_equal)
{
    uint8_t block[BLOCK];
    fill_random(block, sizeof block, 1);
    for (uint32_t i = 0; i < MAX_COUNT; i++) {
        gd_similar_features_of(block, sizeof block, &features[i]);
    }
    check_unchanged(MAX_COUNT);
}

TEST(test_all_different)
{
    uint8_t block[BLOCK];
    for (uint32_t i = 0; i < MAX_COUNT; i++) {
        fill_random(block, sizeof block, i);
        gd_similar_features_of(block, sizeof block, &features[i]);
    }
    check_unchanged(MAX_COUNT);
}

TEST(test_without_features)
{
    uint8_t block[BLOCK] = {0};
    gd_similar_features_of(block, 0, &features[0]);
    gd_similar_features_of(block, 1, &features[1]);
    gd_similar_features_of(block, sizeof block, &features[2]);
    for (int i = 0; i < 3; i++) {
        for (int f = 0; f < GD_SIMILAR_FEATURES; f++) {
            CHECK_INT(features[i].feature[f], 0);
        }
    }
    check_unchanged(3);
}

/* These values all belong at one place of a table. */
TEST(test_crowded_tables)
{
    uint64_t seed = 5;
    for (uint32_t i = 0; i < MAX_COUNT; i++) {
        for (int f = 0; f < GD_SIMILAR_FEATURES; f++) {
            uint32_t wanted = (uint32_t)next_random(&seed) & 127;
            features[i].feature[f] = wanted * UINT32_C(244002641);
        }
    }
    check_permutation(MAX_COUNT);
    seed = 6;
    for (uint32_t i = 0; i < MAX_COUNT; i++) {
        for (int f = 0; f < GD_SIMILAR_FEATURES; f++) {
            features[i].feature[f] = (uint32_t)next_random(&seed);
        }
    }
    check_permutation(MAX_COUNT);
}

/* Makes a block whose features have the letters' values; a dot: none. */
static void
set_features(uint32_t block, const char letters[GD_SIMILAR_FEATURES])
{
    for (int f = 0; f < GD_SIMILAR_FEATURES; f++) {
        features[block].feature[f] =
            letters[f] == '.' ? 0 : (uint32_t)letters[f];
    }
}

static void
check_order(uint32_t count, const uint32_t *wanted)
{
    check_permutation(count);
    for (uint32_t i = 0; i < count; i++) {
        CHECK_INT(order[i], wanted[i]);
    }
}

TEST(test_three_features_in_common)
{
    set_features(0, "aaaaaaaaaaaa");
    set_features(1, "bbbbbbbbbbbb");
    set_features(2, "ccccccccccaa"); /* two: another cluster */
    set_features(3, "dddddddddbbb"); /* three */
    set_features(4, "eeeeeeeeeeee");
    check_order(5, (const uint32_t[]){0, 1, 3, 2, 4});
}

/* The block joins the first or the last of two clusters, whichever has
 * more. */
TEST(test_most_features_in_common)
{
    set_features(0, "aaaaaaaaaaaa");
    set_features(1, "bbbbbbbbbbbb");
    set_features(2, "aaaabbbbbbbb");
    set_features(3, "....bbbb.aaa");
    set_features(4, "eeeeeeeeeeee");
    check_order(5, (const uint32_t[]){0, 1, 2, 3, 4});
    set_features(2, "bbbbaaaaaaaa");
    set_features(3, "............");
    check_order(5, (const uint32_t[]){0, 2, 1, 3, 4});
    set_features(2, "bbbbbbbbaaaa");
    check_order(5, (const uint32_t[]){0, 1, 2, 3, 4});
}

/* Blocks without features resemble none, not even each other. */
TEST(test_no_features_in_common)
{
    set_features(0, "............");
    set_features(1, "aaaaaaaaaaaa");
    set_features(2, "............");
    set_features(3, "aaa.........");
    check_order(4, (const uint32_t[]){0, 1, 3, 2});
}

/* The families' members differ in some bytes and in their beginnings, and come
 * by turns. */
TEST(test_families)
{
    enum { FAMILIES = 100, MEMBERS = 10 };
    static uint8_t data[BLOCK + 64];
    uint64_t seed = 9;
    for (uint32_t i = 0; i < FAMILIES * MEMBERS; i++) {
        fill_random(data, sizeof data, i % FAMILIES);
        for (int change = 0; change < 8; change++) {
            uint64_t at = next_random(&seed);
            data[at % sizeof data] ^= 1 + (uint8_t)(at >> 32) % 255;
        }
        gd_similar_features_of(data + next_random(&seed) % 64, BLOCK, &features[i]);
    }
    check_permutation(FAMILIES * MEMBERS);
    uint32_t together = 0;
    for (uint32_t i = 1; i < FAMILIES * MEMBERS; i++) {
        together += order[i] % FAMILIES == order[i - 1] % FAMILIES;
    }
    /* At most FAMILIES * (MEMBERS - 1) pairs. */
    CHECK(together > FAMILIES * (MEMBERS - 1) * 9 / 10);
    CHECK_INT(order[0], 0);
}
