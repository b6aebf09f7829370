/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_fpstore.c - entries: decoded ones encode to the same bytes, live ones
 * are within bounds, and a table finds exactly the live ones without the mark
 * nodedup (I14).
 *
 * Input: flags (1: checksums are corrected), slots (2), block size (1), seed
 * (8), then entries of 56 bytes.
 */
#include "engine/base/coding.h"
#include "engine/format/fptable.h"
#include "engine/format/segment.h"
#include "tests/fuzz/fuzz.h"

enum { MAX_SLOTS = 600 };

static void
check_entry(const uint8_t *raw, const gd_entry_bounds *bounds, uint32_t slot)
{
    static const uint8_t empty[GD_ENTRY_SIZE];
    gd_entry entry;
    uint8_t again[GD_ENTRY_SIZE];
    gd_entry_decode(raw, bounds, slot, &entry);
    if (memcmp(raw, empty, sizeof empty) == 0) {
        MUST(entry.state == GD_ENTRY_EMPTY);
        return;
    }
    MUST(entry.state != GD_ENTRY_EMPTY);
    if (entry.state == GD_ENTRY_INVALID) {
        return;
    }
    gd_entry_encode(&entry, bounds->seed, slot, again);
    MUST(memcmp(again, raw, sizeof again) == 0);
    if (entry.state == GD_ENTRY_LIVE || entry.state == GD_ENTRY_DAMAGED) {
        MUST(entry.plain_length >= 1 &&
             entry.plain_length <= bounds->max_block);
        MUST(entry.plain_offset + entry.plain_length <= GD_SEGMENT_MAX);
        MUST(entry.stored_length <= GD_SEGMENT_MAX);
        MUST(entry.codec <= GD_CODEC_ZSTD);
        MUST(entry.segment >= gd_fptable_data_start(bounds->slots));
    }
}

static size_t
count_found(const gd_fptable *store, const gd_fingerprint *fp, uint32_t wanted,
            uint32_t count)
{
    uint32_t probe = 0, slot;
    size_t found = 0, steps = 0;
    while (gd_fptable_find(store, fp, &probe, &slot)) {
        MUST(slot < count && ++steps <= GD_NAMESAKES);
        MUST(gd_fptable_matches(store, slot, fp));
        found += slot == wanted;
    }
    /* The first ones are found. */
    return steps < GD_NAMESAKES ? found
                                : gd_fptable_matches(store, wanted, fp);
}

static void
check_store(const uint8_t *raw, const gd_entry_bounds *bounds, uint32_t count)
{
    gd_fptable *store;
    gd_error err;
    MUST(gd_fptable_build(gd_env_posix(), raw, 7, count, bounds, &store,
                          &err) == GD_OK);
    MUST(store->group == 7 && store->count == count);
    for (uint32_t i = 0; i < count; i++) {
        gd_entry entry;
        gd_entry_decode(raw + gd_entry_offset(i) - GD_STORE_START, bounds, i,
                        &entry);
        MUST(count_found(store, &entry.fingerprint, i, count) ==
             gd_entry_is_shareable(&entry));
    }
    gd_fptable_free(gd_env_posix(), store);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    uint8_t flags = take8(&in);
    uint32_t slots = 64 + take16(&in) % (MAX_SLOTS - 64);
    gd_entry_bounds bounds = {.slots = slots,
                              .max_block = 512U << take8(&in) % 8};
    bounds.seed = take64(&in);
    uint32_t count = (uint32_t)(in.left / GD_ENTRY_SIZE);
    count = count < slots ? count : slots;
    size_t length = (size_t)gd_fptable_size(count);
    uint8_t *raw = calloc(1, length + 1);
    MUST(raw != NULL);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *at = raw + gd_entry_offset(i) - GD_STORE_START;
        take_bytes(&in, at, GD_ENTRY_SIZE);
        if ((flags & 1) != 0 && at[51] != 0) {
            gd_put32(at + 52, (uint32_t)gd_checksum(at, 52, bounds.seed + i));
        }
        check_entry(at, &bounds, i);
    }
    check_store(raw, &bounds, count);
    free(raw);
    return 0;
}
