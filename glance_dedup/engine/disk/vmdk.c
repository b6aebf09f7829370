/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vmdk.c - see vmdk.h.
 *
 * Written after VMware's "Virtual Disk Format 5.0". All places and sizes are in
 * sectors, and integers are little-endian. A directory leads to tables of 512
 * entries each, and these to grains. A compressed grain begins with a marker:
 * its first sector on the disk (8 bytes) and the stream's length (4). A stream
 * that was written in one pass has its directory at the end, which a second
 * header there names.
 */
#include "engine/disk/vmdk.h"

#include <inttypes.h>
#include <string.h>

#include "engine/base/coding.h"

enum {
    HEADER = 79,
    VERSIONS = 3,
    ENTRIES = 512,     /* of a table */
    MAX_GRAIN = 2048,  /* sectors */
    MAX_DESCRIPTOR = 40,
    ZERO_GRAINS = 4,   /* flag: the entry 1 is a grain of zeros */
    COMPRESSED = 1 << 16,
    MARKERS = 1 << 17,
    FLAGS = 7 | COMPRESSED | MARKERS,
    MARKER = 12,
    FOOTER_SECTORS = 3, /* a marker, the header, the marker of the end */
    TYPE_FOOTER = 3,
    DEFLATE = 1,
};

#define AT_THE_END UINT64_MAX

typedef struct vmdk {
    gd_diskmap *map;
    uint32_t flags;
    uint64_t grain; /* bytes */
    uint64_t directory; /* bytes from the beginning of the file */
    uint64_t tables;
    uint64_t descriptor, descriptor_sectors;
} vmdk;

/* Converts sectors; refuses those that no file has. */
static gd_status
to_bytes(const vmdk *v, uint64_t sectors, const char *what, uint64_t *bytes,
         gd_error *err)
{
    *bytes = 0;
    if (sectors > v->map->file->size / GD_DISK_SECTOR) {
        return gd_fail(err, GD_INVALID,
                       "%s is at sector %" PRIu64 ", beyond the end of the "
                       "file", what, sectors);
    }
    *bytes = sectors * GD_DISK_SECTOR;
    return GD_OK;
}

/* ---- the header ---- */

static gd_status
require_kind(const vmdk *v, const uint8_t *header, gd_error *err)
{
    uint32_t version = gd_get32(header + 4);
    bool compressed = (v->flags & COMPRESSED) != 0;
    if (version < 1 || version > VERSIONS) {
        return gd_fail(err, GD_INVALID, "it is VMDK of version %" PRIu32,
                       version);
    }
    if ((v->flags & ~(uint32_t)FLAGS) != 0 ||
        compressed != ((v->flags & MARKERS) != 0) ||
        gd_get16(header + 77) != (compressed ? DEFLATE : 0)) {
        return gd_fail(err, GD_INVALID,
                       "it has flags, 0x%" PRIx32 ", or a compression, %d, "
                       "that nothing here knows",
                       v->flags, gd_get16(header + 77));
    }
    if (header[72] != 0) {
        return gd_fail(err, GD_INVALID, "it was not closed");
    }
    return GD_OK;
}

static gd_status
decode_geometry(vmdk *v, const uint8_t *header, gd_error *err)
{
    uint64_t capacity = gd_get64(header + 12), grain = gd_get64(header + 20);
    uint64_t covered = grain * ENTRIES;
    if (grain == 0 || grain > MAX_GRAIN || (grain & (grain - 1)) != 0 ||
        gd_get32(header + 44) != ENTRIES) {
        return gd_fail(err, GD_INVALID,
                       "its grains have %" PRIu64 " sectors, its tables "
                       "%" PRIu32 " entries",
                       grain, gd_get32(header + 44));
    }
    uint64_t most = GD_DISK_MAX_SIZE / GD_DISK_SECTOR;
    capacity = capacity <= most ? capacity : most + 1;
    GD_TRY(gd_diskmap_set_size(v->map, capacity * GD_DISK_SECTOR, err));
    v->grain = grain * GD_DISK_SECTOR;
    v->tables = capacity / covered + (capacity % covered != 0);
    v->descriptor = gd_get64(header + 28);
    v->descriptor_sectors = gd_get64(header + 36);
    return to_bytes(v, gd_get64(header + 56), "the directory", &v->directory,
                    err);
}

/* Takes the place of the directory from the header at the end, which must be of
 * the same disk. */
static gd_status
read_footer(vmdk *v, uint8_t header[HEADER], gd_error *err)
{
    uint8_t marker[16], footer[HEADER];
    uint64_t size = v->map->file->size;
    uint64_t at = size - FOOTER_SECTORS * GD_DISK_SECTOR;
    if (size % GD_DISK_SECTOR != 0 || at > size) {
        return gd_fail(err, GD_INVALID, "it ends amid a sector");
    }
    GD_TRY(gd_diskmap_get(v->map, marker, sizeof marker, at, "the footer",
                          err));
    GD_TRY(gd_diskmap_get(v->map, footer, HEADER, at + GD_DISK_SECTOR,
                          "the footer", err));
    if (gd_get32(marker + 8) != 0 || gd_get32(marker + 12) != TYPE_FOOTER ||
        memcmp(footer, header, 28) != 0 ||
        gd_get64(footer + 56) == AT_THE_END) {
        return gd_fail(err, GD_INVALID,
                       "its end is not the footer that its header announces");
    }
    memcpy(header + 56, footer + 56, 8);
    return GD_OK;
}

