/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fslayout.c - see fslayout.h.
 *
 * Written after the descriptions of the formats: "Data Structures and
 * Algorithms" of ext4 in the kernel's documentation, and the "XFS Algorithms &
 * Data Structures" of the XFS project.
 */
#include "engine/volume/fslayout.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/coding.h"

enum {
    SECTOR = 512,
    MAX_READ = 16 << 20, /* bytes of one search */
    PIECE = 4096,         /* read at once, at most */
    MBR_ENTRIES = 4,
    MBR_PROTECTIVE = 0xee, /* the type that stands for a GPT */
    GPT_ENTRIES = 128,
    GPT_ENTRY = 128,
    MAX_BEFORE_TABLES = 1024, /* with so many ranges, no inode table is added:
                               * later file systems have journals, too */
    EXT_MAX_COPIES = 64, /* of the superblock, and of blocks of descriptors
                          * with meta_bg: of one file system */
    EXT_MAGIC = 0xef53,
    EXT_HAS_JOURNAL = 4,   /* compatible features */
    EXT_SPARSE2 = 0x200,
    EXT_SPARSE = 1,        /* feature without which it can be read */
    EXT_META_BG = 0x10,    /* incompatible features */
    EXT_64BIT = 0x80,
    EXTENT_MAGIC = 0xf30a,
    EXTENT = 12,
    MAX_EXTENT = 32768, /* longer ones are not initialised */
};

/* One search; and a place on the disk where a file system may be. */
typedef struct place {
    gd_fs_reader *read;
    void *arg;
    uint64_t *budget; /* bytes that may still be read */
    gd_fslayout *found;
    gd_fslayout *copies;
    uint64_t start, size;
} place;

/* Returns the same place, for finding copies. */
static place
copies_of(const place *p)
{
    place copies = *p;
    copies.found = p->copies;
    return copies;
}

static bool
get(const place *p, uint8_t *out, size_t length, uint64_t offset)
{
    if (offset > p->size || length > p->size - offset || length > *p->budget) {
        return false;
    }
    *p->budget -= length;
    return p->read(p->arg, out, length, p->start + offset);
}

static void
add(const place *p, uint64_t offset, uint64_t length)
{
    gd_fslayout *found = p->found;
    if (length > 0 && offset < p->size && length <= p->size - offset &&
        found->count < GD_FS_RANGES) {
        found->ranges[found->count++] = (gd_range){p->start + offset, length};
    }
}

static uint64_t
join32(uint32_t high, uint32_t low)
{
    return (uint64_t)high << 32 | low;
}

/* ---- ext2, ext3, ext4 ---- */

typedef struct ext {
    uint64_t block;  /* bytes of one */
    uint64_t blocks; /* of the file system, which lies within its place */
    uint64_t groups;
    uint32_t first, per_group, inodes_per_group, inode, descriptor;
    uint32_t compatible, read_only, features; /* these: incompatible ones */
    uint32_t first_meta; /* meta group of meta_bg */
    uint32_t backups[2]; /* groups with copies, with sparse_super2 */
} ext;

static bool
decode_ext(const uint8_t *sb, uint64_t size, ext *e)
{
    uint32_t log = gd_get32(sb + 0x18);
    if (gd_get16(sb + 0x38) != EXT_MAGIC || log > 6) {
        return false;
    }
    *e = (ext){.block = UINT64_C(1024) << log,
               .first = gd_get32(sb + 0x14),
               .per_group = gd_get32(sb + 0x20),
               .inodes_per_group = gd_get32(sb + 0x28),
               .inode = gd_get32(sb + 0x4c) == 0 ? 128 : gd_get16(sb + 0x58),
               .compatible = gd_get32(sb + 0x5c),
               .read_only = gd_get32(sb + 0x64),
               .features = gd_get32(sb + 0x60),
               .first_meta = gd_get32(sb + 0x104),
               .backups = {gd_get32(sb + 0x24c), gd_get32(sb + 0x250)}};
    bool large = (e->features & EXT_64BIT) != 0;
    e->blocks = join32(large ? gd_get32(sb + 0x150) : 0, gd_get32(sb + 4));
    e->descriptor = large ? gd_get16(sb + 0xfe) : 32;
    if (e->blocks <= e->first || e->blocks > size / e->block ||
        e->per_group == 0 || e->per_group > 8 * e->block) {
        return false;
    }
    e->groups = (e->blocks - e->first + e->per_group - 1) / e->per_group;
    return e->inodes_per_group > 0 && e->inodes_per_group <= 8 * e->block &&
           e->inode >= 128 && e->inode <= e->block &&
           (e->descriptor == 32 || e->descriptor == 64);
}

static void
add_blocks(const place *p, const ext *e, uint64_t from, uint64_t count)
{
    if (from < e->blocks && count <= e->blocks - from) {
        add(p, from * e->block, count * e->block);
    }
}

/* Adds blocks that the disk names.  None of them begins at the superblock, or
 * before it. */
