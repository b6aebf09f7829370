/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parts.c - see parts.h.
 */
#include "engine/volume/parts.h"

#include <string.h>

#include "engine/volume/volumenames.h"

/* ---- opening and closing ---- */

static void
close_image(const gd_env *env, void *object)
{
    gd_part_image *held = object;
    gd_image_close(held->image);
    env->release(env, held);
}

gd_status
gd_parts_open(gd_parts *parts, gd_repo *repo, const gd_volume_head *head,
              const gd_volume_mark *marks, gd_error *err)
{
    *parts = (gd_parts){.repo = repo,
                        .scope = head->scope,
                        .part_size = head->part_size,
                        .base_size = head->base_size,
                        .count = gd_volume_head_parts(head)};
    memcpy(parts->volume_id, head->volume_id, GD_ID_SIZE);
    pthread_mutex_init(&parts->mutex, NULL);
    gd_lru_init(&parts->images, repo->env, close_image,
                gd_repo_kept_open(repo, GD_PARTS_SHARE));
    parts->editions = gd_calloc(repo->env, (size_t)parts->count,
                                sizeof *parts->editions, err);
    if (parts->editions == NULL) {
        return GD_NOMEM;
    }
    for (uint32_t i = 0; i < head->marks; i++) {
        parts->editions[marks[i].part] = marks[i].edition;
    }
    return GD_OK;
}

void
gd_parts_close(gd_parts *parts)
{
    const gd_env *env = parts->repo->env;
    gd_lru_free(&parts->images);
    env->release(env, parts->editions);
    pthread_mutex_destroy(&parts->mutex);
}

static gd_lru_key
key_of(uint64_t part, uint64_t edition)
{
    return (gd_lru_key){{edition == 0 ? 0 : part, edition}};
}

/* arg: a number of parts. */
static bool
is_behind(void *arg, const void *object)
{
    const uint64_t *count = arg;
    const gd_part_image *held = object;
    return held->edition != 0 && held->part >= *count;
}

gd_status
gd_parts_resize(gd_parts *parts, uint64_t size, uint64_t base_size,
                gd_error *err)
{
    const gd_env *env = parts->repo->env;
    uint64_t count = (size + parts->part_size - 1) / parts->part_size;
    uint64_t *editions = NULL;
    if (count > parts->count) {
        editions = gd_calloc(env, (size_t)count, sizeof *editions, err);
        if (editions == NULL) {
            return GD_NOMEM;
        }
    }
    pthread_mutex_lock(&parts->mutex);
    if (editions != NULL) {
        memcpy(editions, parts->editions,
               (size_t)parts->count * sizeof *editions);
        env->release(env, parts->editions);
        parts->editions = editions;
    }
    parts->count = count;
    parts->base_size = base_size;
    /* Such a part may get an edition of the same number again. */
    gd_lru_drop_if(&parts->images, is_behind, &count);
    pthread_mutex_unlock(&parts->mutex);
    return GD_OK;
}

/* ---- editions ---- */

/* A part behind the end, where a read may be while the volume becomes smaller,
 * has none.  REQUIRES: the mutex. */
static uint64_t
edition_of(const gd_parts *parts, uint64_t part)
{
    return part < parts->count ? parts->editions[part] : 0;
}

uint64_t
gd_parts_edition(gd_parts *parts, uint64_t part)
{
    pthread_mutex_lock(&parts->mutex);
    uint64_t edition = edition_of(parts, part);
    pthread_mutex_unlock(&parts->mutex);
    return edition;
}

void
gd_parts_set(gd_parts *parts, uint64_t part, uint64_t edition)
{
    pthread_mutex_lock(&parts->mutex);
    if (parts->editions[part] != 0) {
        /* It would pin the blocks of garbage. */
        gd_lru_key old = key_of(part, parts->editions[part]);
        gd_lru_drop_key(&parts->images, &old);
    }
    parts->editions[part] = edition;
    pthread_mutex_unlock(&parts->mutex);
}

