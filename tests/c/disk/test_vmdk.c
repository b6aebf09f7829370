/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_vmdk.c - maps of VMDK files. Hostile files are refused with a reason.
 */
#include "engine/disk/vmdk.h"

#include "tests/c/support/check.h"
#include "tests/c/support/map_fixture.h"

enum {
    SECTOR = 512,
    GRAIN = 64 << 10,
    DESCRIPTOR = 1, /* in sectors, as the next ones */
    DIRECTORY = 21,
    TABLE = 22,
    DATA = 128,
    END = 1024,
    VERSION = 4,
    FLAGS = 8,
    CAPACITY = 12,
    GRAIN_SECTORS = 20,
    DESCRIPTOR_PLACE = 28,
    DESCRIPTOR_SIZE = 36,
    ENTRIES = 44,
    DIRECTORY_PLACE = 56,
    UNCLEAN = 72,
    COMPRESSION = 77,
};

#define TEXT                                                                  \
    "# Disk DescriptorFile\nversion=1\nparentCID=ffffffff\n"                  \
    "createType=\"%s\"\nRW 320 SPARSE \"x.vmdk\"\n%s"

static void
put_descriptor(const char *kind, const char *more)
{
    memset(mapped.bytes + DESCRIPTOR * SECTOR, 0, 20 * SECTOR);
    snprintf((char *)mapped.bytes + DESCRIPTOR * SECTOR, 20 * SECTOR, TEXT,
             kind, more);
}

static void
put_header(uint64_t at)
{
    memcpy(mapped.bytes + at, "KDMV", 4);
    map_put_le(at + VERSION, 1, 4);
    map_put_le(at + FLAGS, 3, 4);
    map_put_le(at + CAPACITY, 320, 8); /* two grains and a half */
    map_put_le(at + GRAIN_SECTORS, 128, 8);
    map_put_le(at + DESCRIPTOR_PLACE, DESCRIPTOR, 8);
    map_put_le(at + DESCRIPTOR_SIZE, 20, 8);
    map_put_le(at + ENTRIES, 512, 4);
    map_put_le(at + DIRECTORY_PLACE, DIRECTORY, 8);
}

static void
begin(void)
{
    map_begin(END * SECTOR);
    put_header(0);
    put_descriptor("monolithicSparse", "");
    map_put_le(DIRECTORY * SECTOR, TABLE, 4);
}

static void
put_grain(size_t index, uint64_t sector)
{
    map_put_le(TABLE * SECTOR + index * 4, sector, 4);
}

static void
put_stream(size_t index, uint64_t sector, uint32_t length)
{
    put_grain(index, sector);
    map_put_le(sector * SECTOR, index * 128, 8);
    map_put_le(sector * SECTOR + 8, length, 4);
}

static void
begin_compressed(void)
{
    begin();
    map_put_le(FLAGS, 0x30005, 4);
    map_put_le(COMPRESSION, 1, 2);
    put_descriptor("streamOptimized", "");
}

TEST(test_grains)
{
    begin();
    put_grain(0, DATA);
    put_grain(2, DATA + 128);
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.format, GD_DISK_VMDK);
    CHECK_INT(mapped.disk_size, 320 * SECTOR);
    CHECK_INT(mapped.count, 3);
    CHECK_PIECE(0, GD_DISK_PLAIN, GRAIN, DATA * SECTOR);
    CHECK_PIECE(1, GD_DISK_UNALLOCATED, GRAIN, 0);
    CHECK_PIECE(2, GD_DISK_PLAIN, GRAIN / 2, (DATA + 128) * SECTOR);
    put_grain(1, 1);
    REQUIRE(map_run() == GD_OK); /* the flag is missing: sector 1 */
    CHECK_PIECE(1, GD_DISK_PLAIN, GRAIN, SECTOR);
    map_put_le(FLAGS, 7, 4);
    REQUIRE(map_run() == GD_OK);
    CHECK_PIECE(1, GD_DISK_ZEROS, GRAIN, 0);
    map_put_le(DIRECTORY * SECTOR, 0, 4);
    REQUIRE(map_run() == GD_OK);
    CHECK_PIECE(0, GD_DISK_UNALLOCATED, 320 * SECTOR, 0);
}

TEST(test_compressed_grains)
{
    begin_compressed();
    put_stream(0, DATA, 1000);
    put_stream(2, DATA + 3, 77);
    REQUIRE(map_run() == GD_OK);
    CHECK_PIECE(0, GD_DISK_ZLIB, GRAIN, DATA * SECTOR + 12);
    CHECK_INT(mapped.pieces[0].room, 1000);
    CHECK_INT(mapped.pieces[0].min_plain, GRAIN);
    CHECK_PIECE(2, GD_DISK_ZLIB, GRAIN / 2, (DATA + 3) * SECTOR + 12);
    CHECK_INT(mapped.pieces[2].min_plain, GRAIN / 2);
    CHECK_INT(mapped.pieces[2].max_plain, GRAIN);
    put_grain(2, DATA);
    CHECK_REFUSED("of another place"); /* two entries name one grain */
    put_stream(2, DATA + 3, 0);
    CHECK_REFUSED("beyond the end");
    put_stream(2, DATA + 3, UINT32_MAX);
    CHECK_REFUSED("beyond the end");
}

