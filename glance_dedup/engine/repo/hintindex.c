/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hintindex.c - see hintindex.h.  Here is the filter's side; kvindex.c has
 * that of the key-value stores.
 */
#include "engine/repo/hintindex.h"

enum { AHEAD = 16 }; /* fingerprints whose memory is fetched while earlier ones
                      * are worked on */

typedef struct filter_index {
    gd_hintindex index;
    const gd_env *env;
    gd_filter *filter;
} filter_index;

static gd_filter *
filter_of(gd_hintindex *index)
{
    return ((filter_index *)index)->filter;
}

static void
close_index(gd_hintindex *index)
{
    const gd_env *env = ((filter_index *)index)->env;
    env->release(env, index);
}

static void
find(gd_hintindex *index, const gd_fingerprint *const *fps, size_t count,
     gd_hint_taker *take, void *arg)
{
    const gd_filter *filter = filter_of(index);
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            gd_filter_prefetch(filter, fps[i + AHEAD]);
        }
        gd_address hints[GD_FILTER_CANDIDATES];
        size_t n = gd_filter_lookup(filter, fps[i], hints);
        for (size_t k = 0; k < n; k++) {
            take(arg, i, hints[k]);
        }
    }
}

static void
reject(gd_hintindex *index, const gd_fingerprint *fp, gd_address hint)
{
    gd_filter_remove(filter_of(index), fp, hint);
}

static void
add(gd_hintindex *index, const gd_entry_range *range)
{
    gd_filter *filter = filter_of(index);
    const gd_entry *entries = range->entries;
    for (uint32_t i = 0; i < range->count; i++) {
        if (i + AHEAD < range->count) {
            gd_filter_prefetch(filter, &entries[i + AHEAD].fingerprint);
        }
        if (gd_entry_is_shareable(&entries[i])) {
            gd_filter_insert(filter, &entries[i].fingerprint,
                             (gd_address){range->group, range->first + i});
        }
    }
}

static void
add_own(gd_hintindex *index, const gd_entry_range *range)
{
    gd_self_published *own = gd_filter_own(filter_of(index));
    uint64_t epoch = gd_self_published_epoch(own);
    add(index, range);
    gd_self_published_add(own, epoch, range->group, range->first,
                          range->first + range->count);
}

static void
find_own(gd_hintindex *index, uint32_t group, uint32_t *first, uint32_t *end)
{
    gd_self_published_find(gd_filter_own(filter_of(index)), group, first, end);
}

static bool
rebuild_lock(gd_hintindex *index)
{
    return gd_filter_rebuild_lock(filter_of(index));
}

static void
rebuild_unlock(gd_hintindex *index)
{
    gd_filter_rebuild_unlock(filter_of(index));
}

static void
load(gd_hintindex *index, gd_position *position)
{
    gd_filter_load(filter_of(index), position);
}

static void
save(gd_hintindex *index, const gd_entry_range *last,
     const gd_position *position, const gd_look *look)
{
    gd_filter *filter = filter_of(index);
    gd_filter_stats before;
    add(index, last);
    gd_filter_get_stats(filter, &before);
    gd_filter_save(filter, position, look);
    if (position->complete && !before.complete) {
        gd_filter_settle(filter);
    }
}

static void
clear(gd_hintindex *index)
{
    gd_filter_clear(filter_of(index));
}

static void
get_stats(gd_hintindex *index, gd_filter_stats *stats)
{
    gd_filter_get_stats(filter_of(index), stats);
}

gd_status
gd_hintindex_of_filter(const gd_env *env, gd_filter *filter,
                       gd_hintindex **index, gd_error *err)
{
    filter_index *x = gd_calloc(env, 1, sizeof *x, err);
    if (x == NULL) {
        return GD_NOMEM;
    }
    *x = (filter_index){
        .index = {close_index, find, reject, add, add_own, find_own,
                  rebuild_lock, rebuild_unlock, load, save, clear, get_stats,
                  false},
        .env = env,
        .filter = filter,
    };
    *index = &x->index;
    return GD_OK;
}
