/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_fptable.c - entries: known bytes, no flipped bit passes, bounds; and
 * the table in memory finds exactly the added entries.
 */
#include "engine/format/fptable.h"

#include "engine/base/coding.h"
#include "engine/files/group.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define SEED UINT64_C(0x1122334455667788)

static const gd_entry_bounds BOUNDS = {
    .seed = SEED, .slots = 32768, .max_block = 65536};

/* A live entry that is valid under BOUNDS. */
static gd_entry
sample(void)
{
    gd_entry entry = {
        .checksum = UINT64_C(0x0102030405060708),
        .segment = 0x210000,
        .plain_offset = 0xc000,
        .plain_length = 4096,
        .stored_length = 54321,
        .codec = GD_CODEC_ZSTD,
        .state = GD_ENTRY_LIVE,
    };
    for (int i = 0; i < GD_FINGERPRINT_SIZE; i++) {
        entry.fingerprint.bytes[i] = (uint8_t)(0xa0 + i);
    }
    return entry;
}

static bool
same_entry(const gd_entry *a, const gd_entry *b)
{
    return gd_fingerprint_equal(&a->fingerprint, &b->fingerprint) &&
           a->checksum == b->checksum && a->segment == b->segment &&
           a->plain_offset == b->plain_offset &&
           a->plain_length == b->plain_length &&
           a->stored_length == b->stored_length && a->codec == b->codec &&
           a->state == b->state && a->nodedup == b->nodedup;
}

static gd_entry
through_disk(const gd_entry *entry, const gd_entry_bounds *bounds)
{
    uint8_t raw[GD_ENTRY_SIZE];
    gd_entry back;
    gd_entry_encode(entry, bounds->seed, 9, raw);
    gd_entry_decode(raw, bounds, 9, &back);
    return back;
}

/* ---- addresses ---- */

TEST(test_places)
{
    CHECK_INT(gd_entry_offset(0), 4096);
    CHECK_INT(gd_entry_offset(8), 4096 + 8 * 56);
    CHECK_INT(gd_entry_offset(9), 4096 + 512);
    CHECK_INT(gd_entry_offset(32767), 4096 + 512 * 3640 + 56 * 7);
    CHECK_INT(gd_fptable_size(1), 512);
    CHECK_INT(gd_fptable_size(9), 512);
    CHECK_INT(gd_fptable_size(10), 1024);
    CHECK_INT(gd_fptable_data_start(64), 4096 + 4096);
    CHECK_INT(gd_fptable_data_start(72), 4096 + 4096);
    CHECK_INT(gd_fptable_data_start(73), 4096 + 8192);
    CHECK_INT(gd_fptable_data_start(32768), 4096 + 1867776);
    for (uint32_t slot = 0; slot < 32768; slot++) {
        uint64_t at = gd_entry_offset(slot);
        if (at / 512 != (at + GD_ENTRY_SIZE - 1) / 512 ||
            at + GD_ENTRY_SIZE > 4096 + gd_fptable_size(slot + 1)) {
            CHECK_INT(slot, -1);
        }
    }
}

/* ---- on the disk ---- */

TEST(test_known_bytes)
{
    static const golden live[] = {
        {0, "a0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebf"
            "08070605040302010010020000c0000021861a289a68505b"}};
    static const golden given_up[] = {{51, "40a7bb19f3"}};
    static const golden largest[] = {
        {0, "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
            "ffffffffffffffffffffffff00000f0010000022a8c259c6"}};
    uint8_t raw[GD_ENTRY_SIZE];
    gd_entry entry = sample(), back;
    entry.segment = 0x21000;
    gd_entry_encode(&entry, SEED, 9, raw);
    CHECK(GOLDEN_MATCHES(raw, sizeof raw, live));
    entry = (gd_entry){.state = GD_ENTRY_VOID};
    gd_entry_encode(&entry, SEED, 10, raw);
    CHECK(GOLDEN_MATCHES(raw, sizeof raw, given_up));
    gd_entry_decode(raw, &BOUNDS, 10, &back);
    CHECK_INT(back.state, GD_ENTRY_VOID);
    memset(&entry, 0xff, sizeof entry);
    entry.nodedup = false;
    entry.plain_offset = (1 << 20) - 65536;
    entry.plain_length = 65536;
    entry.stored_length = 1 << 20;
    entry.codec = GD_CODEC_NONE;
    entry.state = GD_ENTRY_LIVE;
    gd_entry_encode(&entry, SEED, 0, raw);
    CHECK(GOLDEN_MATCHES(raw, sizeof raw, largest));
    gd_entry_decode(raw, &BOUNDS, 0, &back);
    CHECK(same_entry(&entry, &back));
}