static gd_status
decode_header(vmdk *v, gd_error *err)
{
    uint8_t header[HEADER];
    GD_TRY(gd_diskmap_get(v->map, header, HEADER, 0, "the header", err));
    if (gd_get64(header + 56) == AT_THE_END) {
        GD_TRY(read_footer(v, header, err));
    }
    v->flags = gd_get32(header + 8);
    GD_TRY(require_kind(v, header, err));
    return decode_geometry(v, header, err);
}

/* ---- the descriptor ---- */

/* Finds the value behind a key at the beginning of a line; NULL: there is
 * none. */
static const char *
value_of(const char *text, const char *key)
{
    size_t length = strlen(key);
    for (const char *line = text; line != NULL;) {
        if (strncmp(line, key, length) == 0) {
            line += length + strspn(line + length, " \t");
            return *line == '=' ? line + 1 + strspn(line + 1, " \t\"") : NULL;
        }
        line = strchr(line, '\n');
        line = line == NULL ? NULL : line + 1;
    }
    return NULL;
}

static bool
begins(const char *text, const char *word)
{
    return text != NULL && strncmp(text, word, strlen(word)) == 0;
}

static int
extents_of(const char *text)
{
    int count = 0;
    for (const char *line = text; line != NULL;) {
        count += begins(line, "RW ") || begins(line, "RDONLY ") ||
                 begins(line, "NOACCESS ");
        line = strchr(line, '\n');
        line = line == NULL ? NULL : line + 1;
    }
    return count;
}

static gd_status
require_alone(const vmdk *v, gd_error *err)
{
    char text[MAX_DESCRIPTOR * GD_DISK_SECTOR + 1];
    uint64_t at, length = v->descriptor_sectors;
    if (v->descriptor == 0 || length == 0 || length > MAX_DESCRIPTOR) {
        return gd_fail(err, GD_INVALID,
                       "its descriptor has %" PRIu64 " sectors", length);
    }
    GD_TRY(to_bytes(v, v->descriptor, "the descriptor", &at, err));
    length *= GD_DISK_SECTOR;
    GD_TRY(gd_diskmap_get(v->map, (uint8_t *)text, (size_t)length, at,
                          "the descriptor", err));
    text[length] = '\0';
    const char *kind = value_of(text, "createType");
    if (!begins(kind, "monolithicSparse\"") &&
        !begins(kind, "streamOptimized\"")) {
        return gd_fail(err, GD_INVALID,
                       "its descriptor names a kind that nothing here knows");
    }
    if (!begins(value_of(text, "parentCID"), "ffffffff") ||
        value_of(text, "parentFileNameHint") != NULL ||
        extents_of(text) > 1) {
        return gd_fail(err, GD_INVALID,
                       "it has a parent, or extents in other files");
    }
    return GD_OK;
}

/* ---- grains ---- */

static gd_status
add_compressed(const vmdk *v, uint64_t place, gd_error *err)
{
    uint8_t marker[MARKER];
    uint64_t at = v->map->mapped, left = v->map->size - at;
    GD_TRY(gd_diskmap_get(v->map, marker, MARKER, place, "a grain", err));
    if (gd_get64(marker) != at / GD_DISK_SECTOR) {
        return gd_fail(err, GD_INVALID,
                       "the grain at %" PRIu64 " is of another place of the "
                       "disk than %" PRIu64, place, at);
    }
    /* The last grain of the disk may be whole, or end with it. */
    gd_disk_piece piece = {
        GD_DISK_ZLIB, at, v->grain, place + MARKER, gd_get32(marker + 8),
        (uint32_t)(left < v->grain ? left : v->grain), (uint32_t)v->grain};
    return gd_diskmap_add(v->map, &piece, err);
}

static gd_status
add_grain(const vmdk *v, uint32_t sector, gd_error *err)
{
    bool zeros = sector == 1 && (v->flags & ZERO_GRAINS) != 0;
    if (sector == 0 || zeros) {
        return gd_diskmap_add_hole(
            v->map, zeros ? GD_DISK_ZEROS : GD_DISK_UNALLOCATED, v->grain, err);
    }
    uint64_t place;
    GD_TRY(to_bytes(v, sector, "a grain", &place, err));
    if ((v->flags & COMPRESSED) != 0) {
        return add_compressed(v, place, err);
    }
    gd_disk_piece piece = {.kind = GD_DISK_PLAIN,
                           .offset = v->map->mapped,
                           .length = v->grain,
                           .place = place};
    return gd_diskmap_add(v->map, &piece, err);
}

static gd_status
walk_table(const vmdk *v, uint32_t sector, gd_error *err)
{
    gd_disk_table table = {
        .entries = ENTRIES, .size = 4, .what = "a table"};
    if (sector == 0) {
        return gd_diskmap_add_hole(v->map, GD_DISK_UNALLOCATED,
                                   v->grain * ENTRIES, err);
    }
    GD_TRY(to_bytes(v, sector, table.what, &table.place, err));
    for (uint64_t i = 0; i < ENTRIES && v->map->mapped < v->map->size; i++) {
        const uint8_t *entry;
        GD_TRY(gd_disk_table_get(v->map, &table, i, &entry, err));
        GD_TRY(add_grain(v, gd_get32(entry), err));
    }
    return GD_OK;
}

gd_status
gd_vmdk_map(gd_diskmap *map, gd_error *err)
{
    vmdk v = {.map = map};
    GD_TRY(decode_header(&v, err));
    GD_TRY(require_alone(&v, err));
    gd_disk_table directory = {.place = v.directory,
                               .entries = v.tables,
                               .size = 4,
                               .what = "the directory"};
    for (uint64_t i = 0; i < v.tables; i++) {
        const uint8_t *entry;
        GD_TRY(gd_disk_table_get(map, &directory, i, &entry, err));
        GD_TRY(walk_table(&v, gd_get32(entry), err));
    }
    return GD_OK;
}
