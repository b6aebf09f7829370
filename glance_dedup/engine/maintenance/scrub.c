/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.c - see scrub.h.
 */
#include "engine/maintenance/scrub.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files/group.h"
#include "engine/maintenance/diskwindow.h"
#include "engine/read/verify.h"

enum { PORTIONS = 2 };

/* A live entry, sorted by the place of its segment. */
typedef struct place {
    uint32_t segment;
    uint32_t index; /* its slot minus the first */
} place;

/* Memory of one thread, and its findings. */
typedef struct lane {
    gd_decoder decoder;
    const uint8_t *plain; /* of the current segment */
    uint64_t bytes;
    gd_status s;
    gd_error err;
} lane;

typedef struct scrub {
    gd_repo *repo;
    bool hashed;     /* fingerprints are computed, too */
    gd_group *group; /* of this reading */
    int direct;      /* the same file for direct reads; -1: not possible */
    uint32_t first, count;
    gd_scrub_extent extent;
    uint32_t published; /* slots published at this reading */
    gd_entry *entries;
    uint8_t *verdicts;
    place *places; /* and one more, behind the last */
    size_t place_count;
    lane *lanes;    /* of the pool's threads, and of the caller */
    unsigned lane_count;
    struct portion *portions; /* two: one is read while the other is judged */
} scrub;

/* A window, and the segments in it. */
typedef struct portion {
    scrub *x;
    gd_disk_window window;
    size_t *starts; /* the first place of each segment, and the one behind */
    gd_job job;
} portion;

/* Returns whether the error comes from the disk or the file, not from the
 * machine. */
static bool
is_damage(gd_status s, const gd_error *err)
{
    return s == GD_CORRUPT ||
           (s == GD_IO &&
            (err->sys_errno == EIO || err->sys_errno == EILSEQ ||
             err->sys_errno == EBADMSG || err->sys_errno == EUCLEAN ||
             err->sys_errno == ENODATA));
}

/* ---- entries ---- */

/* Reads sector by sector, so that a bad sector spoils only itself. */
static gd_status
read_sectors(scrub *x, gd_error *err)
{
    for (uint32_t i = 0; i < x->count;) {
        uint32_t slot = x->first + i;
        uint32_t n = GD_ENTRIES_PER_SECTOR - slot % GD_ENTRIES_PER_SECTOR;
        n = n < x->count - i ? n : x->count - i;
        gd_status s = gd_group_read_entries(x->group, slot, n, x->entries + i,
                                            err);
        if (s != GD_OK && !is_damage(s, err)) {
            return s;
        }
        for (uint32_t k = 0; s != GD_OK && k < n; k++) {
            x->entries[i + k].state = GD_ENTRY_INVALID;
        }
        i += n;
    }
    return GD_OK;
}

static gd_status
read_entries(scrub *x, gd_error *err)
{
    if (x->first > x->group->bounds.slots ||
        x->count > x->group->bounds.slots - x->first) {
        return gd_fail(err, GD_CORRUPT, "%s has %u slots, and not %llu",
                       x->group->name, x->group->bounds.slots,
                       (unsigned long long)x->first + x->count);
    }
    /* Read it before the entries, so that these are at least as new. */
    gd_published record;
    GD_TRY(gd_group_read_published(x->group, &record, err));
    x->published = record.count;
    gd_status s = gd_group_read_entries(x->group, x->first, x->count,
                                        x->entries, err);
    return is_damage(s, err) ? read_sectors(x, err) : s;
}

static int
by_segment(const void *a, const void *b)
{
    const place *x = a, *y = b;
    if (x->segment != y->segment) {
        return x->segment < y->segment ? -1 : 1;
    }
    return x->index < y->index ? -1 : x->index > y->index;
}

/* Returns whether this reading judges the slot.  The first judges all; the
 * second judges those that the first found bad. */
static bool
is_asked(const scrub *x, uint32_t index, bool again)
{
    return !again || x->verdicts[index] >= GD_VERDICT_WORN;
}

/* Returns whether the block is to be judged by its bytes.  No object need be
 * asked for those that lie behind its end. */
static bool
is_within(const scrub *x, const gd_entry *entry)
{
    return (entry->segment >= x->extent.begin &&
            entry->segment < x->extent.end) ||
           (x->group->is_cold &&
            gd_group_segment_end(entry) > x->group->object.length);
}