static void
put_footer(void)
{
    uint64_t at = (END - 3) * SECTOR;
    map_put_le(at + 12, 3, 4);
    memcpy(mapped.bytes + at + SECTOR, mapped.bytes, SECTOR);
    map_put_le(DIRECTORY_PLACE, UINT64_MAX, 8);
}

TEST(test_the_directory_is_at_the_end)
{
    begin_compressed();
    put_stream(0, DATA, 1000);
    put_footer();
    REQUIRE(map_run() == GD_OK);
    CHECK_INT(mapped.count, 2);
    map_put_le((END - 2) * SECTOR + CAPACITY, 321, 8);
    CHECK_REFUSED("not the footer"); /* of another disk */
    map_put_le((END - 2) * SECTOR + CAPACITY, 320, 8);
    map_put_le((END - 2) * SECTOR + DIRECTORY_PLACE, UINT64_MAX, 8);
    CHECK_REFUSED("not the footer"); /* its end is at the end, too */
    put_footer();
    map_put_le((END - 3) * SECTOR + 12, 0, 4);
    CHECK_REFUSED("not the footer");
    mapped.size -= 1;
    CHECK_REFUSED("amid a sector");
    mapped.size = 2 * SECTOR;
    CHECK_REFUSED("amid a sector");
}

static void
check_field(uint64_t at, uint64_t value, size_t bytes, const char *words)
{
    begin();
    put_grain(0, DATA);
    map_put_le(at, value, bytes);
    CHECK_REFUSED(words);
}

TEST(test_headers_are_refused)
{
    check_field(VERSION, 0, 4, "version 0");
    check_field(VERSION, 4, 4, "version 4");
    check_field(FLAGS, 0x13, 4, "0x13");
    check_field(FLAGS, 0x10003, 4, "0x10003");
    check_field(FLAGS, 0x30003, 4, "compression, 0");
    check_field(COMPRESSION, 1, 2, "compression, 1");
    check_field(UNCLEAN, 1, 1, "not closed");
    check_field(CAPACITY, 0, 8, "empty");
    check_field(CAPACITY, UINT64_C(1) << 55, 8, "too large");
    check_field(CAPACITY, UINT64_MAX, 8, "too large");
    check_field(CAPACITY, UINT64_C(1) << 53, 8, "beyond the end");
    check_field(GRAIN_SECTORS, 0, 8, "0 sectors");
    check_field(GRAIN_SECTORS, 100, 8, "100 sectors");
    check_field(GRAIN_SECTORS, 4096, 8, "4096 sectors");
    check_field(GRAIN_SECTORS, UINT64_C(1) << 63, 8, "sectors");
    check_field(ENTRIES, 1024, 4, "1024 entries");
    check_field(DIRECTORY_PLACE, UINT64_MAX - 1, 8, "beyond the end");
    check_field(DIRECTORY_PLACE, END, 8, "beyond the end");
    check_field(DESCRIPTOR_PLACE, 0, 8, "descriptor has 20");
    check_field(DESCRIPTOR_PLACE, UINT64_C(1) << 60, 8, "beyond the end");
    check_field(DESCRIPTOR_SIZE, 0, 8, "descriptor has 0");
    check_field(DESCRIPTOR_SIZE, UINT64_C(1) << 55, 8, "descriptor has");
    check_field(DIRECTORY * SECTOR, END, 4, "beyond the end");
    check_field(DIRECTORY * SECTOR, UINT32_MAX, 4, "beyond the end");
    check_field(TABLE * SECTOR, END, 4, "beyond the end");
    check_field(TABLE * SECTOR, END - 127, 4, "beyond the end");
}

TEST(test_descriptors_are_refused)
{
    static const char *const kinds[] = {
        "", "monolithicFlat", "twoGbMaxExtentSparse", "custom",
        "monolithicSparseX", "vmfsSparse"};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        begin();
        put_descriptor(kinds[i], "");
        CHECK_REFUSED("kind that nothing here knows");
    }
    static const char *const lines[] = {
        "RW 4 SPARSE \"/etc/shadow\"\n", "RDONLY 4 FLAT \"/etc/shadow\" 0\n",
        "parentFileNameHint=\"/etc/shadow\"\n", "NOACCESS 4 ZERO"};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        begin();
        put_descriptor("monolithicSparse", lines[i]);
        CHECK_REFUSED("other files");
    }
    begin();
    memset(mapped.bytes + DESCRIPTOR * SECTOR, 'a', 20 * SECTOR);
    CHECK_REFUSED("kind that nothing here knows");
    put_descriptor("monolithicSparse", "");
    strstr((char *)mapped.bytes + SECTOR, "ffffffff")[0] = '0';
    CHECK_REFUSED("a parent");
}

/* All entries of a directory name one table. */
TEST(test_a_table_with_many_names)
{
    begin();
    map_put_le(CAPACITY, UINT64_C(10000) * 512 * 128, 8);
    map_put_le(DIRECTORY_PLACE, 200, 8);
    for (size_t i = 0; i < 10000; i++) {
        map_put_le(200 * SECTOR + i * 4, TABLE, 4);
    }
    CHECK_REFUSED("several places name one table");
}

TEST(test_a_file_that_ends_anywhere)
{
    begin();
    put_grain(0, DATA);
    put_grain(1, END - 256);
    put_grain(2, END - 128);
    REQUIRE(map_run() == GD_OK);
    for (uint64_t size = SECTOR; size < (END - 64) * SECTOR; size += 509) {
        mapped.size = size;
        CHECK_INT(map_run(), GD_INVALID);
    }
}
