/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recovery.c - reads the journals of the owner before, and begins this owner's
 * own (volumes.rst, V4, V7, V8, V11).
 */
#include <string.h>

#include "engine/base/array.h"
#include "engine/volume/directory.h"
#include "engine/volume/journaltail.h"
#include "engine/volume/state.h"

/* The result of scanning one journal. */
typedef struct recovery {
    gd_volume *volume;
    gd_journal *journal;
    gd_overlay *overlay; /* NULL: its records do not count (V11) */
    bool newest;
    bool stored; /* its records show that no earlier journal is needed (V8) */
    gd_volume_mark *marks; /* of the newest one's records */
    size_t count, room;
} recovery;

/* The heads behind an older journal know its marks. */
static gd_status
take_mark(recovery *r, const gd_record *record, gd_error *err)
{
    if (record->offset >= r->volume->parts.count) {
        return gd_fail(err, GD_CORRUPT, "%s has a mark of part %llu, which "
                       "volume %s does not have", r->journal->name,
                       (unsigned long long)record->offset, r->volume->name);
    }
    if (!r->newest) {
        return GD_OK;
    }
    gd_volume_mark *marks =
        gd_array_reserve(r->volume->repo->env, r->marks, &r->room,
                         r->count + 1, sizeof *marks, err);
    if (marks == NULL) {
        return GD_NOMEM;
    }
    r->marks = marks;
    r->marks[r->count++] = (gd_volume_mark){record->offset, record->length};
    return GD_OK;
}

/* Replays a record over the parts.  One that a marked edition has already may
 * be replayed again: that gives the same bytes. */
static gd_status
take_record(void *arg, const gd_record *record, uint64_t at, gd_error *err)
{
    recovery *r = arg;
    uint64_t ignored = 0;
    if (record->kind == GD_RECORD_MARK) {
        return take_mark(r, record, err);
    }
    if (record->kind == GD_RECORD_STORED) {
        r->stored = true;
        return GD_OK;
    }
    const gd_piece piece = gd_journal_piece(r->journal, record, at);
    return r->overlay == NULL
               ? GD_OK
               : gd_overlay_put(r->overlay, &piece, &ignored, err);
}

/* The newest journal may record that the ones before it are stored: then they
 * are not needed, and may be gone (V8).  So it is read first, into an overlay
 * of its own if there may be others. */
static gd_status
scan_newest(recovery *r, gd_error *err)
{
    gd_volume *volume = r->volume;
    bool alone = volume->head.needed == volume->head.journal;
    r->overlay = alone ? &volume->stale : &volume->fresh;
    GD_TRY(gd_journal_scan(r->journal, 0, 0, take_record, r, err));
    if (r->stored) {
        volume->head.needed = volume->head.journal;
    }
    return GD_OK;
}

/* The ends of a journal, as the head of the next one has them. */
typedef struct reach {
    uint64_t end;     /* of its records; 0: it is not named */
    uint64_t durable; /* up to where they were durable then */
} reach;

/* Makes room for one more frozen journal, and for what the next says about it: a
 * head may claim that billions are needed. */
static gd_status
reserve_frozen(gd_volume *volume, reach **reaches, size_t *room,
               gd_error *err)
{
    const gd_env *env = volume->repo->env;
    size_t wanted = volume->frozen_count + 1;
    reach *made = gd_array_reserve(env, *reaches, room, wanted, sizeof *made,
                                   err);
    if (made == NULL) {
        return GD_NOMEM;
    }
    *reaches = made;
    gd_journal **frozen =
        gd_array_reserve(env, volume->frozen, &volume->frozen_room, wanted,
                         sizeof(gd_journal *), err);
    if (frozen == NULL) {
        return GD_NOMEM;
    }
    volume->frozen = frozen;
    return GD_OK;
}

static reach
reach_of(const gd_volume_head *next)
{
    return (reach){next->before, next->before_durable};
}

/* Opens the needed journals before the newest, oldest first, into frozen, with
 * room for one more, and fills in what the next one says about each. */
