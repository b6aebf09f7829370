/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_qcow2.c - maps of qcow2 files. Hostile files are refused with a reason,
 * and take no more time than a pass over the file.
 */
#include "engine/disk/qcow2.h"

#include "tests/c/support/check.h"
#include "tests/c/support/map_fixture.h"

enum {
    CLUSTER = 64 << 10,
    L1 = CLUSTER,
    L2 = 2 * CLUSTER,
    DATA = 3 * CLUSTER,
    END = 20 * CLUSTER,
    VERSION = 4,
    BACKING = 8,
    BITS = 20,
    SIZE = 24,
    CRYPT = 32,
    L1_ENTRIES = 36,
    L1_PLACE = 40,
    FEATURES = 72,
    HEADER_LENGTH = 100,
    COMPRESSION_TYPE = 104,
};

#define COPIED (UINT64_C(1) << 63)
#define COMPRESSED (UINT64_C(1) << 62)

/* A file of version 3, with a disk of ten clusters of 64 KiB. */
static void
begin(void)
{
    map_begin(END);
    memcpy(mapped.bytes, "QFI\xfb", 4);
    map_put_be(VERSION, 3, 4);
    map_put_be(BITS, 16, 4);
    map_put_be(SIZE, 10 * CLUSTER, 8);
    map_put_be(L1_ENTRIES, 1, 4);
    map_put_be(L1_PLACE, L1, 8);
    map_put_be(96, 4, 4);
    map_put_be(HEADER_LENGTH, 112, 4);
    map_put_be(L1, L2 | COPIED, 8);
}

static void
put_l2(size_t index, uint64_t entry)
{
    map_put_be(L2 + index * 8, entry, 8);
}

/* A stream at this place that ends within so many sectors. */
static uint64_t
compressed(uint64_t place, uint64_t sectors)
{
    return COMPRESSED | (sectors - 1) << 54 | place;
}

TEST(test_clusters)
{
    begin();
    put_l2(0, DATA | COPIED);
    put_l2(1, (DATA + CLUSTER) | COPIED);
    put_l2(2, DATA);
    put_l2(3, 1);
    put_l2(4, (DATA + 5 * CLUSTER) | COPIED | 1);
    put_l2(6, compressed(DATA + 3 * CLUSTER + 100, 3));
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.format, GD_DISK_QCOW2);
    CHECK_INT(mapped.disk_size, 10 * CLUSTER);
    CHECK_INT(mapped.count, 6);
    CHECK_PIECE(0, GD_DISK_PLAIN, 2 * CLUSTER, DATA);
    CHECK_PIECE(1, GD_DISK_PLAIN, CLUSTER, DATA);
    CHECK_PIECE(2, GD_DISK_ZEROS, 2 * CLUSTER, 0);
    CHECK_PIECE(3, GD_DISK_UNALLOCATED, CLUSTER, 0);
    CHECK_PIECE(4, GD_DISK_DEFLATED, CLUSTER, DATA + 3 * CLUSTER + 100);
    CHECK_INT(mapped.pieces[4].room, 3 * 512 - 100);
    CHECK_INT(mapped.pieces[4].max_plain, CLUSTER);
    CHECK_PIECE(5, GD_DISK_UNALLOCATED, 3 * CLUSTER, 0);
}

TEST(test_the_end_of_the_disk_is_amid_a_cluster)
{
    begin();
    map_put_be(SIZE, CLUSTER + 512, 8);
    put_l2(0, DATA);
    put_l2(1, compressed(END - 700, 4));
    put_l2(2, UINT64_C(0xffffffff)); /* nobody needs it */
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.count, 2);
    CHECK_PIECE(1, GD_DISK_DEFLATED, 512, END - 700);
    CHECK_INT(mapped.pieces[1].room, 700);
    CHECK_INT(mapped.pieces[1].min_plain, CLUSTER);
}

TEST(test_version_2)
{
    begin();
    map_put_be(VERSION, 2, 4);
    map_put_be(FEATURES, 0xff, 8); /* no header of version 2 is so long */
    put_l2(0, DATA | COPIED);
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.count, 2);
    put_l2(0, DATA | COPIED | 1);
    CHECK_REFUSED("is not valid");
}

