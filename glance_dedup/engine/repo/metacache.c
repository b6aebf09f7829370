/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metacache.c - see metacache.h.
 */
#include "engine/repo/metacache.h"

#include <string.h>

#include "engine/base/coding.h"

/* The last word of a key: what it is the key of. */
enum { EXTENT = 1, PAGE = 2 };

struct gd_metacache {
    gd_page_cache pages; /* first: a gd_page_cache * is a gd_metacache * */
    gd_lru lru;
};

/* A kept page of a recipe. */
typedef struct cached_page {
    gd_lru_item item;
    uint32_t count;
    gd_extent extents[];
} cached_page;

/* ---- extents ---- */

static gd_lru_key
key_of(const gd_group *group, const gd_extent *extent)
{
    return (gd_lru_key){{group->inode, group->bounds.seed, extent->digest,
                         (uint64_t)extent->group << 32 | extent->slot,
                         (uint64_t)extent->blocks << 32 | EXTENT}};
}

gd_cached_extent *
gd_metacache_get(gd_metacache *cache, const gd_group *group,
                 const gd_extent *extent)
{
    gd_lru_key key = key_of(group, extent);
    gd_cached_extent *found = gd_lru_get(&cache->lru, &key);
    /* The recipe's length was verified with the one that is kept. */
    if (found != NULL && found->length != extent->length) {
        gd_lru_return(&cache->lru, found);
        found = NULL;
    }
    return found;
}

bool
gd_metacache_has(gd_metacache *cache, const gd_group *group,
                 const gd_extent *extent)
{
    gd_lru_key key = key_of(group, extent);
    return gd_lru_has(&cache->lru, &key);
}

void
gd_metacache_return(gd_metacache *cache, gd_cached_extent *extent)
{
    gd_lru_return(&cache->lru, extent);
}

static bool
are_live(const gd_entry *entries, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (entries[i].state != GD_ENTRY_LIVE) {
            return false;
        }
    }
    return true;
}

static gd_cached_extent *
make_extent(const gd_env *env, const gd_extent *of, const gd_entry *entries)
{
    uint32_t end = 0;
    gd_cached_extent *extent = gd_alloc(
        env, sizeof *extent + of->blocks * sizeof extent->blocks[0], NULL);
    if (extent == NULL) {
        return NULL;
    }
    gd_lru_begin(&extent->item);
    extent->length = of->length;
    extent->count = of->blocks;
    for (uint32_t i = 0; i < of->blocks; i++) {
        const gd_entry *entry = &entries[i];
        end += entry->plain_length;
        extent->blocks[i] =
            (gd_cached_block){.checksum = entry->checksum,
                              .segment = entry->segment,
                              .plain_offset = entry->plain_offset,
                              .end = end,
                              .stored_length = entry->stored_length,
                              .codec = entry->codec};
    }
    return extent;
}

void
gd_metacache_keep(gd_metacache *cache, const gd_group *group,
                  const gd_extent *of, const gd_entry *entries)
{
    if (gd_lru_budget(&cache->lru) == 0 || !are_live(entries, of->blocks)) {
        return;
    }
    gd_cached_extent *extent = make_extent(cache->lru.env, of, entries);
    if (extent != NULL) {
        gd_lru_key key = key_of(group, of);
        gd_lru_keep(&cache->lru, &key,
                    sizeof *extent + of->blocks * sizeof extent->blocks[0],
                    extent);
        gd_lru_return(&cache->lru, extent);
    }
}

void
gd_metacache_drop(gd_metacache *cache, const gd_group *group,
                  const gd_extent *extent)
{
    gd_lru_key key = key_of(group, extent);
    gd_lru_drop_key(&cache->lru, &key);
}

uint32_t
gd_cached_extent_find(const gd_cached_extent *extent, uint64_t at)
{
    uint32_t low = 0, high = extent->count - 1;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (extent->blocks[middle].end <= at) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

gd_entry
gd_cached_extent_entry(const gd_cached_extent *extent, uint32_t block)
{
    const gd_cached_block *of = &extent->blocks[block];
    return (gd_entry){.checksum = of->checksum,
                      .segment = of->segment,
                      .plain_offset = of->plain_offset,
                      .plain_length =
                          of->end - (block == 0 ? 0 : of[-1].end),
                      .stored_length = of->stored_length,
                      .codec = of->codec,
                      .state = GD_ENTRY_LIVE};
}

/* ---- pages of recipes ---- */

static gd_metacache *
cache_of(gd_page_cache *pages)
{
    return (gd_metacache *)pages;
}

static gd_lru_key
page_key(const gd_recipe *recipe, uint64_t number)
{
    const uint8_t *id = recipe->header.transaction_id;
    return (gd_lru_key){
        {recipe->inode, gd_get64(id), gd_get64(id + 8), number, PAGE}};
}

static bool
get_page(gd_page_cache *pages, const gd_recipe *recipe, uint64_t number,
         gd_recipe_page *page)
{
    gd_lru *lru = &cache_of(pages)->lru;
    gd_lru_key key = page_key(recipe, number);
    cached_page *found = gd_lru_get(lru, &key);
    if (found == NULL) {
        return false;
    }
    page->number = number;
    page->count = found->count;
    memcpy(page->extents, found->extents,
           found->count * sizeof found->extents[0]);
    gd_lru_return(lru, found);
    return true;
}

static void
keep_page(gd_page_cache *pages, const gd_recipe *recipe,
          const gd_recipe_page *page)
{
    gd_lru *lru = &cache_of(pages)->lru;
    size_t bytes = page->count * sizeof page->extents[0];
    if (gd_lru_budget(lru) == 0) {
        return;
    }
    cached_page *kept =
        gd_alloc(lru->env, sizeof(cached_page) + bytes, NULL);
    if (kept == NULL) {
        return;
    }
    gd_lru_key key = page_key(recipe, page->number);
    gd_lru_begin(&kept->item);
    kept->count = page->count;
    memcpy(kept->extents, page->extents, bytes);
    gd_lru_keep(lru, &key, sizeof *kept + bytes, kept);
    gd_lru_return(lru, kept);
}

static void
drop_page(gd_page_cache *pages, const gd_recipe *recipe, uint64_t number)
{
    gd_lru_key key = page_key(recipe, number);
    gd_lru_drop_key(&cache_of(pages)->lru, &key);
}

gd_page_cache *
gd_metacache_pages(gd_metacache *cache)
{
    return &cache->pages;
}

/* ---- opening and closing ---- */

gd_status
gd_metacache_open(const gd_env *env, uint64_t budget, gd_metacache **out,
                  gd_error *err)
{
    gd_metacache *cache = gd_calloc(env, 1, sizeof *cache, err);
    if (cache == NULL) {
        return GD_NOMEM;
    }
    cache->pages = (gd_page_cache){get_page, keep_page, drop_page};
    gd_lru_init(&cache->lru, env, env->release, budget);
    *out = cache;
    return GD_OK;
}

void
gd_metacache_close(gd_metacache *cache)
{
    const gd_env *env = cache->lru.env;
    gd_lru_free(&cache->lru);
    env->release(env, cache);
}

void
gd_metacache_set_budget(gd_metacache *cache, uint64_t budget)
{
    gd_lru_set_budget(&cache->lru, budget);
}

void
gd_metacache_get_stats(gd_metacache *cache, gd_lru_stats *stats)
{
    gd_lru_get_stats(&cache->lru, stats);
}
