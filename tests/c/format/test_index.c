/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_index.c - records of the exact index: sorting and updating agree with
 * the simplest possible implementation, for any contents.
 */
#include "engine/format/index.h"

#include <time.h>

#include "engine/format/fpstore.h"
#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"
#include "tests/c/support/scratch_repository.h"

enum { R = GD_INDEX_RECORD, MOST = 3000 };

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

/* Few keys and few addresses, or many, so that records repeat, or do not. */
static void
fill(uint8_t *out, size_t count, unsigned kinds, uint64_t *seed)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t key = next_random(seed);
        uint64_t address = next_random(seed) & ((UINT64_C(1) << 40) - 1);
        if (kinds > 0) {
            key = key % kinds * UINT64_C(0x0101010101010101);
            address = address % kinds + 32768;
        }
        put(out + i * R, key, address);
    }
}

static void
test_record(void)
{
    uint8_t record[R];
    put(record, UINT64_C(0x8123456789abcdef), UINT64_C(0xfedcba9876));
    CHECK_INT(gd_index_key(record), UINT64_C(0x8123456789abcdef));
    CHECK_INT(gd_index_address(record), UINT64_C(0xfedcba9876));
    CHECK_INT(gd_index_page(record, 0), 0);
    CHECK_INT(gd_index_page(record, 1), 1);
    CHECK_INT(gd_index_page(record, 12), 0x812);
    CHECK_INT(gd_index_page(record, 31), 0x8123456789abcdef >> 33);
}

static void
test_records_of_entries(void)
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
    CHECK_INT(gd_index_records(entries, 5, 7, 100, out), 2);
    CHECK_INT(gd_index_key(out), 0x5050505050505050);
    CHECK_INT(gd_index_address(out), 7 << 15 | 100);
    CHECK_INT(gd_index_key(out + R), 0x2020202020202020);
    CHECK_INT(gd_index_address(out + R), 7 << 15 | 103);
}

static void
test_sort(void)
{
    static uint8_t records[MOST * R], wanted[MOST * R];
    static const unsigned kinds[] = {0, 1, 2, 40};
    fault_env f;
    fault_env_init(&f);
    uint64_t seed = 5;
    for (size_t k = 0; k < 4; k++) {
        for (size_t count = 0; count < MOST; count = count * 3 + 1) {
            fill(records, count, kinds[k], &seed);
            memcpy(wanted, records, count * R);
            qsort(wanted, count, R, compare);
            CHECK_INT(gd_index_sort(&f.env, records, count, NULL), GD_OK);
            CHECK(memcmp(records, wanted, count * R) == 0);
        }
    }
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK_INT(gd_index_sort(&f.env, records, 9, NULL), GD_NOMEM);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

/* ---- updating ---- */

static uint8_t page[MOST * R], add[MOST * R], gone[MOST * R];
static uint8_t out_page[2 * MOST * R], out_pairs[2 * MOST * 16];

static gd_index_result
update(size_t pages, size_t adds, size_t removes)
{
    gd_index_result result = {.page = out_page, .pairs = out_pairs};
    gd_error err;
    CHECK_INT(gd_index_update((gd_records){page, pages},
                              (gd_records){add, adds},
                              (gd_records){gone, removes}, &result, &err),
              GD_OK);
    return result;
}

static bool
is_among(const uint8_t *record, const uint8_t *records, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (memcmp(record, records + i * R, R) == 0) {
            return true;
        }
    }
    return false;
}

/* As by the words of index.h. */
static void
check_update(size_t pages, size_t adds, size_t removes)
{
    static uint8_t all[2 * MOST * R];
    size_t count = adds, kept = 0, pairs = 0;
    gd_index_result got = update(pages, adds, removes);
    memcpy(all, add, adds * R);
    for (size_t i = 0; i < pages; i++) {
        if (!is_among(page + i * R, gone, removes)) {
            memcpy(all + count++ * R, page + i * R, R);
        }
    }
    qsort(all, count, R, compare);
    for (size_t i = 0; i < count; i++) {
        const uint8_t *record = all + i * R;
        const uint8_t *last = out_page + (kept - 1) * R;
        if (kept == 0 || memcmp(record, last, 8) != 0) {
            CHECK(memcmp(out_page + kept * R, record, R) == 0);
            kept++;
        } else if (memcmp(record, record - R, R) != 0) {
            CHECK_INT(gd_get64(out_pairs + pairs * 16),
                      gd_index_address(record));
            CHECK_INT(gd_get64(out_pairs + pairs * 16 + 8),
                      gd_index_address(last));
            pairs++;
        }
    }
    CHECK_INT(got.page_count, kept);
    CHECK_INT(got.pair_count, pairs);
}

/* A page as an update makes it: no fingerprint twice. */
static size_t
make_page(uint8_t *records, size_t count)
{
    size_t used = 0;
    qsort(records, count, R, compare);
    for (size_t i = 0; i < count; i++) {
        if (used == 0 ||
            memcmp(records + (used - 1) * R, records + i * R, 8) != 0) {
            memmove(records + used++ * R, records + i * R, R);
        }
    }
    return used;
}

