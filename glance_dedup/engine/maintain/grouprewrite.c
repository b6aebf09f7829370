/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grouprewrite.c - see grouprewrite.h.
 *
 * Slots are processed in order and cut into runs; each run becomes a segment.
 * A bundle of runs at a time goes through three jobs of the pool, one task for
 * each run:
 *
 *     gather: read the old segments, verify   |
 *             the blocks, compress them       | append all | read back, compare
 */
#include "engine/maintain/grouprewrite.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "engine/files/spool.h"
#include "engine/format/fingerprint.h"
#include "engine/read/verify.h"

enum {
    FIXED_HEADER = 512,
    BUNDLE_BYTES = 4 << 20, /* plain */
    BUNDLE_RUNS = 64,
};

/* Consecutive live slots that become one segment. */
typedef struct run {
    uint32_t first, end;
    uint32_t length; /* of all its blocks */
    uint8_t *plain;  /* its blocks, one behind the other */
    uint8_t *packed; /* its stored bytes, unless they are plain */
    bool copied;     /* the old segment, as it was stored */
    gd_segment_header header;
    uint8_t encoded[GD_SEGMENT_HEADER];
    uint64_t read; /* bytes read from old segments */
    gd_status status;
    gd_error err;
} run;

struct gd_group_rewrite {
    gd_leased_group *leased;
    bool anew; /* everything is compressed again, with: */
    gd_codec codec;
    int level;
    gd_spool_file file;
    gd_group target;   /* the new file, as a group */
    gd_entry *entries; /* the new entries, below next */
    uint64_t end;      /* end of the new file */
    uint32_t next;     /* the first slot not processed yet */
    bool complete;
    gd_published record; /* of the complete file */
    gd_decoder *workers; /* one for each thread */
    run *runs; /* the bundle */
    size_t count;
    uint8_t *plain, *packed; /* of the runs */
};

/* ---- preparing ---- */

static gd_status
check_entries(const gd_leased_group *leased, gd_error *err)
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

/* How many threads: the pool's, and the one that waits for them. */
static unsigned
count_workers(const gd_group_rewrite *r)
{
    return gd_pool_threads(r->leased->repo->pool) + 1;
}

static gd_status
open_buffers(gd_group_rewrite *r, gd_error *err)
{
    gd_repo *repo = r->leased->repo;
    const gd_env *env = repo->env;
    unsigned count = count_workers(r);
    r->entries = gd_calloc(env, r->leased->group->bounds.slots,
                           sizeof *r->entries, err);
    r->runs = gd_calloc(env, BUNDLE_RUNS, sizeof *r->runs, err);
    r->plain = gd_alloc(env, BUNDLE_BYTES, err);
    r->packed = gd_alloc(env, BUNDLE_BYTES, err);
    r->workers = gd_calloc(env, count, sizeof *r->workers, err);
    gd_status s = r->entries == NULL || r->runs == NULL || r->plain == NULL ||
                          r->packed == NULL || r->workers == NULL
                      ? GD_NOMEM
                      : GD_OK;
    for (unsigned i = 0; s == GD_OK && i < count; i++) {
        s = gd_decoder_open(env, repo->digest, &r->workers[i], err);
    }
    return s;
}

void
gd_group_rewrite_close(gd_group_rewrite *r)
{
    gd_repo *repo = r->leased->repo;
    const gd_env *env = repo->env;
    for (unsigned i = 0; r->workers != NULL && i < count_workers(r); i++) {
        gd_decoder_close(env, &r->workers[i]);
    }
    env->release(env, r->workers);
    env->release(env, r->packed);
    env->release(env, r->plain);
    env->release(env, r->runs);
    env->release(env, r->entries);
    gd_spool_discard(env, repo->root, &r->file); /* if it still exists */
    env->release(env, r);
}

