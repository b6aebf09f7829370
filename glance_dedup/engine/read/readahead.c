/* SPDX-License-Identifier: Apache-2.0 */
/*
 * readahead.c - see readahead.h.
 */
#include "engine/read/readahead.h"

#include <stdlib.h>
#include <string.h>

#include "engine/read/plan.h"
#include "engine/repo/metacache.h"
#include "engine/repo/segcache.h"

enum {
    SPAN_MIN = 4 << 20, /* bytes of blocks in one step, sequential: */
    SPAN_MAX = 32 << 20,
    /* The limit if the blocks last asked for lay scattered.  A longer span has
     * more neighbours among its blocks. */
    SPAN_FAR = 128 << 20,
    SCATTERED = 2 << 20, /* fewer bytes per request are scattered: two seeks
                          * take as long */
    PIECES = 4096,         /* most extents looked at for one step */
    STRETCHES = 8192,      /* most segments sorted at once */
    /* Bytes that are read over rather than seeked over, if as many are wanted
     * around them.  GD_READ_GAP bytes always are. */
    GAP = 512 << 10,
    SMALL = 64 << 10,      /* a range that may be read without asking */
    MANY_BLOCKS = 32,      /* from this many on, not each is looked at */
    RECIPE_ONCE = 1 << 20, /* bytes of the recipe */
    /* The kernel may drop the part of a request that exceeds what the device
     * takes at once. */
    ASK_ONCE = 512 << 10,
};

/* Parts of a group's store that were requested. */
enum { SOME_ENTRIES = 1, WHOLE_STORE = 2 };

/* The wanted part of an extent. */
typedef struct piece {
    uint32_t group, slot, blocks;
    uint32_t place; /* among the pieces, in the order of the image */
    bool is_cold;   /* its group is; known when that was looked at */
} piece;

/* A byte range of a group's file. */
typedef struct stretch {
    uint64_t start, end;
} stretch;

/* One step ahead. */
typedef struct step {
    gd_readahead *ahead;
    bool reading_on;
    uint64_t to, until; /* where in the image it ended, and must end */
    size_t count;
    size_t stretch_count;
    uint64_t asks, bytes; /* requests for segments, and their bytes */
    piece pieces[PIECES];
    stretch stretches[STRETCHES];
    gd_entry entries[GD_EXTENT_BLOCKS];
} step;

void
gd_readahead_open(gd_readahead *ahead, gd_repo *repo, const gd_recipe *recipe)
{
    *ahead = (gd_readahead){.repo = repo, .recipe = recipe};
    pthread_mutex_init(&ahead->mutex, NULL);
    gd_groupmap_init(&ahead->stores, repo->env);
}

void
gd_readahead_close(gd_readahead *ahead)
{
    gd_groupmap_free(&ahead->stores);
    pthread_mutex_destroy(&ahead->mutex);
}

static void
ask(gd_repo *repo, int fd, uint64_t inode, stretch bytes)
{
    const gd_env *env = repo->env;
    gd_seeks_note(&repo->counters.image, inode, bytes.start,
                  bytes.end - bytes.start);
    while (bytes.start < bytes.end) {
        uint64_t here = bytes.end - bytes.start;
        here = here < ASK_ONCE ? here : ASK_ONCE;
        env->start_readahead(env, fd, bytes.start, here);
        bytes.start += here;
    }
}

static void
ask_data(gd_repo *repo, const gd_group *group, stretch bytes)
{
    if (group->is_cold) {
        gd_group_expect_data(group, bytes.start, bytes.end - bytes.start);
    } else {
        ask(repo, group->fd, group->inode, bytes);
    }
}

/* ---- the recipe ---- */

/* Asks for more than one page, so that not every page costs a seek. */
static void
ask_recipe(gd_readahead *ahead, uint64_t page)
{
    const gd_recipe *recipe = ahead->recipe;
    uint64_t at = page * GD_RECIPE_PAGE;
    uint64_t size =
        (1 + gd_recipe_pages(recipe->header.extents)) * GD_RECIPE_PAGE;
    if (at < ahead->recipe_start || at >= ahead->recipe_end) {
        uint64_t end = at + RECIPE_ONCE < size ? at + RECIPE_ONCE : size;
        ask(ahead->repo, recipe->fd, recipe->inode, (stretch){at, end});
        ahead->recipe_start = at;
        ahead->recipe_end = end;
    }
}

