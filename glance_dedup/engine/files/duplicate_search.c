/* SPDX-License-Identifier: Apache-2.0 */
/*
 * duplicate_search.c - see duplicate_search.h.
 *
 * The inputs are sorted, so a heap of them gives all records in order.  The
 * order in which the outputs get their names is the protocol: no crash loses a
 * pair (merging.rst).
 */
#include "engine/files/duplicate_search.h"

#include <errno.h>

#include "engine/base/coding.h"
#include "engine/format/address.h"
#include "engine/format/index.h"
#include "engine/format/pairs.h"

enum {
    INPUTS = 64,
    RUNS_BYTE = 0,
    HALVES = 2,
};

typedef struct source {
    gd_index_id id;
    gd_index_reader *reader;
    const uint8_t *items;
    size_t at, count; /* in the frame */
    gd_item now;
} source;

struct gd_duplicate_search {
    gd_shards *shards;
    const gd_env *env;
    uint32_t bits, shard;
    gd_split_limits limits;
    int shard_fd, runs_fd; /* locks; -1: not held */
    bool split, more;

    source sources[INPUTS]; /* the first is the shard */
    source *heap[INPUTS];
    size_t source_count, heap_count;
    uint8_t *groups; /* a bit for each that exists */
    uint32_t highest_group;

    uint64_t generation;
    gd_index_id made[HALVES];
    gd_index_writer *out[HALVES], *pairs; /* pairs: NULL while there are none */
    gd_item kept, gone;                   /* the last ones */
    bool has_kept, has_gone;
    uint64_t seen; /* the last address with the kept one's fingerprint */
    uint64_t read, pair_count, ns;
};

/* ---- the heap ---- */

static bool
less(const gd_item *a, const gd_item *b)
{
    return a->key != b->key ? a->key < b->key : a->address < b->address;
}

/* A record that is to be left out comes before its equals. */
static bool
goes_before(const source *a, const source *b)
{
    if (a->now.key != b->now.key || a->now.address != b->now.address) {
        return less(&a->now, &b->now);
    }
    return a->id.kind == GD_INDEX_GONE && b->id.kind != GD_INDEX_GONE;
}

static void
sift_down(gd_duplicate_search *m, size_t at)
{
    source *moving = m->heap[at];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= m->heap_count) {
            break;
        }
        if (child + 1 < m->heap_count &&
            goes_before(m->heap[child + 1], m->heap[child])) {
            child++;
        }
        if (!goes_before(m->heap[child], moving)) {
            break;
        }
        m->heap[at] = m->heap[child];
        at = child;
    }
    m->heap[at] = moving;
}

/* *found: there was another record. */
static gd_status
advance(source *s, bool *found, gd_error *err)
{
    if (s->at == s->count) {
        gd_status status =
            gd_index_reader_next(s->reader, &s->items, &s->count, err);
        if (status != GD_OK) {
            return status;
        }
        s->at = 0;
    }
    *found = s->count > 0;
    if (*found) {
        const uint8_t *record = s->items + s->at++ * GD_INDEX_RECORD;
        s->now = (gd_item){gd_index_key(record), gd_index_address(record)};
    }
    return GD_OK;
}

/* Puts the next record of the heap's first source in its place. */
static gd_status
replace_first(gd_duplicate_search *m, gd_error *err)
{
    bool found;
    GD_TRY(advance(m->heap[0], &found, err));
    if (!found) {
        m->heap[0] = m->heap[--m->heap_count];
    }
    if (m->heap_count > 0) {
        sift_down(m, 0);
    }
    return GD_OK;
}

/* ---- beginning ---- */

static gd_status
open_source(gd_duplicate_search *m, const gd_index_id *id, gd_error *err)
{
    source *s = &m->sources[m->source_count];
    *s = (source){.id = *id};
    gd_status status = gd_shards_read(m->shards, id, &s->reader, err);
    m->source_count += status == GD_OK;
    return status;
}

static void
close_sources(gd_duplicate_search *m)
{
    for (size_t i = 0; i < m->source_count; i++) {
        gd_index_reader_close(m->sources[i].reader);
    }
    m->source_count = 0;
}

