/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhdx.c - see vhdx.h.
 *
 * Written after Microsoft's [MS-VHDX]. Integers are little-endian. Of two
 * headers the valid one with the higher sequence counts. A table of regions
 * leads to the metadata, which have the sizes, and to the table of blocks. In
 * that, behind the entries of so many blocks as make a chunk, comes one of a
 * bitmap, which only disks with a parent use.
 */
#include "engine/disk/vhdx.h"

#include <inttypes.h>
#include <string.h>

#include "engine/base/coding.h"

enum {
    UNIT = 64 << 10,
    HEADER = 4096,
    REGIONS = 3 * UNIT, /* where their table is, and its length is UNIT */
    MAX_REGIONS = 2047,
    REGION = 32,
    MAX_ITEMS = 2047,
    ITEM = 32,
    MIN_BLOCK = 1 << 20,
    MAX_BLOCK = 256 << 20,
    REQUIRED = 1,   /* flag of a region */
    IS_REQUIRED = 4, /* flag of an item */
    HAS_PARENT = 2,
};

enum { NOT_PRESENT, UNDEFINED, ZERO, UNMAPPED, PRESENT = 6 };

static const uint8_t bat_id[] = {
    0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0x00, 0x42,
    0x9d, 0x64, 0x11, 0x5e, 0x9b, 0xfd, 0x4a, 0x08};
static const uint8_t metadata_id[] = {
    0x06, 0xa2, 0x7c, 0x8b, 0x90, 0x47, 0x9a, 0x4b,
    0xb8, 0xfe, 0x57, 0x5f, 0x05, 0x0f, 0x88, 0x6e};
static const uint8_t parameters_id[] = {
    0x37, 0x67, 0xa1, 0xca, 0x36, 0xfa, 0x43, 0x4d,
    0xb3, 0xb6, 0x33, 0xf0, 0xaa, 0x44, 0xe7, 0x6b};
static const uint8_t size_id[] = {
    0x24, 0x42, 0xa5, 0x2f, 0x1b, 0xcd, 0x76, 0x48,
    0xb2, 0x11, 0x5d, 0xbe, 0xd8, 0x3b, 0xf4, 0xb8};
static const uint8_t sector_id[] = {
    0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47,
    0xba, 0x47, 0xf2, 0x33, 0xa8, 0xfa, 0xab, 0x5f};
static const uint8_t physical_id[] = {
    0xc7, 0x48, 0xa3, 0xcd, 0x5d, 0x44, 0x71, 0x44,
    0x9c, 0xc9, 0xe9, 0x88, 0x52, 0x51, 0xc5, 0x56};
static const uint8_t page83_id[] = {
    0xab, 0x12, 0xca, 0xbe, 0xe6, 0xb2, 0x23, 0x45,
    0x93, 0xef, 0xc3, 0x09, 0xe0, 0x00, 0xc7, 0x46};

typedef struct range {
    uint64_t offset, length;
} range;

typedef struct vhdx {
    gd_diskmap *map;
    range bat, metadata;
    uint64_t block, sector; /* bytes */
} vhdx;

static bool
is_id(const uint8_t *id, const uint8_t *wanted)
{
    return memcmp(id, wanted, 16) == 0;
}

/* ---- checksums: CRC-32C ---- */

static uint32_t
checksum_on(uint32_t sum, const uint8_t *bytes, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        sum ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) {
            sum = sum >> 1 ^ (UINT32_C(0x82f63b78) & -(sum & 1));
        }
    }
    return sum;
}

/* Verifies a structure that begins with its name and its checksum, and returns
 * its beginning. */
