/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.c - see scrub.h.
 */
#include "engine/maintain/scrub.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/files/blockgroup.h"
#include "engine/read/verify.h"

enum {
    WINDOW = 4 << 20, /* bytes of the disk read ahead at once */
    PAGE = 4096,
};

/* A live entry, sorted by the place of its segment. */
typedef struct place {
    uint32_t segment;
    uint32_t index; /* its slot minus the first */
} place;

typedef struct scrub {
    gd_repo *repo;
    gd_group *group; /* of this reading */
    uint32_t first, count;
    uint32_t published; /* slots published at this reading */
    gd_entry *entries;
    uint8_t *verdicts;
    place *places;
    size_t place_count;
    gd_decoder decoder;
    uint64_t bytes;
} scrub;

/* Whether the error comes from the disk or the file, not from the machine. */
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
    gd_status s = gd_group_read_published(x->group, &record, err);
    if (s != GD_OK) {
        return s;
    }
    x->published = record.count;
    s = gd_group_read_entries(x->group, x->first, x->count, x->entries, err);
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

/* Whether this reading judges the slot.  The first judges all; the second
 * judges those that the first found bad. */
static bool
is_asked(const scrub *x, uint32_t index, bool again)
{
    return !again || x->verdicts[index] >= GD_VERDICT_WORN;
}

static void
sort_places(scrub *x, bool again)
{
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
        if (state == GD_ENTRY_LIVE) {
            x->places[x->place_count++] = (place){x->entries[i].segment, i};
        }
    }
    qsort(x->places, x->place_count, sizeof *x->places, by_segment);
}

/* ---- segments ---- */

/* Reads and decodes the segment as this entry describes it. */
static gd_status
decode_segment(scrub *x, const gd_entry *entry, gd_segment_header *header,
               gd_error *err)
{
    const gd_group *group = x->group;
    const gd_decoder *own = &x->decoder;
    size_t length = GD_SEGMENT_HEADER + (size_t)entry->stored_length;
    gd_status s = gd_read_full(group->env, group->fd, own->in, length,
                               entry->segment, group->name, err);
    if (s != GD_OK) {
        return s;
    }
    x->bytes += length;
    s = gd_segment_header_decode(own->in, length, &group->bounds, header,
                                 group->name, entry->segment, err);
    if (s == GD_OK && (header->stored_length != entry->stored_length ||
                       header->codec != entry->codec)) {
        s = gd_fail(err, GD_CORRUPT, "%s: the segment at offset %u is another",
                    group->name, entry->segment);
    }
    return s == GD_OK ? gd_segment_decode(own->coder, header,
                                          own->in + GD_SEGMENT_HEADER,
                                          own->plain, group->name,
                                          entry->segment, err)
                      : s;
}

/* Entries may disagree about their segment: tries each description. */
static gd_status
read_segment(scrub *x, const place *places, size_t count,
             gd_segment_header *header, bool *decodes, gd_error *err)
{
    const gd_entry *before = NULL;
    *decodes = false;
    for (size_t i = 0; i < count && !*decodes; i++) {
        const gd_entry *entry = &x->entries[places[i].index];
        if (before != NULL && entry->codec == before->codec &&
            entry->stored_length == before->stored_length) {
            continue;
        }
        before = entry;
        gd_status s = decode_segment(x, entry, header, err);
        if (s != GD_OK && !is_damage(s, err)) {
            return s;
        }
        *decodes = s == GD_OK;
    }
    return GD_OK;
}

/* Judges blocks of one segment.  header is NULL if the segment does not
 * decode. */
