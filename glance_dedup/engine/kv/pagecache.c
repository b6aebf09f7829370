/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pagecache.c - see pagecache.h.
 */
#include "engine/kv/pagecache.h"

#include <stdlib.h>

enum { AT_ONCE = 64 }; /* adjacent pages written by one call */

typedef struct frame {
    uint32_t page; /* 0: none */
    bool used;     /* since the hand passed */
    bool dirty;
} frame;

struct gd_pagecache {
    const gd_env *env;
    gd_pagecache_file file;
    gd_kv_stats *stats;
    uint32_t *frame_of; /* by page: the frame's number plus one, or 0 */
    frame *frames;
    uint32_t *order; /* scratch: frames to be written */
    uint8_t *memory;
    uint8_t *bytes;  /* in memory, page-aligned: of frame 0, 1, ... */
    uint32_t count;  /* of frames */
    uint32_t dirty;
    uint32_t hand;
    bool failed; /* a sync */
};

static uint8_t *
bytes_of(const gd_pagecache *cache, uint32_t at)
{
    return cache->bytes + (size_t)at * GD_DTB_PAGE;
}

static gd_status
allocate(gd_pagecache *cache, gd_error *err)
{
    const gd_env *env = cache->env;
    size_t size = (size_t)cache->count * GD_DTB_PAGE + GD_DTB_PAGE;
    cache->frame_of = gd_calloc(env, cache->file.pages + 1,
                                sizeof *cache->frame_of, err);
    cache->frames = gd_calloc(env, cache->count, sizeof *cache->frames, err);
    cache->order = gd_calloc(env, cache->count, sizeof *cache->order, err);
    cache->memory = gd_alloc(env, size, err);
    if (cache->frame_of == NULL || cache->frames == NULL ||
        cache->order == NULL || cache->memory == NULL) {
        return GD_NOMEM;
    }
    cache->bytes = cache->memory + GD_DTB_PAGE -
                   (uintptr_t)cache->memory % GD_DTB_PAGE;
    cache->stats->memory =
        size + (cache->file.pages + 1) * sizeof *cache->frame_of +
        cache->count * (sizeof *cache->frames + sizeof *cache->order);
    return GD_OK;
}

gd_status
gd_pagecache_open(const gd_env *env, const gd_pagecache_file *file,
                  uint64_t budget, gd_kv_stats *stats, gd_pagecache **out,
                  gd_error *err)
{
    gd_pagecache *cache = gd_calloc(env, 1, sizeof *cache, err);
    if (cache == NULL) {
        return GD_NOMEM;
    }
    /* More would never be used: all pages may be changed. */
    uint64_t most = (file->pages / 3 + 1) * 4;
    uint64_t count = budget / GD_DTB_PAGE;
    count = count < most ? count : most;
    count = count > GD_PAGECACHE_MIN ? count : GD_PAGECACHE_MIN;
    cache->env = env;
    cache->file = *file;
    cache->stats = stats;
    cache->count = (uint32_t)count;
    gd_status s = allocate(cache, err);
    if (s != GD_OK) {
        gd_pagecache_close(env, cache);
        return s;
    }
    *out = cache;
    return GD_OK;
}

void
gd_pagecache_close(const gd_env *env, gd_pagecache *cache)
{
    if (cache != NULL) {
        env->release(env, cache->frame_of);
        env->release(env, cache->frames);
        env->release(env, cache->order);
        env->release(env, cache->memory);
        env->release(env, cache);
    }
}

/* ---- writing ---- */

static int
by_page(const void *a, const void *b, void *arg)
{
    const gd_pagecache *cache = arg;
    uint32_t x = cache->frames[*(const uint32_t *)a].page;
    uint32_t y = cache->frames[*(const uint32_t *)b].page;
    return x < y ? -1 : x > y;
}

/* Writes the frames order[0] to order[count - 1], whose pages are adjacent.
 * They stay dirty if that fails, and are written again. */
static gd_status
write_run(gd_pagecache *cache, const uint32_t *order, int count, gd_error *err)
{
    struct iovec pieces[AT_ONCE];
    uint32_t first = cache->frames[order[0]].page;
    for (int i = 0; i < count; i++) {
        uint8_t *page = bytes_of(cache, order[i]);
        gd_dtbpage_seal(page, first + (uint32_t)i, cache->file.seed);
        pieces[i] = (struct iovec){page, GD_DTB_PAGE};
    }
    GD_TRY(gd_writev_full(cache->env, cache->file.fd, pieces, count,
                          (uint64_t)first * GD_DTB_PAGE,
                          cache->file.name, err));
    for (int i = 0; i < count; i++) {
        cache->frames[order[i]].dirty = false;
    }
    cache->dirty -= (uint32_t)count;
    cache->stats->writes++;
    cache->stats->bytes_written += (uint64_t)count * GD_DTB_PAGE;
    return GD_OK;
}

