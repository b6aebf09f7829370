/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lookup.c - see lookup.h.
 */
#include "engine/write/lookup.h"

#include <string.h>

#include "engine/read/compare.h"
#include "engine/write/hints.h"

enum {
    AHEAD = 8,    /* how many blocks ahead memory is fetched */
    CHOSEN_AT_ONCE = 16,     /* stores read in one pass over the disk */
    SEARCHED_AT_ONCE = 512,  /* blocks for which the index is asked together */
    CONFIRMED_AT_ONCE = 256, /* entries read together */
    SCATTERED = 16, /* from so many blocks on, their group's store is loaded */
    MAX_SCATTERED = 1024,
    PROBES = 4, /* runs of blocks in a sample */
    PROBED = 8, /* blocks in each, if the index has hints to all blocks */
};

/* A block, and the hint of an exact index to it. */
typedef struct exact_hint {
    gd_block *block;
    gd_address to;
} exact_hint;

struct gd_lookup {
    gd_repo *repo;
    gd_scope scope;
    gd_groupmap shared; /* 1: we hold the group's shared lock */
    gd_fptable *stores[GD_CACHED_STORES];
    uint64_t hit_at[GD_CACHED_STORES]; /* the batch of the last hit */
    int store_count;
    int last; /* the store of the last hit: tried first */
    uint32_t next_slot; /* behind that hit: tried before anything else */
    uint64_t batch;
    gd_hints *hints;
    exact_hint exact[MAX_SCATTERED]; /* of this batch */
    size_t exact_count;
    uint32_t expected[GD_CACHED_STORES]; /* groups */
    size_t expected_count;
    uint64_t expected_bytes; /* found there */
    /* One for each thread, the caller's last.  NULL unless hits are compared by
     * value. */
    gd_compare **compares;
};

static gd_status
open_compares(gd_lookup *lookup, gd_error *err)
{
    gd_repo *repo = lookup->repo;
    unsigned threads = gd_pool_threads(repo->pool);
    lookup->compares = gd_calloc(repo->env, threads + 1,
                                 sizeof *lookup->compares, err);
    if (lookup->compares == NULL) {
        return GD_NOMEM;
    }
    for (unsigned i = 0; i <= threads; i++) {
        GD_TRY(gd_compare_open(repo, &lookup->compares[i], err));
    }
    return GD_OK;
}

static void
close_compares(gd_lookup *lookup)
{
    gd_repo *repo = lookup->repo;
    for (unsigned i = 0; lookup->compares != NULL &&
                         i <= gd_pool_threads(repo->pool); i++) {
        gd_compare_close(lookup->compares[i]);
    }
    repo->env->release(repo->env, lookup->compares);
}

gd_status
gd_lookup_open(gd_repo *repo, const gd_scope *scope, gd_lookup **out,
               gd_error *err)
{
    const gd_env *env = repo->env;
    gd_lookup *lookup = gd_calloc(env, 1, sizeof *lookup, err);
    if (lookup == NULL) {
        return GD_NOMEM;
    }
    lookup->repo = repo;
    lookup->scope = *scope;
    gd_groupmap_init(&lookup->shared, env);
    gd_status s = gd_hints_open(env, &lookup->hints, err);
    if (s == GD_OK && repo->params.by_value) {
        s = open_compares(lookup, err);
    }
    if (s != GD_OK) {
        gd_lookup_close(lookup);
        return s;
    }
    *out = lookup;
    return GD_OK;
}

void
gd_lookup_close(gd_lookup *lookup)
{
    gd_repo *repo = lookup->repo;
    close_compares(lookup);
    for (int i = 0; i < lookup->store_count; i++) {
        gd_fpcache_return_store(repo->cache, lookup->stores[i]);
    }
    gd_locks_unlock_all_shared(repo->locks, &lookup->shared);
    gd_hints_close(repo->env, lookup->hints);
    repo->env->release(repo->env, lookup);
}

/* ---- probing the stores at hand ---- */

/* Returns whether the block at this address, which has the same fingerprint, is
 * the block (I5).  If it was already compared, block->address is this
 * address. */
static bool
is_equal(gd_lookup *lookup, gd_address address, const gd_block *block)
{
    return lookup->compares == NULL ||
           (block->address.group == address.group &&
            block->address.slot == address.slot) ||
           gd_compare_block(
               lookup->compares[gd_pool_threads(lookup->repo->pool)], address,
               &block->fingerprint, block->data, block->length);
}

