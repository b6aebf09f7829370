/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grouprewrite.c - see grouprewrite.h.
 *
 * The blocks come from rewritesource.h in the order in which they are to be
 * written, and are cut into runs; each run becomes a segment.  A bundle of runs
 * at a time goes through three jobs of the pool, one task for each run:
 *
 *     gather: fetch the blocks,  |
 *             compress them      | append all | read back, compare
 */
#include "engine/maintenance/grouprewrite.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/files/spool.h"
#include "engine/maintenance/groupexchange.h"
#include "engine/maintenance/rewritesource.h"

enum {
    BUNDLE_BYTES = 4 << 20, /* plain, with lists */
    BUNDLE_RUNS = 64,
    PIECES = 3, /* of a segment: header, list, stored bytes */
};

/* Live slots that become one segment. */
typedef struct run {
    const uint32_t *slots; /* ascending */
    uint32_t count;
    uint32_t length; /* of all its blocks */
    uint8_t *plain;  /* its blocks, one behind the other */
    uint8_t *packed; /* the list, if it needs one; then the stored bytes, unless
                      * they are plain */
    bool copied;     /* the old segment, as it was stored */
    gd_segment_header header;
    uint8_t encoded[GD_SEGMENT_HEADER];
    uint64_t read; /* bytes read from old segments */
    gd_status status;
    gd_error err;
} run;

struct gd_group_rewrite {
    gd_leased_group *leased;
    bool cold; /* the new file is to be of a cold group */
    bool again; /* everything is compressed again, so: */
    gd_packing packing;
    gd_spool_writer file;
    gd_group target;   /* the new file, as a group */
    gd_entry *entries; /* the new entries */
    uint64_t end;      /* end of the new file */
    bool complete;
    gd_published record; /* of the complete file */
    gd_rewrite_source source;
    uint32_t cut; /* how much of the source's order is in the file, or in the
                   * bundle */
    run *runs; /* the bundle */
    size_t count;
    uint8_t *plain, *packed; /* of the runs */
};

/* ---- preparing ---- */

static gd_status
require_entries(const gd_leased_group *leased, gd_error *err)
{
    for (uint32_t i = 0; i < leased->group->bounds.slots; i++) {
        uint8_t state = leased->entries[i].state;
        if (i >= leased->published.count && state != GD_ENTRY_EMPTY) {
            return gd_fail(err, GD_BUSY, "%s has entries that are not "
                           "published, from slot %u on: they wait for the "
                           "next upload", leased->group->name, i);
        }
        /* Only the old file has what may still be readable. */
        if (state == GD_ENTRY_INVALID || state == GD_ENTRY_DAMAGED) {
            return gd_fail(err, GD_CORRUPT, "%s: %s of slot %u (offset %llu) "
                           "is damaged", leased->group->name,
                           state == GD_ENTRY_INVALID ? "the entry"
                                                     : "the block",
                           i, (unsigned long long)gd_entry_offset(i));
        }
    }
    return GD_OK;
}

static gd_status
open_buffers(gd_group_rewrite *r, gd_error *err)
{
    const gd_env *env = r->leased->repo->env;
    uint32_t published = r->leased->published.count;
    r->entries = gd_calloc(env, r->leased->group->bounds.slots,
                           sizeof *r->entries, err);
    r->runs = gd_calloc(env, BUNDLE_RUNS, sizeof *r->runs, err);
    r->plain = gd_alloc(env, BUNDLE_BYTES, err);
    r->packed = gd_alloc(env, BUNDLE_BYTES, err);
    if (r->entries == NULL || r->runs == NULL || r->plain == NULL ||
        r->packed == NULL) {
        return GD_NOMEM;
    }
    /* Void and freed ones stay as they are. */
    memcpy(r->entries, r->leased->entries, published * sizeof *r->entries);
    return GD_OK;
}

void
gd_group_rewrite_close(gd_group_rewrite *r)
{
    gd_repo *repo = r->leased->repo;
    const gd_env *env = repo->env;
    gd_rewrite_source_close(&r->source);
    env->release(env, r->packed);
    env->release(env, r->plain);
    env->release(env, r->runs);
    env->release(env, r->entries);
    gd_spool_discard(env, repo->root, &r->file); /* if it still exists */
    env->release(env, r);
}

static gd_status
require_room(const gd_group_rewrite *r, uint64_t bytes, gd_error *err)
{
    const gd_repo *repo = r->leased->repo;
    return r->cold ? gd_repo_require_room_to_move(repo, bytes, err)
                   : gd_repo_require_room(repo, bytes, err);
}

