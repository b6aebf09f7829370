/* SPDX-License-Identifier: Apache-2.0 */
/*
 * readahead.h - advises the kernel to read parts of an image ahead of their
 * use, in disk order (design.rst, "Reading").
 *
 * This fills the page cache; plan.h and fetch.h read from there and
 * verify.  So nothing is verified here, and no failure here is an error.  A
 * sequential reader gets further ahead with each step: up to 32 MiB of blocks,
 * or 128 MiB if the blocks lie scattered.  For a random reader only the range
 * itself is asked for.  Not even that, if the range is small and lies in one
 * extent whose entries are cached (metacache.h): it takes no more than to read
 * the segments.  Slices of cold groups are announced instead (slices.h), in the
 * order of the image.
 *
 * What is asked for is what a disk with a head has to do, so it is counted here
 * (seeks.h).
 */
#ifndef GD_READAHEAD_H
#define GD_READAHEAD_H

#include <pthread.h>

#include "engine/base/groupmap.h"
#include "engine/format/recipe.h"
#include "engine/repo/repo.h"

/* Belongs to one open image.  Thread-safe. */
typedef struct gd_readahead {
    gd_repo *repo;
    const gd_recipe *recipe;
    pthread_mutex_t mutex; /* guards the next four */
    uint64_t start, end;   /* part of the image that was asked for */
    uint64_t span; /* bytes of blocks last asked for; 0: the reader is not
                    * sequential yet */
    bool busy;      /* a thread is asking; only it uses the fields below */
    bool scattered; /* the blocks last asked for lay in many places */
    uint64_t recipe_start, recipe_end; /* bytes of the recipe's file that were
                                        * asked for */
    gd_groupmap stores; /* how much of each group's store was asked for */
} gd_readahead;

void gd_readahead_open(gd_readahead *ahead, gd_repo *repo,
                       const gd_recipe *recipe);
void gd_readahead_close(gd_readahead *ahead);

/* Must be called before a range is read.  *asked: all that the range needs was
 * asked for, now or before.  *sequential: the range follows what was read before
 * it.
 * REQUIRES: the range lies within the image. */
void gd_readahead_read(gd_readahead *ahead, uint64_t offset, uint64_t length,
                       bool *asked, bool *sequential);

#endif
