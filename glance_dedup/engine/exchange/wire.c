/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.c - see wire.h.
 */
#include "engine/exchange/wire.h"

#include <string.h>

#include "engine/base/array.h"
#include "engine/base/coding.h"
#include "engine/read/fetch.h"

enum {
    EXTENT_RECORD = 24,
    BLOCK_RECORD = GD_FINGERPRINT_SIZE + 4,
    MAX_PLACES = 65535, /* in a frame, and in all frames of a call */
};

/* ---- descriptions ---- */

static uint64_t
description_length(const gd_recipe_page *page)
{
    uint64_t length = 0;
    for (uint32_t i = 0; i < page->count; i++) {
        length += EXTENT_RECORD +
                  (uint64_t)page->extents[i].blocks * BLOCK_RECORD;
    }
    return length;
}

static uint8_t *
put_extent(uint8_t *at, const gd_extent *extent, const gd_entry *entries)
{
    gd_put64(at, extent->offset);
    gd_put64(at + 8, extent->length);
    gd_put32(at + 16, extent->blocks);
    gd_put32(at + 20, 0);
    at += EXTENT_RECORD;
    for (uint32_t i = 0; i < extent->blocks; i++) {
        memcpy(at, entries[i].fingerprint.bytes, GD_FINGERPRINT_SIZE);
        gd_put32(at + GD_FINGERPRINT_SIZE, entries[i].plain_length);
        at += BLOCK_RECORD;
    }
    return at;
}

static gd_status
describe_page(gd_plan *plan, const gd_recipe_page *page, uint8_t *out,
              gd_error *err)
{
    gd_group *group;
    gd_status s = GD_OK;
    for (uint32_t i = 0; s == GD_OK && i < page->count; i++) {
        const gd_extent *extent = &page->extents[i];
        if (extent->kind == GD_EXTENT_BLOCKS_KIND) {
            s = gd_plan_extent(plan, extent, &group, err);
        }
        if (s == GD_OK) {
            out = put_extent(out, extent, plan->entries);
        }
    }
    gd_plan_clear(plan);
    return s;
}

gd_status
gd_wire_describe(gd_image *image, uint64_t number, uint8_t **out,
                 size_t *length, gd_error *err)
{
    gd_plan plan;
    gd_recipe_page page;
    const gd_env *env = image->repo->env;
    *out = NULL;
    GD_TRY(gd_image_extents(image, number, &page, err));
    *length = (size_t)description_length(&page);
    *out = gd_calloc(env, *length, 1, err);
    if (*out == NULL) {
        return GD_NOMEM;
    }
    gd_plan_open(&plan, image->repo, &image->recipe);
    gd_status s = describe_page(&plan, &page, *out, err);
    if (s == GD_CORRUPT) {
        plan.fresh = true; /* a cached file may have been replaced */
        s = describe_page(&plan, &page, *out, err);
    }
    gd_plan_close(&plan);
    if (s != GD_OK) {
        env->release(env, *out);
        *out = NULL;
    }
    return s;
}

/* ---- frames ---- */

/* The frames made so far, and the plain frame being filled. */
typedef struct framing {
    gd_frames *frames;
    uint8_t *plain; /* GD_FRAME_PLAIN bytes */
    uint32_t length;
    uint8_t *places; /* in the form in which they go out */
    uint32_t place_count;
    const gd_group *last_group; /* Of the last block added: */
    uint32_t last_slot, last_offset;
} framing;

void
gd_frames_free(gd_frames *frames)
{
    if (frames->env != NULL) {
        frames->env->release(frames->env, frames->bytes);
        frames->env->release(frames->env, frames->ends);
    }
    *frames = (gd_frames){0};
}

static gd_status
put_frame(gd_frames *frames, gd_codec codec, const uint8_t *places,
          uint32_t place_count, uint32_t plain_length, const uint8_t *stored,
          uint32_t stored_length, gd_error *err)
{
    const gd_env *env = frames->env;
    size_t places_length = (size_t)place_count * GD_FRAME_PLACE;
    size_t length = GD_FRAME_HEADER + places_length + stored_length;
    uint8_t *bytes = gd_array_reserve(env, frames->bytes, &frames->room,
                                      frames->length + length, 1, err);
    if (bytes == NULL) {
        return GD_NOMEM;
    }
    frames->bytes = bytes;
    size_t *ends = gd_array_reserve(env, frames->ends, &frames->end_room,
                                    frames->count + 1, sizeof *ends, err);
    if (ends == NULL) {
        return GD_NOMEM;
    }
    frames->ends = ends;
    uint8_t *at = frames->bytes + frames->length;
    memcpy(at, "GDFR", 4);
    at[4] = (uint8_t)codec;
    at[5] = 0;
    gd_put16(at + 6, (uint16_t)place_count);
    gd_put32(at + 8, plain_length);
    gd_put32(at + 12, stored_length);
    memcpy(at + GD_FRAME_HEADER, places, places_length);
    memcpy(at + GD_FRAME_HEADER + places_length, stored, stored_length);
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, at, 16);
    XXH3_64bits_update(&state, at + GD_FRAME_HEADER,
                       places_length + stored_length);
    gd_put64(at + 16, XXH3_64bits_digest(&state));
    frames->length += length;
    frames->ends[frames->count++] = frames->length;
    return GD_OK;
}

static void
add_place(framing *f, const gd_want *want, uint32_t plain_offset)
{
    uint8_t *at = f->places + (size_t)f->place_count++ * GD_FRAME_PLACE;
    gd_put64(at, want->offset);
    gd_put32(at + 8, plain_offset);
    gd_put32(at + 12, want->length);
}