static void
count_expected(gd_lookup *lookup, uint32_t group, uint32_t length)
{
    for (size_t i = 0; i < lookup->expected_count; i++) {
        if (lookup->expected[i] == group) {
            lookup->expected_bytes += length;
            return;
        }
    }
}

/* Returns whether the slot has the block's fingerprint. */
static bool
take_hit(gd_lookup *lookup, int index, uint32_t slot, gd_block *block)
{
    gd_address address = {lookup->stores[index]->group, slot};
    if (!is_equal(lookup, address, block)) {
        return false;
    }
    block->address = address;
    lookup->hit_at[index] = lookup->batch;
    lookup->last = index;
    lookup->next_slot = slot + 1;
    count_expected(lookup, address.group, block->length);
    return true;
}

static bool
probe_store(gd_lookup *lookup, int index, gd_block *block)
{
    uint32_t probe = 0, slot;
    while (gd_fptable_find(lookup->stores[index], &block->fingerprint, &probe,
                           &slot)) {
        if (take_hit(lookup, index, slot, block)) {
            return true;
        }
    }
    return false;
}

/* Blocks that are adjacent in an image mostly are in a group, too. */
static bool
probe_next(gd_lookup *lookup, gd_block *block)
{
    int index = lookup->last;
    return index < lookup->store_count &&
           gd_fptable_matches(lookup->stores[index], lookup->next_slot,
                              &block->fingerprint) &&
           take_hit(lookup, index, lookup->next_slot, block);
}

static bool
probe_all(gd_lookup *lookup, gd_block *block)
{
    int first = lookup->last;
    if (probe_next(lookup, block) ||
        (first < lookup->store_count && probe_store(lookup, first, block))) {
        return true;
    }
    for (int i = 0; i < lookup->store_count; i++) {
        if (i != first && probe_store(lookup, i, block)) {
            return true;
        }
    }
    return false;
}

static void
fetch_ahead(const gd_lookup *lookup, const gd_block *block)
{
    for (int i = 0; i < lookup->store_count; i++) {
        gd_fptable_prefetch(lookup->stores[i], &block->fingerprint);
    }
}

/* Both new blocks and duplicates come in runs.  So after a miss the indexes
 * will be needed, and after a hit only the next slot. */
static void
probe_batch(gd_lookup *lookup, gd_block *blocks, size_t count)
{
    bool missed = false;
    for (size_t i = 0; i < count; i++) {
        if (lookup->compares == NULL && blocks[i].address.group != 0) {
            continue;
        }
        if (missed && i + AHEAD < count) {
            fetch_ahead(lookup, &blocks[i + AHEAD]);
        }
        missed = !probe_all(lookup, &blocks[i]);
        if (missed) {
            blocks[i].address = (gd_address){0, 0};
        }
    }
}

/* ---- comparing ahead ---- */

/* Finds a block with this fingerprint: behind the last place, or the first in
 * any loaded store. */
static bool
guess(const gd_lookup *lookup, const gd_fingerprint *fp, int *index,
      uint32_t *slot)
{
    if (*index < lookup->store_count &&
        gd_fptable_matches(lookup->stores[*index], *slot + 1, fp)) {
        ++*slot;
        return true;
    }
    for (int i = 0; i < lookup->store_count; i++) {
        uint32_t probe = 0;
        if (gd_fptable_find(lookup->stores[i], fp, &probe, slot)) {
            *index = i;
            return true;
        }
    }
    return false;
}

void
gd_lookup_compare(gd_lookup *lookup, gd_block *blocks, size_t count,
                  unsigned worker)
{
    int index = lookup->store_count; /* no last place */
    uint32_t slot = 0;
    for (size_t i = 0; lookup->compares != NULL && i < count; i++) {
        gd_block *block = &blocks[i];
        block->address = (gd_address){0, 0};
        if (!guess(lookup, &block->fingerprint, &index, &slot)) {
            continue;
        }
        gd_address address = {lookup->stores[index]->group, slot};
        if (gd_compare_block(lookup->compares[worker], address,
                             &block->fingerprint, block->data,
                             block->length)) {
            block->address = address;
        }
    }
}

static int
store_of(const gd_lookup *lookup, uint32_t group)
{
    for (int i = 0; i < lookup->store_count; i++) {
        if (lookup->stores[i]->group == group) {
            return i;
        }
    }
    return -1;
}

