/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_deflate.c - of any bytes and with any parameters, the encoder makes what
 * the installed zlib makes, and inflating gives the bytes back. Any bytes can be
 * inflated, too.
 *
 * Input: level, window, memory level and strategy; how often the bytes are
 * repeated, with the number of each repetition added to one in so many bytes;
 * and the bytes.
 */
#include <zlib.h>

#include "engine/deflate/deflate.h"
#include "engine/deflate/inflate.h"
#include "tests/fuzz/fuzz.h"

enum { MAX_PLAIN = 200000, ROOM = MAX_PLAIN + MAX_PLAIN / 4 + 100 };

static uint8_t plain[MAX_PLAIN], out[ROOM], wanted[ROOM], again[MAX_PLAIN];

static size_t
repeat_bytes(input *in)
{
    uint32_t times = take8(in) + 1u, one_in = take8(in) + 1u;
    size_t length = 0;
    for (uint32_t i = 0; i < times; i++) {
        for (size_t n = 0; n < in->left && length < MAX_PLAIN; n++) {
            plain[length++] = (uint8_t)(in->at[n] + (n % one_in == 0 ? i : 0));
        }
    }
    return length;
}

static void
check_inflate(const gd_deflate_params *p, size_t length, size_t used)
{
    gd_inflate_result result;
    gd_error err;
    MUST(gd_inflate(p->has_header, out, used, again, length, &result, &err) ==
         GD_OK);
    MUST(result.complete && result.read == used && result.written == length);
    MUST(memcmp(again, plain, length) == 0);
}

/* The encoder makes this stream, and none that differs in a byte. */
static void
check_makes(gd_deflate *encoder, size_t length, size_t used, size_t seed)
{
    size_t parsed, at = seed % used;
    wanted[at] ^= 1;
    MUST(!gd_deflate_makes(encoder, plain, length, wanted, used, out, &parsed));
    MUST(parsed <= length);
    wanted[at] ^= 1;
    MUST(gd_deflate_makes(encoder, plain, length, wanted, used, out, &parsed));
    MUST(parsed == length);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    gd_deflate *encoder;
    gd_error err;
    gd_inflate_result result;
    MUST(gd_inflate(false, data, size, again, 1000, &result, &err) == GD_OK);
    uint8_t level = take8(&in) % 9 + 1, window = take8(&in) % 7 + 9;
    uint8_t memory = take8(&in) % 9 + 1, strategy = take8(&in) % 10;
    gd_deflate_params p = {level, window, memory, strategy % 5, strategy >= 5};
    size_t length = repeat_bytes(&in), seed = length * 31 + size;
    z_stream z = {.next_in = plain, .avail_in = (uInt)length,
                  .next_out = wanted, .avail_out = ROOM};
    MUST(deflateInit2(&z, level, Z_DEFLATED, p.has_header ? window : -window,
                      memory, p.strategy) == Z_OK);
    MUST(deflate(&z, Z_FINISH) == Z_STREAM_END);
    MUST(deflateEnd(&z) == Z_OK);
    MUST(gd_deflate_open(gd_env_posix(), &p, &encoder, &err) == GD_OK);
    for (int twice = 0; twice < 2; twice++) {
        size_t used = gd_deflate_encode(encoder, plain, length, out, ROOM);
        MUST(used == z.total_out && memcmp(out, wanted, used) == 0);
        check_inflate(&p, length, used);
        check_makes(encoder, length, used, seed);
    }
    gd_deflate_close(gd_env_posix(), encoder);
    return 0;
}
