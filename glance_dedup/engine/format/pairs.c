/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pairs.c - see pairs.h.
 */
#include "engine/format/pairs.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/format/address.h"
#include "engine/format/fingerprint.h"
#include "engine/format/fptable.h"

enum {
    NEAR = 4, /* items to pass one by one before a search among all */
};

static uint64_t
first_of(const uint8_t *pair)
{
    return gd_get64(pair);
}

static uint64_t
second_of(const uint8_t *pair)
{
    return gd_get64(pair + 8);
}

static void
put_pair(uint8_t *out, size_t *count, uint64_t first, uint64_t second)
{
    uint8_t *pair = out + (*count)++ * GD_PAIR_SIZE;
    gd_put64(pair, first);
    gd_put64(pair + 8, second);
}

/* ---- sorting ---- */

static int
by_address(const void *a, const void *b)
{
    uint64_t x = gd_get64(a), y = gd_get64(b);
    return x < y ? -1 : x > y;
}

static int
by_pair(const void *a, const void *b)
{
    int by_first = by_address(a, b);
    return by_first != 0 ? by_first
                         : by_address((const uint8_t *)a + 8,
                                      (const uint8_t *)b + 8);
}

static bool
same(const gd_item *a, const gd_item *b)
{
    return a->key == b->key && a->address == b->address;
}

/* Sorts and keeps each item once.  *sorted is items, or the place after
 * them. */
static size_t
sort_unique(gd_item *items, size_t count, gd_item **sorted)
{
    size_t used = 0;
    *sorted = gd_index_sort_items(items, items + count, count);
    for (size_t i = 0; i < count; i++) {
        if (used == 0 || !same(&(*sorted)[i], &(*sorted)[used - 1])) {
            (*sorted)[used++] = (*sorted)[i];
        }
    }
    return used;
}

gd_status
gd_pairs_addresses(const gd_env *env, gd_pairs pairs, uint8_t *out,
                   size_t *out_count, gd_error *err)
{
    size_t count = pairs.count * 2;
    gd_item *sorted, *items = gd_calloc(env, count, 2 * sizeof *items, err);
    if (items == NULL) {
        return GD_NOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        items[i].address = gd_get64(pairs.at + i * GD_ADDRESS_SIZE);
        if (items[i].address > GD_LAST_ADDRESS) {
            env->release(env, items);
            return gd_fail(err, GD_INVALID, "a pair names no address");
        }
    }
    *out_count = sort_unique(items, count, &sorted);
    for (size_t i = 0; i < *out_count; i++) {
        gd_put64(out + i * GD_ADDRESS_SIZE, sorted[i].address);
    }
    env->release(env, items);
    return GD_OK;
}

gd_status
gd_pairs_sort(const gd_env *env, uint8_t *pairs, size_t *count, gd_error *err)
{
    gd_item *sorted, *items = gd_calloc(env, *count, 2 * sizeof *items, err);
    if (items == NULL) {
        return GD_NOMEM;
    }
    for (size_t i = 0; i < *count; i++) {
        const uint8_t *pair = pairs + i * GD_PAIR_SIZE;
        items[i] = (gd_item){first_of(pair), second_of(pair)};
        if (items[i].address > GD_LAST_ADDRESS) {
            env->release(env, items);
            return gd_fail(err, GD_INVALID, "a pair names no address");
        }
    }
    size_t unique = sort_unique(items, *count, &sorted);
    *count = 0;
    for (size_t i = 0; i < unique; i++) {
        put_pair(pairs, count, sorted[i].key, sorted[i].address);
    }
    env->release(env, items);
    return GD_OK;
}

bool
gd_pairs_are_of_group(gd_pairs pairs, uint32_t group)
{
    for (size_t i = 0; i < pairs.count; i++) {
        const uint8_t *pair = pairs.at + i * GD_PAIR_SIZE;
        if (first_of(pair) >> GD_SLOT_BITS != group ||
            !gd_address_is_valid(second_of(pair)) ||
            (i > 0 && by_pair(pair - GD_PAIR_SIZE, pair) >= 0)) {
            return false;
        }
    }
    return true;
}

size_t
gd_pairs_subtract(gd_pairs a, gd_pairs b, uint8_t *out)
{
    size_t used = 0, j = 0;
    for (size_t i = 0; i < a.count; i++) {
        const uint8_t *pair = a.at + i * GD_PAIR_SIZE;
        while (j < b.count && by_pair(b.at + j * GD_PAIR_SIZE, pair) < 0) {
            j++;
        }
        if (j == b.count || by_pair(b.at + j * GD_PAIR_SIZE, pair) != 0) {
            memcpy(out + used++ * GD_PAIR_SIZE, pair, GD_PAIR_SIZE);
        }
    }
    return used;
}

