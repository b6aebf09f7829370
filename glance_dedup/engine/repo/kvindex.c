/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvindex.c - hints from a key-value store (see hintindex.h).
 *
 * A key is the first 8 bytes of a fingerprint, a value its address.  The keys
 * from all ones downwards have the words of the position (position.h), with bit
 * 63 set, as in no address.  A block with such a fingerprint would only have
 * all groups read again.
 *
 * With LMDB every addition is committed, since other processes wait for that,
 * and want to find it.  The others commit after so many additions, and when
 * they are closed: a crash loses the hints since then.  The position is put
 * behind the hints that it stands for (gd_kv_put_behind), so what a crash has
 * lost is read again.
 *
 * Each user of a store holds a shared lock on a byte of the file path.users,
 * and writes to that file: the process that gets the lock exclusively may
 * remove the store, and the file last (repository/filters.py).  LMDB's users
 * share their last scan of the groups there.
 */
#include "engine/repo/hintindex.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/coding.h"

enum {
    AT_ONCE = 512,           /* keys in a batch */
    COMMIT_AFTER = 1 << 18,  /* additions: hints to 1 GiB of blocks */
    REBUILD_LOCK = 0,        /* bytes of the file path.users */
    USE_LOCK = 1,
    LOOK_AT = 8, /* offset in it, and length: a gd_look */
    LOOK_SIZE = 24,
    SLOT_BITS = 15,
    PATH_ROOM = 4096,
};

#define POSITION (UINT64_C(1) << 63)

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
    gd_position position;
    uint64_t stored[GD_POSITION_WORDS]; /* in kv, as far as is known */
    bool moved;        /* the position differs from the stored one */
    uint64_t loaded;   /* the epoch of the last load */
    gd_look look;      /* not LMDB's */
    bool rebuilding;   /* a thread of this process holds the lock */
    /* The groups that this process has published; an epoch lasts as long as
     * kv. */
    gd_self_published own;
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

/* ---- the position ---- */

static void
read_words(store_index *x, uint64_t *words, size_t first, size_t count)
{
    uint64_t keys[GD_POSITION_WORDS] = {0};
    for (size_t i = 0; i < count; i++) {
        keys[i] = UINT64_MAX - first - i;
    }
    if (gd_kv_get_batch(x->kv, keys, words + first, count, NULL) != GD_OK) {
        memset(words + first, 0, count * sizeof *words);
    }
    for (size_t i = first; i < first + count; i++) {
        x->stored[i] = words[i];
        words[i] &= ~POSITION;
    }
}

static void
read_position(store_index *x)
{
    uint64_t words[GD_POSITION_WORDS] = {0};
    memset(&x->position, 0, sizeof x->position);
    memset(x->stored, 0, sizeof x->stored);
    x->moved = false;
    if (x->kv != NULL) {
        read_words(x, words, 0, GD_POSITION_HEAD);
        read_words(x, words, GD_POSITION_HEAD,
                   gd_position_length(words) - GD_POSITION_HEAD);
        (void)gd_position_decode(words, &x->position);
    }
}

/* Puts the words that changed, behind the hints that they stand for. */
static gd_status
put_position(store_index *x)
{
    uint64_t words[GD_POSITION_WORDS];
    gd_kv_pair pairs[GD_POSITION_WORDS];
    size_t n = 0, length = gd_position_encode(&x->position, words);
    for (size_t i = 0; i < length; i++) {
        if (x->stored[i] != (words[i] | POSITION)) {
            x->stored[i] = words[i] | POSITION;
            pairs[n++] = (gd_kv_pair){UINT64_MAX - i, x->stored[i]};
        }
    }
    x->moved = false;
    gd_status s = n == 0 ? GD_OK : gd_kv_put_behind(x->kv, pairs, n, NULL);
    /* A store that is full stays: it has hints. */
    return s == GD_NOSPACE ? GD_OK : s;
}

/* ---- failures ---- */

static gd_status
open_store(store_index *x, gd_error *err)
{
    GD_TRY(gd_kv_open(x->env, x->backend, x->path, &x->options, &x->kv,
                      err));
    read_position(x);
    gd_self_published_begin_epoch(&x->own);
    return GD_OK;
}

/* A damaged store is replaced by an empty one.  If that fails, the index goes
 * on without a store, until the next scan of the groups opens it again. */
static void
note_failure(store_index *x, gd_status s)
{
    gd_self_published_end_epoch(&x->own);
    gd_kv_close(x->kv);
    x->kv = NULL;
    x->pending = 0;
    x->look = (gd_look){0};
    read_position(x);
    if (s == GD_CORRUPT &&
        gd_kv_remove(x->env, x->backend, x->path, NULL) == GD_OK) {
        (void)open_store(x, NULL);
    }
}

