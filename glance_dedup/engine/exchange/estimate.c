/* SPDX-License-Identifier: Apache-2.0 */
/*
 * estimate.c - see estimate.h.
 *
 * A block that is not counted is treated like the last counted block before it,
 * as new or known.  So the compressed data is roughly what a segment would
 * have, and a counted block stands for its part of it.
 *
 * For recompression, segments are gathered in a window, which has what a group
 * would have: also of several images.
 */
#include "engine/exchange/estimate.h"

#include <string.h>
#include <xxhash.h>

#include "engine/base/zero.h"
#include "engine/format/address.h"
#include "engine/format/recipe.h"
#include "engine/format/similar.h"
#include "engine/write/compresspolicy.h"

enum {
    FIRST_PLACES = 1 << 12,
    /* Recompression is slow.  All of the first segments are tried, and then one
     * of so many. */
    AGAIN_ALL = 256,
    AGAIN_ONE_OF = 4,
    WINDOW = 128 << 20, /* bytes, as recompression has it (rewritesource.c) */
};

/* A counted block; key 0 marks a free place. */
typedef struct record {
    uint64_t key;
    uint32_t image; /* where it was first seen */
    uint16_t length_less_1;
    uint16_t stored; /* its part of its segment's stored bytes */
} record;

typedef enum stretch {
    STRETCH_NONE,
    STRETCH_ZEROS,
    STRETCH_NEW,
    STRETCH_KNOWN,
} stretch;

struct gd_estimate {
    const gd_env *env;
    gd_chunker chunker;
    gd_estimate_params params;
    gd_coder *coder;
    gd_compress_policy policy; /* as an upload would make it */
    record *places;
    size_t place_count; /* a power of two, above 1 */
    uint64_t secret; /* odd, random: see find */
    size_t most_places; /* 0: no limit */
    size_t records;
    unsigned level;
    uint32_t image;
    /* The current image: */
    uint64_t zeros, extents;
    stretch stretch;
    unsigned stretch_blocks;
    bool last_is_new; /* of the counted blocks */
    /* The current segment: */
    uint8_t *plain, *out;
    size_t filled;
    uint64_t *keys; /* of its counted blocks */
    size_t key_count;
    uint32_t *lengths; /* of all its blocks */
    size_t blocks;
    /* Memory that recompression would use: */
    uint8_t *window, *joined;
    size_t window_filled, joined_size;
    uint32_t *window_lengths;
    uint32_t window_blocks;
    uint64_t joined_count;
    gd_estimate_totals totals;
};

/* ---- opening and closing ---- */

static size_t
most_places(size_t table_bytes)
{
    size_t places = FIRST_PLACES;
    if (table_bytes == 0) {
        return 0;
    }
    /* While records move from one table to another, both exist. */
    while (4 * places * sizeof(record) <= table_bytes) {
        places *= 2;
    }
    return places;
}

static gd_status
open_buffers(gd_estimate *e, gd_error *err)
{
    const gd_env *env = e->env;
    e->joined_size = gd_segment_joined((uint32_t)e->params.segment_size);
    e->plain = gd_alloc(env, e->params.segment_size, err);
    e->window = gd_alloc(env, WINDOW, err);
    e->window_lengths =
        gd_calloc(env, GD_MAX_SLOTS, sizeof *e->window_lengths, err);
    e->joined = gd_alloc(env, e->joined_size, err);
    e->out = gd_alloc(env, e->joined_size, err);
    e->lengths =
        gd_calloc(env, e->params.segment_size, sizeof *e->lengths, err);
    /* No block is shorter than one byte, but few are shorter than the
     * average. */
    e->keys = gd_calloc(env, e->params.segment_size, sizeof *e->keys, err);
    e->places = gd_calloc(env, FIRST_PLACES, sizeof *e->places, err);
    e->place_count = FIRST_PLACES;
    if (e->plain == NULL || e->joined == NULL || e->out == NULL ||
        e->keys == NULL || e->places == NULL || e->lengths == NULL ||
        e->window == NULL || e->window_lengths == NULL) {
        return GD_NOMEM;
    }
    return gd_coder_open(env, &e->coder, err);
}

