/* SPDX-License-Identifier: Apache-2.0 */
/*
 * leveldb.c - the log-structured backend: LevelDB, through its C API.
 *
 * The store is a directory.  LevelDB locks it for one process.  Puts go to its
 * log without a sync, which a commit adds.  Blocks are verified by their
 * checksums when they are read.  Keys are stored big-endian.  The number of
 * keys is not limited: LevelDB does not know how many it has.
 *
 * The library makes its system calls and threads itself.
 */
#include "engine/kv/backend.h"

#if !defined(GD_WITHOUT_LEVELDB) && __has_include(<leveldb/c.h>)

#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <leveldb/c.h>

#include "engine/base/coding.h"

enum {
    BLOOM_BITS = 10, /* for each key: an absent one costs no read, mostly */
    MIN_BUFFER = 1 << 20,
    OPEN_FILES = 200,
};

#define FUNCTIONS(X)                                                          \
    X(leveldb_open) X(leveldb_close) X(leveldb_get) X(leveldb_write)          \
    X(leveldb_destroy_db) X(leveldb_free) X(leveldb_writebatch_create)        \
    X(leveldb_writebatch_destroy) X(leveldb_writebatch_clear)                 \
    X(leveldb_writebatch_put) X(leveldb_options_create)                       \
    X(leveldb_options_destroy) X(leveldb_options_set_create_if_missing)       \
    X(leveldb_options_set_paranoid_checks)                                    \
    X(leveldb_options_set_write_buffer_size)                                  \
    X(leveldb_options_set_max_open_files) X(leveldb_options_set_cache)        \
    X(leveldb_options_set_filter_policy) X(leveldb_options_set_compression)   \
    X(leveldb_filterpolicy_create_bloom) X(leveldb_filterpolicy_destroy)      \
    X(leveldb_cache_create_lru) X(leveldb_cache_destroy)                      \
    X(leveldb_readoptions_create) X(leveldb_readoptions_destroy)              \
    X(leveldb_readoptions_set_verify_checksums)                               \
    X(leveldb_writeoptions_create) X(leveldb_writeoptions_destroy)            \
    X(leveldb_writeoptions_set_sync)

typedef struct library {
#define X(name) __typeof__(&name) name;
    FUNCTIONS(X)
#undef X
} library;

typedef struct leveldb {
    gd_kv kv;
    library lib;
    leveldb_t *db;
    leveldb_options_t *options;
    leveldb_filterpolicy_t *bloom;
    leveldb_cache_t *cache;
    leveldb_readoptions_t *reading;
    leveldb_writeoptions_t *writing;
    leveldb_writebatch_t *batch;
    char *name;
} leveldb;

static leveldb *
of(gd_kv *kv)
{
    return (leveldb *)kv;
}

/* ---- the library ---- */

static bool
find_functions(library *lib, void *handle)
{
    bool all = true;
#define X(name) all = (lib->name = dlsym(handle, #name)) != NULL && all;
    FUNCTIONS(X)
#undef X
    return all;
}

/* It stays loaded, as libraries with threads of their own must. */
static gd_status
load_library(library *lib, gd_error *err)
{
    static const char *const NAMES[] = {"libleveldb.so.1d", "libleveldb.so.1",
                                        "libleveldb.so"};
    void *handle = NULL;
    for (size_t i = 0; handle == NULL && i < sizeof NAMES / sizeof *NAMES;
         i++) {
        handle = dlopen(NAMES[i], RTLD_NOW | RTLD_LOCAL);
    }
    if (handle == NULL || !find_functions(lib, handle)) {
        return gd_fail(err, GD_NOTFOUND,
                       "the library LevelDB is missing; install its package "
                       "(Debian: libleveldb1d, Fedora: leveldb)");
    }
    return GD_OK;
}

/* LevelDB reports errors as sentences; `what`, which is freed, is one or
 * NULL. */
