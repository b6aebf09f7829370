/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fslayout.c - superblocks and partition tables: their ranges are found,
 * and none of them, whatever it has, leads outside the disk or to endless
 * work.
 */
#include "engine/volume/fslayout.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/ext_fixture.h"
#include "tests/c/support/scratch_repository.h"

enum { SIZE = 4 << 20, MAX_READ = 17 << 20 };

static uint8_t disk[SIZE];
static uint64_t disk_size, bytes_read;
static bool unreadable;
static gd_fslayout rare, copies;
static struct {
    size_t count;
    gd_range ranges[2 * GD_FS_RANGES];
} found; /* both of them */

static bool
read_disk(void *arg, uint8_t *out, size_t length, uint64_t offset)
{
    (void)arg;
    bool inside = offset <= disk_size && length <= disk_size - offset;
    bytes_read += length;
    if (!CHECK(inside) || unreadable) {
        return false;
    }
    memset(out, 0, length);
    if (offset < SIZE) {
        uint64_t rest = SIZE - offset;
        memcpy(out, disk + offset, rest < length ? (size_t)rest : length);
    }
    return true;
}

/* Checks the rules of any result. */
static void
check_layout(const gd_fslayout *layout, uint64_t size)
{
    CHECK(layout->count <= GD_FS_RANGES);
    uint64_t end = 0;
    for (size_t i = 0; i < layout->count; i++) {
        const gd_range *r = &layout->ranges[i];
        CHECK(i == 0 ? r->offset >= end : r->offset > end);
        CHECK(r->length > 0 && r->offset < size &&
              r->length <= size - r->offset);
        end = r->offset + r->length;
    }
}

/* Adds a range behind those found so far. */
static void
join(const gd_range *next)
{
    gd_range *last =
        found.count == 0 ? NULL : &found.ranges[found.count - 1];
    uint64_t end = next->offset + next->length;
    if (last == NULL || last->offset + last->length < next->offset) {
        found.ranges[found.count++] = *next;
    } else if (last->offset + last->length < end) {
        last->length = end - last->offset;
    }
}

/* Finds ranges. */
static void
find(uint64_t size)
{
    disk_size = size;
    bytes_read = 0;
    gd_fslayout_find(read_disk, NULL, size, &rare, &copies);
    CHECK(bytes_read <= MAX_READ);
    check_layout(&rare, size);
    check_layout(&copies, size);
    found.count = 0;
    for (size_t a = 0, b = 0; a < rare.count || b < copies.count;) {
        bool first = b == copies.count ||
                     (a < rare.count &&
                      rare.ranges[a].offset < copies.ranges[b].offset);
        join(first ? &rare.ranges[a++] : &copies.ranges[b++]);
    }
}

/* Only these stay copies (I14). */
static void
check_copies(const gd_range *wanted, size_t count)
{
    CHECK_INT(copies.count, count);
    for (size_t i = 0; i < count && i < copies.count; i++) {
        CHECK_INT(copies.ranges[i].offset, wanted[i].offset);
        CHECK_INT(copies.ranges[i].length, wanted[i].length);
    }
}

static void
check_ranges(const gd_range *wanted, size_t count)
{
    CHECK_INT(found.count, count);
    for (size_t i = 0; i < count && i < found.count; i++) {
        CHECK_INT(found.ranges[i].offset, wanted[i].offset);
        CHECK_INT(found.ranges[i].length, wanted[i].length);
    }
}

#define CHECK_RANGES(...)                                                     \
    do {                                                                      \
        const gd_range wanted[] = {__VA_ARGS__};                              \
        check_ranges(wanted, sizeof wanted / sizeof wanted[0]);               \
    } while (0)

static void
big(uint8_t *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * (bytes - 1 - i)));
    }
}

/* ---- file systems ---- */

/* Makes a file system with blocks of 1024, so the first group begins with
 * block 1; two groups of 512 blocks, with descriptors of 64 bytes in block
 * 2. */
static uint8_t *
make_ext(uint8_t *at)
{
    memset(at, 0, 1 << 20);
    gd_put32(at + 2048 + 8, 10);
    gd_put32(at + 2048 + 64 + 8, 600);
    return ext_make(at, &(ext_fields){.blocks = 1024,
                                      .blocks_per_group = 512,
                                      .inodes_per_group = 64,
                                      .inode_size = 128,
                                      .incompat = 0x80,
                                      .desc_size = 64});
}

