/* SPDX-License-Identifier: Apache-2.0 */
/*
 * storeindex.c - hints from a key-value store (see hintindex.h).
 *
 * A key is the first 8 bytes of a fingerprint, a value its address.  The key of
 * all ones has the cursor of the rebuild: bit 63 is set, as in no address, bit
 * 62 says whether it is complete, and the rest is the last group read.  A block
 * with such a fingerprint would only start the rebuild again.
 *
 * With LMDB every addition is committed, since other processes wait for that,
 * and want to find it.  The others commit after so many additions, and when
 * they are closed: a crash loses the hints since then.  Only one process has
 * such a store.  So when it is opened, the rebuild goes on with the last group
 * that was read: the groups behind it hold what was lost, and what others
 * stored meanwhile.
 *
 * Each user of a store holds a shared lock on a byte of the file path.users,
 * and writes to that file: who gets the lock exclusively may remove the store,
 * and the file last (repository/filters.py).
 */
#include "engine/handle/hintindex.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>

#include "engine/base/coding.h"

enum {
    AT_ONCE = 512,           /* keys in a batch */
    COMMIT_AFTER = 1 << 18,  /* additions: hints to 1 GiB of blocks */
    REBUILD_LOCK = 0,        /* bytes of the file path.users */
    USE_LOCK = 1,
    SLOT_BITS = 15,
    PATH_ROOM = 4096,
};

#define CURSOR_KEY UINT64_MAX
#define CURSOR (UINT64_C(1) << 63)
#define COMPLETE (UINT64_C(1) << 62)

typedef struct store_index {
    gd_hintindex index;
    const gd_env *env;
    gd_kv_backend backend;
    gd_kv_options options;
    char path[PATH_ROOM];
    int lock; /* path.users; -1: INRAM, which no other process has */
    pthread_mutex_t mutex;      /* guards all below */
    gd_kv *kv;         /* NULL: it failed */
    uint64_t pending;  /* additions not committed */
    uint64_t lost;     /* additions that failed */
    uint32_t rebuilt;  /* the last group whose hints were added */
    bool complete;
    bool rebuilding;   /* a thread of this process holds the lock */
} store_index;

static store_index *
of(gd_hintindex *index)
{
    return (store_index *)index;
}

/* ---- keys and values ---- */

static uint64_t
key_of(const gd_fingerprint *fp)
{
    return gd_get64(fp->bytes);
}

static uint64_t
value_of(gd_address address)
{
    return (uint64_t)address.group << SLOT_BITS | address.slot;
}

/* False if no block can have this address. */
static bool
address_of(uint64_t value, gd_address *address)
{
    *address = (gd_address){(uint32_t)(value >> SLOT_BITS),
                            (uint32_t)value & (GD_MAX_SLOTS - 1)};
    return value >> SLOT_BITS <= GD_MAX_GROUP && address->group != 0;
}

/* ---- the cursor ---- */

static void
read_cursor(store_index *x)
{
    uint64_t key = CURSOR_KEY, value;
    x->rebuilt = 0;
    x->complete = false;
    if (x->kv != NULL &&
        gd_kv_get_batch(x->kv, &key, &value, 1, NULL) == GD_OK &&
        (value & CURSOR) != 0 &&
        (value & ~(CURSOR | COMPLETE)) <= GD_MAX_GROUP) {
        x->rebuilt = (uint32_t)value;
        x->complete = (value & COMPLETE) != 0;
    }
    if (x->backend != GD_KV_LMDB && x->complete) {
        x->rebuilt -= x->rebuilt > 0;
        x->complete = false;
    }
}

/* ---- failures ---- */

static gd_status
open_store(store_index *x, gd_error *err)
{
    return gd_kv_open(x->env, x->backend, x->path, &x->options, &x->kv, err);
}

/* A damaged store is replaced by an empty one.  If that fails, the index goes on
 * without a store, until the next rebuild opens it again. */
static void
note_failure(store_index *x, gd_status s)
{
    gd_kv_close(x->kv);
    x->kv = NULL;
    x->pending = 0;
    if (s == GD_CORRUPT &&
        gd_kv_remove(x->env, x->backend, x->path, NULL) == GD_OK) {
        (void)open_store(x, NULL);
    }
    x->rebuilt = 0;
    x->complete = false;
}

