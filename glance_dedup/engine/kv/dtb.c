/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dtb.c - the backend on the disk: a hash table of pages, read and changed
 * through a cache (dtbpage.h, pagecache.h).
 *
 * A key lies in the page that its hash names, or, if that one was full, in one
 * of those after it.  A page records whether it was ever full, so that one read
 * mostly proves that a key is absent.
 *
 * The file is locked as long as it is open: it serves one process.  Its space
 * is not reserved, so a put or a commit may fail with GD_NOSPACE.
 */
#include "engine/kv/backend.h"
#include "engine/kv/pagecache.h"

#include <errno.h>
#include <fcntl.h>

enum {
    LOCK = 0,   /* the byte of the file that its user locks */
    CHAIN = 16, /* pages in which a key may lie */
};

typedef struct dtb {
    gd_kv kv;
    int fd;
    char *name;
    uint64_t pages, seed;
    gd_pagecache *cache;
} dtb;

static dtb *
of(gd_kv *kv)
{
    return (dtb *)kv;
}

static void
dtb_close(gd_kv *kv)
{
    const gd_env *env = kv->env;
    gd_pagecache_close(env, of(kv)->cache);
    if (of(kv)->fd >= 0) {
        env->close(env, of(kv)->fd);
    }
    env->release(env, of(kv)->name);
    env->release(env, kv);
}

static gd_status
dtb_commit(gd_kv *kv, gd_error *err)
{
    return gd_pagecache_sync(of(kv)->cache, err);
}

/* Place of a key, or the one where it may be put. */
typedef struct spot {
    uint64_t page; /* with the key; 0: absent */
    int place;
    uint64_t value;
    uint64_t room; /* the first page with room for it; 0: none */
    uint64_t last; /* the last page that was searched */
    unsigned searched;
} spot;

static uint64_t
next_page(const dtb *t, uint64_t page)
{
    return page == t->pages ? 1 : page + 1;
}

static gd_status
search(dtb *t, uint64_t key, spot *found, gd_error *err)
{
    uint64_t number = gd_dtbpage_home(key, t->seed, t->pages);
    *found = (spot){0};
    for (unsigned i = 0; i < CHAIN && i < t->pages; i++) {
        uint8_t *page;
        GD_TRY(gd_pagecache_get(t->cache, number, false, &page, err));
        found->searched++;
        found->last = number;
        found->place = gd_dtbpage_find(page, key);
        if (found->place >= 0) {
            found->page = number;
            found->value = gd_dtbpage_pair(page, (unsigned)found->place).value;
            return GD_OK;
        }
        if (found->room == 0 && gd_dtbpage_count(page) < GD_DTB_KEYS) {
            found->room = number;
        }
        if (!gd_dtbpage_overflows(page)) {
            return GD_OK;
        }
        number = next_page(t, number);
    }
    return GD_OK;
}

static gd_status
dtb_get(gd_kv *kv, const uint64_t *keys, uint64_t *values, size_t count,
           gd_error *err)
{
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        spot found;
        s = search(of(kv), keys[i], &found, err);
        values[i] = s == GD_OK ? found.value : 0;
    }
    return s;
}

/* All pages searched are full: goes on behind them, and marks each that was
 * left, so that searches follow.  *room stays 0 if there is none. */
static gd_status
extend(dtb *t, const spot *found, uint64_t *room, gd_error *err)
{
    uint64_t number = found->last;
    uint8_t *page;
    for (unsigned i = found->searched;
         *room == 0 && i < CHAIN && i < t->pages; i++) {
        GD_TRY(gd_pagecache_get(t->cache, number, true, &page, err));
        gd_dtbpage_set_overflows(page);
        number = next_page(t, number);
        GD_TRY(gd_pagecache_get(t->cache, number, false, &page, err));
        if (gd_dtbpage_count(page) < GD_DTB_KEYS) {
            *room = number;
        }
    }
    return GD_OK;
}

static gd_status
put_one(dtb *t, gd_kv_pair pair, gd_error *err)
{
    spot found;
    uint8_t *page;
    gd_status s = search(t, pair.key, &found, err);
    if (s == GD_OK && found.page == 0 && found.room == 0) {
        s = extend(t, &found, &found.room, err);
        if (s == GD_OK && found.room == 0) {
            t->kv.stats.dropped++;
            return GD_OK;
        }
    }
    if (s == GD_OK) {
        s = gd_pagecache_get(t->cache,
                             found.page != 0 ? found.page : found.room, true,
                             &page, err);
    }
    if (s == GD_OK && found.page != 0) {
        gd_dtbpage_set_value(page, (unsigned)found.place, pair.value);
    } else if (s == GD_OK) {
        gd_dtbpage_add(page, pair);
    }
    return s;
}