static void
test_update(void)
{
    uint64_t seed = 11;
    for (int round = 0; round < 400; round++) {
        unsigned kinds = round % 3 == 0 ? 0 : 1 + next_random(&seed) % 60;
        size_t pages = next_random(&seed) % 80;
        size_t adds = next_random(&seed) % 80;
        fill(page, pages, kinds, &seed);
        fill(add, adds, kinds, &seed);
        pages = make_page(page, pages);
        qsort(add, adds, R, compare);
        size_t removes = 0;
        for (size_t i = 0; i < pages; i++) {
            if (next_random(&seed) % 3 == 0) {
                memcpy(gone + removes++ * R, page + i * R, R);
            }
        }
        fill(gone + removes * R, 2, kinds, &seed); /* which nobody has */
        removes += 2;
        qsort(gone, removes, R, compare);
        check_update(pages, adds, removes);
    }
}

static void
test_update_says_each_thing_once(void)
{
    put(page, 5, 200);
    put(add, 5, 100);
    put(add + R, 5, 200);
    put(add + 2 * R, 5, 300);
    gd_index_result got = update(1, 3, 0);
    CHECK_INT(got.page_count, 1);
    CHECK_INT(gd_index_address(got.page), 100);
    REQUIRE(got.pair_count == 2);
    CHECK_INT(gd_get64(got.pairs), 200);
    CHECK_INT(gd_get64(got.pairs + 8), 100);
    CHECK_INT(gd_get64(got.pairs + 16), 300);
    CHECK_INT(gd_get64(got.pairs + 24), 100);
    /* What was there already is nothing new. */
    memcpy(page, out_page, R);
    got = update(1, 1, 0);
    CHECK_INT(got.page_count, 1);
    CHECK_INT(got.pair_count, 0);
    /* In the place of one that is removed comes the next. */
    memcpy(gone, page, R);
    memmove(add, add + R, 2 * R);
    got = update(1, 2, 1);
    CHECK_INT(gd_index_address(got.page), 200);
    CHECK_INT(got.pair_count, 1);
    CHECK_INT(gd_get64(got.pairs), 300);
}

static void
test_unsorted_is_refused(void)
{
    gd_index_result result = {.page = out_page, .pairs = out_pairs};
    gd_error err;
    uint8_t good[R], bad[3 * R];
    put(good, 1, 1);
    put(bad, 3, 1);
    put(bad + R, 2, 1);
    put(bad + 2 * R, 4, 1);
    gd_records one = {good, 1}, three = {bad, 3};
    CHECK_INT(gd_index_update(three, one, one, &result, &err), GD_INVALID);
    CHECK_INT(gd_index_update(one, three, one, &result, &err), GD_INVALID);
    CHECK_INT(gd_index_update(one, one, three, &result, &err), GD_INVALID);
    CHECK_INT(gd_index_update(one, one, one, &result, &err), GD_OK);
}

/* How fast, for people; nothing depends on it. */
static void
test_pace(void)
{
    enum { COUNT = 1 << 17 };
    uint8_t *old = malloc(COUNT * R), *new = malloc(COUNT * R);
    gd_index_result result = {.page = malloc(2 * COUNT * R),
                              .pairs = malloc(2 * COUNT * 16)};
    uint64_t seed = 1;
    struct timespec times[3];
    fill(old, COUNT, 0, &seed);
    fill(new, COUNT, 0, &seed);
    clock_gettime(CLOCK_MONOTONIC, &times[0]);
    CHECK_INT(gd_index_sort(gd_env_posix(), old, COUNT, NULL), GD_OK);
    CHECK_INT(gd_index_sort(gd_env_posix(), new, COUNT, NULL), GD_OK);
    clock_gettime(CLOCK_MONOTONIC, &times[1]);
    CHECK_INT(gd_index_update((gd_records){old, COUNT},
                              (gd_records){new, COUNT}, (gd_records){NULL, 0},
                              &result, NULL),
              GD_OK);
    clock_gettime(CLOCK_MONOTONIC, &times[2]);
    for (int i = 0; i < 2; i++) {
        double seconds =
            (double)(times[i + 1].tv_sec - times[i].tv_sec) +
            1e-9 * (double)(times[i + 1].tv_nsec - times[i].tv_nsec);
        printf("%s: %.1f million records a second\n",
               i == 0 ? "sort" : "update", 2e-6 * COUNT / seconds);
    }
    free(old);
    free(new);
    free(result.page);
    free(result.pairs);
}

int
main(int argc, char **argv)
{
    BEGIN(argc, argv);
    RUN(test_record);
    RUN(test_records_of_entries);
    RUN(test_sort);
    RUN(test_update);
    RUN(test_update_says_each_thing_once);
    RUN(test_unsorted_is_refused);
    RUN(test_pace);
    return REPORT();
}
