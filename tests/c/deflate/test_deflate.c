/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_deflate.c - the encoder's bytes are those that zlib made once (vectors.inc)
 * and those that the installed zlib makes.
 */
#include "engine/deflate/deflate.h"

#include <openssl/sha.h>
#include <zlib.h>

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { MAX_PLAIN = GD_DEFLATE_MAX_PLAIN, ROOM = MAX_PLAIN + MAX_PLAIN / 4 };

typedef struct vector {
    gd_deflate_params params;
    int kind;
    size_t plain_length, stream_length;
    uint64_t digest; /* the first 8 bytes of SHA-256 */
} vector;

static const vector vectors[] = {
#include "tests/c/deflate/vectors.inc"
};

static uint8_t plain[MAX_PLAIN + 64], out[ROOM], wanted[ROOM];

/* See make_vectors.py. */
static void
fill_plain(int kind, size_t length)
{
    uint32_t state = 12345 + (uint32_t)kind;
    for (size_t n = 0; n < length;) {
        state = (state * 1103515245 + 12345) & 0x7fffffff;
        uint32_t value = state >> 8;
        if (kind == 0 && value % 4 == 0 && n > 300) {
            size_t start = n - 1 - value / 4 % 290;
            for (size_t i = 0; i < 3 + value / 2048 % 40; i++) {
                plain[n++] = plain[start + i];
            }
        } else if (kind == 0) {
            plain[n++] = (uint8_t)(97 + value % 20);
        } else if (kind == 1) {
            plain[n++] = value % 50 != 0 ? 0 : (uint8_t)value;
        } else if (kind == 2) {
            plain[n++] = (uint8_t)value;
        } else {
            plain[n] = value % 9 != 0 ? (uint8_t)(n % 48) : (uint8_t)value;
            n++;
        }
    }
}

static size_t
encode(const gd_deflate_params *params, size_t length, size_t room)
{
    gd_deflate *encoder;
    gd_error err;
    if (gd_deflate_open(gd_env_posix(), params, &encoder, &err) != GD_OK) {
        return SIZE_MAX;
    }
    size_t used = gd_deflate_encode(encoder, plain, length, out, room);
    gd_deflate_close(gd_env_posix(), encoder);
    return used;
}

TEST(test_golden_vectors)
{
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        const vector *v = &vectors[i];
        uint8_t digest[SHA256_DIGEST_LENGTH];
        fill_plain(v->kind, v->plain_length);
        size_t used = encode(&v->params, v->plain_length, ROOM);
        SHA256(out, used, digest);
        if (!CHECK_INT(used, v->stream_length) ||
            !CHECK(be64toh(gd_get64(digest)) == v->digest)) {
            fprintf(stderr, "vector %zu\n", i);
        }
    }
}

/* Has the installed zlib deflate the plain bytes, to `wanted`. */
static size_t
deflate_by_zlib(const gd_deflate_params *p, size_t length)
{
    z_stream z = {.next_in = plain, .avail_in = (uInt)length,
                  .next_out = wanted, .avail_out = ROOM};
    int bits = p->has_header ? p->window_bits : -p->window_bits;
    if (deflateInit2(&z, p->level, Z_DEFLATED, bits, p->memory_level,
                     p->strategy) != Z_OK ||
        deflate(&z, Z_FINISH) != Z_STREAM_END) {
        return 0;
    }
    deflateEnd(&z);
    return z.total_out;
}

static void
check_like_zlib(const gd_deflate_params *p, size_t length)
{
    size_t used = encode(p, length, ROOM);
    CHECK_INT(used, deflate_by_zlib(p, length));
    CHECK(memcmp(out, wanted, used) == 0);
}

/* A buffer of 2 MiB has places that low 16 bits do not tell apart. */
TEST_SINGLE(test_largest_buffer)
{
    for (int kind = 0; kind < 4; kind++) {
        fill_plain(kind, MAX_PLAIN);
        check_like_zlib(&(gd_deflate_params){6, 12, 9, 0, false}, MAX_PLAIN);
        check_like_zlib(&(gd_deflate_params){2, 15, 8, 0, true}, MAX_PLAIN);
    }
}

/* zlib drops a window when its buffer is nearly used up, at the end of the input,
 * too: a match at the distance of that place is then lost, and so is a stored
 * block. */