bool
gd_parts_has_bytes(gd_parts *parts, uint64_t part)
{
    pthread_mutex_lock(&parts->mutex);
    bool has = edition_of(parts, part) != 0 ||
               part * parts->part_size < parts->base_size;
    pthread_mutex_unlock(&parts->mutex);
    return has;
}

gd_status
gd_parts_marks(gd_parts *parts, gd_volume_mark **marks, uint32_t *count,
               gd_error *err)
{
    gd_status s = GD_OK;
    *count = 0;
    pthread_mutex_lock(&parts->mutex);
    for (uint64_t part = 0; part < parts->count; part++) {
        *count += parts->editions[part] != 0;
    }
    *marks = gd_calloc(parts->repo->env, *count + (size_t)1, sizeof **marks,
                       err);
    if (*marks == NULL) {
        s = GD_NOMEM;
    } else {
        uint32_t n = 0;
        for (uint64_t part = 0; part < parts->count; part++) {
            if (parts->editions[part] != 0) {
                (*marks)[n++] = (gd_volume_mark){part, parts->editions[part]};
            }
        }
    }
    pthread_mutex_unlock(&parts->mutex);
    return s;
}

/* ---- open images ---- */

/* Requires of a recipe of the right name the fields that the volume's would
 * have. */
static gd_status
require_image(const gd_parts *parts, uint64_t edition, gd_image *image,
              gd_error *err)
{
    const gd_recipe_header *header = gd_image_header(image);
    bool fits = edition == 0 ? header->size >= parts->base_size
                             : header->size <= parts->part_size;
    return fits && gd_scope_equal(&header->scope, &parts->scope)
               ? GD_OK
               : gd_fail(err, GD_CORRUPT, "the recipe images/%s has the size "
                         "or the scope of something else",
                         header->image_id);
}

static gd_status
open_image(gd_parts *parts, uint64_t part, uint64_t edition,
           gd_image **image, gd_error *err)
{
    char id[GD_IMAGE_ID_MAX + 1];
    if (edition == 0) {
        gd_volume_base_id(parts->volume_id, id);
    } else {
        gd_volume_edition_id(parts->volume_id, part, edition, id);
    }
    gd_status s = gd_image_open(parts->repo, id, NULL, image, err);
    if (s == GD_NOTFOUND) {
        return gd_fail(err, GD_CORRUPT, "the recipe images/%s is missing; the "
                       "volume's bytes from %llu on were in it", id,
                       (unsigned long long)(part * parts->part_size));
    }
    if (s == GD_OK) {
        s = require_image(parts, edition, *image, err);
        if (s != GD_OK) {
            gd_image_close(*image);
        }
    }
    return s;
}

/* REQUIRES: the mutex is held. */
static gd_status
hold_image(gd_parts *parts, uint64_t part, uint64_t edition,
           gd_part_image **held, gd_error *err)
{
    const gd_env *env = parts->repo->env;
    gd_lru_key key = key_of(part, edition);
    *held = gd_lru_get(&parts->images, &key);
    if (*held != NULL) {
        return GD_OK;
    }
    gd_part_image *made = gd_calloc(env, 1, sizeof *made, err);
    if (made == NULL) {
        return GD_NOMEM;
    }
    gd_status s = open_image(parts, part, edition, &made->image, err);
    if (s != GD_OK) {
        env->release(env, made);
        return s;
    }
    gd_lru_begin(&made->item);
    made->part = part;
    made->edition = edition;
    gd_lru_keep(&parts->images, &key, 1, made);
    *held = made;
    return GD_OK;
}

gd_status
gd_parts_acquire(gd_parts *parts, uint64_t part, gd_part_source *source,
                 gd_error *err)
{
    gd_status s = GD_OK;
    uint64_t start = part * parts->part_size;
    *source = (gd_part_source){0};
    pthread_mutex_lock(&parts->mutex);
    uint64_t edition = edition_of(parts, part);
    uint64_t most = parts->part_size;
    if (edition == 0) {
        source->from = start;
        most = start < parts->base_size ? parts->base_size - start : 0;
    }
    if (most > 0) {
        s = hold_image(parts, part, edition, &source->held, err);
    }
    pthread_mutex_unlock(&parts->mutex);
    if (s == GD_OK && most > 0) {
        source->image = source->held->image;
        uint64_t size = gd_image_header(source->image)->size;
        uint64_t rest = source->from < size ? size - source->from : 0;
        most = most < parts->part_size ? most : parts->part_size;
        source->length = rest < most ? rest : most;
    }
    return s;
}

