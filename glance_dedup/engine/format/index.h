/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.h - records of the exact index (format-derived.rst).
 *
 * A record is the first 8 bytes of a fingerprint and an address.  Records are
 * sorted by the fingerprint's bytes, then by the address.  Everything here is
 * computation on memory.
 */
#ifndef GD_INDEX_H
#define GD_INDEX_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/coding.h"
#include "engine/base/env.h"
#include "engine/base/status.h"

enum {
    GD_INDEX_RECORD = 13,
    GD_LISTED_ENTRY = 48, /* an entry as Maintenance.entries lists it */
    GD_LISTED_LENGTH = 36, /* offsets in it */
    GD_LISTED_STATE = 44,
    GD_LISTED_NODEDUP = 45, /* 1: no index has the block (I14) */
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

/* The shard of a fingerprint, where there are 2^bits shards; bits <= 32. */
static inline uint32_t
gd_index_shard(uint64_t key, unsigned bits)
{
    return bits == 0 ? 0 : (uint32_t)(key >> (64 - bits));
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
gd_item *gd_index_sort_items(gd_item *items, gd_item *room, size_t count);

gd_status gd_index_sort(const gd_env *env, uint8_t *records, size_t count,
                        gd_error *err);

#endif
