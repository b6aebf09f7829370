/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inram.c - the backend in memory: a hash table with open addressing.
 *
 * Nothing is on the disk, as in Dmdedup's INRAM: a commit does nothing, and a
 * store that is opened is empty.
 *
 * A fifth of the hash table's places stays free, so that a probe for an absent
 * key ends soon.  The hash has a random key, since uploaders can choose the first
 * bytes of fingerprints.
 */
#include "engine/base/coding.h"
#include "engine/kv/backend.h"

enum { AHEAD = 8 }; /* places fetched while earlier ones are read */

typedef struct inram {
    gd_kv kv;
    gd_kv_pair *pairs; /* value 0: a free place */
    uint64_t places;
    uint64_t used;
    uint64_t seed;
} inram;

static inram *
of(gd_kv *kv)
{
    return (inram *)kv;
}

static void
inram_close(gd_kv *kv)
{
    kv->env->release(kv->env, of(kv)->pairs);
    kv->env->release(kv->env, kv);
}

static gd_status
inram_commit(gd_kv *kv, gd_error *err)
{
    (void)kv;
    (void)err;
    return GD_OK;
}

static uint64_t
home_of(const inram *t, uint64_t key)
{
    uint64_t hash = gd_checksum(&key, sizeof key, t->seed);
    return (uint64_t)(((unsigned __int128)hash * t->places) >> 64);
}

static uint64_t
after(const inram *t, uint64_t place)
{
    return place + 1 == t->places ? 0 : place + 1;
}

/* The key's place, or the free one where it belongs.  There always is one. */
static gd_kv_pair *
find_place(const inram *t, uint64_t key)
{
    uint64_t at = home_of(t, key);
    while (t->pairs[at].value != 0 && t->pairs[at].key != key) {
        at = after(t, at);
    }
    return &t->pairs[at];
}

static gd_status
inram_get(gd_kv *kv, const uint64_t *keys, uint64_t *values, size_t count,
           gd_error *err)
{
    const inram *t = of(kv);
    (void)err;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            __builtin_prefetch(&t->pairs[home_of(t, keys[i + AHEAD])]);
        }
        values[i] = find_place(t, keys[i])->value;
    }
    return GD_OK;
}

static gd_status
inram_put(gd_kv *kv, const gd_kv_pair *pairs, size_t count, gd_error *err)
{
    inram *t = of(kv);
    (void)err;
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            __builtin_prefetch(&t->pairs[home_of(t, pairs[i + AHEAD].key)], 1);
        }
        gd_kv_pair *place = find_place(t, pairs[i].key);
        if (place->value == 0 && t->used == kv->options.capacity) {
            kv->stats.dropped++;
            continue;
        }
        t->used += place->value == 0;
        *place = pairs[i];
    }
    return GD_OK;
}

/* ---- opening ---- */

static const gd_kv_calls CALLS = {
    inram_close, inram_get, inram_put, inram_commit, true,
};

static gd_status
make_table(inram *t, gd_error *err)
{
    gd_kv *kv = &t->kv;
    t->places = kv->options.capacity + kv->options.capacity / 4 + 1;
    kv->stats.memory = t->places * sizeof *t->pairs;
    t->pairs = gd_calloc(kv->env, t->places, sizeof *t->pairs, err);
    if (t->pairs == NULL) {
        return GD_NOMEM;
    }
    int rc = kv->env->random(kv->env, &t->seed, sizeof t->seed);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot get random bytes") : GD_OK;
}

gd_status
gd_inram_open(const gd_env *env, const char *path,
              const gd_kv_options *options, gd_kv **kv, gd_error *err)
{
    (void)path;
    inram *t = gd_calloc(env, 1, sizeof *t, err);
    if (t == NULL) {
        return GD_NOMEM;
    }
    t->kv = (gd_kv){.env = env, .calls = &CALLS, .options = *options};
    gd_status s = make_table(t, err);
    if (s != GD_OK) {
        inram_close(&t->kv);
        return s;
    }
    *kv = &t->kv;
    return GD_OK;
}
