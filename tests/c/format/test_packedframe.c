/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_packedframe.c - packed frames are as in format-derived.rst, take as few
 * bits as it requires, and other bytes are refused.
 */
#include "engine/format/packedframe.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/format/index.h"
#include "tests/c/support/check.h"

enum { SEED = 77, HEAD = 16 };

typedef struct frame {
    uint8_t records[GD_PACKED_ITEMS * GD_INDEX_RECORD];
    uint8_t bytes[GD_PACKED_FRAME], back[GD_PACKED_ITEMS * GD_INDEX_RECORD];
    gd_frame_shape shape;
    size_t length, count;
} frame;

static frame f;

static bool
add(uint64_t key, uint64_t address)
{
    uint8_t record[GD_INDEX_RECORD];
    gd_index_put_record(record, key, address);
    if (!gd_frame_shape_add(&f.shape, record)) {
        return false;
    }
    memcpy(f.records + (f.shape.count - 1) * GD_INDEX_RECORD, record,
           sizeof record);
    return true;
}

static void
begin(void)
{
    f.shape = (gd_frame_shape){0};
}

static bool
comes_back(bool padded)
{
    f.length = gd_packedframe_pack(&f.shape, f.records, SEED, padded, f.bytes);
    return gd_packedframe_unpack(f.bytes, f.length, SEED, f.back, &f.count) &&
           f.count == f.shape.count &&
           memcmp(f.records, f.back, f.count * GD_INDEX_RECORD) == 0;
}

/* Returns a sequence that looks random, and is the same everywhere. */
static uint64_t
next_number(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) +
             UINT64_C(1442695040888963407);
    uint64_t mixed = *state ^ *state >> 29;
    return mixed * UINT64_C(0x9e3779b97f4a7c15);
}

TEST(test_bytes)
{
    begin();
    CHECK(add(0x0102030405060708, 0x8001));
    CHECK(add(0x010203040506070d, 0x8000)); /* 5 more: 3 bits; 16 bits */
    CHECK(comes_back(false));
    static const uint8_t wanted[] = {
        8, 7, 6, 5, 4, 3, 2, 1, 2, 0, 0, 0, 3, 16, 0, 0,
        /* 000, then 1 and 15 zeros and 1 from the lowest bit on: 0x8001 << 3,
         * and from bit 19 on 5, and 0x8000 from bit 22 on */
        0x08, 0x00, 0x2c, 0x00, 0x20};
    CHECK_INT(f.length, sizeof wanted + 8);
    CHECK(memcmp(f.bytes, wanted, sizeof wanted) == 0);
    CHECK(gd_get64(f.bytes + f.length - 8) ==
          gd_checksum(f.bytes, f.length - 8, SEED));
}

TEST(test_one_record_and_the_widest)
{
    static const uint64_t keys[] = {0, 1, UINT64_MAX};
    for (size_t i = 0; i < 3; i++) {
        begin();
        CHECK(add(keys[i], UINT64_C(0xffffffffff)));
        CHECK(comes_back(false));
        CHECK_INT(f.length, HEAD + 5 + 8);
        CHECK(comes_back(true));
        CHECK_INT(f.length, GD_PACKED_FRAME);
    }
    begin();
    CHECK(add(0, 1 << 15));
    CHECK(add(UINT64_MAX, UINT64_C(0xffffffffff))); /* 64 and 40 bits */
    CHECK(comes_back(false));
    CHECK_INT(f.length, HEAD + 26 + 8);
}

/* With any widths, the last records end at each bit of a byte. */
TEST(test_widths)
{
    uint64_t state = 1;
    for (unsigned width = 0; width <= 64; width++) {
        for (unsigned address = 1; address <= 40; address += 3) {
            uint64_t key = 0, step = width == 0 ? 0 : UINT64_MAX >> (64 - width);
            begin();
            for (unsigned i = 0; i < 9 && (i < 2 || width < 60); i++) {
                CHECK(add(key, next_number(&state) >> (64 - address)));
                key += step;
            }
            CHECK(comes_back(false));
            CHECK(comes_back(true));
        }
    }
}

