/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vdi.c - see vdi.h.
 *
 * Written after VirtualBox's VDICore.h. Integers are little-endian. The header
 * leads to a table with the number of each block in the file.
 */
#include "engine/disk/vdi.h"

#include <inttypes.h>
#include <string.h>

#include "engine/base/coding.h"

enum {
    HEADER = 512,
    DYNAMIC = 1,
    STATIC = 2,
    LINKS = 424, /* ids of the snapshot before it, and of the parent */
    LINKS_LENGTH = 32,
    MIN_BLOCK = 4096,
    MAX_BLOCK = 256 << 20,
};

#define VERSION_1_1 UINT32_C(0x00010001)
#define NO_BLOCK UINT32_MAX
#define ZERO_BLOCK (UINT32_MAX - 1)

static gd_status
require_kind(const uint8_t *header, gd_error *err)
{
    static const uint8_t none[LINKS_LENGTH];
    uint32_t version = gd_get32(header + 68), type = gd_get32(header + 76);
    if (version != VERSION_1_1 || (type != DYNAMIC && type != STATIC)) {
        return gd_fail(err, GD_INVALID,
                       "it is VDI of version 0x%" PRIx32 " and type %" PRIu32,
                       version, type);
    }
    if (memcmp(header + LINKS, none, LINKS_LENGTH) != 0) {
        return gd_fail(err, GD_INVALID, "it has a parent");
    }
    return GD_OK;
}

static gd_status
add_block(gd_diskmap *map, uint32_t number, uint64_t data, uint64_t block,
          gd_error *err)
{
    if (number >= ZERO_BLOCK) {
        return gd_diskmap_add_hole(
            map, number == NO_BLOCK ? GD_DISK_UNALLOCATED : GD_DISK_ZEROS,
            block, err);
    }
    gd_disk_piece piece = {.kind = GD_DISK_PLAIN,
                           .offset = map->mapped,
                           .length = block,
                           .place = data + number * block};
    return gd_diskmap_add(map, &piece, err);
}

gd_status
gd_vdi_map(gd_diskmap *map, gd_error *err)
{
    uint8_t header[HEADER];
    GD_TRY(gd_diskmap_get(map, header, HEADER, 0, "the header", err));
    GD_TRY(require_kind(header, err));
    GD_TRY(gd_diskmap_set_size(map, gd_get64(header + 368), err));
    uint64_t data = gd_get32(header + 344);
    uint64_t block = gd_get32(header + 376), blocks = gd_get32(header + 384);
    if (block < MIN_BLOCK || block > MAX_BLOCK || (block & (block - 1)) != 0 ||
        gd_get32(header + 380) != 0 ||
        map->size / block + (map->size % block != 0) > blocks) {
        return gd_fail(err, GD_INVALID,
                       "it has %" PRIu64 " blocks of %" PRIu64 " bytes",
                       blocks, block);
    }
    gd_disk_table table = {.place = gd_get32(header + 340),
                           .entries = blocks,
                           .size = 4,
                           .what = "the table of blocks"};
    for (uint64_t i = 0; i < blocks && map->mapped < map->size; i++) {
        const uint8_t *entry;
        GD_TRY(gd_disk_table_get(map, &table, i, &entry, err));
        GD_TRY(add_block(map, gd_get32(entry), data, block, err));
    }
    return GD_OK;
}
