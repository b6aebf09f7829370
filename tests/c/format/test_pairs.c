/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pairs.c - arithmetic on pairs of addresses: it agrees with the
 * simplest possible implementation, for any contents.
 */
#include "engine/format/pairs.h"

#include "engine/format/fptable.h"
#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"
#include "tests/c/support/scratch_repository.h"

enum { MAX_COUNT = 200, ADDRESSES = 24, ROUNDS = 300 };

typedef struct pair {
    uint64_t first, second;
} pair;

static pair
pair_at(const uint8_t *pairs, size_t i)
{
    return (pair){gd_get64(pairs + i * 16), gd_get64(pairs + i * 16 + 8)};
}

static void
put_pair(uint8_t *pairs, size_t i, uint64_t first, uint64_t second)
{
    gd_put64(pairs + i * 16, first);
    gd_put64(pairs + i * 16 + 8, second);
}

static bool
has_pair(const uint8_t *pairs, size_t count, pair wanted)
{
    for (size_t i = 0; i < count; i++) {
        pair p = pair_at(pairs, i);
        if (p.first == wanted.first && p.second == wanted.second) {
            return true;
        }
    }
    return false;
}

/* Returns true if the pairs are strictly in order, so each is there once. */
static bool
in_order(const uint8_t *pairs, size_t count)
{
    for (size_t i = 1; i < count; i++) {
        pair a = pair_at(pairs, i - 1), b = pair_at(pairs, i);
        if (a.first > b.first ||
            (a.first == b.first && a.second >= b.second)) {
            return false;
        }
    }
    return true;
}

/* Blocks of a few groups: their addresses, and the facts about each. */
typedef struct fixture {
    uint64_t seed;
    uint8_t addresses[ADDRESSES * 8];
    uint8_t entries[ADDRESSES * GD_LISTED_ENTRY];
    uint8_t counts[ADDRESSES * 4];
    gd_blocks blocks;
    uint8_t pairs[MAX_COUNT * 16];
    size_t count;
} fixture;

static uint64_t
address_number(const fixture *t, size_t i)
{
    return gd_get64(t->addresses + i * 8);
}

static void
set_block(fixture *t, size_t i, unsigned fingerprint, unsigned state,
          uint32_t count)
{
    uint8_t *entry = t->entries + i * GD_LISTED_ENTRY;
    memset(entry, (int)fingerprint, 32);
    gd_put32(entry + 36, 512);
    gd_put32(entry + 44, state);
    gd_put32(t->counts + i * 4, count);
}

static void
begin(fixture *t, uint64_t seed)
{
    static const unsigned states[] = {GD_ENTRY_LIVE, GD_ENTRY_LIVE,
                                      GD_ENTRY_LIVE, GD_ENTRY_DAMAGED,
                                      GD_ENTRY_EMPTY};
    memset(t, 0, sizeof *t);
    t->seed = seed;
    for (size_t i = 0; i < ADDRESSES; i++) {
        gd_put64(t->addresses + i * 8,
                 (1 + i / 8) << GD_SLOT_BITS | (i * 3));
        set_block(t, i, (unsigned)(next_random(&t->seed) % 3),
                  states[next_random(&t->seed) % 5],
                  (uint32_t)(next_random(&t->seed) % 2));
    }
    t->blocks = (gd_blocks){t->addresses, t->entries, t->counts, ADDRESSES};
    t->count = next_random(&t->seed) % MAX_COUNT;
    for (size_t i = 0; i < t->count; i++) {
        put_pair(t->pairs, i,
                 address_number(t, next_random(&t->seed) % ADDRESSES),
                 address_number(t, next_random(&t->seed) % ADDRESSES));
    }
}

static size_t
index_of(const fixture *t, uint64_t address)
{
    size_t i = 0;
    while (address_number(t, i) != address) {
        i++;
    }
    return i;
}

static unsigned
state_of(const fixture *t, uint64_t address)
{
    return t->entries[index_of(t, address) * GD_LISTED_ENTRY + 44];
}

static unsigned
fingerprint_of(const fixture *t, uint64_t address)
{
    return t->entries[index_of(t, address) * GD_LISTED_ENTRY];
}

static bool
is_used(const fixture *t, uint64_t address)
{
    return gd_get32(t->counts + index_of(t, address) * 4) > 0;
}

static gd_pairs
pairs_of(const fixture *t)
{
    return (gd_pairs){t->pairs, t->count};
}

