/* SPDX-License-Identifier: Apache-2.0 */
/*
 * derive.c - see derive.h.
 */
#include "engine/read/derive.h"

#include <string.h>

#include "engine/base/coding.h"
void
gd_derivers_init(gd_derivers *derivers, gd_plain plain)
{
    *derivers = (gd_derivers){.plain = plain};
    pthread_mutex_init(&derivers->mutex, NULL);
}

static void
destroy(const gd_env *env, gd_deriver *deriver)
{
    if (deriver->encoder != NULL) {
        gd_deflate_close(env, deriver->encoder);
    }
    env->release(env, deriver->plain);
    env->release(env, deriver->out);
    env->release(env, deriver);
}

void
gd_derivers_free(gd_derivers *derivers)
{
    const gd_env *env = derivers->plain.repo->env;
    while (derivers->free != NULL) {
        gd_deriver *deriver = derivers->free;
        derivers->free = deriver->next;
        destroy(env, deriver);
    }
    pthread_mutex_destroy(&derivers->mutex);
}

/* ---- borrowing ---- */

static gd_status
make(const gd_env *env, gd_deriver **out, gd_error *err)
{
    gd_deriver *deriver = gd_calloc(env, 1, sizeof *deriver, err);
    if (deriver == NULL) {
        return GD_NOMEM;
    }
    deriver->plain = gd_alloc(env, GD_DEFLATE_MAX_PLAIN, err);
    if (deriver->plain == NULL) {
        destroy(env, deriver);
        return GD_NOMEM;
    }
    *out = deriver;
    return GD_OK;
}

/* Prefers the deriver that has made this extent, then the one that was not used
 * for longest, if as many are there as are kept. */
static gd_status
borrow(gd_derivers *all, const gd_extent *extent, gd_deriver **out,
       gd_error *err)
{
    pthread_mutex_lock(&all->mutex);
    gd_deriver **found = NULL, **last = NULL;
    for (gd_deriver **at = &all->free; *at != NULL; at = &(*at)->next) {
        last = at;
        if ((*at)->length > 0 && (*at)->offset == extent->offset) {
            found = at;
        }
    }
    if (found == NULL && all->count == GD_DERIVERS_KEPT) {
        found = last;
    }
    gd_deriver *deriver = found != NULL ? *found : NULL;
    if (deriver != NULL) {
        *found = deriver->next;
        all->count--;
    }
    pthread_mutex_unlock(&all->mutex);
    *out = deriver;
    return deriver != NULL ? GD_OK : make(all->plain.repo->env, out, err);
}

static void
give_back(gd_derivers *all, gd_deriver *deriver)
{
    pthread_mutex_lock(&all->mutex);
    bool keeps = all->count < GD_DERIVERS_KEPT;
    if (keeps) {
        deriver->next = all->free;
        all->free = deriver;
        all->count++;
    }
    pthread_mutex_unlock(&all->mutex);
    if (!keeps) {
        destroy(all->plain.repo->env, deriver);
    }
}

/* ---- deriving ---- */

static gd_status
prepare(const gd_plain *plain, gd_deriver *deriver, const gd_extent *extent,
        gd_error *err)
{
    const gd_env *env = plain->repo->env;
    size_t room = (size_t)extent->length + GD_DEFLATE_SLACK;
    if (deriver->room < room) {
        env->release(env, deriver->out);
        deriver->room = 0;
        deriver->out = gd_alloc(env, room, err);
        if (deriver->out == NULL) {
            return GD_NOMEM;
        }
        deriver->room = room;
    }
    if (deriver->number != extent->encoder) {
        gd_deflate_params params;
        gd_recipe_disk_params(&plain->recipe->header.disk, extent->encoder,
                              &params);
        if (deriver->encoder != NULL) {
            gd_deflate_close(env, deriver->encoder);
        }
        deriver->encoder = NULL;
        deriver->number = 0;
        GD_TRY(gd_deflate_open(env, &params, &deriver->encoder, err));
        deriver->number = extent->encoder;
    }
    return GD_OK;
}

/* F1: compares what the encoder made with the checksum in the table. */
static gd_status
make_extent(const gd_plain *plain, gd_deriver *deriver,
            const gd_extent *extent, bool fresh, gd_error *err)
{
    const gd_range range = {extent->plain, extent->plain_length};
    deriver->length = 0;
    GD_TRY(prepare(plain, deriver, extent, err));
    GD_TRY(gd_plain_read(plain, deriver->plain, range, fresh, err));
    size_t length = gd_deflate_encode(deriver->encoder, deriver->plain,
                                      extent->plain_length, deriver->out,
                                      (size_t)extent->length +
                                          GD_DEFLATE_SLACK);
    if (length != extent->length ||
        gd_checksum(deriver->out, length, 0) != extent->digest) {
        return gd_fail(err, GD_CORRUPT,
                       "image %s: encoder %u does not make the %llu bytes of "
                       "the file at offset %llu from the plain bytes at offset "
                       "%llu", plain->recipe->header.image_id, extent->encoder,
                       (unsigned long long)extent->length,
                       (unsigned long long)extent->offset,
                       (unsigned long long)extent->plain);
    }
    deriver->offset = extent->offset;
    deriver->length = extent->length;
    return GD_OK;
}

gd_status
gd_derive_extent(gd_derivers *derivers, const gd_extent *extent, gd_range part,
                 bool fresh, uint8_t *out, gd_error *err)
{
    gd_deriver *deriver;
    gd_status s = GD_OK;
    GD_TRY(borrow(derivers, extent, &deriver, err));
    if (fresh || deriver->length == 0 || deriver->offset != extent->offset) {
        s = make_extent(&derivers->plain, deriver, extent, fresh, err);
    }
    if (s == GD_OK) {
        memcpy(out, deriver->out + part.offset, (size_t)part.length);
    }
    give_back(derivers, deriver);
    return s;
}