static void
commit(store_index *x)
{
    gd_status s = x->kv == NULL ? GD_OK : gd_kv_commit(x->kv, NULL);
    x->pending = 0;
    if (s != GD_OK) {
        note_failure(x, s);
    }
}

/* ---- finding and adding ---- */

static void
find(gd_hintindex *index, const gd_fingerprint *const *fps, size_t count,
     gd_hint_taker *take, void *arg)
{
    store_index *x = of(index);
    uint64_t keys[AT_ONCE], values[AT_ONCE];
    for (size_t at = 0, n; at < count; at += n) {
        n = count - at < AT_ONCE ? count - at : AT_ONCE;
        for (size_t i = 0; i < n; i++) {
            keys[i] = key_of(fps[at + i]);
        }
        pthread_mutex_lock(&x->mutex);
        gd_status s = x->kv == NULL
                          ? GD_CLOSED
                          : gd_kv_get_batch(x->kv, keys, values, n, NULL);
        if (x->kv != NULL && s != GD_OK) {
            note_failure(x, s);
        }
        pthread_mutex_unlock(&x->mutex);
        gd_address address;
        for (size_t i = 0; s == GD_OK && i < n; i++) {
            if (address_of(values[i], &address)) {
                take(arg, at + i, address);
            }
        }
    }
}

/* The block is stored again, and its new address takes the place. */
static void
reject(gd_hintindex *index, const gd_fingerprint *fp, gd_address hint)
{
    (void)index;
    (void)fp;
    (void)hint;
}

static void
put(store_index *x, const gd_kv_pair *pairs, size_t count)
{
    gd_status s = x->kv == NULL ? GD_CLOSED
                                : gd_kv_put_batch(x->kv, pairs, count, NULL);
    x->pending += count;
    if (s != GD_OK) {
        x->lost += count;
    }
    /* A store that is full stays: it has hints. */
    if (x->kv != NULL && s != GD_OK && s != GD_NOSPACE) {
        note_failure(x, s);
    }
}

static void
add(gd_hintindex *index, uint32_t group, uint32_t first,
    const gd_entry *entries, uint32_t count)
{
    store_index *x = of(index);
    gd_kv_pair pairs[AT_ONCE];
    size_t n = 0;
    pthread_mutex_lock(&x->mutex);
    for (uint32_t i = 0; i < count; i++) {
        if (entries[i].state == GD_ENTRY_LIVE) {
            pairs[n++] =
                (gd_kv_pair){key_of(&entries[i].fingerprint),
                             value_of((gd_address){group, first + i})};
        }
        if (n == AT_ONCE || (n > 0 && i + 1 == count)) {
            put(x, pairs, n);
            n = 0;
        }
    }
    if (x->backend == GD_KV_LMDB || x->pending >= COMMIT_AFTER) {
        commit(x);
    }
    pthread_mutex_unlock(&x->mutex);
}

/* ---- rebuilding ---- */

static bool
rebuild_lock(gd_hintindex *index)
{
    store_index *x = of(index);
    pthread_mutex_lock(&x->mutex);
    bool got = !x->rebuilding &&
               (x->lock < 0 || x->env->lock(x->env, x->lock, REBUILD_LOCK,
                                            F_WRLCK) == 0);
    if (got) {
        bool failed = x->kv == NULL && open_store(x, NULL) == GD_OK;
        x->rebuilding = true;
        if (failed || x->backend == GD_KV_LMDB) { /* others may have gone on */
            read_cursor(x);
        }
    }
    pthread_mutex_unlock(&x->mutex);
    return got;
}

static void
rebuild_unlock(gd_hintindex *index)
{
    store_index *x = of(index);
    pthread_mutex_lock(&x->mutex);
    if (x->lock >= 0) {
        x->env->lock(x->env, x->lock, REBUILD_LOCK, F_UNLCK);
    }
    x->rebuilding = false;
    pthread_mutex_unlock(&x->mutex);
}

static void
rebuild_set(gd_hintindex *index, uint32_t group, bool complete)
{
    store_index *x = of(index);
    gd_kv_pair cursor = {CURSOR_KEY,
                         CURSOR | (complete ? COMPLETE : 0) | group};
    pthread_mutex_lock(&x->mutex);
    if (complete) {
        commit(x);
    }
    if (x->kv != NULL) {
        x->rebuilt = group;
        x->complete = complete;
    }
    if (x->kv != NULL && x->pending == 0) {
        put(x, &cursor, 1);
        if (complete || x->backend == GD_KV_LMDB) {
            commit(x);
        }
    }
    pthread_mutex_unlock(&x->mutex);
}