/* Writes the fixed header, which has the seed of everything that follows. */
static gd_status
write_header(gd_group_rewrite *r, gd_error *err)
{
    const gd_group *old = r->leased->group;
    uint8_t object[GD_ID_SIZE];
    if (!r->cold) {
        return gd_group_write_hot(old, &r->target, r->packing.similar, err);
    }
    GD_TRY(gd_random(old->env, object, sizeof object, err));
    return gd_group_write_cold(old, &r->target, object, err);
}

static gd_status
start_file(gd_group_rewrite *r, gd_error *err)
{
    const gd_group *old = r->leased->group;
    const gd_env *env = old->env;
    r->target = *old;
    r->target.fd = r->target.content = r->file.fd;
    memcpy(r->target.name, r->file.name, sizeof r->target.name);
    r->end = gd_fptable_data_start(old->bounds.slots);
    GD_TRY(require_room(r, r->end, err));
    GD_TRY(write_header(r, err));
    int rc;
    do {
        rc = env->fallocate(env, r->file.fd, 0, r->end);
    } while (rc == -EINTR);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot rewrite %s as %s",
                                  old->name, r->file.name)
                  : GD_OK;
}

static void
expect_segments(const gd_leased_group *leased)
{
    const gd_group *group = leased->group;
    uint64_t start = gd_fptable_data_start(group->bounds.slots);
    if (leased->published.end > start) {
        gd_group_expect_data(group, start, leased->published.end - start);
    }
}

/* N15.1.  A cold group that becomes warm again has version 2, with lists or
 * without, so cold groups need both features. */
static gd_status
use_features(gd_repo *repo, const gd_packing *packing, bool cold,
             gd_error *err)
{
    gd_status s = GD_OK;
    if (cold || (packing != NULL && packing->similar)) {
        s = gd_repo_use_feature(repo, GD_FEATURE_LISTED_SEGMENTS, err);
    }
    return s == GD_OK && cold
               ? gd_repo_use_feature(repo, GD_FEATURE_COLD, err)
               : s;
}

gd_status
gd_group_rewrite_open(gd_leased_group *leased, const gd_packing *packing,
                      bool cold, gd_group_rewrite **out, gd_error *err)
{
    gd_repo *repo = leased->repo;
    GD_TRY(use_features(repo, packing, cold, err));
    GD_TRY(require_entries(leased, err));
    /* A crash may leave either file under the name: both must be whole. */
    GD_TRY(gd_fsync(repo->env, leased->group->fd, leased->group->name, err));
    gd_group_rewrite *r = gd_calloc(repo->env, 1, sizeof *r, err);
    if (r == NULL) {
        return GD_NOMEM;
    }
    r->leased = leased;
    r->cold = cold;
    r->again = packing != NULL;
    if (packing != NULL) {
        r->packing = *packing;
        r->packing.level = gd_codec_real_level(packing->codec, packing->level);
    }
    gd_status s = gd_spool_create(repo->env, repo->root, GD_SPOOL_GROUP,
                                  &r->file, err);
    if (s != GD_OK) {
        repo->env->release(repo->env, r);
        return s;
    }
    s = gd_rewrite_source_open(&r->source, leased, packing, err);
    if (s == GD_OK) {
        s = open_buffers(r, err);
    }
    if (s == GD_OK) {
        s = start_file(r, err);
    }
    if (s != GD_OK) {
        gd_group_rewrite_close(r);
        return s;
    }
    expect_segments(leased);
    *out = r;
    return GD_OK;
}

/* ---- chunking ---- */

/* Returns whether two neighbours in the order go into one segment.  Blocks that
 * no codec made smaller stay with their like, so that a quick level can find
 * this out again. */
static bool
goes_with(const gd_group_rewrite *r, uint32_t before, uint32_t slot)
{
    const gd_entry *one = &r->leased->entries[before];
    const gd_entry *next = &r->leased->entries[slot];
    if (!r->target.bounds.has_lists && slot != before + 1) {
        return false;
    }
    return r->again ? (one->codec == GD_CODEC_NONE) ==
                         (next->codec == GD_CODEC_NONE)
                   : one->segment == next->segment;
}

/* Returns whether the run has a copy of the block that must lie in another
 * segment (I14). */
