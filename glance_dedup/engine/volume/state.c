/* SPDX-License-Identifier: Apache-2.0 */
/*
 * state.c - an open volume's journal: its change, and its syncs; see state.h.
 */
#include "engine/volume/state.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "engine/volume/directory.h"

/* ---- small things ---- */

void
gd_volume_copy_head(gd_volume *volume, gd_volume_head *head)
{
    pthread_mutex_lock(&volume->mutex);
    *head = volume->head;
    pthread_mutex_unlock(&volume->mutex);
}

void
gd_volume_release_journal(gd_journal *journal)
{
    if (--journal->users == 0) {
        gd_journal_close(journal);
    }
}

void
gd_volume_drop_spare(gd_volume *volume)
{
    if (volume->spare != NULL) {
        gd_journal_abandon(volume->spare);
        volume->spare = NULL;
    }
}

void
gd_volume_release_frozen(gd_volume *volume)
{
    for (size_t i = 0; i < volume->frozen_count; i++) {
        gd_volume_release_journal(volume->frozen[i]);
    }
    volume->frozen_count = 0;
}

uint64_t
gd_volume_unsynced_bytes(const gd_journal *journal)
{
    return journal->end > journal->durable ? journal->end - journal->durable
                                           : 0;
}

uint64_t
gd_volume_base_needed(gd_volume *volume)
{
    uint64_t size = volume->parts.base_size;
    for (uint64_t part = 0; part * volume->parts.part_size < size; part++) {
        if (gd_parts_edition(&volume->parts, part) == 0) {
            return size;
        }
    }
    return 0;
}

gd_status
gd_volume_require_intact(const gd_volume *volume, gd_error *err)
{
    if (volume->waiting) {
        return gd_fail(err, volume->broken.status, "volume %s: %s",
                       volume->name, volume->broken.text);
    }
    return volume->broken.status == GD_OK
               ? GD_OK
               : gd_fail(err, volume->broken.status,
                         "volume %s takes no more writes until it is opened "
                         "again: %s", volume->name, volume->broken.text);
}

void
gd_volume_set_broken(gd_volume *volume, const gd_error *err)
{
    if (volume->broken.status == GD_OK || volume->waiting) {
        volume->broken = *err;
    }
    volume->waiting = false;
    pthread_cond_broadcast(&volume->changed);
}

gd_status
gd_volume_append(gd_volume *volume, gd_append *appends, size_t count,
                 gd_error *err)
{
    gd_status s = gd_journal_append(volume->active, appends, count, err);
    if (s == GD_NOSPACE && volume->spare != NULL) {
        gd_volume_drop_spare(volume);
        s = gd_journal_append(volume->active, appends, count, err);
    }
    return s;
}

gd_status
gd_volume_enter(gd_volume *volume, const gd_append *append, gd_error *err)
{
    const gd_piece piece =
        gd_journal_piece(volume->active, &append->record, append->at);
    GD_TRY(gd_overlay_put(&volume->fresh, &piece,
                          &volume->head.counters.overwritten, err));
    gd_journal_accept(volume->active, append);
    return GD_OK;
}

/* ---- the owner ---- */

/* Finds out whether this is the volume's newest journal. */
static gd_status
check_newest(const gd_volume *volume, const gd_journal *journal, bool *newest,
             gd_error *err)
{
    gd_repo *repo = volume->repo;
    uint32_t *numbers;
    size_t count;
    GD_TRY(gd_volume_list_journals(repo->env, repo->root, volume->name,
                                   &numbers, &count, err));
    *newest = count > 0 && numbers[count - 1] == journal->number;
    repo->env->release(repo->env, numbers);
    return GD_OK;
}

gd_status
gd_volume_revalidate(const gd_volume *volume, const gd_journal *journal,
                     gd_error *err)
{
    const gd_env *env = volume->repo->env;
    bool newest = false;
    int rc = env->lock(env, volume->lock, 0, F_WRLCK);
    if (rc < 0 && rc != -EAGAIN) {
        return gd_fail_errno(err, -rc, "cannot lock volume %s", volume->name);
    }
    gd_status s = rc < 0 ? GD_OK
                         : check_newest(volume, journal, &newest, err);
    return s != GD_OK || newest
               ? s
               : gd_fail(err, GD_BUSY, "volume %s was opened by another "
                         "process: this one was cut off, and lost its lock",
                         volume->name);
}

