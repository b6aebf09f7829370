/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fpcache.c - see fpcache.h.
 */
#include "engine/repo/fpcache.h"

#include <pthread.h>
#include <string.h>

struct gd_fpcache {
    const gd_env *env;
    int root;
    const gd_params *params;
    pthread_mutex_t mutex; /* guards all fields below, and users and used_at */
    uint64_t clock;
    gd_group *groups[GD_CACHED_GROUPS];
    gd_fptable *stores[GD_CACHED_STORES];
};

gd_status
gd_fpcache_open(const gd_env *env, int root, const gd_params *params,
                gd_fpcache **out, gd_error *err)
{
    gd_fpcache *cache = gd_calloc(env, 1, sizeof *cache, err);
    if (cache == NULL) {
        return GD_NOMEM;
    }
    cache->env = env;
    cache->root = root;
    cache->params = params;
    pthread_mutex_init(&cache->mutex, NULL);
    *out = cache;
    return GD_OK;
}

void
gd_fpcache_close(gd_fpcache *cache)
{
    const gd_env *env = cache->env;
    for (int i = 0; i < GD_CACHED_GROUPS; i++) {
        if (cache->groups[i] != NULL) {
            gd_group_close(cache->groups[i]);
        }
    }
    for (int i = 0; i < GD_CACHED_STORES; i++) {
        if (cache->stores[i] != NULL) {
            gd_fptable_free(env, cache->stores[i]);
        }
    }
    pthread_mutex_destroy(&cache->mutex);
    env->release(env, cache);
}

/* ---- open files ---- */

/* The place of the group, or a free one, or the least recently used one; -1 if
 * all are lent. */
static int
group_place(const gd_fpcache *cache, uint32_t number)
{
    int best = -1;
    for (int i = 0; i < GD_CACHED_GROUPS; i++) {
        const gd_group *group = cache->groups[i];
        if (group != NULL && group->number == number) {
            return i;
        }
        if (group == NULL) {
            best = i;
        } else if (group->users == 0 &&
                   (best < 0 || (cache->groups[best] != NULL &&
                                 group->used_at <
                                     cache->groups[best]->used_at))) {
            best = i;
        }
    }
    return best;
}

static gd_group *
lend_cached_group(gd_fpcache *cache, uint32_t number)
{
    int place = group_place(cache, number);
    gd_group *group = place < 0 ? NULL : cache->groups[place];
    if (group == NULL || group->number != number) {
        return NULL;
    }
    group->users++;
    group->used_at = ++cache->clock;
    return group;
}

/* Keeps a newly opened file if there is room for it.  On a shared file system,
 * one that was opened for fresh bytes is not kept: an open file may show later
 * the bytes that it shows now (N13.2), and is read beside the page cache. */
static void
keep_group(gd_fpcache *cache, gd_group *group, bool fresh)
{
    int place = group_place(cache, group->number);
    group->users = 1;
    group->used_at = ++cache->clock;
    if (place < 0 || (fresh && cache->params->shared) || (cache->groups[place] != NULL &&
                      cache->groups[place]->number == group->number)) {
        return; /* all are lent, or another thread was faster */
    }
    if (cache->groups[place] != NULL) {
        gd_group_close(cache->groups[place]);
    }
    cache->groups[place] = group;
}

/* The name may lead to another file now, and an open file may show what this
 * host remembers of it.  So the name is asked for, and the file is opened
 * again. */
static gd_status
forget_group(gd_fpcache *cache, uint32_t number, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_names_group(number, name);
    pthread_mutex_lock(&cache->mutex);
    int place = group_place(cache, number);
    gd_group *group = place < 0 ? NULL : cache->groups[place];
    if (group != NULL && group->number == number) {
        cache->groups[place] = NULL; /* closed by its last user */
        if (group->users == 0) {
            gd_group_close(group);
        }
    }
    pthread_mutex_unlock(&cache->mutex);
    int rc = cache->env->renew(cache->env, cache->root, name);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot look up %s again", name)
                  : GD_OK;
}

gd_status
gd_fpcache_group(gd_fpcache *cache, uint32_t number, bool fresh,
                 gd_group **group, gd_error *err)
{
    gd_status s = GD_OK;
    *group = NULL;
    if (fresh) {
        s = forget_group(cache, number, err);
    } else {
        pthread_mutex_lock(&cache->mutex);
        *group = lend_cached_group(cache, number);
        pthread_mutex_unlock(&cache->mutex);
    }
    if (s != GD_OK || *group != NULL) {
        return s;
    }
    s = fresh ? gd_group_open(cache->env, cache->root, cache->params, number,
                              O_RDONLY, group, err)
              : gd_group_open_cached(cache->env, cache->root, cache->params,
                                     number, group, err);
    if (s == GD_OK) {
        pthread_mutex_lock(&cache->mutex);
        keep_group(cache, *group, fresh);
        pthread_mutex_unlock(&cache->mutex);
    }
    return s;
}