gd_status
gd_estimate_open(const gd_env *env, const gd_chunker *chunker,
                 const gd_estimate_params *params, gd_estimate **estimate,
                 gd_error *err)
{
    if (params->segment_size < chunker->max_length ||
        params->segment_size > GD_SEGMENT_MAX) {
        return gd_fail(err, GD_INVALID,
                       "a segment has %zu to %d bytes, not %zu",
                       chunker->max_length, GD_SEGMENT_MAX,
                       params->segment_size);
    }
    gd_status s = gd_codec_require_level(params->codec, params->codec_level,
                                         err);
    if (s == GD_OK) {
        s = gd_codec_require_level(params->again_codec, params->again_level,
                                   err);
    }
    gd_estimate *e = s == GD_OK ? gd_calloc(env, 1, sizeof *e, err) : NULL;
    if (e == NULL) {
        return s == GD_OK ? GD_NOMEM : s;
    }
    e->env = env;
    e->chunker = *chunker;
    e->params = *params;
    e->most_places = most_places(params->table_bytes);
    s = gd_random(env, &e->secret, sizeof e->secret, err);
    e->secret |= 1;
    if (s == GD_OK) {
        s = open_buffers(e, err);
    }
    if (s != GD_OK) {
        gd_estimate_close(e);
        return s;
    }
    *estimate = e;
    return GD_OK;
}

void
gd_estimate_close(gd_estimate *e)
{
    const gd_env *env = e->env;
    gd_coder_close(env, e->coder);
    env->release(env, e->places);
    env->release(env, e->keys);
    env->release(env, e->lengths);
    env->release(env, e->out);
    env->release(env, e->window);
    env->release(env, e->window_lengths);
    env->release(env, e->joined);
    env->release(env, e->plain);
    env->release(env, e);
}

/* ---- the table ---- */

static bool
is_counted(const gd_estimate *e, uint64_t key)
{
    return (key & ((UINT64_C(1) << e->level) - 1)) == 0;
}

/* The place of the key, or the free place where it belongs.  An image can be
 * made with blocks of any keys, so nobody else may know which place a key
 * has. */
static record *
find(const gd_estimate *e, record *places, size_t count, uint64_t key)
{
    uint64_t product = key * e->secret; /* twice: consecutive keys get
                                         * scattered */
    size_t at = (product ^ product >> 32) * e->secret >>
                (__builtin_clzll(count) + 1);
    while (places[at].key != 0 && places[at].key != key) {
        at = (at + 1) & (count - 1);
    }
    return &places[at];
}

/* Moves the records that still count to a table of this many places. */
static gd_status
move_records(gd_estimate *e, size_t count, gd_error *err)
{
    record *places = gd_calloc(e->env, count, sizeof *places, err);
    if (places == NULL) {
        return GD_NOMEM;
    }
    e->records = 0;
    for (size_t i = 0; i < e->place_count; i++) {
        const record *r = &e->places[i];
        if (r->key != 0 && is_counted(e, r->key)) {
            *find(e, places, count, r->key) = *r;
            e->records++;
        }
    }
    e->env->release(e->env, e->places);
    e->places = places;
    e->place_count = count;
    return GD_OK;
}

static gd_status
make_room(gd_estimate *e, gd_error *err)
{
    while (e->records > e->place_count / 4 * 3) {
        size_t count = e->place_count;
        if (e->most_places == 0 || count < e->most_places) {
            count *= 2;
        } else {
            e->level++;
        }
        GD_TRY(move_records(e, count, err));
    }
    return GD_OK;
}

/* ---- compressing ---- */

static gd_status
compressed(gd_estimate *e, gd_codec codec, int level, const uint8_t *plain,
           size_t length, size_t *stored, gd_error *err)
{
    gd_status s = gd_codec_compress(e->coder, codec, level, plain, length,
                                    e->out, stored, err);
    if (*stored == 0) {
        *stored = length;
    }
    *stored += GD_SEGMENT_HEADER;
    return s;
}

/* Compresses one segment as recompression would, or leaves it out of the
 * sample.  list: bytes that it has besides. */