TEST(test_round_trips)
{
    uint64_t state = 5;
    for (int i = 0; i < 2000; i++) {
        gd_entry entry = {0};
        fill_random(entry.fingerprint.bytes, GD_FINGERPRINT_SIZE,
                    next_random(&state));
        entry.checksum = next_random(&state);
        entry.segment = (uint32_t)gd_fptable_data_start(32768) +
                        (uint32_t)next_random(&state) % 0x70000000;
        entry.plain_length = 1 + (uint32_t)(next_random(&state) % 65536);
        entry.plain_offset = (uint32_t)(next_random(&state) %
                                        ((1 << 20) - entry.plain_length + 1));
        entry.stored_length = 1 + (uint32_t)(next_random(&state) % (1 << 20));
        entry.codec = (uint8_t)(next_random(&state) % 3);
        entry.state = (uint8_t)(1 + next_random(&state) % 4);
        entry.nodedup = next_random(&state) % 2 != 0;
        gd_entry back = through_disk(&entry, &BOUNDS);
        CHECK(same_entry(&entry, &back));
    }
}

TEST(test_empty)
{
    uint8_t raw[GD_ENTRY_SIZE] = {0};
    gd_entry entry = sample();
    gd_entry_decode(raw, &BOUNDS, 3, &entry);
    CHECK_INT(entry.state, GD_ENTRY_EMPTY);
    CHECK_INT(entry.segment, 0);
}