static bool
is_kept_group(const gd_fpcache *cache, const gd_group *group)
{
    for (int i = 0; i < GD_CACHED_GROUPS; i++) {
        if (cache->groups[i] == group) {
            return true;
        }
    }
    return false;
}

void
gd_fpcache_return_group(gd_fpcache *cache, gd_group *group)
{
    pthread_mutex_lock(&cache->mutex);
    bool last = --group->users == 0 && !is_kept_group(cache, group);
    pthread_mutex_unlock(&cache->mutex);
    if (last) {
        gd_group_close(group);
    }
}

void
gd_fpcache_drop_removed(gd_fpcache *cache)
{
    struct stat st;
    pthread_mutex_lock(&cache->mutex);
    for (int i = 0; i < GD_CACHED_GROUPS; i++) {
        gd_group *group = cache->groups[i];
        /* If a server has lost the file, it may not even report that. */
        if (group != NULL && group->users == 0 &&
            (cache->env->fstat(cache->env, group->fd, &st) < 0 ||
             st.st_nlink == 0)) {
            cache->groups[i] = NULL;
            gd_group_close(group);
        }
    }
    pthread_mutex_unlock(&cache->mutex);
}

/* ---- fingerprint stores ---- */

static int
store_place(const gd_fpcache *cache, uint32_t number)
{
    int best = -1;
    for (int i = 0; i < GD_CACHED_STORES; i++) {
        const gd_fptable *store = cache->stores[i];
        if (store != NULL && store->group == number) {
            return i;
        }
        if (store == NULL) {
            best = i;
        } else if (store->users == 0 &&
                   (best < 0 || (cache->stores[best] != NULL &&
                                 store->used_at <
                                     cache->stores[best]->used_at))) {
            best = i;
        }
    }
    return best;
}

static gd_fptable *
lend_cached_store(gd_fpcache *cache, const gd_group *group,
                  const gd_published *record)
{
    int place = store_place(cache, group->number);
    gd_fptable *store = place < 0 ? NULL : cache->stores[place];
    if (store == NULL || store->group != group->number) {
        return NULL;
    }
    if (!gd_group_is_table(group, record, store)) {
        cache->stores[place] = NULL; /* freed by its last user */
        if (store->users == 0) {
            gd_fptable_free(cache->env, store);
        }
        return NULL;
    }
    store->users++;
    store->used_at = ++cache->clock;
    return store;
}

static void
keep_store(gd_fpcache *cache, gd_fptable *store)
{
    int place = store_place(cache, store->group);
    store->users = 1;
    store->used_at = ++cache->clock;
    if (place < 0 || (cache->stores[place] != NULL &&
                      cache->stores[place]->group == store->group)) {
        return;
    }
    if (cache->stores[place] != NULL) {
        gd_fptable_free(cache->env, cache->stores[place]);
    }
    cache->stores[place] = store;
}

void
gd_fpcache_expect_store(gd_fpcache *cache, uint32_t number)
{
    gd_group *group;
    pthread_mutex_lock(&cache->mutex);
    int place = store_place(cache, number);
    bool cached = place >= 0 && cache->stores[place] != NULL &&
                  cache->stores[place]->group == number;
    pthread_mutex_unlock(&cache->mutex);
    /* On a shared file system it will be read beside the page cache. */
    if (!cached && !cache->params->shared &&
        gd_fpcache_group(cache, number, false, &group, NULL) == GD_OK) {
        cache->env->start_readahead(cache->env, group->fd, 0,
                                    gd_fptable_data_start(
                                        group->bounds.slots));
        gd_fpcache_return_group(cache, group);
    }
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
        pthread_mutex_lock(&cache->mutex);
        *store = lend_cached_store(cache, group, &record);
        pthread_mutex_unlock(&cache->mutex);
        if (*store == NULL) {
            *cold = true;
            s = gd_group_load_table(group, &record, store, err);
            if (s == GD_OK) {
                pthread_mutex_lock(&cache->mutex);
                keep_store(cache, *store);
                pthread_mutex_unlock(&cache->mutex);
            }
        }
    }
    gd_fpcache_return_group(cache, group);
    return s;
}

static bool
is_kept_store(const gd_fpcache *cache, const gd_fptable *store)
{
    for (int i = 0; i < GD_CACHED_STORES; i++) {
        if (cache->stores[i] == store) {
            return true;
        }
    }
    return false;
}

void
gd_fpcache_return_store(gd_fpcache *cache, gd_fptable *store)
{
    pthread_mutex_lock(&cache->mutex);
    bool last = --store->users == 0 && !is_kept_store(cache, store);
    pthread_mutex_unlock(&cache->mutex);
    if (last) {
        gd_fptable_free(cache->env, store);
    }
}