/* Copies the fixed header, and with it the seed of everything that follows. */
static gd_status
start_file(gd_group_rewrite *r, gd_error *err)
{
    const gd_group *old = r->leased->group;
    const gd_env *env = old->env;
    uint8_t header[FIXED_HEADER];
    r->target = *old;
    r->target.fd = r->file.fd;
    memcpy(r->target.name, r->file.name, sizeof r->target.name);
    r->end = gd_data_start(old->bounds.slots);
    gd_status s = gd_repo_check_room(r->leased->repo, r->end, err);
    if (s == GD_OK) {
        s = gd_read_full(env, old->fd, header, sizeof header, 0, old->name,
                         err);
    }
    if (s == GD_OK) {
        s = gd_write_full(env, r->file.fd, header, sizeof header, 0,
                          r->file.name, err);
    }
    if (s != GD_OK) {
        return s;
    }
    int rc;
    do {
        rc = env->fallocate(env, r->file.fd, 0, r->end);
    } while (rc == -EINTR);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot write %s anew as %s",
                                  old->name, r->file.name)
                  : GD_OK;
}

static void
expect_segments(const gd_leased_group *leased)
{
    const gd_group *group = leased->group;
    uint64_t start = gd_data_start(group->bounds.slots);
    if (leased->published.end > start) {
        group->env->start_readahead(group->env, group->fd, start,
                                    leased->published.end - start);
    }
}