static gd_status
try_again(gd_estimate *e, const uint8_t *plain, size_t length, size_t list,
          gd_error *err)
{
    size_t stored = 0;
    gd_status s = GD_OK;
    uint64_t number = e->joined_count++;
    if (length > 0 && (number < AGAIN_ALL || number % AGAIN_ONE_OF == 0)) {
        s = compressed(e, e->params.again_codec, e->params.again_level, plain,
                       length, &stored, err);
        unsigned weight = number < AGAIN_ALL ? 1 : AGAIN_ONE_OF;
        e->totals.again_plain += weight * length;
        e->totals.again_stored += weight * (stored + list);
    }
    return s;
}

/* Compresses the window's blocks in this order. */
static gd_status
try_ordered(gd_estimate *e, const uint32_t *order, const size_t *starts,
            gd_error *err)
{
    size_t filled = 0, list = 0;
    gd_status s = GD_OK;
    for (uint32_t i = 0; s == GD_OK && i < e->window_blocks; i++) {
        uint32_t length = e->window_lengths[order[i]];
        if (filled + length > e->joined_size) {
            s = try_again(e, e->joined, filled, list, err);
            filled = list = 0;
        }
        memcpy(e->joined + filled, e->window + starts[order[i]], length);
        filled += length;
        list += GD_LISTED_SLOT;
    }
    return s == GD_OK ? try_again(e, e->joined, filled, list, err) : s;
}

static gd_status
order_window(gd_estimate *e, gd_error *err)
{
    const gd_env *env = e->env;
    uint32_t count = e->window_blocks;
    gd_similar_features *features = gd_calloc(env, count, sizeof *features, err);
    uint32_t *order = gd_calloc(env, count, sizeof *order, err);
    size_t *starts = gd_calloc(env, count, sizeof *starts, err);
    gd_status s = features == NULL || order == NULL || starts == NULL
                      ? GD_NOMEM
                      : GD_OK;
    size_t at = 0;
    for (uint32_t i = 0; s == GD_OK && i < count; i++) {
        starts[i] = at;
        gd_similar_features_of(e->window + at, e->window_lengths[i], &features[i]);
        at += e->window_lengths[i];
    }
    if (s == GD_OK) {
        s = gd_similar_order(env, features, count, order, err);
    }
    if (s == GD_OK) {
        s = try_ordered(e, order, starts, err);
    }
    env->release(env, features);
    env->release(env, order);
    env->release(env, starts);
    return s;
}

static gd_status
end_window(gd_estimate *e, gd_error *err)
{
    gd_status s = GD_OK;
    if (e->window_filled > 0) {
        s = order_window(e, err);
    }
    e->window_filled = e->window_blocks = 0;
    return s;
}

static gd_status
join(gd_estimate *e, gd_error *err)
{
    gd_status s = GD_OK;
    if (e->window_filled + e->filled > WINDOW ||
        e->window_blocks + e->blocks > GD_MAX_SLOTS) {
        s = end_window(e, err);
    }
    if (e->blocks > GD_MAX_SLOTS) {
        return s; /* of a byte or so each */
    }
    memcpy(e->window + e->window_filled, e->plain, e->filled);
    memcpy(e->window_lengths + e->window_blocks, e->lengths,
           e->blocks * sizeof *e->lengths);
    e->window_filled += e->filled;
    e->window_blocks += (uint32_t)e->blocks;
    return s;
}

/* Gives each counted block its part of the segment's stored size. */
static void
share_out(gd_estimate *e, size_t stored)
{
    for (size_t i = 0; i < e->key_count; i++) {
        record *r = find(e, e->places, e->place_count, e->keys[i]);
        if (r->key != 0) { /* else it is no longer counted */
            size_t part =
                ((r->length_less_1 + 1) * stored + e->filled / 2) / e->filled;
            r->stored = part < UINT16_MAX ? (uint16_t)part : UINT16_MAX;
        }
    }
}

/* Compresses the segment as an upload would. */
static gd_status
uploaded(gd_estimate *e, size_t *stored, gd_error *err)
{
    uint64_t number;
    *stored = e->filled + GD_SEGMENT_HEADER;
    if (e->params.codec == GD_CODEC_NONE ||
        gd_compress_policy_next(&e->policy, &number) == GD_TRY_NOT) {
        return GD_OK;
    }
    gd_status s = compressed(e, e->params.codec, e->params.codec_level,
                             e->plain, e->filled, stored, err);
    gd_compress_policy_tried(&e->policy, number,
                             *stored < e->filled + GD_SEGMENT_HEADER);
    return s;
}

