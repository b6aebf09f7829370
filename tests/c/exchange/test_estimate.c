/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_estimate.c - counts with a table that is large enough and with one that
 * is not; and a lack of memory.
 */
#include "engine/exchange/estimate.h"

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { BLOCK = 512, SIZE = 3 << 20 };

static fault_env f;
static gd_error err;
static gd_estimate *estimate;
static uint8_t data[SIZE];

static void
fill(uint64_t seed, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        seed = seed * 6364136223846793005 + 1442695040888963407;
        data[i] = (uint8_t)(seed >> 56);
    }
}

static gd_status
open_estimate(size_t table)
{
    gd_chunker chunker;
    CHECK(gd_chunker_fixed(&chunker, BLOCK, &err) == GD_OK);
    return gd_estimate_open(&f.env, &chunker,
                            &(gd_estimate_params){
                                .segment_size = GD_SEGMENT_DEFAULT,
                                .codec = GD_CODEC_LZ4,
                                .again_codec = GD_CODEC_ZSTD,
                                .table_bytes = table},
                            &estimate, &err);
}

static void
setup(size_t table)
{
    fault_env_init(&f);
    REQUIRE(open_estimate(table) == GD_OK);
}

static void
finish(void)
{
    gd_estimate_close(estimate);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

static gd_status
take(const uint8_t *bytes, size_t length)
{
    uint64_t zeros, extents;
    size_t used;
    gd_status s = gd_estimate_take(estimate, bytes, length, true, &used, &err);
    if (s == GD_OK) {
        CHECK_INT(used, length);
        s = gd_estimate_end(estimate, &zeros, &extents, &err);
    }
    return s;
}

TEST(test_twins_and_zeros)
{
    gd_estimated sums[2] = {{0}};
    gd_estimate_totals totals;
    uint64_t zeros, extents;
    size_t used;
    setup(0);
    fill(1, 64 * BLOCK + 7);
    memset(data + 8 * BLOCK, 0, 8 * BLOCK);
    CHECK_INT(gd_estimate_take(estimate, data, 64 * BLOCK + 7, false, &used,
                               &err), GD_OK);
    CHECK_INT(used, 64 * BLOCK); /* the last block may be longer */
    CHECK_INT(gd_estimate_take(estimate, data + used, 7, true, &used, &err),
              GD_OK);
    gd_estimate_take_zeros(estimate, 1 << 30);
    CHECK_INT(gd_estimate_end(estimate, &zeros, &extents, &err), GD_OK);
    CHECK_INT(zeros, (1 << 30) + 8 * BLOCK);
    CHECK_INT(extents, 4);
    CHECK_INT(take(data + 4 * BLOCK, 60 * BLOCK), GD_OK);
    CHECK_INT(gd_estimate_sum(estimate, sums, &totals, &err), GD_OK);
    CHECK_INT(totals.level, 0);
    CHECK_INT(sums[0].new_bytes, 56 * BLOCK + 7);
    CHECK_INT(sums[0].new_blocks, 57);
    CHECK(sums[0].stored_bytes >= 56 * BLOCK + GD_SEGMENT_HEADER);
    CHECK_INT(sums[1].new_bytes, 0);
    finish();
}

/* Equal blocks are counted or left out alike. */
TEST(test_full_table)
{
    gd_estimated sums[3] = {{0}};
    gd_estimate_totals totals;
    setup(1);
    fill(1, SIZE);
    CHECK_INT(take(data, SIZE), GD_OK);
    CHECK_INT(take(data, SIZE), GD_OK);
    fill(2, SIZE);
    CHECK_INT(take(data, SIZE), GD_OK);
    CHECK_INT(gd_estimate_sum(estimate, sums, &totals, &err), GD_OK);
    CHECK(totals.level >= 2);
    CHECK(sums[0].new_bytes << totals.level > SIZE / 10 * 9);
    CHECK(sums[0].new_bytes << totals.level < SIZE / 10 * 11);
    CHECK_INT(sums[1].new_bytes, 0);
    CHECK(sums[2].new_bytes << totals.level > SIZE / 10 * 9);
    CHECK(totals.again_plain > 0);
    finish();
}

/* Two images, each of which has half of the blocks that resemble each other:
 * in the order of similarity these are adjacent. */
TEST(test_similar_blocks)
{
    gd_estimate_totals totals;
    gd_estimated sums[2] = {{0}};
    setup(0);
    for (int image = 0; image < 2; image++) {
        fill(1, SIZE);
        for (size_t at = 0; at < SIZE; at += BLOCK) {
            data[at + 7] ^= (uint8_t)(1 + image);
        }
        CHECK_INT(take(data, SIZE), GD_OK);
    }
    CHECK_INT(gd_estimate_sum(estimate, sums, &totals, &err), GD_OK);
    CHECK_INT(totals.again_plain, 2 * SIZE);
    CHECK(totals.again_stored < 2 * SIZE * 6 / 10);
    finish();
}

TEST(test_bad_parameters)
{
    gd_chunker chunker;
    gd_estimate_params params = {.segment_size = BLOCK / 2};
    fault_env_init(&f);
    REQUIRE(gd_chunker_fixed(&chunker, BLOCK, &err) == GD_OK);
    CHECK_INT(gd_estimate_open(&f.env, &chunker, &params, &estimate, &err),
              GD_INVALID);
    params = (gd_estimate_params){.segment_size = BLOCK,
                                  .again_codec = GD_CODEC_ZSTD,
                                  .again_level = 77};
    CHECK_INT(gd_estimate_open(&f.env, &chunker, &params, &estimate, &err),
              GD_INVALID);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

/* Whichever allocation fails, the call fails and leaks no memory. */
TEST(test_no_memory)
{
    fill(3, SIZE);
    for (uint64_t nth = 1;; nth++) {
        fault_env_init(&f);
        fault_env_fail(&f, FAULT_ALLOC, nth, ENOMEM, false);
        gd_estimated sums[1];
        gd_estimate_totals totals;
        gd_status s = open_estimate(0);
        if (s == GD_OK) {
            s = take(data, SIZE);
            if (s == GD_OK) {
                s = gd_estimate_sum(estimate, sums, &totals, &err);
            }
            gd_estimate_close(estimate);
        }
        bool failed = fault_env_faults(&f) > 0;
        CHECK_INT(s, failed ? GD_NOMEM : GD_OK);
        CHECK_INT(fault_env_leaks(&f), 0);
        fault_env_destroy(&f);
        if (!failed) {
            CHECK(nth > 6);
            break;
        }
    }
}
