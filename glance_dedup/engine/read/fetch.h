/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fetch.h - reads planned blocks in disk order and hands them out
 * verified.
 *
 * Each block is verified against its checksum before it is handed out (I7).  If
 * a block seems damaged, it is read again.  First the group's file is opened by
 * name again: a cached file may have been replaced by a rewriting of the group,
 * and then lacks later segments, or names an object that is gone.  Then the
 * blocks are read one by one, and the spare copy replaces one that is damaged.
 * Belongs to one thread.
 */
#ifndef GD_FETCH_H
#define GD_FETCH_H

#include "engine/read/plan.h"

/* Receives the blocks.  After a failure it receives all of them again. */
typedef struct gd_taker {
    void *arg;
    /* Starts from the beginning.  May be NULL. */
    void (*start)(void *arg);
    void (*zeros)(void *arg, uint64_t offset, uint64_t length); /* may be
                                                                 * NULL */
    /* Takes all wants of one segment, verified.  stored is the segment's bytes
     * in the file, without the header, or NULL if the segment came from the
     * cache.  If parallel is set, threads of the pool call this for several
     * segments at once. */
    bool parallel;
    /* Returns memory to which a segment of so many bytes may be decoded, before
     * it is verified; NULL: none.  May be NULL. */
    uint8_t *(*place)(void *arg, const gd_want *wants, size_t count,
                      uint32_t plain_length);
    gd_status (*segment)(void *arg, const gd_want *wants, size_t count,
                         const gd_segment_header *header,
                         const uint8_t *stored, const uint8_t *plain,
                         gd_error *err);
    /* Takes one want, verified.  block has the whole block's bytes. */
    gd_status (*block)(void *arg, const gd_want *want, const uint8_t *block,
                       gd_error *err);
} gd_taker;

typedef struct gd_fetch {
    gd_plan plan;
    gd_taker taker;
    bool cached; /* take segments from the handle's cache, and put them there */
    bool fresh; /* nothing from caches, and look files up by name, at once */
} gd_fetch;

void gd_fetch_open(gd_fetch *fetch, gd_repo *repo, const gd_recipe *recipe,
                   const gd_taker *taker);
void gd_fetch_close(gd_fetch *fetch);

/* Hands out the blocks of these ranges, in disk order.  If the plan gets full,
 * hands out only those before plan.left. */
gd_status gd_fetch_ranges(gd_fetch *fetch, const gd_range *ranges,
                          size_t count, gd_error *err);

#endif
