/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fetch.c - see fetch.h.
 */
#include "engine/read/fetch.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/read/spare.h"
#include "engine/repo/segcache.h"

enum {
    BUNDLE = 64,       /* most stretches, or cached segments, at once */
    BUNDLE_CACHED = 4, /* up to this many cached ones, no thread is woken: they
                        * are not decoded any more */
};

void
gd_fetch_open(gd_fetch *fetch, gd_repo *repo, const gd_recipe *recipe,
              const gd_taker *taker)
{
    *fetch = (gd_fetch){.taker = *taker};
    gd_plan_open(&fetch->plan, repo, recipe);
    fetch->plan.zeros = taker->zeros;
    fetch->plan.arg = taker->arg;
}

void
gd_fetch_close(gd_fetch *fetch)
{
    gd_plan_close(&fetch->plan);
}

/* ---- verifying and handing out ---- */

static gd_status
verify_want(const gd_fetch *fetch, const gd_want *want,
            const gd_segment_header *header, const uint8_t *plain,
            gd_error *err)
{
    const gd_entry *entry = &want->entry;
    GD_TRY(gd_group_match_segment(want->group, entry, want->slot,
                                  header, err));
    if (gd_checksum(plain + entry->plain_offset,
                    entry->plain_length, 0) != entry->checksum) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: the block of slot %u, in the segment at offset "
                       "%u, does not match its checksum; %s needs it",
                       want->group->name, want->slot, entry->segment,
                       fetch->plan.recipe->name);
    }
    return GD_OK;
}

/* Hands out all wants of one segment. */
static gd_status
hand_out(const gd_fetch *fetch, const gd_want *wants, size_t count,
         const gd_segment_header *header, const uint8_t *stored,
         const uint8_t *plain, gd_error *err)
{
    const gd_taker *taker = &fetch->taker;
    for (size_t i = 0; i < count; i++) {
        GD_TRY(verify_want(fetch, &wants[i], header, plain, err));
    }
    return taker->segment(taker->arg, wants, count, header,
                          stored, plain, err);
}

/* ---- out of the cache ---- */

/* *taken is false if the segment is not in the cache. */
static gd_status
take_cached(const gd_fetch *fetch, const gd_want *wants, size_t count,
            bool *taken, gd_error *err)
{
    gd_segcache *cache = fetch->plan.repo->segcache;
    gd_cached_segment *segment =
        gd_segcache_get(cache, wants->group, wants->entry.segment);
    *taken = segment != NULL;
    if (segment == NULL) {
        return GD_OK;
    }
    gd_status s = hand_out(fetch, wants, count, &segment->header, NULL,
                           segment->plain, err);
    if (s == GD_CORRUPT) {
        gd_segcache_drop(cache, segment);
    }
    gd_segcache_return(cache, segment);
    return s;
}

/* ---- from the disk ---- */

/* Returns where the segment is to be decoded to: the cache, the place where the
 * taker wants it, or the thread's own buffer. */
static uint8_t *
place_of(const gd_fetch *fetch, const gd_scratch *scratch,
         const gd_want *wants, size_t count, const gd_segment_header *header,
         const gd_cached_segment *kept)
{
    const gd_taker *taker = &fetch->taker;
    uint8_t *place = NULL;
    if (kept != NULL) {
        return kept->plain;
    }
    if (taker->place != NULL) {
        place = taker->place(taker->arg, wants, count, header->plain_length);
    }
    return place != NULL ? place : scratch->plain;
}

/* Handles all wants of one segment; in is its header, followed by its stored
 * bytes. */