void
gd_parts_release(gd_parts *parts, gd_part_source *source)
{
    if (source->held != NULL) {
        gd_lru_return(&parts->images, source->held);
        *source = (gd_part_source){0};
    }
}

void
gd_parts_renew(gd_parts *parts)
{
    enum { AT_ONCE = 64 };
    void *images[AT_ONCE];
    size_t place = 0;
    do {
        size_t count = gd_lru_walk(&parts->images, &place, images, AT_ONCE);
        for (size_t i = 0; i < count; i++) {
            const gd_recipe *recipe =
                &((const gd_part_image *)images[i])->image->recipe;
            if (!gd_same_file(recipe->env, recipe->fd, parts->repo->root,
                              recipe->name)) {
                gd_lru_drop(&parts->images, images[i]);
            }
            gd_lru_return(&parts->images, images[i]);
        }
    } while (place != 0);
}

/* ---- reading ---- */

static gd_status
read_source(const gd_part_source *source, uint64_t at, uint8_t *out,
            size_t length, gd_error *err)
{
    size_t done = 0;
    uint64_t rest = at < source->length ? source->length - at : 0;
    size_t here = rest < length ? (size_t)rest : length;
    if (here != 0) {
        GD_TRY(gd_image_read(source->image, out, here, source->from + at,
                             &done, err));
    }
    memset(out + done, 0, length - done);
    return GD_OK;
}

gd_status
gd_parts_read(gd_parts *parts, uint8_t *out, uint64_t length, uint64_t offset,
              gd_error *err)
{
    gd_status s = GD_OK;
    while (s == GD_OK && length > 0) {
        gd_part_source source;
        uint64_t at = offset % parts->part_size;
        uint64_t here = parts->part_size - at;
        here = here < length ? here : length;
        s = gd_parts_acquire(parts, offset / parts->part_size, &source, err);
        if (s == GD_OK) {
            s = read_source(&source, at, out, (size_t)here, err);
            gd_parts_release(parts, &source);
        }
        out += here;
        offset += here;
        length -= here;
    }
    return s;
}

/* The same as gd_parts_extent, for a range within a source. */
static gd_status
source_extent(const gd_part_source *source, uint64_t at, uint64_t length,
              uint64_t *alike, bool *zeros, gd_error *err)
{
    gd_extent_cursor cursor;
    bool same = true;
    *alike = 0;
    gd_extent_cursor_open(&cursor, &source->image->recipe, source->from + at,
                          length);
    while (same && cursor.offset < cursor.end) {
        gd_extent_part part;
        GD_TRY(gd_extent_cursor_next(&cursor, &part, err));
        bool is_zeros = part.extent->kind == GD_EXTENT_ZEROS;
        *zeros = *alike == 0 ? is_zeros : *zeros;
        same = is_zeros == *zeros;
        *alike += same ? part.length : 0;
    }
    return GD_OK;
}

gd_status
gd_parts_extent(gd_parts *parts, uint64_t offset, uint64_t length,
                uint64_t *alike, bool *zeros, gd_error *err)
{
    gd_part_source source;
    uint64_t at = offset % parts->part_size;
    uint64_t here = parts->part_size - at;
    here = here < length ? here : length;
    gd_status s =
        gd_parts_acquire(parts, offset / parts->part_size, &source, err);
    if (s != GD_OK) {
        return s;
    }
    *zeros = at >= source.length;
    *alike = here;
    if (!*zeros) {
        uint64_t rest = source.length - at;
        s = source_extent(&source, at, here < rest ? here : rest, alike,
                          zeros, err);
    }
    gd_parts_release(parts, &source);
    return s;
}