static gd_status
write_dirty(gd_pagecache *cache, gd_error *err)
{
    uint32_t *order = cache->order, count = 0;
    for (uint32_t i = 0; i < cache->count; i++) {
        if (cache->frames[i].dirty) {
            order[count++] = i;
        }
    }
    qsort_r(order, count, sizeof *order, by_page, cache);
    for (uint32_t i = 0, run; i < count; i += run) {
        uint32_t first = cache->frames[order[i]].page;
        run = 1;
        while (run < AT_ONCE && i + run < count &&
               cache->frames[order[i + run]].page == first + run) {
            run++;
        }
        GD_TRY(write_run(cache, order + i, (int)run, err));
    }
    return GD_OK;
}

static gd_status
require_sync(const gd_pagecache *cache, gd_error *err)
{
    return cache->failed
               ? gd_fail(err, GD_IO,
                         "%s was not synced, and may have lost changes; open "
                         "it again", cache->file.name)
               : GD_OK;
}

gd_status
gd_pagecache_sync(gd_pagecache *cache, gd_error *err)
{
    GD_TRY(require_sync(cache, err));
    GD_TRY(write_dirty(cache, err));
    int rc = cache->env->fdatasync(cache->env, cache->file.fd);
    cache->stats->syncs++;
    if (rc < 0) {
        cache->failed = true;
        return gd_fail_errno(err, -rc, "cannot fdatasync %s",
                             cache->file.name);
    }
    return GD_OK;
}

/* ---- reading ---- */

/* A frame whose page may leave.  At most three quarters are dirty, so after
 * one round that makes all pages unused there is one. */
static uint32_t
find_victim(gd_pagecache *cache)
{
    for (;;) {
        uint32_t at = cache->hand;
        frame *f = &cache->frames[at];
        cache->hand = at + 1 == cache->count ? 0 : at + 1;
        if (!f->used && !f->dirty) {
            return at;
        }
        f->used = false;
    }
}

/* A damaged page counts as empty.  One behind the end of the file is damaged,
 * too: somebody cut the file. */
static gd_status
read_page(gd_pagecache *cache, uint64_t number, uint8_t *page, gd_error *err)
{
    gd_status s = gd_read_full(cache->env, cache->file.fd, page, GD_DTB_PAGE,
                               number * GD_DTB_PAGE, cache->file.name, err);
    if (s != GD_OK && s != GD_CORRUPT) {
        return s;
    }
    cache->stats->reads++;
    cache->stats->bytes_read += GD_DTB_PAGE;
    if (s == GD_OK && gd_dtbpage_is_valid(page, number, cache->file.seed)) {
        return GD_OK;
    }
    cache->stats->damaged++;
    memset(page, 0, GD_DTB_PAGE);
    return GD_OK;
}

static gd_status
load(gd_pagecache *cache, uint64_t number, gd_error *err)
{
    uint32_t at = find_victim(cache);
    frame *f = &cache->frames[at];
    cache->frame_of[f->page] = 0;
    f->page = 0;
    GD_TRY(read_page(cache, number, bytes_of(cache, at), err));
    f->page = (uint32_t)number;
    cache->frame_of[number] = at + 1;
    return GD_OK;
}

/* Called before a page becomes dirty. */
static gd_status
keep_clean_ones(gd_pagecache *cache, gd_error *err)
{
    GD_TRY(require_sync(cache, err));
    if (cache->dirty + 1 > cache->count / 4 * 3) {
        GD_TRY(write_dirty(cache, err));
    }
    return GD_OK;
}

gd_status
gd_pagecache_get(gd_pagecache *cache, uint64_t number, bool change,
                 uint8_t **page, gd_error *err)
{
    gd_status s = GD_OK;
    if (cache->frame_of[number] != 0) {
        cache->stats->cache_hits++;
    } else {
        s = load(cache, number, err);
    }
    if (s != GD_OK) {
        return s;
    }
    uint32_t at = cache->frame_of[number] - 1;
    frame *f = &cache->frames[at];
    f->used = true;
    if (change && !f->dirty) {
        s = keep_clean_ones(cache, err);
        if (s == GD_OK) {
            f->dirty = true;
            cache->dirty++;
        }
    }
    *page = bytes_of(cache, at);
    return s;
}
