/* SPDX-License-Identifier: Apache-2.0 */
/*
 * diskmap.c - see diskmap.h.
 */
#include "engine/disk/diskmap.h"

#include <inttypes.h>

enum {
    /* Bytes that a walk may read besides those of the file: headers are read
     * twice. */
    SPARE_BYTES = 64 << 10,
    /* A piece of fewer bytes of the file is not worth its place in a recipe. */
    BYTES_OF_PIECE = 256,
    SPARE_PIECES = 1024,
};

void
gd_diskmap_begin(gd_diskmap *map, const gd_disk_file *file)
{
    *map = (gd_diskmap){
        .file = file,
        .bytes = file->size > UINT64_MAX - SPARE_BYTES
                     ? UINT64_MAX
                     : file->size + SPARE_BYTES,
        .pieces = file->size / BYTES_OF_PIECE + SPARE_PIECES,
    };
}

static bool
is_within(const gd_diskmap *map, uint64_t offset, uint64_t length)
{
    return offset <= map->file->size && length <= map->file->size - offset;
}

gd_status
gd_diskmap_get(gd_diskmap *map, uint8_t *out, size_t length, uint64_t offset,
               const char *what, gd_error *err)
{
    if (!is_within(map, offset, length)) {
        return gd_fail(err, GD_INVALID,
                       "%s is at %" PRIu64 ", beyond the end of the file",
                       what, offset);
    }
    if (length > map->bytes) {
        return gd_fail(err, GD_INVALID,
                       "its tables are larger than the file: several places "
                       "name one table");
    }
    map->bytes -= length;
    return map->file->read(map->file->read_arg, out, length, offset, err);
}

gd_status
gd_disk_table_get(gd_diskmap *map, gd_disk_table *table, uint64_t i,
                  const uint8_t **entry, gd_error *err)
{
    size_t size = table->size, at = i % (GD_DISK_CHUNK / size) * size;
    if (at == 0) {
        uint64_t left = (table->entries - i) * size;
        GD_TRY(gd_diskmap_get(map, table->chunk,
                              left < GD_DISK_CHUNK ? (size_t)left
                                                   : GD_DISK_CHUNK,
                              table->place + i * size, table->what, err));
    }
    *entry = table->chunk + at;
    return GD_OK;
}

gd_status
gd_diskmap_set_size(gd_diskmap *map, uint64_t size, gd_error *err)
{
    if (size == 0 || size % GD_DISK_SECTOR != 0 || size > GD_DISK_MAX_SIZE) {
        return gd_fail(err, GD_INVALID,
                       "a disk of %" PRIu64 " bytes is empty, too large or "
                       "not of whole sectors",
                       size);
    }
    map->size = size;
    return GD_OK;
}

static bool
is_stream(const gd_disk_piece *piece)
{
    return piece->kind >= GD_DISK_DEFLATED;
}

/* Lets the last piece have the next one's bytes, if it may. */
static bool
join(gd_diskmap *map, const gd_disk_piece *piece)
{
    gd_disk_piece *last = &map->last;
    if (!map->has_last || last->kind != piece->kind || is_stream(piece) ||
        (piece->kind == GD_DISK_PLAIN &&
         last->place + last->length != piece->place)) {
        return false;
    }
    last->length += piece->length;
    return true;
}

static gd_status
take_last(gd_diskmap *map, gd_error *err)
{
    if (!map->has_last) {
        return GD_OK;
    }
    if (map->pieces == 0) {
        return gd_fail(err, GD_INVALID,
                       "its disk has more pieces than a file of %" PRIu64
                       " bytes is worth",
                       map->file->size);
    }
    map->pieces--;
    map->has_last = false;
    return map->file->take(map->file->take_arg, &map->last, err);
}

static gd_status
require_place(const gd_diskmap *map, const gd_disk_piece *piece, gd_error *err)
{
    uint64_t length = is_stream(piece) ? piece->room : piece->length;
    if (length == 0 || piece->max_plain > GD_DISK_MAX_CLUSTER ||
        !is_within(map, piece->place, length)) {
        return gd_fail(err, GD_INVALID,
                       "the disk's bytes from %" PRIu64
                       " are at %" PRIu64 ", beyond the end of the file",
                       piece->offset, piece->place);
    }
    return GD_OK;
}

gd_status
gd_diskmap_add(gd_diskmap *map, const gd_disk_piece *piece, gd_error *err)
{
    uint64_t left = map->size - map->mapped;
    gd_disk_piece p = *piece;
    if (left == 0) {
        return GD_OK;
    }
    if (p.offset != map->mapped || p.length == 0) {
        return gd_fail(err, GD_INVALID,
                       "the disk's bytes from %" PRIu64 " are not in order",
                       p.offset);
    }
    p.length = p.length < left ? p.length : left;
    if (p.kind >= GD_DISK_PLAIN) {
        GD_TRY(require_place(map, &p, err));
    }
    map->mapped += p.length;
    if (join(map, &p)) {
        return GD_OK;
    }
    GD_TRY(take_last(map, err));
    map->last = p;
    map->has_last = true;
    return GD_OK;
}

gd_status
gd_diskmap_add_hole(gd_diskmap *map, gd_disk_piece_kind kind, uint64_t length,
                    gd_error *err)
{
    gd_disk_piece hole = {
        .kind = kind, .offset = map->mapped, .length = length};
    return gd_diskmap_add(map, &hole, err);
}

gd_status
gd_diskmap_end(gd_diskmap *map, gd_error *err)
{
    return take_last(map, err);
}