TEST(test_extended_entries)
{
    begin();
    map_put_be(FEATURES, 16, 8);
    map_put_be(L2, DATA | COPIED, 8);
    map_put_be(L2 + 8, UINT64_C(0x80000000) << 32 | 0x3, 8);
    map_put_be(L2 + 16, compressed(DATA + CLUSTER, 1), 8);
    map_put_be(L2 + 32, 0, 8);
    map_put_be(L2 + 40, UINT64_C(1) << 32, 8);
    REQUIRE(map_run() == GD_OK);
    CHECK_PIECE(0, GD_DISK_PLAIN, 4096, DATA);
    CHECK_PIECE(1, GD_DISK_UNALLOCATED, 29 * 2048, 0);
    CHECK_PIECE(2, GD_DISK_ZEROS, 2048, 0);
    CHECK_PIECE(3, GD_DISK_DEFLATED, CLUSTER, DATA + CLUSTER);
    CHECK_PIECE(4, GD_DISK_ZEROS, 2048, 0);
    map_put_be(L2 + 8, UINT64_C(1) << 32 | 1, 8);
    CHECK_REFUSED("is not valid"); /* zeros and bytes at once */
    map_put_be(L2 + 8, 1, 8);
    map_put_be(L2, COPIED, 8);
    CHECK_REFUSED("is not valid"); /* bytes, but no place */
    map_put_be(L2, DATA, 8);
    map_put_be(L2 + 24, 1, 8);
    CHECK_REFUSED("is not valid"); /* compressed, with subclusters */
    begin();
    map_put_be(FEATURES, 16, 8);
    map_put_be(BITS, 13, 4);
    CHECK_REFUSED("subclusters are smaller than sectors");
}

TEST(test_zstd)
{
    begin();
    map_put_be(FEATURES, 8, 8);
    map_put_be(COMPRESSION_TYPE, 1, 1);
    put_l2(0, compressed(DATA, 2));
    REQUIRE(map_run() == GD_OK);
    CHECK_PIECE(0, GD_DISK_ZSTD, CLUSTER, DATA);
    map_put_be(FEATURES, 0, 8);
    CHECK_REFUSED("compression type");
    map_put_be(FEATURES, 8, 8);
    map_put_be(COMPRESSION_TYPE, 2, 1);
    CHECK_REFUSED("compression type, 2,");
}

static void
check_field(uint64_t at, uint64_t value, size_t bytes, const char *words)
{
    begin();
    map_put_be(at, value, bytes);
    CHECK_REFUSED(words);
}

TEST(test_headers_are_refused)
{
    check_field(VERSION, 1, 4, "qcow2 of version 1");
    check_field(VERSION, 4, 4, "qcow2 of version 4");
    check_field(BACKING, 200, 8, "backing file");
    check_field(CRYPT, 1, 4, "encrypted");
    check_field(CRYPT, 2, 4, "encrypted");
    check_field(BITS, 8, 4, "2^8 bytes");
    check_field(BITS, 22, 4, "2^22 bytes");
    check_field(BITS, UINT32_MAX, 4, "2^4294967295 bytes");
    check_field(SIZE, 0, 8, "empty");
    check_field(SIZE, 1000, 8, "whole sectors");
    check_field(SIZE, UINT64_C(1) << 63, 8, "too large");
    check_field(SIZE, UINT64_C(1) << 62, 8, "the disk needs 8589934592");
    check_field(FEATURES, 1, 8, "dirty");
    check_field(FEATURES, 2, 8, "corrupt");
    check_field(FEATURES, 4, 8, "another file");
    check_field(FEATURES, 32, 8, "0x20");
    check_field(FEATURES, UINT64_C(1) << 63, 8, "0x8000000000000000");
    check_field(HEADER_LENGTH, 96, 4, "96 bytes");
    check_field(HEADER_LENGTH, 106, 4, "106 bytes");
    check_field(HEADER_LENGTH, 2 * CLUSTER, 4, "131072 bytes");
    check_field(L1_ENTRIES, 0, 4, "0 entries");
    check_field(L1_ENTRIES, (32 << 20) / 8 + 1, 4, "4194305 entries");
    check_field(L1_PLACE, L1 + 8, 8, "amid a cluster");
    check_field(L1_PLACE, END, 8, "beyond the end");
    check_field(L1_PLACE, UINT64_MAX - CLUSTER + 1, 8, "beyond the end");
}