static void
add_named(const place *p, const ext *e, uint64_t from, uint64_t count)
{
    if (from > e->first) {
        add_blocks(p, e, from, count);
    }
}

/* Returns the first group behind `group` that has a copy of the superblock; it
 * may be one that does not exist. */
static uint64_t
next_copy(const ext *e, uint64_t group)
{
    uint64_t next = UINT64_MAX;
    if ((e->compatible & EXT_SPARSE2) != 0) {
        for (int i = 0; i < 2; i++) {
            uint64_t backup = e->backups[i];
            next = backup > group && backup < next ? backup : next;
        }
        return next;
    }
    if ((e->read_only & EXT_SPARSE) == 0 || group == 0) {
        return group + 1;
    }
    for (unsigned base = 3; base <= 7; base += 2) {
        uint64_t power = base;
        while (power <= group) {
            power *= base;
        }
        next = power < next ? power : next;
    }
    return next;
}

/* Adds one block of descriptors with meta_bg: behind the superblock, if the
 * group has one.  A group that does not exist begins behind the last block. */
static void
add_descriptors(const place *p, const ext *e, uint64_t group)
{
    bool super = group == 0 || next_copy(e, group - 1) == group;
    add_blocks(p, e, e->first + group * e->per_group + super, 1);
}

/* Adds the copies of the superblock, with those of the descriptors behind them;
 * then the descriptors of meta groups, three copies each. */
static void
find_copies(const place *p, const ext *e)
{
    uint64_t size = e->block / e->descriptor; /* groups of a meta group */
    uint64_t end = (e->groups + size - 1) / size, old = end;
    if ((e->features & EXT_META_BG) != 0 && e->first_meta < end) {
        old = e->first_meta;
    }
    uint64_t group = 0;
    for (int i = 0; i < EXT_MAX_COPIES && group < e->groups; i++) {
        add_blocks(p, e, e->first + group * e->per_group,
                   1 + (group / size < old ? old : 0));
        group = next_copy(e, group);
    }
    for (uint64_t i = old; i < end && i - old < EXT_MAX_COPIES; i++) {
        add_descriptors(p, e, i * size);
        add_descriptors(p, e, i * size + 1);
        add_descriptors(p, e, i * size + size - 1);
    }
}

/* Adds the inode tables that the descriptors name. */
static void
find_inodes(const place *p, const ext *e)
{
    uint8_t piece[PIECE];
    uint64_t bytes = e->groups * e->descriptor;
    uint64_t table = (uint64_t)e->inodes_per_group * e->inode;
    for (uint64_t at = 0; at < bytes && p->found->count < MAX_BEFORE_TABLES;
         at += PIECE) {
        size_t n = bytes - at < PIECE ? (size_t)(bytes - at) : PIECE;
        if (!get(p, piece, n, (e->first + UINT64_C(1)) * e->block + at)) {
            return;
        }
        for (const uint8_t *d = piece;
             d < piece + n && p->found->count < MAX_BEFORE_TABLES;
             d += e->descriptor) {
            uint32_t high = e->descriptor == 64 ? gd_get32(d + 0x28) : 0;
            add_named(p, e, join32(high, gd_get32(d + 8)),
                      (table + e->block - 1) / e->block);
        }
    }
}

/* Adds the extents of a node, and those of the nodes that it names if `depth` is
 * 1, which is enough for any journal. */
static void
find_extents(const place *p, const ext *e, const uint8_t *node, size_t length,
             unsigned depth)
{
    uint8_t leaf[PIECE];
    size_t room = e->block < PIECE ? (size_t)e->block : PIECE;
    unsigned entries = gd_get16(node + 2), deep = gd_get16(node + 6);
    if (gd_get16(node) != EXTENT_MAGIC || deep > depth ||
        entries > length / EXTENT - 1) {
        return;
    }
    for (const uint8_t *x = node + EXTENT; entries > 0; entries--, x += EXTENT) {
        if (deep == 0) {
            unsigned count = gd_get16(x + 4);
            add_named(p, e, join32(gd_get16(x + 6), gd_get32(x + 8)),
                      count > MAX_EXTENT ? count - MAX_EXTENT : count);
        } else {
            uint64_t at = join32(gd_get16(x + 8), gd_get32(x + 4));
            if (at < e->blocks && get(p, leaf, room, at * e->block)) {
                find_extents(p, e, leaf, room, 0);
            }
        }
    }
}

static void
find_ext(const place *p)
{
    uint8_t sb[1024];
    ext e;
    if (!get(p, sb, sizeof sb, 1024) || !decode_ext(sb, p->size, &e)) {
        return;
    }
    const place copies = copies_of(p);
    find_copies(&copies, &e);
    /* The superblock has a copy of what the journal's inode has. */
    if ((e.compatible & EXT_HAS_JOURNAL) != 0 && sb[0xfd] == 1) {
        find_extents(p, &e, sb + 0x10c, 60, 1);
    }
    if ((e.features & EXT_META_BG) == 0) {
        find_inodes(p, &e);
    }
}

