/* SPDX-License-Identifier: Apache-2.0 */
/*
 * addruns.h - appends a part of a stored image by the addresses of its blocks,
 * without moving bytes (design.rst, "Copying by address").
 *
 * The source image is open, so its blocks stay (I12).  Its group's shared lock
 * is taken before an extent is noted, and held until the recipe is committed,
 * so the blocks stay until the recipe counts (I6).  A whole extent is copied
 * with its digest: nothing of the group is read.  Of an extent that is split,
 * the entries are read and verified (I7).
 *
 * The bytes are read and stored instead where that is impossible: blocks of
 * which only a part is wanted, blocks of another scope, and groups whose lock
 * is refused.  They are cut as they were in the source, and keep their marks
 * (I14).
 */
#ifndef GD_ADDRUNS_H
#define GD_ADDRUNS_H

#include "engine/read/image.h"
#include "engine/read/plan.h"
#include "engine/write/ingest.h"

/* *stored grows by the bytes that were read and stored, also after an error.
 * REQUIRES: the range lies within the image; the image is of the intake's
 * repository; no block is half taken, and none waits. */
gd_status gd_add_runs(gd_ingest *intake, gd_image *source, gd_range range,
                      uint64_t *stored, gd_error *err);

#endif
