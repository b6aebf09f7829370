/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fptable.h - the fingerprint store: a group's table of entries, on the disk
 * and as it is held in memory for look-ups.
 *
 * An entry is 56 bytes.  A sector of 512 holds nine, so that none crosses a
 * sector: a torn write damages only entries that were being written, and the
 * checksum of each shows whether it is whole (offset table in format.rst,
 * "Fingerprint store").  The checksum is seeded with the group's seed plus the
 * slot, so an entry is valid in one place only.
 */
#ifndef GD_FPTABLE_H
#define GD_FPTABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/lru.h"
#include "engine/base/status.h"
#include "engine/format/fingerprint.h"

enum {
    GD_SECTOR = 512,
    GD_ENTRY_SIZE = 56,
    GD_ENTRIES_PER_SECTOR = 9,
    GD_STORE_START = 4096, /* start of the store in the group's file */
    /* Slots with the same fingerprint that an index has: the first ones.  A
     * block is never compared with more.  An attacker can make blocks that
     * share a fingerprint which is not cryptographic. */
    GD_NAMESAKES = 8,
};

typedef enum gd_entry_state {
    GD_ENTRY_EMPTY = 0,
    GD_ENTRY_LIVE = 1,
    GD_ENTRY_VOID = 2,    /* given up before it was ever published */
    GD_ENTRY_FREED = 3,   /* collected; the slot stays unused */
    GD_ENTRY_DAMAGED = 4, /* its bytes are in quarantine/ */
    GD_ENTRY_INVALID = 7, /* never on disk: the entry does not verify */
} gd_entry_state;

typedef struct gd_entry {
    gd_fingerprint fingerprint;
    uint64_t checksum;      /* of the block's plain bytes */
    uint32_t segment;       /* offset of the block's segment in the file */
    uint32_t plain_offset;  /* in the plain segment */
    uint32_t plain_length;  /* 1..65536 */
    uint32_t stored_length; /* of the segment, without its header */
    uint8_t codec;
    uint8_t state;
    bool nodedup; /* no look-up and no index finds the block (I14) */
} gd_entry;

/* Returns whether others may find the block by its content. */
static inline bool
gd_entry_is_shareable(const gd_entry *entry)
{
    return entry->state == GD_ENTRY_LIVE && !entry->nodedup;
}

/* Returns whether the entry's block and another have equal content, and are
 * meant as copies: a segment may not have both (I14). */
static inline bool
gd_entry_is_copy(const gd_entry *entry, const gd_fingerprint *fp, bool nodedup)
{
    return (entry->nodedup || nodedup) &&
           gd_fingerprint_equal(&entry->fingerprint, fp);
}

/* The limits that an entry, and a segment, is checked against. */
typedef struct gd_entry_bounds {
    uint64_t seed;
    uint32_t slots;
    uint32_t max_block;
    bool has_lists; /* segments may have lists of slots (segment.h) */
} gd_entry_bounds;

static inline uint64_t
gd_entry_offset(uint32_t slot)
{
    return GD_STORE_START +
           (uint64_t)(slot / GD_ENTRIES_PER_SECTOR) * GD_SECTOR +
           (slot % GD_ENTRIES_PER_SECTOR) * GD_ENTRY_SIZE;
}

/* Bytes of the whole sectors that hold slots [0, slots). */
static inline uint64_t
gd_fptable_size(uint32_t slots)
{
    return (uint64_t)((slots + GD_ENTRIES_PER_SECTOR - 1) /
                      GD_ENTRIES_PER_SECTOR) *
           GD_SECTOR;
}

/* D of format.rst: where segments start. */
static inline uint64_t
gd_fptable_data_start(uint32_t slots)
{
    return (GD_STORE_START + gd_fptable_size(slots) + 4095) & ~UINT64_C(4095);
}

void gd_entry_encode(const gd_entry *entry, uint64_t seed, uint32_t slot,
                     uint8_t out[GD_ENTRY_SIZE]);
/* Sets entry->state to GD_ENTRY_INVALID if the entry is not valid. */
void gd_entry_decode(const uint8_t in[GD_ENTRY_SIZE],
                     const gd_entry_bounds *bounds, uint32_t slot,
                     gd_entry *entry);

