/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.h - records of the exact index (format.rst, "Catalog").
 *
 * A record is the first 8 bytes of a fingerprint and an address.  Records are
 * sorted by the fingerprint's bytes, then by the address.  A page has at most
 * one record per fingerprint: that of the lowest address.  Everything here is
 * computation on memory; the catalog decides where pages are kept.
 */
#ifndef GD_INDEX_H
#define GD_INDEX_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/coding.h"
#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/runs.h"

enum {
    GD_INDEX_RECORD = 13,
    GD_INDEX_BITS_MAX = 31,
    GD_LISTED_ENTRY = 48, /* an entry as Maintenance.entries lists it */
};

/* The fingerprint's part as a number that sorts like its bytes. */
static inline uint64_t
gd_index_key(const uint8_t *record)
{
    uint64_t key;
    memcpy(&key, record, sizeof key);
    return be64toh(key);
}

/* group << 15 | slot */
static inline uint64_t
gd_index_address(const uint8_t *record)
{
    return gd_get32(record + 8) | (uint64_t)record[12] << 32;
}

/* The page of a record; there are 2^bits pages. */
static inline uint32_t
gd_index_page(const uint8_t *record, unsigned bits)
{
    return bits == 0 ? 0 : (uint32_t)(gd_index_key(record) >> (64 - bits));
}

void gd_index_put_record(uint8_t *out, uint64_t key, uint64_t address);

/* Takes listed entries of the slots from `first` on, and writes the records of
 * the live ones in the order of slots.  out has room for count.  Returns how
 * many it wrote. */
size_t gd_index_records(const uint8_t *entries, size_t count, uint32_t group,
                        uint32_t first, uint8_t *out);

/* A record in memory, or any two numbers of which the second has 40 bits. */
typedef struct gd_item {
    uint64_t key;
    uint64_t address;
} gd_item;

/* Sorts items by key, then by address.  room has space for as many.  Returns
 * where the sorted items are: items or room. */
gd_item *gd_sort_items(gd_item *items, gd_item *room, size_t count);

gd_status gd_index_sort(const gd_env *env, uint8_t *records, size_t count,
                        gd_error *err);

/* Records in memory. */
typedef struct gd_records {
    const uint8_t *at;
    size_t count;
} gd_records;

/* The output of an update.  The caller provides the room: for as many records,
 * and pairs of 16 bytes, as page and add have together. */
typedef struct gd_index_result {
    uint8_t *page;
    size_t page_count;
    uint8_t *pairs; /* address not kept, address kept; by fingerprint */
    size_t pair_count;
} gd_index_result;

/* Makes the new page: without the records to remove, with those to add.  A
 * record in both page and add is not new.  GD_INVALID if one of the three is
 * not sorted. */
gd_status gd_index_update(gd_records page, gd_records add, gd_records remove,
                          gd_index_result *result, gd_error *err);

#endif
