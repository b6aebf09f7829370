/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunker.h - where a stream is cut.
 *
 * Chunking sees only the bytes it is given: "how long is the first block of
 * these bytes?" So the end of a block depends only on the block's own bytes
 * and, for zeros, on the byte after them.  It does not depend on the pieces in
 * which the bytes arrive.
 */
#ifndef GD_CHUNKER_H
#define GD_CHUNKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

enum {
    GD_BLOCK_MIN = 512,
    GD_BLOCK_MAX = 65536,
    GD_GEAR_WINDOW = 64, /* bytes that a cut depends on; no block is shorter */
};

/* The constants of the hash (format.rst, "Chunking").  With hash = 2 * hash +
 * gd_gear[byte], modulo 2^64, the hash behind a byte depends on 64 bytes. */
extern const uint64_t gd_gear[256];

typedef struct gd_chunker gd_chunker;

struct gd_chunker {
    size_t max_length; /* no block is longer */
    size_t average;    /* about; for a stream of random bytes */
    /* The length of the first block of data[0..len), or 0 if the cut depends on
     * bytes still to come.  known: an earlier call searched this many of the
     * first bytes and found too few; they are not searched again.  With last,
     * no more bytes will come, so the result is at least 1 for len >= 1.
     * Thread-safe. */
    size_t (*next)(const gd_chunker *chunker, const uint8_t *data, size_t len,
                   size_t known, bool last);
    /* For content-defined chunking: */
    size_t minimum;
    uint64_t hard, easy; /* a cut's hash is less: up to the average; after it */
};

/* Fixed blocks of block_size bytes, a power of two from GD_BLOCK_MIN to
 * GD_BLOCK_MAX.  Only the last block of a stream may be shorter.  GD_INVALID
 * otherwise. */
gd_status gd_chunker_fixed(gd_chunker *chunker, size_t block_size,
                           gd_error *err);

/* Content-defined blocks, of minimum to maximum bytes; only the last block of a
 * stream may be shorter.  GD_INVALID, naming the mistake, unless
 * GD_GEAR_WINDOW <= minimum < average < maximum, average is a power of two, and
 * maximum is a valid block size. */
gd_status gd_chunker_gear(gd_chunker *chunker, size_t minimum, size_t average,
                          size_t maximum, gd_error *err);
/* Fixed blocks of the maximum if average is 0, else content-defined ones. */
gd_status gd_chunker_open(gd_chunker *chunker, size_t minimum, size_t average,
                          size_t maximum, gd_error *err);
/* The same cuts as gd_chunker_gear's, found byte by byte: the reference in the
 * tests. */
size_t gd_chunker_next_scalar(const gd_chunker *chunker, const uint8_t *data,
                              size_t len, bool last);

#endif