/* ---- XFS ---- */

static uint32_t
big32(const uint8_t *in)
{
    return __builtin_bswap32(gd_get32(in));
}

static uint64_t
big64(const uint8_t *in)
{
    return __builtin_bswap64(gd_get64(in));
}

static void
find_xfs(const place *p)
{
    uint8_t sb[SECTOR];
    if (!get(p, sb, sizeof sb, 0) || memcmp(sb, "XFSB", 4) != 0) {
        return;
    }
    uint64_t block = big32(sb + 4), blocks = big64(sb + 8);
    uint64_t log = big64(sb + 48);
    uint64_t group = big32(sb + 84), groups = big32(sb + 88);
    unsigned sector = (unsigned)sb[102] << 8 | sb[103], bits = sb[124];
    if (block < SECTOR || block > 65536 || blocks > p->size / block ||
        group == 0 || bits > 31 || groups > blocks / group + 1) {
        return;
    }
    const place copies = copies_of(p);
    for (uint64_t i = 0; i < groups && i < GD_FS_RANGES; i++) {
        add(&copies, i * group * block,
            (4 * sector + block - 1) / block * block);
    }
    uint64_t at = (log >> bits) < groups
                      ? (log >> bits) * group + (log & ((1U << bits) - 1))
                      : blocks;
    if (log != 0 && at < blocks) {
        add(p, at * block, big32(sb + 96) * block);
    }
}

/* ---- partitions ---- */

static void
find_partition(const place *disk, uint64_t first, uint64_t sectors)
{
    uint64_t all = disk->size / SECTOR;
    if (first == 0 || first >= all || sectors > all - first) {
        return;
    }
    place p = *disk;
    p.start = first * SECTOR;
    p.size = sectors * SECTOR;
    find_ext(&p);
    find_xfs(&p);
}

static void
find_gpt(const place *disk)
{
    uint8_t head[SECTOR], entry[GPT_ENTRY];
    if (!get(disk, head, sizeof head, SECTOR) ||
        memcmp(head, "EFI PART", 8) != 0) {
        return;
    }
    uint64_t table = gd_get64(head + 72);
    uint32_t count = gd_get32(head + 80), size = gd_get32(head + 84);
    if (table >= disk->size / SECTOR || size < GPT_ENTRY || size > PIECE) {
        return;
    }
    for (uint32_t i = 0; i < count && i < GPT_ENTRIES; i++) {
        if (!get(disk, entry, sizeof entry,
                 table * SECTOR + (uint64_t)i * size)) {
            return;
        }
        uint64_t first = gd_get64(entry + 32), last = gd_get64(entry + 40);
        if (last >= first && last != UINT64_MAX) {
            find_partition(disk, first, last - first + 1);
        }
    }
}

static void
find_partitions(const place *disk)
{
    uint8_t mbr[SECTOR];
    if (!get(disk, mbr, sizeof mbr, 0) || gd_get16(mbr + 510) != 0xaa55) {
        return;
    }
    for (int i = 0; i < MBR_ENTRIES; i++) {
        const uint8_t *entry = mbr + 446 + 16 * i;
        if (entry[4] == MBR_PROTECTIVE) {
            find_gpt(disk);
            return;
        }
        if (entry[4] != 0) {
            find_partition(disk, gd_get32(entry + 8), gd_get32(entry + 12));
        }
    }
}

/* ---- the whole ---- */

static int
by_offset(const void *a, const void *b)
{
    uint64_t x = ((const gd_range *)a)->offset;
    uint64_t y = ((const gd_range *)b)->offset;
    return x < y ? -1 : x > y;
}

static void
sort_and_join(gd_fslayout *found)
{
    size_t n = 0;
    qsort(found->ranges, found->count, sizeof *found->ranges, by_offset);
    for (size_t i = 0; i < found->count; i++) {
        gd_range next = found->ranges[i];
        gd_range *last = n == 0 ? NULL : &found->ranges[n - 1];
        if (last == NULL || next.offset > last->offset + last->length) {
            found->ranges[n++] = next;
        } else if (next.offset + next.length > last->offset + last->length) {
            last->length = next.offset + next.length - last->offset;
        }
    }
    found->count = n;
}

void
gd_fslayout_find(gd_fs_reader *read, void *arg, uint64_t size,
                 gd_fslayout *found, gd_fslayout *copies)
{
    uint64_t budget = MAX_READ;
    const place disk = {.read = read,
                        .arg = arg,
                        .budget = &budget,
                        .found = found,
                        .copies = copies,
                        .size = size};
    found->count = copies->count = 0;
    find_ext(&disk);
    find_xfs(&disk);
    find_partitions(&disk);
    sort_and_join(found);
    sort_and_join(copies);
}

const gd_range *
gd_fslayout_next(const gd_fslayout *layout, uint64_t at)
{
    size_t low = 0, high = layout->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        const gd_range *range = &layout->ranges[middle];
        if (range->offset + range->length > at) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low < layout->count ? &layout->ranges[low] : NULL;
}