gd_status
gd_volume_confirm_owner(gd_volume *volume, gd_error *err)
{
    gd_error own;
    err = err == NULL ? &own : err;
    pthread_mutex_lock(&volume->mutex);
    gd_status s =
        volume->waiting ? GD_OK : gd_volume_require_intact(volume, err);
    if (s == GD_OK) {
        s = gd_volume_revalidate(volume, volume->active, err);
        if (s == GD_BUSY) {
            gd_volume_set_broken(volume, err);
        }
    }
    pthread_mutex_unlock(&volume->mutex);
    return s;
}

/* ---- the end of frozen journals ---- */

/* Has the next journal written over the file of this one, if nobody reads it, it
 * was synced, and there is room for a file that holds nothing (V10).  False: it is
 * not to be had. */
static bool
recycle(gd_volume *volume, gd_journal *journal)
{
    if (!journal->made || journal->users > 1 || volume->spare != NULL ||
        gd_volume_unsynced_bytes(journal) > GD_VOLUME_LITTLE ||
        gd_repo_require_room_to_spare(volume->repo, GD_JOURNAL_MAX_SPARE,
                                      NULL) != GD_OK ||
        !gd_journal_retire(journal, volume->name)) {
        return false;
    }
    volume->spare = journal;
    return true;
}

void
gd_volume_drop_frozen(gd_volume *volume)
{
    gd_repo *repo = volume->repo;
    for (size_t i = 0; i < volume->frozen_count; i++) {
        gd_journal *journal = volume->frozen[i];
        if (recycle(volume, journal)) {
            continue;
        }
        if (journal->made && journal->users == 1) {
            gd_journal_remove(journal);
        } else {
            (void)gd_volume_unlink_journal(repo->env, repo->root,
                                           volume->name, journal->number,
                                           NULL);
            gd_volume_release_journal(journal);
        }
    }
    volume->frozen_count = 0;
    volume->unsynced = NULL;
    gd_overlay_clear(&volume->stale);
    volume->head.counters.checkpoints++;
    pthread_cond_broadcast(&volume->changed);
}

/* ---- changing the journal (V6) ---- */

/* REQUIRES: the mutex; nothing is frozen. */
static void
freeze_active(gd_volume *volume)
{
    gd_journal *active = volume->active;
    gd_overlay none = volume->stale;
    volume->frozen[0] = active;
    volume->frozen_count = 1;
    volume->unsynced = gd_volume_unsynced_bytes(active) > 0 ? active : NULL;
    volume->stale = volume->fresh;
    volume->fresh = none;
}

/* The next journal's head and marks. */
static gd_status
next_head(gd_volume *volume, const gd_volume_change *change, bool needed,
          gd_volume_head *head, gd_volume_mark **marks, gd_error *err)
{
    const gd_journal *active = volume->active;
    *head = volume->head;
    head->journal++;
    head->size = change->size;
    head->base_size = change->base_size;
    head->state = change->state;
    head->needed = needed ? active->number : head->journal;
    head->before = needed ? active->end : 0;
    head->before_durable = needed ? active->durable : 0;
    GD_TRY(gd_parts_marks(&volume->parts, marks, &head->marks, err));
    while (head->marks > 0 &&
           (*marks)[head->marks - 1].part >= gd_volume_head_parts(head)) {
        head->marks--; /* the volume becomes smaller */
    }
    return GD_OK;
}

static gd_status
make_next(gd_volume *volume, const gd_volume_change *change, bool needed,
          gd_volume_head *head, gd_journal **made, gd_error *err)
{
    const gd_env *env = volume->repo->env;
    gd_volume_mark *marks = NULL;
    bool named = false;
    gd_status s = next_head(volume, change, needed, head, &marks, err);
    if (s == GD_OK) {
        s = gd_journal_create(env, volume->repo->root, volume->name, head,
                              marks, volume->spare, made, &named, err);
        volume->spare = NULL;
    }
    if (s == GD_OK) {
        s = gd_volume_revalidate(volume, *made, err);
        if (s != GD_OK) {
            gd_journal_close(*made);
        }
    }
    if (s != GD_OK && (named || s == GD_BUSY)) {
        /* The next owner may find the new journal, and would not read the old
         * one behind the end that it names. */
        gd_volume_set_broken(volume, err);
    }
    env->release(env, marks);
    return s;
}

/* The old journal is not synced (V11).  Nobody writes or syncs meanwhile.
 * REQUIRES: the mutex. */
