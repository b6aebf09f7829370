/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packer.c - see packer.h.
 *
 * Blocks are copied, one behind the other, into the plain buffer of a bundle,
 * where each segment has a place of segment_size bytes.  There are two
 * bundles.  One is being filled; the other may be at work in the pool
 * (write_bundle).  All segments of a bundle are closed, except the last one of
 * the bundle being filled.  A flush moves that one to the other bundle.
 *
 * The filling thread touches only the bundle being filled and the slots that it
 * takes.  The writing threads touch only the other bundle, its entries, and the
 * appender's end.
 */
#include "engine/write/packer.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/read/compare.h"
#include "engine/write/appender.h"
#include "engine/write/compresspolicy.h"

enum {
    BUNDLE_BYTES = 4 << 20, /* plain */
    /* Without threads nothing is filled while a bundle is packed, so a small
     * one is as fast.  Batch backups need the memory. */
    LONE_BUNDLE_BYTES = 1 << 20,
    TIMED_BYTES = 64 << 10, /* one segment for so many bytes is timed */
    MARK_WAIT_MS = 100,     /* for others that set a feature just now */
};

typedef struct bundle {
    gd_new_segment *segments;
    struct iovec *stored; /* one for each segment */
    gd_entry **entries;   /* the first entry of each segment */
    uint8_t *plain;
    size_t count;
} bundle;

struct gd_packer {
    gd_repo *repo;
    gd_scope scope; /* of the open group, and of the next */
    gd_appender *appender; /* NULL until the first new block */
    gd_groupmap shared;    /* how often we took each group's shared lock */
    gd_groupmap avoided;   /* 1: nothing may be added to the group */
    gd_fptable *own;       /* blocks that we added to the open group */
    uint64_t new_bytes, stored_bytes;
    uint64_t kept_bytes; /* of the stored ones: they stay after an abort */

    bundle bundles[2];
    size_t room; /* segments in a bundle */
    int filling; /* index of the bundle being filled */
    bool last_is_open;
    bool nodedup; /* new blocks get this mark, */
    bool cannot_mark; /* but not in the bundle being filled */
    bool has_waited; /* for the feature */
    gd_compare *compare; /* NULL unless hits are compared by value */

    /* Of the bundle being written: */
    bool writing;
    gd_job write_job, pack_job;
    uint8_t *packed;   /* segment_size bytes for each segment */
    gd_coder **coders; /* one for each thread, and one for the caller */
    gd_compress_policy policy;
    atomic_int pack_status;
    gd_status write_status;
    gd_error write_error;
};

static bundle *
bundle_under_way(gd_packer *packer)
{
    return &packer->bundles[packer->filling ^ 1];
}

static uint8_t *
plain_of(const gd_packer *packer, const bundle *b, size_t index)
{
    return b->plain + index * packer->repo->params.segment_size;
}

static gd_status
open_coders(gd_packer *packer, gd_error *err)
{
    gd_repo *repo = packer->repo;
    unsigned count = gd_pool_threads(repo->pool) + 1;
    packer->coders = gd_calloc(repo->env, count, sizeof *packer->coders, err);
    if (packer->coders == NULL) {
        return GD_NOMEM;
    }
    for (unsigned i = 0; i < count; i++) {
        GD_TRY(gd_coder_open(repo->env, &packer->coders[i], err));
    }
    if (repo->params.codec != GD_CODEC_NONE) {
        packer->packed = gd_alloc(
            repo->env, packer->room * repo->params.segment_size, err);
        if (packer->packed == NULL) {
            return GD_NOMEM;
        }
    }
    return GD_OK;
}

static gd_status
open_bundle(gd_packer *packer, bundle *b, gd_error *err)
{
    const gd_env *env = packer->repo->env;
    b->segments = gd_calloc(env, packer->room, sizeof *b->segments, err);
    b->stored = gd_calloc(env, packer->room, sizeof *b->stored, err);
    b->entries = gd_calloc(env, packer->room, sizeof *b->entries, err);
    b->plain = gd_alloc(
        env, packer->room * packer->repo->params.segment_size, err);
    return b->segments == NULL || b->stored == NULL || b->entries == NULL ||
                   b->plain == NULL
               ? GD_NOMEM
               : GD_OK;
}

