/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lmdb.c - the backend that is a copy-on-write B+-tree: LMDB's.
 *
 * Several processes may have the store open.  One of them at a time writes: the
 * first put begins a transaction, for which it waits, and the commit ends it.  A commit writes the changed pages, syncs, and then writes
 * the page that has the tree's root.
 *
 * A process must not open the store twice: closing one would release LMDB's
 * locks of the other.  So it locks a byte of the file path-process, with the
 * number of its process id.
 *
 * LMDB reads pages of the file through a mapping, without checksums, and trusts
 * their content.  This file checks the owner of the file, and that it has all
 * the pages that its root page counts.  The library makes its system calls
 * itself, and its cache is the kernel's.
 */
#include "engine/kv/backend.h"

#if !defined(GD_WITHOUT_LMDB) && __has_include(<lmdb.h>)

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <lmdb.h>
#include <stdio.h>

#include "engine/base/coding.h"

enum {
    KEY_BYTES = 128, /* of address space for each key: half-full pages, and
                      * copies of them until a transaction ends */
    MIN_MAP = 64 << 20,
    LOCK_FILE = 8192, /* bytes, for as many readers as LMDB has by itself */
    PATH_ROOM = 4096,
};

#define FUNCTIONS(X)                                                          \
    X(mdb_env_create) X(mdb_env_open) X(mdb_env_close) X(mdb_env_info)        \
    X(mdb_env_stat) X(mdb_env_set_mapsize) X(mdb_reader_check)                \
    X(mdb_txn_begin) X(mdb_txn_commit) X(mdb_txn_abort) X(mdb_txn_reset)      \
    X(mdb_txn_renew) X(mdb_dbi_open) X(mdb_stat) X(mdb_get) X(mdb_put)        \
    X(mdb_strerror)

typedef struct library {
#define X(name) __typeof__(&name) name;
    FUNCTIONS(X)
#undef X
} library;

typedef struct lmdb {
    gd_kv kv;
    library mdb;
    MDB_env *tree;
    MDB_dbi dbi;
    MDB_txn *writes; /* NULL: nothing to commit */
    MDB_txn *reads;  /* idle between calls */
    int guard;       /* the file by which this process opens it only once */
    char name[PATH_ROOM];
} lmdb;

static lmdb *
of(gd_kv *kv)
{
    return (lmdb *)kv;
}

/* ---- the library ---- */

static bool
find_functions(library *mdb, void *handle)
{
    bool all = true;
#define X(name) all = (mdb->name = dlsym(handle, #name)) != NULL && all;
    FUNCTIONS(X)
#undef X
    return all;
}

/* It stays loaded, as libraries with state of their own should. */
static gd_status
load_library(library *mdb, gd_error *err)
{
    void *handle = dlopen("liblmdb.so.0", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        handle = dlopen("liblmdb.so", RTLD_NOW | RTLD_LOCAL);
    }
    if (handle == NULL || !find_functions(mdb, handle)) {
        return gd_fail(err, GD_NOTFOUND,
                       "the library LMDB is missing; install its package "
                       "(Debian: liblmdb0, Fedora: lmdb-libs)");
    }
    return GD_OK;
}

static gd_status
fail(lmdb *t, int rc, gd_error *err)
{
    switch (rc) {
    case MDB_CORRUPTED:
    case MDB_PAGE_NOTFOUND:
    case MDB_INVALID:
    case MDB_VERSION_MISMATCH:
    case MDB_INCOMPATIBLE:
    case MDB_BAD_VALSIZE:
        return gd_fail(err, GD_CORRUPT, "%s is damaged: %s", t->name,
                       t->mdb.mdb_strerror(rc));
    case MDB_MAP_FULL:
        return gd_fail(err, GD_NOSPACE, "%s is full", t->name);
    case MDB_READERS_FULL:
        return gd_fail(err, GD_BUSY, "too many processes use %s", t->name);
    }
    return rc > 0 ? gd_fail_errno(err, rc, "LMDB failed with %s", t->name)
                  : gd_fail(err, GD_IO, "LMDB failed with %s: %s", t->name,
                            t->mdb.mdb_strerror(rc));
}

