/* SPDX-License-Identifier: Apache-2.0 */
/*
 * opening.c - makes, opens and deletes volumes (volumes.rst, V1, V4, V7 to V9).
 */
#include <stdio.h>
#include <string.h>

#include "engine/base/array.h"
#include "engine/files/file.h"
#include "engine/files/freespace.h"
#include "engine/files/spool.h"
#include "engine/volume/directory.h"
#include "engine/volume/edition.h"
#include "engine/volume/state.h"

enum {
    MAX_FROZEN = 4, /* journals that an owner may find without storing them
                      * at once */
};

/* ---- opening ---- */

static gd_status
allocate(gd_repo *repo, const char *name, gd_volume **out, gd_error *err)
{
    gd_volume *volume = gd_calloc(repo->env, 1, sizeof *volume, err);
    if (volume == NULL) {
        return GD_NOMEM;
    }
    volume->repo = repo;
    volume->lock = -1;
    snprintf(volume->name, sizeof volume->name, "%s", name);
    pthread_mutex_init(&volume->checkpointing, NULL);
    pthread_mutex_init(&volume->mutex, NULL);
    pthread_cond_init(&volume->changed, NULL);
    gd_overlay_init(&volume->fresh, repo->env);
    gd_overlay_init(&volume->stale, repo->env);
    *out = volume;
    return GD_OK;
}