gd_status
gd_packer_open(gd_repo *repo, const gd_scope *scope, gd_packer **out,
               gd_error *err)
{
    gd_packer *packer = gd_calloc(repo->env, 1, sizeof *packer, err);
    if (packer == NULL) {
        return GD_NOMEM;
    }
    packer->repo = repo;
    packer->scope = *scope;
    packer->room = (gd_pool_threads(repo->pool) == 0 ? LONE_BUNDLE_BYTES
                                                     : BUNDLE_BYTES) /
                       repo->params.segment_size + 2;
    gd_groupmap_init(&packer->shared, repo->env);
    gd_groupmap_init(&packer->avoided, repo->env);
    gd_status s = open_coders(packer, err);
    for (int i = 0; s == GD_OK && i < 2; i++) {
        s = open_bundle(packer, &packer->bundles[i], err);
    }
    if (s == GD_OK && repo->params.by_value) {
        s = gd_compare_open(repo, &packer->compare, err);
    }
    if (s == GD_OK) {
        s = gd_fptable_new(repo->env, GD_MAX_SLOTS, &packer->own, err);
    }
    if (s != GD_OK) {
        gd_packer_close(packer);
        return s;
    }
    *out = packer;
    return GD_OK;
}

static void
close_bundle(const gd_env *env, bundle *b)
{
    env->release(env, b->segments);
    env->release(env, b->stored);
    env->release(env, b->entries);
    env->release(env, b->plain);
}

void
gd_packer_close(gd_packer *packer)
{
    gd_repo *repo = packer->repo;
    const gd_env *env = repo->env;
    if (packer->writing) {
        gd_pool_wait(repo->pool, &packer->write_job);
    }
    if (packer->appender != NULL) {
        gd_appender_close(packer->appender);
    }
    gd_compare_close(packer->compare);
    gd_locks_unlock_all_shared(repo->locks, &packer->shared);
    gd_groupmap_free(&packer->avoided);
    for (unsigned i = 0;
         packer->coders != NULL && i <= gd_pool_threads(repo->pool); i++) {
        gd_coder_close(env, packer->coders[i]);
    }
    if (packer->own != NULL) {
        gd_fptable_free(env, packer->own);
    }
    close_bundle(env, &packer->bundles[0]);
    close_bundle(env, &packer->bundles[1]);
    env->release(env, packer->coders);
    env->release(env, packer->packed);
    env->release(env, packer);
}

void
gd_packer_count(const gd_packer *packer, uint64_t *new_bytes,
                uint64_t *stored_bytes)
{
    *new_bytes = packer->new_bytes;
    *stored_bytes = packer->stored_bytes;
}

uint64_t
gd_packer_kept(const gd_packer *packer)
{
    return packer->kept_bytes;
}

/* ---- the pool's part ---- */

/* Returns whether the copies match the fingerprinted bytes. */
static bool
is_unchanged(const gd_segment_header *header, const gd_entry *entries,
             const uint8_t *plain)
{
    bool same = true;
    for (uint32_t i = 0; i < header->blocks; i++) {
        same &= entries[i].checksum ==
                gd_checksum(plain + entries[i].plain_offset,
                            entries[i].plain_length, 0);
    }
    return same;
}

/* *stored is 0 if the segment is stored as it is, because compressing it does
 * not pay or is not tried. */
static gd_status
try_compressing(gd_packer *packer, gd_coder *coder, const uint8_t *plain,
                size_t length, uint8_t *out, size_t *stored)
{
    const gd_params *params = &packer->repo->params;
    int quick = gd_codec_quick_level(params->codec_level);
    uint64_t number;
    gd_try try = gd_compress_policy_next(&packer->policy, &number);
    gd_status s = GD_OK;
    bool likely = true;
    *stored = 0;
    if (try == GD_TRY_YIELD) {
        atomic_fetch_add(&packer->repo->counters.yielded_segments, 1);
    }
    if (try == GD_TRY_YIELD || try == GD_TRY_NOT) {
        return GD_OK;
    }
    if (try == GD_TRY_QUICKLY && quick != params->codec_level) {
        s = gd_codec_compress(coder, params->codec, quick, plain, length,
                              out, stored, NULL);
        likely = *stored > 0;
    }
    if (s == GD_OK && likely) {
        s = gd_codec_compress(coder, params->codec, params->codec_level,
                              plain, length, out, stored, NULL);
    }
    gd_compress_policy_tried(&packer->policy, number, *stored > 0);
    return s;
}