TEST(test_sorting)
{
    for (uint64_t round = 0; round < ROUNDS; round++) {
        fixture t;
        gd_error err;
        uint8_t out[MAX_COUNT * 16];
        size_t n, sorted;
        begin(&t, round);
        CHECK_INT(gd_pairs_addresses(gd_env_posix(), pairs_of(&t), out, &n,
                                     &err),
                  GD_OK);
        size_t named = 0;
        for (size_t i = 0; i < ADDRESSES; i++) {
            bool there = false;
            for (size_t k = 0; k < t.count; k++) {
                pair p = pair_at(t.pairs, k);
                there = there || p.first == address_number(&t, i) ||
                        p.second == address_number(&t, i);
            }
            if (there) {
                CHECK(named < n &&
                      gd_get64(out + named * 8) == address_number(&t, i));
                named++;
            }
        }
        CHECK_INT(n, named);
        memcpy(out, t.pairs, sizeof out);
        sorted = t.count;
        CHECK_INT(gd_pairs_sort(gd_env_posix(), out, &sorted, &err), GD_OK);
        CHECK(in_order(out, sorted));
        for (size_t i = 0; i < t.count; i++) {
            CHECK(has_pair(out, sorted, pair_at(t.pairs, i)));
        }
        for (size_t i = 0; i < sorted; i++) {
            CHECK(has_pair(t.pairs, t.count, pair_at(out, i)));
        }
    }
}

TEST(test_no_address)
{
    uint8_t pairs[16], out[16];
    gd_error err;
    size_t n = 1;
    put_pair(pairs, 0, 32768, UINT64_C(1) << 40);
    CHECK_INT(gd_pairs_addresses(gd_env_posix(), (gd_pairs){pairs, 1}, out, &n,
                                 &err),
              GD_INVALID);
    n = 1;
    CHECK_INT(gd_pairs_sort(gd_env_posix(), pairs, &n, &err), GD_INVALID);
}

TEST(test_without)
{
    for (uint64_t round = 0; round < ROUNDS; round++) {
        fixture t;
        gd_error err;
        uint8_t a[MAX_COUNT * 16], b[MAX_COUNT * 16], out[MAX_COUNT * 16];
        size_t a_count, b_count;
        begin(&t, round);
        a_count = t.count / 2;
        b_count = t.count - a_count;
        memcpy(a, t.pairs, a_count * 16);
        memcpy(b, t.pairs + a_count * 16, b_count * 16);
        CHECK_INT(gd_pairs_sort(gd_env_posix(), a, &a_count, &err), GD_OK);
        CHECK_INT(gd_pairs_sort(gd_env_posix(), b, &b_count, &err), GD_OK);
        size_t n = gd_pairs_subtract((gd_pairs){a, a_count},
                                     (gd_pairs){b, b_count}, out);
        size_t wanted = 0;
        for (size_t i = 0; i < a_count; i++) {
            if (!has_pair(b, b_count, pair_at(a, i))) {
                CHECK(wanted < n &&
                      memcmp(out + wanted * 16, a + i * 16, 16) == 0);
                wanted++;
            }
        }
        CHECK_INT(n, wanted);
    }
}

TEST(test_judging)
{
    for (uint64_t round = 0; round < ROUNDS; round++) {
        fixture t;
        uint8_t equal[MAX_COUNT * 16], stale[MAX_COUNT * 16];
        size_t equals, stales, e = 0, s = 0;
        begin(&t, round);
        CHECK(gd_pairs_judge(pairs_of(&t), &t.blocks, equal, &equals, stale,
                             &stales));
        for (size_t i = 0; i < t.count; i++) {
            pair p = pair_at(t.pairs, i); /* other, kept */
            if (fingerprint_of(&t, p.first) == fingerprint_of(&t, p.second)) {
                pair got = pair_at(equal, e++);
                CHECK(got.first == p.second && got.second == p.first);
            }
            if (state_of(&t, p.second) != GD_ENTRY_LIVE) {
                pair got = pair_at(stale, s++);
                CHECK(got.first == p.first && got.second == p.second);
            }
        }
        CHECK_INT(equals, e);
        CHECK_INT(stales, s);
    }
}

/* The lengths are compared, too, and all of the fingerprint. */
TEST(test_what_is_equal)
{
    fixture t;
    uint8_t equal[16], stale[16];
    size_t equals, stales;
    begin(&t, 0);
    set_block(&t, 0, 7, GD_ENTRY_LIVE, 1);
    set_block(&t, 1, 7, GD_ENTRY_LIVE, 1);
    put_pair(t.pairs, 0, address_number(&t, 1), address_number(&t, 0));
    t.count = 1;
    CHECK(gd_pairs_judge(pairs_of(&t), &t.blocks, equal, &equals, stale,
                         &stales));
    CHECK_INT(equals, 1);
    t.entries[31] ^= 1;
    CHECK(gd_pairs_judge(pairs_of(&t), &t.blocks, equal, &equals, stale,
                         &stales));
    CHECK_INT(equals, 0);
    t.entries[31] ^= 1;
    gd_put32(t.entries + 36, 511);
    CHECK(gd_pairs_judge(pairs_of(&t), &t.blocks, equal, &equals, stale,
                         &stales));
    CHECK_INT(equals, 0);
}

