/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_catalog.c - the arithmetic on any values from the catalog: counters,
 * pairs of duplicates; and the fence. Sorted and legal values give the results
 * of a plain loop; others are refused.
 *
 * Input: the test (1), then numbers and records as the test reads them.
 */
#include "engine/base/coding.h"
#include "engine/files/fence.h"
#include "engine/format/address.h"
#include "engine/format/index.h"
#include "engine/format/pairs.h"
#include "engine/format/runs.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/memory_env.h"
#include "tests/fuzz/remake.h"

enum { MAX_COUNT = 64 };

/* ---- counters ---- */

static size_t
take_runs(input *in, uint8_t *runs, size_t most)
{
    size_t count = 0;
    while (in->left > 0 && count < most) {
        uint8_t *at = runs + GD_RUN_SIZE * count++;
        uint32_t slot = take16(in), blocks = take16(in);
        gd_put32(at, take8(in) % 4);
        gd_put32(at + 4, slot % 5000);
        gd_put32(at + 8, (blocks & 1) != 0 ? blocks % 1025 : blocks);
    }
    return count;
}

static void
count_runs(input *in)
{
    static uint8_t counters[GD_COUNTERS_SIZE], before[GD_COUNTERS_SIZE];
    uint8_t runs[MAX_COUNT * GD_RUN_SIZE];
    int64_t wanted[GD_COUNTERS];
    uint32_t chunk = take8(in) % 5, fill = take8(in);
    int delta = (take8(in) & 1) != 0 ? 1 : -1;
    for (size_t i = 0; i < GD_COUNTERS; i++) {
        uint32_t value = fill > 250 ? UINT32_MAX - (i % 3 == 0) : fill % 4;
        gd_put32(counters + 4 * i, value);
        wanted[i] = value;
    }
    memcpy(before, counters, sizeof before);
    size_t count = take_runs(in, runs, MAX_COUNT);
    bool below = false;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *run = runs + GD_RUN_SIZE * i;
        uint64_t slot = gd_get32(run + 4), end = slot + gd_get32(run + 8);
        for (; gd_get32(run) == 1 && slot < end; slot++) {
            int64_t *at = slot / GD_COUNTERS == chunk
                              ? &wanted[slot % GD_COUNTERS]
                              : NULL;
            if (at != NULL && *at != UINT32_MAX) {
                *at += delta;
                below = below || *at < 0;
            }
        }
    }
    bool good = gd_runs_add(counters, 1, chunk, runs, count, delta);
    MUST(good == !below);
    for (size_t i = 0; good && i < GD_COUNTERS; i++) {
        MUST(gd_get32(counters + 4 * i) == (uint32_t)wanted[i]);
    }
    MUST(good || memcmp(before, counters, sizeof before) == 0);
}

static void
compare_runs(input *in)
{
    uint8_t runs[MAX_COUNT * GD_RUN_SIZE],
    addresses[MAX_COUNT * GD_ADDRESS_SIZE];
    uint64_t shared;
    gd_error err;
    size_t half = take8(in) % MAX_COUNT;
    size_t count = take_runs(in, runs, MAX_COUNT);
    half = half < count ? half : count;
    MUST(gd_runs_shared(gd_env_posix(), runs, half,
                        runs + half * GD_RUN_SIZE, count - half, &shared,
                        &err) == GD_OK);
    for (size_t i = 0; i < MAX_COUNT; i++) {
        gd_put64(addresses + 8 * i, (UINT64_C(1) << GD_SLOT_BITS) + i * 97);
    }
    bool named = false;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *run = runs + GD_RUN_SIZE * i;
        uint64_t first = (uint64_t)gd_get32(run) << GD_SLOT_BITS |
                         gd_get32(run + 4);
        for (size_t k = 0; k < MAX_COUNT; k++) {
            uint64_t address = gd_get64(addresses + 8 * k);
            named = named || (address >= first &&
                              address - first < gd_get32(run + 8));
        }
    }
    MUST(gd_runs_name_any(runs, count, addresses, MAX_COUNT) == named);
}

/* ---- pairs ---- */

typedef struct known {
    uint8_t addresses[2 * MAX_COUNT * 8];
    uint8_t entries[2 * MAX_COUNT * GD_LISTED_ENTRY];
    uint8_t counts[2 * MAX_COUNT * 4];
    size_t count;
} known;