static void
pack_one(gd_packer *packer, size_t task, unsigned worker)
{
    const gd_params *params = &packer->repo->params;
    bundle *b = bundle_under_way(packer);
    gd_new_segment *segment = &b->segments[task];
    gd_segment_header *header = &segment->header;
    uint8_t *plain = plain_of(packer, b, task);
    if (!is_unchanged(header, b->entries[task], plain)) {
        atomic_store(&packer->pack_status, GD_IO);
        return;
    }
    header->codec = GD_CODEC_NONE;
    header->stored_length = header->plain_length;
    b->stored[task] = (struct iovec){plain, header->plain_length};
    segment->pieces = &b->stored[task];
    segment->piece_count = 1;
    if (params->codec != GD_CODEC_NONE) {
        uint8_t *out = packer->packed + task * params->segment_size;
        size_t stored;
        gd_status s = try_compressing(packer, packer->coders[worker], plain,
                                      header->plain_length, out, &stored);
        if (s != GD_OK) {
            atomic_store(&packer->pack_status, (int)s);
            return;
        }
        if (stored > 0) {
            header->codec = params->codec;
            header->stored_length = (uint32_t)stored;
            b->stored[task] = (struct iovec){out, stored};
        }
    }
    gd_segment_header_encode(
        header, gd_appender_group(packer->appender)->bounds.seed,
        segment->pieces, segment->piece_count, segment->encoded);
}

/* Reading the clock costs a microsecond, too much for a small segment. */
static bool
is_timed(const gd_params *params, size_t task)
{
    return params->adaptive_compression && params->codec != GD_CODEC_NONE &&
           task * params->segment_size % TIMED_BYTES == 0;
}

static void
pack_segment(void *arg, size_t task, unsigned worker)
{
    gd_packer *packer = arg;
    const gd_repo *repo = packer->repo;
    bool timed = is_timed(&repo->params, task);
    gd_compress_policy_watch watch;
    if (timed) {
        gd_compress_policy_start(repo->env, &watch);
    }
    pack_one(packer, task, worker);
    if (timed) {
        gd_compress_policy_stop(&packer->policy, repo->env, &watch);
    }
}

/* Packs the bundle on all threads, and appends it. */
static void
write_bundle(void *arg, GD_UNUSED size_t task, GD_UNUSED unsigned worker)
{
    gd_packer *packer = arg;
    gd_pool *pool = packer->repo->pool;
    bundle *b = bundle_under_way(packer);
    gd_error *err = &packer->write_error;
    uint64_t written = 0;
    atomic_store(&packer->pack_status, GD_OK);
    packer->pack_job =
        (gd_job){.run = pack_segment, .arg = packer, .tasks = b->count};
    gd_pool_submit(pool, &packer->pack_job);
    gd_pool_wait(pool, &packer->pack_job);
    gd_compress_policy_end_bundle(&packer->policy);
    gd_status s = (gd_status)atomic_load(&packer->pack_status);
    if (s == GD_IO) {
        gd_fail(err, s, GD_CHANGED_IN_MEMORY);
    } else if (s != GD_OK) {
        gd_fail(err, s, "a segment could not be compressed");
    } else {
        s = gd_appender_append(packer->appender, b->segments, b->count,
                               &written, err);
    }
    packer->stored_bytes += written;
    packer->write_status = s;
}

/* ---- flushing ---- */

/* Waits until the bundle is written.  Once it fails, each later call returns
 * the same error. */
static gd_status
finish_writing(gd_packer *packer, gd_error *err)
{
    if (packer->writing) {
        gd_pool_wait(packer->repo->pool, &packer->write_job);
        packer->writing = false;
    }
    if (packer->write_status != GD_OK && err != NULL) {
        *err = packer->write_error;
    }
    return packer->write_status;
}

/* Moves the open segment from the end of one bundle to the start of the
 * other. */
static void
take_along(gd_packer *packer, bundle *from, bundle *to)
{
    size_t last = --from->count;
    to->segments[0] = from->segments[last];
    to->entries[0] = from->entries[last];
    memcpy(plain_of(packer, to, 0), plain_of(packer, from, last),
           from->segments[last].header.plain_length);
    to->count = 1;
}

static gd_status
start_writing(gd_packer *packer, gd_error *err)
{
    GD_TRY(finish_writing(packer, err));
    bundle *full = &packer->bundles[packer->filling];
    bundle *next = bundle_under_way(packer);
    next->count = 0;
    if (packer->last_is_open) {
        take_along(packer, full, next);
    }
    packer->filling ^= 1;
    packer->cannot_mark = false;
    if (full->count > 0) {
        packer->write_job =
            (gd_job){.run = write_bundle, .arg = packer, .tasks = 1};
        packer->writing = true;
        gd_pool_submit(packer->repo->pool, &packer->write_job);
    }
    return GD_OK;
}

gd_status
gd_packer_flush(gd_packer *packer, gd_error *err)
{
    size_t closed =
        packer->bundles[packer->filling].count - packer->last_is_open;
    if (closed == 0) {
        return GD_OK;
    }
    GD_TRY(finish_writing(packer, err));
    if (gd_appender_is_due(packer->appender)) {
        return gd_packer_sync(packer, err);
    }
    return start_writing(packer, err);
}

