/* SPDX-License-Identifier: Apache-2.0 */
/*
 * qcow2.c - see qcow2.h.
 *
 * Written after docs/interop/qcow2.txt of QEMU. Integers are big-endian. Two
 * levels of tables lead to clusters: an entry of the first level has the place
 * of a table of the second, which has as many entries as fit into a cluster.
 * With extended entries each cluster has 32 subclusters.
 */
#include "engine/disk/qcow2.h"

#include <inttypes.h>

#include "engine/base/coding.h"

enum {
    HEADER = 104,  /* of version 3, without the compression type */
    HEADER_2 = 72, /* of version 2 */
    MIN_CLUSTER_BITS = 9,
    MAX_CLUSTER_BITS = 21,
    MIN_EXTENDED_BITS = 14, /* a subcluster is a sector at least */
    SUBCLUSTERS = 32,
    MAX_L1 = 32 << 20, /* bytes, as QEMU has it */
    DIRTY = 1,
    CORRUPT = 2,
    DATA_FILE = 4,
    COMPRESSION = 8, /* the header has a compression type */
    EXTENDED = 16,
};

#define COPIED (UINT64_C(1) << 63)
#define COMPRESSED (UINT64_C(1) << 62)
#define READS_AS_ZEROS UINT64_C(1)
#define PLACE UINT64_C(0x00fffffffffffe00)

typedef struct qcow2 {
    gd_diskmap *map;
    uint32_t version, cluster_bits;
    uint64_t cluster;
    bool extended;
    gd_disk_piece_kind compression;
    uint64_t l1, l1_entries;
    uint64_t l2_entries; /* of a table */
} qcow2;

/* ---- the header ---- */

static gd_status
decode_compression(qcow2 *q, uint64_t features, uint32_t header_length,
                   gd_error *err)
{
    uint8_t type = 0;
    if (header_length > HEADER) {
        GD_TRY(gd_diskmap_get(q->map, &type, 1, HEADER, "the header", err));
    }
    if (type > 1 || (type != 0) != ((features & COMPRESSION) != 0)) {
        return gd_fail(err, GD_INVALID,
                       "it has a compression type, %d, that nothing here "
                       "knows", type);
    }
    q->compression = type == 0 ? GD_DISK_DEFLATED : GD_DISK_ZSTD;
    return GD_OK;
}

static gd_status
decode_features(qcow2 *q, const uint8_t *header, gd_error *err)
{
    uint64_t features = gd_get64_be(header + 72);
    uint32_t length = gd_get32_be(header + 100);
    const char *wrong = (features & CORRUPT) != 0 ? "is marked as corrupt"
                        : (features & DIRTY) != 0
                            ? "is marked as dirty: it was not closed"
                        : (features & DATA_FILE) != 0
                            ? "has its data in another file"
                            : NULL;
    if (wrong != NULL) {
        return gd_fail(err, GD_INVALID, "it %s", wrong);
    }
    if ((features & ~(uint64_t)(COMPRESSION | EXTENDED)) != 0) {
        return gd_fail(err, GD_INVALID,
                       "it has features, 0x%" PRIx64 ", that nothing here "
                       "knows", features);
    }
    if (length < HEADER || length % 8 != 0 || length > q->cluster) {
        return gd_fail(err, GD_INVALID, "its header has %" PRIu32 " bytes",
                       length);
    }
    q->extended = (features & EXTENDED) != 0;
    return decode_compression(q, features, length, err);
}

/* Refuses a disk that needs another file, or a key. */
static gd_status
require_alone(const uint8_t *header, gd_error *err)
{
    if (gd_get64_be(header + 8) != 0) {
        return gd_fail(err, GD_INVALID, "it has a backing file");
    }
    if (gd_get32_be(header + 32) != 0) {
        return gd_fail(err, GD_INVALID, "it is encrypted");
    }
    return GD_OK;
}

/* Each entry of the first level covers so many bytes of the disk. */
static uint64_t
covered(const qcow2 *q)
{
    return q->l2_entries << q->cluster_bits;
}