static bool
has_copy(const gd_group_rewrite *r, const run *one, uint32_t slot)
{
    const gd_entry *entries = r->leased->entries;
    const gd_entry *block = &entries[slot];
    bool found = false;
    for (uint32_t i = 0; !found && i < one->count; i++) {
        found = gd_entry_is_copy(&entries[one->slots[i]], &block->fingerprint,
                                 block->nodedup);
    }
    return found;
}

static int
ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Bytes that a run of so many blocks may need behind its header. */
static uint64_t
room_for(const gd_group_rewrite *r, uint64_t length, uint32_t count)
{
    return length +
           (r->target.bounds.has_lists ? (uint64_t)GD_LISTED_SLOT * count : 0);
}

/* Cuts the run that begins here in the order. */
static void
cut_run(gd_group_rewrite *r, uint32_t from, run *one)
{
    const gd_entry *entries = r->leased->entries;
    uint32_t *slots = r->source.order + from;
    uint32_t left = r->source.count - from;
    uint32_t most = GD_SEGMENT_MAX; /* of the old segment: overlapping entries
                                     * are not ours */
    if (r->again) {
        most = gd_segment_joined(r->leased->repo->params.segment_size);
    }
    *one = (run){.slots = slots, .count = 1,
                 .length = entries[slots[0]].plain_length};
    while (one->count < left &&
           goes_with(r, slots[one->count - 1], slots[one->count])) {
        uint32_t length =
            one->length + entries[slots[one->count]].plain_length;
        if (length > most ||
            room_for(r, length, one->count + 1) > GD_SEGMENT_MAX ||
            has_copy(r, one, slots[one->count])) {
            break;
        }
        one->length = length;
        one->count++;
    }
    qsort(slots, one->count, sizeof *slots, ascending);
}

/* Finds the next bundle, which is empty at the end of a window. */
static void
cut_bundle(gd_group_rewrite *r)
{
    uint64_t used = 0;
    r->count = 0;
    while (r->cut < r->source.count && r->count < BUNDLE_RUNS) {
        run *one = &r->runs[r->count];
        cut_run(r, r->cut, one);
        uint64_t room = room_for(r, one->length, one->count);
        if (used + room > BUNDLE_BYTES) {
            break;
        }
        one->plain = r->plain + used;
        one->packed = r->packed + used;
        used += room;
        r->cut += one->count;
        r->count++;
    }
}

/* ---- the pool's part: gathering and compressing ---- */

gd_status
gd_group_rewrite_require_room(const gd_group_rewrite *r, gd_error *err)
{
    const gd_leased_group *leased = r->leased;
    gd_status s =
        gd_locks_require_no_intent(leased->repo->locks, leased->number, err);
    if (s == GD_BUSY) {
        return gd_fail(err, s, "%s is to be collected", leased->group->name);
    }
    return s == GD_OK ? require_room(r, 0, err) : s;
}

static bool
is_consecutive(const run *one)
{
    return one->slots[one->count - 1] - one->slots[0] == one->count - 1;
}

/* Adds a block behind those that the run has. */
static void
add_block(gd_group_rewrite *r, run *one, uint32_t slot, uint32_t at,
          const uint8_t *block)
{
    gd_entry *entry = &r->entries[slot];
    *entry = r->leased->entries[slot];
    entry->plain_offset = at;
    memcpy(one->plain + at, block, entry->plain_length);
}

/* Takes the blocks from the window. */
static void
take_blocks(gd_group_rewrite *r, run *one)
{
    const gd_rewrite_source *source = &r->source;
    uint32_t at = 0;
    for (uint32_t i = 0; i < one->count; i++) {
        uint32_t slot = one->slots[i];
        add_block(r, one, slot, at, source->plain + source->at[slot]);
        at += r->entries[slot].plain_length;
    }
}

/* Returns whether the run is exactly this segment, down to its checksum.  A
 * segment whose stored bytes do not fit in the run's place was not written by
 * us. */
static bool
is_whole(const gd_group_rewrite *r, const gd_decoder *w, const run *one,
         const gd_segment_header *old)
{
    return old->blocks == one->count &&
           old->plain_length == one->length &&
           old->stored_length <= room_for(r, one->length, one->count) &&
           gd_segment_intact(w->in, old, r->leased->group->bounds.seed);
}

