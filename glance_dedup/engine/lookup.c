/*
 * lookup.c - see lookup.h.
 */
#include "lookup.h"

#include <string.h>

#include "coding.h"

enum {
    COMPARES = 8,  /* of one block against its namesakes in one store */
    TALLIES = 256, /* groups counted per batch; further ones are ignored */
    CONFIRMED_AT_ONCE = 256, /* entries read together */
};

typedef struct tally {
    uint32_t group;
    uint32_t hints;
} tally;

struct gd_lookup {
    gd_repo *repo;
    gd_scope scope;
    gd_groupmap shared; /* 1: we hold the group's shared lock */
    gd_fpstore *stores[GD_CACHED_STORES];
    uint64_t hit_at[GD_CACHED_STORES]; /* the batch of the last hit */
    int store_count;
    int last; /* the store that gave the last hit: tried first */
    uint64_t batch;
    tally tallies[TALLIES];
    size_t tally_count;
    /* For comparing by value: the segment read last. */
    gd_coder *coder;
    uint8_t *in, *plain;
    uint32_t plain_group, plain_segment;
    gd_segment_header plain_header;
};

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
    gd_status s = GD_OK;
    if (repo->params.by_value) {
        s = gd_coder_open(env, &lookup->coder, err);
        lookup->in = gd_calloc(env, GD_SEGMENT_HEADER + GD_SEGMENT_MAX, 1, err);
        lookup->plain = gd_calloc(env, GD_SEGMENT_MAX, 1, err);
        if (lookup->in == NULL || lookup->plain == NULL) {
            s = GD_NOMEM;
        }
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
    for (int i = 0; i < lookup->store_count; i++) {
        gd_fpcache_return_store(repo->cache, lookup->stores[i]);
    }
    for (size_t i = 0; i < lookup->shared.places; i++) {
        if (lookup->shared.items[i].count > 0) {
            gd_locks_unshare(repo->locks, lookup->shared.items[i].group);
        }
    }
    gd_groupmap_free(&lookup->shared);
    gd_coder_close(repo->env, lookup->coder);
    repo->env->release(repo->env, lookup->in);
    repo->env->release(repo->env, lookup->plain);
    repo->env->release(repo->env, lookup);
}

/* ---- comparing by value ---- */

static gd_status
read_plain(gd_lookup *lookup, const gd_group *group, const gd_entry *entry,
           uint32_t slot)
{
    if (lookup->plain_group == group->number &&
        lookup->plain_segment == entry->segment) {
        return gd_group_match_segment(group, entry, slot,
                                      &lookup->plain_header, NULL);
    }
    lookup->plain_group = 0;
    gd_status s = gd_group_read_segment(group, entry, slot, lookup->coder,
                                        lookup->in, lookup->plain,
                                        &lookup->plain_header, NULL);
    if (s == GD_OK) {
        lookup->plain_group = group->number;
        lookup->plain_segment = entry->segment;
    }
    return s;
}

/* Anything that is wrong with the stored block makes it unequal. */
static bool
equals_stored(gd_lookup *lookup, gd_address address, const gd_block *block)
{
    gd_group *group;
    gd_entry entry;
    bool equal = false;
    if (gd_fpcache_group(lookup->repo->cache, address.group, false, &group,
                         NULL) != GD_OK) {
        return false;
    }
    atomic_fetch_add(&lookup->repo->counters.compares, 1);
    if (gd_group_read_entries(group, address.slot, 1, &entry, NULL) == GD_OK &&
        entry.state == GD_ENTRY_LIVE && entry.plain_length == block->length &&
        gd_fingerprint_equal(&entry.fingerprint, &block->fingerprint) &&
        read_plain(lookup, group, &entry, address.slot) == GD_OK) {
        equal = memcmp(lookup->plain + entry.plain_offset, block->data,
                       block->length) == 0;
    }
    gd_fpcache_return_group(lookup->repo->cache, group);
    return equal;
}