/* Every bit of an entry counts, whatever its state. */
TEST(test_every_flip_is_noticed)
{
    for (int state = GD_ENTRY_LIVE; state <= GD_ENTRY_DAMAGED; state++) {
        uint8_t raw[GD_ENTRY_SIZE];
        gd_entry entry = sample(), back;
        entry.state = (uint8_t)state;
        gd_entry_encode(&entry, SEED, 9, raw);
        for (int bit = 0; bit < 8 * GD_ENTRY_SIZE; bit++) {
            raw[bit / 8] ^= (uint8_t)(1 << bit % 8);
            gd_entry_decode(raw, &BOUNDS, 9, &back);
            CHECK_INT(back.state, GD_ENTRY_INVALID);
            raw[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        gd_entry_decode(raw, &BOUNDS, 9, &back);
        CHECK_INT(back.state, state);
    }
}

/* An entry is valid in its own group and slot only. */
TEST(test_elsewhere_is_invalid)
{
    uint8_t raw[GD_ENTRY_SIZE];
    gd_entry entry = sample(), back;
    gd_entry_bounds other = BOUNDS;
    other.seed++;
    gd_entry_encode(&entry, SEED, 9, raw);
    gd_entry_decode(raw, &BOUNDS, 8, &back);
    CHECK_INT(back.state, GD_ENTRY_INVALID);
    gd_entry_decode(raw, &BOUNDS, 10, &back);
    CHECK_INT(back.state, GD_ENTRY_INVALID);
    gd_entry_decode(raw, &other, 9, &back);
    CHECK_INT(back.state, GD_ENTRY_INVALID);
}

/* The checksum is right; a field is not. */
TEST(test_bounds)
{
    static const gd_entry_bounds bounds = {
        .seed = SEED, .slots = 64, .max_block = 4096};
    const uint32_t start = (uint32_t)gd_fptable_data_start(64);
    struct {
        uint32_t segment, offset, length, stored;
        uint8_t codec, state, wanted;
    } cases[] = {
        {start, 0, 1, 1, 0, 1, GD_ENTRY_LIVE},
        {start, 0, 4096, 1 << 20, 2, 1, GD_ENTRY_LIVE},
        {start, (1 << 20) - 4096, 4096, 1, 1, 1, GD_ENTRY_LIVE},
        {start - 1, 0, 4096, 9, 0, 1, GD_ENTRY_INVALID},
        {0, 0, 4096, 9, 0, 1, GD_ENTRY_INVALID},
        {start, 0, 0, 9, 0, 1, GD_ENTRY_INVALID},
        {start, 0, 4097, 9, 0, 1, GD_ENTRY_INVALID},
        {start, 0, 131071, 9, 0, 1, GD_ENTRY_INVALID},
        {start, (1 << 20) - 4095, 4096, 9, 0, 1, GD_ENTRY_INVALID},
        {start, 0, 4096, 0, 0, 1, GD_ENTRY_INVALID},
        {start, 0, 4096, (1 << 20) + 1, 0, 1, GD_ENTRY_INVALID},
        {start, 0, 4096, (1 << 21) - 1, 0, 1, GD_ENTRY_INVALID},
        {start, 0, 4096, 9, 3, 1, GD_ENTRY_INVALID},
        {start, 0, 4096, 9, 7, 1, GD_ENTRY_INVALID},
        {start, 0, 4096, 9, 0, 0, GD_ENTRY_INVALID},
        {start, 0, 4096, 9, 0, 5, GD_ENTRY_INVALID},
        {start, 0, 4096, 9, 0, 6, GD_ENTRY_INVALID},
        {start, 0, 4096, 9, 0, 7, GD_ENTRY_INVALID},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        gd_entry entry = sample();
        entry.segment = cases[i].segment;
        entry.plain_offset = cases[i].offset;
        entry.plain_length = cases[i].length;
        entry.stored_length = cases[i].stored;
        entry.codec = cases[i].codec;
        entry.state = cases[i].state;
        if (!CHECK_INT(through_disk(&entry, &bounds).state, cases[i].wanted)) {
            fprintf(stderr, "case %zu\n", i);
        }
    }
}

/* Any bytes with a right checksum decode within the bounds. */
TEST(test_hostile_entries)
{
    uint64_t state = 77;
    unsigned live = 0;
    for (int i = 0; i < 200000; i++) {
        uint8_t raw[GD_ENTRY_SIZE];
        gd_entry entry;
        fill_random(raw, sizeof raw, next_random(&state));
        gd_put32(raw + 52, (uint32_t)gd_checksum(raw, 52, SEED + 9));
        gd_entry_decode(raw, &BOUNDS, 9, &entry);
        if (entry.state == GD_ENTRY_LIVE) {
            live++;
            CHECK(entry.plain_length <= 65536 &&
                  entry.plain_offset + entry.plain_length <= GD_SEGMENT_MAX &&
                  entry.stored_length <= GD_SEGMENT_MAX && entry.codec <= 2);
        }
    }
    CHECK(live > 100);
}

/* ---- in memory ---- */

/* Returns n-th fingerprints, some of which have the same place in the
 * table. */
static gd_fingerprint
numbered(unsigned n)
{
    gd_fingerprint fp = {{0}};
    fp.bytes[0] = (uint8_t)n;
    fp.bytes[31] = (uint8_t)(n >> 8);
    return fp;
}

static unsigned
count_found(const gd_fptable *store, const gd_fingerprint *fp, uint32_t *last)
{
    uint32_t probe = 0;
    unsigned found = 0;
    while (gd_fptable_find(store, fp, &probe, last)) {
        CHECK(gd_fingerprint_equal(&store->fingerprints[*last], fp));
        found++;
    }
    return found;
}

TEST(test_build)
{
    enum { SLOTS = 1000 };
    fault_env f;
    gd_fptable *store;
    fault_env_init(&f);
    uint8_t *raw = calloc(1, gd_fptable_size(SLOTS));
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        uint8_t *at = raw + gd_entry_offset(slot) - GD_STORE_START;
        gd_entry entry = sample();
        entry.fingerprint = numbered(slot);
        entry.state = slot % 10 == 3 ? GD_ENTRY_FREED : GD_ENTRY_LIVE;
        gd_entry_encode(&entry, SEED, slot, at);
        at[slot % GD_ENTRY_SIZE] ^= slot % 10 == 4; /* does not verify */
        if (slot % 10 == 5) {
            memset(at, 0, GD_ENTRY_SIZE);
        }
    }
    REQUIRE(gd_fptable_build(&f.env, raw, 7, SLOTS, &BOUNDS, &store,
                             NULL) == GD_OK);
    CHECK_INT(store->group, 7);
    CHECK_INT(store->count, SLOTS);
    for (uint32_t slot = 0; slot < SLOTS + 100; slot++) {
        gd_fingerprint fp = numbered(slot);
        bool there = slot < SLOTS && (slot % 10 < 3 || slot % 10 > 5);
        uint32_t last = 0;
        CHECK_INT(count_found(store, &fp, &last), there);
        CHECK(!there || last == slot);
        CHECK_INT(gd_fptable_matches(store, slot, &fp), there);
        CHECK(!gd_fptable_matches(store, slot == 0 ? 1 : slot - 1, &fp));
        /* A slot that is not live is not a block of zeros, either. */
        fp = (gd_fingerprint){{0}};
        CHECK_INT(gd_fptable_matches(store, slot, &fp), slot == 0);
    }
    CHECK(!gd_fptable_is_live(store, UINT32_MAX));
    gd_fptable_free(&f.env, store);
    REQUIRE(gd_fptable_build(&f.env, raw, 7, 0, &BOUNDS, &store, NULL) ==
            GD_OK);
    CHECK_INT(store->count, 0);
    gd_fptable_free(&f.env, store);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
    free(raw);
}

/* Several slots have one fingerprint; the table is filled to its last slot. */
TEST(test_add)
{
    enum { SLOTS = 64 };
    fault_env f;
    gd_fptable *store;
    uint32_t last;
    fault_env_init(&f);
    REQUIRE(gd_fptable_new(&f.env, SLOTS, &store, NULL) == GD_OK);
    for (int round = 1; round <= 3; round++) {
        gd_fptable_clear(store, (uint32_t)round);
        CHECK_INT(store->group, round);
        CHECK_INT(store->count, 0);
        gd_fingerprint some = numbered(0);
        gd_fptable_add(store, SLOTS - 1, &some);
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            CHECK_INT(gd_fptable_is_live(store, slot), slot == SLOTS - 1);
        }
        gd_fptable_clear(store, (uint32_t)round);
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            gd_fingerprint fp = numbered(slot % 8);
            CHECK_INT(count_found(store, &fp, &last), slot / 8);
            gd_fptable_add(store, slot, &fp);
            CHECK_INT(count_found(store, &fp, &last), slot / 8 + 1);
        }
        CHECK_INT(store->count, SLOTS);
        for (unsigned n = 0; n < 8; n++) {
            gd_fingerprint fp = numbered(n), absent = numbered(n + 8);
            CHECK_INT(count_found(store, &fp, &last), SLOTS / 8);
            CHECK_INT(count_found(store, &absent, &last), 0);
        }
    }
    gd_fptable_free(&f.env, store);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

