/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segcache.c - see segcache.h.
 */
#include "engine/repo/segcache.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { FIRST_BUCKETS = 1024 };

struct gd_segcache {
    const gd_env *env;
    atomic_ullong budget;
    atomic_bool lists_only;
    pthread_mutex_t mutex; /* guards all fields below, and each segment's own
                            * part */
    gd_cached_segment **buckets;
    size_t bucket_count; /* a power of two, or 0 */
    atomic_size_t count; /* changes only with the mutex */
    uint64_t bytes;
    gd_cached_segment *newest, *oldest;
    uint64_t hits, misses;
};

gd_status
gd_segcache_open(const gd_env *env, gd_segcache **out, gd_error *err)
{
    gd_segcache *cache = gd_calloc(env, 1, sizeof *cache, err);
    if (cache == NULL) {
        return GD_NOMEM;
    }
    cache->env = env;
    pthread_mutex_init(&cache->mutex, NULL);
    *out = cache;
    return GD_OK;
}

void
gd_segcache_close(gd_segcache *cache)
{
    gd_segcache_set_budget(cache, 0);
    pthread_mutex_destroy(&cache->mutex);
    cache->env->release(cache->env, cache->buckets);
    cache->env->release(cache->env, cache);
}

bool
gd_segcache_enabled(const gd_segcache *cache)
{
    return atomic_load_explicit(&cache->budget, memory_order_relaxed) > 0 &&
           (!atomic_load_explicit(&cache->lists_only, memory_order_relaxed) ||
            atomic_load_explicit(&cache->count, memory_order_relaxed) > 0);
}

bool
gd_segcache_takes(const gd_segcache *cache, const gd_segment_header *header)
{
    return atomic_load_explicit(&cache->budget, memory_order_relaxed) > 0 &&
           (!atomic_load_explicit(&cache->lists_only, memory_order_relaxed) ||
            gd_segment_list_size(header) > 0);
}

void
gd_segcache_set_lists_only(gd_segcache *cache, bool lists_only)
{
    atomic_store(&cache->lists_only, lists_only);
}

/* The bytes that a segment takes from the budget. */
static uint64_t
weight(const gd_cached_segment *segment)
{
    return sizeof *segment + segment->header.plain_length +
           gd_segment_list_size(&segment->header);
}

/* ---- the table; REQUIRES everywhere: the mutex ---- */

static gd_cached_segment **
bucket_of(const gd_segcache *cache, uint64_t inode, uint32_t group,
          uint32_t offset)
{
    uint64_t h = inode * UINT64_C(0x9e3779b97f4a7c15);
    h = (h ^ group) * UINT64_C(0xbf58476d1ce4e5b9);
    h = (h ^ offset) * UINT64_C(0x94d049bb133111eb);
    return &cache->buckets[(h >> 32) & (cache->bucket_count - 1)];
}

static gd_cached_segment *
find(const gd_segcache *cache, const gd_group *group, uint32_t offset)
{
    if (cache->bucket_count == 0) {
        return NULL;
    }
    gd_cached_segment *segment =
        *bucket_of(cache, group->inode, group->number, offset);
    while (segment != NULL &&
           (segment->inode != group->inode ||
            segment->seed != group->bounds.seed ||
            segment->group != group->number || segment->offset != offset)) {
        segment = segment->next;
    }
    return segment;
}

static void
insert(gd_segcache *cache, gd_cached_segment *segment)
{
    gd_cached_segment **bucket =
        bucket_of(cache, segment->inode, segment->group, segment->offset);
    segment->next = *bucket;
    *bucket = segment;
}

/* Doubles the buckets if memory allows.  Long chains are only slow. */
static void
grow(gd_segcache *cache)
{
    size_t old_count = cache->bucket_count;
    gd_cached_segment **old = cache->buckets;
    size_t wanted = old_count == 0 ? FIRST_BUCKETS : old_count * 2;
    gd_cached_segment **larger =
        gd_calloc(cache->env, wanted, sizeof(gd_cached_segment *), NULL);
    if (larger == NULL) {
        return;
    }
    cache->buckets = larger;
    cache->bucket_count = wanted;
    for (size_t i = 0; i < old_count; i++) {
        while (old[i] != NULL) {
            gd_cached_segment *segment = old[i];
            old[i] = segment->next;
            insert(cache, segment);
        }
    }
    cache->env->release(cache->env, old);
}

/* ---- the order of use ---- */