static gd_status
decode_l1(qcow2 *q, const uint8_t *header, gd_error *err)
{
    uint64_t entries = gd_get32_be(header + 36), size = q->map->size;
    q->l2_entries = q->cluster / (q->extended ? 16 : 8);
    q->l1 = gd_get64_be(header + 40);
    q->l1_entries = size / covered(q) + (size % covered(q) != 0);
    if (entries > MAX_L1 / 8 || q->l1_entries > entries) {
        return gd_fail(err, GD_INVALID,
                       "its first table has %" PRIu64 " entries, but the disk "
                       "needs %" PRIu64,
                       entries, q->l1_entries);
    }
    if (q->l1 % q->cluster != 0) {
        return gd_fail(err, GD_INVALID,
                       "its first table is at %" PRIu64 ", amid a cluster",
                       q->l1);
    }
    return GD_OK;
}

static gd_status
decode_header(qcow2 *q, gd_error *err)
{
    uint8_t header[HEADER] = {0};
    GD_TRY(gd_diskmap_get(q->map, header, HEADER_2, 0, "the header", err));
    q->version = gd_get32_be(header + 4);
    q->cluster_bits = gd_get32_be(header + 20);
    if (q->version != 2 && q->version != 3) {
        return gd_fail(err, GD_INVALID, "it is qcow2 of version %" PRIu32,
                       q->version);
    }
    if (q->cluster_bits < MIN_CLUSTER_BITS ||
        q->cluster_bits > MAX_CLUSTER_BITS) {
        return gd_fail(err, GD_INVALID, "its clusters have 2^%" PRIu32 " bytes",
                       q->cluster_bits);
    }
    q->cluster = UINT64_C(1) << q->cluster_bits;
    GD_TRY(require_alone(header, err));
    if (q->version == 3) {
        GD_TRY(gd_diskmap_get(q->map, header, HEADER, 0, "the header", err));
        GD_TRY(decode_features(q, header, err));
    }
    if (q->extended && q->cluster_bits < MIN_EXTENDED_BITS) {
        return gd_fail(err, GD_INVALID,
                       "its subclusters are smaller than sectors");
    }
    GD_TRY(gd_diskmap_set_size(q->map, gd_get64_be(header + 24), err));
    return decode_l1(q, header, err);
}

/* ---- clusters ---- */

static gd_status
fail_entry(uint64_t offset, uint64_t entry, gd_error *err)
{
    return gd_fail(err, GD_INVALID,
                   "the table's entry for the disk's bytes from %" PRIu64
                   ", 0x%" PRIx64 ", is not valid",
                   offset, entry);
}

/* The stream begins at any byte, and ends within so many sectors. */
static gd_status
add_compressed(const qcow2 *q, uint64_t entry, gd_error *err)
{
    uint32_t size_bits = q->cluster_bits - 8, shift = 62 - size_bits;
    uint64_t sectors = ((entry >> shift) & ((UINT64_C(1) << size_bits) - 1)) + 1;
    uint64_t place = entry & ((UINT64_C(1) << shift) - 1);
    uint64_t room = sectors * GD_DISK_SECTOR - place % GD_DISK_SECTOR;
    uint64_t file = q->map->file->size;
    if ((entry & COPIED) != 0 || place == 0) {
        return fail_entry(q->map->mapped, entry, err);
    }
    if (place < file && room > file - place) {
        room = file - place; /* the last sector of a file may be short */
    }
    uint32_t plain = (uint32_t)q->cluster;
    gd_disk_piece piece = {q->compression, q->map->mapped, q->cluster, place,
                           (uint32_t)room, plain, plain};
    return gd_diskmap_add(q->map, &piece, err);
}

static gd_status
add_plain(const qcow2 *q, uint64_t place, uint64_t length, gd_error *err)
{
    gd_disk_piece piece = {.kind = GD_DISK_PLAIN,
                           .offset = q->map->mapped,
                           .length = length,
                           .place = place};
    return gd_diskmap_add(q->map, &piece, err);
}