/* ---- reading and changing ---- */

/* The library's key: the bytes of an aligned integer. */
static MDB_val
key_of(const uint64_t *key)
{
    return (MDB_val){sizeof *key, (void *)key};
}

/* Pairs that are being written are read, too. */
static int
begin_reading(lmdb *t, MDB_txn **txn)
{
    int rc = 0;
    if (t->writes == NULL) {
        rc = t->reads != NULL ? t->mdb.mdb_txn_renew(t->reads)
                              : t->mdb.mdb_txn_begin(t->tree, NULL,
                                                     MDB_RDONLY, &t->reads);
    }
    *txn = t->writes != NULL ? t->writes : t->reads;
    return rc;
}

/* So that the pages read may be used again by writers. */
static void
end_reading(lmdb *t)
{
    if (t->writes == NULL) {
        t->mdb.mdb_txn_reset(t->reads);
    }
}

static gd_status
lmdb_get(gd_kv *kv, const uint64_t *keys, uint64_t *values, size_t count,
         gd_error *err)
{
    lmdb *t = of(kv);
    MDB_txn *txn;
    int rc = begin_reading(t, &txn);
    if (rc != 0) {
        return fail(t, rc, err);
    }
    for (size_t i = 0; rc == 0 && i < count; i++) {
        MDB_val key = key_of(&keys[i]), value;
        values[i] = 0;
        rc = t->mdb.mdb_get(txn, t->dbi, &key, &value);
        if (rc == 0 && value.mv_size == 8) {
            values[i] = gd_get64(value.mv_data);
        }
        rc = rc == MDB_NOTFOUND ? 0 : rc;
    }
    end_reading(t);
    return rc == 0 ? GD_OK : fail(t, rc, err);
}

static gd_status
begin_writing(lmdb *t, gd_error *err)
{
    int rc = t->writes != NULL ? 0 : t->mdb.mdb_txn_begin(t->tree, NULL, 0,
                                                          &t->writes);
    return rc == 0 ? GD_OK : fail(t, rc, err);
}

/* After a failure the transaction can only be given up. */
static gd_status
end_change(lmdb *t, int rc, gd_error *err)
{
    if (rc == 0) {
        return GD_OK;
    }
    t->mdb.mdb_txn_abort(t->writes);
    t->writes = NULL;
    return fail(t, rc, err);
}

/* When the store has as many keys as it may, only those that it has can be
 * put. */
static int
put_one(lmdb *t, const gd_kv_pair *pair, bool full)
{
    uint8_t bytes[8];
    MDB_val key = key_of(&pair->key), value, old;
    gd_put64(bytes, pair->value);
    value = (MDB_val){sizeof bytes, bytes};
    if (full) {
        int rc = t->mdb.mdb_get(t->writes, t->dbi, &key, &old);
        if (rc != 0) {
            t->kv.stats.dropped += rc == MDB_NOTFOUND;
            return rc == MDB_NOTFOUND ? 0 : rc;
        }
    }
    return t->mdb.mdb_put(t->writes, t->dbi, &key, &value, 0);
}

static gd_status
lmdb_put(gd_kv *kv, const gd_kv_pair *pairs, size_t count, gd_error *err)
{
    lmdb *t = of(kv);
    MDB_stat stat;
    GD_TRY(begin_writing(t, err));
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < count; i++) {
        rc = t->mdb.mdb_stat(t->writes, t->dbi, &stat);
        if (rc == 0) {
            rc = put_one(t, &pairs[i],
                         stat.ms_entries >= kv->options.capacity);
        }
    }
    return end_change(t, rc, err);
}

