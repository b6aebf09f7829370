/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blockfetch.h - reads planned blocks in disk order and hands them out
 * verified.
 *
 * Each block is verified against its checksum before it is handed out (I7).
 * What looks like damage is looked at again: first with the group's file looked
 * up by name, since a cached one may have been replaced by the group's
 * rewriting and lack what was appended since; then block by block, with the
 * spare copy in place of one that is damaged.  Belongs to one thread.
 */
#ifndef GD_BLOCKFETCH_H
#define GD_BLOCKFETCH_H

#include "engine/read/plan.h"

/* Who takes the blocks.  After a failure all of them come anew. */
typedef struct gd_taker {
    void *arg;
    /* From the beginning; may be NULL. */
    void (*start)(void *arg);
    void (*zeros)(void *arg, uint64_t offset, uint64_t length); /* likewise */
    /* All wants of one segment, verified.  stored are its bytes in the file,
     * without the header; NULL: it came out of the cache.  With parallel, it
     * is called for several segments at once, by threads of the pool. */
    bool parallel;
    gd_status (*segment)(void *arg, const gd_want *wants, size_t count,
                         const gd_segment_header *header,
                         const uint8_t *stored, const uint8_t *plain,
                         gd_error *err);
    /* One want, verified; block is the whole block's bytes. */
    gd_status (*block)(void *arg, const gd_want *want, const uint8_t *block,
                       gd_error *err);
} gd_taker;

/* What one thread decodes into; made at first use. */
typedef struct gd_scratch {
    gd_coder *coder;
    uint8_t *plain; /* a segment */
} gd_scratch;

typedef struct gd_block_fetch {
    gd_plan plan;
    gd_taker taker;
    bool cached;     /* take segments out of the handle's cache, and keep them
                      * there */
    uint8_t *in; /* GD_READ_ONCE and a segment; made at first use, too */
    gd_scratch *scratch; /* of each thread of the pool, and of the caller */
} gd_block_fetch;

gd_status gd_block_fetch_open(gd_block_fetch *fetch, gd_repo *repo,
                              const gd_recipe *recipe, const gd_taker *taker,
                              gd_error *err);
/* Also where opening failed. */
void gd_block_fetch_close(gd_block_fetch *fetch);

/* Hands out the blocks of these ranges, in disk order; if the plan got full,
 * those before plan.left. */
gd_status gd_block_fetch_ranges(gd_block_fetch *fetch, const gd_range *ranges,
                                size_t count, gd_error *err);

#endif