TEST(test_ext)
{
    memset(disk, 0, SIZE);
    uint8_t *sb = make_ext(disk);
    find(SIZE);
    CHECK_RANGES({1024, 2048}, {10 * 1024, 8192}, {513 * 1024, 2048},
                 {600 * 1024, 8192});
    check_copies((gd_range[]){{1024, 2048}, {513 * 1024, 2048}}, 2);
    /* The file system must fit. */
    find(1 << 20);
    CHECK_INT(found.count, 4);
    find((1 << 20) - 1);
    CHECK_INT(found.count, 0);
    /* The tables are in other places, and none is of 64 bits in descriptors of
     * 32. */
    gd_put32(sb + EXT_INCOMPAT, 0x80 | 0x10);
    find(SIZE);
    CHECK_RANGES({1024, 2048}, {513 * 1024, 2048});
    gd_put32(sb + EXT_INCOMPAT, 0);
    gd_put32(disk + 2048 + 32 + 8, 20);
    find(SIZE);
    CHECK_RANGES({1024, 2048}, {10 * 1024, 8192}, {20 * 1024, 8192},
                 {513 * 1024, 2048});
    /* A table beyond the end is left out. */
    gd_put32(disk + 2048 + 8, 1017);
    find(SIZE);
    CHECK_RANGES({1024, 2048}, {20 * 1024, 8192}, {513 * 1024, 2048});
}

enum { GROUPS = 2000, SPARSE = 1, SPARSE2 = 0x200, META_BG = 0x10 };

/* Makes a file system of blocks of 1024 without journal and inode tables, in
 * GROUPS groups of 256 blocks.  Its descriptors of 64 bytes need 125 blocks. */
static uint8_t *
make_groups(void)
{
    memset(disk, 0, SIZE);
    uint8_t *sb = make_ext(disk);
    memset(disk + 2048, 0, SIZE - 2048);
    gd_put32(sb + EXT_BLOCKS, 1 + GROUPS * 256);
    gd_put32(sb + EXT_BLOCKS_PER_GROUP, 256);
    return sb;
}

/* Checks that the next range, number *i, is of these blocks of a group. */
static void
check_copy(size_t *i, uint64_t group, uint64_t from, uint64_t count)
{
    if (CHECK(*i < found.count)) {
        const gd_range *r = &found.ranges[(*i)++];
        CHECK_INT(r->offset, (1 + group * 256 + from) * 1024);
        CHECK_INT(r->length, count * 1024);
    }
}

TEST(test_copies)
{
    static const uint64_t sparse[] = {0,   1,   3,   5,   7,  9,  25, 27, 49,
                                      81,  125, 243, 343, 625, 729};
    const uint64_t size = UINT64_C(1) << 40;
    uint8_t *sb = make_groups();
    size_t i = 0;
    gd_put32(sb + EXT_RO_COMPAT, SPARSE);
    find(size);
    for (size_t k = 0; k < sizeof sparse / sizeof sparse[0]; k++) {
        check_copy(&i, sparse[k], 0, 126);
    }
    CHECK_INT(found.count, i);
    /* Each group has one, of which not all are found. */
    gd_put32(sb + EXT_RO_COMPAT, 0);
    find(size);
    CHECK_INT(found.count, 64);
    i = 63;
    check_copy(&i, 63, 0, 126);
    /* Two backups at most, in any order, if their groups exist. */
    gd_put32(sb + EXT_RO_COMPAT, SPARSE);
    gd_put32(sb + EXT_COMPAT, SPARSE2);
    gd_put32(sb + EXT_BACKUP_GROUPS, GROUPS - 1);
    gd_put32(sb + EXT_BACKUP_GROUPS + 4, 2);
    find(size);
    CHECK_INT(found.count, 3);
    i = 1;
    check_copy(&i, 2, 0, 126);
    check_copy(&i, GROUPS - 1, 0, 126);
    gd_put32(sb + EXT_BACKUP_GROUPS, GROUPS);
    gd_put32(sb + EXT_BACKUP_GROUPS + 4, 0);
    find(size);
    CHECK_INT(found.count, 1);
}

/* Groups of 16 have a block of descriptors in their first, second and last
 * group, except in the first meta groups after a file system grew. */
TEST(test_copies_of_meta_groups)
{
    const uint64_t size = UINT64_C(1) << 40;
    uint8_t *sb = make_groups();
    gd_put32(sb + EXT_RO_COMPAT, SPARSE);
    gd_put32(sb + EXT_INCOMPAT, 0x80 | META_BG);
    gd_put32(sb + EXT_FIRST_META_BG, 1);
    find(size);
    size_t i = 0;
    check_copy(&i, 0, 0, 2);
    check_copy(&i, 1, 0, 2);
    check_copy(&i, 3, 0, 2);
    check_copy(&i, 5, 0, 2);
    check_copy(&i, 7, 0, 2);
    check_copy(&i, 9, 0, 2);
    check_copy(&i, 16, 0, 1); /* it has no superblock */
    check_copy(&i, 17, 0, 1);
    check_copy(&i, 25, 0, 1); /* but this one has no more */
    check_copy(&i, 27, 0, 1);
    check_copy(&i, 31, 0, 1);
    check_copy(&i, 32, 0, 1);
    check_copy(&i, 33, 0, 1);
    check_copy(&i, 47, 0, 1);
    check_copy(&i, 48, 0, 1);
    check_copy(&i, 49, 0, 2); /* both */
    /* There are 15 superblocks, and three blocks of descriptors for each of 64
     * meta groups.  In groups 49, 81 and 625 one is behind the other. */
    CHECK_INT(found.count, 15 + 64 * 3 - 3);
    /* More than there are: all are behind the superblocks. */
    gd_put32(sb + EXT_FIRST_META_BG, UINT32_MAX);
    find(size);
    CHECK_INT(found.count, 15);
    CHECK_INT(found.ranges[14].length, 126 * 1024);
}