static gd_status
open_needed(gd_volume *volume, reach **reaches, gd_error *err)
{
    gd_repo *repo = volume->repo;
    size_t room = 0;
    gd_status s = reserve_frozen(volume, reaches, &room, err);
    uint32_t first = volume->head.needed, newest = volume->head.journal;
    for (uint32_t n = first; s == GD_OK && n < newest; n++) {
        gd_volume_head head;
        gd_volume_mark *marks;
        s = gd_journal_open(repo->env, repo->root, volume->name, n,
                            repo->params.repository_id,
                            &volume->frozen[volume->frozen_count], &head,
                            &marks, err);
        if (s == GD_NOTFOUND) {
            s = gd_fail(err, GD_CORRUPT, "journal %u of volume %s is missing; "
                        "what was written to it is lost", (unsigned)n,
                        volume->name);
        }
        if (s != GD_OK) {
            break;
        }
        repo->env->release(repo->env, marks);
        if (n > first) {
            (*reaches)[n - first - 1] = reach_of(&head);
        }
        volume->frozen_count++;
        if (memcmp(head.volume_id, volume->head.volume_id, GD_ID_SIZE) != 0 ||
            head.part_size != volume->head.part_size) {
            s = gd_fail(err, GD_CORRUPT, "journal %u of volume %s is of "
                        "another volume", (unsigned)n, volume->name);
        } else {
            s = reserve_frozen(volume, reaches, &room, err);
        }
    }
    if (s == GD_OK && newest > first) {
        (*reaches)[newest - first - 1] = reach_of(&volume->head);
    }
    return s;
}

/* A record that was written after a sync of its journal. */
static bool
proves_earlier(const gd_journal *journal)
{
    return journal->durable > journal->start;
}

/* The records of a journal behind one that is torn do not count, and none of
 * them may prove that they should (V11). */
static gd_status
forget_behind(const gd_journal *torn, gd_journal *journal, gd_error *err)
{
    if (proves_earlier(journal)) {
        return gd_journal_lost(torn, err);
    }
    gd_journal_forget(journal);
    return GD_OK;
}

/* Reads the journals before the newest one.  *torn: the one that lacks records
 * which nothing proves durable; NULL: none does. */
static gd_status
scan_needed(gd_volume *volume, const reach *reaches, const gd_journal **torn,
            gd_error *err)
{
    *torn = NULL;
    for (size_t i = 0; i < volume->frozen_count; i++) {
        gd_journal *journal = volume->frozen[i];
        const reach *to = &reaches[i];
        recovery r = {.volume = volume,
                      .journal = journal,
                      .overlay = *torn == NULL ? &volume->stale : NULL};
        GD_TRY(gd_journal_scan(journal, to->end, to->durable, take_record,
                               &r, err));
        if (*torn != NULL) {
            GD_TRY(forget_behind(*torn, journal, err));
        } else if (journal->end < to->end) {
            *torn = journal;
        }
    }
    return GD_OK;
}

/* Returns whether all records of a journal before the newest one are known to be
 * durable up to the end that the next one names. */
static bool
is_proven(const gd_volume *volume, const reach *reaches, size_t i)
{
    const gd_journal *next = i + 1 < volume->frozen_count
                                 ? volume->frozen[i + 1]
                                 : volume->active;
    return reaches[i].end != 0 && (reaches[i].durable == reaches[i].end ||
                                   proves_earlier(next));
}

/* The newest journal is frozen, too, and its records come over the others'. */
static gd_status
freeze_newest(gd_volume *volume, gd_error *err)
{
    uint64_t ignored = 0;
    gd_status s = GD_OK;
    for (const gd_piece *piece = gd_overlay_find(&volume->fresh, 0);
         s == GD_OK && piece != NULL; piece = gd_overlay_next(piece)) {
        s = gd_overlay_put(&volume->stale, piece, &ignored, err);
    }
    gd_overlay_clear(&volume->fresh);
    volume->frozen[volume->frozen_count++] = volume->active;
    volume->active = NULL;
    return s;
}

/* The newest journal's records count unless one before it is torn (V11). */
static gd_status
take_newest(recovery *r, const gd_journal *torn, gd_error *err)
{
    gd_volume *volume = r->volume;
    if (torn != NULL) {
        GD_TRY(forget_behind(torn, r->journal, err));
        gd_overlay_clear(&volume->fresh);
        r->count = 0;
    }
    for (size_t i = 0; i < r->count; i++) {
        gd_parts_set(&volume->parts, r->marks[i].part, r->marks[i].edition);
    }
    return freeze_newest(volume, err);
}

/* Reads the journals into the overlay.  Active is the newest one, which becomes
 * frozen. */
static gd_status
read_journals(gd_volume *volume, gd_error *err)
{
    const gd_env *env = volume->repo->env;
    const gd_journal *torn = NULL;
    reach *reaches = NULL;
    recovery newest = {
        .volume = volume, .journal = volume->active, .newest = true};
    gd_status s = scan_newest(&newest, err);
    if (s == GD_OK) {
        s = open_needed(volume, &reaches, err);
    }
    if (s == GD_OK) {
        s = scan_needed(volume, reaches, &torn, err);
    }
    for (size_t i = 0; s == GD_OK && i < volume->frozen_count; i++) {
        volume->copies_all =
            volume->copies_all || !is_proven(volume, reaches, i);
    }
    if (s == GD_OK) {
        s = take_newest(&newest, torn, err);
    }
    env->release(env, reaches);
    env->release(env, newest.marks);
    return s;
}