static void
sort_places(scrub *x, bool again)
{
    bool sorted = true; /* as in most groups */
    x->place_count = 0;
    for (uint32_t i = 0; i < x->count; i++) {
        if (!is_asked(x, i, again)) {
            continue;
        }
        uint8_t state = x->entries[i].state;
        /* A published entry never becomes empty again. */
        bool lost = state == GD_ENTRY_INVALID ||
                    (state == GD_ENTRY_EMPTY && x->first + i < x->published);
        x->verdicts[i] = lost ? GD_VERDICT_INVALID : GD_VERDICT_NONE;
        if (state == GD_ENTRY_LIVE && is_within(x, &x->entries[i])) {
            place *p = &x->places[x->place_count++];
            *p = (place){x->entries[i].segment, i};
            sorted = sorted && (p == x->places || by_segment(p - 1, p) < 0);
        }
    }
    if (!sorted) {
        qsort(x->places, x->place_count, sizeof *x->places, by_segment);
    }
}

/* ---- segments ---- */

/* The header and stored bytes of the segment that this entry describes. */
static gd_status
read_stored(const portion *p, lane *l, const gd_entry *entry,
            const uint8_t **in, gd_error *err)
{
    const gd_group *group = p->x->group;
    size_t length = GD_SEGMENT_HEADER + (size_t)entry->stored_length;
    l->bytes += length;
    *in = gd_disk_window_at(&p->window, entry->segment, length);
    if (*in != NULL) {
        return GD_OK;
    }
    /* The window could not be read, so that a bad place spoils only itself. */
    *in = l->decoder.in;
    return gd_group_read_data(group, l->decoder.in, length, entry->segment,
                              err);
}

/* Reads and decodes the segment as this entry describes it. */
static gd_status
decode_segment(const portion *p, lane *l, const gd_entry *entry,
               const uint8_t **in, gd_segment_header *header, gd_error *err)
{
    const gd_group *group = p->x->group;
    size_t length = GD_SEGMENT_HEADER + (size_t)entry->stored_length;
    GD_TRY(read_stored(p, l, entry, in, err));
    GD_TRY(gd_segment_header_decode(*in, length, &group->bounds, header,
                                    group->name, entry->segment, err));
    if (header->stored_length != entry->stored_length ||
        header->codec != entry->codec) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: the segment at offset %u is another",
                       group->name, entry->segment);
    }
    const uint8_t *behind = *in + GD_SEGMENT_HEADER;
    if (header->codec == GD_CODEC_NONE) {
        l->plain = behind + gd_segment_list_size(header);
        return GD_OK;
    }
    l->plain = l->decoder.plain;
    return gd_segment_decode(l->decoder.coder, header, behind,
                             l->decoder.plain, group->name, entry->segment,
                             err);
}

/* Entries may disagree about their segment: tries each description.  *in is
 * NULL if the segment does not decode. */
static gd_status
read_segment(const portion *p, lane *l, const place *places, size_t count,
             const uint8_t **in, gd_segment_header *header, gd_error *err)
{
    const gd_entry *before = NULL;
    for (size_t i = 0; i < count; i++) {
        const gd_entry *entry = &p->x->entries[places[i].index];
        if (before != NULL && entry->codec == before->codec &&
            entry->stored_length == before->stored_length) {
            continue;
        }
        before = entry;
        gd_status s = decode_segment(p, l, entry, in, header, err);
        if (s == GD_OK || !is_damage(s, err)) {
            return s;
        }
    }
    *in = NULL;
    return GD_OK;
}

/* Judges blocks of one segment.  header is NULL if the segment does not
 * decode. */
static gd_status
judge_blocks(scrub *x, lane *l, const place *places, size_t count,
             const gd_segment_header *header, bool intact, gd_error *err)
{
    gd_verified blocks[GD_VERIFIED_AT_ONCE];
    gd_status s = GD_OK;
    for (size_t i = 0; i < count; i++) {
        uint32_t index = places[i].index;
        blocks[i] =
            (gd_verified){&x->entries[index], x->first + index, false};
    }
    if (header != NULL) {
        s = gd_verify_blocks(x->group, header, l->plain, l->decoder.hasher,
                             blocks, count, err);
    }
    for (size_t i = 0; i < count; i++) {
        x->verdicts[places[i].index] = !blocks[i].good ? GD_VERDICT_DAMAGED
                                       : intact        ? GD_VERDICT_GOOD
                                                       : GD_VERDICT_WORN;
    }
    return s;
}