static gd_status
lmdb_commit(gd_kv *kv, gd_error *err)
{
    lmdb *t = of(kv);
    if (t->writes == NULL) {
        return GD_OK;
    }
    int rc = t->mdb.mdb_txn_commit(t->writes);
    t->writes = NULL;
    kv->stats.syncs++;
    return rc == 0 ? GD_OK : fail(t, rc, err);
}

/* ---- opening ---- */

static void
close_tree(lmdb *t)
{
    if (t->writes != NULL) {
        t->mdb.mdb_txn_abort(t->writes);
    }
    if (t->reads != NULL) {
        t->mdb.mdb_txn_abort(t->reads);
    }
    if (t->tree != NULL) {
        t->mdb.mdb_env_close(t->tree);
    }
    t->writes = t->reads = NULL;
    t->tree = NULL;
}

static void
lmdb_close(gd_kv *kv)
{
    close_tree(of(kv));
    if (of(kv)->guard >= 0) {
        kv->env->close(kv->env, of(kv)->guard);
    }
    kv->env->release(kv->env, kv);
}

static const gd_kv_calls CALLS = {
    lmdb_close, lmdb_get, lmdb_put, lmdb_commit, true, /* a commit is one step */
};

static gd_status
take_guard(lmdb *t, gd_error *err)
{
    const gd_env *env = t->kv.env;
    char path[PATH_ROOM + 16];
    snprintf(path, sizeof path, "%s-process", t->name);
    GD_TRY(gd_open(env, AT_FDCWD, path, O_RDWR | O_CREAT, 0600,
                   &t->guard, err));
    int rc = env->lock(env, t->guard, (uint64_t)env->getpid(env), F_WRLCK);
    if (rc == -EAGAIN || rc == -EACCES) {
        return gd_fail(err, GD_BUSY, "this process has %s open already",
                       t->name);
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot lock %s", path) : GD_OK;
}

/* The file of the tree, and the one by which processes meet. */
static gd_status
require_file(lmdb *t, const char *suffix, gd_error *err)
{
    const gd_env *env = t->kv.env;
    char path[PATH_ROOM + 8];
    struct stat st;
    snprintf(path, sizeof path, "%s%s", t->name, suffix);
    int rc = env->fstatat(env, AT_FDCWD, path, &st);
    if (rc == -ENOENT) {
        return GD_OK;
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot stat %s", path)
                  : gd_kv_require_private(env, &st, path, err);
}

/* A page that the mapping has and the file has not would kill the process. */
static int
check_size(lmdb *t)
{
    const gd_env *env = t->kv.env;
    struct stat st;
    MDB_envinfo info;
    MDB_stat stat;
    int rc = t->mdb.mdb_env_info(t->tree, &info);
    if (rc == 0) {
        rc = t->mdb.mdb_env_stat(t->tree, &stat);
    }
    if (rc == 0) {
        rc = -env->fstatat(env, AT_FDCWD, t->name, &st);
    }
    return rc != 0 ? rc
           : info.me_last_pgno < (uint64_t)st.st_size / stat.ms_psize
               ? 0
               : MDB_CORRUPTED;
}

/* LMDB maps the file by which processes meet, and writes to the mapping: on a
 * full disk that would kill the process, unless the file has its blocks.
 * REQUIRES: this process has not opened the tree, or it would lose its locks. */
static gd_status
reserve_lock_file(lmdb *t, gd_error *err)
{
    const gd_env *env = t->kv.env;
    char path[PATH_ROOM + 8];
    int fd;
    snprintf(path, sizeof path, "%s-lock", t->name);
    gd_status s =
        gd_open(env, AT_FDCWD, path, O_RDWR | O_CREAT, 0600, &fd, err);
    if (s != GD_OK) {
        return s;
    }
    int rc = env->fallocate(env, fd, 0, LOCK_FILE);
    env->close(env, fd);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot reserve space for %s",
                                  path)
                  : GD_OK;
}

static gd_status
open_tree(lmdb *t, gd_error *err)
{
    uint64_t map = t->kv.options.capacity * KEY_BYTES;
    GD_TRY(reserve_lock_file(t, err));
    int dead, rc = t->mdb.mdb_env_create(&t->tree);
    if (rc == 0) {
        rc = t->mdb.mdb_env_set_mapsize(t->tree,
                                        map > MIN_MAP ? map : MIN_MAP);
    }
    if (rc == 0) {
        rc = t->mdb.mdb_env_open(t->tree, t->name,
                                 MDB_NOSUBDIR | MDB_NOTLS | MDB_NORDAHEAD,
                                 0600);
    }
    if (rc == 0) {
        rc = check_size(t);
    }
    if (rc == 0) { /* readers that were killed */
        rc = t->mdb.mdb_reader_check(t->tree, &dead);
    }
    if (rc == 0) {
        rc = t->mdb.mdb_txn_begin(t->tree, NULL, 0, &t->writes);
    }
    if (rc == 0) {
        rc = t->mdb.mdb_dbi_open(t->writes, NULL, MDB_INTEGERKEY, &t->dbi);
    }
    if (rc == 0) { /* writes nothing, unless the store is new */
        rc = t->mdb.mdb_txn_commit(t->writes);
        t->writes = NULL;
    }
    return rc == 0 ? GD_OK : fail(t, rc, err);
}

static gd_status
open_anew_if_damaged(lmdb *t, gd_error *err)
{
    gd_status s = open_tree(t, err);
    if (s != GD_CORRUPT) {
        return s;
    }
    close_tree(t);
    s = gd_lmdb_remove(t->kv.env, t->name, err);
    return s == GD_OK ? open_tree(t, err) : s;
}

gd_status
gd_lmdb_open(const gd_env *env, const char *path, const gd_kv_options *options,
             gd_kv **kv, gd_error *err)
{
    lmdb *t = gd_calloc(env, 1, sizeof *t, err);
    if (t == NULL) {
        return GD_NOMEM;
    }
    t->kv = (gd_kv){.env = env, .calls = &CALLS, .options = *options};
    t->guard = -1;
    gd_status s = load_library(&t->mdb, err);
    if (s == GD_OK && snprintf(t->name, sizeof t->name, "%s", path) >=
                          (int)sizeof t->name) {
        s = gd_fail(err, GD_INVALID, "the path %.100s... is too long", path);
    }
    if (s == GD_OK) {
        s = take_guard(t, err);
    }
    if (s == GD_OK) {
        s = require_file(t, "", err);
    }
    if (s == GD_OK) {
        s = require_file(t, "-lock", err);
    }
    if (s == GD_OK) {
        s = open_anew_if_damaged(t, err);
    }
    if (s != GD_OK) {
        lmdb_close(&t->kv);
        return s;
    }
    *kv = &t->kv;
    return GD_OK;
}

/* Both files: processes that have the old ones keep both. */
gd_status
gd_lmdb_remove(const gd_env *env, const char *path, gd_error *err)
{
    char lock[PATH_ROOM + 8];
    snprintf(lock, sizeof lock, "%s-lock", path);
    GD_TRY(gd_kv_remove_file(env, path, err));
    return gd_kv_remove_file(env, lock, err);
}

#else

gd_status
gd_lmdb_open(const gd_env *env, const char *path, const gd_kv_options *options,
             gd_kv **kv, gd_error *err)
{
    (void)env;
    (void)path;
    (void)options;
    (void)kv;
    return gd_fail(err, GD_NOTFOUND,
                   "this build has no support of LMDB; build it where the "
                   "headers are installed (Debian: liblmdb-dev, Fedora: "
                   "lmdb-devel)");
}

gd_status
gd_lmdb_remove(const gd_env *env, const char *path, gd_error *err)
{
    (void)env;
    (void)path;
    (void)err;
    return GD_OK;
}

#endif
