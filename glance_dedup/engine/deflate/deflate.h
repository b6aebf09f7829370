/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deflate.h - deflates a buffer into the bytes that zlib makes of it.
 *
 * The bytes are those of one call of zlib's deflate with Z_FINISH, in all
 * versions from 1.2.12 to 1.3.1 at least. They never change: stored images
 * depend on them. The contributors' page on deflate says which of zlib's
 * properties matter.
 */
#ifndef GD_DEFLATE_H
#define GD_DEFLATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

enum {
    GD_DEFLATE_MAX_PLAIN = 2 << 20, /* the largest cluster of qcow2 */
    GD_DEFLATE_SLACK = 16,
};

/* The values are zlib's. */
typedef enum gd_deflate_strategy {
    GD_DEFLATE_DEFAULT = 0,
    GD_DEFLATE_FILTERED = 1,
    GD_DEFLATE_HUFFMAN = 2,
    GD_DEFLATE_RLE = 3,
    GD_DEFLATE_FIXED = 4,
} gd_deflate_strategy;

typedef struct gd_deflate_params {
    uint8_t level;        /* 1 to 9 */
    uint8_t window_bits;  /* 9 to 15 */
    uint8_t memory_level; /* 1 to 9 */
    uint8_t strategy;
    bool has_header;      /* and a checksum at the end: zlib's wrapper */
} gd_deflate_params;

/* GD_INVALID unless each parameter is in its range. */
gd_status gd_deflate_require_params(const gd_deflate_params *params,
                                    gd_error *err);

/* The tables of an encoder. One thread at a time may use them. */
typedef struct gd_deflate gd_deflate;
/* The caller closes it. */
gd_status gd_deflate_open(const gd_env *env, const gd_deflate_params *params,
                          gd_deflate **encoder, gd_error *err);
void gd_deflate_close(const gd_env *env, gd_deflate *encoder);

/* Returns the length of the result in out, or 0 if that is longer than room -
 * GD_DEFLATE_SLACK. The bytes of out behind the result are undefined.
 * REQUIRES: length is at most GD_DEFLATE_MAX_PLAIN. */
size_t gd_deflate_encode(gd_deflate *encoder, const uint8_t *plain,
                         size_t length, uint8_t *out, size_t room);

/* Returns whether the result is this stream.  It ends with the first block that
 * is another, after *parsed of the plain bytes.  `out` has room for the stream
 * and GD_DEFLATE_SLACK. */
bool gd_deflate_makes(gd_deflate *encoder, const uint8_t *plain, size_t length,
                      const uint8_t *stream, size_t stream_length, uint8_t *out,
                      size_t *parsed);

#endif