/* ---- blocks ---- */

typedef struct block {
    uint64_t address;
    const uint8_t *entry; /* begins with the fingerprint */
    uint32_t length, state, used;
} block;

/* *at is where the last one was found: the next is usually after it. */
static bool
find(const gd_blocks *blocks, uint64_t address, size_t *at, block *out)
{
    const uint8_t *addresses = blocks->addresses;
    size_t here = *at + 1;
    if (here >= blocks->count ||
        gd_get64(addresses + here * GD_ADDRESS_SIZE) != address) {
        here = gd_lower_bound(addresses, GD_ADDRESS_SIZE, blocks->count,
                              address);
    }
    if (here == blocks->count ||
        gd_get64(addresses + here * GD_ADDRESS_SIZE) != address) {
        return false;
    }
    *at = here;
    out->address = address;
    out->entry = blocks->entries + here * GD_LISTED_ENTRY;
    out->length = gd_get32(out->entry + GD_LISTED_LENGTH);
    out->state = out->entry[GD_LISTED_STATE];
    out->used =
        blocks->counts == NULL ? 0 : gd_get32(blocks->counts + here * 4);
    return true;
}

/* ---- what the index found ---- */

bool
gd_pairs_judge(gd_pairs pairs, const gd_blocks *blocks, uint8_t *equal,
               size_t *equal_count, uint8_t *stale, size_t *stale_count)
{
    size_t other_at = 0, kept_at = 0;
    block other, kept;
    *equal_count = *stale_count = 0;
    for (size_t i = 0; i < pairs.count; i++) {
        const uint8_t *pair = pairs.at + i * GD_PAIR_SIZE;
        if (!find(blocks, first_of(pair), &other_at, &other) ||
            !find(blocks, second_of(pair), &kept_at, &kept)) {
            return false;
        }
        if (kept.state != GD_ENTRY_LIVE) {
            put_pair(stale, stale_count, other.address, kept.address);
        }
        if (kept.length == other.length &&
            memcmp(kept.entry, other.entry, GD_FINGERPRINT_SIZE) == 0) {
            put_pair(equal, equal_count, kept.address, other.address);
        }
    }
    return true;
}

/* ---- known facts ---- */

bool
gd_pairs_revise(gd_pairs pairs, const gd_blocks *blocks, uint8_t *gone,
                size_t *gone_count, uint8_t *records, size_t *record_count)
{
    size_t other_at = 0, kept_at = 0;
    block other, kept;
    *gone_count = *record_count = 0;
    for (size_t i = 0; i < pairs.count; i++) {
        const uint8_t *pair = pairs.at + i * GD_PAIR_SIZE;
        if (!find(blocks, first_of(pair), &kept_at, &kept) ||
            !find(blocks, second_of(pair), &other_at, &other)) {
            return false;
        }
        bool kept_gone = kept.state != GD_ENTRY_LIVE;
        if (kept_gone && other.state == GD_ENTRY_LIVE) {
            gd_index_put_record(
                records + (*record_count)++ * GD_INDEX_RECORD,
                gd_index_key(other.entry), other.address);
        }
        if (kept_gone || (other.state != GD_ENTRY_LIVE &&
                          other.state != GD_ENTRY_DAMAGED)) {
            put_pair(gone, gone_count, kept.address, other.address);
        }
    }
    return true;
}

/* ---- choosing ---- */

/* A class: the kept block, and the other blocks of its pairs. */
typedef struct class {
    const gd_blocks *blocks;
    gd_pairs pairs; /* all with the same kept block */
    size_t kept_at, other_at;
} class;

/* Member 0 is the kept block. */
static bool
member(class *c, size_t number, block *out)
{
    return number == 0
               ? find(c->blocks, first_of(c->pairs.at), &c->kept_at, out)
               : find(c->blocks,
                      second_of(c->pairs.at + (number - 1) * GD_PAIR_SIZE),
                      &c->other_at, out);
}