TEST(test_tables_are_refused)
{
    check_field(L1, L2 | COPIED | 1, 8, "is not valid");
    check_field(L1, L2 | UINT64_C(1) << 56, 8, "is not valid");
    check_field(L1, L2 | COMPRESSED, 8, "is not valid");
    check_field(L1, L2 + 512, 8, "is not valid");
    check_field(L1, END, 8, "beyond the end");
    check_field(L1, UINT64_C(0x00ffffffffff0000), 8, "beyond the end");
    check_field(L2, DATA + 512, 8, "is not valid");
    check_field(L2, DATA | 2, 8, "is not valid");
    check_field(L2, DATA | UINT64_C(1) << 61, 8, "is not valid");
    check_field(L2, END, 8, "beyond the end");
    check_field(L2, UINT64_C(0x00ffffffffff0000), 8, "beyond the end");
    check_field(L2, compressed(DATA, 1) | COPIED, 8, "is not valid");
    check_field(L2, compressed(0, 1), 8, "is not valid");
    check_field(L2, compressed(END, 1), 8, "beyond the end");
    check_field(L2, compressed((UINT64_C(1) << 54) - 1, 256), 8,
                "beyond the end");
}

/* Tables and clusters may overlap: the disk is what the tables say. */
TEST(test_overlaps_are_taken_as_they_are)
{
    begin();
    put_l2(0, L2);
    put_l2(1, L1);
    put_l2(2, compressed(100, 200));
    put_l2(3, compressed(101, 200));
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.count, 5);
    map_put_be(L1_PLACE, L2, 8); /* the table is its own entry's table */
    put_l2(0, L2);
    CHECK(map_run() == GD_OK);
}

/* 4,194,304 entries of the first level name one table: 2 PiB, in 32 MiB. */
TEST(test_a_table_with_many_names)
{
    enum { ENTRIES = (MAP_FILE - L1) / 8 };
    begin();
    map_put_be(SIZE, (uint64_t)ENTRIES * 512 << 20, 8);
    map_put_be(L1_ENTRIES, ENTRIES, 4);
    mapped.size = 32 << 20;
    for (size_t i = 0; i < ENTRIES; i++) {
        map_put_be(L1 + i * 8, mapped.size - CLUSTER, 8);
    }
    CHECK_REFUSED("several places name one table");
}

/* Each entry of a table takes more in a recipe than in the file. */
TEST(test_a_cluster_with_many_names)
{
    enum { BIG = 2 << 20, TABLE = 2 * BIG };
    begin();
    mapped.size = 4 * BIG; /* the memory has the first entries of the table */
    map_put_be(BITS, 21, 4);
    map_put_be(SIZE, UINT64_C(1) << 39, 8);
    map_put_be(L1_PLACE, BIG, 8);
    map_put_be(BIG, TABLE - BIG, 8); /* the first table is the second, too */
    for (size_t i = 1; i < BIG / 8; i++) {
        map_put_be(BIG + i * 8, i % 2 == 0 ? 0 : TABLE - BIG, 8);
    }
    CHECK_REFUSED("more pieces");
    CHECK(mapped.count <= 4 * BIG / 256 + 1024);
}

TEST(test_the_largest_disk)
{
    begin();
    map_put_be(BITS, 21, 4);
    map_put_be(SIZE, UINT64_C(1) << 61, 8);
    map_put_be(L1_ENTRIES, 4 << 20, 4);
    map_put_be(L1_PLACE, 2 << 20, 8);
    mapped.size = 40 << 20;
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.count, 1);
    CHECK_PIECE(0, GD_DISK_UNALLOCATED, UINT64_C(1) << 61, 0);
}

TEST(test_a_file_that_ends_anywhere)
{
    begin();
    for (size_t i = 0; i < 10; i++) {
        put_l2(i, (i == 9 ? END - CLUSTER : DATA + i * CLUSTER) | COPIED);
    }
    CHECK(map_run() == GD_OK);
    for (uint64_t size = 0; size < END; size += size < 200 ? 1 : 4099) {
        mapped.size = size;
        gd_status status = map_run();
        CHECK(size < 512 ? status == GD_OK && mapped.format == GD_DISK_RAW
                         : status == GD_INVALID);
    }
}

TEST(test_a_file_that_cannot_be_read)
{
    begin();
    mapped.unreadable = true;
    CHECK_INT(map_run(), GD_IO);
}
