/* SPDX-License-Identifier: Apache-2.0 */
/*
 * write.c - a volume's requests that change it; see volume.h.
 */
#include "engine/base/coding.h"
#include "engine/volume/state.h"

enum {
    JOURNAL_BYTES = 64 << 20, /* of the active journal: a checkpoint is due */
    JOURNAL_RECORDS = 131072, /* likewise */
    UNSYNCED_BYTES = 16 << 20, /* likewise, if it is worth its cost (V11) */
    PRESSURE = 4,             /* so many times as much: writes wait */
    PART_SHARE = 128,         /* a part's size, divided by this: about what its
                               * recipe has at most */
    MIN_PART_BYTES = 64 << 10, /* for its syncs */
};

/* REQUIRES: the mutex. */
static bool
is_full(const gd_volume *volume, unsigned times)
{
    return volume->active->end >=
               (uint64_t)JOURNAL_BYTES * times ||
           volume->active->records >= (uint64_t)JOURNAL_RECORDS * times;
}

/* Returns whether the active journal touches no more than so many parts.
 * REQUIRES: the mutex. */
static bool
touches_at_most(const gd_volume *volume, uint64_t most)
{
    uint64_t size = volume->head.part_size, next = 0, count = 0;
    const gd_piece *piece;
    while (count <= most &&
           (piece = gd_overlay_find(&volume->fresh, next * size)) != NULL) {
        uint64_t part = piece->offset / size;
        next = (part > next ? part : next) + 1;
        count++;
    }
    return count <= most;
}

/* REQUIRES: the mutex. */
static bool
is_worth(const gd_volume *volume)
{
    const gd_journal *active = volume->active;
    uint64_t cost = volume->head.part_size / PART_SHARE;
    cost = cost < MIN_PART_BYTES ? MIN_PART_BYTES : cost;
    return active->records > 0 &&
           touches_at_most(volume, (active->end - active->start) / cost);
}

bool
gd_volume_needs_checkpoint(gd_volume *volume)
{
    pthread_mutex_lock(&volume->mutex);
    bool due = is_full(volume, 1) || volume->waiting ||
               volume->frozen_count > 0 /* of an owner before, or one has
                                         * failed, or was begun */ ||
               (gd_volume_unsynced_bytes(volume->active) >= UNSYNCED_BYTES &&
                is_worth(volume));
    pthread_mutex_unlock(&volume->mutex);
    return due;
}

bool
gd_volume_is_worth_checkpoint(gd_volume *volume)
{
    pthread_mutex_lock(&volume->mutex);
    bool worth = is_worth(volume);
    pthread_mutex_unlock(&volume->mutex);
    return worth;
}

/* Waits until the journal may take more.
 * REQUIRES: the mutex, which it may let go of meanwhile. */
static gd_status
wait_for_room(gd_volume *volume, gd_error *err)
{
    gd_status s = gd_volume_require_intact(volume, err);
    while (s == GD_OK && (volume->held || is_full(volume, PRESSURE))) {
        if (volume->held) {
            pthread_cond_wait(&volume->changed, &volume->mutex);
        } else {
            pthread_mutex_unlock(&volume->mutex);
            s = gd_volume_checkpoint(volume, err);
            pthread_mutex_lock(&volume->mutex);
        }
        s = s == GD_OK ? gd_volume_require_intact(volume, err) : s;
    }
    return s;
}

/* A spare is given up before a write is refused. */
static gd_status
require_room(gd_volume *volume, uint64_t bytes, gd_error *err)
{
    pthread_mutex_lock(&volume->mutex);
    const gd_journal *active = volume->active;
    bool is_ahead = active->ahead >= active->end + bytes;
    pthread_mutex_unlock(&volume->mutex);
    if (is_ahead) {
        return GD_OK; /* the file has the room */
    }
    gd_status s = gd_repo_require_room(volume->repo, bytes, err);
    if (s != GD_NOSPACE) {
        return s;
    }
    pthread_mutex_lock(&volume->mutex);
    bool had_spare = volume->spare != NULL;
    gd_volume_drop_spare(volume);
    pthread_mutex_unlock(&volume->mutex);
    return had_spare ? gd_repo_require_room(volume->repo, bytes, err) : s;
}

static gd_status
append_records(gd_volume *volume, gd_append *appends, size_t count,
               gd_error *err)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        bytes += gd_record_size(&appends[i].record);
    }
    GD_TRY(require_room(volume, bytes, err));
    pthread_mutex_lock(&volume->mutex);
    gd_status s = wait_for_room(volume, err);
    if (s == GD_OK) {
        /* While it waited, the volume may have become smaller. */
        s = gd_volume_require_range(volume, appends[count - 1].record.offset,
                        appends[count - 1].record.length, err);
    }
    if (s == GD_OK) {
        s = gd_volume_append(volume, appends, count, err);
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        s = gd_volume_enter(volume, &appends[i], err);
    }
    pthread_mutex_unlock(&volume->mutex);
    return s;
}

gd_status
gd_volume_write(gd_volume *volume, const uint8_t *data, size_t length,
                uint64_t offset, gd_error *err)
{
    GD_TRY(gd_volume_begin_request(volume, offset, length,
                         &volume->head.counters.written, err));
    while (length > 0) {
        gd_append appends[GD_JOURNAL_BATCH];
        size_t count = 0;
        while (length > 0 && count < GD_JOURNAL_BATCH) {
            size_t here = length < GD_RECORD_DATA ? length : GD_RECORD_DATA;
            appends[count++] = (gd_append){
                .record = {.kind = GD_RECORD_BYTES,
                           .offset = offset,
                           .length = here,
                           .checksum = gd_checksum(data, here, 0)},
                .data = data};
            data += here;
            offset += here;
            length -= here;
        }
        GD_TRY(append_records(volume, appends, count, err));
    }
    return GD_OK;
}

gd_status
gd_volume_zero(gd_volume *volume, uint64_t length, uint64_t offset,
               gd_error *err)
{
    gd_append append = {.record = {.kind = GD_RECORD_ZEROS,
                                   .offset = offset,
                                   .length = length}};
    gd_status s = gd_volume_begin_request(volume, offset, length,
                                &volume->head.counters.zeroed, err);
    return s == GD_OK && length > 0 ? append_records(volume, &append, 1, err)
                                    : s;
}

gd_status
gd_volume_flush(gd_volume *volume, gd_error *err)
{
    gd_status s = gd_repo_require_owner(volume->repo, err);
    if (s != GD_OK) {
        return s;
    }
    pthread_mutex_lock(&volume->mutex);
    volume->head.counters.flushes++;
    while (s == GD_OK && volume->waiting) {
        pthread_mutex_unlock(&volume->mutex);
        s = gd_volume_checkpoint(volume, err);
        pthread_mutex_lock(&volume->mutex);
    }
    if (s == GD_OK) {
        s = gd_volume_sync(volume, err);
    }
    pthread_mutex_unlock(&volume->mutex);
    return s;
}
