/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fields.h - the fields of a structure on the disk, in one table.
 *
 * A table is a macro with a row for each field, as format.rst has them:
 *
 *     #define FIELDS(F) F(NUMBER, 16, 4, group) F(BYTES, 20, 16, owner)
 *
 * A row has the kind, the offset and the size in bytes, and the member of a C
 * structure that has the value in memory.  FIELDS(GD_ENCODE) writes the fields
 * of *value into the bytes at `out`.  FIELDS(GD_DECODE) reads them from `in`.
 * These are plain assignments without any loop, so a table also serves extents,
 * of which there are many.
 *
 *     NUMBER  1, 2, 4 or 8 bytes, little-endian
 *     BYTES   bytes, as they are
 *     TEXT    a text, then zeros; in memory, a final zero follows.  Decoding
 *             clears the variable `good` if the rest are no zeros
 *     LENGTH  the length of a text, whose row is above; decoding compares it
 *
 * Bytes without a row are reserved, or are written and read by hand.  A test
 * compares all tables with the pages on the format (test_format.py).
 */
#ifndef GD_FIELDS_H
#define GD_FIELDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/base/status.h"

#define GD_ENCODE(kind, at, n, m) GD_ENCODE_##kind(at, n, m);
#define GD_ENCODE_NUMBER(at, n, m) gd_put_number(out + (at), n, value->m)
#define GD_ENCODE_BYTES(at, n, m) memcpy(out + (at), value->m, n)
#define GD_ENCODE_TEXT(at, n, m) memcpy(out + (at), value->m, strlen(value->m))
#define GD_ENCODE_LENGTH(at, n, m)                                            \
    gd_put_number(out + (at), n, strlen(value->m))

#define GD_DECODE(kind, at, n, m) GD_DECODE_##kind(at, n, m);
#define GD_DECODE_NUMBER(at, n, m)                                            \
    _Static_assert(sizeof value->m >= (n), "the number fits in " #m);         \
    value->m = gd_get_number(in + (at), n)
#define GD_DECODE_BYTES(at, n, m)                                             \
    _Static_assert(sizeof value->m == (n), "the size is that of " #m);        \
    memcpy(value->m, in + (at), n)
#define GD_DECODE_TEXT(at, n, m)                                              \
    _Static_assert(sizeof value->m == (n) + 1, "the text fits in " #m);       \
    good &= gd_fields_get_text(in + (at), n, value->m)
#define GD_DECODE_LENGTH(at, n, m)                                            \
    good &= gd_get_number(in + (at), n) == strlen(value->m)

/* A structure whose last 8 bytes are the checksum of all before them. */
typedef struct gd_sealed {
    size_t size;
    const char *magic; /* its first 8 bytes; NULL: whatever they are */
    unsigned major; /* the highest version that is known, at 8; 0: it has none */
    const char *name;
} gd_sealed;

/* Fills out with zeros, the magic, and the version. */
void gd_fields_begin(const gd_sealed *sealed, uint8_t *out);
/* Writes the checksum, and returns it. */
uint64_t gd_fields_seal(const gd_sealed *sealed, uint64_t seed,
                        uint8_t *out);
/* True if magic and checksum are right. */
bool gd_fields_verify(const gd_sealed *sealed, uint64_t seed,
                      const uint8_t *in);
/* GD_CORRUPT, which calls the file name, unless magic and checksum are right;
 * GD_VERSION for a newer major version, whatever the checksum is. */
gd_status gd_fields_check(const gd_sealed *sealed, const uint8_t *in,
                          const char *name, gd_error *err);
/* For GD_DECODE: out has room for a final zero. */
bool gd_fields_get_text(const uint8_t *in, size_t size, char *out);

#endif