/* ---- the owner's own journal (V4) ---- */

/* Returns where the records of a journal that was found begin to be copied: where
 * the records before are not known to be durable. */
static gd_journal_tail
tail_of(const gd_volume *volume, size_t i)
{
    const gd_journal *journal = volume->frozen[i];
    bool last = i + 1 == volume->frozen_count;
    return (gd_journal_tail){
        .journal = journal,
        .from = volume->copies_all ? journal->start
                : last             ? journal->durable
                                   : journal->end};
}

/* Returns whether any journal that was found has records that are not copied. */
static bool
has_rest(const gd_volume *volume)
{
    for (size_t i = 0; i < volume->frozen_count; i++) {
        const gd_journal *journal = volume->frozen[i];
        if (journal->records > 0 && tail_of(volume, i).from > journal->start) {
            return true;
        }
    }
    return false;
}

static gd_status
enter_copy(void *arg, gd_journal *to, const gd_append *append, gd_error *err)
{
    gd_overlay *copies = arg;
    uint64_t ignored = 0;
    const gd_piece piece = gd_journal_piece(to, &append->record, append->at);
    return gd_overlay_put(copies, &piece, &ignored, err);
}

/* The stale overlay has the copied records, too.  That of the copies comes over
 * it, and storing them twice gives the same bytes. */
static gd_status
copy_tails(const gd_volume *volume, gd_journal *to, gd_overlay *copies,
           gd_error *err)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < volume->frozen_count; i++) {
        const gd_journal_tail tail = tail_of(volume, i);
        bytes += gd_journal_tail_length(&tail);
    }
    if (bytes > 0) {
        GD_TRY(gd_repo_require_room(volume->repo, bytes, err));
    }
    for (size_t i = 0; i < volume->frozen_count; i++) {
        const gd_journal_tail tail = tail_of(volume, i);
        GD_TRY(gd_journal_tail_copy(&tail, to, enter_copy, copies, err));
    }
    return GD_OK;
}

/* Makes the journal, which has the copies, if it is to have any, before it has
 * its name.  Reads go on meanwhile, so nobody else sees it. */
static gd_status
make_journal(const gd_volume *volume, gd_volume_head *head,
             const gd_volume_mark *marks, bool copy, gd_journal **made,
             gd_overlay *copies, bool *named, gd_error *err)
{
    gd_repo *repo = volume->repo;
    GD_TRY(gd_journal_begin(repo->env, repo->root, volume->name, head, marks,
                            NULL, made, err));
    gd_status s =
        copy ? copy_tails(volume, *made, copies, err) : GD_OK;
    if (s != GD_OK) {
        gd_journal_abandon(*made);
        return s;
    }
    return gd_journal_publish(*made, volume->name, named, err);
}

/* The owner's own journal becomes the active one.  rest: those that were found
 * stay frozen. */
static void
adopt(gd_volume *volume, const gd_volume_head *head, gd_journal *made,
      gd_overlay *copies, bool rest)
{
    pthread_mutex_lock(&volume->mutex);
    gd_volume_counters counters = volume->head.counters;
    gd_journal *newest = volume->waiting ? volume->active : NULL;
    volume->head = *head;
    volume->head.counters = counters;
    volume->active = made;
    volume->fresh = *copies;
    if (!rest) {
        gd_volume_release_frozen(volume);
        gd_overlay_clear(&volume->stale);
    }
    if (newest != NULL) {
        gd_volume_release_journal(newest);
    }
    volume->waiting = false;
    volume->broken = (gd_error){.status = GD_OK};
    pthread_mutex_unlock(&volume->mutex);
}

static void
remove_unneeded(const gd_volume *volume)
{
    gd_repo *repo = volume->repo;
    uint32_t *numbers;
    size_t count;
    if (gd_volume_list_journals(repo->env, repo->root, volume->name, &numbers,
                                &count, NULL) != GD_OK) {
        return;
    }
    for (size_t i = 0; i < count; i++) {
        if (numbers[i] < volume->head.needed) {
            (void)gd_volume_unlink_journal(repo->env, repo->root, volume->name,
                                           numbers[i], NULL);
        }
    }
    repo->env->release(repo->env, numbers);
}