/* ---- in memory ---- */

/* Live fingerprints of slots [0, count) of one group, with an index.  A built
 * store is immutable, and shared by reference count (fpcache.h).
 *
 * A place of the index is 0, or has the slot plus one in its lower half and
 * fingerprint bits in its upper half.  So a look-up of a fingerprint that is
 * not in the store hardly ever reads memory outside the index, which fits in
 * processor caches.
 *
 * A client that uploads can choose how its fingerprints begin.  Therefore their
 * places in the index depend on a random key of each store.  Otherwise a client
 * could give all fingerprints one place, and each look-up would pass all of
 * them. */
typedef struct gd_fptable {
    gd_lru_item item; /* the cache's own (fpcache.h) */
    uint32_t group;
    uint32_t count;
    /* Identity of the file and record it was loaded from (group.h). */
    uint64_t seed, inode, sequence, generation;
    gd_fingerprint *fingerprints; /* by slot; only those of live slots count */
    uint64_t *live;               /* one bit per slot */
    uint32_t *index;
    uint32_t mask;                /* places in the index, less one */
    uint64_t key[6];              /* gd_fptable_bits */
} gd_fptable;

/* Builds a store from raw, the sectors of slots [0, count).  Leaves out entries
 * that are not live, do not verify, or have the mark nodedup: their blocks are
 * stored again. */
gd_status gd_fptable_build(const gd_env *env, const uint8_t *raw,
                           uint32_t group, uint32_t count,
                           const gd_entry_bounds *bounds, gd_fptable **store,
                           gd_error *err);
/* An empty store with room for slots.  Only its one owner adds to it. */
gd_status gd_fptable_new(const gd_env *env, uint32_t slots,
                         gd_fptable **store, gd_error *err);
void gd_fptable_clear(gd_fptable *store, uint32_t group);
/* Of slots with one fingerprint, the GD_NAMESAKES first are found, the others
 * only matched.  REQUIRES: slot < slots, not added before. */
void gd_fptable_add(gd_fptable *store, uint32_t slot,
                    const gd_fingerprint *fp);
/* The same, but finds do not return the slot: it is only matched. */
void gd_fptable_add_unindexed(gd_fptable *store, uint32_t slot,
                              const gd_fingerprint *fp);
void gd_fptable_free(const gd_env *env, gd_fptable *store);

/* Iterates over the slots with this fingerprint.  *probe starts at 0.  Returns
 * false when there are no more. */
bool gd_fptable_find(const gd_fptable *store, const gd_fingerprint *fp,
                     uint32_t *probe, uint32_t *slot);

/* 32 bits that place a fingerprint in the index.  They depend on its first 16
 * bytes, which a short digest has, too.  Two fingerprints that differ there are
 * as likely to share a place as two random numbers, unless an attacker who knew
 * the key chose them: the sum is universal (multiply-shift: Dietzfelbinger,
 * STACS 1996).  The second product scatters runs that the sum leaves. */
static inline uint32_t
gd_fptable_bits(const gd_fptable *store, const gd_fingerprint *fp)
{
    uint32_t words[4];
    uint64_t sum = store->key[4];
    __builtin_memcpy(words, fp->bytes, sizeof words);
    for (int i = 0; i < 4; i++) {
        sum += store->key[i] * words[i];
    }
    return (uint32_t)((sum ^ sum >> 32) * (store->key[5] | 1) >> 32);
}

/* Prefetches the memory where a find begins. */
static inline void
gd_fptable_prefetch(const gd_fptable *store, const gd_fingerprint *fp)
{
    __builtin_prefetch(&store->index[gd_fptable_bits(
        store, fp) & store->mask]);
}

static inline bool
gd_fptable_is_live(const gd_fptable *store, uint32_t slot)
{
    return slot < store->count && (store->live[slot / 64] >> slot % 64 & 1) != 0;
}

/* Returns whether this slot is live and has this fingerprint.  A caller that
 * knows the slot needs no index. */
static inline bool
gd_fptable_matches(const gd_fptable *store, uint32_t slot,
                   const gd_fingerprint *fp)
{
    return gd_fptable_is_live(store, slot) &&
           gd_fingerprint_equal(&store->fingerprints[slot], fp);
}

#endif
