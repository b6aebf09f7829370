/* SPDX-License-Identifier: Apache-2.0 */
/*
 * overlay.h - which record of the journal has the newest bytes of each range.
 *
 * A skip list (Pugh, CACM 1990) of pieces that do not overlap.  A piece takes
 * about 64 bytes.  Not thread-safe, but any number of threads may read while
 * none puts or clears.
 */
#ifndef GD_OVERLAY_H
#define GD_OVERLAY_H

#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

struct gd_journal;

/* A range of the volume, and the last bytes written to it. */
typedef struct gd_piece {
    uint64_t offset;
    uint64_t length;
    struct gd_journal *journal; /* NULL: zeros were written */
    uint64_t record;            /* where the record is in the journal */
    uint32_t record_length;     /* bytes of data in it */
    uint32_t from;              /* of them, before the piece's first */
} gd_piece;

static inline uint64_t
gd_piece_end(const gd_piece *piece)
{
    return piece->offset + piece->length;
}

enum { GD_OVERLAY_HEIGHT = 12 };

typedef struct gd_overlay_node gd_overlay_node;

typedef struct gd_overlay {
    const gd_env *env;
    gd_overlay_node *first[GD_OVERLAY_HEIGHT];
    uint64_t random;
    uint64_t count; /* pieces */
} gd_overlay;

void gd_overlay_init(gd_overlay *overlay, const gd_env *env);
void gd_overlay_clear(gd_overlay *overlay);
/* The piece takes the place of all that it covers.  *replaced grows by the
 * bytes, other than zeros, that were covered.  When out of memory nothing has
 * changed.
 * REQUIRES: length >= 1. */
gd_status gd_overlay_put(gd_overlay *overlay, const gd_piece *piece,
                         uint64_t *replaced, gd_error *err);
/* The first piece that ends behind offset; NULL if there is none. */
const gd_piece *gd_overlay_find(const gd_overlay *overlay, uint64_t offset);
/* The piece behind this one; NULL if it is the last. */
const gd_piece *gd_overlay_next(const gd_piece *piece);

#endif