/* The journal that was made becomes the active one, if this is the owner still:
 * no write is accepted before that is known (V1).  Closes it otherwise. */
static gd_status
confirm_and_adopt(gd_volume *volume, const gd_volume_head *head,
                  const gd_volume_mark *marks, gd_journal *made,
                  gd_overlay *copies, bool rest, gd_error *err)
{
    gd_status s = gd_volume_revalidate(volume, made, err);
    if (s != GD_OK) {
        gd_journal_close(made);
        return s;
    }
    adopt(volume, head, made, copies, rest);
    /* A file that cannot be removed is garbage: the next owner deletes it (V7, V8).
     * It is no reason to copy the tail again. */
    (void)gd_volume_delete_recipes(volume->repo, head, marks, head->marks,
                                   NULL);
    remove_unneeded(volume);
    volume->made_count = 0; /* marked, or deleted */
    return GD_OK;
}

/* Begins the owner's own journal (V4), and removes recipes that are not needed
 * (V7).  *named: it may have its name, also after an error.  stored: the
 * editions that were made have all records.
 * REQUIRES: checkpointing, or that nobody else has the volume yet. */
static gd_status
begin_journal(gd_volume *volume, bool stored, bool *named, gd_error *err)
{
    gd_repo *repo = volume->repo;
    gd_volume_head head;
    gd_volume_mark *marks = NULL;
    gd_journal *made;
    gd_overlay copies;
    bool rest = !stored && has_rest(volume);
    *named = false;
    gd_overlay_init(&copies, repo->env);
    for (size_t i = 0; stored && i < volume->made_count; i++) {
        gd_parts_set(&volume->parts, volume->made[i].part,
                     volume->made[i].edition);
    }
    gd_volume_copy_head(volume, &head);
    head.journal++;
    head.base_size = gd_volume_base_needed(volume);
    head.needed = rest ? volume->head.needed : head.journal;
    head.before = head.before_durable =
        rest ? tail_of(volume, volume->frozen_count - 1).from : 0;
    gd_status s = gd_parts_marks(&volume->parts, &marks, &head.marks, err);
    if (s == GD_OK) {
        s = make_journal(volume, &head, marks, !stored, &made, &copies, named,
                         err);
    }
    if (s == GD_OK) {
        s = confirm_and_adopt(volume, &head, marks, made, &copies, rest, err);
    }
    if (s != GD_OK) {
        gd_overlay_clear(&copies);
    }
    repo->env->release(repo->env, marks);
    return s;
}

/* The disk has no room for the owner's journal: the volume can be read. */
static void
wait_for_space(gd_volume *volume, const gd_error *why)
{
    gd_error broken;
    gd_fail(&broken, GD_NOSPACE, "it can only be read until the disk has room: "
            "%s", why->text);
    volume->active = volume->frozen[volume->frozen_count - 1];
    volume->active->users++;
    gd_volume_set_broken(volume, &broken);
    volume->waiting = true;
}

static gd_status
pass_on(const gd_error *why, gd_error *err)
{
    if (err != NULL) {
        *err = *why;
    }
    return why->status;
}

static gd_status
confirm_owner(void *arg, gd_error *err)
{
    const gd_volume *volume = arg;
    return gd_volume_revalidate(
        volume, volume->frozen[volume->frozen_count - 1], err);
}

gd_status
gd_volume_recover(gd_volume *volume, gd_error *err)
{
    bool named;
    gd_error why;
    gd_repo *repo = volume->repo;
    GD_TRY(read_journals(volume, err));
    (void)gd_volume_remove_new(repo->env, repo->root, volume->name,
                               confirm_owner, volume, NULL);
    gd_status s = begin_journal(volume, false, &named, &why);
    if (s == GD_NOSPACE && !named) {
        wait_for_space(volume, &why);
        return GD_OK;
    }
    return s == GD_OK ? s : pass_on(&why, err);
}

gd_status
gd_volume_take_up(gd_volume *volume, bool stored, gd_error *err)
{
    bool named;
    gd_error why;
    pthread_mutex_lock(&volume->mutex);
    bool waiting = volume->waiting;
    pthread_mutex_unlock(&volume->mutex);
    if (!waiting) {
        return GD_OK;
    }
    gd_status s = begin_journal(volume, stored, &named, &why);
    if (s == GD_OK) {
        return s;
    }
    if (named || s == GD_BUSY) {
        /* The next owner may find the new journal. */
        pthread_mutex_lock(&volume->mutex);
        gd_volume_set_broken(volume, &why);
        pthread_mutex_unlock(&volume->mutex);
    }
    return pass_on(&why, err);
}
