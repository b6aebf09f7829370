/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rename.c - gives a volume another name (volumes.rst, "Operations").
 *
 * No file of the volume has its name, so one rename of the directory does it.
 * The lock moves with the directory: a process that waits for it under the old
 * name finds that the name does not lead to it any more (V1).  A process that
 * looks up the volume by its id keeps the rename waiting.
 */
#include <errno.h>
#include <string.h>

#include "engine/files/file.h"
#include "engine/files/locks.h"
#include "engine/volume/directory.h"
#include "engine/volume/state.h"

/* An unfinished volume of the name is removed.  GD_EXISTS: there is a whole one,
 * or one that is being made. */
static gd_status
free_name(gd_repo *repo, const char *name, gd_error *err)
{
    gd_status s = gd_volume_reap(repo, name, err);
    if (s == GD_EXISTS || s == GD_BUSY) {
        return gd_fail(err, GD_EXISTS, "volume %s exists already", name);
    }
    return s == GD_NOTFOUND ? GD_OK : s;
}

/* A directory replaces an empty one, which has no lock yet, and nothing else: a
 * process that creates a volume there finds another one in its place.
 * REQUIRES: the owner's lock. */
static gd_status
move_directory(gd_repo *repo, const char *name, const char *new_name,
               gd_error *err)
{
    const gd_env *env = repo->env;
    char from[GD_NAME_SIZE], to[GD_NAME_SIZE];
    gd_volume_directory(name, from);
    gd_volume_directory(new_name, to);
    int rc = env->renameat(env, repo->root, from, to);
    if (rc == -ENOTEMPTY || rc == -EEXIST) {
        return gd_fail(err, GD_EXISTS, "volume %s exists already", new_name);
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot rename %s to %s", from, to)
                  : gd_sync_dir(env, repo->root, GD_DIR_VOLUMES, err);
}

/* The names' lock comes last, and for the rename alone: its holder waits for
 * nothing.
 * REQUIRES: the owner's lock. */
static gd_status
move_alone(gd_repo *repo, const char *name, const char *new_name,
           gd_error *err)
{
    int names;
    gd_status s = gd_locks_lock_names(repo->env, repo->root,
                                      repo->params.lock_timeout_ms, &names,
                                      err);
    if (s == GD_OK) {
        s = move_directory(repo, name, new_name, err);
        repo->env->close(repo->env, names);
    }
    return s;
}

static gd_status
require_whole(gd_repo *repo, const char *name, gd_error *err)
{
    gd_volume_head head;
    gd_status s = gd_volume_read_head(repo, name, &head, err);
    return s == GD_OK && head.state != GD_VOLUME_READY
               ? gd_fail(err, GD_NOTFOUND,
                         "volume %s is being made or deleted", name)
               : s;
}

gd_status
gd_volume_rename(gd_repo *repo, const char *name, const char *new_name,
                 gd_error *err)
{
    int lock;
    GD_TRY(gd_volume_require_call(repo, name, err));
    GD_TRY(gd_volume_require_name(new_name, err));
    GD_TRY(gd_volume_lock(repo->env, repo->root, name, false, &lock, err));
    gd_status s = require_whole(repo, name, err);
    if (s == GD_OK) {
        s = free_name(repo, new_name, err);
    }
    if (s == GD_OK) {
        s = move_alone(repo, name, new_name, err);
    }
    repo->env->close(repo->env, lock);
    return s;
}
