/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rewritesource.c - see rewritesource.h.
 */
#include "engine/maintenance/rewritesource.h"

#include <stdlib.h>
#include <string.h>

enum {
    /* Plain bytes of a window: a group of 32,768 blocks of 4 KiB. */
    WINDOW = 128 << 20,
    /* The same, if the blocks stay in the order of their slots, and lie in the
     * old file in that order, too. */
    SMALL_WINDOW = 4 << 20,
    PIECES = 64, /* segments that are loaded at once */
};

/* ---- opening ---- */

unsigned
gd_rewrite_source_workers(const gd_rewrite_source *source)
{
    return gd_pool_threads(source->leased->repo->pool) + 1;
}

static gd_status
open_window(gd_rewrite_source *x, gd_error *err)
{
    const gd_env *env = x->leased->repo->env;
    const gd_entry_bounds *bounds = &x->leased->group->bounds;
    uint64_t live = 0;
    for (uint32_t i = 0; i < x->leased->published.count; i++) {
        const gd_entry *entry = &x->leased->entries[i];
        live += entry->state == GD_ENTRY_LIVE ? entry->plain_length : 0;
    }
    x->room = x->similar || bounds->has_lists ? WINDOW : SMALL_WINDOW;
    x->room = x->room < live ? x->room : live + 1;
    x->plain = gd_alloc(env, x->room, err);
    x->at = gd_calloc(env, bounds->slots, sizeof *x->at, err);
    x->features = gd_calloc(env, x->similar ? bounds->slots : 1,
                            sizeof *x->features, err);
    return x->plain == NULL || x->at == NULL || x->features == NULL ? GD_NOMEM
                                                                   : GD_OK;
}

gd_status
gd_rewrite_source_open(gd_rewrite_source *x, gd_leased_group *leased,
                       const gd_packing *packing, gd_error *err)
{
    gd_repo *repo = leased->repo;
    x->leased = leased;
    x->loads = packing != NULL;
    x->similar = packing != NULL && packing->similar;
    unsigned workers = gd_rewrite_source_workers(x);
    uint32_t slots = leased->group->bounds.slots;
    x->workers = gd_calloc(repo->env, workers, sizeof *x->workers, err);
    x->order = gd_calloc(repo->env, slots, sizeof *x->order, err);
    x->by_segment = gd_calloc(repo->env, slots, sizeof *x->by_segment, err);
    gd_status s = x->workers == NULL || x->order == NULL ||
                          x->by_segment == NULL
                      ? GD_NOMEM
                      : GD_OK;
    for (unsigned i = 0; s == GD_OK && i < workers; i++) {
        s = gd_decoder_open(repo->env, repo->digest, &x->workers[i], err);
    }
    return s == GD_OK && x->loads ? open_window(x, err) : s;
}

void
gd_rewrite_source_close(gd_rewrite_source *x)
{
    const gd_env *env = x->leased->repo->env;
    for (unsigned i = 0;
         x->workers != NULL && i < gd_rewrite_source_workers(x); i++) {
        gd_decoder_close(env, &x->workers[i]);
    }
    env->release(env, x->workers);
    env->release(env, x->order);
    env->release(env, x->by_segment);
    env->release(env, x->plain);
    env->release(env, x->at);
    env->release(env, x->features);
}

/* ---- the slots of a window ---- */

typedef struct place {
    uint32_t segment, slot;
} place;

static int
disk_order(const void *a, const void *b)
{
    const place *x = a, *y = b;
    if (x->segment != y->segment) {
        return x->segment < y->segment ? -1 : 1;
    }
    return x->slot < y->slot ? -1 : x->slot > y->slot;
}

