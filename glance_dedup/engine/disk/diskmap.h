/* SPDX-License-Identifier: Apache-2.0 */
/*
 * diskmap.h - where the bytes of a disk lie in a file of a disk format.
 *
 * A parser of a format walks over the file's tables, in the order of the disk,
 * and adds a piece for each range. Everything that it reads is hostile (I10).
 * It reads only through gd_diskmap_get, which refuses bytes outside the file,
 * and ends a walk that reads more than the file has. gd_diskmap_add refuses
 * pieces that are not in order or not within the file, and more pieces than are
 * worth keeping. So no file takes more time than a few passes over it, and the
 * memory is that of this struct. A refusal is GD_INVALID, with the reason for
 * the file's owner; GD_CORRUPT and others are the reader's own.
 */
#ifndef GD_DISKMAP_H
#define GD_DISKMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

enum {
    GD_DISK_SECTOR = 512,
    GD_DISK_MAX_CLUSTER = 2 << 20, /* of compressed clusters: qcow2's largest */
    GD_DISK_CHUNK = 4096, /* bytes of a table that are read at once */
};

/* Larger disks are refused, so sums of two offsets do not overflow. */
#define GD_DISK_MAX_SIZE (UINT64_C(1) << 62)

typedef enum gd_disk_piece_kind {
    GD_DISK_UNALLOCATED, /* reads as zeros: nothing was written there */
    GD_DISK_ZEROS,
    GD_DISK_PLAIN,
    GD_DISK_DEFLATED, /* a raw deflate stream */
    GD_DISK_ZLIB,     /* one with zlib's header and checksum */
    GD_DISK_ZSTD,
} gd_disk_piece_kind;

typedef struct gd_disk_piece {
    gd_disk_piece_kind kind;
    uint64_t offset; /* in the disk */
    uint64_t length; /* bytes of the disk, at least 1 */
    uint64_t place;  /* in the file, unless the kind has no bytes there */
    /* Of compressed ones: the stream begins at place and ends within so many
     * bytes. It decodes to at least min_plain bytes, and at most max_plain, of
     * which the disk has the first. Any other stream is damaged. */
    uint32_t room, min_plain, max_plain;
} gd_disk_piece;

/* Reads exactly these bytes of the file. */
typedef gd_status gd_disk_reader(void *arg, uint8_t *out, size_t length,
                                 uint64_t offset, gd_error *err);
/* Takes the next piece. */
typedef gd_status gd_disk_taker(void *arg, const gd_disk_piece *piece,
                                gd_error *err);

typedef struct gd_disk_file {
    gd_disk_reader *read;
    void *read_arg;
    uint64_t size;
    gd_disk_taker *take;
    void *take_arg;
} gd_disk_file;

/* One walk. */
typedef struct gd_diskmap {
    const gd_disk_file *file;
    uint64_t size;   /* of the disk; the parser sets it */
    uint64_t mapped; /* so much of the disk has been added */
    uint64_t bytes, pieces; /* that may still be read and taken */
    gd_disk_piece last; /* not taken yet, as the next may continue it */
    bool has_last;
} gd_diskmap;

void gd_diskmap_begin(gd_diskmap *map, const gd_disk_file *file);
/* `what` names the bytes, for the reason of a refusal. */
gd_status gd_diskmap_get(gd_diskmap *map, uint8_t *out, size_t length,
                         uint64_t offset, const char *what, gd_error *err);

/* A table in the file, of which a walk takes one entry after the other. */
typedef struct gd_disk_table {
    uint64_t place, entries;
    size_t size;      /* of an entry; GD_DISK_CHUNK is a multiple of it */
    const char *what; /* as for gd_diskmap_get */
    uint8_t chunk[GD_DISK_CHUNK];
} gd_disk_table;

/* Returns entry i, until the next call. REQUIRES: the calls are for 0, 1, 2 and
 * so on, as far as there are entries. */
gd_status gd_disk_table_get(gd_diskmap *map, gd_disk_table *table, uint64_t i,
                            const uint8_t **entry, gd_error *err);

/* Sets the disk's size; refuses 0, and what is not whole sectors. */
gd_status gd_diskmap_set_size(gd_diskmap *map, uint64_t size, gd_error *err);
/* Adds the next piece, without the bytes of it behind the disk's end. Its
 * offset must be that of the end of the piece before. Does nothing if that is
 * the end of the disk. */
gd_status gd_diskmap_add(gd_diskmap *map, const gd_disk_piece *piece,
                         gd_error *err);
/* Adds a piece without bytes in the file. */
gd_status gd_diskmap_add_hole(gd_diskmap *map, gd_disk_piece_kind kind,
                              uint64_t length, gd_error *err);
/* REQUIRES: the whole disk was added. */
gd_status gd_diskmap_end(gd_diskmap *map, gd_error *err);

#endif