/* ---- hints ---- */

static void
drop_store(gd_lookup *lookup, int at)
{
    gd_fpcache_return_store(lookup->repo->cache, lookup->stores[at]);
    lookup->store_count--;
    lookup->stores[at] = lookup->stores[lookup->store_count];
    lookup->hit_at[at] = lookup->hit_at[lookup->store_count];
}

/* The blocks of one search in the index. */
typedef struct search {
    gd_lookup *lookup;
    gd_block *blocks[SEARCHED_AT_ONCE];
    const gd_fingerprint *fps[SEARCHED_AT_ONCE];
    size_t count;
    size_t candidates;
} search;

/* A hint to a loaded store is false, since otherwise the block would have been
 * found there.  But the slot may have been published after the store was
 * loaded.  Then the store is given back, to be loaded again. */
static void
take_hint(void *arg, size_t i, gd_address to)
{
    search *s = arg;
    gd_lookup *lookup = s->lookup;
    gd_hintindex *index = lookup->repo->index;
    int at = store_of(lookup, to.group);
    s->candidates++;
    if (at >= 0 && to.slot < lookup->stores[at]->count) {
        atomic_fetch_add(&lookup->repo->counters.false_candidates, 1);
        index->reject(index, s->fps[i], to);
        return;
    }
    if (at >= 0) {
        drop_store(lookup, at);
    }
    gd_hints_add(lookup->hints, &s->blocks[i]->address, to.group);
    if (index->exact && lookup->exact_count < MAX_SCATTERED) {
        lookup->exact[lookup->exact_count++] =
            (exact_hint){s->blocks[i], to};
    }
}

static void
run_search(search *s)
{
    gd_hintindex *index = s->lookup->repo->index;
    index->find(index, s->fps, s->count, take_hint, s);
    s->count = 0;
}

/* Asks the index for the blocks that no loaded store has. */
static void
take_hints(gd_lookup *lookup, gd_block *blocks, size_t count)
{
    search s = {.lookup = lookup};
    for (size_t i = 0; i < count; i++) {
        if (blocks[i].address.group == 0) {
            s.blocks[s.count] = &blocks[i];
            s.fps[s.count++] = &blocks[i].fingerprint;
        }
        if (s.count == SEARCHED_AT_ONCE) {
            run_search(&s);
        }
    }
    run_search(&s);
    atomic_fetch_add(&lookup->repo->counters.candidates, s.candidates);
}

/* ---- loading stores ---- */

/* Mostly an open file answers this.  A group keeps its scope. */
static bool
is_in_scope(const gd_lookup *lookup, uint32_t number)
{
    gd_group *group;
    if (gd_fpcache_group(lookup->repo->cache, number, false, &group, NULL) !=
        GD_OK) {
        return false;
    }
    bool is = gd_scope_equal(&group->scope, &lookup->scope);
    gd_fpcache_return_group(lookup->repo->cache, group);
    return is;
}

/* Takes the shared lock first, and reads the entries then (N7.2). */
static gd_status
lock_group(gd_lookup *lookup, uint32_t group)
{
    gd_repo *repo = lookup->repo;
    gd_status s =
        gd_locks_lock_shared_once(repo->locks, &lookup->shared, group, NULL);
    if (s != GD_OK && s != GD_NOMEM) {
        atomic_fetch_add(&repo->counters.lock_refusals, 1);
    }
    return s;
}

static int
place_for_store(gd_lookup *lookup)
{
    if (lookup->store_count < GD_CACHED_STORES) {
        return lookup->store_count++;
    }
    int oldest = 0;
    for (int i = 1; i < lookup->store_count; i++) {
        if (lookup->hit_at[i] < lookup->hit_at[oldest]) {
            oldest = i;
        }
    }
    gd_fpcache_return_store(lookup->repo->cache, lookup->stores[oldest]);
    return oldest;
}

/* Returns false if the store is not available now, which counts as a miss.
 * Otherwise requests it from the disk. */
static bool
prepare_store(gd_lookup *lookup, uint32_t group)
{
    if (!is_in_scope(lookup, group) || lock_group(lookup, group) != GD_OK) {
        return false;
    }
    gd_fpcache_expect_store(lookup->repo->cache, group);
    return true;
}

