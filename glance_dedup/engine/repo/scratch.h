/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scratch.h - buffers for reading and decoding segments, lent to threads.
 *
 * A set of buffers has 2.3 MiB, most of which a read does not touch.  Memory that
 * is allocated for each read is cleared by the kernel for each read, so returned
 * sets are kept for the next one: as many as the pool has threads, and
 * GD_SCRATCH_SPARE.
 *
 * Thread-safe.  A set belongs to the thread to which it is lent.
 */
#ifndef GD_SCRATCH_H
#define GD_SCRATCH_H

#include <pthread.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/codec.h"
#include "engine/format/segment.h"

enum {
    /* Bytes of neighbouring segments that one read brings.  They are decoded
     * from a processor's own cache, so they are to fit into it. */
    GD_READ_ONCE = 256 << 10,
    /* Sets that are kept besides one for each thread of the pool: callers read
     * small ranges without the pool. */
    GD_SCRATCH_SPARE = 4,
};

typedef struct gd_scratch {
    gd_coder *coder;
    uint8_t *in;    /* GD_READ_ONCE and a segment */
    uint8_t *plain; /* one segment */
    struct gd_scratch *next; /* among those that nobody has */
} gd_scratch;

typedef struct gd_scratch_list {
    const gd_env *env;
    unsigned most; /* kept for the next use */
    pthread_mutex_t mutex; /* guards the next two */
    gd_scratch *free;
    unsigned count;
} gd_scratch_list;

void gd_scratch_list_init(gd_scratch_list *list, const gd_env *env,
                          unsigned most);
/* REQUIRES: nothing is lent. */
void gd_scratch_list_free(gd_scratch_list *list);

gd_status gd_scratch_lend(gd_scratch_list *list, gd_scratch **scratch,
                          gd_error *err);
/* scratch may be NULL. */
void gd_scratch_return(gd_scratch_list *list, gd_scratch *scratch);

#endif