/* The inode tables of one file system leave room for the copies of the next
 * one. */
TEST(test_copies_after_tables)
{
    uint8_t *sb = make_groups();
    gd_put32(sb + EXT_RO_COMPAT, SPARSE);
    for (uint32_t group = 0; group < GROUPS; group++) {
        gd_put32(disk + 2048 + 64 * group + 8, 1 + 256 * group + 130);
    }
    gd_put16(disk + 510, 0xaa55);
    disk[446 + 4] = 0x83;
    gd_put32(disk + 446 + 8, 4096);
    gd_put32(disk + 446 + 12, 2048);
    make_ext(disk + (2 << 20));
    find(UINT64_C(1) << 40);
    CHECK_INT(rare.count, 1024);
    CHECK_INT(copies.count, 15 + 2);
}

TEST(test_journal)
{
    memset(disk, 0, SIZE);
    uint8_t *sb = make_ext(disk), *node = sb + EXT_JOURNAL_EXTENTS;
    gd_put32(sb + EXT_INCOMPAT, 0x80 | 0x10);
    ext_add_journal(sb, 1);
    ext_put_extent(node, 0, 30, 100);
    sb[0xfd] = 0;
    find(SIZE);
    CHECK_INT(found.count, 2); /* there is no copy of the inode */
    sb[0xfd] = 1;
    find(SIZE);
    CHECK_RANGES({1024, 2048}, {100 * 1024, 30 * 1024}, {513 * 1024, 2048});
    /* One more level is followed, and not two. */
    uint8_t *leaf = disk + 300 * 1024;
    memcpy(leaf, node, 24);
    gd_put16(node + 6, 1);
    memset(node + 12, 0, 12);
    gd_put32(node + 12 + 4, 300);
    find(SIZE);
    CHECK_RANGES({1024, 2048}, {100 * 1024, 30 * 1024}, {513 * 1024, 2048});
    gd_put16(leaf + 6, 1);
    find(SIZE);
    CHECK_INT(found.count, 2);
    gd_put16(leaf + 6, 0);
    gd_put16(leaf + 2, 400); /* more entries than fit */
    find(SIZE);
    CHECK_INT(found.count, 2);
    gd_put16(node + 2, 5);
    find(SIZE);
    CHECK_INT(found.count, 2);
}

/* Makes three groups of 200 blocks, the last one shorter; the log of 20 blocks
 * is in the second one. */
static void
make_xfs(uint8_t *sb)
{
    memset(sb, 0, 512);
    memcpy(sb, "XFSB", 4);
    big(sb + 4, 4096, 4);
    big(sb + 8, 500, 8);
    big(sb + 48, (1 << 8) + 7, 8);
    big(sb + 84, 200, 4);
    big(sb + 88, 3, 4);
    big(sb + 96, 20, 4);
    big(sb + 102, 512, 2);
    sb[124] = 8;
}

TEST(test_xfs)
{
    memset(disk, 0, SIZE);
    make_xfs(disk);
    find(SIZE);
    CHECK_RANGES({0, 4096}, {200 * 4096, 4096}, {207 * 4096, 20 * 4096},
                 {400 * 4096, 4096});
    check_copies((gd_range[]){{0, 4096}, {200 * 4096, 4096},
                              {400 * 4096, 4096}}, 3);
    big(disk + 48, 0, 8); /* on another disk */
    find(SIZE);
    CHECK_RANGES({0, 4096}, {200 * 4096, 4096}, {400 * 4096, 4096});
    big(disk + 48, 7 << 8, 8); /* in a group that does not exist */
    find(SIZE);
    CHECK_INT(found.count, 3);
    find(500 * 4096 - 1);
    CHECK_INT(found.count, 0);
}

/* ---- partitions ---- */

