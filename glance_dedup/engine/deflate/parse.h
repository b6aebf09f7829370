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

/* How hard a level searches. */
typedef struct gd_parse_effort {
    uint32_t good_length; /* a quarter of the chain is enough behind this one */
    uint32_t lazy_length; /* no search behind a match of this length; if the
                           * level is not lazy: insert no more of a longer one */
    uint32_t nice_length; /* ends a search */
    uint32_t max_chain;   /* candidates */
    bool is_lazy;
} gd_parse_effort;

/* The tables outlive a buffer without being cleared: positions in `heads` are
 * numbers that grow from buffer to buffer, by a window at least, so that those
 * of an older buffer are out of reach. */
typedef struct gd_parse {
    gd_parse_effort effort;
    uint32_t window_size;
    unsigned hash_bits;
    bool short_matches; /* those of up to 5 bytes are used */
    uint32_t *heads;    /* the last place of each hash */
    int32_t *previous;  /* the place before it, in a ring of the window's size */
    uint32_t origin;    /* the number of the buffer's first place in heads */

    const uint8_t *plain;
    int32_t size;
    /* zlib keeps two windows of the buffer, from base to end. */
    int32_t base, end;
    int32_t block_start;
    gd_block *block;
} gd_parse;

/* The effort of level 1 to 9. */
gd_parse_effort gd_parse_effort_of(int level);

/* Begins to parse a buffer. */
void gd_parse_begin(gd_parse *p, const uint8_t *plain, size_t size,
                    gd_block *block);

/* Parse the whole buffer into blocks, the last one included: without a search if
 * a match is worth nothing, ... */
void gd_parse_greedy(gd_parse *p);
void gd_parse_lazy(gd_parse *p);
/* ... only runs of one byte, and only literals. */
void gd_parse_runs(gd_parse *p);
void gd_parse_literals(gd_parse *p);

#endif