gd_status
gd_group_rewrite_open(gd_leased_group *leased, const gd_codec *codec, int level,
                      gd_group_rewrite **out, gd_error *err)
{
    gd_repo *repo = leased->repo;
    gd_status s = check_entries(leased, err);
    /* A crash may leave either file under the name: both must be whole. */
    if (s == GD_OK) {
        s = gd_fsync(repo->env, leased->group->fd, leased->group->name, err);
    }
    if (s != GD_OK) {
        return s;
    }
    gd_group_rewrite *r = gd_calloc(repo->env, 1, sizeof *r, err);
    if (r == NULL) {
        return GD_NOMEM;
    }
    r->leased = leased;
    r->anew = codec != NULL;
    r->codec = codec != NULL ? *codec : GD_CODEC_NONE;
    r->level = gd_codec_real_level(r->codec, level);
    s = gd_spool_create(repo->env, repo->root, GD_SPOOL_GROUP, &r->file, err);
    if (s != GD_OK) {
        repo->env->release(repo->env, r);
        return s;
    }
    s = open_buffers(r, err);
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

/* ---- cutting ---- */

/* Whether two neighbours go into one segment.  Blocks that no codec made
 * smaller stay with their like, so that a quick level can find this out
 * again. */
static bool
goes_with(const gd_group_rewrite *r, const gd_entry *first,
          const gd_entry *next)
{
    return r->anew ? (first->codec == GD_CODEC_NONE) ==
                         (next->codec == GD_CODEC_NONE)
                   : first->segment == next->segment;
}

/* Finds the run that begins with a live slot. */
static void
cut_run(const gd_group_rewrite *r, uint32_t first, run *one)
{
    const gd_entry *entries = r->leased->entries;
    uint32_t most = GD_SEGMENT_MAX; /* of the old segment: overlapping entries
                                     * are not ours */
    if (r->anew) {
        most = gd_segment_joined(r->leased->repo->params.segment_size);
    }
    one->first = first;
    one->end = first;
    one->length = 0;
    while (one->end < r->leased->published.count &&
           entries[one->end].state == GD_ENTRY_LIVE &&
           goes_with(r, &entries[first], &entries[one->end]) &&
           one->length + entries[one->end].plain_length <= most) {
        one->length += entries[one->end].plain_length;
        one->end++;
    }
}

/* Finds the next bundle, which is empty at the end. */
static void
cut_bundle(gd_group_rewrite *r)
{
    const gd_leased_group *leased = r->leased;
    size_t used = 0;
    r->count = 0;
    while (r->next < leased->published.count && r->count < BUNDLE_RUNS) {
        if (leased->entries[r->next].state != GD_ENTRY_LIVE) {
            r->entries[r->next] = leased->entries[r->next]; /* void or freed */
            r->next++;
            continue;
        }
        run *one = &r->runs[r->count];
        cut_run(r, r->next, one);
        if (used + one->length > BUNDLE_BYTES) {
            break;
        }
        one->plain = r->plain + used;
        one->packed = r->packed + used;
        used += one->length;
        r->next = one->end;
        r->count++;
    }
}

/* ---- the pool's part: gathering and compressing ---- */

gd_status
gd_group_rewrite_check(const gd_group_rewrite *r, gd_error *err)
{
    const gd_leased_group *leased = r->leased;
    gd_status s =
        gd_locks_look_for_intent(leased->repo->locks, leased->number, err);
    if (s == GD_BUSY) {
        return gd_fail(err, s, "%s is to be collected", leased->group->name);
    }
    return s == GD_OK ? gd_repo_check_room(leased->repo, 0, err) : s;
}

/* Slots [first, end) name one segment, which was read. */
typedef struct old_segment {
    gd_segment_header header;
    uint32_t first, end;
} old_segment;

static gd_status
verify_blocks(const gd_group_rewrite *r, gd_decoder *w, const old_segment *old,
              gd_error *err)
{
    const gd_group *group = r->leased->group;
    gd_verified blocks[GD_VERIFIED_AT_ONCE];
    gd_status s = GD_OK;
    for (uint32_t slot = old->first; s == GD_OK && slot < old->end;) {
        size_t count = 0;
        for (; slot < old->end && count < GD_VERIFIED_AT_ONCE; slot++) {
            blocks[count++] =
                (gd_verified){&r->leased->entries[slot], slot, false};
        }
        s = gd_verify_blocks(group, &old->header, w->plain, w->hasher, blocks,
                             count, err);
        for (size_t i = 0; s == GD_OK && i < count; i++) {
            if (!blocks[i].good) {
                s = gd_fail(err, GD_CORRUPT, "%s: the block of slot %u, in "
                            "the segment at offset %u, is damaged",
                            group->name, blocks[i].slot,
                            blocks[i].entry->segment);
            }
        }
    }
    return s;
}

/* Reads the segment that the slot names, and verifies those of its blocks that
 * are in the run. */
static gd_status
read_segment(const gd_group_rewrite *r, gd_decoder *w, run *one, uint32_t slot,
             old_segment *old, gd_error *err)
{
    const gd_entry *entries = r->leased->entries;
    gd_status s = gd_group_read_segment(r->leased->group, &entries[slot], slot,
                                        w->coder, w->in, w->plain,
                                        &old->header, err);
    if (s != GD_OK) {
        return s;
    }
    one->read += GD_SEGMENT_HEADER + (uint64_t)old->header.stored_length;
    uint64_t end = (uint64_t)old->header.first_slot + old->header.blocks;
    old->first = old->end = slot;
    while (old->end < one->end && old->end < end &&
           entries[old->end].segment == entries[slot].segment) {
        old->end++;
    }
    return verify_blocks(r, w, old, err);
}

/* Whether the run is exactly this segment, down to its checksum.  A segment
 * whose stored bytes do not fit in the run's place was not written by us. */
static bool
is_whole(const gd_group_rewrite *r, const gd_decoder *w, const run *one,
         const old_segment *old)
{
    return !r->anew && old->header.first_slot == one->first &&
           old->header.blocks == one->end - one->first &&
           old->header.stored_length <= one->length &&
           gd_segment_intact(w->in, &old->header,
                             r->leased->group->bounds.seed);
}

static gd_status
fetch(gd_group_rewrite *r, gd_decoder *w, run *one, gd_error *err)
{
    gd_status s = GD_OK;
    uint32_t at = 0;
    one->copied = false;
    one->read = 0;
    for (uint32_t slot = one->first; s == GD_OK && slot < one->end;) {
        old_segment old;
        s = read_segment(r, w, one, slot, &old, err);
        for (; s == GD_OK && slot < old.end; slot++) {
            const gd_entry *entry = &r->leased->entries[slot];
            r->entries[slot] = *entry;
            r->entries[slot].plain_offset = at;
            memcpy(one->plain + at, w->plain + entry->plain_offset,
                   entry->plain_length);
            at += entry->plain_length;
        }
        if (s == GD_OK && is_whole(r, w, one, &old)) {
            one->copied = true;
            one->header = old.header;
            memcpy(one->packed, w->in + GD_SEGMENT_HEADER,
                   old.header.stored_length);
        }
    }
    for (uint32_t i = one->first; one->copied && i < one->end; i++) {
        r->entries[i].plain_offset = r->leased->entries[i].plain_offset;
    }
    return s;
}

/* The level for packing a segment that keeps its codec. */
static int
kept_level(const gd_leased_group *leased, gd_codec codec)
{
    int level = leased->published.level;
    bool fits = leased->published.codec == codec &&
                gd_codec_check_level(codec, level, NULL) == GD_OK;
    return fits ? level : 0;
}

/* Makes the plain bytes a segment of their slots. */
static gd_status
pack(gd_group_rewrite *r, gd_decoder *w, run *one, gd_error *err)
{
    gd_codec old = r->leased->entries[one->first].codec;
    gd_codec codec = r->anew ? r->codec : old;
    int level = r->anew ? r->level : kept_level(r->leased, codec);
    int quick = gd_codec_quick_level(level);
    size_t stored = 0;
    gd_status s = GD_OK;
    bool likely = true;
    if (r->anew && old == GD_CODEC_NONE && quick != level) {
        s = gd_segment_compress(w->coder, codec, quick, one->plain,
                                one->length, one->packed, &stored, err);
        likely = stored > 0;
    }
    if (s == GD_OK && likely) {
        s = gd_segment_compress(w->coder, codec, level, one->plain,
                                one->length, one->packed, &stored, err);
    }
    one->header = (gd_segment_header){
        .codec = stored == 0 ? GD_CODEC_NONE : codec,
        .blocks = one->end - one->first,
        .first_slot = one->first,
        .plain_length = one->length,
        .stored_length = stored == 0 ? one->length : (uint32_t)stored,
    };
    return s;
}

/* The stored bytes of a run. */
static struct iovec
stored_bytes(const run *one)
{
    bool packed = one->copied || one->header.codec != GD_CODEC_NONE;
    return (struct iovec){packed ? one->packed : one->plain,
                          one->header.stored_length};
}

static void
gather_task(void *arg, size_t task, unsigned number)
{
    gd_group_rewrite *r = arg;
    run *one = &r->runs[task];
    gd_decoder *w = &r->workers[number];
    /* Here, since a strong codec takes long for a bundle. */
    one->status = gd_group_rewrite_check(r, &one->err);
    if (one->status == GD_OK) {
        one->status = fetch(r, w, one, &one->err);
    }
    if (one->status == GD_OK && !one->copied) {
        one->status = pack(r, w, one, &one->err);
    }
    if (one->status == GD_OK) {
        struct iovec stored = stored_bytes(one);
        gd_segment_header_encode(&one->header, r->target.bounds.seed, &stored,
                                 1, one->encoded);
    }
}

/* ---- the pool's part: reading back ---- */

/* Whether others will read the verified blocks, whatever a codec or memory did
 * to them.  Whether the disk has them, only a later reading can tell. */
static gd_status
read_back(const gd_group_rewrite *r, gd_decoder *w, const run *one,
          gd_error *err)
{
    gd_segment_header header;
    const uint8_t *wanted = one->plain;
    gd_status s = gd_group_read_segment(
        &r->target, &r->entries[one->first], one->first, w->coder, w->in,
        w->plain, &header, err);
    for (uint32_t i = one->first; s == GD_OK && i < one->end; i++) {
        const gd_entry *entry = &r->entries[i];
        s = gd_group_match_segment(&r->target, entry, i, &header, err);
        if (s == GD_OK && memcmp(w->plain + entry->plain_offset, wanted,
                                 entry->plain_length) != 0) {
            s = gd_fail(err, GD_CORRUPT, "%s: the block of slot %u is not "
                        "what was written", r->target.name, i);
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
    one->status = read_back(r, &r->workers[number], one, &one->err);
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
    struct iovec pieces[2 * BUNDLE_RUNS];
    uint64_t at = r->end;
    for (size_t i = 0; i < r->count; i++) {
        run *one = &r->runs[i];
        pieces[2 * i] = (struct iovec){one->encoded, sizeof one->encoded};
        pieces[2 * i + 1] = stored_bytes(one);
        for (uint32_t slot = one->first; slot < one->end; slot++) {
            r->entries[slot].segment = (uint32_t)at;
            r->entries[slot].stored_length = one->header.stored_length;
            r->entries[slot].codec = (uint8_t)one->header.codec;
        }
        at += GD_SEGMENT_HEADER + (uint64_t)one->header.stored_length;
        if (at > UINT32_MAX) {
            return gd_fail(err, GD_NOSPACE, "%s would have more than 4 GiB",
                           r->leased->group->name);
        }
    }
    *written = at - r->end;
    gd_status s = gd_repo_check_room(r->leased->repo, *written, err);
    if (s == GD_OK) {
        s = gd_writev_full(r->target.env, r->target.fd, pieces,
                           (int)(2 * r->count), r->end, r->target.name, err);
    }
    if (s == GD_OK) {
        r->target.env->start_writeback(r->target.env, r->target.fd, r->end,
                                       *written);
        r->end = at;
    }
    return s;
}

static gd_status
write_bundle(gd_group_rewrite *r, uint64_t *cost, gd_error *err)
{
    gd_status s = run_job(r, gather_task, err);
    if (s == GD_OK) {
        s = append_bundle(r, cost, err);
    }
    for (size_t i = 0; s == GD_OK && i < r->count; i++) {
        *cost += r->runs[i].read;
    }
    return s == GD_OK ? run_job(r, read_back_task, err) : s;
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
    if (r->anew) {
        record->codec = (uint8_t)r->codec;
        record->level = (uint8_t)r->level;
        record->covered = r->codec == GD_CODEC_NONE ? 0 : record->count;
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
    gd_status s = GD_OK;
    *cost = 0;
    cut_bundle(r);
    if (r->count > 0) {
        s = write_bundle(r, cost, err);
    } else if (!r->complete) {
        s = complete_file(r, err);
    }
    *done = r->complete;
    return s;
}

uint32_t
gd_group_rewrite_slots(const gd_group_rewrite *r)
{
    return r->next;
}

gd_status
gd_group_rewrite_sizes(const gd_group_rewrite *r, uint64_t *before,
                       uint64_t *after, gd_error *err)
{
    enum { PAGE = 4096 };
    struct stat st;
    gd_status s = gd_group_stat(r->leased->group, &st, err);
    if (s == GD_OK) {
        *before = (uint64_t)st.st_blocks * 512;
        /* Do not count what the file system has reserved for the file, as XFS
         * does for one that grows. */
        *after = (r->end + PAGE - 1) / PAGE * PAGE;
    }
    return s;
}

/* ---- the exchange ---- */

/* From the rename on, the group has the new file.  It is not written to any
 * more: this process may have been suspended since, and have lost its locks. */
static gd_status
exchange(gd_group_rewrite *r, gd_owned_group *owned, uint64_t inode,
         gd_error *err)
{
    gd_leased_group *leased = r->leased;
    gd_repo *repo = leased->repo;
    const gd_env *env = repo->env;
    gd_group *group = leased->group;
    int rc = env->renameat(env, repo->root, r->file.name, group->name);
    if (rc < 0 && !gd_same_file(env, r->file.fd, repo->root, group->name)) {
        if (rc == -ENOENT) {
            return gd_fail(err, GD_IO, "%s is gone: this process was cut off, "
                           "and lost its locks", r->file.name);
        }
        return gd_fail_errno(err, -rc, "cannot put %s in the place of %s",
                             r->file.name, group->name);
    }
    env->close(env, group->fd);
    group->fd = r->file.fd;
    group->inode = inode;
    r->file.fd = -1;
    env->release(env, leased->entries);
    leased->entries = r->entries;
    r->entries = NULL;
    leased->published = r->record;
    owned->settled = true;
    gd_status s = gd_sync_dir(env, repo->root, GD_DIR_GROUPS, err);
    if (s == GD_OK) {
        leased->published.flags &= ~(uint32_t)GD_GROUP_UNSETTLED;
    }
    owned->failed = s != GD_OK;
    return s;
}

gd_status
gd_group_rewrite_exchange(gd_group_rewrite *r, gd_owned_group *owned,
                          gd_error *err)
{
    struct stat st;
    gd_status s = gd_owned_group_check(owned, err);
    if (s == GD_OK) {
        s = gd_group_stat(&r->target, &st, err);
    }
    if (s == GD_OK) {
        s = gd_owned_group_keep_writers_out(owned, err);
    }
    if (s == GD_OK) {
        s = exchange(r, owned, st.st_ino, err);
        gd_fpcache_drop_removed(r->leased->repo->cache);
    }
    return s;
}

gd_status
gd_owned_group_rewrite(gd_owned_group *owned, const gd_codec *codec, int level,
                       uint64_t *bytes, gd_error *err)
{
    gd_group_rewrite *r;
    bool done = false;
    uint64_t cost, before, after;
    *bytes = 0;
    gd_status s = gd_owned_group_check(owned, err);
    if (s == GD_OK) {
        s = gd_group_rewrite_open(owned->leased, codec, level, &r, err);
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