static gd_status
change_journal(gd_volume *volume, const gd_volume_change *change,
               gd_volume_fate fate, gd_error *err)
{
    gd_volume_head head;
    gd_journal *made, *old = volume->active;
    bool needed = fate != GD_DISCARD && old->records > 0;
    GD_TRY(gd_volume_require_intact(volume, err));
    GD_TRY(make_next(volume, change, needed, &head, &made, err));
    volume->head = head;
    if (fate == GD_REPLACE) {
        gd_volume_drop_frozen(volume);
    }
    if (needed) {
        freeze_active(volume);
    } else {
        (void)gd_volume_unlink_journal(volume->repo->env, volume->repo->root,
                                       volume->name, old->number, NULL);
        gd_overlay_clear(&volume->fresh);
        gd_volume_release_journal(old);
    }
    volume->active = made;
    return GD_OK;
}

gd_status
gd_volume_rotate(gd_volume *volume, const gd_volume_change *change,
                 gd_volume_fate fate, gd_error *err)
{
    gd_error own;
    err = err == NULL ? &own : err;
    pthread_mutex_lock(&volume->mutex);
    while (volume->syncing) {
        pthread_cond_wait(&volume->changed, &volume->mutex);
    }
    gd_status s = change_journal(volume, change, fate, err);
    pthread_cond_broadcast(&volume->changed);
    pthread_mutex_unlock(&volume->mutex);
    return s;
}

/* ---- syncing (V3) ---- */

/* A guest that flushes often waits for the file system's own journal each time,
 * unless its records go where zeros were durable before.
 * REQUIRES: the mutex. */
static void
prepare_next_syncs(gd_volume *volume)
{
    gd_journal *journal = volume->active;
    uint64_t bytes = gd_journal_wants_ahead(journal);
    if (bytes > 0 &&
        gd_repo_require_room(volume->repo, bytes, NULL) == GD_OK) {
        gd_journal_write_ahead(journal);
    }
}

/* Syncs a journal.  What is needed of those before is durable, or the active one
 * has the record that it is stored (V11).  REQUIRES: the mutex, which it lets go
 * of; no sync is under way. */
static gd_status
sync_journal(gd_volume *volume, gd_journal *journal, gd_error *err)
{
    uint64_t end = journal->end;
    gd_error own;
    err = err == NULL ? &own : err;
    if (journal == volume->active) {
        prepare_next_syncs(volume);
    }
    volume->syncing = true;
    journal->users++;
    pthread_mutex_unlock(&volume->mutex);
    gd_status s = gd_journal_sync(journal, err);
    pthread_mutex_lock(&volume->mutex);
    volume->syncing = false;
    if (s == GD_OK) {
        journal->durable = journal->durable < end ? end : journal->durable;
        volume->unsynced = NULL; /* it was synced, or is stored, durably */
    } else {
        gd_volume_set_broken(volume, err);
    }
    gd_volume_release_journal(journal);
    pthread_cond_broadcast(&volume->changed);
    return s;
}

/* The same, or waits for the end of the sync that is under way.
 * REQUIRES: the mutex, which it lets go of. */
static gd_status
sync_or_wait(gd_volume *volume, gd_journal *journal, gd_error *err)
{
    if (!volume->syncing) {
        return sync_journal(volume, journal, err);
    }
    pthread_cond_wait(&volume->changed, &volume->mutex);
    return gd_volume_require_intact(volume, err);
}

/* Returns whether any record up to `end` of the journal of this number, which
 * was the active one, is neither durable nor stored.
 * REQUIRES: the mutex. */
static bool
has_unsynced(const gd_volume *volume, uint32_t number, uint64_t end)
{
    const gd_journal *active = volume->active, *frozen = volume->unsynced;
    return (frozen != NULL && frozen->number <= number) ||
           (active->number == number && active->durable < end);
}

gd_status
gd_volume_sync(gd_volume *volume, gd_error *err)
{
    uint32_t number = volume->active->number;
    uint64_t end = volume->active->end;
    gd_status s = gd_volume_require_intact(volume, err);
    while (s == GD_OK && has_unsynced(volume, number, end)) {
        gd_journal *next = /* the frozen one first (V11) */
            volume->unsynced != NULL ? volume->unsynced : volume->active;
        s = sync_or_wait(volume, next, err);
    }
    return s;
}

gd_status
gd_volume_sync_stored(gd_volume *volume, gd_error *err)
{
    uint64_t end = volume->active->end;
    gd_status s = gd_volume_require_intact(volume, err);
    while (s == GD_OK && volume->active->durable < end) {
        s = sync_or_wait(volume, volume->active, err);
    }
    return s;
}
