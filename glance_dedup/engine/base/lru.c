/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lru.c - see lru.h.
 */
#include "engine/base/lru.h"

#include <string.h>

#include "engine/base/coding.h"

enum { FIRST_BUCKETS = 64 };

void
gd_lru_init(gd_lru *lru, const gd_env *env, gd_lru_destroy *destroy,
            uint64_t budget)
{
    *lru = (gd_lru){.env = env, .destroy = destroy};
    atomic_init(&lru->budget, budget);
    atomic_init(&lru->count, 0);
    pthread_mutex_init(&lru->mutex, NULL);
}

void
gd_lru_free(gd_lru *lru)
{
    gd_lru_set_budget(lru, 0);
    pthread_mutex_destroy(&lru->mutex);
    lru->env->release(lru->env, lru->buckets);
}

uint64_t
gd_lru_budget(const gd_lru *lru)
{
    return atomic_load_explicit(&lru->budget, memory_order_relaxed);
}

size_t
gd_lru_count(const gd_lru *lru)
{
    return atomic_load_explicit(&lru->count, memory_order_relaxed);
}

/* ---- the table; REQUIRES everywhere: the mutex ---- */

/* Clients choose some of what keys are made of.  The table's address, which they
 * do not know, keeps them from choosing keys that share a bucket. */
static uint32_t
hash_of(const gd_lru *lru, const gd_lru_key *key)
{
    return (uint32_t)gd_checksum(key, sizeof *key, (uintptr_t)lru);
}

static gd_lru_item **
bucket_of(const gd_lru *lru, uint32_t hash)
{
    return &lru->buckets[hash & (lru->bucket_count - 1)];
}

static gd_lru_item *
find(const gd_lru *lru, const gd_lru_key *key, uint32_t hash)
{
    gd_lru_item *item =
        lru->bucket_count == 0 ? NULL : *bucket_of(lru, hash);
    while (item != NULL && (item->hash != hash ||
                            memcmp(&item->key, key, sizeof *key) != 0)) {
        item = item->next;
    }
    return item;
}

static void
insert(gd_lru *lru, gd_lru_item *item)
{
    gd_lru_item **bucket = bucket_of(lru, item->hash);
    item->next = *bucket;
    *bucket = item;
}

/* Doubles the buckets if memory allows.  Long chains are only slow. */
static void
grow(gd_lru *lru)
{
    size_t old_count = lru->bucket_count;
    gd_lru_item **old = lru->buckets;
    size_t wanted = old_count == 0 ? FIRST_BUCKETS : old_count * 2;
    gd_lru_item **larger =
        gd_calloc(lru->env, wanted, sizeof(gd_lru_item *), NULL);
    if (larger == NULL) {
        return;
    }
    lru->buckets = larger;
    lru->bucket_count = wanted;
    for (size_t i = 0; i < old_count; i++) {
        while (old[i] != NULL) {
            gd_lru_item *item = old[i];
            old[i] = item->next;
            insert(lru, item);
        }
    }
    lru->env->release(lru->env, old);
}

static void
unlink_age(gd_lru *lru, gd_lru_item *item)
{
    if (item->newer != NULL) {
        item->newer->older = item->older;
    } else {
        lru->newest = item->older;
    }
    if (item->older != NULL) {
        item->older->newer = item->newer;
    } else {
        lru->oldest = item->newer;
    }
}

static void
link_newest(gd_lru *lru, gd_lru_item *item)
{
    item->newer = NULL;
    item->older = lru->newest;
    if (lru->newest != NULL) {
        lru->newest->newer = item;
    } else {
        lru->oldest = item;
    }
    lru->newest = item;
}

/* Takes a kept object out.  If nobody has it, it is added to the evicted ones,
 * which the caller destroys without the mutex. */
static void
evict(gd_lru *lru, gd_lru_item *item, gd_lru_item **evicted)
{
    gd_lru_item **at = bucket_of(lru, item->hash);
    while (*at != item) {
        at = &(*at)->next;
    }
    *at = item->next;
    unlink_age(lru, item);
    lru->count--;
    lru->stats.weight -= item->weight;
    item->kept = false;
    if (item->users == 0) {
        item->next = *evicted;
        *evicted = item;
    }
}

static void
evict_above(gd_lru *lru, uint64_t budget, gd_lru_item **evicted)
{
    while (lru->stats.weight > budget) {
        evict(lru, lru->oldest, evicted);
    }
}

/* ---- what others see ---- */

static void
destroy_all(const gd_lru *lru, gd_lru_item *evicted)
{
    while (evicted != NULL) {
        gd_lru_item *item = evicted;
        evicted = item->next;
        lru->destroy(lru->env, item);
    }
}