static gd_status
take_segment(const gd_fetch *fetch, const gd_scratch *scratch,
             const gd_want *wants, size_t count, const uint8_t *in,
             gd_error *err)
{
    gd_segment_header header;
    const gd_group *group = wants->group;
    uint32_t offset = wants->entry.segment;
    gd_segcache *cache = fetch->plan.repo->segcache;
    gd_cached_segment *kept = NULL;
    gd_status s = gd_segment_header_decode(
        in, GD_SEGMENT_HEADER + (size_t)wants->entry.stored_length,
        &group->bounds, &header, group->name, offset, err);
    if (s == GD_OK) {
        /* Check this before decoding: the lengths are those that were read. */
        s = gd_group_match_segment(group, &wants->entry, wants->slot, &header,
                                   err);
    }
    if (s != GD_OK) {
        return s;
    }
    const uint8_t *behind = in + GD_SEGMENT_HEADER;
    const uint8_t *stored = behind + gd_segment_list_size(&header);
    const uint8_t *plain = stored;
    if (fetch->cached && gd_segcache_takes(cache, &header)) {
        kept = gd_segcache_new(cache, &header);
    }
    if (kept != NULL || header.codec != GD_CODEC_NONE) {
        uint8_t *out = place_of(fetch, scratch, wants, count, &header, kept);
        s = gd_segment_decode(scratch->coder, &header, behind, out,
                              group->name, offset, err);
        plain = out;
    }
    if (s == GD_OK) {
        s = hand_out(fetch, wants, count, &header, stored, plain, err);
    }
    if (kept != NULL) {
        if (s == GD_OK) {
            gd_segcache_keep(cache, group, offset, kept);
        }
        gd_segcache_return(cache, kept);
    }
    return s;
}

/* Neighbouring segments, which one read brings. */
typedef struct stretch {
    const gd_want *wants;
    size_t count;
    uint64_t end; /* in the group's file */
} stretch;

static gd_status
take_stretch(const gd_fetch *fetch, const stretch *stretch, gd_error *err)
{
    gd_scratch *scratch;
    gd_scratch_list *list = &fetch->plan.repo->scratch;
    const gd_want *wants = stretch->wants;
    uint64_t start = wants->entry.segment;
    GD_TRY(gd_scratch_lend(list, &scratch, err));
    gd_status s = gd_group_read_data(wants->group, scratch->in,
                                     (size_t)(stretch->end - start), start,
                                     err);
    for (size_t i = 0; s == GD_OK && i < stretch->count;) {
        size_t n = gd_plan_segment(wants + i, stretch->count - i);
        s = take_segment(fetch, scratch, wants + i, n,
                         scratch->in + (wants[i].entry.segment - start), err);
        i += n;
    }
    gd_scratch_return(list, scratch);
    return s;
}

/* ---- several at once ---- */

typedef struct bundle {
    gd_fetch *fetch;
    bool cached;       /* of segments that may be in the cache; otherwise of
                        * stretches of the disk */
    stretch stretches[BUNDLE];
    bool taken[BUNDLE]; /* it was in the cache */
    size_t count;
    atomic_flag failed; /* the thread that sets it fills in the next two */
    gd_status status;
    gd_error *err;
} bundle;

static void
take_of_bundle(void *arg, size_t task, GD_UNUSED unsigned worker)
{
    bundle *b = arg;
    gd_error error;
    const stretch *of = &b->stretches[task];
    gd_status s = b->cached
                      ? take_cached(b->fetch, of->wants, of->count,
                                    &b->taken[task], &error)
                      : take_stretch(b->fetch, of, &error);
    if (s != GD_OK && !atomic_flag_test_and_set(&b->failed)) {
        b->status = s;
        if (b->err != NULL) {
            *b->err = error;
        }
    }
}

/* Uses the pool if there is enough work for it. */
static gd_status
take_bundle(bundle *b, gd_error *err)
{
    gd_pool *pool = b->fetch->plan.repo->pool;
    size_t few = b->cached ? BUNDLE_CACHED : 1;
    b->status = GD_OK;
    b->err = err;
    atomic_flag_clear(&b->failed);
    if (!b->fetch->taker.parallel || b->count <= few) {
        for (size_t i = 0; b->status == GD_OK && i < b->count; i++) {
            take_of_bundle(b, i, gd_pool_threads(pool));
        }
    } else {
        gd_job job = {.run = take_of_bundle, .arg = b, .tasks = b->count};
        gd_pool_submit(pool, &job);
        gd_pool_wait(pool, &job);
    }
    b->count = 0;
    return b->status;
}

/* Returns whether the bundle is full. */
static bool
add_to_bundle(bundle *b, const gd_want *wants, size_t count, uint64_t end)
{
    b->stretches[b->count] = (stretch){wants, count, end};
    return ++b->count == BUNDLE;
}

