/* SPDX-License-Identifier: Apache-2.0 */
/*
 * edition.c - see edition.h.
 */
#include "engine/volume/edition.h"

#include <string.h>

#include "engine/files/image_delete.h"
#include "engine/volume/journal.h"
#include "engine/volume/volumenames.h"
#include "engine/write/transaction.h"

enum {
    WINDOW = 1 << 20, /* bytes stored at once */
    MIN_BLOCK = 512,
    WINDOW_BLOCKS = WINDOW / MIN_BLOCK,
    TRIED = 256,      /* blocks that are compared in any case; then all as long */
    EQUAL_ONE_OF = 8, /* as one of so many is equal */
};

/* ---- transactions ---- */

/* Takes the end of a transaction's work: commits it unless that failed. */
static gd_status
end_transaction(gd_transaction *transaction, gd_status s,
                gd_recipe_header *header, gd_error *err)
{
    bool linked;
    if (s == GD_OK) {
        s = gd_transaction_commit(transaction, header, &linked, err);
    }
    gd_transaction_end(transaction);
    return s;
}

static gd_status
add_zeros(gd_transaction *transaction, uint64_t length, gd_error *err)
{
    return length == 0 ? GD_OK
                       : gd_transaction_add_zeros(transaction, length, err);
}

/* Appends bytes [from, to) of a part as they are in its source. */
static gd_status
copy_unchanged(gd_transaction *transaction, const gd_part_source *source,
               uint64_t from, uint64_t to, gd_error *err)
{
    uint64_t stored;
    uint64_t end = to < source->length ? to : source->length;
    gd_status s = GD_OK;
    if (from < end) {
        s = gd_transaction_add_runs(transaction, source->image,
                                    source->from + from, source->from + end,
                                    &stored, err);
        from = end;
    }
    return s == GD_OK ? add_zeros(transaction, to - from, err) : s;
}

/* ---- an edition ---- */

typedef struct writer {
    gd_edition_batch *batch;
    gd_part_source source;
    const gd_overlay *overlay;
    uint64_t start;  /* of the part, in the volume */
    uint64_t length; /* of the part */
    uint32_t block;
    uint8_t *window;
    uint8_t *room; /* for a record */
    uint64_t at;   /* bytes of the part that are done: whole blocks */
} writer;

static uint64_t
round_up(const writer *w, uint64_t at)
{
    at = (at + w->block - 1) / w->block * w->block;
    return at < w->length ? at : w->length;
}

/* The first piece behind `at`, a place in the part; NULL: none in it. */
static const gd_piece *
find_piece(const writer *w, uint64_t at)
{
    const gd_piece *piece = gd_overlay_find(w->overlay, w->start + at);
    return piece != NULL && piece->offset < w->start + w->length ? piece
                                                                 : NULL;
}

/* A piece's bounds within the part. */
static uint64_t
piece_from(const writer *w, const gd_piece *piece)
{
    return piece->offset > w->start ? piece->offset - w->start : 0;
}

static uint64_t
piece_to(const writer *w, const gd_piece *piece)
{
    uint64_t to = gd_piece_end(piece) - w->start;
    return to < w->length ? to : w->length;
}

/* The blocks from w->at that have changed, up to a window's worth. */
static uint64_t
changed_end(const writer *w, const gd_piece *piece)
{
    uint64_t most = w->at + WINDOW < w->length ? w->at + WINDOW : w->length;
    uint64_t end = round_up(w, piece_to(w, piece));
    while (end < most && (piece = gd_overlay_next(piece)) != NULL &&
           piece->offset < w->start + end + 1 &&
           (piece->journal != NULL || piece->length < WINDOW)) {
        end = round_up(w, piece_to(w, piece));
    }
    return end < most ? end : most;
}

/* Returns whether the blocks from w->at on have bytes in one of the ranges.
 * Lowers *end to where that changes. */
