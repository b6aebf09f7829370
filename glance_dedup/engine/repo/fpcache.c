/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fpcache.c - see fpcache.h.
 */
#include "engine/repo/fpcache.h"

#include <pthread.h>
#include <stdatomic.h>

#include "engine/base/lru.h"

enum { AT_ONCE = 64 }; /* files that are checked */
#define TURN_NS INT64_C(5000000000) /* gd_fpcache_drop_removed_in_turn */

struct gd_fpcache {
    const gd_env *env;
    int root;
    const gd_params *params;
    gd_lru groups; /* each weighs 1 */
    gd_lru stores; /* likewise */
    pthread_mutex_t mutex; /* guards the next one */
    size_t place; /* where gd_fpcache_drop_some_removed goes on */
    _Atomic int64_t turn; /* the next one, by the monotonic clock */
};

static void
close_group(GD_UNUSED const gd_env *env, void *group)
{
    gd_group_close(group);
}

static void
free_store(const gd_env *env, void *store)
{
    gd_fptable_free(env, store);
}

gd_status
gd_fpcache_open(const gd_env *env, int root, const gd_params *params,
                uint64_t groups, gd_fpcache **out, gd_error *err)
{
    gd_fpcache *cache = gd_calloc(env, 1, sizeof *cache, err);
    if (cache == NULL) {
        return GD_NOMEM;
    }
    cache->env = env;
    cache->root = root;
    cache->params = params;
    gd_lru_init(&cache->groups, env, close_group, groups);
    gd_lru_init(&cache->stores, env, free_store, GD_CACHED_STORES);
    pthread_mutex_init(&cache->mutex, NULL);
    cache->turn = env->monotonic_ns(env) + TURN_NS;
    *out = cache;
    return GD_OK;
}

void
gd_fpcache_close(gd_fpcache *cache)
{
    const gd_env *env = cache->env;
    gd_lru_free(&cache->groups);
    gd_lru_free(&cache->stores);
    pthread_mutex_destroy(&cache->mutex);
    env->release(env, cache);
}

static gd_lru_key
key_of(uint32_t number)
{
    return (gd_lru_key){{number}};
}

/* ---- open files ---- */

/* The name may lead to another file now, and an open file may show what this
 * host remembers of it.  So the name is asked for, and the file is opened
 * again. */
static gd_status
forget_group(gd_fpcache *cache, uint32_t number, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_lru_key key = key_of(number);
    gd_names_group(number, name);
    gd_lru_drop_key(&cache->groups, &key);
    int rc = cache->env->renew(cache->env, cache->root, name);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot look up %s again", name)
                  : GD_OK;
}

gd_status
gd_fpcache_group(gd_fpcache *cache, uint32_t number, bool fresh,
                 gd_group **group, gd_error *err)
{
    gd_lru_key key = key_of(number);
    *group = NULL;
    if (fresh) {
        GD_TRY(forget_group(cache, number, err));
    } else {
        *group = gd_lru_get(&cache->groups, &key);
    }
    if (*group != NULL) {
        return GD_OK;
    }
    GD_TRY(fresh ? gd_group_open(cache->env, cache->root, cache->params,
                                 number, O_RDONLY, group, err)
                 : gd_group_open_cached(cache->env, cache->root,
                                        cache->params, number, group, err));
    gd_lru_begin(&(*group)->item);
    /* On a shared file system, a file that was opened for fresh bytes is not
     * kept: an open file may show later the bytes that it shows now (N13.2), and
     * is read beside the page cache. */
    if (!fresh || !cache->params->shared) {
        gd_lru_keep(&cache->groups, &key, 1, *group);
    }
    return GD_OK;
}

void
gd_fpcache_return_group(gd_fpcache *cache, gd_group *group)
{
    gd_lru_return(&cache->groups, group);
}

/* If a server has lost the file, it may not even report that. */
static bool
is_removed(const gd_env *env, const gd_group *group)
{
    struct stat st;
    return env->fstat(env, group->fd, &st) < 0 || st.st_nlink == 0;
}

/* Returns the walk's groups, except those that are gone. */
static void
drop_removed(gd_fpcache *cache, void **groups, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (is_removed(cache->env, groups[i])) {
            gd_lru_drop(&cache->groups, groups[i]);
        }
        gd_lru_return(&cache->groups, groups[i]);
    }
}

void
gd_fpcache_drop_removed(gd_fpcache *cache)
{
    void *groups[AT_ONCE];
    size_t place = 0;
    do {
        size_t count = gd_lru_walk(&cache->groups, &place, groups, AT_ONCE);
        drop_removed(cache, groups, count);
    } while (place != 0);
}

void
gd_fpcache_drop_some_removed(gd_fpcache *cache)
{
    void *groups[AT_ONCE];
    pthread_mutex_lock(&cache->mutex);
    size_t count =
        gd_lru_walk(&cache->groups, &cache->place, groups, AT_ONCE);
    pthread_mutex_unlock(&cache->mutex);
    drop_removed(cache, groups, count);
}

void
gd_fpcache_drop_removed_in_turn(gd_fpcache *cache)
{
    int64_t now = cache->env->monotonic_ns(cache->env);
    int64_t turn = cache->turn;
    if (now >= turn && atomic_compare_exchange_strong(&cache->turn, &turn,
                                                      now + TURN_NS)) {
        gd_fpcache_drop_some_removed(cache);
    }
}

/* ---- fingerprint stores ---- */

static gd_fptable *
lend_cached_store(gd_fpcache *cache, const gd_group *group,
                  const gd_published *record)
{
    gd_lru_key key = key_of(group->number);
    gd_fptable *store = gd_lru_get(&cache->stores, &key);
    if (store != NULL && !gd_group_is_table(group, record, store)) {
        gd_lru_drop(&cache->stores, store);
        gd_lru_return(&cache->stores, store);
        store = NULL;
    }
    return store;
}

void
gd_fpcache_expect_store(gd_fpcache *cache, uint32_t number)
{
    gd_group *group;
    gd_lru_key key = key_of(number);
    /* On a shared file system it will be read beside the page cache. */
    if (!cache->params->shared && !gd_lru_has(&cache->stores, &key) &&
        gd_fpcache_group(cache, number, false, &group, NULL) == GD_OK) {
        cache->env->start_readahead(cache->env, group->fd, 0,
                                    gd_fptable_data_start(
                                        group->bounds.slots));
        gd_fpcache_return_group(cache, group);
    }
}

static gd_status
load_store(gd_fpcache *cache, const gd_group *group,
           const gd_published *record, gd_fptable **store, gd_error *err)
{
    gd_lru_key key = key_of(group->number);
    GD_TRY(gd_group_load_table(group, record, store, err));
    gd_lru_begin(&(*store)->item);
    gd_lru_keep(&cache->stores, &key, 1, *store);
    return GD_OK;
}

gd_status
gd_fpcache_store(gd_fpcache *cache, uint32_t number, gd_fptable **store,
                 bool *cold, gd_error *err)
{
    gd_group *group;
    gd_published record;
    *cold = false;
    GD_TRY(gd_fpcache_group(cache, number, true, &group, err));
    gd_status s = gd_group_read_published(group, &record, err);
    if (s == GD_OK) {
        *store = lend_cached_store(cache, group, &record);
        *cold = *store == NULL;
        if (*cold) {
            s = load_store(cache, group, &record, store, err);
        }
    }
    gd_fpcache_return_group(cache, group);
    return s;
}

void
gd_fpcache_return_store(gd_fpcache *cache, gd_fptable *store)
{
    gd_lru_return(&cache->stores, store);
}