/* Returns the longest probe sequence of a look-up, or an addition. */
static uint32_t
longest_probe(const gd_fptable *store)
{
    uint32_t longest = 0, run = 0;
    for (uint32_t i = 0; i <= 2 * store->mask; i++) { /* runs wrap around */
        run = store->index[i & store->mask] != 0 ? run + 1 : 0;
        longest = run > longest ? run : longest;
    }
    return longest;
}

/* An attacker could choose these fingerprints so that all have one place, if
 * places were known: kind 0, the exclusive or of their halves is the same; 1
 * and 2, they differ in a few bits, low or high; 3, they are all the same. */
static gd_fingerprint
crafted(int kind, uint32_t number)
{
    gd_fingerprint fp = {{0}};
    uint64_t a = number * UINT64_C(0x2545f4914f6cdd1d), b = 0;
    switch (kind) {
    case 0:
        b = a ^ 12345;
        break;
    case 1:
        a = number;
        break;
    case 2:
        a = (uint64_t)number << 32;
        b = (uint64_t)number << 48;
        break;
    default:
        a = b = 7;
    }
    memcpy(fp.bytes, &a, 8);
    memcpy(fp.bytes + 8, &b, 8);
    return fp;
}

TEST(test_crafted_fingerprints)
{
    enum { SLOTS = 32768, FAR = 1000 };
    fault_env f;
    gd_fptable *store;
    fault_env_init(&f);
    for (int kind = 0; kind < 4; kind++) {
        REQUIRE(gd_fptable_new(&f.env, SLOTS, &store, NULL) == GD_OK);
        gd_fptable_clear(store, 1);
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            gd_fingerprint fp = crafted(kind, slot);
            gd_fptable_add(store, slot, &fp);
            /* One such table would take seconds for each upload. */
            REQUIRE(slot % 1024 != 0 || longest_probe(store) < FAR);
        }
        CHECK(longest_probe(store) < FAR);
        for (uint32_t slot = 0; slot < SLOTS; slot++) {
            gd_fingerprint fp = crafted(kind, slot);
            uint32_t last = SLOTS;
            CHECK(gd_fptable_matches(store, slot, &fp));
            CHECK_INT(count_found(store, &fp, &last),
                      kind < 3 ? 1 : GD_NAMESAKES);
            CHECK(kind < 3 ? last == slot : last < SLOTS);
        }
        gd_fptable_free(&f.env, store);
    }
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

TEST(test_out_of_memory)
{
    fault_env f;
    gd_fptable *store;
    gd_error err;
    uint8_t raw[512] = {0};
    fault_env_init(&f);
    for (uint64_t n = 1; n <= 3; n++) {
        fault_env_fail(&f, FAULT_ALLOC, n, ENOMEM, false);
        CHECK_INT(gd_fptable_build(&f.env, raw, 1, 9, &BOUNDS, &store,
                                   &err),
                  GD_NOMEM);
        CHECK_INT(fault_env_leaks(&f), 0);
    }
    fault_env_destroy(&f);
}