/* The blocks of [skip, skip + length), if all blocks of the extent have the
 * same length, except the last, which may be shorter.  Otherwise some blocks
 * are asked for in vain, and some later. */
static piece
part_of(const gd_extent *extent, uint64_t skip, uint64_t length)
{
    uint64_t from = skip * extent->blocks / extent->length;
    uint64_t to = (skip + length - 1) * extent->blocks / extent->length;
    from = from < to ? from : to; /* wrong lengths may overflow */
    return (piece){.group = extent->group,
                   .slot = extent->slot + (uint32_t)from,
                   .blocks = (uint32_t)(to - from) + 1};
}

/* Notes the extents from offset on, up to `most` bytes of blocks. */
static void
list_pieces(step *step, uint64_t offset, uint64_t most)
{
    gd_recipe_page page;
    uint32_t at;
    gd_readahead *ahead = step->ahead;
    const gd_recipe *recipe = ahead->recipe;
    step->to = offset;
    if (ahead->recipe_end == 0) {
        ask_recipe(ahead, 0);
    }
    gd_status s = gd_recipe_seek(recipe, offset, &page, &at, NULL);
    while (s == GD_OK && step->to < step->until && most > 0 &&
           step->count < PIECES) {
        const gd_extent *extent = &page.extents[at++];
        uint64_t skip = step->to - extent->offset;
        uint64_t here = extent->length - skip;
        if (extent->kind == GD_EXTENT_BLOCKS_KIND) {
            here = here < most ? here : most;
            most -= here;
            step->pieces[step->count] = part_of(extent, skip, here);
            step->pieces[step->count].place = (uint32_t)step->count;
            step->count++;
        }
        step->to += here;
        if (at == page.count && step->to < step->until) {
            ask_recipe(ahead, page.number + 1);
            s = gd_recipe_next_page(recipe, step->to, &page, NULL);
            at = 0;
        }
    }
}

static int
by_address(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    if (x->group != y->group) {
        return x->group < y->group ? -1 : 1;
    }
    return x->slot < y->slot ? -1 : x->slot > y->slot;
}

static int
by_place(const void *a, const void *b)
{
    const piece *x = a, *y = b;
    return x->place < y->place ? -1 : x->place > y->place;
}

/* ---- one group ---- */

static int
by_start(const void *a, const void *b)
{
    const stretch *x = a, *y = b;
    return x->start < y->start ? -1 : x->start > y->start;
}

/* Asks for the stretches noted, neighbours together.  Larger gaps are read over
 * as long as wasted bytes do not exceed wanted ones.  A disk with a head gains
 * by this, and one without loses little. */
static void
ask_stretches(step *step, const gd_group *group)
{
    const stretch *all = step->stretches;
    size_t count = step->stretch_count;
    step->stretch_count = 0;
    if (count > 0) {
        qsort(step->stretches, count, sizeof *all, by_start);
    }
    for (size_t i = 0; i < count;) {
        stretch joined = all[i++];
        uint64_t wanted = joined.end - joined.start, vain = 0;
        for (; i < count; i++) {
            uint64_t from = all[i].start, to = all[i].end;
            uint64_t gap = from > joined.end ? from - joined.end : 0;
            uint64_t more = to > joined.end ? to - joined.end - gap : 0;
            if (gap > GAP ||
                (gap > GD_READ_GAP && vain + gap > wanted + more)) {
                break;
            }
            vain += gap;
            wanted += more;
            joined.end += gap + more;
        }
        ask_data(step->ahead->repo, group, joined);
        step->asks++;
        step->bytes += joined.end - joined.start;
    }
}

static void
note_stretch(step *step, const gd_group *group, uint64_t start,
             const gd_entry *last)
{
    if (step->stretch_count == STRETCHES) {
        ask_stretches(step, group);
    }
    step->stretches[step->stretch_count++] =
        (stretch){start, gd_group_segment_end(last)};
}

