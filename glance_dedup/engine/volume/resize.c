/* SPDX-License-Identifier: Apache-2.0 */
/*
 * resize.c - gives a volume another size (volumes.rst, "Operations").
 */
#include "engine/volume/directory.h"
#include "engine/volume/state.h"

static void
hold_writes(gd_volume *volume, bool held)
{
    pthread_mutex_lock(&volume->mutex);
    volume->held = held;
    pthread_cond_broadcast(&volume->changed);
    pthread_mutex_unlock(&volume->mutex);
}

/* Zeros from the new end to the end of its part, so that a volume that grows
 * again does not show its former bytes. */
static gd_status
zero_tail(gd_volume *volume, uint64_t size, gd_error *err)
{
    uint64_t part = volume->head.part_size;
    uint64_t end = (size + part - 1) / part * part;
    end = end < volume->head.size ? end : volume->head.size;
    gd_append append = {.record = {.kind = GD_RECORD_ZEROS,
                                   .offset = size,
                                   .length = end - size}};
    if (end == size) {
        return GD_OK;
    }
    pthread_mutex_lock(&volume->mutex);
    gd_status s = gd_volume_require_intact(volume, err);
    if (s == GD_OK) {
        s = gd_volume_append(volume, &append, 1, err);
    }
    if (s == GD_OK) {
        s = gd_volume_enter(volume, &append, err);
    }
    pthread_mutex_unlock(&volume->mutex);
    return s;
}

/* Deletes recipes without a mark.  What cannot be deleted now is garbage, which
 * the next owner deletes (V7).  REQUIRES: checkpointing. */
static void
delete_unmarked(gd_volume *volume)
{
    gd_volume_head head;
    gd_volume_mark *marks = NULL;
    uint32_t count;
    gd_volume_copy_head(volume, &head);
    if (gd_parts_marks(&volume->parts, &marks, &count, NULL) == GD_OK) {
        (void)gd_volume_delete_recipes(volume->repo, &head, marks, count,
                                       NULL);
    }
    volume->repo->env->release(volume->repo->env, marks);
}

/* REQUIRES: checkpointing. */
static gd_status
shrink(gd_volume *volume, const gd_volume_change *change, gd_error *err)
{
    hold_writes(volume, true);
    gd_status s = zero_tail(volume, change->size, err);
    if (s == GD_OK) {
        s = gd_volume_store_all(volume, err);
    }
    if (s == GD_OK) {
        s = gd_volume_rotate(volume, change, GD_DISCARD, err);
    }
    if (s == GD_OK) {
        s = gd_parts_resize(&volume->parts, change->size,
                            change->base_size, err);
    }
    hold_writes(volume, false);
    if (s == GD_OK) {
        delete_unmarked(volume);
    }
    return s;
}

/* All earlier writes are durable before the new size is (V11).
 * REQUIRES: checkpointing. */
static gd_status
grow(gd_volume *volume, const gd_volume_change *change, gd_error *err)
{
    GD_TRY(gd_volume_store_frozen(volume, false, err));
    pthread_mutex_lock(&volume->mutex);
    gd_status s = gd_volume_sync(volume, err);
    pthread_mutex_unlock(&volume->mutex);
    if (s != GD_OK) {
        return s;
    }
    GD_TRY(gd_parts_resize(&volume->parts, change->size, change->base_size,
                           err));
    return gd_volume_rotate(volume, change, GD_FREEZE, err);
}

gd_status
gd_volume_require_size(const char *name, uint64_t size, gd_error *err)
{
    return gd_volume_head_size_allowed(size)
               ? GD_OK
               : gd_fail(err, GD_INVALID,
                         "volume %s: a size is a multiple of %d bytes, from "
                         "%d to %llu, not %llu", name, GD_VOLUME_SECTOR,
                         GD_VOLUME_SECTOR,
                         (unsigned long long)GD_VOLUME_MAX_SIZE,
                         (unsigned long long)size);
}

gd_status
gd_volume_resize(gd_volume *volume, uint64_t size, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(volume->repo, err));
    GD_TRY(gd_volume_require_size(volume->name, size, err));
    pthread_mutex_lock(&volume->checkpointing);
    gd_status s = gd_volume_make_writable(volume, err);
    if (s != GD_OK) {
        pthread_mutex_unlock(&volume->checkpointing);
        return s;
    }
    uint64_t base = gd_volume_base_needed(volume);
    const gd_volume_change change = {.size = size,
                                     .base_size = base < size ? base : size,
                                     .state = GD_VOLUME_READY};
    s = size < volume->head.size ? shrink(volume, &change, err)
                                 : grow(volume, &change, err);
    pthread_mutex_unlock(&volume->checkpointing);
    return s;
}