static bool
is_in(const writer *w, const gd_fslayout *ranges, uint64_t *end)
{
    uint64_t at = w->start + w->at;
    const gd_range *next = gd_fslayout_next(ranges, at);
    if (next == NULL) {
        return false;
    }
    uint64_t from = next->offset > at ? next->offset - w->start : w->at;
    from = from / w->block * w->block;
    bool in = from == w->at;
    uint64_t limit =
        in ? round_up(w, next->offset + next->length - w->start) : from;
    *end = limit < *end ? limit : *end;
    return in;
}

/* Chooses what to look up of the blocks from w->at on.  Lowers *end to where
 * others begin. */
static gd_dedup
choose_dedup(const writer *w, uint64_t *end)
{
    const gd_edition_hints *hints = w->batch->hints;
    if (hints->no_dedup) {
        return GD_DEDUP_OFF;
    }
    bool copies = is_in(w, &hints->copies, end);
    bool rare = is_in(w, &hints->layout, end);
    return copies ? GD_DEDUP_OFF : rare ? GD_DEDUP_SKIP : GD_DEDUP_ALL;
}

static gd_status
read_unchanged(writer *w, uint64_t from, uint64_t to, gd_error *err)
{
    size_t done = 0;
    uint8_t *out = w->window + (from - w->at);
    uint64_t end = to < w->source.length ? to : w->source.length;
    gd_status s = GD_OK;
    if (from < end) {
        s = gd_image_read(w->source.image, out, (size_t)(end - from),
                          w->source.from + from, &done, err);
    }
    if (s == GD_OK) {
        memset(out + done, 0, (size_t)(to - from) - done);
    }
    return s;
}

/* Fills the window with the part's bytes from w->at to `end`. */
static gd_status
fill_window(writer *w, uint64_t end, gd_error *err)
{
    gd_status s = GD_OK;
    const gd_piece *piece = find_piece(w, w->at);
    for (uint64_t at = w->at; s == GD_OK && at < end;) {
        uint64_t from = piece == NULL ? end : piece_from(w, piece);
        if (from > at) {
            uint64_t to = from < end ? from : end;
            s = read_unchanged(w, at, to, err);
            at = to;
            continue;
        }
        uint64_t to = piece_to(w, piece);
        to = to < end ? to : end;
        uint8_t *out = w->window + (at - w->at);
        if (piece->journal == NULL) {
            memset(out, 0, (size_t)(to - at));
        } else {
            s = gd_journal_read(piece, w->start + at, (size_t)(to - at), out,
                                w->room, err);
        }
        at = to;
        piece = gd_overlay_next(piece);
    }
    return s;
}

/* Notes the addresses of the whole blocks in a part of an extent. */
static void
note_old(const writer *w, const gd_extent_part *part, gd_address *old)
{
    const gd_extent *extent = part->extent;
    if (extent->kind == GD_EXTENT_ZEROS || part->from % w->block != 0 ||
        extent->length != (uint64_t)extent->blocks * w->block) {
        return;
    }
    uint32_t slot = extent->slot + (uint32_t)(part->from / w->block);
    for (uint64_t i = 0; i < part->length / w->block; i++) {
        old[i] = (gd_address){extent->group, slot + (uint32_t)i};
    }
}

/* Fills in where the blocks of the window up to `end` are in the part's source.
 * Nothing depends on it: each address is verified. */
static void
find_old(const writer *w, uint64_t end, gd_address *old)
{
    const gd_part_source *source = &w->source;
    gd_extent_cursor cursor;
    gd_extent_part part;
    gd_error ignored;
    uint64_t from = source->from + w->at;
    end = end < source->length ? end : source->length;
    if (end <= w->at) {
        return;
    }
    gd_extent_cursor_open(&cursor, &source->image->recipe, from, end - w->at);
    while (cursor.offset < cursor.end) {
        uint64_t at = cursor.offset - from;
        if (gd_extent_cursor_next(&cursor, &part, &ignored) != GD_OK) {
            return;
        }
        if (at % w->block == 0) {
            note_old(w, &part, old + at / w->block);
        }
    }
}

