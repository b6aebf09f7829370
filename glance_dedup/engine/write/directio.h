/* SPDX-License-Identifier: Apache-2.0 */
/*
 * directio.h - appends to a group's file beside the page cache.
 *
 * For who would rather have the memory for other things, and the processor time
 * that filling it takes, than new blocks in it (design.rst, "Beside the page
 * cache").  Only whole pages can be written so: the last one is filled up with
 * zeros, and written again, with the same bytes in front (I2), when more comes.
 * What reads the file as usual sees what was written.
 *
 * Belongs to one appender, one thread at a time.
 */
#ifndef GD_DIRECTIO_H
#define GD_DIRECTIO_H

#include "engine/files/blockgroup.h"

typedef struct gd_directio gd_directio;

/* NULL where that is not possible: nothing is lost. */
gd_directio *gd_directio_open(const gd_env *env, int root,
                              const gd_group *group);
void gd_directio_close(gd_directio *direct);

/* Writes pieces one behind the other, and up to a page of zeros behind them.
 * False: not all of them; they can be written the usual way, which tells why.
 * REQUIRES: the file reaches to offset, and what is behind it is of no use to
 * anybody. */
bool gd_directio_write(gd_directio *direct, const struct iovec *pieces,
                       size_t count, uint64_t offset);

#endif