static gd_status
dtb_put(gd_kv *kv, const gd_kv_pair *pairs, size_t count, gd_error *err)
{
    for (size_t i = 0; i < count; i++) {
        GD_TRY(put_one(of(kv), pairs[i], err));
    }
    return GD_OK;
}

/* ---- opening ---- */

static const gd_kv_calls CALLS = {
    dtb_close, dtb_get, dtb_put, dtb_commit, false,
};

/* Opens the file for direct I/O; if the file system has none, through the
 * kernel's page cache. */
static gd_status
open_file(dtb *t, gd_error *err)
{
    const gd_env *env = t->kv.env;
    gd_error why;
    gd_status s = gd_open(env, AT_FDCWD, t->name, O_RDWR | O_CREAT | O_DIRECT,
                          0600, &t->fd, &why);
    if (s != GD_OK && why.sys_errno == EINVAL) {
        s = gd_open(env, AT_FDCWD, t->name, O_RDWR | O_CREAT, 0600, &t->fd,
                    &why);
    }
    if (s != GD_OK && err != NULL) {
        *err = why;
    }
    return s;
}

static gd_status
lock_file(dtb *t, struct stat *st, gd_error *err)
{
    const gd_env *env = t->kv.env;
    int rc = env->fstat(env, t->fd, st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", t->name);
    }
    GD_TRY(gd_kv_require_private(env, st, t->name, err));
    rc = env->lock(env, t->fd, LOCK, F_WRLCK);
    if (rc == -EAGAIN || rc == -EACCES) {
        return gd_fail(err, GD_BUSY,
                       "another process has %s open, which serves only one",
                       t->name);
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot lock %s", t->name) : GD_OK;
}

static gd_status
make_empty(dtb *t, uint8_t *header, uint64_t size, gd_error *err)
{
    const gd_env *env = t->kv.env;
    int rc = env->random(env, &t->seed, sizeof t->seed);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot get random bytes");
    }
    rc = env->ftruncate(env, t->fd, 0);
    if (rc >= 0) {
        rc = env->ftruncate(env, t->fd, size);
    }
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot give %s %llu bytes", t->name,
                             (unsigned long long)size);
    }
    gd_dtbpage_encode_header(header, &t->kv.options, t->seed);
    return gd_write_full(env, t->fd, header, GD_DTB_PAGE, 0, t->name, err);
}

/* Reads the header, or writes one.  page is aligned as direct I/O wants it. */
static gd_status
take_header(dtb *t, const struct stat *st, uint8_t *page, gd_error *err)
{
    uint64_t size = (t->pages + 1) * GD_DTB_PAGE;
    if ((uint64_t)st->st_size == size) {
        GD_TRY(gd_read_full(t->kv.env, t->fd, page, GD_DTB_PAGE, 0,
                            t->name, err));
        if (gd_dtbpage_decode_header(page, &t->kv.options, &t->seed)) {
            return GD_OK;
        }
    }
    return make_empty(t, page, size, err);
}

static gd_status
open_table(dtb *t, gd_error *err)
{
    const gd_env *env = t->kv.env;
    struct stat st;
    gd_status s = open_file(t, err);
    if (s == GD_OK) {
        s = lock_file(t, &st, err);
    }
    uint8_t *memory = s == GD_OK ? gd_alloc(env, 2 * GD_DTB_PAGE, err) : NULL;
    if (memory == NULL) {
        return s == GD_OK ? GD_NOMEM : s;
    }
    s = take_header(t, &st,
                    memory + GD_DTB_PAGE - (uintptr_t)memory % GD_DTB_PAGE,
                    err);
    env->release(env, memory);
    if (s != GD_OK) {
        return s;
    }
    gd_pagecache_file file = {
        .fd = t->fd,
        .name = t->name,
        .pages = t->pages,
        .seed = t->seed,
    };
    return gd_pagecache_open(env, &file, t->kv.options.cache, &t->kv.stats,
                             &t->cache, err);
}

gd_status
gd_dtb_open(const gd_env *env, const char *path, const gd_kv_options *options,
            gd_kv **kv, gd_error *err)
{
    dtb *t = gd_calloc(env, 1, sizeof *t, err);
    if (t == NULL) {
        return GD_NOMEM;
    }
    t->kv = (gd_kv){.env = env, .calls = &CALLS, .options = *options};
    t->fd = -1;
    t->pages = gd_dtb_pages(options->capacity);
    t->name = gd_calloc(env, strlen(path) + 1, 1, err);
    gd_status s = t->name == NULL ? GD_NOMEM : GD_OK;
    if (s == GD_OK) {
        memcpy(t->name, path, strlen(path) + 1);
        s = open_table(t, err);
    }
    if (s != GD_OK) {
        dtb_close(&t->kv);
        return s;
    }
    *kv = &t->kv;
    return GD_OK;
}
