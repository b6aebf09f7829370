/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_vhdx.c - maps of VHDX files. Hostile files are refused with a reason.
 */
#include "engine/disk/vhdx.h"

#include "tests/c/support/check.h"
#include "tests/c/support/map_fixture.h"

enum {
    UNIT = 64 << 10,
    HEADER = 4096,
    HEADERS = UNIT,
    REGIONS = 3 * UNIT,
    METADATA = 1 << 20,
    VALUES = METADATA + UNIT, /* 16 bytes for each item */
    BAT = 2 << 20,
    BLOCK = 32 << 20,
    DATA = 4 << 20,
    PRESENT = 6,
};

static const uint8_t ids[][16] = {
    {0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0x00, 0x42, 0x9d, 0x64, 0x11, 0x5e,
     0x9b, 0xfd, 0x4a, 0x08}, /* the table of blocks */
    {0x06, 0xa2, 0x7c, 0x8b, 0x90, 0x47, 0x9a, 0x4b, 0xb8, 0xfe, 0x57, 0x5f,
     0x05, 0x0f, 0x88, 0x6e}, /* metadata */
    {0x37, 0x67, 0xa1, 0xca, 0x36, 0xfa, 0x43, 0x4d, 0xb3, 0xb6, 0x33, 0xf0,
     0xaa, 0x44, 0xe7, 0x6b}, /* parameters */
    {0x24, 0x42, 0xa5, 0x2f, 0x1b, 0xcd, 0x76, 0x48, 0xb2, 0x11, 0x5d, 0xbe,
     0xd8, 0x3b, 0xf4, 0xb8}, /* size */
    {0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47, 0xba, 0x47, 0xf2, 0x33,
     0xa8, 0xfa, 0xab, 0x5f}, /* sector */
};

/* CRC-32C, bit by bit. */
static void
seal(uint64_t at, size_t length)
{
    uint32_t sum = UINT32_MAX;
    map_put_le(at + 4, 0, 4);
    for (size_t bit = 0; bit < length * 8; bit++) {
        sum ^= (uint32_t)(mapped.bytes[at + bit / 8] >> bit % 8 & 1);
        sum = (sum & 1) != 0 ? sum >> 1 ^ 0x82f63b78 : sum >> 1;
    }
    map_put_le(at + 4, ~sum, 4);
}

static void
put_header(uint64_t at, uint64_t sequence)
{
    memcpy(mapped.bytes + at, "head", 4);
    map_put_le(at + 8, sequence, 8);
    map_put_le(at + 66, 1, 2);
    seal(at, HEADER);
}

static void
put_region(size_t number, size_t id, uint64_t offset, uint32_t length)
{
    uint64_t at = REGIONS + 16 + number * 32;
    memcpy(mapped.bytes + at, ids[id], 16);
    map_put_le(at + 16, offset, 8);
    map_put_le(at + 24, length, 4);
    map_put_le(at + 28, 1, 4);
}

static void
put_item(size_t number, size_t id, uint64_t value, uint32_t length)
{
    uint64_t at = METADATA + 32 + number * 32;
    memcpy(mapped.bytes + at, ids[id], 16);
    map_put_le(at + 16, UNIT + number * 16, 4);
    map_put_le(at + 20, length, 4);
    map_put_le(at + 24, 4, 4);
    map_put_le(VALUES + number * 16, value, 8);
}

static void
begin(void)
{
    map_begin(DATA + 4 * (uint64_t)BLOCK);
    memcpy(mapped.bytes, "vhdxfile", 8);
    put_header(HEADERS, 1);
    put_header(2 * HEADERS, 2);
    memcpy(mapped.bytes + REGIONS, "regi", 4);
    map_put_le(REGIONS + 8, 2, 4);
    put_region(0, 0, BAT, 1 << 20);
    put_region(1, 1, METADATA, 1 << 20);
    seal(REGIONS, UNIT);
    memcpy(mapped.bytes + METADATA, "metadata", 8);
    map_put_le(METADATA + 10, 3, 2);
    put_item(0, 2, BLOCK, 8);
    put_item(1, 3, UINT64_C(200) * BLOCK + 512, 8);
    put_item(2, 4, 512, 4);
}

static void
put_block(uint64_t entry, uint64_t mib, unsigned state)
{
    map_put_le(BAT + entry * 8, mib << 20 | state, 8);
}

