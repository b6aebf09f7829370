/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fptable.c - see fptable.h.
 */
#include "engine/format/fptable.h"

#include "engine/format/fields.h"
#include "engine/format/segment.h"

#define ENTRY_FIELDS(F)                                                       \
    F(BYTES, 0, 32, fingerprint.bytes)                                        \
    F(NUMBER, 32, 8, checksum)                                                \
    F(NUMBER, 40, 4, segment)

/* Bits of the place, from the lowest (format.rst, "Fingerprint store"). */
enum {
    OFFSET_BITS = 20,
    LENGTH_BITS = 17,
    STORED_BITS = 21,
    CODEC_BITS = 2,
    NODEDUP_BITS = 1,
    STATE_BITS = 3,
};

/* The halves of a place in the index. */
#define PLACE_SLOT UINT32_C(0x0000ffff)
#define PLACE_BITS UINT32_C(0xffff0000)

static uint64_t
take(uint64_t *place, unsigned bits)
{
    uint64_t value = *place & ((UINT64_C(1) << bits) - 1);
    *place >>= bits;
    return value;
}

static uint32_t
entry_checksum(const uint8_t in[GD_ENTRY_SIZE], uint64_t seed, uint32_t slot)
{
    return (uint32_t)gd_checksum(in, GD_ENTRY_SIZE - 4, seed + slot);
}

void
gd_entry_encode(const gd_entry *value, uint64_t seed, uint32_t slot,
                uint8_t out[GD_ENTRY_SIZE])
{
    uint64_t place = value->state;
    place = place << NODEDUP_BITS | value->nodedup;
    place = place << CODEC_BITS | value->codec;
    place = place << STORED_BITS | value->stored_length;
    place = place << LENGTH_BITS | value->plain_length;
    place = place << OFFSET_BITS | value->plain_offset;
    ENTRY_FIELDS(GD_ENCODE)
    gd_put64(out + 44, place);
    gd_put32(out + 52, entry_checksum(out, seed, slot));
}

static bool
is_within_bounds(const gd_entry *entry, const gd_entry_bounds *bounds)
{
    return entry->plain_length >= 1 &&
           entry->plain_length <= bounds->max_block &&
           entry->plain_offset + entry->plain_length <= GD_SEGMENT_MAX &&
           entry->stored_length >= 1 &&
           entry->stored_length <= GD_SEGMENT_MAX &&
           entry->codec <= GD_CODEC_ZSTD &&
           entry->segment >= gd_fptable_data_start(bounds->slots);
}

void
gd_entry_decode(const uint8_t in[GD_ENTRY_SIZE], const gd_entry_bounds *bounds,
                uint32_t slot, gd_entry *value)
{
    static const uint8_t empty[GD_ENTRY_SIZE];
    if (memcmp(in, empty, GD_ENTRY_SIZE) == 0) {
        memset(value, 0, sizeof *value);
        return;
    }
    uint64_t place = gd_get64(in + 44);
    ENTRY_FIELDS(GD_DECODE)
    value->plain_offset = (uint32_t)take(&place, OFFSET_BITS);
    value->plain_length = (uint32_t)take(&place, LENGTH_BITS);
    value->stored_length = (uint32_t)take(&place, STORED_BITS);
    value->codec = (uint8_t)take(&place, CODEC_BITS);
    value->nodedup = take(&place, NODEDUP_BITS) != 0;
    value->state = (uint8_t)take(&place, STATE_BITS);
    bool has_block =
        value->state == GD_ENTRY_LIVE || value->state == GD_ENTRY_DAMAGED;
    bool valid =
        gd_get32(in + 52) == entry_checksum(in, bounds->seed, slot) &&
        value->state >= GD_ENTRY_LIVE && value->state <= GD_ENTRY_DAMAGED &&
        (!has_block || is_within_bounds(value, bounds));
    if (!valid) {
        value->state = GD_ENTRY_INVALID;
    }
}

