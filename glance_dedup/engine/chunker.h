/*
 * chunker.h - where a stream is cut, and which blocks are all zeros.
 *
 * Cutting sees only the bytes it is given, so that a content-defined chunker
 * fits the same interface: "how long is the first block of these bytes?"
 */
#ifndef GD_CHUNKER_H
#define GD_CHUNKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "status.h"

enum {
    GD_BLOCK_MIN = 512,
    GD_BLOCK_MAX = 65536,
};

typedef struct gd_chunker gd_chunker;

struct gd_chunker {
    size_t max_length; /* no block is longer */
    /* The length of the first block of data[0..len), or 0 if the cut depends
     * on bytes still to come.  With last, no more bytes will come, so that
     * the result is at least 1 for len >= 1.  Thread-safe. */
    size_t (*next)(const gd_chunker *chunker, const uint8_t *data, size_t len,
                   bool last);
};

/* Fixed blocks of block_size bytes, a power of two from GD_BLOCK_MIN to
 * GD_BLOCK_MAX; only the last block of a stream may be shorter.
 * GD_INVALID otherwise. */
gd_status gd_chunker_fixed(gd_chunker *chunker, size_t block_size,
                           gd_error *err);

/* Whether data[0..len) is all zeros, by reading it (never by asking the file
 * system for holes).  Any alignment; len may be 0 (true).  The vectorised
 * form stops early on the first non-zero byte's cache line; the scalar one is
 * its reference in the tests. */
bool gd_is_zero(const uint8_t *data, size_t len);
bool gd_is_zero_scalar(const uint8_t *data, size_t len);

#endif