/* Reads the old segment, and copies it if all of it is needed. */
static gd_status
fetch_segment(gd_group_rewrite *r, gd_decoder *w, run *one, gd_error *err)
{
    gd_segment_header old;
    GD_TRY(gd_rewrite_source_read(&r->source, w, one->slots, one->count,
                                  &old, &one->read, err));
    uint32_t at = 0;
    for (uint32_t i = 0; i < one->count; i++) {
        uint32_t slot = one->slots[i];
        add_block(r, one, slot, at,
                  w->plain + r->leased->entries[slot].plain_offset);
        at += r->entries[slot].plain_length;
    }
    if (is_whole(r, w, one, &old)) {
        one->copied = true;
        one->header = old;
        memcpy(one->packed, w->in + GD_SEGMENT_HEADER, old.stored_length);
        if (old.slots != NULL) {
            one->header.slots = one->packed;
        }
        for (uint32_t i = 0; i < one->count; i++) {
            r->entries[one->slots[i]].plain_offset =
                r->leased->entries[one->slots[i]].plain_offset;
        }
    }
    return GD_OK;
}

/* The level for packing a segment that keeps its codec. */
static int
kept_level(const gd_leased_group *leased, gd_codec codec)
{
    int level = leased->published.level;
    bool fits = leased->published.codec == codec &&
                gd_codec_require_level(codec, level, NULL) == GD_OK;
    return fits ? level : 0;
}

/* Compresses the run to `out`, which has room for its length.  *stored is 0 if
 * that does not pay. */
static gd_status
compress(const gd_group_rewrite *r, gd_decoder *w, const run *one,
         gd_codec codec, uint8_t *out, size_t *stored, gd_error *err)
{
    bool was_plain =
        r->leased->entries[one->slots[0]].codec == GD_CODEC_NONE;
    int level = r->again ? r->packing.level : kept_level(r->leased, codec);
    int quick = gd_codec_quick_level(level);
    *stored = 0;
    if (r->again && was_plain && quick != level) {
        gd_status s = gd_codec_compress(w->coder, codec, quick, one->plain,
                                        one->length, out, stored, err);
        if (s != GD_OK || *stored == 0) {
            return s;
        }
    }
    return gd_codec_compress(w->coder, codec, level, one->plain, one->length,
                             out, stored, err);
}

/* Makes the plain bytes a segment of their slots. */
static gd_status
pack(gd_group_rewrite *r, gd_decoder *w, run *one, gd_error *err)
{
    gd_codec codec = r->again ? r->packing.codec
                             : (gd_codec)r->leased->entries[one->slots[0]].codec;
    bool is_listed = !is_consecutive(one);
    for (uint32_t i = 0; is_listed && i < one->count; i++) {
        gd_put16(one->packed + GD_LISTED_SLOT * i, (uint16_t)one->slots[i]);
    }
    one->header = (gd_segment_header){
        .blocks = one->count,
        .first_slot = one->slots[0],
        .plain_length = one->length,
        .slots = is_listed ? one->packed : NULL,
    };
    uint32_t list = gd_segment_list_size(&one->header);
    size_t stored;
    gd_status s = compress(r, w, one, codec, one->packed + list, &stored, err);
    one->header.codec = stored == 0 ? GD_CODEC_NONE : codec;
    one->header.stored_length =
        list + (stored == 0 ? one->length : (uint32_t)stored);
    return s;
}

/* The list behind the header of a run, and the stored bytes. */
static void
behind_header(const run *one, struct iovec pieces[2])
{
    uint32_t list = gd_segment_list_size(&one->header);
    bool packed = one->copied || one->header.codec != GD_CODEC_NONE;
    pieces[0] = (struct iovec){one->packed, list};
    pieces[1] = (struct iovec){packed ? one->packed + list : one->plain,
                               one->header.stored_length - list};
}

static void
gather_task(void *arg, size_t task, unsigned number)
{
    gd_group_rewrite *r = arg;
    run *one = &r->runs[task];
    gd_decoder *w = &r->source.workers[number];
    /* Here, since a strong codec takes long for a bundle. */
    one->status = gd_group_rewrite_require_room(r, &one->err);
    if (one->status == GD_OK && r->again) {
        take_blocks(r, one);
    } else if (one->status == GD_OK) {
        one->status = fetch_segment(r, w, one, &one->err);
    }
    if (one->status == GD_OK && !one->copied) {
        one->status = pack(r, w, one, &one->err);
    }
    if (one->status == GD_OK) {
        struct iovec pieces[2];
        behind_header(one, pieces);
        gd_segment_header_encode(&one->header, r->target.bounds.seed, pieces,
                                 2, one->encoded);
    }
}

/* ---- the pool's part: reading back ---- */

/* Verifies that others will read the verified blocks, whatever a codec or
 * memory did to them.  Only a later reading can show whether the disk has
 * them. */