void
gd_volume_close(gd_volume *volume)
{
    const gd_env *env = volume->repo->env;
    gd_overlay_clear(&volume->fresh);
    gd_overlay_clear(&volume->stale);
    gd_volume_release_frozen(volume);
    if (volume->active != NULL) {
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
    if (s == GD_OK && volume->frozen_count >= MAX_FROZEN) {
        s = gd_volume_checkpoint(volume, err);
        /* Without room for it the volume can be read, and trimmed. */
        s = s == GD_NOSPACE ? GD_OK : s;
    }
    return s;
}

gd_status
gd_volume_open(gd_repo *repo, const char *name, gd_volume **out,
               gd_error *err)
{
    gd_volume *volume;
    GD_TRY(gd_volume_require_call(repo, name, err));
    GD_TRY(allocate(repo, name, &volume, err));
    gd_status s = open_volume(volume, err);
    if (s != GD_OK) {
        gd_volume_close(volume);
        return s;
    }
    *out = volume;
    return GD_OK;
}

/* ---- deleting (V9) ---- */

/* The head says that the volume is being deleted, durably. */
static gd_status
begin_deleting(gd_repo *repo, const char *name, gd_volume_head *head,
               gd_error *err)
{
    char directory[GD_NAME_SIZE];
    unsigned given = 0;
    if (head->state != GD_VOLUME_READY) {
        /* It is unfinished already, but perhaps not durably. */
        gd_volume_directory(name, directory);
        return gd_sync_dir(repo->env, repo->root, directory, err);
    }
    head->journal++;
    head->needed = head->journal;
    head->before = 0;
    head->base_size = 0;
    head->marks = 0;
    head->state = GD_VOLUME_DELETING;
    gd_status s = gd_volume_write_head(repo, name, head, NULL, err);
    while (s == GD_NOSPACE &&
           gd_freespace_give_up(repo->env, repo->root, &given)) {
        s = gd_volume_write_head(repo, name, head, NULL, err);
    }
    return s;
}

/* REQUIRES: the owner's lock. */
static gd_status
delete_owned(gd_repo *repo, const char *name, gd_error *err)
{
    gd_volume_head head;
    gd_volume_mark *marks;
    gd_journal *journal;
    gd_status s = gd_volume_open_newest(repo, name, &journal, &head, &marks, err);
    if (s == GD_OK) {
        repo->env->release(repo->env, marks);
        gd_journal_close(journal);
        s = begin_deleting(repo, name, &head, err);
        if (s == GD_OK) {
            head.base_size = 0;
            s = gd_volume_delete_recipes(repo, &head, NULL, 0, err);
        }
    } else if (s == GD_NOTFOUND) {
        s = GD_OK; /* it never had a journal, so no recipes, or has none
                    * any more */
    }
    return s == GD_OK ? gd_volume_remove(repo->env, repo->root, name, err) : s;
}

/* REQUIRES: the owner's lock. */
static gd_status
discard_owned(gd_repo *repo, const char *name, gd_error *err)
{
    gd_status s = delete_owned(repo, name, err);
    return s == GD_CORRUPT ? gd_volume_remove(repo->env, repo->root, name, err)
                           : s;
}

/* REQUIRES: the owner's lock. */
static gd_status
finish_owned(gd_repo *repo, const char *name, gd_error *err)
{
    gd_volume_head head;
    gd_status s = gd_volume_read_head(repo, name, &head, err);
    if (s == GD_OK && head.state == GD_VOLUME_READY) {
        return gd_fail(err, GD_EXISTS, "volume %s is whole", name);
    }
    return s == GD_OK || s == GD_NOTFOUND ? delete_owned(repo, name, err) : s;
}

static gd_status
lock_and(gd_status (*work)(gd_repo *, const char *, gd_error *), gd_repo *repo,
         const char *name, gd_error *err)
{
    int lock;
    gd_status s = gd_volume_require_call(repo, name, err);
    if (s == GD_OK) {
        s = gd_volume_lock(repo->env, repo->root, name, false, &lock, err);
    }
    if (s == GD_OK) {
        s = work(repo, name, err);
        repo->env->close(repo->env, lock);
    }
    return s;
}

gd_status
gd_volume_delete(gd_repo *repo, const char *name, gd_error *err)
{
    return lock_and(delete_owned, repo, name, err);
}

gd_status
gd_volume_delete_damaged(gd_repo *repo, const char *name, gd_error *err)
{
    return lock_and(discard_owned, repo, name, err);
}

gd_status
gd_volume_reap(gd_repo *repo, const char *name, gd_error *err)
{
    gd_status s = lock_and(finish_owned, repo, name, err);
    /* The maker or remover of the volume died while it had no lock: its
     * directory is empty. */
    return s == GD_NOTFOUND &&
                   gd_volume_remove_empty(repo->env, repo->root, name)
               ? GD_OK
               : s;
}

/* ---- making (V9) ---- */

static gd_status
require_plan(const char *name, const gd_volume_plan *plan, gd_error *err)
{
    uint64_t base = plan->base == NULL ? 0 : gd_image_header(plan->base)->size;
    GD_TRY(gd_volume_require_size(name, plan->size, err));
    if (!gd_volume_head_part_size_allowed(plan->part_size)) {
        return gd_fail(err, GD_INVALID, "volume %s: %llu is no size of parts",
                       name, (unsigned long long)plan->part_size);
    }
    if (strnlen(plan->project, GD_PROJECT_MAX + 1) > GD_PROJECT_MAX) {
        return gd_fail(err, GD_INVALID, "a project's name has at most %d "
                       "bytes", GD_PROJECT_MAX);
    }
    return base <= plan->size
               ? GD_OK
               : gd_fail(err, GD_INVALID, "volume %s: %llu bytes are less "
                         "than the image's %llu", name,
                         (unsigned long long)plan->size,
                         (unsigned long long)base);
}

static gd_status
first_head(gd_repo *repo, const gd_volume_plan *plan, gd_volume_head *head,
           gd_error *err)
{
    *head = (gd_volume_head){
        .journal = 1,
        .needed = 1,
        .scope = plan->scope,
        .size = plan->size,
        .part_size = plan->part_size,
        .state = plan->base == NULL ? GD_VOLUME_READY : GD_VOLUME_MAKING,
        .created = (uint64_t)repo->env->now(repo->env)};
    memcpy(head->repository_id, repo->params.repository_id, GD_ID_SIZE);
    snprintf(head->project, sizeof head->project, "%s", plan->project);
    if (plan->base != NULL) {
        snprintf(head->source, sizeof head->source, "%s",
                 gd_image_header(plan->base)->image_id);
    }
    int rc = repo->env->random(repo->env, head->volume_id, GD_ID_SIZE);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot draw a random number")
                  : GD_OK;
}

static gd_status
make_base(gd_repo *repo, const char *name, const gd_volume_plan *plan,
          gd_volume_head *head, uint64_t *stored, gd_error *err)
{
    GD_TRY(gd_edition_base(repo, head, plan->base, stored, err));
    head->journal++;
    head->needed = head->journal;
    head->base_size = gd_image_header(plan->base)->size;
    head->state = GD_VOLUME_READY;
    GD_TRY(gd_volume_write_head(repo, name, head, NULL, err));
    return gd_volume_unlink_journal(repo->env, repo->root, name,
                                    head->journal - 1, err);
}

/* An unfinished volume of this name is removed first.
 * REQUIRES: the owner's lock. */
static gd_status
clear_name(gd_repo *repo, const char *name, bool *removed, gd_error *err)
{
    gd_volume_head head;
    uint32_t *numbers;
    size_t count;
    *removed = false;
    GD_TRY(gd_volume_list_journals(repo->env, repo->root, name,
                                   &numbers, &count, err));
    repo->env->release(repo->env, numbers);
    if (count == 0) {
        return GD_OK;
    }
    gd_status s = gd_volume_read_head(repo, name, &head, err);
    if (s == GD_OK && head.state == GD_VOLUME_READY) {
        return gd_fail(err, GD_EXISTS, "volume %s exists already", name);
    }
    *removed = s == GD_OK;
    return s == GD_OK ? delete_owned(repo, name, err) : s;
}

static gd_status
make_volume(gd_repo *repo, const char *name, const gd_volume_plan *plan,
            uint64_t *stored, gd_error *err)
{
    gd_volume_head head;
    gd_status s = first_head(repo, plan, &head, err);
    if (s == GD_OK) {
        s = gd_volume_write_head(repo, name, &head, NULL, err);
    }
    if (s == GD_OK && plan->base != NULL) {
        s = make_base(repo, name, plan, &head, stored, err);
    }
    if (s != GD_OK) {
        (void)delete_owned(repo, name, NULL);
    }
    return s;
}

gd_status
gd_volume_create(gd_repo *repo, const char *name, const gd_volume_plan *plan,
                 uint64_t *stored, gd_error *err)
{
    gd_volume_plan full = *plan;
    bool again = true;
    *stored = 0;
    gd_status s = gd_volume_require_call(repo, name, err);
    if (full.part_size == 0) {
        full.part_size = GD_VOLUME_PART;
    }
    if (full.size == 0 && full.base != NULL) {
        uint64_t size = gd_image_header(full.base)->size;
        full.size = (size + GD_VOLUME_SECTOR - 1) / GD_VOLUME_SECTOR *
                    GD_VOLUME_SECTOR;
    }
    if (s == GD_OK) {
        s = require_plan(name, &full, err);
    }
    if (s == GD_OK) {
        s = gd_repo_use_feature(repo, GD_FEATURE_VOLUMES, err);
    }
    while (s == GD_OK && again) {
        int lock;
        s = gd_volume_lock(repo->env, repo->root, name, true, &lock, err);
        if (s != GD_OK) {
            return s == GD_BUSY ? gd_fail(err, GD_EXISTS,
                                          "volume %s exists already", name)
                                : s;
        }
        s = clear_name(repo, name, &again, err);
        if (s == GD_OK && !again) {
            s = make_volume(repo, name, &full, stored, err);
        }
        repo->env->close(repo->env, lock);
    }
    return s;
}
