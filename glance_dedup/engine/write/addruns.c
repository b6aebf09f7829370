/* SPDX-License-Identifier: Apache-2.0 */
/*
 * addruns.c - see addruns.h.
 */
#include "engine/write/addruns.h"

#include <string.h>

enum { BYTES_AT_ONCE = 1 << 20 }; /* at least one block */

typedef struct adding {
    gd_ingest *intake;
    gd_image *source;
    gd_plan plan; /* for the entries of split extents */
    uint8_t *buffer; /* made at first use */
    size_t room; /* in it */
    uint64_t *stored;
} adding;

/* ---- by bytes ---- */

/* Blocks in a row, to be stored by their bytes. */
typedef struct pieces {
    uint64_t offset; /* in the source */
    size_t bytes;
    uint32_t lengths[GD_EXTENT_BLOCKS];
    size_t count;
    bool nodedup; /* the mark of all of them */
} pieces;

/* I14: the blocks keep their mark, and get no other. */
static gd_status
store_pieces(adding *a, pieces *p, gd_error *err)
{
    gd_address addresses[GD_EXTENT_BLOCKS];
    if (p->count == 0) {
        return GD_OK;
    }
    gd_status s = gd_image_read_plain(a->source, a->buffer,
                                      (gd_range){p->offset, p->bytes}, err);
    if (s == GD_OK) {
        gd_dedup own = a->intake->dedup;
        gd_ingest_set_dedup(a->intake,
                            p->nodedup ? GD_DEDUP_OFF : GD_DEDUP_ALL);
        s = gd_ingest_take_blocks(a->intake, a->buffer, p->lengths, NULL,
                                  p->count, addresses, err);
        gd_ingest_set_dedup(a->intake, own);
    }
    if (s == GD_OK) {
        *a->stored += p->bytes;
    }
    p->count = 0;
    p->bytes = 0;
    return s;
}

static gd_status
make_buffer(adding *a, gd_error *err)
{
    size_t most = a->intake->chunker.max_length;
    if (a->buffer == NULL) {
        a->room = most > BYTES_AT_ONCE ? most : BYTES_AT_ONCE;
        a->buffer = gd_alloc(a->intake->repo->env, a->room, err);
    }
    return a->buffer == NULL ? GD_NOMEM : GD_OK;
}

/* Takes a block, or a part of one. */
static gd_status
take_piece(adding *a, pieces *p, uint64_t offset, uint32_t length,
           bool nodedup, gd_error *err)
{
    gd_status s = make_buffer(a, err);
    if (s == GD_OK &&
        (p->bytes + length > a->room || p->nodedup != nodedup)) {
        s = store_pieces(a, p, err);
    }
    if (p->count == 0) {
        p->offset = offset;
        p->nodedup = nodedup;
    }
    p->lengths[p->count++] = length;
    p->bytes += length;
    return s;
}

/* ---- extents ---- */

/* Returns whether the extent's blocks may be named in the recipe, and stay
 * (I6). */
static bool
may_share(adding *a, const gd_extent *extent)
{
    const gd_recipe_header *header = gd_image_header(a->source);
    return gd_lookup_share(a->intake->lookup, &header->scope, extent->group);
}

static void
count_shared(adding *a, uint32_t blocks)
{
    gd_counters *counters = &a->intake->repo->counters;
    atomic_fetch_add(&counters->blocks, blocks);
    atomic_fetch_add(&counters->hits, blocks);
}

static gd_status
share_block(adding *a, gd_address address, const gd_entry *entry, gd_error *err)
{
    count_shared(a, 1);
    return gd_recipe_add_block(a->intake->recipe, address, &entry->fingerprint,
                               entry->plain_length, err);
}

/* Reads the entries of an extent; again, if another host may have changed them
 * since they came into the page cache (N13.3). */
static gd_status
read_entries(adding *a, const gd_extent *extent, gd_error *err)
{
    gd_group *group;
    gd_status s = gd_plan_extent(&a->plan, extent, &group, err);
    if (s == GD_CORRUPT || s == GD_IO) {
        gd_plan_clear(&a->plan);
        a->plan.fresh = true;
        s = gd_plan_extent(&a->plan, extent, &group, err);
        a->plan.fresh = false;
    }
    return s;
}

/* Adds the blocks of an extent that lie in the range, or what of them does. */
static gd_status
add_blocks(adding *a, const gd_extent *extent, gd_range range, bool share,
           gd_error *err)
{
    pieces p = {.count = 0};
    uint64_t end = range.offset + range.length;
    uint64_t at = extent->offset; /* of the block, in the source */
    gd_status s = read_entries(a, extent, err);
    for (uint32_t i = 0; s == GD_OK && i < extent->blocks && at < end; i++) {
        const gd_entry *entry = &a->plan.entries[i];
        uint64_t from = at > range.offset ? at : range.offset;
        at += entry->plain_length;
        uint64_t to = at < end ? at : end;
        if (to <= from) {
            continue; /* it lies before the range */
        }
        if (!share || to - from < entry->plain_length) {
            s = take_piece(a, &p, from, (uint32_t)(to - from),
                           entry->nodedup, err);
            continue;
        }
        s = store_pieces(a, &p, err);
        if (s == GD_OK) {
            s = share_block(a, (gd_address){extent->group, extent->slot + i},
                            entry, err);
        }
    }
    if (s == GD_OK) {
        s = store_pieces(a, &p, err);
    }
    gd_plan_clear(&a->plan);
    return s;
}

/* REQUIRES: the range lies within the extent. */
static gd_status
add_extent(adding *a, const gd_extent *extent, gd_range range, gd_error *err)
{
    gd_recipe_writer *recipe = a->intake->recipe;
    if (extent->kind == GD_EXTENT_ZEROS) {
        return gd_recipe_add_zeros(recipe, range.length, err);
    }
    bool share = may_share(a, extent);
    if (share && range.length == extent->length) {
        count_shared(a, extent->blocks);
        return gd_recipe_add_extent(recipe, extent, err);
    }
    return add_blocks(a, extent, range, share, err);
}

static gd_status
add_range(adding *a, gd_range range, gd_error *err)
{
    gd_extent_cursor cursor;
    gd_extent_cursor_open(&cursor, &a->source->recipe, range.offset,
                          range.length);
    cursor.fresh = true; /* only reads use what they keep */
    while (cursor.offset < cursor.end) {
        gd_extent_part part;
        range.offset = cursor.offset;
        GD_TRY(gd_extent_cursor_next(&cursor, &part, err));
        range.length = part.length;
        GD_TRY(add_extent(a, part.extent, range, err));
    }
    return GD_OK;
}

gd_status
gd_add_runs(gd_ingest *intake, gd_image *source, gd_range range,
            uint64_t *stored, gd_error *err)
{
    const gd_env *env = intake->repo->env;
    adding a = {.intake = intake, .source = source, .stored = stored};
    gd_plan_open(&a.plan, intake->repo, &source->recipe);
    gd_status s = add_range(&a, range, err);
    gd_plan_close(&a.plan);
    env->release(env, a.buffer);
    return s;
}
