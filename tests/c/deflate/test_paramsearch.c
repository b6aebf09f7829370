/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_paramsearch.c - the parameters that are found make the same streams.
 */
#include "engine/deflate/paramsearch.h"

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { LENGTH = 3000, ROOM = 6000, SAMPLES = 2 };

static uint8_t plain[SAMPLES][LENGTH], streams[SAMPLES][ROOM], out[ROOM];
static gd_paramsearch_sample samples[SAMPLES];

static void
make_samples(const gd_deflate_params *params)
{
    gd_deflate *encoder;
    gd_error err;
    REQUIRE(gd_deflate_open(gd_env_posix(), params, &encoder, &err) == GD_OK);
    for (int i = 0; i < SAMPLES; i++) {
        fill_random(plain[i], LENGTH, (uint64_t)i);
        for (int n = 0; n < LENGTH; n++) {
            plain[i][n] &= plain[i][n] & 32 ? 3 : 0;
        }
        size_t used = gd_deflate_encode(encoder, plain[i], LENGTH, streams[i],
                                        ROOM);
        samples[i] = (gd_paramsearch_sample){plain[i], streams[i], LENGTH,
                                             used};
    }
    gd_deflate_close(gd_env_posix(), encoder);
}

static bool
search(gd_deflate_params *params, bool has_header)
{
    bool found;
    gd_error err;
    return gd_paramsearch_run(gd_env_posix(), samples, SAMPLES, has_header,
                              params, &found, &err) == GD_OK && found;
}

TEST(test_found)
{
    const gd_deflate_params made[] = {
        {6, 12, 9, 0, false}, {6, 15, 8, 0, true}, {1, 12, 9, 0, false},
        {9, 12, 9, 0, false}, {6, 12, 8, 0, false}, {6, 9, 1, 0, false},
        {6, 15, 9, GD_DEFLATE_HUFFMAN, false}, {6, 12, 9, GD_DEFLATE_RLE, true},
        {4, 12, 3, GD_DEFLATE_FIXED, false},
        {6, 12, 9, GD_DEFLATE_FILTERED, false}};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
        gd_deflate_params params;
        make_samples(&made[i]);
        REQUIRE(search(&params, made[i].has_header));
        gd_deflate *encoder;
        gd_error err;
        REQUIRE(gd_deflate_open(gd_env_posix(), &params, &encoder, &err) ==
                GD_OK);
        for (int n = 0; n < SAMPLES; n++) {
            size_t used = gd_deflate_encode(encoder, plain[n], LENGTH, out,
                                            ROOM);
            CHECK_INT(used, samples[n].stream_length);
            CHECK(memcmp(out, streams[n], used) == 0);
        }
        gd_deflate_close(gd_env_posix(), encoder);
    }
}

TEST(test_the_usual_parameters_come_first)
{
    gd_deflate_params params, made = {6, 12, 9, 0, false};
    make_samples(&made);
    REQUIRE(search(&params, false));
    CHECK(params.level == 6 && params.window_bits == 12 &&
          params.memory_level == 9 && params.strategy == 0);
}

TEST_SINGLE(test_another_encoder)
{
    gd_deflate_params params, made = {6, 12, 9, 0, false};
    make_samples(&made);
    streams[1][samples[1].stream_length / 2] ^= 1;
    CHECK(!search(&params, false));
}

/* A search in long streams ends, though it has not tried all parameters. */
TEST_SINGLE(test_a_long_stream)
{
    enum { LONG = GD_DEFLATE_MAX_PLAIN };
    static uint8_t text[LONG], stream[LONG];
    const gd_deflate_params made = {1, 9, 9, GD_DEFLATE_FILTERED, false};
    gd_deflate_params params;
    gd_deflate *encoder;
    gd_error err;
    bool found = true;
    fill_random(text, LONG, 1);
    for (size_t n = 0; n < LONG; n++) {
        text[n] &= 1; /* few, long blocks */
    }
    REQUIRE(gd_deflate_open(gd_env_posix(), &made, &encoder, &err) == GD_OK);
    size_t used = gd_deflate_encode(encoder, text, LONG, stream, LONG);
    gd_deflate_close(gd_env_posix(), encoder);
    gd_paramsearch_sample sample = {text, stream, LONG, used};
    REQUIRE(gd_paramsearch_run(gd_env_posix(), &sample, 1, false, &params,
                               &found, &err) == GD_OK);
    CHECK(!found);
}