/* A chunk has 128 blocks, so entry 128 is of a bitmap. */
TEST(test_blocks)
{
    begin();
    put_block(0, 36, PRESENT);
    put_block(1, 4, PRESENT);
    put_block(2, 36, 2);
    put_block(3, 36, 3);
    put_block(128, 4, PRESENT);
    put_block(129, 4, PRESENT);
    put_block(201, 68, PRESENT);
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.format, GD_DISK_VHDX);
    CHECK_INT(mapped.count, 7);
    CHECK_PIECE(0, GD_DISK_PLAIN, BLOCK, DATA + BLOCK);
    CHECK_PIECE(1, GD_DISK_PLAIN, BLOCK, DATA);
    CHECK_PIECE(2, GD_DISK_ZEROS, 2 * BLOCK, 0);
    CHECK_PIECE(3, GD_DISK_UNALLOCATED, UINT64_C(124) * BLOCK, 0);
    CHECK_PIECE(4, GD_DISK_PLAIN, BLOCK, DATA);
    CHECK_PIECE(5, GD_DISK_UNALLOCATED, UINT64_C(71) * BLOCK, 0);
    CHECK_PIECE(6, GD_DISK_PLAIN, 512, DATA + 2 * (uint64_t)BLOCK);
}

TEST(test_headers)
{
    begin();
    mapped.bytes[HEADERS + 100] ^= 1;
    CHECK(map_run() == GD_OK); /* the other one is valid */
    mapped.bytes[2 * HEADERS + 100] ^= 1;
    CHECK_REFUSED("both of its headers");
    begin();
    map_put_le(HEADERS + 48, 1, 1);
    seal(HEADERS, HEADER);
    CHECK(map_run() == GD_OK); /* the other one is newer */
    put_header(HEADERS, 3);
    CHECK_REFUSED("a log to be replayed");
    map_put_le(2 * HEADERS + 66, 2, 2);
    put_header(HEADERS, 1);
    seal(2 * HEADERS, HEADER);
    CHECK_REFUSED("version 2");
}

static void
check_region(size_t number, uint64_t offset, uint32_t length, const char *words)
{
    begin();
    put_region(number, number, offset, length);
    seal(REGIONS, UNIT);
    CHECK_REFUSED(words);
}

TEST(test_regions_are_refused)
{
    begin();
    mapped.bytes[REGIONS + UNIT - 1] = 1;
    CHECK_REFUSED("table of regions is damaged");
    begin();
    map_put_le(REGIONS + 8, 2048, 4);
    seal(REGIONS, UNIT);
    CHECK_REFUSED("table of regions is damaged");
    begin();
    mapped.bytes[REGIONS + 16] ^= 1;
    seal(REGIONS, UNIT);
    CHECK_REFUSED("needs a region");
    map_put_le(REGIONS + 44, 0, 4);
    seal(REGIONS, UNIT);
    CHECK_REFUSED("no metadata, or no blocks");
    check_region(0, BAT, 8, "table of blocks is too small");
    check_region(0, mapped.size - 512, 1 << 20, "beyond the end");
    check_region(0, UINT64_MAX - 7, 1 << 20, "beyond the end");
    check_region(1, METADATA, 512, "no metadata, or no blocks");
    check_region(1, BAT, 1 << 20, "metadata are damaged");
    check_region(1, UINT64_MAX, 1 << 20, "beyond the end");
}

static void
check_item(size_t number, uint64_t value, const char *words)
{
    begin();
    map_put_le(VALUES + number * 16, value, 8);
    CHECK_REFUSED(words);
}

TEST(test_metadata_are_refused)
{
    check_item(0, (UINT64_C(2) << 32) | BLOCK, "a parent");
    check_item(0, 0, "blocks have 0 bytes");
    check_item(0, 512 << 20, "blocks have 536870912 bytes");
    check_item(0, 3 << 20, "blocks have 3145728 bytes");
    check_item(1, 0, "empty");
    check_item(1, 511, "whole sectors");
    check_item(1, UINT64_C(1) << 63, "too large");
    check_item(1, UINT64_C(1) << 62, "too small for its disk");
    check_item(2, 1024, "sectors 1024");
    begin();
    map_put_le(METADATA + 10, 2048, 2);
    CHECK_REFUSED("metadata are damaged");
    begin();
    map_put_le(METADATA + 32 + 20, 9, 4);
    CHECK_REFUSED("metadata are damaged");
    begin();
    map_put_le(METADATA + 32 + 16, UINT32_MAX, 4);
    CHECK_REFUSED("beyond the end");
    begin();
    mapped.bytes[METADATA + 32] ^= 1;
    CHECK_REFUSED("needs metadata");
    map_put_le(METADATA + 32 + 24, 0, 4);
    CHECK_REFUSED("blocks have 0 bytes");
}

TEST(test_blocks_are_refused)
{
    static const unsigned states[] = {4, 5, 7};
    for (size_t i = 0; i < 3; i++) {
        begin();
        put_block(0, 4, states[i]);
        CHECK_REFUSED("the state of the block");
    }
    begin();
    put_block(0, 132, PRESENT);
    CHECK_REFUSED("beyond the end");
    put_block(0, (UINT64_C(1) << 44) - 1, PRESENT);
    CHECK_REFUSED("beyond the end");
}