static gd_status
end_segment(gd_estimate *e, gd_error *err)
{
    size_t stored;
    gd_status s = GD_OK;
    if (e->key_count > 0) {
        s = uploaded(e, &stored, err);
        share_out(e, stored);
        if (s == GD_OK) {
            s = join(e, err);
        }
    }
    e->filled = e->key_count = e->blocks = 0;
    return s;
}

/* ---- blocks ---- */

/* Counts extents as in a recipe, if blocks that were stored one after the other
 * were also found so. */
static void
note_stretch(gd_estimate *e, stretch now)
{
    if (now != e->stretch ||
        (now != STRETCH_ZEROS &&
         e->stretch_blocks == GD_EXTENT_BLOCKS)) {
        e->extents++;
        e->stretch = now;
        e->stretch_blocks = 0;
    }
    e->stretch_blocks++;
}

static gd_status
add_new(gd_estimate *e, const uint8_t *data, size_t length, uint64_t key,
        gd_error *err)
{
    gd_status s = GD_OK;
    if (e->filled + length > e->params.segment_size) {
        s = end_segment(e, err);
    }
    memcpy(e->plain + e->filled, data, length);
    e->filled += length;
    e->lengths[e->blocks++] = (uint32_t)length;
    if (is_counted(e, key)) {
        e->keys[e->key_count++] = key;
    }
    return s;
}

static gd_status
take_block(gd_estimate *e, const uint8_t *data, size_t length, gd_error *err)
{
    if (gd_is_zero(data, length)) {
        e->zeros += length;
        note_stretch(e, STRETCH_ZEROS);
        return GD_OK;
    }
    uint64_t key = XXH3_64bits(data, length);
    key = key == 0 ? UINT64_C(1) << 63 : key;
    gd_status s = GD_OK;
    if (is_counted(e, key)) {
        record *r = find(e, e->places, e->place_count, key);
        e->last_is_new = r->key == 0;
        if (e->last_is_new) {
            *r = (record){.key = key,
                          .image = e->image,
                          .length_less_1 = (uint16_t)(length - 1)};
            e->records++;
            s = make_room(e, err);
        }
    }
    note_stretch(e, e->last_is_new ? STRETCH_NEW : STRETCH_KNOWN);
    if (s == GD_OK && e->last_is_new) {
        s = add_new(e, data, length, key, err);
    }
    return s;
}

gd_status
gd_estimate_take(gd_estimate *e, const uint8_t *data, size_t length, bool last,
                 size_t *used, gd_error *err)
{
    gd_status s = GD_OK;
    *used = 0;
    while (s == GD_OK && *used < length) {
        size_t cut = e->chunker.next(&e->chunker, data + *used, length - *used,
                                     0, last);
        if (cut == 0) {
            break;
        }
        s = take_block(e, data + *used, cut, err);
        *used += cut;
    }
    return s;
}

void
gd_estimate_take_zeros(gd_estimate *e, uint64_t length)
{
    if (length > 0) {
        e->zeros += length;
        note_stretch(e, STRETCH_ZEROS);
    }
}

gd_status
gd_estimate_end(gd_estimate *e, uint64_t *zeros, uint64_t *extents,
                gd_error *err)
{
    gd_status s = end_segment(e, err);
    *zeros = e->zeros;
    *extents = e->extents;
    e->zeros = e->extents = 0;
    e->stretch = STRETCH_NONE;
    e->last_is_new = false;
    e->image++;
    return s;
}

/* ---- results ---- */

size_t
gd_estimate_images(const gd_estimate *e)
{
    return e->image;
}

gd_status
gd_estimate_sum(gd_estimate *e, gd_estimated *out, gd_estimate_totals *totals,
                gd_error *err)
{
    gd_status s = end_window(e, err);
    for (size_t i = 0; i < e->place_count; i++) {
        const record *r = &e->places[i];
        if (r->key != 0 && r->image < e->image) {
            gd_estimated *sum = &out[r->image];
            sum->new_bytes += r->length_less_1 + 1u;
            sum->new_blocks++;
            sum->stored_bytes += r->stored;
            sum->stored_squares += (double)r->stored * r->stored;
        }
    }
    *totals = e->totals;
    totals->level = e->level;
    return s;
}