static gd_status
check(leveldb *t, char *what, gd_error *err)
{
    if (what == NULL) {
        return GD_OK;
    }
    gd_status s = GD_IO;
    if (strncmp(what, "Corruption", 10) == 0 ||
        strncmp(what, "Invalid argument", 16) == 0) {
        s = gd_fail(err, GD_CORRUPT, "%s is damaged: %s", t->name, what);
    } else if (strncmp(what, "IO error: lock", 14) == 0) {
        s = gd_fail(err, GD_BUSY,
                    "another process has %s open, which serves only one: %s",
                    t->name, what);
    } else {
        s = gd_fail(err, GD_IO, "LevelDB failed with %s: %s", t->name, what);
    }
    t->lib.leveldb_free(what);
    return s;
}

/* ---- reading and changing ---- */

static gd_status
leveldb_get_batch(gd_kv *kv, const uint64_t *keys, uint64_t *values,
                  size_t count, gd_error *err)
{
    leveldb *t = of(kv);
    for (size_t i = 0; i < count; i++) {
        uint64_t key = htobe64(keys[i]);
        size_t length;
        char *why = NULL;
        char *value = t->lib.leveldb_get(t->db, t->reading, (char *)&key,
                                         sizeof key, &length, &why);
        values[i] = value != NULL && length == 8
                        ? gd_get64((uint8_t *)value) : 0;
        if (value != NULL) {
            t->lib.leveldb_free(value);
        }
        GD_TRY(check(t, why, err));
    }
    return GD_OK;
}

static gd_status
write_batch(leveldb *t, gd_error *err)
{
    char *why = NULL;
    t->lib.leveldb_write(t->db, t->writing, t->batch, &why);
    t->lib.leveldb_writebatch_clear(t->batch);
    return check(t, why, err);
}

static gd_status
leveldb_put_batch(gd_kv *kv, const gd_kv_pair *pairs, size_t count,
                  gd_error *err)
{
    leveldb *t = of(kv);
    for (size_t i = 0; i < count; i++) {
        uint64_t key = htobe64(pairs[i].key);
        uint8_t value[8];
        gd_put64(value, pairs[i].value);
        t->lib.leveldb_writebatch_put(t->batch, (char *)&key, sizeof key,
                                      (char *)value, sizeof value);
    }
    return write_batch(t, err);
}

/* An empty batch that is synced takes all before it along. */
static gd_status
leveldb_commit(gd_kv *kv, gd_error *err)
{
    leveldb *t = of(kv);
    t->lib.leveldb_writeoptions_set_sync(t->writing, 1);
    gd_status s = write_batch(t, err);
    t->lib.leveldb_writeoptions_set_sync(t->writing, 0);
    kv->stats.syncs++;
    return s;
}

/* ---- opening ---- */

static void
leveldb_close_store(gd_kv *kv)
{
    leveldb *t = of(kv);
    if (t->db != NULL) {
        t->lib.leveldb_close(t->db);
    }
    if (t->batch != NULL) {
        t->lib.leveldb_writebatch_destroy(t->batch);
        t->lib.leveldb_writeoptions_destroy(t->writing);
        t->lib.leveldb_readoptions_destroy(t->reading);
        t->lib.leveldb_options_destroy(t->options);
        t->lib.leveldb_cache_destroy(t->cache);
        t->lib.leveldb_filterpolicy_destroy(t->bloom);
    }
    kv->env->release(kv->env, t->name);
    kv->env->release(kv->env, t);
}

static const gd_kv_calls CALLS = {
    leveldb_close_store, leveldb_get_batch, leveldb_put_batch, leveldb_commit,
    true, /* the log is read up to where it breaks off */
};

/* A quarter of the cache's budget holds the last writes; LevelDB may have two
 * such buffers. */