/* Puts the window's slots in the order of the disk. */
static gd_status
sort_by_segment(gd_rewrite_source *x, gd_error *err)
{
    const gd_env *env = x->leased->repo->env;
    place *places = gd_calloc(env, x->count, sizeof *places, err);
    if (places == NULL) {
        return GD_NOMEM;
    }
    for (uint32_t i = 0; i < x->count; i++) {
        uint32_t slot = x->order[i];
        places[i] = (place){x->leased->entries[slot].segment, slot};
    }
    qsort(places, x->count, sizeof *places, disk_order);
    for (uint32_t i = 0; i < x->count; i++) {
        x->by_segment[i] = places[i].slot;
    }
    env->release(env, places);
    return GD_OK;
}

gd_status
gd_rewrite_source_advance(gd_rewrite_source *x, gd_error *err)
{
    const gd_leased_group *leased = x->leased;
    uint64_t used = 0;
    x->count = x->loaded = 0;
    for (; x->next < leased->published.count; x->next++) {
        const gd_entry *entry = &leased->entries[x->next];
        if (entry->state != GD_ENTRY_LIVE) {
            continue;
        }
        if (x->loads) {
            if (entry->plain_length > x->room - used) {
                break;
            }
            x->at[x->next] = (uint32_t)used;
            used += entry->plain_length;
        }
        x->order[x->count++] = x->next;
    }
    if (x->count == 0) {
        return GD_OK;
    }
    GD_TRY(sort_by_segment(x, err));
    if (!x->loads) {
        memcpy(x->order, x->by_segment, x->count * sizeof *x->order);
    }
    return GD_OK;
}

bool
gd_rewrite_source_ready(const gd_rewrite_source *x)
{
    return !x->loads || x->loaded == x->count;
}

/* ---- reading ---- */

static gd_status
verify_blocks(const gd_rewrite_source *x, gd_decoder *w, const uint32_t *slots,
              uint32_t count, const gd_segment_header *header, gd_error *err)
{
    const gd_group *group = x->leased->group;
    gd_verified blocks[GD_VERIFIED_AT_ONCE];
    for (uint32_t i = 0; i < count; i++) {
        blocks[i] = (gd_verified){&x->leased->entries[slots[i]], slots[i],
                                  false};
    }
    gd_status s = gd_verify_blocks(group, header, w->plain, w->hasher, blocks,
                                   count, err);
    for (uint32_t i = 0; s == GD_OK && i < count; i++) {
        if (!blocks[i].good) {
            s = gd_fail(err, GD_CORRUPT, "%s: the block of slot %u, in the "
                        "segment at offset %u, is damaged", group->name,
                        slots[i], blocks[i].entry->segment);
        }
    }
    return s;
}

gd_status
gd_rewrite_source_read(const gd_rewrite_source *x, gd_decoder *w,
                       const uint32_t *slots, uint32_t count,
                       gd_segment_header *header, uint64_t *read,
                       gd_error *err)
{
    GD_TRY(gd_group_read_segment(
        x->leased->group, &x->leased->entries[slots[0]], slots[0], w->coder,
        w->in, w->plain, header, err));
    *read += GD_SEGMENT_HEADER + (uint64_t)header->stored_length;
    for (uint32_t i = 0, n; i < count; i += n) {
        n = count - i;
        n = n < GD_VERIFIED_AT_ONCE ? n : GD_VERIFIED_AT_ONCE;
        GD_TRY(verify_blocks(x, w, slots + i, n, header, err));
    }
    return GD_OK;
}

/* ---- loading ---- */

/* Slots of one old segment. */
typedef struct piece {
    const uint32_t *slots;
    uint32_t count;
    uint64_t read;
    gd_status status;
    gd_error err;
} piece;

typedef struct loading {
    gd_rewrite_source *source;
    piece pieces[PIECES];
    size_t count;
} loading;

