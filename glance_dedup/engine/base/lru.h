/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lru.h - a table of objects that threads share, up to a budget; the one unused
 * for longest goes first.
 *
 * An object begins with a gd_lru_item and has a key.  It is kept (the table
 * finds it), lent (threads use it), or both.  Once it is neither, it is
 * destroyed: by the thread that returns it, or by the one that evicts it.  So an
 * evicted object stays until its last user has returned it.  Until then it
 * counts no more, and the sum of all objects may exceed the budget by what is
 * lent.
 *
 * A kept object does not change, except where its own lock guards it.
 *
 * Thread-safe.  Nothing is destroyed, read or copied under the lock.
 */
#ifndef GD_LRU_H
#define GD_LRU_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"

enum { GD_LRU_WORDS = 5 };

/* Numbers that identify an object among those of its table.  Those that a table
 * does not need are 0. */
typedef struct gd_lru_key {
    uint64_t words[GD_LRU_WORDS];
} gd_lru_key;

/* The first member of each object.  The table's own, and guarded by its lock. */
typedef struct gd_lru_item {
    struct gd_lru_item *next; /* in its bucket, or among the evicted */
    struct gd_lru_item *newer, *older;
    gd_lru_key key;
    uint64_t weight; /* that it takes from the budget */
    uint32_t hash;
    unsigned users;
    bool kept;
} gd_lru_item;

/* env->release is one, for objects that have nothing else to give back. */
typedef void gd_lru_destroy(const gd_env *env, void *object);

typedef struct gd_lru_stats {
    uint64_t weight; /* of all that is kept now */
    uint64_t hits, misses;
} gd_lru_stats;

typedef struct gd_lru {
    const gd_env *env;
    gd_lru_destroy *destroy;
    atomic_ullong budget;
    atomic_size_t count; /* kept objects; changes only with the mutex */
    pthread_mutex_t mutex; /* guards all fields below */
    gd_lru_item **buckets;
    size_t bucket_count; /* a power of two, or 0 */
    gd_lru_item *newest, *oldest;
    gd_lru_stats stats;
} gd_lru;

/* With a budget of 0 nothing is kept. */
void gd_lru_init(gd_lru *lru, const gd_env *env, gd_lru_destroy *destroy,
                 uint64_t budget);
/* Destroys all objects.  REQUIRES: nothing is lent. */
void gd_lru_free(gd_lru *lru);

/* Evicts what exceeds the budget. */
void gd_lru_set_budget(gd_lru *lru, uint64_t budget);
uint64_t gd_lru_budget(const gd_lru *lru);
size_t gd_lru_count(const gd_lru *lru);
void gd_lru_get_stats(gd_lru *lru, gd_lru_stats *stats);

/* Lends the object with this key; NULL: there is none. */
void *gd_lru_get(gd_lru *lru, const gd_lru_key *key);
/* Returns whether get would find it.  Does not count as a use. */
bool gd_lru_has(gd_lru *lru, const gd_lru_key *key);
/* Marks a new object as lent to its maker, who keeps and returns it. */
void gd_lru_begin(gd_lru_item *item);
/* Lets others find the object; it stays lent.  If another object has the key
 * already, or there is no room for this one, it is not kept. */
void gd_lru_keep(gd_lru *lru, const gd_lru_key *key, uint64_t weight,
                 void *object);
void gd_lru_return(gd_lru *lru, void *object);

/* From now on nobody finds the object; it stays lent. */
void gd_lru_drop(gd_lru *lru, void *object);
/* The same for the object with this key, if there is one. */
void gd_lru_drop_key(gd_lru *lru, const gd_lru_key *key);
/* The same for all objects of which is(arg, object) is true.  REQUIRES: is()
 * calls nothing of the table. */
void gd_lru_drop_if(gd_lru *lru, bool (*is)(void *arg, const void *object),
                    void *arg);

/* Lends up to `most` objects that come next, and returns their number.  *place
 * is 0 before the first one, and again behind the last one.  Of a table that
 * changes meanwhile, some objects may come twice or not at all.  Does not count
 * as a use. */
size_t gd_lru_walk(gd_lru *lru, size_t *place, void **objects, size_t most);

#endif
