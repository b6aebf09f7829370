/* SPDX-License-Identifier: Apache-2.0 */
/*
 * open.c - opens and closes volumes (volumes.rst, V1, V4, V7, V8).
 */
#include <stdio.h>

#include "engine/volume/directory.h"
#include "engine/volume/state.h"

enum {
    MAX_FROZEN = 4, /* journals that an owner may find without storing them
                      * at once */
};

static gd_status
allocate(gd_repo *repo, const char *name, bool dedup, gd_volume **out,
         gd_error *err)
{
    gd_volume *volume = gd_calloc(repo->env, 1, sizeof *volume, err);
    if (volume == NULL) {
        return GD_NOMEM;
    }
    volume->repo = repo;
    volume->lock = -1;
    volume->no_dedup = !dedup;
    snprintf(volume->name, sizeof volume->name, "%s", name);
    pthread_mutex_init(&volume->checkpointing, NULL);
    pthread_mutex_init(&volume->mutex, NULL);
    pthread_cond_init(&volume->changed, NULL);
    gd_overlay_init(&volume->fresh, repo->env);
    gd_overlay_init(&volume->stale, repo->env);
    *out = volume;
    return GD_OK;
}

/* A forked child has only a copy of the owner's memory. */
static void
give_up_own_space(gd_volume *volume)
{
    if (gd_repo_require_owner(volume->repo, NULL) == GD_OK) {
        (void)gd_volume_give_up_space(volume);
    } else if (volume->spare != NULL) {
        gd_journal_close(volume->spare);
    }
}

void
gd_volume_close(gd_volume *volume)
{
    const gd_env *env = volume->repo->env;
    gd_overlay_clear(&volume->fresh);
    gd_overlay_clear(&volume->stale);
    gd_volume_release_frozen(volume);
    if (volume->active != NULL) {
        give_up_own_space(volume);
        gd_volume_release_journal(volume->active);
    }
    if (volume->parts.repo != NULL) {
        gd_parts_close(&volume->parts);
    }
    if (volume->lock >= 0) {
        env->close(env, volume->lock);
    }
    pthread_cond_destroy(&volume->changed);
    pthread_mutex_destroy(&volume->mutex);
    pthread_mutex_destroy(&volume->checkpointing);
    env->release(env, volume->made);
    env->release(env, volume->frozen);
    env->release(env, volume);
}

static gd_status
require_ready(const gd_volume *volume, gd_error *err)
{
    switch (volume->head.state) {
    case GD_VOLUME_READY:
        return GD_OK;
    case GD_VOLUME_MAKING:
        return gd_fail(err, GD_NOTFOUND, "volume %s was not made to its end: "
                       "make it again", volume->name);
    default:
        return gd_fail(err, GD_NOTFOUND, "volume %s is being deleted",
                       volume->name);
    }
}

/* Makes a checkpoint of what was found, if that is to be done at once.  Without
 * room for it the volume can be read, and trimmed.  If it waited for space (V4),
 * it can be read after other failures, too, unless it has another owner, or its
 * next owner may find a journal that this one cannot write to. */
static gd_status
store_found(gd_volume *volume, gd_error *err)
{
    bool was_waiting = volume->waiting;
    if (!was_waiting && volume->frozen_count < MAX_FROZEN) {
        return GD_OK;
    }
    gd_status s = gd_volume_checkpoint(volume, err);
    bool lost = volume->broken.status != GD_OK && !volume->waiting;
    return !lost && (was_waiting || s == GD_NOSPACE) ? GD_OK : s;
}

static gd_status
open_volume(gd_volume *volume, gd_error *err)
{
    gd_repo *repo = volume->repo;
    gd_volume_mark *marks;
    GD_TRY(gd_volume_lock(repo->env, repo->root, volume->name, false,
                          &volume->lock, err));
    GD_TRY(gd_volume_open_newest(repo, volume->name, &volume->active,
                                 &volume->head, &marks, err));
    gd_status s = require_ready(volume, err);
    if (s == GD_OK) {
        s = gd_parts_open(&volume->parts, repo, &volume->head, marks, err);
    }
    repo->env->release(repo->env, marks);
    if (s == GD_OK) {
        s = gd_volume_recover(volume, err);
    }
    return s == GD_OK ? store_found(volume, err) : s;
}

gd_status
gd_volume_open(gd_repo *repo, const char *name, bool dedup, gd_volume **out,
               gd_error *err)
{
    gd_volume *volume;
    GD_TRY(gd_volume_require_call(repo, name, err));
    GD_TRY(allocate(repo, name, dedup, &volume, err));
    gd_status s = open_volume(volume, err);
    if (s != GD_OK) {
        gd_volume_close(volume);
        return s;
    }
    *out = volume;
    return GD_OK;
}
