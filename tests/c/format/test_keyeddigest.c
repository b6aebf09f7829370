/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_keyeddigest.c - GMAC against vectors made elsewhere, and without memory.
 *
 * The vector of no data under the key of zeros is published with GCM. Those of
 * the pattern were made with the Python package cryptography.
 */
#include "engine/format/keyeddigest.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <stdlib.h>

#include "tests/c/support/check.h"

enum { PATTERN = 4096 };

static uint8_t pattern[PATTERN], zeros[GD_KEYED_KEY_SIZE],
    key[GD_KEYED_KEY_SIZE];

static void
fill(void)
{
    for (unsigned i = 0; i < PATTERN; i++) {
        pattern[i] = (uint8_t)(i * 7 + i / 251);
    }
    for (unsigned i = 0; i < sizeof key; i++) {
        key[i] = (uint8_t)i;
    }
}

static gd_status
compute(const uint8_t *own_key, size_t len, uint8_t *out, gd_error *err)
{
    memset(out, 0xee, GD_KEYED_DIGEST_SIZE);
    return gd_keyed_digest(own_key, pattern, len, out, err);
}

static void
check_vector(const uint8_t *own_key, size_t len, const char *wanted)
{
    uint8_t out[GD_KEYED_DIGEST_SIZE];
    char hex[2 * sizeof out + 1];
    gd_error err;
    CHECK_INT(compute(own_key, len, out, &err), GD_OK);
    for (unsigned i = 0; i < sizeof out; i++) {
        sprintf(hex + 2 * i, "%02x", out[i]);
    }
    CHECK_CONTAINS(hex, wanted);
}

TEST(test_vectors)
{
    fill();
    check_vector(zeros, 0, "530f8afbc74536b9a963b4f1c4cb738b");
    check_vector(zeros, 17, "7de1b1d9221099553a9d3b6b609657ef");
    check_vector(key, 0, "f05d76ae4ab99fe5a6f69b3148c2363d");
    check_vector(key, 1, "060819b35e314b1a8ff69053ec5bcb37");
    check_vector(key, 16, "9b375ee968f39bb81382b00183d8b823");
    check_vector(key, 17, "5b048e632ee2fd636f8a059748af8d14");
    check_vector(key, PATTERN, "adc71b3eaaa32facc1cb295a082e1117");
    CHECK_INT(ERR_peek_error(), 0);
}

/* Each bit of the data and of the key counts, even in the last bytes, which
 * fill no block of the cipher. */
TEST(test_each_bit_counts)
{
    uint8_t out[GD_KEYED_DIGEST_SIZE], other[GD_KEYED_DIGEST_SIZE];
    enum { LENGTH = 16 + 3 };
    fill();
    CHECK_INT(compute(key, LENGTH, out, NULL), GD_OK);
    for (unsigned bit = 0; bit < 8 * LENGTH; bit++) {
        pattern[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK_INT(compute(key, LENGTH, other, NULL), GD_OK);
        CHECK(memcmp(out, other, sizeof out) != 0);
        pattern[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (unsigned bit = 0; bit < 8 * sizeof key; bit++) {
        key[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK_INT(compute(key, LENGTH, other, NULL), GD_OK);
        CHECK(memcmp(out, other, sizeof out) != 0);
        key[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

/* ---- OpenSSL without memory ---- */

static long left = -1; /* allocations that still succeed; below 0: all */

static bool
fails(void)
{
    return left == 0 || (left > 0 && --left == 0);
}

static void *
own_malloc(size_t size, const char *file, int line)
{
    (void)file, (void)line;
    return fails() ? NULL : malloc(size);
}

static void *
own_realloc(void *data, size_t size, const char *file, int line)
{
    (void)file, (void)line;
    return fails() ? NULL : realloc(data, size);
}

static void
own_free(void *data, const char *file, int line)
{
    (void)file, (void)line;
    free(data);
}

/* From each allocation on, all fail: a digest is right, or there is none. */
TEST(test_without_memory)
{
    uint8_t right[GD_KEYED_DIGEST_SIZE], out[GD_KEYED_DIGEST_SIZE];
    gd_error err;
    unsigned failed = 0;
    gd_status s = GD_NOMEM;
    fill();
    CHECK_INT(compute(key, PATTERN, right, NULL), GD_OK);
    for (long n = 1; s != GD_OK; n++) {
        left = n;
        s = compute(key, PATTERN, out, &err);
        left = -1;
        if (s != GD_OK) {
            CHECK_INT(s, GD_NOMEM);
            CHECK_CONTAINS(err.text, "out of memory");
            failed++;
        }
        CHECK_INT(ERR_peek_error(), 0);
    }
    CHECK(failed > 0);
    CHECK(memcmp(right, out, sizeof out) == 0);
}

int
main(int argc, char **argv)
{
    /* This is possible only before OpenSSL's first allocation. */
    if (CRYPTO_set_mem_functions(own_malloc, own_realloc, own_free) != 1) {
        return 1;
    }
    return check_main(argc, argv);
}
