/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segcache.c - see segcache.h.
 */
#include "engine/repo/segcache.h"

#include <stdatomic.h>
#include <string.h>

struct gd_segcache {
    gd_lru lru;
    atomic_bool lists_only;
};

gd_status
gd_segcache_open(const gd_env *env, gd_segcache **out, gd_error *err)
{
    gd_segcache *cache = gd_calloc(env, 1, sizeof *cache, err);
    if (cache == NULL) {
        return GD_NOMEM;
    }
    gd_lru_init(&cache->lru, env, env->release, 0);
    *out = cache;
    return GD_OK;
}

void
gd_segcache_close(gd_segcache *cache)
{
    const gd_env *env = cache->lru.env;
    gd_lru_free(&cache->lru);
    env->release(env, cache);
}

bool
gd_segcache_enabled(const gd_segcache *cache)
{
    return gd_lru_budget(&cache->lru) > 0 &&
           (!atomic_load_explicit(&cache->lists_only, memory_order_relaxed) ||
            gd_lru_count(&cache->lru) > 0);
}

bool
gd_segcache_takes(const gd_segcache *cache, const gd_segment_header *header)
{
    return gd_lru_budget(&cache->lru) > 0 &&
           (!atomic_load_explicit(&cache->lists_only, memory_order_relaxed) ||
            gd_segment_list_size(header) > 0);
}

void
gd_segcache_set_lists_only(gd_segcache *cache, bool lists_only)
{
    atomic_store(&cache->lists_only, lists_only);
}

void
gd_segcache_set_budget(gd_segcache *cache, uint64_t budget)
{
    gd_lru_set_budget(&cache->lru, budget);
}

void
gd_segcache_get_stats(gd_segcache *cache, gd_segcache_stats *stats)
{
    gd_lru_stats of;
    gd_lru_get_stats(&cache->lru, &of);
    *stats = (gd_segcache_stats){.bytes = of.weight,
                                 .hits = of.hits,
                                 .misses = of.misses};
}

/* The bytes that a segment takes from the budget. */
static uint64_t
weight(const gd_cached_segment *segment)
{
    return sizeof *segment + segment->header.plain_length +
           gd_segment_list_size(&segment->header);
}

static gd_lru_key
key_of(const gd_group *group, uint32_t offset)
{
    return (gd_lru_key){{group->inode, group->bounds.seed,
                         (uint64_t)group->number << 32 | offset}};
}

gd_cached_segment *
gd_segcache_get(gd_segcache *cache, const gd_group *group, uint32_t offset)
{
    gd_lru_key key = key_of(group, offset);
    return gd_lru_get(&cache->lru, &key);
}

bool
gd_segcache_has(gd_segcache *cache, const gd_group *group, uint32_t offset)
{
    gd_lru_key key = key_of(group, offset);
    return gd_lru_has(&cache->lru, &key);
}

gd_cached_segment *
gd_segcache_new(gd_segcache *cache, const gd_segment_header *header)
{
    /* Not zeroed: the decoder fills all of it. */
    uint32_t list = gd_segment_list_size(header);
    gd_cached_segment *segment = gd_alloc(
        cache->lru.env, sizeof *segment + header->plain_length + list, NULL);
    if (segment == NULL) {
        return NULL;
    }
    gd_lru_begin(&segment->item);
    segment->header = *header;
    segment->plain = (uint8_t *)(segment + 1);
    if (list > 0) {
        uint8_t *slots = segment->plain + header->plain_length;
        memcpy(slots, header->slots, list);
        segment->header.slots = slots;
    }
    return segment;
}

void
gd_segcache_keep(gd_segcache *cache, const gd_group *group, uint32_t offset,
                 gd_cached_segment *segment)
{
    gd_lru_key key = key_of(group, offset);
    gd_lru_keep(&cache->lru, &key, weight(segment), segment);
}

void
gd_segcache_drop(gd_segcache *cache, gd_cached_segment *segment)
{
    gd_lru_drop(&cache->lru, segment);
}

void
gd_segcache_return(gd_segcache *cache, gd_cached_segment *segment)
{
    gd_lru_return(&cache->lru, segment);
}