/* Replaces the store by an empty one.  Other processes that have the old one
 * keep it until they end. */
static void
clear(gd_hintindex *index)
{
    pthread_mutex_lock(&of(index)->mutex);
    note_failure(of(index), GD_CORRUPT);
    pthread_mutex_unlock(&of(index)->mutex);
}

static void
get_stats(gd_hintindex *index, gd_filter_stats *stats)
{
    store_index *x = of(index);
    gd_kv_stats counts = {0};
    pthread_mutex_lock(&x->mutex);
    if (x->kv != NULL) {
        gd_kv_get_stats(x->kv, &counts);
    }
    *stats = (gd_filter_stats){
        .bytes = counts.memory,
        .places = x->options.capacity,
        .dropped = counts.dropped + x->lost,
        .rebuilt = x->rebuilt,
        .complete = x->complete,
    };
    pthread_mutex_unlock(&x->mutex);
}

/* ---- opening and closing ---- */

/* A full disk does not matter here. */
static void
note_use(const store_index *x)
{
    (void)gd_write_full(x->env, x->lock, (const uint8_t[1]){0}, 1, 0, x->path,
                        NULL);
}

static void
close_index(gd_hintindex *index)
{
    store_index *x = of(index);
    commit(x);
    gd_kv_close(x->kv);
    if (x->lock >= 0) {
        note_use(x);
        x->env->close(x->env, x->lock);
    }
    pthread_mutex_destroy(&x->mutex);
    x->env->release(x->env, x);
}

static gd_status
begin_use(store_index *x, gd_error *err)
{
    const gd_env *env = x->env;
    char path[PATH_ROOM + 8];
    struct stat here, there;
    snprintf(path, sizeof path, "%s.users", x->path);
    gd_status s = gd_open(env, AT_FDCWD, path, O_RDWR | O_CREAT, 0600,
                          &x->lock, err);
    if (s != GD_OK) {
        return s;
    }
    int rc = env->lock(env, x->lock, USE_LOCK, F_RDLCK);
    if (rc == 0) {
        rc = env->fstat(env, x->lock, &here);
    }
    if (rc == 0) {
        rc = env->fstatat(env, AT_FDCWD, path, &there);
    }
    if (rc == -EAGAIN || rc == -EACCES || rc == -ENOENT ||
        (rc == 0 && here.st_ino != there.st_ino)) {
        return gd_fail(err, GD_BUSY,
                       "%s is being removed, as nobody used it: try again",
                       x->path);
    }
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot lock %s", path);
    }
    note_use(x);
    return GD_OK;
}

static gd_status
open_files(store_index *x, gd_error *err)
{
    gd_status s = x->backend == GD_KV_INRAM ? GD_OK : begin_use(x, err);
    if (s == GD_OK) {
        s = open_store(x, err);
    }
    if (s == GD_OK) {
        read_cursor(x);
    }
    return s;
}

gd_status
gd_hintindex_of_store(const gd_env *env, gd_kv_backend backend,
                      const char *path, const gd_kv_options *options,
                      gd_hintindex **index, gd_error *err)
{
    store_index *x = gd_calloc(env, 1, sizeof *x, err);
    if (x == NULL) {
        return GD_NOMEM;
    }
    x->index = (gd_hintindex){close_index,    find,        reject, add,
                              rebuild_lock,   rebuild_unlock, rebuild_set,
                              clear,          get_stats,   true};
    x->env = env;
    x->backend = backend;
    x->options = *options;
    x->lock = -1;
    pthread_mutex_init(&x->mutex, NULL);
    gd_status s = GD_OK;
    if (snprintf(x->path, sizeof x->path, "%s", path) >=
        (int)sizeof x->path) {
        s = gd_fail(err, GD_INVALID, "the path %.100s... is too long", path);
    }
    if (s == GD_OK) {
        s = open_files(x, err);
    }
    if (s != GD_OK) {
        close_index(&x->index);
        return s;
    }
    *index = &x->index;
    return GD_OK;
}