/* Returns -1 if the store cannot be loaded, which counts as a miss, too. */
static int
load_store(gd_lookup *lookup, uint32_t group)
{
    gd_counters *counters = &lookup->repo->counters;
    gd_fptable *store;
    bool cold;
    if (gd_fpcache_store(lookup->repo->cache, group, &store, &cold, NULL) !=
        GD_OK) {
        return -1;
    }
    if (cold) { /* the group's first page and its entries, in one read */
        atomic_fetch_add(&counters->cold_loads, 1);
        gd_seeks_note(&counters->store, group, 0,
                      GD_STORE_START + gd_fptable_size(store->count));
    }
    int at = place_for_store(lookup);
    lookup->stores[at] = store;
    lookup->hit_at[at] = lookup->batch;
    return at;
}

/* Loads the stores in disk order, except those whose hinted blocks were all
 * found in earlier stores.  Returns how many groups there were: hints may lead
 * to groups that were removed, or are of another scope, and cost no load. */
static size_t
load_chosen(gd_lookup *lookup, const uint32_t *groups, size_t group_count,
            gd_block *blocks, size_t count)
{
    bool ready[CHOSEN_AT_ONCE];
    size_t there = 0;
    for (size_t g = 0; g < group_count; g++) {
        ready[g] = prepare_store(lookup, groups[g]);
        there += ready[g];
    }
    for (size_t g = 0; g < group_count; g++) {
        if (!ready[g] || !gd_hints_want(lookup->hints, groups[g])) {
            continue;
        }
        int at = load_store(lookup, groups[g]);
        for (size_t i = 0; at >= 0 && i < count; i++) {
            if (blocks[i].address.group == 0 &&
                !probe_next(lookup, &blocks[i])) {
                (void)probe_store(lookup, at, &blocks[i]);
            }
        }
    }
    return there;
}

static void
load_hinted_stores(gd_lookup *lookup, gd_block *blocks, size_t count,
                   size_t most)
{
    uint32_t groups[CHOSEN_AT_ONCE];
    size_t n;
    do {
        n = gd_hints_choose(lookup->hints,
                            most < CHOSEN_AT_ONCE ? most : CHOSEN_AT_ONCE,
                            groups);
        most -= load_chosen(lookup, groups, n, blocks, count);
    } while (n > 0);
    atomic_fetch_add(&lookup->repo->counters.capped_loads,
                     gd_hints_left(lookup->hints));
}

/* Reads the entry that an exact index names, where the batch has few blocks of
 * a group: its store would cost more, and have no neighbours to find.  Where
 * blocks are compared by value, the stores are loaded. */
static void
confirm_scattered(gd_lookup *lookup)
{
    gd_error err;
    for (size_t i = 0; i < lookup->exact_count && lookup->compares == NULL;
         i++) {
        const exact_hint *h = &lookup->exact[i];
        if (gd_hints_to(lookup->hints, h->to.group) < SCATTERED &&
            is_in_scope(lookup, h->to.group) &&
            lock_group(lookup, h->to.group) == GD_OK) {
            h->block->address = h->to;
            (void)gd_lookup_confirm(lookup, h->block, 1, &err);
        }
    }
    lookup->exact_count = 0;
}

void
gd_lookup_batch(gd_lookup *lookup, gd_block *blocks, size_t count,
                unsigned loads)
{
    lookup->batch++;
    probe_batch(lookup, blocks, count);
    if (lookup->repo->index != NULL) {
        gd_hints_clear(lookup->hints);
        take_hints(lookup, blocks, count);
        confirm_scattered(lookup);
        load_hinted_stores(lookup, blocks, count, loads);
    }
}

void
gd_lookup_expect(gd_lookup *lookup, const uint32_t *groups, size_t count)
{
    for (size_t i = 0; i < count && i < GD_CACHED_STORES; i++) {
        if (store_of(lookup, groups[i]) < 0 &&
            prepare_store(lookup, groups[i]) &&
            load_store(lookup, groups[i]) >= 0) {
            lookup->expected[lookup->expected_count++] = groups[i];
        }
    }
}

uint64_t
gd_lookup_expected(const gd_lookup *lookup)
{
    return lookup->expected_bytes;
}

/* Returns how many blocks in a row are likely to have PROBED hints among
 * them. */
static size_t
probe_length(const gd_lookup *lookup)
{
    gd_filter_stats stats;
    gd_hintindex *index = lookup->repo->index;
    if (index == NULL) {
        return PROBED;
    }
    index->get_stats(index, &stats);
    return (size_t)PROBED << stats.level;
}

