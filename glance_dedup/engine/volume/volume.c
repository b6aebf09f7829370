/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volume.c - a volume's requests that read; see volume.h.
 */
#include "engine/volume/volume.h"

#include <stdio.h>
#include <string.h>

#include "engine/volume/state.h"

enum { SEGMENTS = 64 }; /* of a read, planned at once */

gd_status
gd_volume_require_range(const gd_volume *volume, uint64_t offset,
                        uint64_t length,
            gd_error *err)
{
    uint64_t size = volume->head.size;
    return offset <= size && length <= size - offset
               ? GD_OK
               : gd_fail(err, GD_INVALID,
                         "volume %s: bytes %llu to %llu are not within its "
                         "%llu bytes", volume->name,
                         (unsigned long long)offset,
                         (unsigned long long)(offset + length),
                         (unsigned long long)size);
}

void
gd_volume_get_info(gd_volume *volume, gd_volume_info *info)
{
    memset(info, 0, sizeof *info);
    pthread_mutex_lock(&volume->mutex);
    info->head = volume->head;
    info->is_read_only =
        volume->waiting ||
        (volume->broken.status != GD_OK && !volume->active->made);
    if (!volume->waiting) {
        info->journal_bytes = volume->active->end;
        info->journal_records = volume->active->records;
    }
    for (size_t i = 0; i < volume->frozen_count; i++) {
        info->journal_bytes += volume->frozen[i]->end;
        info->journal_records += volume->frozen[i]->records;
    }
    if (volume->broken.status != GD_OK) {
        snprintf(info->broken, sizeof info->broken, "%s",
                 volume->broken.text);
    }
    pthread_mutex_unlock(&volume->mutex);
}

gd_status
gd_volume_begin_request(gd_volume *volume, uint64_t offset, uint64_t length,
              uint64_t *counter, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(volume->repo, err));
    pthread_mutex_lock(&volume->mutex);
    gd_status s = gd_volume_require_range(volume, offset, length, err);
    if (s == GD_OK) {
        *counter += length;
    }
    pthread_mutex_unlock(&volume->mutex);
    return s;
}

/* ---- reading ---- */

/* A piece of a read, and where its bytes are. */
typedef struct segment {
    uint64_t offset;
    uint64_t length;
    bool written;   /* since the editions: */
    gd_piece piece; /* then this, with a reference to its journal */
} segment;

/* Finds the segment at `at`, which ends at `end` at the latest.
 * REQUIRES: the mutex. */
static segment
find_segment(const gd_volume *volume, uint64_t at, uint64_t end)
{
    const gd_overlay *const overlays[] = {&volume->fresh, &volume->stale};
    segment found = {.offset = at};
    for (int i = 0; i < 2; i++) {
        const gd_piece *piece = gd_overlay_find(overlays[i], at);
        if (piece == NULL) {
            continue;
        }
        if (piece->offset <= at) {
            uint64_t piece_end = gd_piece_end(piece);
            found.written = true;
            found.piece = *piece;
            end = piece_end < end ? piece_end : end;
            break;
        }
        end = piece->offset < end ? piece->offset : end;
    }
    found.length = end - at;
    return found;
}

/* Plans up to SEGMENTS of a range; returns how many. */
static size_t
plan(gd_volume *volume, uint64_t offset, uint64_t end,
     segment segments[SEGMENTS])
{
    size_t count = 0;
    pthread_mutex_lock(&volume->mutex);
    while (count < SEGMENTS && offset < end) {
        segment *s = &segments[count++];
        *s = find_segment(volume, offset, end);
        if (s->written && s->piece.journal != NULL) {
            s->piece.journal->users++;
        }
        offset += s->length;
    }
    pthread_mutex_unlock(&volume->mutex);
    return count;
}

static void
release_plan(gd_volume *volume, segment *segments, size_t count)
{
    pthread_mutex_lock(&volume->mutex);
    for (size_t i = 0; i < count; i++) {
        if (segments[i].written && segments[i].piece.journal != NULL) {
            gd_volume_release_journal(segments[i].piece.journal);
        }
    }
    pthread_mutex_unlock(&volume->mutex);
}

static gd_status
read_segment(gd_volume *volume, const segment *part, uint8_t *out,
             uint8_t **room, gd_error *err)
{
    const gd_env *env = volume->repo->env;
    if (!part->written) {
        return gd_parts_read(&volume->parts, out, part->length, part->offset,
                             err);
    }
    if (part->piece.journal == NULL) {
        memset(out, 0, (size_t)part->length);
        return GD_OK;
    }
    if (*room == NULL) {
        *room = gd_alloc(env, GD_RECORD_HEAD + GD_RECORD_DATA, err);
    }
    return *room == NULL ? GD_NOMEM
                         : gd_journal_read(&part->piece, part->offset,
                                           (size_t)part->length, out, *room,
                                           err);
}

/* *counter: the bytes read are added to it. */
static gd_status
read_counted(gd_volume *volume, uint8_t *out, size_t length, uint64_t offset,
             uint64_t *counter, gd_error *err)
{
    uint8_t *room = NULL;
    gd_status s = gd_volume_begin_request(volume, offset, length, counter, err);
    while (s == GD_OK && length > 0) {
        segment segments[SEGMENTS];
        size_t count = plan(volume, offset, offset + length, segments);
        for (size_t i = 0; s == GD_OK && i < count; i++) {
            s = read_segment(volume, &segments[i], out, &room, err);
            out += segments[i].length;
            offset += segments[i].length;
            length -= (size_t)segments[i].length;
        }
        release_plan(volume, segments, count);
    }
    volume->repo->env->release(volume->repo->env, room);
    return s;
}

gd_status
gd_volume_read(gd_volume *volume, uint8_t *out, size_t length,
               uint64_t offset, gd_error *err)
{
    return read_counted(volume, out, length, offset,
                        &volume->head.counters.read, err);
}

gd_status
gd_volume_read_uncounted(gd_volume *volume, uint8_t *out, size_t length,
                         uint64_t offset, gd_error *err)
{
    uint64_t nothing = 0;
    return read_counted(volume, out, length, offset, &nothing, err);
}

gd_status
gd_volume_extents(gd_volume *volume, uint64_t length, uint64_t offset,
                  bool (*visit)(void *arg, uint64_t offset, uint64_t length,
                                bool zeros),
                  void *arg, gd_error *err)
{
    uint64_t nothing = 0;
    gd_status s = gd_volume_begin_request(volume, offset, length, &nothing, err);
    uint64_t end = offset + length;
    while (s == GD_OK && offset < end) {
        segment found;
        (void)nothing;
        pthread_mutex_lock(&volume->mutex);
        found = find_segment(volume, offset, end);
        pthread_mutex_unlock(&volume->mutex);
        bool zeros = found.piece.journal == NULL;
        uint64_t alike = found.length;
        if (!found.written) {
            s = gd_parts_extent(&volume->parts, offset, found.length, &alike,
                                &zeros, err);
        }
        if (s != GD_OK || !visit(arg, offset, alike, zeros)) {
            return s;
        }
        offset += alike;
    }
    return s;
}