static void
make_options(leveldb *t)
{
    const library *lib = &t->lib;
    size_t buffer = t->kv.options.cache / 4;
    buffer = buffer > MIN_BUFFER ? buffer : MIN_BUFFER;
    size_t blocks = t->kv.options.cache / 2;
    t->options = lib->leveldb_options_create();
    t->bloom = lib->leveldb_filterpolicy_create_bloom(BLOOM_BITS);
    t->cache = lib->leveldb_cache_create_lru(blocks);
    t->reading = lib->leveldb_readoptions_create();
    t->writing = lib->leveldb_writeoptions_create();
    t->batch = lib->leveldb_writebatch_create();
    lib->leveldb_readoptions_set_verify_checksums(t->reading, 1);
    lib->leveldb_options_set_create_if_missing(t->options, 1);
    lib->leveldb_options_set_paranoid_checks(t->options, 1);
    lib->leveldb_options_set_write_buffer_size(t->options, buffer);
    lib->leveldb_options_set_max_open_files(t->options, OPEN_FILES);
    lib->leveldb_options_set_cache(t->options, t->cache);
    lib->leveldb_options_set_filter_policy(t->options, t->bloom);
    lib->leveldb_options_set_compression(t->options, leveldb_no_compression);
    t->kv.stats.memory = blocks + 2 * buffer;
}

static gd_status
require_directory(const leveldb *t, gd_error *err)
{
    const gd_env *env = t->kv.env;
    struct stat st;
    int rc = env->fstatat(env, AT_FDCWD, t->name, &st);
    if (rc == -ENOENT) {
        rc = env->mkdirat(env, AT_FDCWD, t->name, 0700);
        return rc < 0 ? gd_fail_errno(err, -rc, "cannot make the directory %s",
                                      t->name)
                      : GD_OK;
    }
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", t->name);
    }
    if (!S_ISDIR(st.st_mode) || st.st_uid != env->geteuid(env) ||
        (st.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        return gd_fail(err, GD_DENIED,
                       "%s is no directory of user %lu alone; remove it",
                       t->name, (unsigned long)env->geteuid(env));
    }
    return GD_OK;
}

static gd_status
open_once(leveldb *t, gd_error *err)
{
    char *why = NULL;
    t->db = t->lib.leveldb_open(t->options, t->name, &why);
    return check(t, why, err);
}

static gd_status
open_anew_if_damaged(leveldb *t, gd_error *err)
{
    gd_status s = open_once(t, err);
    if (s != GD_CORRUPT) {
        return s;
    }
    char *why = NULL;
    t->lib.leveldb_destroy_db(t->options, t->name, &why);
    s = check(t, why, err);
    return s == GD_OK ? open_once(t, err) : s;
}

gd_status
gd_leveldb_open(const gd_env *env, const char *path,
                const gd_kv_options *options, gd_kv **kv, gd_error *err)
{
    leveldb *t = gd_calloc(env, 1, sizeof *t, err);
    if (t == NULL) {
        return GD_NOMEM;
    }
    t->kv = (gd_kv){.env = env, .calls = &CALLS, .options = *options};
    t->name = gd_calloc(env, strlen(path) + 1, 1, err);
    gd_status s = t->name == NULL ? GD_NOMEM : load_library(&t->lib, err);
    if (s == GD_OK) {
        memcpy(t->name, path, strlen(path) + 1);
        make_options(t);
        s = require_directory(t, err);
    }
    if (s == GD_OK) {
        s = open_anew_if_damaged(t, err);
    }
    if (s != GD_OK) {
        leveldb_close_store(&t->kv);
        return s;
    }
    *kv = &t->kv;
    return GD_OK;
}

gd_status
gd_leveldb_remove(const gd_env *env, const char *path, gd_error *err)
{
    leveldb t = {.kv.env = env, .name = (char *)path};
    GD_TRY(load_library(&t.lib, err));
    char *why = NULL;
    leveldb_options_t *options = t.lib.leveldb_options_create();
    t.lib.leveldb_destroy_db(options, path, &why);
    t.lib.leveldb_options_destroy(options);
    return check(&t, why, err);
}

#else

gd_status
gd_leveldb_open(const gd_env *env, const char *path,
                const gd_kv_options *options, gd_kv **kv, gd_error *err)
{
    (void)env;
    (void)path;
    (void)options;
    (void)kv;
    return gd_fail(err, GD_NOTFOUND,
                   "this build has no support of LevelDB; build it where the "
                   "headers are installed (Debian: libleveldb-dev, Fedora: "
                   "leveldb-devel)");
}

gd_status
gd_leveldb_remove(const gd_env *env, const char *path, gd_error *err)
{
    (void)env;
    (void)path;
    (void)err;
    return GD_OK;
}

#endif
