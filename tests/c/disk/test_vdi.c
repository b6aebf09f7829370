/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_vdi.c - maps of VDI files. Hostile files are refused with a reason.
 */
#include "engine/disk/vdi.h"

#include "tests/c/support/check.h"
#include "tests/c/support/map_fixture.h"

enum {
    BLOCK = 1 << 20,
    TABLE = 512,
    DATA = 4096,
    VERSION = 68,
    TYPE = 76,
    TABLE_PLACE = 340,
    DATA_PLACE = 344,
    SIZE = 368,
    BLOCK_SIZE = 376,
    EXTRA = 380,
    BLOCKS = 384,
    LINK = 424,
    PARENT = 440,
};

static void
put_block(size_t index, uint32_t number)
{
    map_put_le(TABLE + index * 4, number, 4);
}

/* A disk of three blocks and a sector. */
static void
begin(void)
{
    map_begin(DATA + 4 * BLOCK);
    map_put_le(64, 0xbeda107f, 4);
    map_put_le(VERSION, 0x10001, 4);
    map_put_le(TYPE, 1, 4);
    map_put_le(TABLE_PLACE, TABLE, 4);
    map_put_le(DATA_PLACE, DATA, 4);
    map_put_le(SIZE, 3 * BLOCK + 512, 8);
    map_put_le(BLOCK_SIZE, BLOCK, 4);
    map_put_le(BLOCKS, 4, 4);
    for (size_t i = 0; i < 4; i++) {
        put_block(i, UINT32_MAX);
    }
}

TEST(test_blocks)
{
    begin();
    put_block(0, 2);
    put_block(1, 3);
    put_block(2, UINT32_MAX - 1);
    put_block(3, 0);
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.format, GD_DISK_VDI);
    CHECK_INT(mapped.count, 3);
    CHECK_PIECE(0, GD_DISK_PLAIN, 2 * BLOCK, DATA + 2 * BLOCK);
    CHECK_PIECE(1, GD_DISK_ZEROS, BLOCK, 0);
    CHECK_PIECE(2, GD_DISK_PLAIN, 512, DATA);
    map_put_le(TYPE, 2, 4);
    CHECK(map_run() == GD_OK);
}

static void
check_field(uint64_t at, uint64_t value, size_t bytes, const char *words)
{
    begin();
    map_put_le(at, value, bytes);
    CHECK_REFUSED(words);
}

TEST(test_files_are_refused)
{
    check_field(VERSION, 0x10000, 4, "version 0x10000");
    check_field(TYPE, 3, 4, "type 3");
    check_field(TYPE, 4, 4, "type 4");
    check_field(LINK, 1, 1, "a parent");
    check_field(PARENT + 15, 1, 1, "a parent");
    check_field(SIZE, 0, 8, "empty");
    check_field(SIZE, 1000, 8, "whole sectors");
    check_field(SIZE, UINT64_C(1) << 63, 8, "too large");
    check_field(SIZE, UINT64_C(1) << 61, 8, "4 blocks");
    check_field(SIZE, 5 * BLOCK, 8, "4 blocks");
    check_field(BLOCK_SIZE, 0, 4, "blocks of 0 bytes");
    check_field(BLOCK_SIZE, BLOCK + 512, 4, "blocks of 1049088 bytes");
    check_field(BLOCK_SIZE, UINT32_C(1) << 31, 4, "2147483648 bytes");
    check_field(EXTRA, 512, 4, "blocks of");
    check_field(TABLE_PLACE, UINT32_MAX, 4, "beyond the end");
    check_field(TABLE, 4, 4, "beyond the end");
    check_field(TABLE, UINT32_MAX - 2, 4, "beyond the end");
}

/* The disk of 4 PiB needs a table of 16 GiB. */
TEST(test_a_large_table)
{
    begin();
    map_put_le(SIZE, UINT64_C(1) << 52, 8);
    map_put_le(BLOCKS, UINT32_MAX, 4);
    CHECK_REFUSED("4294967295 blocks");
    map_put_le(SIZE, (UINT64_C(1) << 52) - BLOCK, 8);
    CHECK_REFUSED("more pieces"); /* all entries are block 0 */
    memset(mapped.bytes + TABLE, 0xff, DATA + 4 * BLOCK - TABLE);
    CHECK_REFUSED("beyond the end");
}