void
gd_lru_set_budget(gd_lru *lru, uint64_t budget)
{
    gd_lru_item *evicted = NULL;
    pthread_mutex_lock(&lru->mutex);
    atomic_store(&lru->budget, budget);
    evict_above(lru, budget, &evicted);
    pthread_mutex_unlock(&lru->mutex);
    destroy_all(lru, evicted);
}

void
gd_lru_get_stats(gd_lru *lru, gd_lru_stats *stats)
{
    pthread_mutex_lock(&lru->mutex);
    *stats = lru->stats;
    pthread_mutex_unlock(&lru->mutex);
}

void *
gd_lru_get(gd_lru *lru, const gd_lru_key *key)
{
    uint32_t hash = hash_of(lru, key);
    pthread_mutex_lock(&lru->mutex);
    gd_lru_item *item = find(lru, key, hash);
    if (item == NULL) {
        lru->stats.misses++;
    } else {
        lru->stats.hits++;
        item->users++;
        unlink_age(lru, item);
        link_newest(lru, item);
    }
    pthread_mutex_unlock(&lru->mutex);
    return item;
}

bool
gd_lru_has(gd_lru *lru, const gd_lru_key *key)
{
    uint32_t hash = hash_of(lru, key);
    pthread_mutex_lock(&lru->mutex);
    bool found = find(lru, key, hash) != NULL;
    pthread_mutex_unlock(&lru->mutex);
    return found;
}

void
gd_lru_begin(gd_lru_item *item)
{
    *item = (gd_lru_item){.users = 1};
}

void
gd_lru_keep(gd_lru *lru, const gd_lru_key *key, uint64_t weight, void *object)
{
    gd_lru_item *item = object, *evicted = NULL;
    uint32_t hash = hash_of(lru, key);
    pthread_mutex_lock(&lru->mutex);
    uint64_t budget = atomic_load(&lru->budget);
    if (lru->count >= lru->bucket_count && weight <= budget) {
        grow(lru);
    }
    if (weight <= budget && lru->bucket_count > 0 &&
        find(lru, key, hash) == NULL) {
        item->key = *key;
        item->weight = weight;
        item->hash = hash;
        item->kept = true;
        evict_above(lru, budget - weight, &evicted);
        insert(lru, item);
        link_newest(lru, item);
        lru->count++;
        lru->stats.weight += weight;
    }
    pthread_mutex_unlock(&lru->mutex);
    destroy_all(lru, evicted);
}

void
gd_lru_return(gd_lru *lru, void *object)
{
    gd_lru_item *item = object;
    pthread_mutex_lock(&lru->mutex);
    bool unused = --item->users == 0 && !item->kept;
    pthread_mutex_unlock(&lru->mutex);
    if (unused) {
        lru->destroy(lru->env, item);
    }
}

void
gd_lru_drop(gd_lru *lru, void *object)
{
    gd_lru_item *item = object, *evicted = NULL;
    pthread_mutex_lock(&lru->mutex);
    if (item->kept) {
        evict(lru, item, &evicted);
    }
    pthread_mutex_unlock(&lru->mutex);
    destroy_all(lru, evicted);
}

void
gd_lru_drop_key(gd_lru *lru, const gd_lru_key *key)
{
    gd_lru_item *evicted = NULL;
    uint32_t hash = hash_of(lru, key);
    pthread_mutex_lock(&lru->mutex);
    gd_lru_item *item = find(lru, key, hash);
    if (item != NULL) {
        evict(lru, item, &evicted);
    }
    pthread_mutex_unlock(&lru->mutex);
    destroy_all(lru, evicted);
}

void
gd_lru_drop_if(gd_lru *lru, bool (*is)(void *arg, const void *object),
               void *arg)
{
    gd_lru_item *evicted = NULL;
    pthread_mutex_lock(&lru->mutex);
    for (gd_lru_item *item = lru->newest; item != NULL;) {
        gd_lru_item *older = item->older;
        if (is(arg, item)) {
            evict(lru, item, &evicted);
        }
        item = older;
    }
    pthread_mutex_unlock(&lru->mutex);
    destroy_all(lru, evicted);
}

size_t
gd_lru_walk(gd_lru *lru, size_t *place, void **objects, size_t most)
{
    size_t count = 0;
    pthread_mutex_lock(&lru->mutex);
    /* A bucket is taken as a whole, unless it alone has more than fit. */
    for (; *place < lru->bucket_count; ++*place) {
        size_t taken = count;
        gd_lru_item *item = lru->buckets[*place];
        for (; item != NULL && count < most; item = item->next) {
            objects[count++] = item;
        }
        if (item != NULL && taken > 0) {
            count = taken;
            break;
        }
    }
    for (size_t i = 0; i < count; i++) {
        ((gd_lru_item *)objects[i])->users++;
    }
    if (*place >= lru->bucket_count) {
        *place = 0;
    }
    pthread_mutex_unlock(&lru->mutex);
    return count;
}