/* Leaves in the plan the wants that are not in the cache. */
static gd_status
take_all_cached(gd_fetch *fetch, gd_error *err)
{
    gd_plan *plan = &fetch->plan;
    bundle b = {.fetch = fetch, .cached = true};
    size_t left = 0;
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < plan->count;) {
        size_t n = gd_plan_segment(&plan->wants[i], plan->count - i);
        bool full = add_to_bundle(&b, &plan->wants[i], n, 0);
        i += n;
        if (!full && i < plan->count) {
            continue;
        }
        size_t count = b.count;
        s = take_bundle(&b, err);
        for (size_t j = 0; j < count; j++) {
            if (!b.taken[j]) {
                n = b.stretches[j].count;
                memmove(&plan->wants[left], b.stretches[j].wants,
                        n * sizeof plan->wants[0]);
                left += n;
            }
        }
    }
    plan->count = left;
    return s;
}

static gd_status
take_from_disk(gd_fetch *fetch, gd_error *err)
{
    const gd_plan *plan = &fetch->plan;
    bundle b = {.fetch = fetch};
    if (plan->count == 0) {
        return GD_OK;
    }
    gd_status s = GD_OK;
    gd_plan_read_ahead(plan->wants, plan->count, plan->asked);
    for (size_t i = 0; s == GD_OK && i < plan->count;) {
        uint64_t end;
        const gd_want *first = plan->wants + i;
        size_t n = gd_plan_neighbours(first, plan->count - i, &end);
        gd_plan_count(plan, first->group, first->entry.segment, end);
        i += n;
        if (add_to_bundle(&b, first, n, end) || i == plan->count) {
            s = take_bundle(&b, err);
        }
    }
    return s;
}

/* ---- damage ---- */

/* Reads the spare copy of a block.  Without one, returns `wrong` and keeps its
 * message. */
static gd_status
take_spare(gd_fetch *fetch, gd_scratch *scratch, const gd_want *want,
           gd_status wrong, gd_error *err)
{
    gd_repo *repo = fetch->plan.repo;
    const gd_entry *entry = &want->entry;
    bool found = false;
    gd_status s = gd_spare_read(repo, &want->group->scope,
                                &entry->fingerprint, entry->plain_length,
                                entry->checksum, scratch->in, &found, NULL);
    if (s != GD_OK || !found) {
        return wrong;
    }
    atomic_fetch_add(&repo->counters.spare_reads, 1);
    return fetch->taker.block(fetch->taker.arg, want, scratch->in, err);
}

/* Reads the spare copies of the blocks whose entries are marked as damaged.  A
 * block without one stays in the plan.  Its bytes are verified like any
 * other's, since what prevented reading them once may have passed. */
static gd_status
take_damaged(gd_fetch *fetch, gd_error *err)
{
    gd_plan *plan = &fetch->plan;
    gd_scratch_list *list = &plan->repo->scratch;
    gd_scratch *scratch = NULL; /* lent to the first damaged block */
    size_t left = 0;
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < plan->count; i++) {
        const gd_want want = plan->wants[i];
        gd_status taken = GD_CORRUPT;
        if (want.entry.state == GD_ENTRY_DAMAGED) {
            s = scratch == NULL ? gd_scratch_lend(list, &scratch, err) : GD_OK;
            if (s == GD_OK) {
                taken = take_spare(fetch, scratch, &want, GD_CORRUPT, err);
                s = taken == GD_CORRUPT ? GD_OK : taken;
            }
        }
        if (s == GD_OK && taken != GD_OK) {
            plan->wants[left++] = want;
        }
    }
    plan->count = left;
    gd_scratch_return(list, scratch);
    return s;
}

/* Describes the damage of a block that was read alone. */
static gd_status
say_damaged(const gd_fetch *fetch, const gd_want *want, gd_status s,
            gd_error *err)
{
    return want->entry.state == GD_ENTRY_DAMAGED && s == GD_CORRUPT
               ? gd_fail(err, s,
                         "%s: the block of slot %u is known to be damaged (its "
                         "bytes are in quarantine/), it has no spare copy, and "
                         "%s needs it", want->group->name, want->slot,
                         fetch->plan.recipe->name)
               : s;
}

