/* SPDX-License-Identifier: Apache-2.0 */
/*
 * freespace.c - see freespace.h.
 */
#include "engine/files/freespace.h"

#include <errno.h>

#include "engine/format/names.h"

enum {
    SHARE = 100,     /* at most 1/SHARE of the file system is kept, */
    MOVING = 10,     /* and 1/MOVING for a group that becomes cold */
    FILES_KEPT = 32, /* inodes; for the maintainer and some deletes */
};

static uint64_t
at_most(uint64_t bytes, uint64_t limit)
{
    return bytes < limit ? bytes : limit;
}

uint64_t
gd_freespace_kept(gd_freespace keep, uint64_t total)
{
    if (keep.reserve == 0) {
        return 0;
    }
    return at_most(keep.reserve, total / SHARE) +
           at_most(keep.moving, total / MOVING);
}

/* The same error as if the system itself had refused. */
static gd_status
no_space(gd_error *err)
{
    if (err != NULL) {
        err->sys_errno = ENOSPC;
    }
    return GD_NOSPACE;
}

static gd_status
require_files(const gd_space *space, gd_error *err)
{
    uint64_t kept = at_most(FILES_KEPT, space->total_files / SHARE);
    if (space->total_files == 0 || space->free_files > kept) {
        return GD_OK;
    }
    gd_fail(err, GD_NOSPACE,
            "the file system of the repository has room for %llu more files, "
            "and %llu are kept for deleting and collecting",
            (unsigned long long)space->free_files, (unsigned long long)kept);
    return no_space(err);
}

gd_status
gd_freespace_check(const gd_env *env, int fd, gd_freespace keep,
                   uint64_t bytes, gd_error *err)
{
    gd_space space;
    if (keep.reserve == 0 || env->free_space(env, fd, &space) < 0) {
        return GD_OK;
    }
    uint64_t kept = gd_freespace_kept(keep, space.total);
    if (space.free < kept || space.free - kept < bytes) {
        gd_fail(err, GD_NOSPACE,
                "no room for %llu bytes: the file system of the repository "
                "has %llu bytes free, and %llu are kept for deleting and "
                "collecting",
                (unsigned long long)bytes, (unsigned long long)space.free,
                (unsigned long long)kept);
        return no_space(err);
    }
    return require_files(&space, err);
}

bool
gd_freespace_give_up(const gd_env *env, int root, unsigned *next)
{
    char name[GD_NAME_SIZE];
    while (*next < GD_RESERVE_FILES) {
        gd_names_reserve((*next)++, name);
        if (env->unlinkat(env, root, name) == 0) {
            return true;
        }
    }
    return false;
}
