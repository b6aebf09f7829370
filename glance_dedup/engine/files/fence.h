/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fence.h - the fence: the accounting step that the catalog must know (I9;
 * format-derived.rst, "Fence").
 *
 * LevelDB may lose its last batches in a crash.  The fence is kept outside of
 * LevelDB.  It names the batch that must be there, because a spool entry was
 * removed on the strength of it.  Only the maintainer reads and writes the
 * fence.
 */
#ifndef GD_FENCE_H
#define GD_FENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/fencerecord.h"

/* *found: whether there is a valid record. */
gd_status gd_fence_read(const gd_env *env, int root, gd_fence *fence,
                        bool *found, gd_error *err);

/* On return the record is durable, and the one that counts.  GD_INVALID if the
 * sequence is lower than the last one of the same catalog; another catalog's
 * may be lower. */
gd_status gd_fence_write(const gd_env *env, int root, const gd_fence *fence,
                         gd_error *err);

#endif
