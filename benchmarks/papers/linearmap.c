/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linearmap.c - see linearmap.h.
 */
#include "benchmarks/papers/linearmap.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#include "engine/kv/pagecache.h"

enum { VALUES = 510, AT = 16, MAX_COUNT = 256 };

struct linear_map {
    const gd_env *env;
    char path[4096];
    gd_kv_stats stats;   /* of the array or the cache */
    uint64_t *array;     /* of INRAM */
    gd_pagecache *cache; /* of DTB */
    int fd;
    gd_kv *kv; /* of the others */
};

/* ---- opening ---- */

static gd_status
open_cache(linear_map *m, const char *path, const gd_kv_options *options,
           gd_error *err)
{
    snprintf(m->path, sizeof m->path, "%s", path);
    gd_pagecache_file file = {.name = m->path,
                              .pages = options->capacity / VALUES + 1};
    gd_status s = gd_open(m->env, AT_FDCWD, path, O_RDWR | O_CREAT | O_DIRECT,
                          0600, &file.fd, err);
    if (s != GD_OK && err->sys_errno == EINVAL) {
        s = gd_open(m->env, AT_FDCWD, path, O_RDWR | O_CREAT, 0600, &file.fd,
                    err);
    }
    if (s != GD_OK) {
        return s;
    }
    m->fd = file.fd;
    int rc = m->env->ftruncate(m->env, m->fd, (file.pages + 1) * GD_DTB_PAGE);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot extend %s", path);
    }
    return gd_pagecache_open(m->env, &file, options->cache, &m->stats,
                             &m->cache, err);
}

gd_status
linear_map_open(const gd_env *env, gd_kv_backend backend, const char *path,
                const gd_kv_options *options, linear_map **map, gd_error *err)
{
    linear_map *m = gd_calloc(env, 1, sizeof *m, err);
    if (m == NULL) {
        return GD_NOMEM;
    }
    *m = (linear_map){.env = env, .fd = -1};
    gd_status s;
    if (backend == GD_KV_INRAM) {
        m->stats.memory = options->capacity * sizeof *m->array;
        m->array = gd_calloc(env, options->capacity, sizeof *m->array, err);
        s = m->array == NULL ? GD_NOMEM : GD_OK;
    } else if (backend == GD_KV_DTB) {
        s = open_cache(m, path, options, err);
    } else {
        s = gd_kv_open(env, backend, path, options, &m->kv, err);
    }
    if (s != GD_OK) {
        linear_map_close(m);
        return s;
    }
    *map = m;
    return GD_OK;
}

void
linear_map_close(linear_map *map)
{
    gd_kv_close(map->kv);
    gd_pagecache_close(map->env, map->cache);
    if (map->fd >= 0) {
        map->env->close(map->env, map->fd);
    }
    map->env->release(map->env, map->array);
    map->env->release(map->env, map);
}

/* ---- values ---- */

/* Sets at to the value's place, which is valid until the next call. */
static gd_status
value_at(linear_map *map, uint64_t number, bool change, uint8_t **at,
         gd_error *err)
{
    uint8_t *page;
    gd_status s = gd_pagecache_get(map->cache, 1 + number / VALUES, change,
                                   &page, err);
    if (s == GD_OK) {
        *at = page + AT + 8 * (number % VALUES);
    }
    return s;
}

gd_status
linear_map_get(linear_map *map, uint64_t first, uint64_t *values, size_t count,
               gd_error *err)
{
    if (map->array != NULL) {
        memcpy(values, map->array + first, count * sizeof *values);
        return GD_OK;
    }
    if (map->kv != NULL) {
        uint64_t keys[MAX_COUNT];
        for (size_t i = 0; i < count; i++) {
            keys[i] = first + i;
        }
        return gd_kv_get_batch(map->kv, keys, values, count, err);
    }
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        uint8_t *at;
        s = value_at(map, first + i, false, &at, err);
        values[i] = s == GD_OK ? gd_get64(at) : 0;
    }
    return s;
}

gd_status
linear_map_put(linear_map *map, uint64_t first, const uint64_t *values,
               size_t count, gd_error *err)
{
    if (map->array != NULL) {
        memcpy(map->array + first, values, count * sizeof *values);
        return GD_OK;
    }
    if (map->kv != NULL) {
        gd_kv_pair pairs[MAX_COUNT];
        for (size_t i = 0; i < count; i++) {
            pairs[i] = (gd_kv_pair){first + i, values[i]};
        }
        return gd_kv_put_batch(map->kv, pairs, count, err);
    }
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        uint8_t *at;
        s = value_at(map, first + i, true, &at, err);
        if (s == GD_OK) {
            gd_put64(at, values[i]);
        }
    }
    return s;
}

gd_status
linear_map_commit(linear_map *map, gd_error *err)
{
    if (map->cache != NULL) {
        return gd_pagecache_sync(map->cache, err);
    }
    return map->kv != NULL ? gd_kv_commit(map->kv, err) : GD_OK;
}

uint64_t
linear_map_memory(const linear_map *map)
{
    gd_kv_stats stats = map->stats;
    if (map->kv != NULL) {
        gd_kv_get_stats(map->kv, &stats);
    }
    return stats.memory;
}
