/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_inflate.c - inflating stops at a bound and at the stream's end.
 */
#include "engine/deflate/inflate.h"

#include "engine/deflate/deflate.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { LENGTH = 5000, ROOM = 8000 };

static uint8_t plain[LENGTH], stream[ROOM], again[ROOM];

static size_t
make_stream(bool has_header)
{
    gd_deflate_params params = {6, 12, 9, 0, has_header};
    gd_deflate *encoder;
    gd_error err;
    fill_random(plain, LENGTH / 2, 1);
    memcpy(plain + LENGTH / 2, plain, LENGTH / 2);
    if (gd_deflate_open(gd_env_posix(), &params, &encoder, &err) != GD_OK) {
        return 0;
    }
    size_t used = gd_deflate_encode(encoder, plain, LENGTH, stream, ROOM);
    gd_deflate_close(gd_env_posix(), encoder);
    return used;
}

TEST(test_bytes_behind_the_end)
{
    for (int has_header = 0; has_header < 2; has_header++) {
        size_t used = make_stream(has_header);
        gd_inflate_result result;
        gd_error err;
        memset(stream + used, 0xff, ROOM - used);
        REQUIRE(gd_inflate(has_header, stream, ROOM, again, LENGTH, &result,
                           &err) == GD_OK);
        CHECK(result.complete);
        CHECK_INT(result.read, used);
        CHECK_INT(result.written, LENGTH);
        CHECK(memcmp(again, plain, LENGTH) == 0);
    }
}

TEST(test_bounds)
{
    size_t used = make_stream(false);
    gd_inflate_result result;
    gd_error err;
    again[LENGTH - 1] = 77;
    REQUIRE(gd_inflate(false, stream, used, again, LENGTH - 1, &result,
                       &err) == GD_OK);
    CHECK(!result.complete);
    CHECK_INT(result.written, LENGTH - 1);
    CHECK_INT(again[LENGTH - 1], 77);
    REQUIRE(gd_inflate(false, stream, used - 1, again, ROOM, &result, &err) ==
            GD_OK);
    CHECK(!result.complete);
}

TEST(test_damage)
{
    size_t used = make_stream(true);
    gd_inflate_result result;
    gd_error err;
    stream[used - 1] ^= 1; /* the checksum */
    REQUIRE(gd_inflate(true, stream, used, again, ROOM, &result, &err) ==
            GD_OK);
    CHECK(!result.complete);
}
