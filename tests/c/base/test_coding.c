/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_coding.c - integers and checksums as they are on disk.
 */
#include "engine/base/coding.h"

#include "tests/c/support/check.h"
#include "tests/c/support/reference_xxh3.h"
#include "tests/c/support/scratch_repository.h"

TEST(test_bytes_are_little_endian)
{
    uint8_t b[8];
    gd_put16(b, 0x0102);
    CHECK(memcmp(b, "\x02\x01", 2) == 0);
    gd_put32(b, 0x01020304);
    CHECK(memcmp(b, "\x04\x03\x02\x01", 4) == 0);
    gd_put64(b, 0x0102030405060708);
    CHECK(memcmp(b, "\x08\x07\x06\x05\x04\x03\x02\x01", 8) == 0);
}

TEST(test_every_alignment_comes_back)
{
    uint8_t b[24];
    for (size_t at = 0; at < 16; at++) {
        memset(b, 0xee, sizeof b);
        gd_put16(b + at, 0xfedc);
        CHECK(gd_get16(b + at) == 0xfedc);
        CHECK_INT(b[at + 2], 0xee);
        gd_put32(b + at, 0xfedcba98);
        CHECK(gd_get32(b + at) == 0xfedcba98);
        CHECK_INT(b[at + 4], 0xee);
        gd_put64(b + at, UINT64_MAX - 1);
        CHECK(gd_get64(b + at) == UINT64_MAX - 1);
    }
}

/* The values are those of python-xxhash. */
TEST(test_checksum_is_xxh3)
{
    CHECK(gd_checksum("", 0, 0) == 0x2d06800538d394c2);
    CHECK(gd_checksum("abc", 3, 0) == 0x78af5f94892f3950);
    CHECK(gd_checksum("abc", 3, 7) == 0x48ff56f569e39912);
}

TEST(test_checksum_sees_every_bit)
{
    uint8_t data[64] = {0};
    uint64_t right = gd_checksum(data, sizeof data, 1);
    for (size_t bit = 0; bit < 8 * sizeof data; bit++) {
        data[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(gd_checksum(data, sizeof data, 1) != right);
        data[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    CHECK(gd_checksum(data, sizeof data, 2) != right);
    CHECK(gd_checksum(data, sizeof data - 1, 1) != right);
}

/* They are equal whatever code the library chooses. */
TEST(test_checksum_equals_the_reference)
{
    enum { MAX_LENGTH = 1 << 20 };
    uint8_t *data = malloc(MAX_LENGTH + 7);
    REQUIRE(data != NULL);
    fill_random(data, MAX_LENGTH + 7, 3);
    for (size_t length = 0; length <= MAX_LENGTH;
         length += length < 1100 ? 1 : 1 + length / 3) {
        for (size_t at = 0; at < 8; at += 7) {
            uint64_t seed = at == 0 ? 0 : length * 0x9e3779b97f4a7c15;
            CHECK(gd_checksum(data + at, length, seed) ==
                  reference_xxh3_64(data + at, length, seed));
        }
    }
    free(data);
}
