/* SPDX-License-Identifier: Apache-2.0 */
/*
 * checkpoint.c - brings a volume's journal into recipes (volumes.rst, V6), and
 * what stands on that: snapshots.
 */
#include <string.h>

#include "engine/base/array.h"
#include "engine/files/image_delete.h"
#include "engine/volume/directory.h"
#include "engine/volume/edition.h"
#include "engine/volume/state.h"
#include "engine/volume/volumehints.h"

enum { PARTS_AT_ONCE = 64 }; /* editions committed, or deleted, together */

/* ---- the parts ---- */

static gd_status
note_made(gd_volume *volume, gd_volume_mark mark, gd_error *err)
{
    gd_volume_mark *made = gd_array_reserve(
        volume->repo->env, volume->made, &volume->made_room,
        volume->made_count + 1, sizeof *made, err);
    if (made == NULL) {
        return GD_NOMEM;
    }
    volume->made = made;
    volume->made[volume->made_count++] = mark;
    return GD_OK;
}

/* Returns whether the frozen records of a part hold anything but zeros. */
static bool
has_data(const gd_volume *volume, uint64_t part)
{
    uint64_t start = part * volume->parts.part_size;
    uint64_t end = start + volume->parts.part_size;
    const gd_piece *piece = gd_overlay_find(&volume->stale, start);
    while (piece != NULL && piece->offset < end && piece->journal == NULL) {
        piece = gd_overlay_next(piece);
    }
    return piece != NULL && piece->offset < end;
}

/* Finds the first part from `next` on that has frozen records. */
static bool
find_part(const gd_volume *volume, const gd_volume_head *head, uint64_t next,
          uint64_t *part)
{
    if (next >= gd_volume_head_parts(head)) {
        return false;
    }
    const gd_piece *piece =
        gd_overlay_find(&volume->stale, next * head->part_size);
    if (piece == NULL || piece->offset >= head->size) {
        return false;
    }
    *part = piece->offset / head->part_size;
    *part = *part > next ? *part : next;
    return true;
}

/* Commits the editions of the next parts that have frozen records, `most` at
 * most.  *next: the first part that is not done.  *count: how many parts have a
 * new edition. */
static gd_status
commit_batch(gd_volume *volume, gd_edition_batch *batch, size_t most,
             uint64_t *next, gd_volume_mark made[PARTS_AT_ONCE], size_t *count,
             gd_volume_counters *counters, gd_error *err)
{
    uint64_t part;
    *count = 0;
    while (*count < most &&
           find_part(volume, batch->head, *next, &part)) {
        *next = part + 1;
        if (!has_data(volume, part) &&
            !gd_parts_has_bytes(&volume->parts, part)) {
            continue; /* zeros over zeros */
        }
        gd_volume_mark *mark = &made[(*count)++];
        *mark = (gd_volume_mark){
            part, gd_parts_edition(&volume->parts, part) + 1};
        GD_TRY(gd_edition_add(batch, &volume->stale, *mark, err));
    }
    return *count == 0 ? GD_OK : gd_edition_commit(batch, counters, err);
}

/* Commits the parts that have frozen records, in order, except those that a
 * checkpoint that failed has done.  If several parts at once fail, it goes on
 * with one at a time: a disk may have room for one, or one may be damaged.  So does
 * the next checkpoint after one without room: what several parts that fail have
 * stored takes the room that one would need.  If there is no room, it first gives
 * up what the volume keeps for writes to come (V10). */
static gd_status
commit_parts(gd_volume *volume, const gd_edition_hints *hints,
             gd_volume_counters *counters, gd_error *err)
{
    gd_volume_head head;
    gd_volume_mark made[PARTS_AT_ONCE];
    gd_status s = GD_OK;
    bool gave_up = false;
    size_t count = 1, most = volume->singly ? 1 : PARTS_AT_ONCE;
    gd_volume_copy_head(volume, &head);
    uint64_t next = volume->made_count == 0
                        ? 0
                        : volume->made[volume->made_count - 1].part + 1;
    while (s == GD_OK && count > 0) {
        gd_edition_batch batch = {
            .parts = &volume->parts,
            .head = &head,
            .hints = hints,
            .owner = {volume, gd_volume_confirm_owner}};
        uint64_t begin = next;
        s = commit_batch(volume, &batch, most, &next, made, &count, counters,
                         err);
        gd_edition_end(&batch);
        bool again = s != GD_OK && count > 1;
        if (s == GD_NOSPACE && !gave_up) {
            gave_up = true;
            again = gd_volume_give_up_space(volume) || again;
        }
        if (again) {
            most = 1;
            next = begin;
            s = GD_OK;
            continue;
        }
        for (size_t i = 0; s == GD_OK && i < count; i++) {
            s = note_made(volume, made[i], err);
        }
    }
    volume->singly = s == GD_NOSPACE;
    return s;
}

/* ---- the end of a checkpoint ---- */

/* REQUIRES: the mutex. */
static gd_status
append_note(gd_volume *volume, gd_record note, gd_error *err)
{
    gd_append append = {.record = note};
    GD_TRY(gd_volume_append(volume, &append, 1, err));
    gd_journal_accept(volume->active, &append);
    return GD_OK;
}

