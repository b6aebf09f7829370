/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.c - see index.h.
 */
#include "engine/format/index.h"

#include <string.h>

#include "engine/format/address.h"
#include "engine/format/fptable.h"

enum {
    ADDRESS_BYTES = 5,
    KEY_BYTES = 8,
    DIGITS = 256,
    HIGH_BYTES = ADDRESS_BYTES + 4, /* where the key's upper half begins */
    FAR = 8, /* places that an item moves at most in a nearly sorted array */
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
        if (entry[GD_LISTED_STATE] == GD_ENTRY_LIVE &&
            entry[GD_LISTED_NODEDUP] == 0) {
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

/* Passes by the bytes from first on; returns the array that has the items. */
static gd_item *
sort_from_byte(gd_item *items, gd_item *room, size_t count, unsigned first)
{
    gd_item *from = items, *to = room;
    for (unsigned byte = first; byte < ADDRESS_BYTES + KEY_BYTES; byte++) {
        if (count > 1 && sort_by_byte(from, to, count, byte)) {
            gd_item *sorted = to;
            to = from;
            from = sorted;
        }
    }
    return from;
}

/* An insertion sort.  Returns false, in the midst of it, if an item has far to
 * go. */
static bool
sort_nearly_sorted(gd_item *items, size_t count)
{
    for (size_t i = 1; i < count; i++) {
        const gd_item item = items[i];
        size_t at = i;
        while (at > 0 && (item.key < items[at - 1].key ||
                          (item.key == items[at - 1].key &&
                           item.address < items[at - 1].address))) {
            if (i - at == FAR) {
                items[at] = item;
                return false;
            }
            items[at] = items[at - 1];
            at--;
        }
        items[at] = item;
    }
    return true;
}

/* Keys are mostly random, so few items have their highest bytes in common. */
gd_item *
gd_index_sort_items(gd_item *items, gd_item *room, size_t count)
{
    if (sort_nearly_sorted(items, count)) {
        return items;
    }
    gd_item *sorted = sort_from_byte(items, room, count, HIGH_BYTES);
    return sort_nearly_sorted(sorted, count)
               ? sorted
               : sort_from_byte(sorted, sorted == items ? room : items, count,
                                0);
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
    const gd_item *sorted = gd_index_sort_items(items, items + count, count);
    for (size_t i = 0; i < count; i++) {
        gd_index_put_record(records + i * GD_INDEX_RECORD, sorted[i].key,
                            sorted[i].address);
    }
    env->release(env, items);
    return GD_OK;
}