gd_status
gd_fptable_new(const gd_env *env, uint32_t slots, gd_fptable **out,
               gd_error *err)
{
    uint32_t places = 64;
    while (places < slots * 2) {
        places *= 2;
    }
    gd_fptable *store = gd_calloc(env, 1, sizeof *store, err);
    if (store == NULL) {
        return GD_NOMEM;
    }
    store->mask = places - 1;
    int rc = env->random(env, store->key, sizeof store->key);
    store->fingerprints =
        gd_alloc(env, slots * sizeof *store->fingerprints, err);
    store->live = gd_calloc(env, places / 64, sizeof *store->live, err);
    store->index = gd_calloc(env, places, sizeof *store->index, err);
    if (store->fingerprints == NULL || store->live == NULL ||
        store->index == NULL) {
        gd_fptable_free(env, store);
        return GD_NOMEM;
    }
    if (rc < 0) {
        gd_fptable_free(env, store);
        return gd_fail_errno(err, -rc, "no random bytes");
    }
    *out = store;
    return GD_OK;
}

void
gd_fptable_clear(gd_fptable *store, uint32_t group)
{
    size_t places = (size_t)store->mask + 1;
    memset(store->index, 0, places * sizeof *store->index);
    memset(store->live, 0, places / 64 * sizeof *store->live);
    store->group = group;
    store->count = 0;
}

/* Returns whether this place of the index, which is not free, holds this
 * fingerprint. */
static bool
is_at(const gd_fptable *store, uint32_t place, uint32_t bits,
      const gd_fingerprint *fp)
{
    return (place & PLACE_BITS) == (bits & PLACE_BITS) &&
           gd_fingerprint_equal(
               &store->fingerprints[(place & PLACE_SLOT) - 1], fp);
}

void
gd_fptable_add_unindexed(gd_fptable *store, uint32_t slot,
                         const gd_fingerprint *fp)
{
    store->live[slot / 64] |= UINT64_C(1) << slot % 64;
    store->fingerprints[slot] = *fp;
    if (slot >= store->count) {
        store->count = slot + 1;
    }
}

void
gd_fptable_add(gd_fptable *store, uint32_t slot, const gd_fingerprint *fp)
{
    uint32_t bits = gd_fptable_bits(store, fp);
    uint32_t at = bits & store->mask, namesakes = 0;
    while (store->index[at] != 0 && namesakes < GD_NAMESAKES) {
        namesakes += is_at(store, store->index[at], bits, fp);
        at = (at + 1) & store->mask;
    }
    if (namesakes < GD_NAMESAKES) {
        store->index[at] = (bits & PLACE_BITS) | (slot + 1);
    }
    gd_fptable_add_unindexed(store, slot, fp);
}

gd_status
gd_fptable_build(const gd_env *env, const uint8_t *raw, uint32_t group,
                 uint32_t count, const gd_entry_bounds *bounds,
                 gd_fptable **out, gd_error *err)
{
    GD_TRY(gd_fptable_new(env, count, out, err));
    gd_fptable *store = *out;
    store->group = group;
    for (uint32_t slot = 0; slot < count; slot++) {
        gd_entry entry;
        gd_entry_decode(raw + gd_entry_offset(slot) - GD_STORE_START, bounds,
                        slot, &entry);
        if (gd_entry_is_shareable(&entry)) {
            gd_fptable_add(store, slot, &entry.fingerprint);
        }
    }
    store->count = count;
    return GD_OK;
}

void
gd_fptable_free(const gd_env *env, gd_fptable *store)
{
    env->release(env, store->fingerprints);
    env->release(env, store->live);
    env->release(env, store->index);
    env->release(env, store);
}

bool
gd_fptable_find(const gd_fptable *store, const gd_fingerprint *fp,
                uint32_t *probe, uint32_t *slot)
{
    uint32_t bits = gd_fptable_bits(store, fp);
    for (;;) {
        uint32_t place = store->index[(bits + *probe) & store->mask];
        if (place == 0) {
            return false;
        }
        ++*probe;
        if (is_at(store, place, bits, fp)) {
            *slot = (place & PLACE_SLOT) - 1;
            return true;
        }
    }
}