static gd_status
read_back(const gd_group_rewrite *r, gd_decoder *w, const run *one,
          gd_error *err)
{
    gd_segment_header header;
    const uint8_t *wanted = one->plain;
    gd_status s = gd_group_read_segment(
        &r->target, &r->entries[one->slots[0]], one->slots[0], w->coder, w->in,
        w->plain, &header, err);
    for (uint32_t i = 0; s == GD_OK && i < one->count; i++) {
        uint32_t slot = one->slots[i];
        const gd_entry *entry = &r->entries[slot];
        s = gd_group_match_segment(&r->target, entry, slot, &header, err);
        if (s == GD_OK && memcmp(w->plain + entry->plain_offset, wanted,
                                 entry->plain_length) != 0) {
            s = gd_fail(err, GD_CORRUPT, "%s: the block of slot %u is not "
                        "what was written", r->target.name, slot);
        }
        wanted += entry->plain_length;
    }
    return s;
}

static void
read_back_task(void *arg, size_t task, unsigned number)
{
    gd_group_rewrite *r = arg;
    run *one = &r->runs[task];
    one->status = read_back(r, &r->source.workers[number], one, &one->err);
}

/* ---- a bundle ---- */

/* Runs one task for each run.  Returns the error of the first run that
 * failed. */
static gd_status
run_job(gd_group_rewrite *r, void (*task)(void *, size_t, unsigned),
        gd_error *err)
{
    gd_pool *pool = r->leased->repo->pool;
    gd_job job = {.run = task, .arg = r, .tasks = r->count};
    gd_pool_submit(pool, &job);
    gd_pool_wait(pool, &job);
    for (size_t i = 0; i < r->count; i++) {
        if (r->runs[i].status != GD_OK) {
            if (err != NULL) {
                *err = r->runs[i].err;
            }
            return r->runs[i].status;
        }
    }
    return GD_OK;
}

/* Appends the bundle's segments, and notes their places in the entries. */
static gd_status
append_bundle(gd_group_rewrite *r, uint64_t *written, gd_error *err)
{
    struct iovec pieces[PIECES * BUNDLE_RUNS];
    uint64_t at = r->end;
    for (size_t i = 0; i < r->count; i++) {
        run *one = &r->runs[i];
        pieces[PIECES * i] =
            (struct iovec){one->encoded, sizeof one->encoded};
        behind_header(one, &pieces[PIECES * i + 1]);
        for (uint32_t k = 0; k < one->count; k++) {
            gd_entry *entry = &r->entries[one->slots[k]];
            entry->segment = (uint32_t)at;
            entry->stored_length = one->header.stored_length;
            entry->codec = (uint8_t)one->header.codec;
        }
        at += GD_SEGMENT_HEADER + (uint64_t)one->header.stored_length;
        if (at > UINT32_MAX) {
            return gd_fail(err, GD_NOSPACE, "%s would have more than 4 GiB",
                           r->leased->group->name);
        }
    }
    *written = at - r->end;
    GD_TRY(require_room(r, *written, err));
    GD_TRY(gd_writev_full(r->target.env, r->target.fd, pieces,
                          (int)(PIECES * r->count), r->end, r->target.name,
                          err));
    r->target.env->start_writeback(r->target.env, r->target.fd, r->end,
                                   *written);
    r->end = at;
    return GD_OK;
}

static gd_status
write_bundle(gd_group_rewrite *r, uint64_t *cost, gd_error *err)
{
    GD_TRY(run_job(r, gather_task, err));
    GD_TRY(append_bundle(r, cost, err));
    for (size_t i = 0; i < r->count; i++) {
        *cost += r->runs[i].read;
    }
    return run_job(r, read_back_task, err);
}

/* ---- completing ---- */

static gd_status
complete_file(gd_group_rewrite *r, gd_error *err)
{
    const gd_env *env = r->target.env;
    gd_published *record = &r->record;
    *record = r->leased->published;
    record->flags |= GD_GROUP_UNSETTLED;
    record->end = r->end;
    if (r->again) {
        record->codec = (uint8_t)r->packing.codec;
        record->level = (uint8_t)r->packing.level;
        record->similar = r->packing.similar;
        record->covered =
            r->packing.codec == GD_CODEC_NONE ? 0 : record->count;
    }
    gd_status s = gd_group_next_generation(env, record, err);
    if (s == GD_OK) {
        /* An empty entry is zeros; it is not encoded. */
        s = gd_group_write_except(&r->target, 0, record->count, r->entries,
                                  GD_ENTRY_EMPTY, err);
    }
    /* Write it in both places, so that a torn write of the next record leaves
     * one. */
    for (int i = 0; s == GD_OK && i < 2; i++) {
        record->sequence++;
        s = gd_group_write_published(&r->target, record, err);
    }
    if (s == GD_OK) {
        s = gd_fsync(env, r->target.fd, r->target.name, err);
    }
    r->complete = s == GD_OK;
    return s;
}