/* Notes the segments of the wanted blocks, except those in the cache. */
static void
note_segments(step *step, const gd_group *group, const piece *piece)
{
    gd_segcache *cache = step->ahead->repo->segcache;
    bool cached = gd_segcache_enabled(cache);
    uint32_t last = 0;
    if (gd_group_read_entries(group, piece->slot, piece->blocks,
                              step->entries, NULL) != GD_OK) {
        return;
    }
    for (uint32_t i = 0; i < piece->blocks; i++) {
        const gd_entry *entry = &step->entries[i];
        if (entry->state == GD_ENTRY_LIVE && entry->segment != last) {
            last = entry->segment;
            if (!cached || !gd_segcache_has(cache, group, last)) {
                note_stretch(step, group, last, entry);
            }
        }
    }
}

/* Consecutive blocks were mostly stored in this order: then the first and the
 * last give the places of all.  Returns false if they do not. */
static bool
note_ends(step *step, const gd_group *group, const piece *piece)
{
    const gd_repo *repo = step->ahead->repo;
    gd_entry first, last;
    if (piece->blocks < MANY_BLOCKS || gd_segcache_enabled(repo->segcache) ||
        gd_group_read_entries(group, piece->slot, 1, &first, NULL) != GD_OK ||
        gd_group_read_entries(group, piece->slot + piece->blocks - 1, 1, &last,
                              NULL) != GD_OK ||
        first.state != GD_ENTRY_LIVE || last.state != GD_ENTRY_LIVE ||
        first.segment > last.segment) {
        return false;
    }
    uint64_t most = (uint64_t)piece->blocks * repo->chunker.average +
                    2 * (uint64_t)repo->params.segment_size;
    if (last.segment - first.segment > most) {
        return false;
    }
    note_stretch(step, group, first.segment, &last);
    return true;
}

static stretch
entries_of(const piece *piece)
{
    return (stretch){gd_entry_offset(piece->slot),
                     gd_entry_offset(piece->slot + piece->blocks - 1) +
                         GD_ENTRY_SIZE};
}

/* Asks for the whole store if its entries would take several seeks, now or
 * later.  Reading a store takes as long as two seeks. */
static void
ask_entries(step *step, const gd_group *group, const piece *pieces,
            size_t count)
{
    gd_readahead *ahead = step->ahead;
    stretch some = entries_of(pieces);
    bool together = true;
    for (size_t i = 1; i < count; i++) {
        stretch next = entries_of(&pieces[i]);
        together = together && next.start <= some.end + GD_READ_GAP;
        some.end = next.end > some.end ? next.end : some.end;
    }
    uint32_t *asked = gd_groupmap_at(&ahead->stores, group->number, NULL);
    if (asked == NULL || *asked == WHOLE_STORE) {
        return;
    }
    if (*asked == SOME_ENTRIES || step->reading_on || !together) {
        *asked = WHOLE_STORE;
        some = (stretch){GD_STORE_START,
                         gd_entry_offset(group->bounds.slots)};
    } else {
        *asked = SOME_ENTRIES;
    }
    ask(ahead->repo, group->fd, group->inode, some);
}

static void
ask_segments(step *step, const gd_group *group, const piece *pieces,
             size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!note_ends(step, group, &pieces[i])) {
            note_segments(step, group, &pieces[i]);
        }
    }
    ask_stretches(step, group);
}

/* The pieces are all of one group.  cold: the requested bytes are segments in
 * objects; otherwise they are on the disk. */
static void
ask_group(step *step, piece *pieces, size_t count, bool cold)
{
    gd_group *group;
    const gd_recipe *recipe = step->ahead->recipe;
    gd_fpcache *cache = step->ahead->repo->cache;
    if (gd_fpcache_group(cache, pieces->group, false, &group, NULL) != GD_OK) {
        return;
    }
    if (gd_recipe_require_scope(recipe, &group->scope, group->name, NULL) !=
        GD_OK) {
        gd_fpcache_return_group(cache, group);
        return;
    }
    if (!cold) {
        ask_entries(step, group, pieces, count);
    }
    if (group->is_cold == cold) {
        ask_segments(step, group, pieces, count);
    }
    for (size_t i = 0; i < count; i++) {
        pieces[i].is_cold = group->is_cold;
    }
    gd_fpcache_return_group(cache, group);
}

static void
ask_groups(step *step, bool cold)
{
    for (size_t i = 0; i < step->count;) {
        size_t n = 1;
        while (i + n < step->count &&
               step->pieces[i + n].group == step->pieces[i].group) {
            n++;
        }
        ask_group(step, &step->pieces[i], n, cold);
        i += n;
    }
}