/* Judges the blocks of one segment. */
static gd_status
judge_segment(const portion *p, lane *l, const place *places, size_t count,
              gd_error *err)
{
    scrub *x = p->x;
    gd_segment_header header = {0};
    const uint8_t *in;
    gd_status s = read_segment(p, l, places, count, &in, &header, err);
    /* Each block has its own checksum.  If only the segment's checksum fails,
     * no block is lost, but a byte on the disk has changed. */
    bool intact = s == GD_OK && in != NULL &&
                  gd_segment_intact(in, &header, x->group->bounds.seed);
    for (size_t i = 0, n; s == GD_OK && i < count; i += n) {
        n = count - i;
        n = n < GD_VERIFIED_AT_ONCE ? n : GD_VERIFIED_AT_ONCE;
        s = judge_blocks(x, l, places + i, n, in != NULL ? &header : NULL,
                         intact, err);
    }
    return s;
}

/* ---- windows ---- */

/* Returns how many places, from the first, name the same segment. */
static size_t
same_segment(const place *places, size_t count)
{
    size_t n = 1;
    while (n < count && places[n].segment == places[0].segment) {
        n++;
    }
    return n;
}

static void
judge_task(void *arg, size_t task, unsigned worker)
{
    const portion *p = arg;
    lane *l = &p->x->lanes[worker];
    size_t from = p->starts[task], to = p->starts[task + 1];
    if (l->s == GD_OK) {
        l->s = judge_segment(p, l, p->x->places + from, to - from, &l->err);
    }
}

static uint64_t
end_of(const scrub *x, const place *p)
{
    return gd_group_segment_end(&x->entries[p->index]);
}

/* Reads a window that begins with this place, and notes the segments in it.
 * Returns the first place behind it. */
static size_t
fill_portion(scrub *x, portion *p, size_t at)
{
    uint64_t start = x->places[at].segment, end = start;
    size_t segments = 0;
    while (at < x->place_count) {
        uint64_t next = end_of(x, &x->places[at]);
        if (segments > 0 && next > start + GD_WINDOW) {
            break;
        }
        end = next > end ? next : end;
        p->starts[segments++] = at;
        at += same_segment(x->places + at, x->place_count - at);
    }
    p->starts[segments] = at;
    if (x->group->is_cold) {
        p->window.length = 0;
        gd_group_expect_data(x->group, start, end - start);
    } else {
        gd_disk_window_fill(&p->window, x->group, x->direct, start, end);
    }
    p->job = (gd_job){.run = judge_task, .arg = p, .tasks = segments};
    return at;
}

/* The first error of a lane. */
static gd_status
status_of(const scrub *x, gd_error *err)
{
    for (unsigned i = 0; i < x->lane_count; i++) {
        if (x->lanes[i].s != GD_OK) {
            if (err != NULL) {
                *err = x->lanes[i].err;
            }
            return x->lanes[i].s;
        }
    }
    return GD_OK;
}

/* The pool judges one window while the caller reads the next. */
static gd_status
judge_places(scrub *x, gd_error *err)
{
    gd_pool *pool = x->repo->pool;
    portion *now = &x->portions[0], *next = &x->portions[1];
    gd_status s = GD_OK;
    size_t at = x->place_count > 0 ? fill_portion(x, now, 0) : 0;
    for (bool more = at > 0; s == GD_OK && more;) {
        gd_pool_submit(pool, &now->job);
        more = at < x->place_count;
        if (more) {
            at = fill_portion(x, next, at);
        }
        gd_pool_wait(pool, &now->job);
        s = status_of(x, err);
        portion *judged = now;
        now = next;
        next = judged;
    }
    return s;
}

/* ---- readings ---- */