gd_status
gd_group_rewrite_step(gd_group_rewrite *r, bool *done, uint64_t *cost,
                      gd_error *err)
{
    gd_rewrite_source *source = &r->source;
    gd_status s = GD_OK;
    *cost = 0;
    if (r->cut == source->count) {
        s = gd_rewrite_source_advance(source, err);
        r->cut = 0;
    }
    if (s == GD_OK && !gd_rewrite_source_ready(source)) {
        s = gd_group_rewrite_require_room(r, err);
        if (s == GD_OK) {
            s = gd_rewrite_source_load(source, cost, err);
        }
    } else if (s == GD_OK && r->cut < source->count) {
        cut_bundle(r);
        s = write_bundle(r, cost, err);
    } else if (s == GD_OK && !r->complete) {
        s = complete_file(r, err);
    }
    *done = r->complete;
    return s;
}

uint32_t
gd_group_rewrite_slots(const gd_group_rewrite *r)
{
    return r->source.next - (r->source.count - r->cut);
}

gd_status
gd_group_rewrite_sizes(const gd_group_rewrite *r, uint64_t *before,
                       uint64_t *after, gd_error *err)
{
    enum { PAGE = 4096 };
    struct stat st;
    GD_TRY(gd_group_stat(r->leased->group, &st, err));
    *before = (uint64_t)st.st_blocks * 512;
    /* Do not count what the file system has reserved for the file, as XFS
     * does for one that grows. */
    *after = (r->end + PAGE - 1) / PAGE * PAGE;
    return GD_OK;
}

/* ---- becoming cold ---- */

static gd_status
require_whole(const gd_group_rewrite *r, gd_error *err)
{
    return r->complete && r->cold
               ? GD_OK
               : gd_fail(err, GD_INVALID, "%s is no complete file of a cold "
                         "group", r->file.name);
}

gd_status
gd_group_rewrite_object(const gd_group_rewrite *r, gd_object *object,
                        const char **path, gd_error *err)
{
    *object = r->target.object;
    object->length = r->end;
    *path = r->file.name;
    return require_whole(r, err);
}

gd_status
gd_group_rewrite_cut(gd_group_rewrite *r, gd_error *err)
{
    const gd_env *env = r->target.env;
    gd_status s = require_whole(r, err);
    if (s != GD_OK) {
        return s;
    }
    int rc = env->ftruncate(env, r->file.fd,
                            gd_fptable_data_start(r->target.bounds.slots));
    s = rc < 0 ? gd_fail_errno(err, -rc, "cannot cut %s", r->file.name)
               : gd_fsync(env, r->file.fd, r->file.name, err);
    r->target.object.length = r->end;
    r->target.is_cold = s == GD_OK;
    return s;
}

/* ---- the exchange ---- */

gd_status
gd_group_rewrite_exchange(gd_group_rewrite *r, gd_owned_group *owned,
                          gd_error *err)
{
    if (r->cold && !r->target.is_cold) {
        return gd_fail(err, GD_INVALID, "%s still has its segments",
                       r->file.name);
    }
    return gd_group_exchange(owned, &r->file, &r->target, &r->entries,
                             &r->record, err);
}

gd_status
gd_group_rewrite_owned(gd_owned_group *owned, const gd_packing *packing,
                       uint64_t *bytes, gd_error *err)
{
    gd_group_rewrite *r;
    bool done = false;
    uint64_t cost, before, after;
    *bytes = 0;
    gd_status s = gd_owned_group_require_usable(owned, err);
    if (s == GD_OK) {
        s = gd_group_rewrite_open(owned->leased, packing, false, &r, err);
    }
    if (s != GD_OK) {
        return s;
    }
    while (s == GD_OK && !done) {
        s = gd_group_rewrite_step(r, &done, &cost, err);
    }
    if (s == GD_OK) {
        s = gd_group_rewrite_sizes(r, &before, &after, err);
    }
    if (s == GD_OK) {
        s = gd_group_rewrite_exchange(r, owned, err);
    }
    if (s == GD_OK && before > after) {
        *bytes = before - after;
    }
    gd_group_rewrite_close(r);
    return s;
}
