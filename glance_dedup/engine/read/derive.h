/* SPDX-License-Identifier: Apache-2.0 */
/*
 * derive.h - makes bytes of a file from its plain bytes (image-disks.rst,
 * "Reading the file").
 *
 * Each derived extent is compared with its checksum before a byte of it is
 * handed out (F1).
 */
#ifndef GD_DERIVE_H
#define GD_DERIVE_H

#include <pthread.h>

#include "engine/deflate/deflate.h"
#include "engine/read/plain.h"

/* Buffers and tables for one derived extent at a time.  A thread borrows it. */
typedef struct gd_deriver {
    uint8_t *plain; /* GD_DEFLATE_MAX_PLAIN bytes */
    uint8_t *out;
    size_t room; /* in out */
    gd_deflate *encoder;
    unsigned number;  /* of the encoder */
    uint64_t offset;  /* of the extent in out, in the file */
    uint64_t length;  /* 0: there is none */
    struct gd_deriver *next; /* among those that nobody has */
} gd_deriver;

enum { GD_DERIVERS_KEPT = 4 };

/* Derivers that nobody has, with the extents that they made last.  So reading
 * in small pieces derives each extent once. */
typedef struct gd_derivers {
    gd_plain plain;
    pthread_mutex_t mutex; /* guards the rest */
    gd_deriver *free;      /* the one used last comes first */
    unsigned count;
} gd_derivers;

void gd_derivers_init(gd_derivers *derivers, gd_plain plain);
/* REQUIRES: none is borrowed. */
void gd_derivers_free(gd_derivers *derivers);

/* Copies a part of a derived extent, whose offset counts from the extent's
 * begin.  Several threads may make extents of one image at once.  fresh: nothing
 * from caches. */
gd_status gd_derive_extent(gd_derivers *derivers, const gd_extent *extent,
                           gd_range part, bool fresh, uint8_t *out,
                           gd_error *err);

#endif
