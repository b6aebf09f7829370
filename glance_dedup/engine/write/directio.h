/* SPDX-License-Identifier: Apache-2.0 */
/*
 * directio.h - appends to a group's file without the page cache.
 *
 * This leaves memory for other things, and saves the processor time of filling
 * the cache (speed.rst, "Beside the page cache").  Direct writes take only
 * whole pages.  So the last page is filled up with zeros; when more data comes,
 * it is written again, with the same bytes in front (I2).  Ordinary reads of
 * the file see the written bytes.
 *
 * Belongs to one appender, one thread at a time.
 */
#ifndef GD_DIRECTIO_H
#define GD_DIRECTIO_H

#include "engine/files/group.h"

typedef struct gd_directio gd_directio;

/* Returns NULL where direct writes are not possible.  The caller then writes
 * the usual way. */
gd_directio *gd_directio_open(const gd_env *env, int root,
                              const gd_group *group);
void gd_directio_close(gd_directio *direct);

/* Writes pieces one behind the other, followed by up to a page of zeros.
 * Returns false if not all was written; an ordinary write can then be tried,
 * and reports the cause.
 * REQUIRES: the file reaches to offset, and nobody needs the bytes behind
 * offset. */
bool gd_directio_write(gd_directio *direct, const struct iovec *pieces,
                       size_t count, uint64_t offset);

#endif