static gd_status
add_cluster(const qcow2 *q, uint64_t entry, gd_error *err)
{
    uint64_t place = entry & PLACE;
    if ((entry & COMPRESSED) != 0) {
        return add_compressed(q, entry, err);
    }
    if ((entry & ~(COPIED | PLACE | READS_AS_ZEROS)) != 0 ||
        place % q->cluster != 0 ||
        ((entry & READS_AS_ZEROS) != 0 && q->version < 3)) {
        return fail_entry(q->map->mapped, entry, err);
    }
    if ((entry & READS_AS_ZEROS) != 0) {
        return gd_diskmap_add_hole(q->map, GD_DISK_ZEROS, q->cluster, err);
    }
    return place == 0
               ? gd_diskmap_add_hole(q->map, GD_DISK_UNALLOCATED, q->cluster,
                                     err)
               : add_plain(q, place, q->cluster, err);
}

/* The lower half of the bitmap says which subclusters have bytes, the upper
 * half which read as zeros. */
static gd_status
add_subclusters(const qcow2 *q, uint64_t entry, uint64_t bitmap, gd_error *err)
{
    uint64_t place = entry & PLACE, size = q->cluster / SUBCLUSTERS;
    uint32_t bytes = (uint32_t)bitmap, zeros = (uint32_t)(bitmap >> 32);
    if ((entry & COMPRESSED) != 0 && bitmap == 0) {
        return add_compressed(q, entry, err);
    }
    if ((entry & ~(COPIED | PLACE)) != 0 || place % q->cluster != 0 ||
        (bytes & zeros) != 0 || (bytes != 0 && place == 0)) {
        return fail_entry(q->map->mapped, entry, err);
    }
    for (uint32_t i = 0; i < SUBCLUSTERS; i++) {
        if ((bytes >> i & 1) != 0) {
            GD_TRY(add_plain(q, place + i * size, size, err));
        } else {
            GD_TRY(gd_diskmap_add_hole(q->map,
                                       (zeros >> i & 1) != 0
                                           ? GD_DISK_ZEROS
                                           : GD_DISK_UNALLOCATED,
                                       size, err));
        }
    }
    return GD_OK;
}

/* ---- tables ---- */

static gd_status
walk_l2(const qcow2 *q, uint64_t place, gd_error *err)
{
    gd_disk_table table = {.place = place,
                           .entries = q->l2_entries,
                           .size = q->extended ? 16 : 8,
                           .what = "a table of the second level"};
    for (uint64_t i = 0;
         i < table.entries && q->map->mapped < q->map->size; i++) {
        const uint8_t *entry;
        GD_TRY(gd_disk_table_get(q->map, &table, i, &entry, err));
        GD_TRY(q->extended ? add_subclusters(q, gd_get64_be(entry),
                                             gd_get64_be(entry + 8), err)
                           : add_cluster(q, gd_get64_be(entry), err));
    }
    return GD_OK;
}

static gd_status
walk_l1_entry(const qcow2 *q, uint64_t entry, gd_error *err)
{
    uint64_t table = entry & PLACE;
    if ((entry & ~(COPIED | PLACE)) != 0 || table % q->cluster != 0) {
        return fail_entry(q->map->mapped, entry, err);
    }
    return table == 0 ? gd_diskmap_add_hole(q->map, GD_DISK_UNALLOCATED,
                                            covered(q), err)
                      : walk_l2(q, table, err);
}

gd_status
gd_qcow2_map(gd_diskmap *map, gd_error *err)
{
    qcow2 q = {.map = map, .compression = GD_DISK_DEFLATED};
    GD_TRY(decode_header(&q, err));
    gd_disk_table table = {.place = q.l1,
                           .entries = q.l1_entries,
                           .size = 8,
                           .what = "the table of the first level"};
    for (uint64_t i = 0; i < q.l1_entries; i++) {
        const uint8_t *entry;
        GD_TRY(gd_disk_table_get(map, &table, i, &entry, err));
        GD_TRY(walk_l1_entry(&q, gd_get64_be(entry), err));
    }
    return GD_OK;
}
