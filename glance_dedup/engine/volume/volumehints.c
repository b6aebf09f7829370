/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volumehints.c - see volumehints.h.
 */
#include "engine/volume/volumehints.h"

#include <string.h>

#include "engine/volume/state.h"

void
gd_volume_set_dedup(gd_volume *volume, bool dedup)
{
    pthread_mutex_lock(&volume->mutex);
    volume->no_dedup = !dedup;
    pthread_mutex_unlock(&volume->mutex);
}

/* ---- file systems ---- */

/* Bytes that cannot be read give no hints. */
static bool
peek(void *arg, uint8_t *out, size_t length, uint64_t offset)
{
    gd_error ignored;
    return gd_volume_read_uncounted(arg, out, length, offset, &ignored) ==
    GD_OK;
}

gd_edition_hints *
gd_volume_take_hints(gd_volume *volume, gd_error *err)
{
    gd_edition_hints *hints =
        gd_calloc(volume->repo->env, 1, sizeof *hints, err);
    if (hints == NULL) {
        return NULL;
    }
    pthread_mutex_lock(&volume->mutex);
    uint64_t size = volume->head.size;
    hints->no_dedup = volume->no_dedup;
    hints->group_count = volume->wanted_count;
    memcpy(hints->groups, volume->wanted, sizeof hints->groups);
    volume->wanted_count = 0;
    pthread_mutex_unlock(&volume->mutex);
    if (!hints->no_dedup) {
        gd_fslayout_find(peek, volume, size, &hints->layout,
                         &hints->copies);
    }
    return hints;
}

/* ---- prefetching ---- */

/* Returns whether the group was not wanted yet. */
static bool
want_group(gd_volume *volume, uint32_t group)
{
    uint32_t *wanted = volume->wanted;
    pthread_mutex_lock(&volume->mutex);
    size_t count = volume->wanted_count, at = 0;
    while (at < count && wanted[at] != group) {
        at++;
    }
    bool is_new = at == count;
    if (is_new && count < GD_CACHED_STORES) {
        volume->wanted_count++;
    } else if (is_new) {
        at = 0; /* for the one that was wanted longest ago */
    }
    count = volume->wanted_count;
    memmove(wanted + at, wanted + at + 1, (count - at - 1) * sizeof *wanted);
    wanted[count - 1] = group;
    pthread_mutex_unlock(&volume->mutex);
    return is_new;
}

/* Has the group's store in memory, if that is possible now. */
static void
load_store(gd_volume *volume, uint32_t group)
{
    gd_repo *repo = volume->repo;
    gd_fptable *store;
    bool cold;
    if (gd_locks_lock_shared(repo->locks, group, NULL) != GD_OK) {
        return;
    }
    if (gd_fpcache_store(repo->cache, group, &store, &cold, NULL) == GD_OK) {
        pthread_mutex_lock(&volume->mutex);
        volume->head.counters.prefetches += cold;
        pthread_mutex_unlock(&volume->mutex);
        gd_fpcache_return_store(repo->cache, store);
    }
    gd_locks_unlock_shared(repo->locks, group);
}

static void
prefetch_source(gd_volume *volume, const gd_part_source *source, uint64_t at,
                uint64_t length)
{
    gd_extent_cursor cursor;
    gd_extent_part part;
    gd_error ignored;
    gd_extent_cursor_open(&cursor, &source->image->recipe, source->from + at,
                          length);
    while (cursor.offset < cursor.end &&
           gd_extent_cursor_next(&cursor, &part, &ignored) == GD_OK) {
        if (part.extent->kind != GD_EXTENT_ZEROS &&
            want_group(volume, part.extent->group)) {
            load_store(volume, part.extent->group);
        }
    }
}

void
gd_volume_prefetch(gd_volume *volume, uint64_t length, uint64_t offset)
{
    gd_parts *parts = &volume->parts;
    while (length > 0) {
        gd_part_source source;
        gd_error ignored;
        uint64_t at = offset % parts->part_size;
        uint64_t here = parts->part_size - at;
        here = here < length ? here : length;
        if (gd_parts_acquire(parts, offset / parts->part_size, &source,
                             &ignored) == GD_OK) {
            if (at < source.length) {
                uint64_t rest = source.length - at;
                prefetch_source(volume, &source, at,
                                here < rest ? here : rest);
            }
            gd_parts_release(parts, &source);
        }
        offset += here;
        length -= here;
    }
}