static void
load_piece(void *arg, size_t task, unsigned worker)
{
    loading *l = arg;
    gd_rewrite_source *x = l->source;
    piece *one = &l->pieces[task];
    gd_decoder *w = &x->workers[worker];
    gd_segment_header header;
    one->status = gd_rewrite_source_read(x, w, one->slots, one->count, &header,
                                         &one->read, &one->err);
    for (uint32_t i = 0; one->status == GD_OK && i < one->count; i++) {
        uint32_t slot = one->slots[i];
        const gd_entry *entry = &x->leased->entries[slot];
        uint8_t *block = x->plain + x->at[slot];
        memcpy(block, w->plain + entry->plain_offset, entry->plain_length);
        if (x->similar) {
            gd_similar_features_of(block, entry->plain_length, &x->features[slot]);
        }
    }
}

/* Finds the next segments; returns how many slots they have. */
static uint32_t
find_pieces(loading *l)
{
    const gd_rewrite_source *x = l->source;
    const gd_entry *entries = x->leased->entries;
    uint32_t at = x->loaded;
    while (at < x->count && l->count < PIECES) {
        const uint32_t *slots = x->by_segment + at;
        uint32_t n = 1;
        while (at + n < x->count &&
               entries[slots[n]].segment == entries[slots[0]].segment) {
            n++;
        }
        l->pieces[l->count++] = (piece){.slots = slots, .count = n};
        at += n;
    }
    return at - x->loaded;
}

/* Blocks that no codec made smaller come behind the others, so that they lie
 * with their like in any order.  Blocks with the mark nodedup come last, in the
 * order of the disk: similar ones are mostly copies, which no segment has
 * twice (I14). */
static gd_status
find_order(gd_rewrite_source *x, gd_error *err)
{
    const gd_env *env = x->leased->repo->env;
    const gd_entry *entries = x->leased->entries;
    gd_similar_features *features = gd_calloc(env, x->count, sizeof *features, err);
    uint32_t *found = gd_calloc(env, x->count, sizeof *found, err);
    uint32_t *slots = gd_calloc(env, x->count, sizeof *slots, err);
    gd_status s = features == NULL || found == NULL || slots == NULL ? GD_NOMEM
                                                                    : GD_OK;
    for (uint32_t i = 0; s == GD_OK && i < x->count; i++) {
        slots[i] = x->order[i];
        features[i] = x->features[slots[i]];
    }
    if (s == GD_OK) {
        s = gd_similar_order(env, features, x->count, found, err);
    }
    uint32_t used = 0;
    for (int plain = 0; s == GD_OK && plain < 2; plain++) {
        for (uint32_t i = 0; i < x->count; i++) {
            uint32_t slot = slots[found[i]];
            if (!entries[slot].nodedup &&
                (entries[slot].codec == GD_CODEC_NONE) == plain) {
                x->order[used++] = slot;
            }
        }
    }
    for (uint32_t i = 0; s == GD_OK && i < x->count; i++) {
        if (entries[x->by_segment[i]].nodedup) {
            x->order[used++] = x->by_segment[i];
        }
    }
    env->release(env, features);
    env->release(env, found);
    env->release(env, slots);
    return s;
}

gd_status
gd_rewrite_source_load(gd_rewrite_source *x, uint64_t *read, gd_error *err)
{
    const gd_env *env = x->leased->repo->env;
    loading *l = gd_calloc(env, 1, sizeof *l, err);
    if (l == NULL) {
        return GD_NOMEM;
    }
    l->source = x;
    uint32_t slots = find_pieces(l);
    gd_job job = {.run = load_piece, .arg = l, .tasks = l->count};
    gd_pool_submit(x->leased->repo->pool, &job);
    gd_pool_wait(x->leased->repo->pool, &job);
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < l->count; i++) {
        *read += l->pieces[i].read;
        s = l->pieces[i].status;
        if (s != GD_OK && err != NULL) {
            *err = l->pieces[i].err;
        }
    }
    env->release(env, l);
    if (s != GD_OK) {
        return s;
    }
    x->loaded += slots;
    return x->similar && x->loaded == x->count ? find_order(x, err) : GD_OK;
}