/* A full frame has the promised number of random fingerprints and addresses:
 * 68 bits each. */
TEST(test_a_full_frame)
{
    enum { RECORDS = 1000000 };
    uint64_t state = 7, key = 0;
    begin();
    /* The gaps between random numbers, of so many: up to twice the mean and
     * more. */
    while (add(key, (1 << 15) + next_number(&state) % RECORDS)) {
        uint64_t mean = UINT64_MAX / RECORDS;
        uint64_t half = next_number(&state) % mean;
        key += half + next_number(&state) % mean + 1;
    }
    CHECK(f.shape.count > 3800 && f.shape.count <= GD_PACKED_ITEMS);
    CHECK(comes_back(true));
    CHECK(comes_back(false));
    CHECK(f.length <= GD_PACKED_FRAME);
    CHECK(f.length > GD_PACKED_FRAME - 16);
    /* A record that did not fit changed nothing, and begins the next frame. */
    gd_frame_shape before = f.shape;
    CHECK(!add(UINT64_MAX, UINT64_C(0xffffffffff)));
    CHECK(memcmp(&before, &f.shape, sizeof before) == 0);
    begin();
    for (uint64_t i = 0; i < GD_PACKED_ITEMS; i++) {
        CHECK(add(i, 1)); /* 2 bits */
    }
    CHECK(!add(GD_PACKED_ITEMS, 1));
    CHECK(comes_back(false));
}

/* Every byte is checked. */
TEST(test_damage)
{
    begin();
    for (uint64_t i = 0; i < 50; i++) {
        CHECK(add(i * 1000003, (1 << 15) + i));
    }
    CHECK(comes_back(false));
    for (size_t i = 0; i < f.length; i++) {
        f.bytes[i] ^= 0x10;
        CHECK(!gd_packedframe_unpack(f.bytes, f.length, SEED, f.back,
                                     &f.count));
        f.bytes[i] ^= 0x10;
    }
    for (size_t length = 0; length < f.length; length++) {
        CHECK(!gd_packedframe_unpack(f.bytes, length, SEED, f.back, &f.count));
    }
    CHECK(!gd_packedframe_unpack(f.bytes, f.length, SEED + 1, f.back,
                                 &f.count));
}

static bool
unpacks_with(size_t at, uint8_t value)
{
    uint8_t kept = f.bytes[at];
    f.bytes[at] = value;
    gd_put64(f.bytes + f.length - 8,
             gd_checksum(f.bytes, f.length - 8, SEED));
    bool unpacked = gd_packedframe_unpack(f.bytes, f.length, SEED, f.back,
                                          &f.count);
    f.bytes[at] = kept;
    return unpacked;
}

/* A frame with a valid checksum is not read out of bounds either. */
TEST(test_heads_that_cannot_be)
{
    begin();
    for (uint64_t i = 0; i < 8; i++) {
        CHECK(add(i * 1000003, (1 << 15) + i));
    }
    CHECK(comes_back(false));
    CHECK(unpacks_with(0, 1));
    CHECK(unpacks_with(8, 7));
    CHECK(!unpacks_with(8, 0));    /* no record */
    CHECK(!unpacks_with(8, 9));    /* they end behind the frame */
    CHECK(!unpacks_with(11, 0xff));
    CHECK(!unpacks_with(12, 255));
    CHECK(!unpacks_with(13, 255));
    CHECK(comes_back(true));
    CHECK(unpacks_with(12, 64));
    CHECK(!unpacks_with(12, 65));
    CHECK(unpacks_with(13, 40));
    CHECK(!unpacks_with(13, 41));
    CHECK(!unpacks_with(9, 0x20)); /* 8200 */
}