/* ---- probing the stores at hand ---- */

static bool
probe_store(gd_lookup *lookup, int index, gd_block *block)
{
    const gd_fpstore *store = lookup->stores[index];
    uint32_t probe = 0, slot;
    for (int tries = 0;
         tries < COMPARES &&
         gd_fpstore_find(store, &block->fingerprint, &probe, &slot);
         tries++) {
        gd_address address = {store->group, slot};
        if (!lookup->repo->params.by_value ||
            equals_stored(lookup, address, block)) {
            block->address = address;
            lookup->hit_at[index] = lookup->batch;
            lookup->last = index;
            return true;
        }
    }
    return false;
}

static bool
probe_all(gd_lookup *lookup, gd_block *block)
{
    int first = lookup->last;
    if (first < lookup->store_count && probe_store(lookup, first, block)) {
        return true;
    }
    for (int i = 0; i < lookup->store_count; i++) {
        if (i != first && probe_store(lookup, i, block)) {
            return true;
        }
    }
    return false;
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
count_hint(gd_lookup *lookup, uint32_t group)
{
    for (size_t i = 0; i < lookup->tally_count; i++) {
        if (lookup->tallies[i].group == group) {
            lookup->tallies[i].hints++;
            return;
        }
    }
    if (lookup->tally_count < TALLIES) {
        lookup->tallies[lookup->tally_count++] = (tally){group, 1};
    }
}

static void
drop_store(gd_lookup *lookup, int at)
{
    gd_fpcache_return_store(lookup->repo->cache, lookup->stores[at]);
    lookup->store_count--;
    lookup->stores[at] = lookup->stores[lookup->store_count];
    lookup->hit_at[at] = lookup->hit_at[lookup->store_count];
}

/* Asks the filter for a block that no store at hand has.  A hint to a store at
 * hand is a false one, or we would have found the block, unless the slot was
 * published after the store was loaded: then the store is given back, to be
 * loaded anew. */
static void
take_hints(gd_lookup *lookup, const gd_block *block)
{
    gd_filter *filter = lookup->repo->filter;
    gd_counters *counters = &lookup->repo->counters;
    gd_address hints[GD_FILTER_CANDIDATES];
    size_t count = gd_filter_lookup(filter, &block->fingerprint, hints);
    if (count > 0) {
        atomic_fetch_add(&counters->candidates, count);
    }
    for (size_t i = 0; i < count; i++) {
        int at = store_of(lookup, hints[i].group);
        if (at >= 0 && hints[i].slot < lookup->stores[at]->count) {
            atomic_fetch_add(&counters->false_candidates, 1);
            gd_filter_remove(filter, &block->fingerprint, hints[i]);
            continue;
        }
        if (at >= 0) {
            drop_store(lookup, at);
        }
        count_hint(lookup, hints[i].group);
    }
}

/* ---- loading stores ---- */

static uint32_t
take_most_hinted(gd_lookup *lookup)
{
    size_t best = 0;
    for (size_t i = 1; i < lookup->tally_count; i++) {
        if (lookup->tallies[i].hints > lookup->tallies[best].hints) {
            best = i;
        }
    }
    uint32_t group = lookup->tallies[best].group;
    lookup->tallies[best] = lookup->tallies[--lookup->tally_count];
    return group;
}

/* Mostly answered by a file that is open.  A group keeps its scope. */
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

/* The shared lock first, then the entries (N7.2). */
static gd_status
lock_group(gd_lookup *lookup, uint32_t group)
{
    uint32_t *held = gd_groupmap_at(&lookup->shared, group, NULL);
    if (held == NULL) {
        return GD_NOMEM;
    }
    if (*held != 0) {
        return GD_OK;
    }
    gd_status s = gd_locks_share(lookup->repo->locks, group, NULL);
    if (s == GD_OK) {
        *held = 1;
    } else {
        atomic_fetch_add(&lookup->repo->counters.lock_refusals, 1);
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

/* -1: it cannot be had now, which counts as a miss. */
static int
load_store(gd_lookup *lookup, uint32_t group)
{
    gd_fpstore *store;
    bool cold;
    if (!is_in_scope(lookup, group) || lock_group(lookup, group) != GD_OK ||
        gd_fpcache_store(lookup->repo->cache, group, &store, &cold, NULL) !=
            GD_OK) {
        return -1;
    }
    if (cold) {
        atomic_fetch_add(&lookup->repo->counters.cold_loads, 1);
    }
    int at = place_for_store(lookup);
    lookup->stores[at] = store;
    lookup->hit_at[at] = lookup->batch;
    return at;
}

static void
load_hinted_stores(gd_lookup *lookup, gd_block *blocks, size_t count,
                   unsigned most)
{
    for (unsigned loads = 0; lookup->tally_count > 0; loads++) {
        if (loads == most) {
            atomic_fetch_add(&lookup->repo->counters.capped_loads,
                             lookup->tally_count);
            return;
        }
        int at = load_store(lookup, take_most_hinted(lookup));
        for (size_t i = 0; at >= 0 && i < count; i++) {
            if (blocks[i].address.group == 0) {
                (void)probe_store(lookup, at, &blocks[i]);
            }
        }
    }
}

void
gd_lookup_batch(gd_lookup *lookup, gd_block *blocks, size_t count,
                unsigned loads)
{
    lookup->batch++;
    lookup->tally_count = 0;
    for (size_t i = 0; i < count; i++) {
        blocks[i].address = (gd_address){0, 0};
        if (!probe_all(lookup, &blocks[i]) && lookup->repo->filter != NULL) {
            take_hints(lookup, &blocks[i]);
        }
    }
    load_hinted_stores(lookup, blocks, count, loads);
}

/* ---- confirming ---- */

/* Blocks, from the first, at consecutive addresses. */
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

static bool
is_block(const gd_entry *entry, const gd_block *block)
{
    return entry->state == GD_ENTRY_LIVE &&
           entry->plain_length == block->length &&
           gd_fingerprint_equal(&entry->fingerprint, &block->fingerprint);
}

/* What is not published may not be durable, whatever its entry says (I1). */
static gd_status
confirm_run(gd_lookup *lookup, gd_block *blocks, size_t count, gd_error *err)
{
    gd_group *group;
    gd_published record;
    gd_entry entries[CONFIRMED_AT_ONCE];
    gd_address first = blocks->address;
    gd_status s = gd_fpcache_group(lookup->repo->cache, first.group, true,
                                   &group, err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_scope_equal(&group->scope, &lookup->scope)
            ? gd_group_read_published(group, &record, err)
            : GD_NOTFOUND;
    if (s == GD_OK) {
        s = gd_group_read_entries(group, first.slot, (uint32_t)count, entries,
                                  err);
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        if (first.slot + i >= record.count ||
            !is_block(&entries[i], &blocks[i])) {
            blocks[i].address = (gd_address){0, 0};
        }
    }
    gd_fpcache_return_group(lookup->repo->cache, group);
    return s;
}

gd_status
gd_lookup_confirm(gd_lookup *lookup, gd_block *blocks, size_t count,
                  gd_error *err)
{
    gd_status result = GD_OK;
    for (size_t i = 0; i < count;) {
        size_t n = 1;
        if (blocks[i].address.group != 0) {
            n = count_run(blocks + i, count - i);
            gd_error why;
            gd_status s = confirm_run(lookup, blocks + i, n, &why);
            if (s != GD_OK && s != GD_NOTFOUND && s != GD_CORRUPT &&
                s != GD_VERSION && result == GD_OK) {
                result = s;
                *err = why;
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

bool
gd_lookup_holds(const gd_lookup *lookup, uint32_t group)
{
    return gd_groupmap_get(&lookup->shared, group) != 0;
}