TEST_SINGLE(test_ends_near_a_window)
{
    for (int window_bits = 9; window_bits <= 12; window_bits += 3) {
        size_t window = (size_t)1 << window_bits;
        for (size_t length = 2 * window - 300; length < 2 * window + 10;
             length += 31) {
            fill_random(plain, length, length);
            /* Repeat the bytes at the second window's begin. */
            size_t at = 2 * window - 262;
            if (length >= at + 10) {
                memcpy(plain + at, plain + window, 10);
            }
            for (uint8_t level = 1; level <= 9; level += 5) {
                check_like_zlib(&(gd_deflate_params){
                    level, (uint8_t)window_bits, 1, 0, false}, length);
            }
        }
    }
}

/* One encoder for many buffers gives what a new one gives for each. */
TEST(test_a_used_encoder)
{
    for (uint8_t level = 1; level <= 9; level++) {
        gd_deflate_params params = {level, 15, 9, 0, false};
        gd_deflate *encoder;
        gd_error err;
        REQUIRE(gd_deflate_open(gd_env_posix(), &params, &encoder, &err) ==
                GD_OK);
        for (int i = 0; i < 20; i++) {
            size_t length = 20000;
            fill_plain(i % 4, length);
            size_t used = gd_deflate_encode(encoder, plain, length, out, ROOM);
            CHECK_INT(used, deflate_by_zlib(&params, length));
            CHECK(memcmp(out, wanted, used) == 0);
        }
        gd_deflate_close(gd_env_posix(), encoder);
    }
}

static bool
makes(gd_deflate *encoder, size_t length, size_t stream_length, size_t *parsed)
{
    return gd_deflate_makes(encoder, plain, length, wanted, stream_length, out,
                            parsed);
}

/* A stream that differs is found out at its block, and the next buffer comes out
 * as ever. */
TEST(test_makes)
{
    enum { MANY = 40000 };
    for (int i = 0; i < 9 * 4; i++) {
        uint8_t level = (uint8_t)(i % 9 + 1);
        gd_deflate_params params = {level, 12, 3, (uint8_t)(i % 5), i % 2 == 0};
        gd_deflate *encoder;
        gd_error err;
        size_t parsed;
        REQUIRE(gd_deflate_open(gd_env_posix(), &params, &encoder, &err) ==
                GD_OK);
        fill_plain(i / 9, MANY);
        size_t used = deflate_by_zlib(&params, MANY);
        for (size_t at = 2; at < used - 4; at += used / 7) {
            wanted[at] ^= 64;
            CHECK(!makes(encoder, MANY, used, &parsed));
            CHECK(parsed <= MANY && (parsed < MANY || at > used / 9));
            wanted[at] ^= 64;
            CHECK(makes(encoder, MANY, used, &parsed));
            CHECK_INT(parsed, MANY);
        }
        CHECK(!makes(encoder, MANY, used - 1, &parsed));
        CHECK(!makes(encoder, MANY, used + 1, &parsed));
        CHECK(!makes(encoder, MANY, 0, &parsed));
        gd_deflate_close(gd_env_posix(), encoder);
    }
}

/* The room is the result's length and the slack, and no byte less. */
TEST(test_room)
{
    gd_deflate_params params = {6, 12, 1, 0, true};
    for (int kind = 0; kind < 4; kind++) {
        fill_plain(kind, 30000);
        size_t used = encode(&params, 30000, ROOM);
        CHECK(used > 0);
        for (size_t room = 0; room < used + GD_DEFLATE_SLACK; room += 499) {
            out[room] = 77;
            size_t result = encode(&params, 30000, room);
            CHECK(result == 0 || result == used);
            CHECK_INT(out[room], 77);
        }
        CHECK_INT(encode(&params, 30000, used + GD_DEFLATE_SLACK), used);
    }
}

TEST(test_parameters)
{
    const gd_deflate_params wrong[] = {
        {0, 12, 9, 0, false}, {10, 12, 9, 0, false}, {6, 8, 9, 0, false},
        {6, 16, 9, 0, false}, {6, 12, 0, 0, false}, {6, 12, 10, 0, false},
        {6, 12, 9, 5, false}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        gd_deflate *encoder;
        gd_error err;
        CHECK_INT(gd_deflate_open(gd_env_posix(), &wrong[i], &encoder, &err),
                  GD_INVALID);
        CHECK_CONTAINS(err.text, "deflate has no level");
    }
}