TEST(test_revising)
{
    for (uint64_t round = 0; round < ROUNDS; round++) {
        fixture t;
        uint8_t gone[MAX_COUNT * 16], records[MAX_COUNT * GD_INDEX_RECORD];
        size_t gones, news, g = 0, r = 0;
        begin(&t, round);
        CHECK(gd_pairs_revise(pairs_of(&t), &t.blocks, gone, &gones, records,
                              &news));
        for (size_t i = 0; i < t.count; i++) {
            pair p = pair_at(t.pairs, i); /* kept, other */
            unsigned kept = state_of(&t, p.first);
            unsigned other = state_of(&t, p.second);
            if (kept != GD_ENTRY_LIVE || other == GD_ENTRY_EMPTY) {
                CHECK(memcmp(gone + g++ * 16, t.pairs + i * 16, 16) == 0);
            }
            if (kept != GD_ENTRY_LIVE && other == GD_ENTRY_LIVE) {
                const uint8_t *record = records + r++ * GD_INDEX_RECORD;
                CHECK(gd_index_address(record) == p.second);
                CHECK_INT(record[0], fingerprint_of(&t, p.second));
            }
        }
        CHECK_INT(gones, g);
        CHECK_INT(news, r);
    }
}

/* Returns the address that replaces a kept block's class; 0 for none. */
static uint64_t
stays_in(const fixture *t, const uint8_t *sorted, size_t count, uint64_t kept)
{
    uint64_t lowest_used = 0, lowest = 0;
    bool used = false;
    for (size_t i = ADDRESSES; i-- > 0;) {
        uint64_t address = address_number(t, i);
        if (address != kept &&
            !has_pair(sorted, count, (pair){kept, address})) {
            continue;
        }
        used = used || is_used(t, address);
        if (state_of(t, address) == GD_ENTRY_LIVE) {
            lowest = address;
            lowest_used = is_used(t, address) ? address : lowest_used;
        }
    }
    return lowest_used != 0 ? lowest_used : used ? lowest : 0;
}

TEST(test_choosing)
{
    for (uint64_t round = 0; round < ROUNDS; round++) {
        fixture t;
        gd_error err;
        uint8_t out[2 * MAX_COUNT * GD_REPLACEMENT_SIZE];
        size_t n, wanted = 0;
        begin(&t, round);
        /* The index has a kept block as no other's, and not as its own. */
        for (size_t i = 0; i < t.count; i++) {
            put_pair(t.pairs, i, address_number(&t, i % 4 * 5),
                     address_number(&t, 5 * (i % 5) + 1 + i % 3));
        }
        CHECK_INT(gd_pairs_sort(gd_env_posix(), t.pairs, &t.count, &err),
                  GD_OK);
        CHECK(gd_pairs_choose(pairs_of(&t), &t.blocks, out, &n));
        for (size_t i = 0; i < n; i++) {
            const uint8_t *r = out + i * GD_REPLACEMENT_SIZE;
            uint64_t old = gd_get64(r), kept = gd_get64(r + 24);
            CHECK(is_used(&t, old) && old != gd_get64(r + 8));
            CHECK(old == kept ||
                  has_pair(t.pairs, t.count, (pair){kept, old}));
            CHECK(gd_get64(r + 8) ==
                  stays_in(&t, t.pairs, t.count, kept));
            CHECK_INT(gd_get64(r + 16), 512);
        }
        for (size_t k = 0; k < ADDRESSES; k++) {
            uint64_t kept = address_number(&t, k);
            bool is_kept = false;
            for (size_t i = 0; i < t.count; i++) {
                is_kept = is_kept || pair_at(t.pairs, i).first == kept;
            }
            uint64_t stays =
                is_kept ? stays_in(&t, t.pairs, t.count, kept) : 0;
            for (size_t i = 0; stays != 0 && i < ADDRESSES; i++) {
                uint64_t address = address_number(&t, i);
                wanted += address != stays && is_used(&t, address) &&
                          (address == kept ||
                           has_pair(t.pairs, t.count, (pair){kept, address}));
            }
        }
        CHECK_INT(n, wanted);
    }
}

TEST(test_unknown_block)
{
    fixture t;
    uint8_t a[64], b[64];
    size_t x, y;
    begin(&t, 0);
    t.count = 1;
    for (int which = 0; which < 2; which++) {
        put_pair(t.pairs, 0, address_number(&t, 0), address_number(&t, 1));
        gd_put64(t.pairs + 8 * which, 1);
        CHECK(!gd_pairs_judge(pairs_of(&t), &t.blocks, a, &x, b, &y));
        CHECK(!gd_pairs_revise(pairs_of(&t), &t.blocks, a, &x, b, &y));
        CHECK(!gd_pairs_choose(pairs_of(&t), &t.blocks, a, &x));
    }
}