TEST(test_mbr)
{
    memset(disk, 0, SIZE);
    gd_put16(disk + 510, 0xaa55);
    disk[446 + 16 + 4] = 0x83;
    gd_put32(disk + 446 + 16 + 8, 2048);
    gd_put32(disk + 446 + 16 + 12, 2048);
    make_ext(disk + (1 << 20));
    disk[446 + 32 + 4] = 0x83;
    gd_put32(disk + 446 + 32 + 8, 4096);
    gd_put32(disk + 446 + 32 + 12, 4096);
    make_xfs(disk + (2 << 20));
    find(SIZE);
    CHECK_INT(found.count, 8);
    CHECK_INT(found.ranges[0].offset, (1 << 20) + 1024);
    CHECK_INT(found.ranges[4].offset, 2 << 20);
    gd_put32(disk + 446 + 16 + 12, 2047); /* too short for it */
    gd_put32(disk + 446 + 32 + 12, 4097); /* behind the end */
    find(SIZE);
    CHECK_INT(found.count, 0);
    unreadable = true;
    find(SIZE);
    CHECK_INT(found.count, 0);
    unreadable = false;
}

TEST(test_gpt)
{
    memset(disk, 0, SIZE);
    gd_put16(disk + 510, 0xaa55);
    disk[446 + 4] = 0xee;
    memcpy(disk + 512, "EFI PART", 8);
    gd_put64(disk + 512 + 72, 2);
    gd_put32(disk + 512 + 80, 128);
    gd_put32(disk + 512 + 84, 128);
    uint8_t *entry = disk + 1024 + 5 * 128;
    gd_put64(entry + 32, 2048);
    gd_put64(entry + 40, 4095);
    make_ext(disk + (1 << 20));
    find(SIZE);
    CHECK_INT(found.count, 4);
    CHECK_INT(found.ranges[0].offset, (1 << 20) + 1024);
    gd_put64(entry + 40, UINT64_MAX);
    find(SIZE);
    CHECK_INT(found.count, 0);
    gd_put64(disk + 512 + 72, UINT64_MAX / 512 + 3);
    find(SIZE);
    CHECK_INT(found.count, 0);
}

/* ---- look-ups ---- */

TEST(test_next)
{
    rare = (gd_fslayout){.count = 3,
                         .ranges = {{10, 5}, {20, 1}, {30, 10}}};
    static const struct {
        uint64_t at;
        int64_t offset;
    } cases[] = {{0, 10},  {10, 10}, {14, 10}, {15, 20}, {20, 20},
                 {21, 30}, {39, 30}, {40, -1}, {UINT64_MAX, -1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const gd_range *r = gd_fslayout_next(&rare, cases[i].at);
        CHECK_INT(r == NULL ? -1 : (int64_t)r->offset, cases[i].offset);
    }
    rare.count = 0;
    CHECK(gd_fslayout_next(&rare, 0) == NULL);
}

/* ---- hostile disks ---- */

/* All used fields have random values, on disks of any size. */
TEST(test_any_numbers)
{
    uint64_t dice = 1;
    for (int round = 0; round < 20000 / SWEEP_STRIDE; round++) {
        static const size_t places[] = {0, 1024, 1024 + 0x10c, 2048, 446, 512,
                                        1 << 20, (1 << 20) + 1024};
        if (round % 50 == 0) {
            memset(disk, 0, SIZE);
            make_ext(disk);
            make_ext(disk + (1 << 20));
            make_xfs(disk + ((round / 50 % 2) << 20));
            gd_put16(disk + 510, 0xaa55);
            disk[446 + 4] = round / 100 % 2 == 0 ? 0x83 : 0xee;
            gd_put32(disk + 446 + 8, 2048);
            gd_put32(disk + 446 + 12, 4096);
            memcpy(disk + 512, "EFI PART", 8);
        }
        size_t at = places[next_random(&dice) % 8] + next_random(&dice) % 300;
        uint64_t value = next_random(&dice) >> next_random(&dice) % 64;
        memcpy(disk + at, &value, 1 + next_random(&dice) % 8);
        uint64_t size = round % 3 == 0 ? next_random(&dice) % SIZE
                        : round % 3 == 1 ? SIZE
                                         : UINT64_C(1) << 46;
        find(size);
    }
}

/* With the most possible groups and partitions, the work is bounded. */
TEST(test_large_numbers)
{
    memset(disk, 0, SIZE);
    uint8_t *sb = make_ext(disk);
    gd_put32(sb + EXT_BLOCKS, UINT32_MAX);
    gd_put32(sb + EXT_BLOCKS_HIGH, 7);
    gd_put32(sb + EXT_BLOCKS_PER_GROUP, 1);
    find(UINT64_C(1) << 46);
    CHECK(bytes_read > MAX_READ / 2); /* zeros have no ranges */
    for (uint32_t i = 0; i < 40000; i++) {
        gd_put32(disk + 2048 + 64 * i + 8, 100000 + 20 * i);
    }
    find(UINT64_C(1) << 46);
    CHECK_INT(found.count, 1); /* all are among the descriptors */
    CHECK(bytes_read < MAX_READ / 2);
}
