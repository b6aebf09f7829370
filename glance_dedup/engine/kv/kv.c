/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv.c - see kv.h.
 */
#include "engine/kv/kv.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "engine/kv/backend.h"

static gd_status
remove_nothing(const gd_env *env, const char *path, gd_error *err)
{
    (void)env;
    (void)path;
    (void)err;
    return GD_OK;
}

static const struct {
    const char *name;
    gd_kv_opener *open;
    gd_kv_remover *remove;
} BACKENDS[GD_KV_BACKENDS] = {
    [GD_KV_INRAM] = {"inram", gd_inram_open, remove_nothing},
    [GD_KV_DTB] = {"dtb", gd_dtb_open, gd_kv_remove_file},
    [GD_KV_LMDB] = {"lmdb", gd_lmdb_open, gd_lmdb_remove},
    [GD_KV_LEVELDB] = {"leveldb", gd_leveldb_open, gd_leveldb_remove},
};

const char *
gd_kv_backend_name(gd_kv_backend backend)
{
    return BACKENDS[backend].name;
}

bool
gd_kv_backend_parse(const char *name, gd_kv_backend *backend)
{
    for (*backend = 0; *backend < GD_KV_BACKENDS; ++*backend) {
        if (strcmp(name, BACKENDS[*backend].name) == 0) {
            return true;
        }
    }
    return false;
}

gd_status
gd_kv_open(const gd_env *env, gd_kv_backend backend, const char *path,
           const gd_kv_options *options, gd_kv **kv, gd_error *err)
{
    *kv = NULL;
    if (options->capacity == 0 || options->capacity > GD_KV_MAX_CAPACITY) {
        return gd_fail(err, GD_INVALID,
                       "an index was asked for with room for %llu keys; it "
                       "can have from 1 to %llu",
                       (unsigned long long)options->capacity,
                       (unsigned long long)GD_KV_MAX_CAPACITY);
    }
    return BACKENDS[backend].open(env, path, options, kv, err);
}

void
gd_kv_close(gd_kv *kv)
{
    if (kv != NULL) {
        kv->calls->close(kv);
    }
}

gd_status
gd_kv_remove(const gd_env *env, gd_kv_backend backend, const char *path,
             gd_error *err)
{
    return BACKENDS[backend].remove(env, path, err);
}

gd_status
gd_kv_get_batch(gd_kv *kv, const uint64_t *keys, uint64_t *values,
                size_t count, gd_error *err)
{
    gd_status s = GD_OK;
    if (count > 0) {
        s = kv->calls->get(kv, keys, values, count, err);
        kv->stats.gets += count;
        for (size_t i = 0; s == GD_OK && i < count; i++) {
            kv->stats.found += values[i] != 0;
        }
    }
    return s;
}

gd_status
gd_kv_put_batch(gd_kv *kv, const gd_kv_pair *pairs, size_t count,
                gd_error *err)
{
    for (size_t i = 0; i < count; i++) {
        if (pairs[i].value == 0) {
            return gd_fail(err, GD_INVALID,
                           "an index cannot hold the value 0");
        }
    }
    if (count > 0) {
        kv->stats.puts += count;
        GD_TRY(kv->calls->put(kv, pairs, count, err));
    }
    return GD_OK;
}

gd_status
gd_kv_put_behind(gd_kv *kv, const gd_kv_pair *pairs, size_t count,
                 gd_error *err)
{
    if (!kv->calls->keeps_order) {
        GD_TRY(gd_kv_commit(kv, err));
    }
    return gd_kv_put_batch(kv, pairs, count, err);
}

gd_status
gd_kv_commit(gd_kv *kv, gd_error *err)
{
    return kv->calls->commit(kv, err);
}

void
gd_kv_get_stats(const gd_kv *kv, gd_kv_stats *stats)
{
    *stats = kv->stats;
}

/* ---- what backends share ---- */

gd_status
gd_kv_remove_file(const gd_env *env, const char *path, gd_error *err)
{
    int rc = env->unlinkat(env, AT_FDCWD, path);
    return rc < 0 && rc != -ENOENT
               ? gd_fail_errno(err, -rc, "cannot remove %s", path)
               : GD_OK;
}

gd_status
gd_kv_require_private(const gd_env *env, const struct stat *st,
                      const char *path,
                      gd_error *err)
{
    if (!S_ISREG(st->st_mode) || st->st_uid != env->geteuid(env) ||
        (st->st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        return gd_fail(err, GD_DENIED,
                       "%s is no file of user %lu alone; remove it", path,
                       (unsigned long)env->geteuid(env));
    }
    return GD_OK;
}