/* Reading an entry for each block may cost as much as storing it.  So this ends
 * for a batch whose blocks are mostly new. */
static bool
wants_old(const gd_edition_batch *batch, gd_dedup dedup)
{
    return dedup != GD_DEDUP_OFF &&
           (batch->compared < TRIED ||
            batch->equal * EQUAL_ONE_OF >= batch->compared);
}

static void
count_window(writer *w, gd_dedup dedup, const uint32_t *lengths,
             const gd_address *old, const gd_address *addresses, size_t count)
{
    gd_edition_batch *batch = w->batch;
    for (size_t i = 0; i < count; i++) {
        bool compared = old[i].group != 0;
        bool equal = compared && old[i].group == addresses[i].group &&
                     old[i].slot == addresses[i].slot;
        batch->compared += compared;
        batch->equal += equal;
        if (addresses[i].group == 0) {
            batch->zero += lengths[i];
        } else if (dedup != GD_DEDUP_ALL && !equal) {
            batch->skipped += lengths[i];
        }
        batch->written += lengths[i];
    }
}

static gd_status
store_window(writer *w, uint64_t end, gd_error *err)
{
    gd_dedup dedup = choose_dedup(w, &end);
    gd_transaction_set_lookup_mode(w->batch->transaction, dedup);
    uint32_t lengths[WINDOW_BLOCKS];
    gd_address addresses[WINDOW_BLOCKS], old[WINDOW_BLOCKS];
    size_t count = 0;
    for (uint64_t at = w->at; at < end; at += w->block) {
        lengths[count++] = end - at < w->block ? (uint32_t)(end - at)
                                               : w->block;
    }
    memset(old, 0, count * sizeof *old);
    if (wants_old(w->batch, dedup)) {
        find_old(w, end, old);
    }
    GD_TRY(fill_window(w, end, err));
    GD_TRY(gd_transaction_write_blocks(w->batch->transaction, w->window,
                                       lengths, old, count, addresses, err));
    count_window(w, dedup, lengths, old, addresses, count);
    w->at = end;
    return GD_OK;
}

/* Appends the zeros of a piece without looking at bytes, whole blocks of it.
 * *done: whether there were any. */
static gd_status
store_zeros(writer *w, const gd_piece *piece, bool *done, gd_error *err)
{
    uint64_t end = piece_to(w, piece);
    end = end == w->length ? end : end / w->block * w->block;
    *done = piece->journal == NULL && piece_from(w, piece) <= w->at &&
            end > w->at;
    if (!*done) {
        return GD_OK;
    }
    gd_status s = add_zeros(w->batch->transaction, end - w->at, err);
    w->at = end;
    return s;
}

static gd_status
write_part(writer *w, gd_error *err)
{
    gd_status s = GD_OK;
    while (s == GD_OK && w->at < w->length) {
        bool done;
        const gd_piece *piece = find_piece(w, w->at);
        uint64_t from = piece == NULL
                            ? w->length
                            : piece_from(w, piece) / w->block * w->block;
        if (from > w->at) {
            s = copy_unchanged(w->batch->transaction, &w->source, w->at, from,
                               err);
            w->at = from;
            continue;
        }
        s = store_zeros(w, piece, &done, err);
        if (s == GD_OK && !done) {
            s = store_window(w, changed_end(w, piece), err);
        }
    }
    return s;
}

/* Deletes an edition of an attempt that failed, unless it may be the next
 * owner's (V1). */
static gd_status
delete_attempt(gd_repo *repo, const gd_edition_owner *owner, const char *id,
               gd_error *err)
{
    GD_TRY(owner->confirm(owner->volume, err));
    return gd_image_delete(repo->env, repo->root, &repo->params, id, NULL,
                           err);
}