/* Ends the plain frame being filled. */
static gd_status
end_plain(framing *f, gd_error *err)
{
    gd_status s = GD_OK;
    if (f->place_count > 0) {
        s = put_frame(f->frames, GD_CODEC_NONE, f->places, f->place_count,
                      f->length, f->plain, f->length, err);
    }
    f->length = 0;
    f->place_count = 0;
    f->last_group = NULL;
    return s;
}

static void
start_frames(void *arg)
{
    framing *f = arg;
    f->frames->length = 0;
    f->frames->count = 0;
    f->length = 0;
    f->place_count = 0;
    f->last_group = NULL;
}

/* Adds a block to the plain frame once, even if it has several places. */
static gd_status
frame_block(void *arg, const gd_want *want, const uint8_t *block,
            gd_error *err)
{
    framing *f = arg;
    gd_status s = GD_OK;
    if (f->last_group != want->group || f->last_slot != want->slot) {
        if (want->length > GD_FRAME_PLAIN - f->length) {
            s = end_plain(f, err);
        }
        if (s != GD_OK) {
            return s;
        }
        memcpy(f->plain + f->length, block, want->length);
        f->last_group = want->group;
        f->last_slot = want->slot;
        f->last_offset = f->length;
        f->length += want->length;
    }
    add_place(f, want, f->last_offset);
    return GD_OK;
}

/* Returns whether the wants, sorted by slot, cover all bytes of the segment.
 * The bytes count, not the live blocks: freed bytes are still there, and may be
 * of an image that the client was never allowed to read. */
static bool
covers_segment(const gd_want *wants, size_t count,
               const gd_segment_header *header)
{
    uint32_t covered = 0;
    for (size_t i = 0; i < count; i++) {
        const gd_entry *entry = &wants[i].entry;
        if (i > 0 && wants[i].slot == wants[i - 1].slot) {
            continue; /* the block has several places */
        }
        if (entry->plain_offset != covered) {
            return false;
        }
        covered += entry->plain_length;
    }
    return covered == header->plain_length;
}

static gd_status
frame_segment(void *arg, const gd_want *wants, size_t count,
              const gd_segment_header *header, const uint8_t *stored,
              const uint8_t *plain, gd_error *err)
{
    framing *f = arg;
    gd_status s = GD_OK;
    if (!covers_segment(wants, count, header)) {
        for (size_t i = 0; s == GD_OK && i < count; i++) {
            s = frame_block(f, &wants[i], plain + wants[i].entry.plain_offset,
                            err);
        }
        return s;
    }
    s = end_plain(f, err);
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        add_place(f, &wants[i], wants[i].entry.plain_offset);
    }
    if (s == GD_OK) {
        s = put_frame(f->frames, header->codec, f->places, f->place_count,
                      header->plain_length, stored,
                      header->stored_length - gd_segment_list_size(header),
                      err);
    }
    f->place_count = 0;
    return s;
}

/* *end is the end of the last one. */
static gd_status
require_ranges(const gd_image *image, const gd_range *ranges, size_t count,
               uint64_t *end, gd_error *err)
{
    uint64_t size = image->recipe.header.disk.plain_size;
    *end = 0;
    for (size_t i = 0; i < count; i++) {
        if (ranges[i].offset < *end || ranges[i].offset > size ||
            ranges[i].length > size - ranges[i].offset) {
            return gd_fail(err, GD_INVALID,
                           "%s: the range of %llu bytes at offset %llu is not "
                           "behind the one before it and within the image",
                           image->recipe.name,
                           (unsigned long long)ranges[i].length,
                           (unsigned long long)ranges[i].offset);
        }
        *end = ranges[i].offset + ranges[i].length;
    }
    return GD_OK;
}

static gd_status
fetch_frames(gd_fetch *fetch, framing *f, const gd_range *ranges,
             size_t count, gd_error *err)
{
    const gd_env *env = f->frames->env;
    f->plain = gd_calloc(env, GD_FRAME_PLAIN, 1, err);
    f->places = gd_calloc(env, MAX_PLACES, GD_FRAME_PLACE, err);
    if (f->plain == NULL || f->places == NULL) {
        return GD_NOMEM;
    }
    fetch->plan.whole = true;
    fetch->plan.most = GD_FRAMES_PLAIN;
    fetch->plan.most_wants = MAX_PLACES;
    GD_TRY(gd_fetch_ranges(fetch, ranges, count, err));
    return end_plain(f, err);
}

gd_status
gd_wire_frames(gd_image *image, const gd_range *ranges, size_t count,
               gd_frames *frames, uint64_t *end, gd_error *err)
{
    gd_fetch fetch;
    const gd_env *env = image->repo->env;
    framing f = {.frames = frames};
    const gd_taker taker = {.arg = &f,
                            .start = start_frames,
                            .segment = frame_segment,
                            .block = frame_block};
    *frames = (gd_frames){.env = env};
    GD_TRY(gd_repo_require_owner(image->repo, err));
    GD_TRY(require_ranges(image, ranges, count, end, err));
    gd_fetch_open(&fetch, image->repo, &image->recipe, &taker);
    gd_status s = fetch_frames(&fetch, &f, ranges, count, err);
    if (s == GD_OK && fetch.plan.full) {
        *end = fetch.plan.left;
    }
    gd_fetch_close(&fetch);
    env->release(env, f.plain);
    env->release(env, f.places);
    return s;
}