static void
commit(store_index *x)
{
    if (x->kv == NULL) {
        return;
    }
    gd_status s = x->moved ? put_position(x) : GD_OK;
    if (s == GD_OK) {
        s = gd_kv_commit(x->kv, NULL);
    }
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
put_range(store_index *x, const gd_entry_range *range)
{
    gd_kv_pair pairs[AT_ONCE];
    size_t n = 0;
    for (uint32_t i = 0; i < range->count; i++) {
        const gd_entry *entry = &range->entries[i];
        if (gd_entry_is_shareable(entry)) {
            pairs[n++] = (gd_kv_pair){
                key_of(&entry->fingerprint),
                value_of((gd_address){range->group, range->first + i})};
        }
        if (n == AT_ONCE || (n > 0 && i + 1 == range->count)) {
            put(x, pairs, n);
            n = 0;
        }
    }
}

static void
add(gd_hintindex *index, const gd_entry_range *range)
{
    store_index *x = of(index);
    pthread_mutex_lock(&x->mutex);
    put_range(x, range);
    if (x->backend == GD_KV_LMDB || x->pending >= COMMIT_AFTER) {
        commit(x);
    }
    pthread_mutex_unlock(&x->mutex);
}

static void
add_own(gd_hintindex *index, const gd_entry_range *range)
{
    gd_self_published *own = &of(index)->own;
    uint64_t epoch = gd_self_published_epoch(own);
    add(index, range);
    gd_self_published_add(own, epoch, range->group, range->first,
                          range->first + range->count);
}

static void
find_own(gd_hintindex *index, uint32_t group, uint32_t *first, uint32_t *end)
{
    gd_self_published_find(&of(index)->own, group, first, end);
}

/* ---- following the groups ---- */

static bool
rebuild_lock(gd_hintindex *index)
{
    store_index *x = of(index);
    pthread_mutex_lock(&x->mutex);
    bool got = !x->rebuilding &&
               (x->lock < 0 || x->env->lock(x->env, x->lock, REBUILD_LOCK,
                                            F_WRLCK) == 0);
    if (got) {
        x->rebuilding = true;
        if (x->kv == NULL) {
            (void)open_store(x, NULL);
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
load(gd_hintindex *index, gd_position *position)
{
    store_index *x = of(index);
    pthread_mutex_lock(&x->mutex);
    if (x->backend == GD_KV_LMDB) { /* others may have gone on */
        read_position(x);
    }
    *position = x->position;
    x->loaded = gd_self_published_epoch(&x->own);
    pthread_mutex_unlock(&x->mutex);
}

static gd_look
read_look(const store_index *x)
{
    uint8_t raw[LOOK_SIZE];
    if (x->backend != GD_KV_LMDB ||
        gd_read_full(x->env, x->lock, raw, sizeof raw, LOOK_AT, x->path,
                     NULL) != GD_OK) {
        return x->look;
    }
    return (gd_look){(int64_t)gd_get64(raw), (int64_t)gd_get64(raw + 8),
                     gd_get32(raw + 16)};
}

static void
write_look(store_index *x, const gd_look *look)
{
    uint8_t raw[LOOK_SIZE] = {0};
    x->look = *look;
    gd_put64(raw, (uint64_t)look->ended_ns);
    gd_put64(raw + 8, (uint64_t)look->listed_ns);
    gd_put32(raw + 16, look->behind);
    if (x->backend == GD_KV_LMDB) {
        (void)gd_write_full(x->env, x->lock, raw, sizeof raw, LOOK_AT,
                            x->path, NULL);
    }
}

/* If the store failed since the load, it lacks earlier additions, and
 * everything is read again. */
static void
save(gd_hintindex *index, const gd_entry_range *last,
     const gd_position *position, const gd_look *look)
{
    store_index *x = of(index);
    pthread_mutex_lock(&x->mutex);
    put_range(x, last);
    if (x->kv != NULL && x->loaded == gd_self_published_epoch(&x->own)) {
        bool first = position->complete && !x->position.complete;
        x->position = *position;
        x->moved = true;
        write_look(x, look);
        if (first || x->backend == GD_KV_LMDB) {
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
        .rebuilt = x->position.newest,
        .complete = x->position.complete,
        .look = read_look(x),
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
    GD_TRY(gd_open(env, AT_FDCWD, path, O_RDWR | O_CREAT, 0600,
                   &x->lock, err));
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
    if (x->backend != GD_KV_INRAM) {
        GD_TRY(begin_use(x, err));
    }
    return open_store(x, err);
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
    x->index = (gd_hintindex){close_index, find, reject, add, add_own,
                              find_own, rebuild_lock, rebuild_unlock, load,
                              save, clear, get_stats, true};
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