/* The marks go into the active journal, and behind them that the frozen ones
 * are stored, durably (V7, V8).  If this fails, it is tried again with the same
 * editions: a mark may be there already. */
static gd_status
append_marks(gd_volume *volume, gd_error *err)
{
    pthread_mutex_lock(&volume->mutex);
    gd_status s = gd_volume_require_intact(volume, err);
    for (size_t i = 0; s == GD_OK && i < volume->made_count; i++) {
        s = append_note(volume,
                        (gd_record){.kind = GD_RECORD_MARK,
                                    .offset = volume->made[i].part,
                                    .length = volume->made[i].edition},
                        err);
    }
    if (s == GD_OK) {
        s = append_note(volume, (gd_record){.kind = GD_RECORD_STORED}, err);
    }
    if (s == GD_OK) {
        s = gd_volume_sync_stored(volume, err);
    }
    pthread_mutex_unlock(&volume->mutex);
    return s;
}

/* Deletes the editions before those that were made.  What cannot be deleted now
 * is garbage, which the next owner deletes (V7). */
static void
delete_old(gd_volume *volume)
{
    gd_repo *repo = volume->repo;
    char ids[PARTS_AT_ONCE][GD_IMAGE_ID_MAX + 1];
    size_t count = 0;
    for (size_t i = 0; i < volume->made_count; i++) {
        const gd_volume_mark *made = &volume->made[i];
        if (made->edition > 1) {
            gd_volume_edition_id(volume->parts.volume_id, made->part,
                                 made->edition - 1, ids[count++]);
        }
        if (count == PARTS_AT_ONCE || i + 1 == volume->made_count) {
            (void)gd_image_delete_several(repo->env, repo->root,
                                          &repo->params, ids, count, NULL);
            count = 0;
        }
    }
    volume->made_count = 0;
}

static void
add_counters(gd_volume *volume, const gd_volume_counters *stored)
{
    gd_volume_counters *counters = &volume->head.counters;
    pthread_mutex_lock(&volume->mutex);
    counters->unique += stored->unique;
    counters->duplicate += stored->duplicate;
    counters->zero += stored->zero;
    counters->skipped += stored->skipped;
    counters->prefetched += stored->prefetched;
    pthread_mutex_unlock(&volume->mutex);
}

/* All frozen records are in editions that were made then. */
static gd_status
commit_frozen(gd_volume *volume, gd_error *err)
{
    gd_volume_counters stored = {0};
    /* A former owner stores nothing (V6). */
    GD_TRY(gd_volume_confirm_owner(volume, err));
    gd_edition_hints *hints = gd_volume_take_hints(volume, err);
    if (hints == NULL) {
        return GD_NOMEM;
    }
    gd_status s = commit_parts(volume, hints, &stored, err);
    volume->repo->env->release(volume->repo->env, hints);
    add_counters(volume, &stored);
    return s;
}

/* The parts have the editions that were made. */
static void
set_parts(gd_volume *volume)
{
    for (size_t i = 0; i < volume->made_count; i++) {
        gd_parts_set(&volume->parts, volume->made[i].part,
                     volume->made[i].edition);
    }
}

/* Begins a journal whose head differs only in marks and counters. */
static gd_status
rotate(gd_volume *volume, gd_volume_fate fate, gd_error *err)
{
    gd_volume_head head;
    gd_volume_copy_head(volume, &head);
    const gd_volume_change same = {.size = head.size,
                                   .base_size = head.base_size,
                                   .state = head.state};
    return gd_volume_rotate(volume, &same, fate, err);
}

/* Marks the editions that were made, durably, and drops the frozen journals. */
static gd_status
replace_frozen(gd_volume *volume, bool go_on, gd_error *err)
{
    pthread_mutex_lock(&volume->mutex);
    bool much = gd_volume_unsynced_bytes(volume->active) > GD_VOLUME_LITTLE;
    pthread_mutex_unlock(&volume->mutex);
    if (go_on && much) {
        set_parts(volume); /* the new head has their marks */
        gd_status s = rotate(volume, GD_REPLACE, err);
        if (s != GD_NOSPACE) {
            return s;
        }
    }
    GD_TRY(append_marks(volume, err));
    GD_TRY(gd_volume_confirm_owner(volume, err));
    set_parts(volume);
    pthread_mutex_lock(&volume->mutex);
    gd_volume_drop_frozen(volume);
    pthread_mutex_unlock(&volume->mutex);
    return GD_OK;
}

gd_status
gd_volume_store_frozen(gd_volume *volume, bool go_on, gd_error *err)
{
    if (volume->frozen_count == 0) {
        return GD_OK;
    }
    GD_TRY(commit_frozen(volume, err));
    GD_TRY(replace_frozen(volume, go_on, err));
    delete_old(volume);
    return GD_OK;
}

/* ---- checkpoints ---- */