static gd_status
get_verified(const vhdx *v, uint64_t offset, size_t length, const char *name,
             uint8_t head[HEADER], bool *valid, gd_error *err)
{
    uint8_t chunk[HEADER];
    uint32_t sum = UINT32_MAX;
    for (size_t at = 0; at < length; at += HEADER) {
        uint8_t *to = at == 0 ? head : chunk;
        GD_TRY(gd_diskmap_get(v->map, to, HEADER, offset + at, "a header",
                              err));
        uint32_t stored = gd_get32(to + 4);
        if (at == 0) {
            gd_put32(to + 4, 0);
        }
        sum = checksum_on(sum, to, HEADER);
        if (at == 0) {
            gd_put32(to + 4, stored);
        }
    }
    *valid = memcmp(head, name, 4) == 0 && ~sum == gd_get32(head + 4);
    return GD_OK;
}

/* ---- headers and regions ---- */

static gd_status
require_closed(const vhdx *v, gd_error *err)
{
    static const uint8_t none[16];
    uint8_t headers[2][HEADER];
    bool valid[2];
    for (size_t i = 0; i < 2; i++) {
        GD_TRY(get_verified(v, (i + 1) * UNIT, HEADER, "head", headers[i],
                            &valid[i], err));
    }
    if (!valid[0] && !valid[1]) {
        return gd_fail(err, GD_INVALID, "both of its headers are damaged");
    }
    bool second = valid[1] && (!valid[0] || gd_get64(headers[1] + 8) >
                                                gd_get64(headers[0] + 8));
    const uint8_t *header = headers[second ? 1 : 0];
    if (gd_get16(header + 66) != 1) {
        return gd_fail(err, GD_INVALID, "it is VHDX of version %d",
                       gd_get16(header + 66));
    }
    if (memcmp(header + 48, none, sizeof none) != 0) {
        return gd_fail(err, GD_INVALID,
                       "it was not closed: it has a log to be replayed");
    }
    return GD_OK;
}

static gd_status
take_region(vhdx *v, const uint8_t *entry, gd_error *err)
{
    range region = {gd_get64(entry + 16), gd_get32(entry + 24)};
    if (is_id(entry, bat_id)) {
        v->bat = region;
    } else if (is_id(entry, metadata_id)) {
        v->metadata = region;
    } else if ((gd_get32(entry + 28) & REQUIRED) != 0) {
        return gd_fail(err, GD_INVALID,
                       "it needs a region that nothing here knows");
    }
    return GD_OK;
}

static gd_status
decode_regions(vhdx *v, gd_error *err)
{
    uint8_t head[HEADER], entry[REGION];
    bool valid;
    GD_TRY(get_verified(v, REGIONS, UNIT, "regi", head, &valid, err));
    uint32_t count = gd_get32(head + 8);
    if (!valid || count > MAX_REGIONS) {
        return gd_fail(err, GD_INVALID, "its table of regions is damaged");
    }
    for (uint32_t i = 0; i < count; i++) {
        GD_TRY(gd_diskmap_get(v->map, entry, REGION,
                              REGIONS + 16 + (uint64_t)i * REGION, "a region",
                              err));
        GD_TRY(take_region(v, entry, err));
    }
    if (v->bat.length == 0 || v->metadata.length < UNIT) {
        return gd_fail(err, GD_INVALID, "it has no metadata, or no blocks");
    }
    return GD_OK;
}

/* ---- metadata ---- */

static gd_status
take_item(vhdx *v, const uint8_t *id, const uint8_t *value, gd_error *err)
{
    if (is_id(id, size_id)) {
        return gd_diskmap_set_size(v->map, gd_get64(value), err);
    }
    if (is_id(id, sector_id)) {
        v->sector = gd_get32(value);
    } else if (is_id(id, parameters_id)) {
        v->block = gd_get32(value);
        if ((gd_get32(value + 4) & HAS_PARENT) != 0) {
            return gd_fail(err, GD_INVALID, "it has a parent");
        }
    }
    return GD_OK;
}

