/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_index.c - records of the exact index: sorting agrees with the simplest
 * possible implementation, for any contents.
 */
#include "engine/format/index.h"

#include "engine/format/fptable.h"
#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"
#include "tests/c/support/scratch_repository.h"

enum { R = GD_INDEX_RECORD, MAX_COUNT = 3000, ALIKE = 1000 };

static void
put(uint8_t *out, uint64_t key, uint64_t address)
{
    for (int i = 0; i < 8; i++) {
        out[i] = (uint8_t)(key >> (56 - 8 * i));
    }
    for (int i = 0; i < 5; i++) {
        out[8 + i] = (uint8_t)(address >> 8 * i);
    }
}

static int
compare(const void *a, const void *b)
{
    int by_key = memcmp(a, b, 8);
    uint64_t x = gd_index_address(a), y = gd_index_address(b);
    return by_key != 0 ? by_key : x < y ? -1 : x > y;
}

/* Few keys and few addresses, or many, so that records repeat, or do not.  If
 * there are ALIKE ones, keys differ in their lower halves only. */
static void
fill(uint8_t *out, size_t count, unsigned kinds, uint64_t *seed)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t key = next_random(seed);
        uint64_t address = next_random(seed) & ((UINT64_C(1) << 40) - 1);
        if (kinds == ALIKE) {
            key >>= 32;
        } else if (kinds > 0) {
            key = key % kinds * UINT64_C(0x0101010101010101);
            address = address % kinds + 32768;
        }
        put(out + i * R, key, address);
    }
}

TEST(test_record)
{
    uint8_t record[R];
    put(record, UINT64_C(0x8123456789abcdef), UINT64_C(0xfedcba9876));
    CHECK_INT(gd_index_key(record), UINT64_C(0x8123456789abcdef));
    CHECK_INT(gd_index_address(record), UINT64_C(0xfedcba9876));
    CHECK_INT(gd_index_shard(gd_index_key(record), 0), 0);
    CHECK_INT(gd_index_shard(gd_index_key(record), 1), 1);
    CHECK_INT(gd_index_shard(gd_index_key(record), 12), 0x812);
    CHECK_INT(gd_index_shard(gd_index_key(record), 16), 0x8123);
}

TEST(test_records_of_entries)
{
    static uint8_t entries[5 * GD_LISTED_ENTRY];
    uint8_t out[5 * R];
    static const uint8_t states[] = {GD_ENTRY_LIVE, GD_ENTRY_FREED,
                                     GD_ENTRY_DAMAGED, GD_ENTRY_LIVE,
                                     GD_ENTRY_INVALID};
    for (int i = 0; i < 5; i++) {
        memset(entries + i * GD_LISTED_ENTRY, 0x10 * (5 - i), 44);
        entries[i * GD_LISTED_ENTRY + 44] = states[i];
    }
    entries[3 * GD_LISTED_ENTRY + GD_LISTED_NODEDUP] = 1; /* I14 */
    CHECK_INT(gd_index_records(entries, 5, 7, 100, out), 1);
    entries[3 * GD_LISTED_ENTRY + GD_LISTED_NODEDUP] = 0;
    CHECK_INT(gd_index_records(entries, 5, 7, 100, out), 2);
    CHECK_INT(gd_index_key(out), 0x5050505050505050);
    CHECK_INT(gd_index_address(out), 7 << 15 | 100);
    CHECK_INT(gd_index_key(out + R), 0x2020202020202020);
    CHECK_INT(gd_index_address(out + R), 7 << 15 | 103);
}

TEST(test_sort)
{
    static uint8_t records[MAX_COUNT * R], wanted[MAX_COUNT * R];
    static const unsigned kinds[] = {0, 1, 2, 40, ALIKE};
    fault_env f;
    fault_env_init(&f);
    uint64_t seed = 5;
    for (size_t k = 0; k < 5; k++) {
        for (size_t count = 0; count < MAX_COUNT; count = count * 3 + 1) {
            fill(records, count, kinds[k], &seed);
            memcpy(wanted, records, count * R);
            qsort(wanted, count, R, compare);
            CHECK_INT(gd_index_sort(&f.env, records, count, NULL), GD_OK);
            CHECK(memcmp(records, wanted, count * R) == 0);
            /* The records are sorted but for one that moves all the way. */
            for (size_t i = 0; i < count; i++) {
                memcpy(records + (i + 1) % count * R, wanted + i * R, R);
            }
            CHECK_INT(gd_index_sort(&f.env, records, count, NULL), GD_OK);
            CHECK(memcmp(records, wanted, count * R) == 0);
        }
    }
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK_INT(gd_index_sort(&f.env, records, 9, NULL), GD_NOMEM);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}