gd_status
gd_volume_make_writable(gd_volume *volume, gd_error *err)
{
    gd_status s = gd_volume_take_up(volume, false, err);
    if (s != GD_NOSPACE || !volume->waiting) {
        return s;
    }
    volume->singly = true;
    GD_TRY(commit_frozen(volume, err));
    GD_TRY(gd_volume_take_up(volume, true, err));
    pthread_mutex_lock(&volume->mutex);
    volume->head.counters.checkpoints++;
    pthread_mutex_unlock(&volume->mutex);
    return GD_OK;
}

/* Returns whether the journals up to the one of this number have records that
 * are not stored. */
static bool
has_records(gd_volume *volume, uint32_t number)
{
    pthread_mutex_lock(&volume->mutex);
    const gd_journal *active = volume->active;
    bool has = (volume->frozen_count > 0 &&
                volume->frozen[0]->number <= number) ||
               (active->number <= number && active->records > 0);
    pthread_mutex_unlock(&volume->mutex);
    return has;
}

gd_status
gd_volume_store_all(gd_volume *volume, gd_error *err)
{
    GD_TRY(gd_volume_make_writable(volume, err));
    pthread_mutex_lock(&volume->mutex);
    uint32_t last = volume->active->number;
    pthread_mutex_unlock(&volume->mutex);
    while (has_records(volume, last)) {
        if (volume->frozen_count == 0) {
            GD_TRY(rotate(volume, GD_FREEZE, err));
        }
        GD_TRY(gd_volume_store_frozen(volume, true, err));
    }
    return GD_OK;
}

gd_status
gd_volume_checkpoint(gd_volume *volume, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(volume->repo, err));
    pthread_mutex_lock(&volume->checkpointing);
    gd_status s = gd_volume_store_all(volume, err);
    pthread_mutex_unlock(&volume->checkpointing);
    return s;
}

gd_status
gd_volume_final_checkpoint(gd_volume *volume, gd_error *err)
{
    gd_volume_head stored, now;
    GD_TRY(gd_repo_require_owner(volume->repo, err));
    pthread_mutex_lock(&volume->checkpointing);
    gd_status s = gd_volume_store_all(volume, err);
    if (s == GD_OK) {
        s = gd_volume_read_head(volume->repo, volume->name, &stored, err);
    }
    gd_volume_copy_head(volume, &now);
    if (s == GD_OK && volume->frozen_count == 0 &&
        memcmp(&stored.counters, &now.counters, sizeof now.counters) != 0) {
        s = rotate(volume, GD_FREEZE, err);
    }
    pthread_mutex_unlock(&volume->checkpointing);
    return s;
}

bool
gd_volume_give_up_space(gd_volume *volume)
{
    pthread_mutex_lock(&volume->mutex);
    gd_journal *active = volume->active;
    bool had_any = volume->spare != NULL;
    gd_volume_drop_spare(volume);
    if (active->made && volume->broken.status == GD_OK) {
        uint64_t before = active->ahead;
        gd_journal_trim(active);
        had_any = had_any || active->ahead < before;
    }
    pthread_mutex_unlock(&volume->mutex);
    return had_any;
}

void
gd_volume_renew(gd_volume *volume)
{
    if (gd_repo_require_room_to_spare(volume->repo, GD_JOURNAL_MAX_SPARE,
                                      NULL) == GD_NOSPACE) {
        (void)gd_volume_give_up_space(volume);
    }
    gd_parts_renew(&volume->parts);
    gd_fpcache_drop_removed(volume->repo->cache);
}

/* ---- snapshots ---- */

/* A snapshot names the volume's blocks, so it is of the volume's scope: that of
 * all, or that of the volume's own project. */
static gd_status
require_project(const gd_volume_head *head, const char *project, gd_error *err)
{
    if (gd_scope_equal(&head->scope, &gd_global_scope) ||
        strcmp(project, head->project) == 0) {
        return GD_OK;
    }
    return gd_fail(err, GD_INVALID,
                   "the volume shares blocks only within its project, '%s'; a "
                   "snapshot of project '%s' would share them, too: make the "
                   "snapshot without --project, and store it for the other "
                   "project with image copy ID NEW_ID --project",
                   head->project, project);
}

gd_status
gd_volume_snapshot(gd_volume *volume, const char *image_id,
                   const char *project, gd_recipe_header *header,
                   gd_error *err)
{
    gd_volume_head head;
    GD_TRY(gd_repo_require_owner(volume->repo, err));
    if (gd_volume_is_recipe(image_id)) {
        return gd_fail(err, GD_INVALID, "%s is a name for a volume's recipe: "
                       "choose another id for the image", image_id);
    }
    gd_volume_copy_head(volume, &head);
    GD_TRY(require_project(&head, project, err));
    pthread_mutex_lock(&volume->checkpointing);
    gd_status s = gd_volume_store_all(volume, err);
    if (s == GD_OK) {
        gd_volume_copy_head(volume, &head);
        s = gd_edition_snapshot(&volume->parts, &head, image_id, project,
                                header, err);
    }
    pthread_mutex_unlock(&volume->checkpointing);
    return s;
}