/* Opens the shard, if it counts. */
static gd_status
open_shard(gd_duplicate_search *m, const gd_index_list *list, gd_error *err)
{
    gd_index_id *current;
    size_t count;
    bool complete;
    GD_TRY(gd_shards_current(m->shards, list, &current, &count,
                             &complete, err));
    gd_status s = GD_NOTFOUND;
    for (size_t i = 0; i < count; i++) {
        if (current[i].bits == m->bits && current[i].shard == m->shard) {
            s = open_source(m, &current[i], err);
        }
    }
    m->env->release(m->env, current);
    return s == GD_NOTFOUND
               ? gd_fail(err, s, "there is no shard %u of %u bits", m->shard,
                         m->bits)
               : s;
}

static gd_status
open_inputs(gd_duplicate_search *m, const gd_index_list *list, gd_error *err)
{
    gd_status s = open_shard(m, list, err);
    m->more = false;
    for (size_t i = 0; s == GD_OK && i < list->count; i++) {
        const gd_index_id *id = &list->files[i];
        if (id->bits != m->bits || id->shard != m->shard ||
            (id->kind != GD_INDEX_RUN && id->kind != GD_INDEX_GONE)) {
            continue;
        }
        if (m->source_count == INPUTS) {
            m->more = true;
            break;
        }
        s = open_source(m, id, err);
    }
    return s == GD_OK ? gd_shards_next(list, m->bits, m->shard,
                                       &m->generation, err)
                      : s;
}

static gd_status
list_and_open(gd_duplicate_search *m, gd_error *err)
{
    gd_index_list list;
    close_sources(m);
    gd_status s = gd_shards_list(m->shards, &list, err);
    if (s == GD_OK) {
        s = open_inputs(m, &list, err);
        m->env->release(m->env, list.files);
    }
    return s;
}

/* A split needs all runs of the shard, and the lock of the runs: while it is
 * held, nobody else writes a run.  If another has it, a later merge splits. */
static gd_status
prepare_split(gd_duplicate_search *m, gd_error *err)
{
    const gd_index_head *head = gd_index_reader_head(m->sources[0].reader);
    if ((head->flags & GD_INDEX_LARGE) == 0 || m->source_count < 2 ||
        m->bits == GD_SHARD_BITS_MAX) {
        return GD_OK;
    }
    gd_status s =
        gd_shards_take_byte(m->shards, RUNS_BYTE, &m->runs_fd, err);
    if (s != GD_OK) {
        return s == GD_BUSY ? GD_OK : s;
    }
    s = list_and_open(m, err);
    m->split = s == GD_OK && !m->more;
    return s;
}

/* The outputs are no larger than the inputs, but for pairs, of which each is of
 * a record that is left out. */
static gd_status
require_room(gd_duplicate_search *m, gd_error *err)
{
    uint64_t items = 0;
    for (size_t i = 0; i < m->source_count; i++) {
        items += gd_index_reader_head(m->sources[i].reader)->items;
    }
    return gd_shards_require_room(m->shards, items * GD_PAIR_SIZE, err);
}

static gd_status
create_outputs(gd_duplicate_search *m, gd_error *err)
{
    for (uint32_t i = 0; i < (m->split ? 2 : 1); i++) {
        m->made[i] = (gd_index_id){GD_INDEX_SHARD, m->bits + m->split,
                                   m->split ? 2 * m->shard + i : m->shard,
                                   m->generation};
        GD_TRY(gd_shards_create(m->shards, &m->made[i], &m->out[i], err));
    }
    return GD_OK;
}

static gd_status
fill_heap(gd_duplicate_search *m, gd_error *err)
{
    for (size_t i = 0; i < m->source_count; i++) {
        bool found;
        GD_TRY(advance(&m->sources[i], &found, err));
        if (found) {
            m->heap[m->heap_count++] = &m->sources[i];
        }
    }
    for (size_t i = m->heap_count / 2; i-- > 0;) {
        sift_down(m, i);
    }
    return GD_OK;
}