static void
unlink_age(gd_segcache *cache, gd_cached_segment *segment)
{
    if (segment->newer != NULL) {
        segment->newer->older = segment->older;
    } else {
        cache->newest = segment->older;
    }
    if (segment->older != NULL) {
        segment->older->newer = segment->newer;
    } else {
        cache->oldest = segment->newer;
    }
}

static void
link_newest(gd_segcache *cache, gd_cached_segment *segment)
{
    segment->newer = NULL;
    segment->older = cache->newest;
    if (cache->newest != NULL) {
        cache->newest->newer = segment;
    } else {
        cache->oldest = segment;
    }
    cache->newest = segment;
}

/* Takes a kept segment out.  It is freed when nobody has it. */
static void
evict(gd_segcache *cache, gd_cached_segment *segment)
{
    gd_cached_segment **at = bucket_of(cache, segment->inode, segment->group,
                                       segment->offset);
    while (*at != segment) {
        at = &(*at)->next;
    }
    *at = segment->next;
    unlink_age(cache, segment);
    cache->count--;
    cache->bytes -= weight(segment);
    segment->kept = false;
    if (segment->users == 0) {
        cache->env->release(cache->env, segment);
    }
}

static void
evict_above(gd_segcache *cache, uint64_t budget)
{
    while (cache->bytes > budget) {
        evict(cache, cache->oldest);
    }
}

/* ---- what others see ---- */

void
gd_segcache_set_budget(gd_segcache *cache, uint64_t budget)
{
    pthread_mutex_lock(&cache->mutex);
    atomic_store(&cache->budget, budget);
    evict_above(cache, budget);
    pthread_mutex_unlock(&cache->mutex);
}

void
gd_segcache_get_stats(gd_segcache *cache, gd_segcache_stats *stats)
{
    pthread_mutex_lock(&cache->mutex);
    *stats = (gd_segcache_stats){.bytes = cache->bytes,
                                 .hits = cache->hits,
                                 .misses = cache->misses};
    pthread_mutex_unlock(&cache->mutex);
}

gd_cached_segment *
gd_segcache_get(gd_segcache *cache, const gd_group *group, uint32_t offset)
{
    pthread_mutex_lock(&cache->mutex);
    gd_cached_segment *segment = find(cache, group, offset);
    if (segment == NULL) {
        cache->misses++;
    } else {
        cache->hits++;
        segment->users++;
        unlink_age(cache, segment);
        link_newest(cache, segment);
    }
    pthread_mutex_unlock(&cache->mutex);
    return segment;
}

bool
gd_segcache_has(gd_segcache *cache, const gd_group *group, uint32_t offset)
{
    pthread_mutex_lock(&cache->mutex);
    bool found = find(cache, group, offset) != NULL;
    pthread_mutex_unlock(&cache->mutex);
    return found;
}

gd_cached_segment *
gd_segcache_new(gd_segcache *cache, const gd_segment_header *header)
{
    /* Not zeroed: the decoder fills all of it. */
    uint32_t list = gd_segment_list_size(header);
    gd_cached_segment *segment = gd_alloc(
        cache->env, sizeof *segment + header->plain_length + list, NULL);
    if (segment != NULL) {
        memset(segment, 0, sizeof *segment);
        segment->header = *header;
        segment->plain = (uint8_t *)(segment + 1);
        segment->users = 1;
    }
    if (segment != NULL && list > 0) {
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
    pthread_mutex_lock(&cache->mutex);
    uint64_t budget = atomic_load(&cache->budget);
    if (cache->count >= cache->bucket_count) {
        grow(cache);
    }
    if (weight(segment) <= budget && cache->bucket_count > 0 &&
        find(cache, group, offset) == NULL) {
        segment->inode = group->inode;
        segment->seed = group->bounds.seed;
        segment->group = group->number;
        segment->offset = offset;
        segment->kept = true;
        evict_above(cache, budget - weight(segment));
        insert(cache, segment);
        link_newest(cache, segment);
        cache->count++;
        cache->bytes += weight(segment);
    }
    pthread_mutex_unlock(&cache->mutex);
}

void
gd_segcache_drop(gd_segcache *cache, gd_cached_segment *segment)
{
    pthread_mutex_lock(&cache->mutex);
    if (segment->kept) {
        evict(cache, segment);
    }
    pthread_mutex_unlock(&cache->mutex);
}

void
gd_segcache_return(gd_segcache *cache, gd_cached_segment *segment)
{
    pthread_mutex_lock(&cache->mutex);
    bool unused = --segment->users == 0 && !segment->kept;
    pthread_mutex_unlock(&cache->mutex);
    if (unused) {
        cache->env->release(cache->env, segment);
    }
}
