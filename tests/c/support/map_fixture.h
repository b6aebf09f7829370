/* SPDX-License-Identifier: Apache-2.0 */
/*
 * map_fixture.h - files of disk formats in memory, for the tests of their
 * parsers: bytes are put into them, and the pieces of the map are kept.
 *
 * A file may be longer than the memory that it has here. The rest reads as
 * zeros.
 */
#ifndef MAP_FIXTURE_H
#define MAP_FIXTURE_H

#include "engine/disk/diskformat.h"

enum { MAP_FILE = 5 << 20, MAP_PIECES = 4096 };

typedef struct map_fixture {
    uint8_t bytes[MAP_FILE];
    uint64_t size; /* of the file */
    bool unreadable; /* from now on */
    uint64_t bytes_read;
    size_t count; /* of pieces, also beyond those that are kept */
    gd_disk_piece pieces[MAP_PIECES];
    gd_disk_format format;
    uint64_t disk_size;
    gd_error err;
} map_fixture;

extern map_fixture mapped;

/* Begins an empty file of so many bytes. */
void map_begin(uint64_t size);
/* Big-endian and little-endian numbers of so many bytes. */
void map_put_be(uint64_t at, uint64_t value, size_t bytes);
void map_put_le(uint64_t at, uint64_t value, size_t bytes);
/* Maps the file, and checks what holds of any result. */
gd_status map_run(void);
/* Checks that the file is refused, and that the reason has these words. */
void map_check_refused(const char *words, const char *file, int line);
/* Checks a piece. */
void map_check_piece(size_t number, gd_disk_piece_kind kind, uint64_t length,
                     uint64_t place, const char *file, int line);

#define CHECK_REFUSED(words) map_check_refused(words, __FILE__, __LINE__)
#define CHECK_PIECE(number, kind, length, place)                              \
    map_check_piece(number, kind, length, place, __FILE__, __LINE__)

#endif