gd_status
gd_packer_write(gd_packer *packer, gd_error *err)
{
    if (packer->appender == NULL) {
        return GD_OK;
    }
    packer->last_is_open = false;
    GD_TRY(start_writing(packer, err));
    return finish_writing(packer, err);
}

gd_status
gd_packer_sync(gd_packer *packer, gd_error *err)
{
    gd_status s = gd_packer_write(packer, err);
    if (s != GD_OK || packer->appender == NULL) {
        return s;
    }
    packer->kept_bytes = packer->stored_bytes;
    return gd_appender_sync(packer->appender, err);
}

void
gd_packer_set_nodedup(gd_packer *packer, bool nodedup)
{
    packer->nodedup = nodedup;
}

/* ---- adding ---- */

static gd_status
leave_group(gd_packer *packer, gd_error *err)
{
    GD_TRY(gd_packer_sync(packer, err));
    gd_appender_close(packer->appender);
    packer->appender = NULL;
    return GD_OK;
}

gd_status
gd_packer_set_scope(gd_packer *packer, const gd_scope *scope, gd_error *err)
{
    bool other = !gd_scope_equal(&packer->scope, scope);
    if (other && packer->appender != NULL) {
        GD_TRY(leave_group(packer, err));
    }
    packer->scope = *scope;
    return GD_OK;
}

gd_status
gd_packer_avoid(gd_packer *packer, uint32_t group, gd_error *err)
{
    uint32_t *avoided = gd_groupmap_at(&packer->avoided, group, err);
    if (avoided == NULL) {
        return GD_NOMEM;
    }
    *avoided = 1;
    return packer->appender != NULL &&
                   gd_appender_group(packer->appender)->number == group
               ? leave_group(packer, err)
               : GD_OK;
}

/* Ensures that there is an appender with room for a slot. */
static gd_status
ensure_appender(gd_packer *packer, gd_error *err)
{
    if (packer->appender != NULL) {
        if (gd_appender_room(packer->appender) > 0) {
            return GD_OK;
        }
        GD_TRY(leave_group(packer, err));
    }
    GD_TRY(gd_appender_open(packer->repo, &packer->scope,
                            &packer->avoided, &packer->appender, err));
    uint32_t group = gd_appender_group(packer->appender)->number;
    uint32_t *taken = gd_groupmap_at(&packer->shared, group, err);
    if (taken == NULL) {
        gd_locks_unlock_shared(packer->repo->locks, group);
        return GD_NOMEM;
    }
    ++*taken;
    gd_fptable_clear(packer->own, group);
    return GD_OK;
}

/* Returns whether the block may go into the bundle's last segment. */
static bool
fits_last(const gd_packer *packer, const bundle *b, uint32_t length,
          const gd_fingerprint *fp, bool nodedup)
{
    const gd_segment_header *header = &b->segments[b->count - 1].header;
    const gd_entry *entries = b->entries[b->count - 1];
    bool fits = header->plain_length + length <=
                packer->repo->params.segment_size;
    for (uint32_t i = 0; fits && i < header->blocks; i++) {
        fits = !gd_entry_is_copy(&entries[i], fp, nodedup); /* I14 */
    }
    return fits;
}

/* Ensures that the last segment of the bundle being filled is open, and that
 * the block may go into it. */
static gd_status
ensure_segment(gd_packer *packer, uint32_t length, const gd_fingerprint *fp,
               bool nodedup, gd_error *err)
{
    bundle *b = &packer->bundles[packer->filling];
    if (packer->last_is_open) {
        if (fits_last(packer, b, length, fp, nodedup)) {
            return GD_OK;
        }
        packer->last_is_open = false;
    }
    if (b->count == packer->room) {
        GD_TRY(gd_packer_flush(packer, err));
        b = &packer->bundles[packer->filling];
    }
    memset(&b->segments[b->count++], 0, sizeof *b->segments);
    packer->last_is_open = true;
    return GD_OK;
}

/* N15.1.  The mark is a wish: an upload does not fail because an older program
 * has the repository open.  It waits a moment for another that sets a feature
 * just now, and tries again in the next bundle. */
static gd_status
decide_mark(gd_packer *packer, bool *nodedup, gd_error *err)
{
    gd_status s = GD_BUSY;
    *nodedup = false;
    if (!packer->nodedup) {
        return GD_OK;
    }
    if (!packer->cannot_mark) {
        s = gd_repo_try_feature(packer->repo, GD_FEATURE_NODEDUP,
                                packer->has_waited ? 0 : MARK_WAIT_MS, err);
        packer->has_waited = true;
        packer->cannot_mark = s == GD_BUSY;
        *nodedup = s == GD_OK;
    }
    if (s == GD_BUSY) {
        atomic_fetch_add(&packer->repo->counters.unmarked, 1);
        return GD_OK;
    }
    return s;
}

