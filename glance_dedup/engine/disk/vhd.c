/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhd.c - see vhd.h.
 *
 * Written after Microsoft's "Virtual Hard Disk Image Format Specification" 1.0.
 * Integers are big-endian. The last 512 bytes are the footer. The file of a fixed
 * disk is the disk, followed by it. A dynamic one begins with a copy of it, which
 * leads to a header, and this to a table of blocks. A block has a bitmap in front
 * of its bytes; as in QEMU, the bitmap of a dynamic disk does not matter, since
 * sectors that were not written are zeros.
 *
 * The footer has the size twice, in bytes and as a geometry. QEMU takes the
 * geometry unless it knows that the program which made the file means the bytes.
 * Where they differ otherwise, the file is refused.
 */
#include "engine/disk/vhd.h"

#include <inttypes.h>
#include <string.h>

#include "engine/base/coding.h"

enum {
    FOOTER = 512,
    HEADER = 1024,
    TYPE_FIXED = 2,
    TYPE_DYNAMIC = 3,
    CHECKSUM_FOOTER = 64, /* where it is */
    CHECKSUM_HEADER = 36,
    MIN_BLOCK = 4096,
    MAX_BLOCK = 256 << 20,
};

#define VERSION_1 UINT32_C(0x00010000)
#define NO_BLOCK UINT32_MAX
#define MAX_GEOMETRY (UINT64_C(65535) * 16 * 255)

/* The complement of the sum of all bytes but those of the checksum. */
static bool
checksum_fits(const uint8_t *bytes, size_t length, size_t at)
{
    uint32_t sum = 0;
    for (size_t i = 0; i < length; i++) {
        sum += i >= at && i < at + 4 ? 0 : bytes[i];
    }
    return ~sum == gd_get32_be(bytes + at);
}

static bool
is_maker_of_bytes(const uint8_t *maker)
{
    static const char makers[][5] = {"win ", "qem2", "d2v ",
                                     "tap\0", "CTXS", "wa\0\0"};
    for (size_t i = 0; i < sizeof makers / sizeof makers[0]; i++) {
        if (memcmp(maker, makers[i], 4) == 0) {
            return true;
        }
    }
    return false;
}

static gd_status
decode_footer(gd_diskmap *map, const uint8_t *footer, uint32_t type,
              gd_error *err)
{
    uint64_t size = gd_get64_be(footer + 48);
    uint64_t sectors =
        (uint64_t)gd_get16_be(footer + 56) * footer[58] * footer[59];
    if (gd_get32_be(footer + 12) != VERSION_1 ||
        gd_get32_be(footer + 60) != type ||
        !checksum_fits(footer, FOOTER, CHECKSUM_FOOTER)) {
        return gd_fail(err, GD_INVALID,
                       "its footer is damaged, or of a disk with a parent "
                       "(type %" PRIu32 ")",
                       gd_get32_be(footer + 60));
    }
    if (!is_maker_of_bytes(footer + 28) && sectors < MAX_GEOMETRY &&
        sectors * GD_DISK_SECTOR != size) {
        return gd_fail(err, GD_INVALID,
                       "it has two sizes: %" PRIu64 " bytes, and %" PRIu64
                       " sectors",
                       size, sectors);
    }
    return gd_diskmap_set_size(map, size, err);
}

gd_status
gd_vhd_map_fixed(gd_diskmap *map, bool *found, gd_error *err)
{
    uint8_t footer[FOOTER];
    uint64_t size = map->file->size;
    *found = false;
    if (size <= FOOTER) {
        return GD_OK;
    }
    GD_TRY(gd_diskmap_get(map, footer, FOOTER, size - FOOTER, "its end", err));
    *found = memcmp(footer, "conectix", 8) == 0 &&
             gd_get32_be(footer + 60) == TYPE_FIXED &&
             checksum_fits(footer, FOOTER, CHECKSUM_FOOTER);
    if (!*found) {
        return GD_OK;
    }
    GD_TRY(decode_footer(map, footer, TYPE_FIXED, err));
    gd_disk_piece disk = {.kind = GD_DISK_PLAIN, .length = map->size};
    if (map->size > size - FOOTER) {
        return gd_fail(err, GD_INVALID, "it is shorter than its disk");
    }
    return gd_diskmap_add(map, &disk, err);
}

static gd_status
walk_table(gd_diskmap *map, gd_disk_table *table, uint64_t block,
           gd_error *err)
{
    uint64_t bitmap = (block / GD_DISK_SECTOR / 8 + GD_DISK_SECTOR - 1) /
                      GD_DISK_SECTOR * GD_DISK_SECTOR;
    for (uint64_t i = 0; i < table->entries && map->mapped < map->size; i++) {
        const uint8_t *entry;
        GD_TRY(gd_disk_table_get(map, table, i, &entry, err));
        uint32_t sector = gd_get32_be(entry);
        gd_disk_piece piece = {
            .kind = sector == NO_BLOCK ? GD_DISK_UNALLOCATED : GD_DISK_PLAIN,
            .offset = map->mapped,
            .length = block,
            .place = (uint64_t)sector * GD_DISK_SECTOR + bitmap};
        piece.place = sector == NO_BLOCK ? 0 : piece.place;
        GD_TRY(gd_diskmap_add(map, &piece, err));
    }
    return GD_OK;
}

gd_status
gd_vhd_map(gd_diskmap *map, gd_error *err)
{
    uint8_t footer[FOOTER], header[HEADER];
    GD_TRY(gd_diskmap_get(map, footer, FOOTER, 0, "the footer's copy", err));
    GD_TRY(decode_footer(map, footer, TYPE_DYNAMIC, err));
    GD_TRY(gd_diskmap_get(map, header, HEADER, gd_get64_be(footer + 16),
                          "the header", err));
    uint64_t entries = gd_get32_be(header + 28);
    uint64_t block = gd_get32_be(header + 32);
    if (memcmp(header, "cxsparse", 8) != 0 ||
        !checksum_fits(header, HEADER, CHECKSUM_HEADER)) {
        return gd_fail(err, GD_INVALID, "its header is damaged");
    }
    if (block < MIN_BLOCK || block > MAX_BLOCK || (block & (block - 1)) != 0 ||
        map->size / block + (map->size % block != 0) > entries) {
        return gd_fail(err, GD_INVALID,
                       "its table has %" PRIu64 " blocks of %" PRIu64 " bytes",
                       entries, block);
    }
    gd_disk_table table = {.place = gd_get64_be(header + 16),
                           .entries = entries,
                           .size = 4,
                           .what = "the table of blocks"};
    return walk_table(map, &table, block, err);
}