/* Begins the transaction of an edition, in place of an attempt that failed. */
static gd_status
begin_edition(gd_repo *repo, const gd_edition_owner *owner,
              const gd_volume_head *head, const char *id,
              gd_transaction **transaction, gd_error *err)
{
    gd_status s = gd_transaction_begin(repo, id, head->project, &head->scope,
                                       transaction, err);
    if (s == GD_EXISTS) {
        s = delete_attempt(repo, owner, id, err);
        if (s == GD_OK) {
            s = gd_transaction_begin(repo, id, head->project, &head->scope,
                                     transaction, err);
        }
    }
    return s;
}

/* Begins the batch's next edition, likewise. */
static gd_status
next_edition(gd_edition_batch *batch, const char *id, gd_error *err)
{
    gd_repo *repo = batch->parts->repo;
    const gd_edition_hints *hints = batch->hints;
    if (batch->transaction == NULL) {
        GD_TRY(begin_edition(repo, &batch->owner, batch->head, id,
                             &batch->transaction, err));
        if (!hints->no_dedup) {
            gd_transaction_prefetch_groups(batch->transaction, hints->groups,
                                           hints->group_count);
        }
        return GD_OK;
    }
    gd_status s = gd_transaction_next_image(batch->transaction, id, err);
    if (s == GD_EXISTS) {
        GD_TRY(delete_attempt(repo, &batch->owner, id, err));
        s = gd_transaction_next_image(batch->transaction, id, err);
    }
    return s;
}

static gd_status
run_writer(gd_parts *parts, writer *w, uint64_t part, gd_error *err)
{
    const gd_env *env = parts->repo->env;
    w->window = gd_alloc(env, WINDOW, err);
    w->room = gd_alloc(env, GD_RECORD_HEAD + GD_RECORD_DATA, err);
    gd_status s = w->window == NULL || w->room == NULL
                      ? GD_NOMEM
                      : gd_parts_acquire(parts, part, &w->source, err);
    if (s == GD_OK) {
        s = write_part(w, err);
        gd_parts_release(parts, &w->source);
    }
    env->release(env, w->window);
    env->release(env, w->room);
    return s;
}

gd_status
gd_edition_add(gd_edition_batch *batch, const gd_overlay *overlay,
               gd_volume_mark edition, gd_error *err)
{
    const gd_volume_head *head = batch->head;
    char id[GD_IMAGE_ID_MAX + 1];
    gd_volume_edition_id(head->volume_id, edition.part, edition.edition, id);
    GD_TRY(next_edition(batch, id, err));
    writer w = {.batch = batch,
                .overlay = overlay,
                .start = edition.part * head->part_size,
                .block = batch->parts->repo->params.block_size};
    w.length = head->size - w.start < head->part_size ? head->size - w.start
                                                      : head->part_size;
    return run_writer(batch->parts, &w, edition.part, err);
}

static void
count_stored(const gd_edition_batch *batch, gd_volume_counters *counters)
{
    uint64_t rest = batch->written - batch->zero;
    uint64_t unique, stored;
    gd_transaction_count(batch->transaction, &unique, &stored);
    unique = unique < rest ? unique : rest;
    counters->unique += unique;
    counters->duplicate += rest - unique;
    counters->zero += batch->zero;
    counters->skipped += batch->skipped;
    counters->prefetched +=
        gd_transaction_prefetched_groups(batch->transaction);
}

gd_status
gd_edition_commit(gd_edition_batch *batch, gd_volume_counters *counters,
                  gd_error *err)
{
    gd_recipe_header header;
    bool linked;
    GD_TRY(batch->owner.confirm(batch->owner.volume, err));
    GD_TRY(gd_transaction_commit(batch->transaction, &header, &linked, err));
    count_stored(batch, counters);
    return GD_OK;
}

void
gd_edition_end(gd_edition_batch *batch)
{
    if (batch->transaction != NULL) {
        gd_transaction_end(batch->transaction);
        batch->transaction = NULL;
    }
}