static void
put_replacement(uint8_t *out, size_t i, uint64_t old, uint64_t new)
{
    put_pair(out, 2 * i, old, new);
    put_pair(out, 2 * i + 1, 512, 9);
}

TEST(test_replacements)
{
    uint8_t r[5 * GD_REPLACEMENT_SIZE];
    put_replacement(r, 0, 30, 5);
    put_replacement(r, 1, 20, 10); /* a chain: 10 is to go itself */
    put_replacement(r, 2, 10, 4);
    put_replacement(r, 3, 30, 5);
    put_replacement(r, 4, 40, 20); /* likewise, though 20 stays for now */
    CHECK_INT(gd_pairs_sort_replacements(r, 5), 2);
    CHECK_INT(gd_get64(r), 10);
    CHECK_INT(gd_get64(r + 8), 4);
    CHECK_INT(gd_get64(r + 16), 512);
    CHECK_INT(gd_get64(r + 32), 30);
    CHECK_INT(gd_get64(r + 40), 5);
    CHECK_INT(gd_pairs_sort_replacements(r, 0), 0);
}

/* The simplest implementation has each old address once, and none that is also
 * new. */
TEST(test_any_replacements)
{
    enum { REPLACEMENTS = 60 };
    uint64_t seed = 7;
    for (unsigned round = 0; round < 200; round++) {
        uint8_t r[REPLACEMENTS * GD_REPLACEMENT_SIZE];
        bool is_old[200] = {false};
        size_t wanted = 0;
        for (size_t i = 0; i < REPLACEMENTS; i++) {
            /* They are in order in some rounds; new addresses go to and
             * fro. */
            uint64_t old = round % 2 ? i * 3 : next_random(&seed) % 200;
            put_replacement(r, i, old, 199 - (old * 7 + round) % 200);
            is_old[old] = true;
        }
        for (uint64_t old = 0; old < 200; old++) {
            wanted += is_old[old] && !is_old[199 - (old * 7 + round) % 200];
        }
        size_t count = gd_pairs_sort_replacements(r, REPLACEMENTS);
        CHECK_INT(count, wanted);
        for (size_t i = 0; i < count; i++) {
            const uint8_t *at = r + i * GD_REPLACEMENT_SIZE;
            CHECK(is_old[gd_get64(at)] && !is_old[gd_get64(at + 8)]);
            CHECK(i == 0 || gd_get64(at - GD_REPLACEMENT_SIZE) < gd_get64(at));
        }
    }
}

TEST(test_pairs_of_a_group)
{
    enum { GROUP = 5 };
    const uint64_t first = (uint64_t)GROUP << GD_SLOT_BITS, other = 32768;
    uint8_t pairs[3 * 16];
    put_pair(pairs, 0, first, other);
    put_pair(pairs, 1, first, other + 1);
    put_pair(pairs, 2, first + 32767, GD_LAST_ADDRESS);
    CHECK(gd_pairs_are_of_group((gd_pairs){pairs, 3}, GROUP));
    CHECK(gd_pairs_are_of_group((gd_pairs){pairs, 0}, GROUP));
    CHECK(!gd_pairs_are_of_group((gd_pairs){pairs, 3}, GROUP + 1));
    static const uint64_t wrong[][2] = {
        {5 << GD_SLOT_BITS, 32768},           /* repeated */
        {(5 << GD_SLOT_BITS) - 1, 32769},     /* of the group before */
        {6 << GD_SLOT_BITS, 32769},           /* of the next one */
        {(5 << GD_SLOT_BITS) + 1, 32767},     /* no address */
        {(5 << GD_SLOT_BITS) + 1, GD_LAST_ADDRESS + 1},
        {UINT64_MAX, 32768},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        put_pair(pairs, 1, wrong[i][0], wrong[i][1]);
        CHECK(!gd_pairs_are_of_group((gd_pairs){pairs, 3}, GROUP));
    }
}

TEST(test_no_memory)
{
    fixture t;
    gd_error err;
    fault_env f;
    size_t n;
    uint8_t out[MAX_COUNT * 16];
    begin(&t, 3);
    REQUIRE(t.count > 0);
    fault_env_init(&f);
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, true);
    CHECK_INT(gd_pairs_addresses(&f.env, pairs_of(&t), out, &n, &err),
              GD_NOMEM);
    n = t.count;
    CHECK_INT(gd_pairs_sort(&f.env, t.pairs, &n, &err), GD_NOMEM);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}