bool
gd_lookup_probe(gd_lookup *lookup, gd_block *blocks, size_t count)
{
    size_t most = probe_length(lookup);
    for (size_t probe = 0; probe < PROBES; probe++) {
        size_t at = probe * count / PROBES;
        size_t n = (probe + 1) * count / PROBES - at;
        n = n < most ? n : most;
        gd_lookup_batch(lookup, blocks + at, n, GD_COLD_LOADS);
        for (size_t i = at; i < at + n; i++) {
            if (blocks[i].address.group != 0) {
                return true;
            }
        }
    }
    return false;
}

/* ---- confirming ---- */

/* Returns how many blocks, from the first, are at consecutive addresses. */
static size_t
count_run(const gd_block *blocks, size_t count)
{
    size_t n = 1;
    while (n < count && n < CONFIRMED_AT_ONCE &&
           blocks[n].address.group == blocks->address.group &&
           blocks[n].address.slot == blocks->address.slot + n) {
        n++;
    }
    return n;
}

/* by_content: the block was not this transaction's own before (I14). */
static bool
is_block(const gd_entry *entry, const gd_block *block, bool by_content)
{
    return (by_content ? gd_entry_is_shareable(entry)
                       : entry->state == GD_ENTRY_LIVE) &&
           entry->plain_length == block->length &&
           gd_fingerprint_equal(&entry->fingerprint, &block->fingerprint);
}

/* An unpublished block may not be durable, whatever its entry has (I1). */
static gd_status
confirm_run(gd_lookup *lookup, gd_block *blocks, size_t count, bool by_content,
            gd_error *err)
{
    gd_group *group;
    gd_published record;
    gd_entry entries[CONFIRMED_AT_ONCE];
    gd_address first = blocks->address;
    GD_TRY(gd_fpcache_group(lookup->repo->cache, first.group, true,
                            &group, err));
    gd_status s = gd_scope_equal(&group->scope, &lookup->scope)
                      ? gd_group_read_published(group, &record, err)
                      : GD_NOTFOUND;
    if (s == GD_OK) {
        s = gd_group_read_entries(group, first.slot, (uint32_t)count, entries,
                                  err);
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        if (first.slot + i >= record.count ||
            !is_block(&entries[i], &blocks[i], by_content)) {
            blocks[i].address = (gd_address){0, 0};
        }
    }
    gd_fpcache_return_group(lookup->repo->cache, group);
    return s;
}

static gd_status
confirm(gd_lookup *lookup, gd_block *blocks, size_t count, bool by_content,
        gd_error *err)
{
    gd_status result = GD_OK;
    for (size_t i = 0; i < count;) {
        size_t n = 1;
        if (blocks[i].address.group != 0) {
            n = count_run(blocks + i, count - i);
            gd_status s = confirm_run(lookup, blocks + i, n, by_content,
                                      result == GD_OK ? err : NULL);
            if (s != GD_OK && s != GD_NOTFOUND && s != GD_CORRUPT &&
                s != GD_VERSION && result == GD_OK) {
                result = s;
            }
            if (s != GD_OK) {
                for (size_t k = i; k < i + n; k++) {
                    blocks[k].address = (gd_address){0, 0};
                }
            }
        }
        i += n;
    }
    return result;
}

gd_status
gd_lookup_confirm(gd_lookup *lookup, gd_block *blocks, size_t count,
                  gd_error *err)
{
    return confirm(lookup, blocks, count, false, err);
}

gd_status
gd_lookup_verify(gd_lookup *lookup, gd_block *blocks, size_t count,
                 gd_error *err)
{
    uint32_t last = 0; /* the group that was asked for */
    bool shared = false;
    for (size_t i = 0; i < count; i++) {
        uint32_t group = blocks[i].address.group;
        if (group != 0 && group != last) {
            last = group;
            shared = is_in_scope(lookup, group) &&
                     lock_group(lookup, group) == GD_OK;
        }
        if (!shared) {
            blocks[i].address = (gd_address){0, 0};
        }
    }
    return confirm(lookup, blocks, count, true, err);
}

bool
gd_lookup_share(gd_lookup *lookup, const gd_scope *scope, uint32_t group)
{
    return gd_scope_equal(scope, &lookup->scope) &&
           lock_group(lookup, group) == GD_OK;
}

bool
gd_lookup_holds(const gd_lookup *lookup, uint32_t group)
{
    return gd_groupmap_get(&lookup->shared, group) != 0;
}
