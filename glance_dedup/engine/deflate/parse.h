/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parse.h - divides bytes into literals and matches exactly as zlib does.
 */
#ifndef GD_PARSE_H
#define GD_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/deflate/block.h"
#include "engine/deflate/chains.h"

typedef struct gd_parse {
    gd_chains_effort effort;
    uint32_t window_size;
    bool short_matches; /* those of up to 5 bytes are used */
    gd_chains chains;   /* of the lazy levels */

    /* Of the greedy levels, which insert no place of a long match. The tables
     * outlive a buffer without being cleared: numbers of places grow from buffer
     * to buffer by more than a window. */
    unsigned hash_bits;
    uint32_t *heads;   /* the number of the last place of each hash */
    int32_t *previous; /* the place before it, in a ring of the window's size */
    uint32_t origin;   /* the number of the buffer's first place */

    const uint8_t *plain;
    int32_t size;
    /* zlib keeps two windows of the buffer, from base to end. */
    int32_t base, end;
    int32_t block_start;
    gd_block *block;
} gd_parse;

/* Makes the tables for a level (1 to 9); gd_parse_close frees them, after a
 * failure, too. */
gd_status gd_parse_open(const gd_env *env, gd_parse *p, int level,
                        unsigned window_bits, unsigned memory_level,
                        gd_error *err);
void gd_parse_close(const gd_env *env, gd_parse *p);

/* Begins to parse a buffer. */
void gd_parse_begin(gd_parse *p, const uint8_t *plain, size_t size,
                    gd_block *block);

/* Parses the whole buffer by the level into blocks, the last one included.  A
 * block that fails ends it, and `size` is what was parsed then. */
void gd_parse_matches(gd_parse *p);
/* The same with runs of one byte as the only matches, and with literals only. */
void gd_parse_runs(gd_parse *p);
void gd_parse_literals(gd_parse *p);

#endif