static gd_status
begin(gd_duplicate_search *m, gd_error *err)
{
    gd_status s = gd_shards_take_byte(
        m->shards, (UINT64_C(1) << m->bits) + m->shard, &m->shard_fd, err);
    if (s == GD_OK) {
        s = list_and_open(m, err);
    }
    if (s == GD_OK) {
        s = prepare_split(m, err);
    }
    if (s != GD_OK || m->source_count < 2) {
        return s;
    }
    s = require_room(m, err);
    if (s == GD_OK) {
        /* After the runs were listed: so it has all of their groups. */
        s = gd_shards_groups(m->shards, &m->groups, &m->highest_group, err);
    }
    if (s == GD_OK) {
        s = create_outputs(m, err);
    }
    return s == GD_OK ? fill_heap(m, err) : s;
}

gd_status
gd_duplicate_search_begin(gd_shards *shards, uint32_t bits, uint32_t shard,
                          gd_split_limits limits, gd_duplicate_search **search,
                          gd_error *err)
{
    const gd_env *env = gd_shards_env(shards);
    *search = NULL;
    if (bits > GD_SHARD_BITS_MAX || shard >= UINT32_C(1) << bits) {
        return gd_fail(err, GD_INVALID, "no shard has these bits");
    }
    gd_duplicate_search *m = gd_calloc(env, 1, sizeof *m, err);
    if (m == NULL) {
        return GD_NOMEM;
    }
    m->shards = shards;
    m->env = env;
    m->bits = bits;
    m->shard = shard;
    m->limits = limits;
    m->shard_fd = m->runs_fd = -1;
    int64_t began = env->monotonic_ns(env);
    gd_status s = begin(m, err);
    m->ns = (uint64_t)(env->monotonic_ns(env) - began);
    if (s != GD_OK || m->source_count < 2) {
        gd_duplicate_search_end(m);
        return s;
    }
    *search = m;
    return GD_OK;
}

/* ---- merging ---- */

static bool
has_group(const gd_duplicate_search *m, uint64_t address)
{
    uint32_t group = (uint32_t)(address >> GD_SLOT_BITS);
    return group <= m->highest_group &&
           (m->groups[group / 8] >> group % 8 & 1) != 0;
}

static gd_status
put_pair(gd_duplicate_search *m, uint64_t other, gd_error *err)
{
    uint8_t pair[GD_PAIR_SIZE];
    if (m->pairs == NULL) {
        uint32_t number;
        gd_status s = gd_random(m->env, &number, sizeof number, err);
        const gd_index_id id = {GD_INDEX_PAIRS, m->bits, m->shard,
                                m->generation << 32 | number};
        if (s == GD_OK) {
            s = gd_shards_create(m->shards, &id, &m->pairs, err);
        }
        if (s != GD_OK) {
            return s;
        }
    }
    gd_put64(pair, other);
    gd_put64(pair + 8, m->kept.address);
    m->pair_count++;
    return gd_index_writer_append(m->pairs, pair, 1, err);
}

static gd_status
put_record(gd_duplicate_search *m, const gd_item *item, gd_error *err)
{
    uint8_t record[GD_INDEX_RECORD];
    gd_index_put_record(record, item->key, item->address);
    unsigned half = m->split ? gd_index_shard(item->key, m->bits + 1) & 1 : 0;
    m->kept = *item;
    m->has_kept = true;
    m->seen = item->address;
    return gd_index_writer_append(m->out[half], record, 1, err);
}

/* Items arrive in order, so the first record of each fingerprint has the lowest
 * address. */
static gd_status
take_item(gd_duplicate_search *m, gd_index_kind kind, const gd_item *item,
          gd_error *err)
{
    if (kind == GD_INDEX_GONE) {
        m->gone = *item;
        m->has_gone = true;
        return GD_OK;
    }
    if ((m->has_gone && m->gone.key == item->key &&
         m->gone.address == item->address) ||
        !has_group(m, item->address)) {
        return GD_OK;
    }
    if (!m->has_kept || m->kept.key != item->key) {
        return put_record(m, item, err);
    }
    bool known = m->seen == item->address;
    m->seen = item->address;
    return known ? GD_OK : put_pair(m, item->address, err);
}

gd_status
gd_duplicate_search_step(gd_duplicate_search *m, size_t records, bool *more,
                         uint64_t *bytes, gd_error *err)
{
    gd_status s = GD_OK;
    int64_t began = m->env->monotonic_ns(m->env);
    for (; s == GD_OK && records > 0 && m->heap_count > 0; records--) {
        source *first = m->heap[0];
        s = take_item(m, first->id.kind, &first->now, err);
        m->read++;
        if (s == GD_OK) {
            s = replace_first(m, err);
        }
    }
    m->ns += (uint64_t)(m->env->monotonic_ns(m->env) - began);
    *more = m->heap_count > 0;
    *bytes = m->read * GD_INDEX_RECORD;
    return s;
}