/* Reads one block alone.  *held is the want whose segment was decoded last. */
static gd_status
take_block(gd_fetch *fetch, gd_scratch *scratch, const gd_want *want,
           const gd_want **held, gd_segment_header *header, gd_error *err)
{
    const gd_taker *taker = &fetch->taker;
    gd_status s = GD_OK;
    if (*held == NULL || (*held)->group != want->group ||
        (*held)->entry.segment != want->entry.segment) {
        *held = NULL;
        gd_plan_count(&fetch->plan, want->group, want->entry.segment,
                      gd_group_segment_end(&want->entry));
        s = gd_group_read_segment(want->group, &want->entry, want->slot,
                                  scratch->coder, scratch->in,
                                  scratch->plain, header, err);
    }
    if (s == GD_OK) {
        *held = want;
        s = verify_want(fetch, want, header, scratch->plain, err);
    }
    if (s == GD_OK) {
        return taker->block(taker->arg, want,
                            scratch->plain + want->entry.plain_offset, err);
    }
    s = say_damaged(fetch, want, s, err);
    *held = NULL; /* a spare copy is read to where the segment's list is */
    return s == GD_CORRUPT || s == GD_IO
               ? take_spare(fetch, scratch, want, s, err)
               : s;
}

static gd_status
take_carefully(gd_fetch *fetch, gd_error *err)
{
    const gd_plan *plan = &fetch->plan;
    const gd_want *held = NULL;
    gd_segment_header header;
    gd_scratch *scratch;
    GD_TRY(gd_scratch_lend(&plan->repo->scratch, &scratch, err));
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < plan->count; i++) {
        s = take_block(fetch, scratch, &plan->wants[i], &held, &header, err);
    }
    gd_scratch_return(&plan->repo->scratch, scratch);
    return s;
}

/* ---- all of it ---- */

/* Ways to read ranges.  Each way is tried after the one before failed. */
typedef enum way {
    AS_CACHED, /* open files and cached segments */
    AFRESH,    /* files looked up by name, segments from the disk */
    CAREFULLY, /* the same, each block alone, or its spare copy */
    WAYS,
} way;

/* Bytes may have been wrong in this host's slices only. */
static void
forget_slices(const gd_plan *plan)
{
    for (size_t i = 0; i < plan->count; i++) {
        const gd_want *want = &plan->wants[i];
        uint64_t start = want->entry.segment;
        gd_group_forget_data(want->group, start,
                             gd_group_segment_end(&want->entry) - start);
    }
}

/* Returns whether a cold group has another file under its name now, which may
 * name another object. */
static bool
is_replaced(const gd_plan *plan)
{
    const gd_repo *repo = plan->repo;
    for (size_t i = 0; i < plan->group_count; i++) {
        const gd_group *group = plan->groups[i];
        if (group->is_cold &&
            !gd_same_file(repo->env, group->fd, repo->root, group->name)) {
            return true;
        }
    }
    return false;
}

/* *replaced: whether the last try, and this one, failed since the object store
 * did not give an object that its group has left. */
static gd_status
try_ranges(gd_fetch *fetch, const gd_range *ranges, size_t count, way how,
           bool *replaced, gd_error *err)
{
    gd_plan *plan = &fetch->plan;
    gd_status s = GD_OK;
    plan->fresh = how != AS_CACHED;
    plan->asked = plan->asked && how == AS_CACHED;
    plan->full = false;
    if (fetch->taker.start != NULL) {
        fetch->taker.start(fetch->taker.arg);
    }
    for (size_t i = 0; s == GD_OK && !plan->full && i < count; i++) {
        s = gd_plan_add(plan, ranges[i], err);
    }
    gd_plan_sort(plan);
    if (s == GD_OK && how == AFRESH && !*replaced) {
        forget_slices(plan);
    }
    if (s == GD_OK) {
        s = take_damaged(fetch, err);
    }
    if (s == GD_OK && how == AS_CACHED && fetch->cached &&
        gd_segcache_enabled(plan->repo->segcache)) {
        s = take_all_cached(fetch, err);
    }
    if (s == GD_OK) {
        s = how == CAREFULLY ? take_carefully(fetch, err)
                             : take_from_disk(fetch, err);
    }
    *replaced = s == GD_UNAVAILABLE && is_replaced(plan);
    gd_plan_clear(plan);
    return s;
}

gd_status
gd_fetch_ranges(gd_fetch *fetch, const gd_range *ranges,
                size_t count, gd_error *err)
{
    gd_status s = GD_CORRUPT;
    bool replaced = false;
    for (int how = fetch->fresh ? AFRESH : AS_CACHED;
         how < WAYS && (s == GD_CORRUPT || s == GD_IO || replaced);
         how++) {
        s = try_ranges(fetch, ranges, count, (way)how, &replaced, err);
    }
    return s;
}
