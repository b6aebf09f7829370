/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_mode.h - whether new blocks are written through the page cache or beside
 * it (speed.rst, "Beside the page cache").
 *
 * The choice is made for a stretch, from one sync point to the next.  If it is
 * left to the program, it writes beside the page cache if that takes less
 * processor time, and if the disk is so fast that an upload hardly waits for
 * it.  Both are known from earlier stretches of the handle.  The choice changes
 * only how the bytes reach the file, never which.
 *
 * If processors are short, a write may take long on any disk.  So the fastest
 * writes of a stretch show how fast the disk is.
 *
 * Threads may call these functions at the same time.
 */
#ifndef GD_IO_MODE_H
#define GD_IO_MODE_H

#include "engine/repo/repo.h"

enum {
    GD_IO_MODE_LONG = 256 << 20,  /* a stretch has no more bytes than that, */
    GD_IO_MODE_TRIAL = 32 << 20,  /* and so many if it is there to measure */
    GD_IO_MODE_MIN = 16 << 20,  /* the cost of a shorter one means nothing */
    /* A write is fast if it takes no longer for a byte.  MD5 takes 1.4 ns or
     * more, so an upload does not wait for such a disk. */
    GD_IO_MODE_FAST_NS = 2,
    GD_IO_MODE_FEW = 16, /* a disk is fast if one write of so many is */
};
/* After so many bytes the way that was not chosen is tried again. */
#define GD_IO_MODE_AGAIN ((uint64_t)4 << 30)

/* The writes between two sync points, and their cost so far. */
typedef struct gd_stretch {
    gd_io_mode way;
    uint64_t most;  /* after so many bytes a sync point is due */
    int64_t worked; /* processor time of writing and syncing, ns */
    unsigned writes, fast; /* all, and the fast ones */
} gd_stretch;

/* The next stretch, where both ways are possible and the choice is free. */
void gd_io_mode_next(gd_repo *repo, gd_stretch *stretch);
/* A stretch of so many bytes has ended with a sync point. */
void gd_io_mode_note(gd_repo *repo, const gd_stretch *stretch,
                     uint64_t bytes);
/* Writing beside the page cache failed: as if it cost more than all else. */
void gd_io_mode_refuse(gd_repo *repo);

#endif