static gd_status
read_once(scrub *x, uint32_t number, bool again, gd_error *err)
{
    gd_repo *repo = x->repo;
    GD_TRY(gd_group_open(repo->env, repo->root, &repo->params, number,
                         O_RDONLY, &x->group, err));
    x->direct = gd_group_open_direct(x->group, repo->root, O_RDONLY);
    gd_status s = read_entries(x, err);
    if (s == GD_OK) {
        sort_places(x, again);
        for (size_t i = 0; again && i < x->place_count; i++) {
            uint64_t start = x->places[i].segment;
            gd_group_forget_data(x->group, start,
                                 end_of(x, &x->places[i]) - start);
        }
        s = judge_places(x, err);
    }
    if (x->direct >= 0) {
        repo->env->close(repo->env, x->direct);
    }
    gd_group_close(x->group);
    return s;
}

static bool
finds_fault(const scrub *x)
{
    for (uint32_t i = 0; i < x->count; i++) {
        if (is_asked(x, i, true)) {
            return true;
        }
    }
    return false;
}

static gd_status
open_portion(scrub *x, portion *p, gd_error *err)
{
    const gd_env *env = x->repo->env;
    p->x = x;
    p->starts = gd_calloc(env, x->count + 1, sizeof *p->starts, err);
    return p->starts == NULL ? GD_NOMEM
                             : gd_disk_window_open(env, &p->window, err);
}

static gd_status
open_lanes(scrub *x, gd_error *err)
{
    const gd_repo *repo = x->repo;
    unsigned count = gd_pool_threads(repo->pool) + 1;
    x->lanes = gd_calloc(repo->env, count, sizeof *x->lanes, err);
    if (x->lanes == NULL) {
        return GD_NOMEM;
    }
    x->lane_count = count;
    for (unsigned i = 0; i < count; i++) {
        GD_TRY(gd_decoder_open(repo->env, x->hashed ? repo->digest : NULL,
                               &x->lanes[i].decoder, err));
    }
    return GD_OK;
}

static gd_status
allocate(scrub *x, gd_error *err)
{
    const gd_env *env = x->repo->env;
    x->entries = gd_calloc(env, x->count, sizeof *x->entries, err);
    x->places = gd_calloc(env, x->count, sizeof *x->places, err);
    x->verdicts = gd_calloc(env, x->count, 1, err);
    x->portions = gd_calloc(env, PORTIONS, sizeof *x->portions, err);
    if (x->entries == NULL || x->places == NULL || x->verdicts == NULL ||
        x->portions == NULL) {
        return GD_NOMEM;
    }
    GD_TRY(open_lanes(x, err));
    for (int i = 0; i < PORTIONS; i++) {
        GD_TRY(open_portion(x, &x->portions[i], err));
    }
    return GD_OK;
}

static void
release(scrub *x)
{
    const gd_env *env = x->repo->env;
    for (unsigned i = 0; i < x->lane_count; i++) {
        gd_decoder_close(env, &x->lanes[i].decoder);
    }
    for (int i = 0; x->portions != NULL && i < PORTIONS; i++) {
        gd_disk_window_close(env, &x->portions[i].window);
        env->release(env, x->portions[i].starts);
    }
    env->release(env, x->lanes);
    env->release(env, x->portions);
    env->release(env, x->entries);
    env->release(env, x->places);
    env->release(env, x->verdicts);
}

static uint64_t
bytes_of(const scrub *x)
{
    uint64_t bytes = 0;
    for (unsigned i = 0; i < x->lane_count; i++) {
        bytes += x->lanes[i].bytes;
    }
    return bytes;
}

gd_status
gd_scrub(gd_repo *repo, uint32_t number, uint32_t first, uint32_t count,
         bool hashed, gd_scrub_extent extent, gd_scrub_result *result,
         gd_error *err)
{
    gd_error own;
    err = err == NULL ? &own : err;
    memset(result, 0, sizeof *result);
    if (count > GD_MAX_SLOTS) {
        return gd_fail(err, GD_INVALID, "no group has %u slots", count);
    }
    scrub x = {.repo = repo, .first = first, .count = count,
               .extent = extent, .hashed = hashed};
    gd_status s = allocate(&x, err);
    if (s == GD_OK) {
        s = read_once(&x, number, false, err);
    }
    if (s == GD_OK && finds_fault(&x)) {
        s = read_once(&x, number, true, err);
    }
    if (s == GD_OK) {
        result->bytes = bytes_of(&x);
        result->verdicts = x.verdicts;
        x.verdicts = NULL;
    }
    release(&x);
    return s;
}
