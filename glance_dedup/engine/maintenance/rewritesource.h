/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rewritesource.h - the live blocks of a group that is rewritten, in the order
 * in which the new file is to have them.
 *
 * A rewrite that keeps segments takes them one by one, as they lie in the old
 * file.  One that packs blocks again takes a *window* of consecutive slots at a
 * time.  It first loads the window's blocks into memory, segment by segment in
 * the order of the disk.  Then blocks of any slots can be packed together,
 * though each old segment was read only once.
 *
 * Every block is verified when it is read, by checksum and by fingerprint.
 */
#ifndef GD_REWRITESOURCE_H
#define GD_REWRITESOURCE_H

#include "engine/format/similar.h"
#include "engine/maintenance/leasedgroup.h"
#include "engine/read/verify.h"

typedef struct gd_rewrite_source {
    gd_leased_group *leased;
    bool loads;   /* blocks are packed again */
    bool similar; /* in the order of similarity */
    gd_decoder *workers; /* one for each thread */
    uint32_t *order; /* the window's live slots, as they are to be written */
    uint32_t count;  /* how many; 0 behind the last window */
    uint32_t next;   /* the first slot behind the window */
    /* Of a window that is loaded: */
    uint32_t *by_segment; /* its live slots, in the order of the disk */
    uint32_t loaded;      /* how many of these are in memory */
    uint8_t *plain;
    uint64_t room; /* bytes of plain */
    uint32_t *at;  /* of each slot: where its block is in plain */
    gd_similar_features *features; /* of each slot, to find the order of similarity */
} gd_rewrite_source;

/* packing is NULL to keep segments.  REQUIRES: *source is all zeros.  It must
 * be closed after a failure, too. */
gd_status gd_rewrite_source_open(gd_rewrite_source *source,
                                 gd_leased_group *leased,
                                 const gd_packing *packing, gd_error *err);
void gd_rewrite_source_close(gd_rewrite_source *source);

/* Returns how many threads: the pool's, and the one that waits for them. */
unsigned gd_rewrite_source_workers(const gd_rewrite_source *source);

/* Goes to the next window.  One that is loaded has no order yet. */
gd_status gd_rewrite_source_advance(gd_rewrite_source *source, gd_error *err);
/* Returns whether the window is complete: loaded, and with an order. */
bool gd_rewrite_source_ready(const gd_rewrite_source *source);
/* Loads the next few MiB of the window, with all threads, and after the last
 * ones finds the order.  *read: bytes from the disk. */
gd_status gd_rewrite_source_load(gd_rewrite_source *source, uint64_t *read,
                                 gd_error *err);

/* Reads and decodes, with worker w, the segment that these slots name, and
 * verifies their blocks.  *read grows by the bytes from the disk. */
gd_status gd_rewrite_source_read(const gd_rewrite_source *source,
                                 gd_decoder *w, const uint32_t *slots,
                                 uint32_t count, gd_segment_header *header,
                                 uint64_t *read, gd_error *err);

#endif