static gd_status
judge_blocks(scrub *x, const place *places, size_t count,
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
        s = gd_verify_blocks(x->group, header, x->decoder.plain,
                             x->decoder.hasher, blocks, count, err);
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
judge_segment(scrub *x, const place *places, size_t count, gd_error *err)
{
    gd_segment_header header = {0};
    bool decodes;
    gd_status s = read_segment(x, places, count, &header, &decodes, err);
    /* Each block has its own checksum.  If only the segment's checksum fails,
     * no block is lost, but a byte on the disk has changed. */
    bool intact = s == GD_OK && decodes &&
                  gd_segment_intact(x->decoder.in, &header,
                                    x->group->bounds.seed);
    for (size_t i = 0, n; s == GD_OK && i < count; i += n) {
        n = count - i;
        n = n < GD_VERIFIED_AT_ONCE ? n : GD_VERIFIED_AT_ONCE;
        s = judge_blocks(x, places + i, n, decodes ? &header : NULL, intact,
                         err);
    }
    return s;
}

/* How many places, from the first, name the same segment. */
static size_t
same_segment(const place *places, size_t count)
{
    size_t n = 1;
    while (n < count && places[n].segment == places[0].segment) {
        n++;
    }
    return n;
}

static uint64_t
end_of(const scrub *x, const place *p)
{
    return gd_entry_segment_end(&x->entries[p->index]);
}

/* Drops the range of the next places from the page cache, and has it read
 * again.  Returns how many places lie in it. */
static size_t
open_window(const scrub *x, const place *places, size_t count)
{
    const gd_group *group = x->group;
    uint64_t start = places[0].segment & ~(uint64_t)(PAGE - 1);
    uint64_t end = end_of(x, places);
    size_t n = 1;
    while (n < count && end_of(x, &places[n]) <= start + WINDOW) {
        uint64_t next = end_of(x, &places[n++]);
        end = end > next ? end : next;
    }
    n += same_segment(places + n - 1, count - n + 1) - 1;
    end = (end + PAGE - 1) & ~(uint64_t)(PAGE - 1);
    group->env->drop_cache(group->env, group->fd, start, end - start);
    group->env->start_readahead(group->env, group->fd, start, end - start);
    return n;
}

static gd_status
judge_places(scrub *x, gd_error *err)
{
    gd_status s = GD_OK;
    for (size_t at = 0; s == GD_OK && at < x->place_count;) {
        size_t end = at + open_window(x, x->places + at, x->place_count - at);
        while (s == GD_OK && at < end) {
            size_t n = same_segment(x->places + at, end - at);
            s = judge_segment(x, x->places + at, n, err);
            at += n;
        }
    }
    return s;
}

/* ---- readings ---- */

static gd_status
read_once(scrub *x, uint32_t number, bool again, gd_error *err)
{
    gd_repo *repo = x->repo;
    gd_status s = gd_group_open(repo->env, repo->root, &repo->params, number,
                                O_RDONLY, &x->group, err);
    if (s != GD_OK) {
        return s;
    }
    s = read_entries(x, err);
    if (s == GD_OK) {
        sort_places(x, again);
        s = judge_places(x, err);
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
allocate(scrub *x, gd_error *err)
{
    const gd_env *env = x->repo->env;
    x->entries = gd_calloc(env, x->count, sizeof *x->entries, err);
    x->places = gd_calloc(env, x->count, sizeof *x->places, err);
    x->verdicts = gd_calloc(env, x->count, 1, err);
    return x->entries == NULL || x->places == NULL || x->verdicts == NULL
               ? GD_NOMEM
               : gd_decoder_open(env, x->repo->digest, &x->decoder, err);
}

static void
release(scrub *x)
{
    const gd_env *env = x->repo->env;
    gd_decoder_close(env, &x->decoder);
    env->release(env, x->entries);
    env->release(env, x->places);
    env->release(env, x->verdicts);
}

gd_status
gd_scrub(gd_repo *repo, uint32_t number, uint32_t first, uint32_t count,
         gd_scrub_result *result, gd_error *err)
{
    memset(result, 0, sizeof *result);
    if (count > GD_MAX_SLOTS) {
        return gd_fail(err, GD_INVALID, "no group has %u slots", count);
    }
    scrub x = {.repo = repo, .first = first, .count = count};
    gd_status s = allocate(&x, err);
    if (s == GD_OK) {
        s = read_once(&x, number, false, err);
    }
    if (s == GD_OK && finds_fault(&x)) {
        s = read_once(&x, number, true, err);
    }
    if (s == GD_OK) {
        result->bytes = x.bytes;
        result->verdicts = x.verdicts;
        x.verdicts = NULL;
    }
    release(&x);
    return s;
}