static gd_status
decode_item(vhdx *v, const uint8_t *item, gd_error *err)
{
    uint8_t value[8] = {0};
    uint32_t length = gd_get32(item + 20);
    bool used = is_id(item, size_id) || is_id(item, sector_id) ||
                is_id(item, parameters_id);
    if (!used) {
        bool harmless = is_id(item, physical_id) || is_id(item, page83_id) ||
                        (gd_get32(item + 24) & IS_REQUIRED) == 0;
        return harmless ? GD_OK
                        : gd_fail(err, GD_INVALID,
                                  "it needs metadata that nothing here knows");
    }
    if (length > sizeof value) {
        return gd_fail(err, GD_INVALID, "its metadata are damaged");
    }
    GD_TRY(gd_diskmap_get(v->map, value, length,
                          v->metadata.offset + gd_get32(item + 16),
                          "the metadata", err));
    return take_item(v, item, value, err);
}

static gd_status
decode_metadata(vhdx *v, gd_error *err)
{
    uint8_t head[32], item[ITEM];
    GD_TRY(gd_diskmap_get(v->map, head, sizeof head, v->metadata.offset,
                          "the metadata", err));
    uint32_t count = gd_get16(head + 10);
    if (memcmp(head, "metadata", 8) != 0 || count > MAX_ITEMS) {
        return gd_fail(err, GD_INVALID, "its metadata are damaged");
    }
    for (uint32_t i = 0; i < count; i++) {
        GD_TRY(gd_diskmap_get(v->map, item, ITEM,
                              v->metadata.offset + ITEM + (uint64_t)i * ITEM,
                              "the metadata", err));
        GD_TRY(decode_item(v, item, err));
    }
    if (v->map->size == 0 || (v->sector != 512 && v->sector != 4096) ||
        v->block < MIN_BLOCK || v->block > MAX_BLOCK ||
        (v->block & (v->block - 1)) != 0) {
        return gd_fail(err, GD_INVALID,
                       "its blocks have %" PRIu64 " bytes, its sectors %" PRIu64,
                       v->block, v->sector);
    }
    return GD_OK;
}

/* ---- blocks ---- */

static gd_status
add_block(const vhdx *v, uint64_t entry, gd_error *err)
{
    gd_disk_piece piece = {.kind = GD_DISK_PLAIN,
                           .offset = v->map->mapped,
                           .length = v->block,
                           .place = entry >> 20 << 20};
    switch (entry & 7) {
    case PRESENT:
        return gd_diskmap_add(v->map, &piece, err);
    case NOT_PRESENT:
        return gd_diskmap_add_hole(v->map, GD_DISK_UNALLOCATED, v->block, err);
    case UNDEFINED:
    case ZERO:
    case UNMAPPED:
        return gd_diskmap_add_hole(v->map, GD_DISK_ZEROS, v->block, err);
    default:
        return gd_fail(err, GD_INVALID,
                       "the state of the block from %" PRIu64 " is %d",
                       v->map->mapped, (int)(entry & 7));
    }
}

static gd_status
walk_blocks(const vhdx *v, gd_error *err)
{
    uint64_t in_chunk = (v->sector << 23) / v->block; /* blocks of a bitmap */
    uint64_t blocks = v->map->size / v->block +
                      (v->map->size % v->block != 0);
    uint64_t entries = blocks + (blocks - 1) / in_chunk;
    if (entries > v->bat.length / 8) {
        return gd_fail(err, GD_INVALID,
                       "its table of blocks is too small for its disk");
    }
    gd_disk_table table = {.place = v->bat.offset,
                           .entries = entries,
                           .size = 8,
                           .what = "the table of blocks"};
    for (uint64_t i = 0; i < entries; i++) {
        const uint8_t *entry;
        GD_TRY(gd_disk_table_get(v->map, &table, i, &entry, err));
        if (i % (in_chunk + 1) != in_chunk) {
            GD_TRY(add_block(v, gd_get64(entry), err));
        }
    }
    return GD_OK;
}

gd_status
gd_vhdx_map(gd_diskmap *map, gd_error *err)
{
    vhdx v = {.map = map};
    GD_TRY(require_closed(&v, err));
    GD_TRY(decode_regions(&v, err));
    GD_TRY(decode_metadata(&v, err));
    return walk_blocks(&v, err);
}