/* *stays is 0 if no member is live. */
static bool
choose_one(class *c, uint64_t *stays)
{
    uint64_t used_and_live = UINT64_MAX, live = UINT64_MAX;
    for (size_t i = 0; i <= c->pairs.count; i++) {
        block b;
        if (!member(c, i, &b)) {
            return false;
        }
        if (b.state == GD_ENTRY_LIVE) {
            live = b.address < live ? b.address : live;
            if (b.used > 0 && b.address < used_and_live) {
                used_and_live = b.address;
            }
        }
    }
    *stays = used_and_live;
    if (used_and_live == UINT64_MAX) {
        /* All blocks in use are damaged: an unused block that is live heals
         * them. */
        *stays = live != UINT64_MAX ? live : 0;
    }
    return true;
}

static bool
choose_in(class *c, uint8_t *out, size_t *out_count)
{
    uint64_t stays;
    if (!choose_one(c, &stays)) {
        return false;
    }
    for (size_t i = 0; stays != 0 && i <= c->pairs.count; i++) {
        block b;
        if (!member(c, i, &b)) {
            return false;
        }
        if (b.used > 0 && b.address != stays) {
            uint8_t *replacement = out + (*out_count)++ * GD_REPLACEMENT_SIZE;
            gd_put64(replacement, b.address);
            gd_put64(replacement + 8, stays);
            gd_put64(replacement + 16, b.length);
            gd_put64(replacement + 24, first_of(c->pairs.at));
        }
    }
    return true;
}

bool
gd_pairs_choose(gd_pairs pairs, const gd_blocks *blocks, uint8_t *out,
                size_t *out_count)
{
    class c = {.blocks = blocks};
    *out_count = 0;
    for (size_t i = 0; i < pairs.count; i += c.pairs.count) {
        const uint8_t *first = pairs.at + i * GD_PAIR_SIZE;
        size_t n = 1;
        while (i + n < pairs.count &&
               first_of(first + n * GD_PAIR_SIZE) == first_of(first)) {
            n++;
        }
        c.pairs = (gd_pairs){first, n};
        if (!choose_in(&c, out, out_count)) {
            return false;
        }
    }
    return true;
}

/* ---- replacements ---- */

static bool
are_sorted(const uint8_t *replacements, size_t count)
{
    for (size_t i = 1; i < count; i++) {
        const uint8_t *replacement = replacements + i * GD_REPLACEMENT_SIZE;
        if (by_address(replacement - GD_REPLACEMENT_SIZE, replacement) > 0) {
            return false;
        }
    }
    return true;
}

static uint64_t
old_at(const uint8_t *replacements, size_t at)
{
    return gd_get64(replacements + at * GD_REPLACEMENT_SIZE);
}

/* Returns whether the address is the old one of a sorted replacement.  *at is
 * where the last search ended: the next usually ends there, or soon behind
 * it. */
static bool
is_old(const uint8_t *replacements, size_t count, uint64_t address, size_t *at)
{
    for (int i = 0;
         i < NEAR && *at < count && old_at(replacements, *at) < address; i++) {
        ++*at;
    }
    if ((*at > 0 && old_at(replacements, *at - 1) >= address) ||
        (*at < count && old_at(replacements, *at) < address)) {
        *at = gd_lower_bound(replacements, GD_REPLACEMENT_SIZE, count,
                             address);
    }
    return *at < count && old_at(replacements, *at) == address;
}

size_t
gd_pairs_sort_replacements(uint8_t *replacements, size_t count)
{
    size_t used = 0, unique = 0, at = 0;
    if (!are_sorted(replacements, count)) {
        qsort(replacements, count, GD_REPLACEMENT_SIZE, by_address);
    }
    for (size_t i = 0; i < count; i++) {
        const uint8_t *replacement = replacements + i * GD_REPLACEMENT_SIZE;
        if (unique == 0 ||
            by_address(replacement, replacement - GD_REPLACEMENT_SIZE) != 0) {
            memmove(replacements + unique++ * GD_REPLACEMENT_SIZE, replacement,
                    GD_REPLACEMENT_SIZE);
        }
    }
    /* Searches among all, so no item moves until all are judged. */
    for (size_t i = 0; i < unique; i++) {
        uint8_t *replacement = replacements + i * GD_REPLACEMENT_SIZE;
        if (is_old(replacements, unique, gd_get64(replacement + 8), &at)) {
            gd_put64(replacement + 16, UINT64_MAX);
        }
    }
    for (size_t i = 0; i < unique; i++) {
        const uint8_t *replacement = replacements + i * GD_REPLACEMENT_SIZE;
        if (gd_get64(replacement + 16) != UINT64_MAX) {
            memmove(replacements + used++ * GD_REPLACEMENT_SIZE, replacement,
                    GD_REPLACEMENT_SIZE);
        }
    }
    return used;
}
