/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.c - see index.h.
 */
#include "engine/format/index.h"

#include <string.h>

#include "engine/format/address.h"
#include "engine/format/fpstore.h"

enum {
    LISTED_STATE = 44, /* offset in a listed entry */
    ADDRESS_BYTES = 5,
    KEY_BYTES = 8,
    DIGITS = 256,
};

void
gd_index_put_record(uint8_t *out, uint64_t key, uint64_t address)
{
    uint64_t bytes = htobe64(key);
    memcpy(out, &bytes, sizeof bytes);
    gd_put32(out + 8, (uint32_t)address);
    out[12] = (uint8_t)(address >> 32);
}

size_t
gd_index_records(const uint8_t *entries, size_t count, uint32_t group,
                 uint32_t first, uint8_t *out)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *entry = entries + i * GD_LISTED_ENTRY;
        if (entry[LISTED_STATE] == GD_ENTRY_LIVE) {
            uint64_t address =
                (uint64_t)group << GD_SLOT_BITS | (first + i);
            gd_index_put_record(out + used * GD_INDEX_RECORD,
                                gd_index_key(entry), address);
            used++;
        }
    }
    return used;
}

/* ---- sorting ---- */

/* One pass of a stable radix sort, by one byte of the address (0 to 4) or of
 * the key (5 to 12).  If all items have the same byte, moves nothing and
 * returns false. */
static bool
sort_by_byte(const gd_item *from, gd_item *to, size_t count, unsigned byte)
{
    size_t starts[DIGITS] = {0};
    bool of_key = byte >= ADDRESS_BYTES;
    unsigned shift = 8 * (of_key ? byte - ADDRESS_BYTES : byte);
    for (size_t i = 0; i < count; i++) {
        uint64_t value = of_key ? from[i].key : from[i].address;
        starts[value >> shift & (DIGITS - 1)]++;
    }
    size_t before = 0;
    for (size_t digit = 0; digit < DIGITS; digit++) {
        size_t here = starts[digit];
        if (here == count) {
            return false;
        }
        starts[digit] = before;
        before += here;
    }
    for (size_t i = 0; i < count; i++) {
        uint64_t value = of_key ? from[i].key : from[i].address;
        to[starts[value >> shift & (DIGITS - 1)]++] = from[i];
    }
    return true;
}

gd_item *
gd_sort_items(gd_item *items, gd_item *room, size_t count)
{
    gd_item *from = items, *to = room;
    for (unsigned byte = 0; byte < ADDRESS_BYTES + KEY_BYTES; byte++) {
        if (count > 1 && sort_by_byte(from, to, count, byte)) {
            gd_item *sorted = to;
            to = from;
            from = sorted;
        }
    }
    return from;
}

gd_status
gd_index_sort(const gd_env *env, uint8_t *records, size_t count, gd_error *err)
{
    gd_item *items = gd_calloc(env, count, 2 * sizeof *items, err);
    if (items == NULL) {
        return GD_NOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        const uint8_t *record = records + i * GD_INDEX_RECORD;
        items[i] = (gd_item){gd_index_key(record), gd_index_address(record)};
    }
    const gd_item *sorted = gd_sort_items(items, items + count, count);
    for (size_t i = 0; i < count; i++) {
        gd_index_put_record(records + i * GD_INDEX_RECORD, sorted[i].key,
                            sorted[i].address);
    }
    env->release(env, items);
    return GD_OK;
}

/* ---- updating ---- */

/* Iterates over sorted records. */
typedef struct cursor {
    const uint8_t *at, *end;
    gd_item now; /* valid while at < end */
    bool sorted;
} cursor;

static void
load(cursor *c)
{
    if (c->at < c->end) {
        c->now = (gd_item){gd_index_key(c->at), gd_index_address(c->at)};
    }
}

static cursor
start(gd_records records)
{
    cursor c = {.at = records.at,
                .end = records.count == 0
                           ? records.at
                           : records.at + records.count * GD_INDEX_RECORD,
                .sorted = true};
    load(&c);
    return c;
}

static bool
less(const gd_item *a, const gd_item *b)
{
    return a->key != b->key ? a->key < b->key : a->address < b->address;
}

static void
step(cursor *c)
{
    gd_item before = c->now;
    c->at += GD_INDEX_RECORD;
    load(c);
    if (c->at < c->end && less(&c->now, &before)) {
        c->sorted = false;
    }
}

/* Whether this record is to be removed; moves the cursor along. */
static bool
is_removed(cursor *remove, const gd_item *record)
{
    while (remove->at < remove->end && less(&remove->now, record)) {
        step(remove);
    }
    return remove->at < remove->end && !less(record, &remove->now);
}

/* The last output of the merge. */
typedef struct output {
    gd_index_result *result;
    gd_item kept;  /* the last record of the page */
    uint64_t seen; /* the last address with its fingerprint */
} output;

/* Records arrive in order: the first one of each fingerprint is kept. */
static void
put(output *out, const gd_item *record)
{
    gd_index_result *result = out->result;
    if (result->page_count == 0 || record->key != out->kept.key) {
        gd_index_put_record(
            result->page + result->page_count * GD_INDEX_RECORD, record->key,
            record->address);
        result->page_count++;
        out->kept = *record;
    } else if (record->address != out->seen) {
        uint8_t *pair = result->pairs + result->pair_count * 16;
        gd_put64(pair, record->address);
        gd_put64(pair + 8, out->kept.address);
        result->pair_count++;
    }
    out->seen = record->address;
}

gd_status
gd_index_update(gd_records page, gd_records add, gd_records remove,
                gd_index_result *result, gd_error *err)
{
    cursor old = start(page), new = start(add), gone = start(remove);
    output out = {.result = result};
    result->page_count = result->pair_count = 0;
    while (old.at < old.end || new.at < new.end) {
        if (new.at == new.end ||
            (old.at < old.end && less(&old.now, &new.now))) {
            if (!is_removed(&gone, &old.now)) {
                put(&out, &old.now);
            }
            step(&old);
        } else {
            put(&out, &new.now);
            step(&new);
        }
    }
    while (gone.at < gone.end) {
        step(&gone);
    }
    if (!old.sorted || !new.sorted || !gone.sorted) {
        return gd_fail(err, GD_INVALID, "records of the index are not sorted");
    }
    return GD_OK;
}
