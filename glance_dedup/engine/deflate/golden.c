/* SPDX-License-Identifier: Apache-2.0 */
/*
 * golden.c - see golden.h.
 *
 * The vectors cover each level, strategy and kind of wrapper, and small and large
 * windows. zlib 1.2.13 made the streams; tests/c/deflate has many more.
 */
#include "engine/deflate/golden.h"

#include <string.h>

#include "engine/base/coding.h"

enum { PLAIN = 40000, MAX_RUN = 400, ROOM = PLAIN };

typedef struct vector {
    gd_deflate_params params;
    size_t length;
    uint64_t checksum;
} vector;

static const vector vectors[] = {
    {{6, 12, 9, 0, false}, 5700, 0x8b9f5581ebed35ef},
    {{6, 15, 8, 0, true}, 5634, 0x8f3dc9994e222b6d},
    {{1, 15, 8, 0, true}, 7859, 0x266a5393aac1796f},
    {{2, 12, 9, 0, false}, 7923, 0x5e8333797991c76e},
    {{3, 15, 8, 0, false}, 7219, 0xace02fb2a08fe3e5},
    {{4, 12, 9, 0, false}, 6195, 0xc26e976475a48d2c},
    {{9, 12, 9, 0, false}, 5178, 0xb930224743444eec},
    {{9, 15, 9, 0, true}, 5145, 0x90c68bfbab68ce41},
    {{5, 9, 1, 0, false}, 17848, 0x93b6e20c38659a83},
    {{7, 13, 3, 1, false}, 5868, 0x23885462d5d1a32b},
    {{6, 15, 8, 2, true}, 17195, 0xaf55b63328aad601},
    {{6, 12, 9, 3, false}, 16004, 0x5288abfb3a38da7d},
    {{8, 15, 8, 4, true}, 6290, 0x188533e77415f609},
};

/* Text with matches at many distances, noise, and runs of zeros. */
static void
fill_plain(uint8_t *plain)
{
    uint32_t state = 20261;
    size_t n = 0;
    while (n < PLAIN) {
        state = (state * 1103515245 + 12345) & 0x7fffffff;
        uint32_t value = state >> 8;
        if (value % 3 == 0 && n > 4000) {
            const uint8_t *from = plain + n - 1 - value / 8 % 3900;
            for (size_t i = 0; i < 3 + value / 32768 % 70; i++) {
                plain[n++] = from[i];
            }
        } else if (value % 200 == 1) {
            memset(plain + n, 0, value / 256 % MAX_RUN);
            n += value / 256 % MAX_RUN;
        } else {
            plain[n++] = (uint8_t)(value % 7 != 0 ? 97 + value / 16 % 24
                                                  : value / 256);
        }
    }
}

static gd_status
compare(const gd_env *env, const vector *v, const uint8_t *plain, uint8_t *out,
        gd_error *err)
{
    gd_deflate *encoder;
    GD_TRY(gd_deflate_open(env, &v->params, &encoder, err));
    size_t length = gd_deflate_encode(encoder, plain, PLAIN, out, ROOM);
    gd_deflate_close(env, encoder);
    return length == v->length && gd_checksum(out, length, 0) == v->checksum
               ? GD_OK
               : gd_fail(err, GD_VERSION,
                         "the encoder of this build does not make zlib's bytes "
                         "(level %u, window of %u bits)", v->params.level,
                         v->params.window_bits);
}

gd_status
gd_golden_compare(const gd_env *env, gd_error *err)
{
    uint8_t *plain = gd_alloc(env, PLAIN + MAX_RUN + ROOM, err);
    if (plain == NULL) {
        return GD_NOMEM;
    }
    gd_status s = GD_OK;
    fill_plain(plain);
    for (size_t i = 0; s == GD_OK && i < sizeof vectors / sizeof *vectors;
         i++) {
        s = compare(env, &vectors[i], plain, plain + PLAIN + MAX_RUN, err);
    }
    env->release(env, plain);
    return s;
}