/* ---- the end ---- */

/* The maintainer discards shards without their locks.  And if this process lost
 * its lock, others have gone on from the shard, perhaps without a run that was
 * merged here: the result does not count then. */
static gd_status
require_count(gd_duplicate_search *m, const gd_index_id *id, gd_error *err)
{
    bool counts;
    gd_status s = gd_shards_counts(m->shards, id, &counts, err);
    return s == GD_OK && !counts
               ? gd_fail(err, GD_NOTFOUND, "generation %llu of shard %u of %u "
                         "bits does not count", (unsigned long long)id->number,
                         id->shard, id->bits)
               : s;
}

static gd_status
publish_pairs(gd_duplicate_search *m, gd_error *err)
{
    if (m->pairs == NULL) {
        return GD_OK;
    }
    GD_TRY(gd_index_writer_seal(m->pairs, 0, err));
    GD_TRY(gd_index_writer_publish(m->pairs, err));
    return gd_shards_sync(m->shards, err);
}

static gd_status
publish_shards(gd_duplicate_search *m, gd_error *err)
{
    unsigned halves = m->split ? 2 : 1;
    gd_status s = GD_OK;
    for (unsigned i = 0; s == GD_OK && i < halves; i++) {
        bool large = m->ns / halves > m->limits.ns ||
                     gd_index_writer_written(m->out[i]) > m->limits.records;
        s = gd_index_writer_seal(m->out[i], large ? GD_INDEX_LARGE : 0, err);
    }
    for (unsigned i = 0; s == GD_OK && i < halves; i++) {
        s = gd_index_writer_publish(m->out[i], err);
    }
    if (s == GD_EXISTS) {
        return gd_fail(err, GD_BUSY, "another process merged a shard of the "
                       "index, although this one has its lock");
    }
    if (s == GD_OK) {
        s = gd_shards_sync(m->shards, err);
    }
    for (unsigned i = 0; s == GD_OK && i < halves; i++) {
        s = require_count(m, &m->made[i], err);
    }
    return s;
}

gd_status
gd_duplicate_search_finish(gd_duplicate_search *m, gd_search_result *result,
                           gd_error *err)
{
    *result = (gd_search_result){.split = m->split, .more = m->more};
    if (m->heap_count > 0) {
        return gd_fail(err, GD_INVALID, "there are more records to merge");
    }
    int64_t began = m->env->monotonic_ns(m->env);
    gd_status s = require_count(m, &m->sources[0].id, err);
    /* The pairs first: once the new generation has a name, the records of the
     * runs are in it, and make no pairs again. */
    if (s == GD_OK) {
        s = publish_pairs(m, err);
    }
    m->ns += (uint64_t)(m->env->monotonic_ns(m->env) - began);
    if (s == GD_OK) {
        s = publish_shards(m, err);
    }
    /* Last: what went into both. */
    for (size_t i = 0; s == GD_OK && i < m->source_count; i++) {
        s = gd_shards_remove(m->shards, &m->sources[i].id, err);
    }
    for (unsigned i = 0; i < HALVES && m->out[i] != NULL; i++) {
        result->records += gd_index_writer_written(m->out[i]);
    }
    result->pairs = m->pair_count;
    result->bytes = (m->read + result->records) * GD_INDEX_RECORD +
                    m->pair_count * GD_PAIR_SIZE;
    return s;
}

void
gd_duplicate_search_end(gd_duplicate_search *m)
{
    if (m == NULL) {
        return;
    }
    const gd_env *env = m->env;
    close_sources(m);
    for (unsigned i = 0; i < HALVES; i++) {
        gd_index_writer_discard(m->out[i]);
    }
    gd_index_writer_discard(m->pairs);
    env->release(env, m->groups);
    if (m->shard_fd >= 0) {
        env->close(env, m->shard_fd);
    }
    if (m->runs_fd >= 0) {
        env->close(env, m->runs_fd);
    }
    env->release(env, m);
}
