/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_vhd.c - maps of VHD files. Hostile files are refused with a reason.
 */
#include "engine/disk/vhd.h"

#include "tests/c/support/check.h"
#include "tests/c/support/map_fixture.h"

enum {
    SECTOR = 512,
    BLOCK = 2 << 20,
    HEADER = 512,
    TABLE = 1536,
    BLOCKS = 2048, /* where they begin */
    BITMAP = 512,
};

/* The complement of the sum of the bytes. */
static void
seal(uint64_t at, size_t length, uint64_t checksum)
{
    uint32_t sum = 0;
    map_put_be(checksum, 0, 4);
    for (size_t i = 0; i < length; i++) {
        sum += mapped.bytes[at + i];
    }
    map_put_be(checksum, ~sum, 4);
}

static void
put_footer(uint64_t at, uint32_t type, uint64_t size)
{
    memcpy(mapped.bytes + at, "conectix", 8);
    map_put_be(at + 12, 0x10000, 4);
    map_put_be(at + 16, HEADER, 8);
    memcpy(mapped.bytes + at + 28, "win ", 4);
    map_put_be(at + 48, size, 8);
    map_put_be(at + 60, type, 4);
    seal(at, SECTOR, at + 64);
}

static void
seal_header(void)
{
    seal(HEADER, 1024, HEADER + 36);
}

/* A dynamic disk of three blocks and a sector. */
static void
begin(void)
{
    map_begin(BLOCKS + 3 * (BLOCK + BITMAP) + SECTOR);
    put_footer(0, 3, 3 * BLOCK + SECTOR);
    memcpy(mapped.bytes + HEADER, "cxsparse", 8);
    map_put_be(HEADER + 16, TABLE, 8);
    map_put_be(HEADER + 28, 4, 4);
    map_put_be(HEADER + 32, BLOCK, 4);
    seal_header();
    for (size_t i = 0; i < 4; i++) {
        map_put_be(TABLE + i * 4, UINT32_MAX, 4);
    }
}

TEST(test_dynamic)
{
    begin();
    map_put_be(TABLE, BLOCKS / SECTOR, 4);
    map_put_be(TABLE + 12, (BLOCKS + BITMAP + BLOCK) / SECTOR, 4);
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.format, GD_DISK_VHD);
    CHECK_INT(mapped.count, 3);
    CHECK_PIECE(0, GD_DISK_PLAIN, BLOCK, BLOCKS + BITMAP);
    CHECK_PIECE(1, GD_DISK_UNALLOCATED, 2 * BLOCK, 0);
    CHECK_PIECE(2, GD_DISK_PLAIN, SECTOR, BLOCKS + BLOCK + 2 * BITMAP);
}

TEST(test_fixed)
{
    map_begin(10 * SECTOR);
    put_footer(9 * SECTOR, 2, 9 * SECTOR);
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.format, GD_DISK_VHD);
    CHECK_INT(mapped.count, 1);
    CHECK_PIECE(0, GD_DISK_PLAIN, 9 * SECTOR, 0);
    mapped.bytes[9 * SECTOR + 100] ^= 1; /* its checksum fails: it is raw */
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.format, GD_DISK_RAW);
    put_footer(9 * SECTOR, 2, 10 * SECTOR);
    mapped.bytes[9 * SECTOR + 100] = 0;
    seal(9 * SECTOR, SECTOR, 9 * SECTOR + 64);
    CHECK_REFUSED("shorter than its disk");
}

/* The geometry counts, unless the maker is known to mean the bytes. */
TEST(test_two_sizes)
{
    begin();
    memcpy(mapped.bytes + 28, "qemu", 4);
    seal(0, SECTOR, 64);
    CHECK_REFUSED("two sizes");
    map_put_be(56, 0x60 * 0x80 + 1, 2); /* cylinders of one sector */
    mapped.bytes[58] = mapped.bytes[59] = 1;
    seal(0, SECTOR, 64);
    CHECK(map_run() == GD_OK);
    map_put_be(56, 0xffff, 2);
    mapped.bytes[58] = 16;
    mapped.bytes[59] = 255;
    seal(0, SECTOR, 64);
    CHECK(map_run() == GD_OK);
}

static void
check_footer(uint64_t at, uint64_t value, size_t bytes, const char *words)
{
    begin();
    map_put_be(at, value, bytes);
    seal(0, SECTOR, 64);
    CHECK_REFUSED(words);
}

static void
check_header(uint64_t at, uint64_t value, size_t bytes, const char *words)
{
    begin();
    map_put_be(HEADER + at, value, bytes);
    seal_header();
    CHECK_REFUSED(words);
}

TEST(test_files_are_refused)
{
    check_footer(12, 0x20000, 4, "footer is damaged");
    check_footer(60, 4, 4, "a parent (type 4)");
    check_footer(60, 2, 4, "type 2");
    check_footer(48, 0, 8, "empty");
    check_footer(48, UINT64_MAX, 8, "whole sectors");
    check_footer(48, UINT64_C(1) << 61, 8, "4 blocks");
    check_footer(16, UINT64_MAX, 8, "beyond the end");
    check_footer(16, UINT64_MAX - 10, 8, "beyond the end");
    begin();
    mapped.bytes[64] ^= 1;
    CHECK_REFUSED("footer is damaged");
    check_header(0, 0, 1, "header is damaged");
    begin();
    mapped.bytes[HEADER + 36] ^= 1;
    CHECK_REFUSED("header is damaged");
    check_header(16, UINT64_MAX, 8, "beyond the end");
    check_header(16, UINT64_C(1) << 40, 8, "beyond the end");
    check_header(28, 3, 4, "3 blocks");
    check_header(32, 0, 4, "blocks of 0 bytes");
    check_header(32, 2048, 4, "blocks of 2048 bytes");
    check_header(32, (3 << 20), 4, "blocks of 3145728 bytes");
    check_header(32, UINT32_C(1) << 31, 4, "blocks of 2147483648 bytes");
    begin();
    map_put_be(TABLE, (BLOCKS + 2 * BLOCK + 2 * SECTOR) / SECTOR, 4);
    CHECK(map_run() == GD_OK);
    map_put_be(TABLE, (BLOCKS + 3 * BLOCK) / SECTOR, 4);
    CHECK_REFUSED("beyond the end");
    map_put_be(TABLE, UINT32_MAX - 1, 4);
    CHECK_REFUSED("beyond the end");
}