/* ---- whole images ---- */

static gd_status
copy_parts(gd_parts *parts, const gd_volume_head *head,
           gd_transaction *transaction, gd_error *err)
{
    gd_status s = GD_OK;
    for (uint64_t part = 0; s == GD_OK && part < gd_volume_head_parts(head);
         part++) {
        gd_part_source source;
        uint64_t rest = head->size - part * head->part_size;
        uint64_t length = rest < head->part_size ? rest : head->part_size;
        s = gd_parts_acquire(parts, part, &source, err);
        if (s == GD_OK) {
            s = copy_unchanged(transaction, &source, 0, length, err);
            gd_parts_release(parts, &source);
        }
    }
    return s;
}

gd_status
gd_edition_snapshot(gd_parts *parts, const gd_volume_head *head,
                    const char *image_id, const char *project,
                    gd_recipe_header *header, gd_error *err)
{
    gd_transaction *transaction;
    GD_TRY(gd_transaction_begin(parts->repo, image_id, project,
                                &head->scope, &transaction, err));
    gd_status s = copy_parts(parts, head, transaction, err);
    return end_transaction(transaction, s, header, err);
}

gd_status
gd_edition_base(gd_repo *repo, const gd_volume_head *head, gd_image *image,
                uint64_t *stored, gd_error *err)
{
    char id[GD_IMAGE_ID_MAX + 1];
    gd_transaction *transaction;
    gd_recipe_header header;
    const gd_recipe_header *source = gd_image_header(image);
    gd_volume_base_id(head->volume_id, id);
    GD_TRY(gd_transaction_begin(repo, id, head->project, &head->scope,
                                &transaction, err));
    gd_status s = gd_transaction_add_runs(transaction, image, 0, source->size,
                                          stored, err);
    return end_transaction(transaction, s, &header, err);
}

/* ---- parts of an image ---- */

/* Finds out whether bytes [from, to) of an image are more than zeros. */
static gd_status
find_data(const gd_image *image, uint64_t from, uint64_t to, bool *data,
          gd_error *err)
{
    gd_extent_cursor cursor;
    gd_status s = GD_OK;
    *data = false;
    gd_extent_cursor_open(&cursor, &image->recipe, from, to - from);
    cursor.fresh = true; /* only reads use what they keep */
    while (s == GD_OK && !*data && cursor.offset < cursor.end) {
        gd_extent_part part;
        s = gd_extent_cursor_next(&cursor, &part, err);
        *data = s == GD_OK && part.extent->kind != GD_EXTENT_ZEROS;
    }
    return s;
}

gd_status
gd_edition_of_image(gd_repo *repo, const gd_edition_owner *owner,
                    const gd_volume_head *head, gd_image *image,
                    gd_volume_mark edition, bool *made, uint64_t *stored,
                    gd_error *err)
{
    char id[GD_IMAGE_ID_MAX + 1];
    static const uint8_t rest[GD_VOLUME_SECTOR]; /* of the last sector */
    gd_transaction *transaction;
    gd_recipe_header header;
    uint64_t size = gd_image_header(image)->size, again = 0;
    uint64_t from = edition.part * head->part_size;
    uint64_t end = from + head->part_size;
    end = end < head->size ? end : head->size;
    uint64_t to = end < size ? end : size;
    gd_status s = find_data(image, from, to, made, err);
    if (s != GD_OK || !*made) {
        return s;
    }
    gd_volume_edition_id(head->volume_id, edition.part, edition.edition, id);
    s = begin_edition(repo, owner, head, id, &transaction, err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_transaction_add_runs(transaction, image, from, to, &again, err);
    if (s == GD_OK) {
        s = gd_transaction_write(transaction, rest, (size_t)(end - to), err);
    }
    if (s == GD_OK) {
        s = owner->confirm(owner->volume, err);
    }
    *stored += again;
    return end_transaction(transaction, s, &header, err);
}
