/* SPDX-License-Identifier: Apache-2.0 */
/*
 * readahead.h - asks for what will be read of an image, in the order in which
 * it lies on the disk, some way ahead of the reading (design.rst, "Reading").
 *
 * Asking brings it into the page cache, from where plan.h and blockfetch.h
 * read and verify it: so nothing here is verified, and nothing that goes wrong
 * here is an error.  Whoever reads on gets further ahead with each step, to 32
 * MiB of blocks, or 128 MiB if they lie scattered; whoever reads here and
 * there, only what he reads.
 *
 * What is asked for is what a disk with a head has to do: it is counted here
 * (seeks.h).
 */
#ifndef GD_READAHEAD_H
#define GD_READAHEAD_H

#include <pthread.h>

#include "engine/base/groupmap.h"
#include "engine/format/recipe.h"
#include "engine/handle/repo.h"

/* Of one open image; thread-safe. */
typedef struct gd_readahead {
    gd_repo *repo;
    const gd_recipe *recipe;
    pthread_mutex_t mutex; /* guards the next four */
    uint64_t start, end;   /* of the image: asked for */
    uint64_t span; /* bytes of blocks asked for last; 0: not reading on yet */
    bool busy;      /* a thread is asking; it alone uses what follows */
    bool scattered; /* what was asked for last lay in many places */
    uint64_t recipe_start, recipe_end; /* bytes of the file: asked for */
    gd_groupmap stores; /* how much of a group's store was asked for */
} gd_readahead;

void gd_readahead_open(gd_readahead *ahead, gd_repo *repo,
                       const gd_recipe *recipe);
void gd_readahead_close(gd_readahead *ahead);

/* To be called before a range is read.  True: all that it needs was asked for,
 * now or before.  REQUIRES: the range lies within the image. */
bool gd_readahead_read(gd_readahead *ahead, uint64_t offset, uint64_t length);

#endif