/* Leaves only the pieces in cold groups.  They come one after the other, so
 * those that are read first are to come first. */
static void
choose_cold(step *step)
{
    size_t left = 0;
    for (size_t i = 0; i < step->count; i++) {
        if (step->pieces[i].is_cold) {
            step->pieces[left++] = step->pieces[i];
        }
    }
    step->count = left;
    if (left > 0) {
        qsort(step->pieces, left, sizeof *step->pieces, by_place);
    }
}

/* ---- how far ---- */

/* Requests the bytes behind offset; returns their end. */
static uint64_t
go_ahead(gd_readahead *ahead, uint64_t offset, uint64_t until, uint64_t most,
         bool reading_on)
{
    const gd_env *env = ahead->repo->env;
    step *step = gd_alloc(env, sizeof *step, NULL);
    if (step == NULL) {
        return offset;
    }
    step->ahead = ahead;
    step->until = until;
    step->reading_on = reading_on;
    step->count = step->stretch_count = 0;
    step->asks = step->bytes = 0;
    list_pieces(step, offset, most);
    qsort(step->pieces, step->count, sizeof *step->pieces, by_address);
    ask_groups(step, false);
    choose_cold(step);
    ask_groups(step, true);
    uint64_t to = step->to;
    ahead->scattered = step->bytes < step->asks * SCATTERED;
    env->release(env, step);
    return to;
}

/* Returns how much to request before this range is read.  0: nothing, since it
 * was requested before, or another thread is requesting it. */
static uint64_t
choose_span(gd_readahead *ahead, uint64_t offset, uint64_t length)
{
    bool on = ahead->end > 0 && offset >= ahead->start && offset <= ahead->end;
    bool enough = on && (ahead->end == ahead->recipe->header.disk.plain_size ||
                         offset + length + ahead->span / 2 <= ahead->end);
    if (ahead->busy || enough) {
        return 0;
    }
    if (!on) {
        ahead->start = ahead->end = offset;
        ahead->span = 0;
        return length;
    }
    uint64_t span = 2 * ahead->span;
    uint64_t most = ahead->scattered ? SPAN_FAR : SPAN_MAX;
    span = span < SPAN_MIN ? SPAN_MIN : span;
    ahead->span = span < most ? span : most;
    return ahead->span;
}

/* Returns whether a range lies in one extent whose entries are cached.  Then it
 * takes no more than to read its segments. */
static bool
is_known(const gd_readahead *ahead, uint64_t offset, uint64_t length)
{
    gd_extent_cursor cursor;
    gd_extent_part part;
    gd_group *group;
    gd_repo *repo = ahead->repo;
    gd_extent_cursor_open(&cursor, ahead->recipe, offset, length);
    if (gd_extent_cursor_next(&cursor, &part, NULL) != GD_OK ||
        part.length < length) {
        return false;
    }
    if (part.extent->kind == GD_EXTENT_ZEROS) {
        return true;
    }
    if (gd_fpcache_group(repo->cache, part.extent->group, false, &group,
                         NULL) != GD_OK) {
        return false;
    }
    bool known = gd_metacache_has(repo->metacache, group, part.extent);
    gd_fpcache_return_group(repo->cache, group);
    return known;
}

void
gd_readahead_read(gd_readahead *ahead, uint64_t offset, uint64_t length,
                  bool *asked, bool *sequential)
{
    bool known = false;
    pthread_mutex_lock(&ahead->mutex);
    uint64_t most = choose_span(ahead, offset, length);
    if (most > 0) {
        uint64_t from = ahead->end, to = offset + length;
        bool reading_on = ahead->span > 0;
        uint64_t until = reading_on ? ahead->recipe->header.disk.plain_size : to;
        ahead->busy = true;
        pthread_mutex_unlock(&ahead->mutex);
        known = !reading_on && length <= SMALL &&
                is_known(ahead, offset, length);
        if (!known) {
            to = go_ahead(ahead, from, until, most, reading_on);
        }
        pthread_mutex_lock(&ahead->mutex);
        ahead->end = to;
        ahead->busy = false;
    }
    *asked = !known && offset >= ahead->start &&
             offset + length <= ahead->end;
    *sequential = ahead->span > 0 && offset > ahead->start &&
                  offset <= ahead->end;
    pthread_mutex_unlock(&ahead->mutex);
}