static size_t
take_pairs(input *in, uint8_t *pairs)
{
    size_t count = take8(in) % MAX_COUNT;
    for (size_t i = 0; i < count; i++) {
        gd_put64(pairs + GD_PAIR_SIZE * i, take8(in) % 40);
        gd_put64(pairs + GD_PAIR_SIZE * i + 8, take8(in) % 40);
    }
    return count;
}

static void
revise_pairs(input *in)
{
    static known k;
    uint8_t pairs[MAX_COUNT * GD_PAIR_SIZE], out[2 * MAX_COUNT * GD_PAIR_SIZE];
    uint8_t second[2 * MAX_COUNT * GD_PAIR_SIZE];
    uint8_t replacements[2 * MAX_COUNT * GD_REPLACEMENT_SIZE];
    uint8_t records[2 * MAX_COUNT * GD_INDEX_RECORD];
    size_t n, m;
    gd_error err;
    size_t count = take_pairs(in, pairs), missing = take8(in);
    const gd_env *env = gd_env_posix();
    if ((missing & 1) == 0) {
        MUST(gd_pairs_sort(env, pairs, &count, &err) == GD_OK);
    }
    gd_pairs p = {pairs, count};
    MUST(gd_pairs_addresses(env, p, k.addresses, &k.count, &err) == GD_OK);
    for (size_t i = 0; i < k.count; i++) {
        take_bytes(in, k.entries + i * GD_LISTED_ENTRY, GD_LISTED_ENTRY);
        gd_put32(k.counts + 4 * i, take8(in));
    }
    bool whole = missing <= 200 || k.count == 0;
    k.count -= !whole; /* an unknown block is named */
    gd_blocks blocks = {k.addresses, k.entries, k.counts, k.count};
    bool good = gd_pairs_judge(p, &blocks, out, &n, second, &m);
    MUST(good || !whole);
    MUST(!good || (n <= count && m <= count));
    good = gd_pairs_revise(p, &blocks, out, &n, records, &m);
    MUST(good || !whole);
    MUST(!good || (n <= count && m <= count));
    good = gd_pairs_choose(p, &blocks, replacements, &n);
    MUST(good || !whole);
    MUST(!good || n <= 2 * count);
    if (good) {
        MUST(gd_pairs_sort_replacements(replacements, n) <= n);
    }
    MUST(gd_pairs_subtract(p, (gd_pairs){pairs, count / 2}, out) <= count);
}

/* ---- the fence ---- */

static void
read_fence(input *in)
{
    uint8_t file[1024];
    memory_env m;
    gd_fence fence, next, back;
    gd_error err;
    bool found, right = (take8(in) & 1) != 0;
    size_t length = take16(in) % 1025;
    memset(&next, 0, sizeof next);
    take_bytes(in, next.catalog_id, 2);
    next.sequence = take64(in);
    memset(file, 0, sizeof file);
    take_bytes(in, file, 40);
    take_bytes(in, file + 512, 40);
    if (right) {
        remake_fence(file, length);
    }
    memory_env_init(&m);
    memory_mkdir(&m, "/r");
    memory_put(&m, "/r/fence", file, length);
    int root = m.env.openat(&m.env, AT_FDCWD, "/r", O_RDONLY | O_DIRECTORY, 0);
    MUST(gd_fence_read(&m.env, root, &fence, &found, &err) == GD_OK);
    gd_status s = gd_fence_write(&m.env, root, &next, &err);
    bool back_in_time =
        found && next.sequence < fence.sequence &&
        memcmp(next.catalog_id, fence.catalog_id, GD_ID_SIZE) == 0;
    MUST(s == (back_in_time ? GD_INVALID : GD_OK));
    if (s == GD_OK) {
        MUST(gd_fence_read(&m.env, root, &back, &found, &err) == GD_OK);
        MUST(found && back.sequence == next.sequence);
        MUST(memcmp(back.catalog_id, next.catalog_id, GD_ID_SIZE) == 0);
    }
    m.env.close(&m.env, root);
    MUST(memory_env_leaks(&m) == 0);
    memory_env_destroy(&m);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    switch (take8(&in) % 4) {
    case 0:
        count_runs(&in);
        break;
    case 1:
        compare_runs(&in);
        break;
    case 2:
        revise_pairs(&in);
        break;
    default:
        read_fence(&in);
    }
    return 0;
}