gd_status
gd_packer_add(gd_packer *packer, const uint8_t *data, uint32_t length,
              const gd_fingerprint *fp, uint64_t checksum, gd_address *address,
              gd_error *err)
{
    bool nodedup;
    GD_TRY(decide_mark(packer, &nodedup, err));
    GD_TRY(ensure_appender(packer, err));
    GD_TRY(ensure_segment(packer, length, fp, nodedup, err));
    bundle *b = &packer->bundles[packer->filling];
    size_t last = b->count - 1;
    gd_segment_header *header = &b->segments[last].header;
    GD_TRY(gd_appender_take_slot(packer->appender, fp, checksum, length,
                                 header->plain_length, &address->slot, err));
    address->group = gd_appender_group(packer->appender)->number;
    if (header->blocks++ == 0) {
        header->first_slot = address->slot;
        b->entries[last] = gd_appender_entry(packer->appender, address->slot);
    }
    memcpy(plain_of(packer, b, last) + header->plain_length, data, length);
    header->plain_length += length;
    packer->new_bytes += length;
    gd_appender_entry(packer->appender, address->slot)->nodedup = nodedup;
    if (nodedup) {
        gd_fptable_add_unindexed(packer->own, address->slot, fp);
    } else {
        gd_fptable_add(packer->own, address->slot, fp);
    }
    return GD_OK;
}

/* ---- finding our own ---- */

/* Returns where the slot's segment is in the bundle being filled; NULL if it is
 * not there. */
static const uint8_t *
waiting_segment(const gd_packer *packer, uint32_t slot)
{
    const bundle *b = &packer->bundles[packer->filling];
    for (size_t i = 0; i < b->count; i++) {
        const gd_segment_header *header = &b->segments[i].header;
        if (slot >= header->first_slot &&
            slot - header->first_slot < header->blocks) {
            return plain_of(packer, b, i);
        }
    }
    return NULL;
}

static bool
equals_own(gd_packer *packer, uint32_t slot, const gd_fingerprint *fp,
           const uint8_t *data, uint32_t length)
{
    const gd_group *group = gd_appender_group(packer->appender);
    const gd_entry *unsynced = gd_appender_entry(packer->appender, slot);
    const uint8_t *waiting = waiting_segment(packer, slot);
    if (unsynced != NULL && unsynced->plain_length != length) {
        return false;
    }
    if (unsynced != NULL && waiting != NULL) {
        atomic_fetch_add(&packer->repo->counters.compares, 1);
        return memcmp(waiting + unsynced->plain_offset, data, length) == 0;
    }
    if (finish_writing(packer, NULL) != GD_OK) {
        return false; /* the next flush will report the cause */
    }
    return unsynced != NULL
               ? gd_compare_entry(packer->compare, group, unsynced, slot, data)
               : gd_compare_block(packer->compare,
                                  (gd_address){group->number, slot}, fp, data,
                                  length);
}

gd_address
gd_packer_find(gd_packer *packer, const uint8_t *data, uint32_t length,
               const gd_fingerprint *fp)
{
    uint32_t probe = 0, slot;
    if (packer->appender == NULL) {
        return (gd_address){0, 0};
    }
    while (gd_fptable_find(packer->own, fp, &probe, &slot)) {
        if (packer->compare == NULL ||
            equals_own(packer, slot, fp, data, length)) {
            return (gd_address){packer->own->group, slot};
        }
    }
    return (gd_address){0, 0};
}

bool
gd_packer_added(gd_packer *packer, gd_address address,
                const gd_fingerprint *fp, uint32_t length)
{
    uint32_t slot = address.slot;
    gd_entry entry;
    if (packer->appender == NULL || address.group != packer->own->group ||
        !gd_fptable_matches(packer->own, slot, fp)) {
        return false;
    }
    const gd_entry *unsynced = gd_appender_entry(packer->appender, slot);
    if (unsynced != NULL) {
        return unsynced->plain_length == length;
    }
    return gd_group_read_entries(gd_appender_group(packer->appender), slot, 1,
                                 &entry, NULL) == GD_OK &&
           entry.state == GD_ENTRY_LIVE && entry.plain_length == length;
}

bool
gd_packer_holds(const gd_packer *packer, uint32_t group)
{
    return gd_groupmap_get(&packer->shared, group) != 0;
}
