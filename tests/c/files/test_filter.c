/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_filter.c - hints kept, found, sampled and given up; and a file with any
 * bytes.
 */
#include "engine/files/filter.h"

#include <sys/stat.h>

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/filter_fixture.h"

enum {
    FIXED_SIZE = 64, /* of the header; the fields after it change */
};

static filter_fixture x;

/* ---- hints ---- */

TEST_WITH(test_insert_lookup_remove, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    enum { MANY = FILTER_PLACES / 2 };
    for (uint64_t n = 0; n < MANY; n++) {
        CHECK(!filter_finds(x.filter, n));
        filter_insert(x.filter, n);
        CHECK(filter_finds(x.filter, n));
    }
    gd_filter_stats stats = filter_stats_of(x.filter);
    CHECK_INT(stats.bytes, FILTER_SMALL);
    CHECK_INT(stats.places, FILTER_PLACES);
    CHECK_INT(stats.hints, MANY);
    CHECK_INT(stats.dropped, 0);
    CHECK_INT(stats.level, 0);
    CHECK_INT(filter_count_found(x.filter, 0, MANY), MANY);
    for (uint64_t n = 0; n < MANY; n += 2) {
        gd_fingerprint fp = filter_fingerprint(n);
        /* This removes no hint. */
        gd_filter_remove(x.filter, &fp, filter_address(n + 1));
        CHECK(filter_finds(x.filter, n));
        gd_filter_remove(x.filter, &fp, filter_address(n));
        CHECK(!filter_finds(x.filter, n));
        gd_filter_remove(x.filter, &fp, filter_address(n)); /* no effect */
    }
    CHECK_INT(filter_stats_of(x.filter).hints, MANY / 2);
    CHECK_INT(filter_count_found(x.filter, 0, MANY), MANY / 2);
}

TEST_WITH(test_bounds_of_addresses, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    static const gd_address good[] = {
        {1, 0}, {1, GD_MAX_SLOTS - 1}, {GD_MAX_GROUP, 0},
        {GD_MAX_GROUP, GD_MAX_SLOTS - 1}, {0x155aa55, 0x2a55},
    };
    static const gd_address bad[] = {
        {0, 0}, {0, 5}, {GD_MAX_GROUP + 1, 0}, {1, GD_MAX_SLOTS},
        {UINT32_MAX, UINT32_MAX},
    };
    for (uint64_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        gd_fingerprint fp = filter_fingerprint(i);
        gd_filter_insert(x.filter, &fp, good[i]);
        CHECK(filter_leads_to(x.filter, i, good[i]));
    }
    uint64_t before = filter_stats_of(x.filter).hints;
    for (uint64_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        gd_address found[GD_FILTER_CANDIDATES];
        gd_fingerprint fp = filter_fingerprint(100 + i);
        gd_filter_insert(x.filter, &fp, bad[i]);
        gd_filter_remove(x.filter, &fp, bad[i]);
        CHECK_INT(gd_filter_lookup(x.filter, &fp, found), 0);
    }
    CHECK_INT(filter_stats_of(x.filter).hints, before);
}

TEST_WITH(test_the_same_hint_is_kept_once, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    for (int i = 0; i < 50; i++) {
        filter_insert(x.filter, 7);
    }
    CHECK_INT(filter_stats_of(x.filter).hints, 1);
    gd_fingerprint fp = filter_fingerprint(7);
    gd_filter_remove(x.filter, &fp, filter_address(7));
    CHECK_INT(filter_stats_of(x.filter).hints, 0);
}

/* Copies of one block fill all places of two buckets. */
TEST(test_many_addresses_of_one_fingerprint)
{
    filter_fixture x;
    gd_fingerprint fp = filter_fingerprint(1);
    gd_address found[GD_FILTER_CANDIDATES];
    filter_setup(&x, FILTER_SMALL);
    for (uint64_t n = 0; n < 100; n++) {
        gd_filter_insert(x.filter, &fp, filter_address(n));
    }
    CHECK_INT(gd_filter_lookup(x.filter, &fp, found), GD_FILTER_CANDIDATES);
    for (uint64_t n = 0; n < GD_FILTER_CANDIDATES; n++) {
        CHECK(filter_leads_to(x.filter, 1, filter_address(n)));
    }
    gd_filter_stats stats = filter_stats_of(x.filter);
    CHECK_INT(stats.hints, GD_FILTER_CANDIDATES);
    CHECK_INT(stats.dropped, 100 - GD_FILTER_CANDIDATES);
    CHECK_INT(stats.level, 0); /* the filter as a whole is not full */
    filter_teardown(&x);
}

/* A fingerprint always has two buckets, never one twice. */
TEST_WITH(test_two_buckets, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    for (uint64_t n = 0; n < 3000; n++) {
        gd_fingerprint fp = filter_fingerprint(n);
        gd_address found[GD_FILTER_CANDIDATES];
        for (uint64_t i = 0; i < GD_FILTER_CANDIDATES; i++) {
            gd_filter_insert(x.filter, &fp, filter_address(i));
        }
        CHECK_INT(gd_filter_lookup(x.filter, &fp, found),
                  GD_FILTER_CANDIDATES);
        for (uint64_t i = 0; i < GD_FILTER_CANDIDATES; i++) {
            gd_filter_remove(x.filter, &fp, filter_address(i));
        }
    }
    CHECK_INT(filter_stats_of(x.filter).dropped, 0);
    CHECK_INT(filter_stats_of(x.filter).hints, 0);
}

/* With a digest of 8 bits, the few fingerprints are still apart. */
TEST_WITH(test_weak_fingerprints_spread, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    for (uint32_t n = 0; n < 256; n++) {
        gd_fingerprint fp = {{(uint8_t)n}};
        gd_filter_insert(x.filter, &fp, (gd_address){1, n});
    }
    CHECK_INT(filter_stats_of(x.filter).hints, 256);
    for (uint32_t n = 0; n < 256; n++) {
        gd_fingerprint fp = {{(uint8_t)n}};
        gd_address found[GD_FILTER_CANDIDATES];
        CHECK_INT(gd_filter_lookup(x.filter, &fp, found), 1);
        CHECK_INT(found[0].slot, n);
    }
}

TEST(test_few_false_candidates)
{
    enum { ASKED = 200000 };
    filter_fixture x;
    uint64_t candidates = 0;
    filter_setup(&x, FILTER_SMALL);
    for (uint64_t n = 0; n < FILTER_PLACES / 2; n++) {
        filter_insert(x.filter, n);
    }
    for (uint64_t n = 0; n < ASKED; n++) {
        gd_address found[GD_FILTER_CANDIDATES];
        gd_fingerprint fp = filter_fingerprint(1000000 + n);
        candidates += gd_filter_lookup(x.filter, &fp, found);
    }
    /* Expected: eight hints, each alike with 1 in 2^20 times 1 in 3, so one
     * or none. */
    CHECK(candidates <= 8);
    filter_teardown(&x);
}

/* ---- the sampling level ---- */

TEST(test_level_halves_the_filter)
{
    filter_fixture x;
    uint64_t n = 0;
    filter_setup(&x, FILTER_SMALL);
    while (filter_stats_of(x.filter).level == 0 && n <= FILTER_PLACES) {
        filter_insert(x.filter, n++);
    }
    gd_filter_stats stats = filter_stats_of(x.filter);
    CHECK_INT(stats.level, 1);
    /* Two choices fill the buckets evenly: almost no hint was given up before
     * seven eighths were full. */
    CHECK(n >= FILTER_PLACES / 8 * 7);
    CHECK(n <= FILTER_PLACES / 8 * 7 + FILTER_PLACES / 100);
    CHECK(stats.dropped <= FILTER_PLACES / 100);
    CHECK(stats.hints > n * 45 / 100);
    CHECK(stats.hints < n * 55 / 100);
    CHECK_INT(filter_count_found(x.filter, 0, n), stats.hints);
    filter_teardown(&x);
}

/* Each hint that is kept at a level was kept at each lower level. */
TEST_WITH(test_levels_are_nested, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    enum { MANY = 6 * FILTER_PLACES };
    static bool kept[MANY];
    memset(kept, true, sizeof kept);
    uint64_t n = 0;
    for (unsigned level = 0; level < 3; level++) {
        while (filter_stats_of(x.filter).level == level && n < MANY) {
            filter_insert(x.filter, n++);
        }
        CHECK_INT(filter_stats_of(x.filter).level, level + 1);
        for (uint64_t i = 0; i < n; i++) {
            bool found = filter_finds(x.filter, i);
            CHECK(!found || kept[i]);
            kept[i] = found;
        }
    }
}

TEST_WITH(test_much_more_than_fits, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    enum { MANY = 40 * FILTER_PLACES };
    for (uint64_t n = 0; n < MANY; n++) {
        filter_insert(x.filter, n);
    }
    gd_filter_stats stats = filter_stats_of(x.filter);
    CHECK_INT(stats.level, 6); /* 40 / 2^6 is the first below 7/8 */
    uint64_t found = filter_count_found(x.filter, 0, MANY);
    CHECK_INT(found, stats.hints);
    CHECK(stats.hints > FILTER_PLACES * 55 / 100);
    CHECK(stats.hints < FILTER_PLACES * 70 / 100);
    CHECK(stats.dropped < MANY / 100);
}

TEST_WITH(test_clear, filter_setup(&x, FILTER_SMALL), filter_teardown(&x))
{
    for (uint64_t n = 0; n < 10 * FILTER_PLACES; n++) {
        filter_insert(x.filter, n);
    }
    CHECK(gd_filter_rebuild_lock(x.filter));
    filter_save(x.filter, 77, true);
    gd_filter_clear(x.filter);
    gd_filter_rebuild_unlock(x.filter);
    gd_filter_stats stats = filter_stats_of(x.filter);
    CHECK_INT(stats.hints, 0);
    CHECK_INT(stats.level, 0);
    CHECK_INT(stats.dropped, 0);
    CHECK_INT(stats.rebuilt, 0);
    CHECK(!stats.complete);
    CHECK_INT(filter_count_found(x.filter, 0, 10 * FILTER_PLACES), 0);
    for (uint64_t n = 0; n < FILTER_PLACES / 2; n++) {
        filter_insert(x.filter, n);
    }
    CHECK_INT(filter_stats_of(x.filter).hints, FILTER_PLACES / 2);
}

/* ---- the file ---- */

TEST(test_budget)
{
    filter_fixture x;
    filter_setup(&x, FILTER_SMALL + 63); /* rounded down to whole buckets */
    CHECK_INT(filter_stats_of(x.filter).bytes, FILTER_SMALL);
    filter_insert(x.filter, 1);
    filter_close(&x);
    /* The budget counts for the process that makes the file. */
    CHECK_INT(filter_open(&x, FILTER_SMALL + 64), GD_OK);
    CHECK_INT(filter_stats_of(x.filter).bytes, FILTER_SMALL);
    CHECK(filter_finds(x.filter, 1));
    filter_close(&x);
    CHECK_INT(unlink(x.path), 0);
    CHECK_INT(filter_open(&x, FILTER_SMALL + 64), GD_OK);
    CHECK_INT(filter_stats_of(x.filter).bytes, FILTER_SMALL + 64);
    filter_close(&x);
    CHECK_INT(filter_open(&x, 0), GD_INVALID);
    CHECK_INT(filter_open(&x, FILTER_SMALL - 1), GD_INVALID);
    CHECK_CONTAINS(x.err.text, "65535");
    CHECK_INT(filter_open(&x, UINT64_MAX), GD_INVALID);
    CHECK(x.filter == NULL);
    filter_teardown(&x);
}

TEST_WITH(test_hints_outlive_the_process, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    gd_filter *second;
    filter_insert(x.filter, 1);
    filter_save(x.filter, 12345, true);
    CHECK_INT(gd_filter_open(x.env, x.path, FILTER_REPOSITORY,
                             FILTER_SMALL, &second, &x.err),
              GD_OK);
    CHECK(filter_finds(second, 1));
    filter_insert(second, 2);
    CHECK(filter_finds(x.filter, 2));
    gd_filter_close(x.env, second);
    filter_close(&x);
    CHECK_INT(filter_open(&x, FILTER_SMALL), GD_OK);
    CHECK(filter_finds(x.filter, 1));
    CHECK(filter_finds(x.filter, 2));
    gd_filter_stats stats = filter_stats_of(x.filter);
    CHECK_INT(stats.rebuilt, 12345);
    CHECK(stats.complete);
    CHECK_INT(stats.look.behind, 0);
}

TEST_WITH(test_foreign_files_are_replaced, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    static const uint8_t other[16] = "repository no 2";
    gd_filter *second;
    filter_insert(x.filter, 1);
    CHECK_INT(gd_filter_open(x.env, x.path, other, FILTER_SMALL, &second,
                             &x.err),
              GD_OK);
    CHECK(!filter_finds(second, 1));
    filter_insert(second, 2);
    /* The process that had the old file continues with it. */
    CHECK(filter_finds(x.filter, 1));
    CHECK(!filter_finds(x.filter, 2));
    gd_filter_close(x.env, second);
    filter_close(&x);
    CHECK_INT(filter_open(&x, 2 * FILTER_SMALL), GD_OK);
    CHECK(!filter_finds(x.filter, 2));
    filter_insert(x.filter, 3);
    filter_close(&x);
    /* A size in the header that the file does not have is ignored. */
    CHECK_INT(truncate(x.path, 1000), 0);
    CHECK_INT(filter_open(&x, FILTER_SMALL), GD_OK);
    CHECK_INT(filter_stats_of(x.filter).bytes, FILTER_SMALL);
    CHECK(!filter_finds(x.filter, 3));
}

static void
overwrite(const filter_fixture *x, const void *data, size_t len, off_t offset)
{
    int fd = open(x->path, O_RDWR);
    CHECK(fd >= 0);
    CHECK_INT(pwrite(fd, data, len, offset), (ssize_t)len);
    close(fd);
}

TEST_WITH(test_damaged_headers_are_replaced, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    for (unsigned i = 0; i < FIXED_SIZE; i++) {
        filter_insert(x.filter, 1);
        filter_close(&x);
        overwrite(&x, "\xa5", 1, i);
        CHECK_INT(filter_open(&x, FILTER_SMALL), GD_OK);
        CHECK(!filter_finds(x.filter, 1));
    }
}

/* A random number generator for the garbage: the same in every run. */
static void
fill_garbage(uint8_t *data, size_t len, uint64_t seed)
{
    for (size_t i = 0; i < len; i++) {
        data[i] = (uint8_t)gd_checksum(&i, sizeof i, seed);
    }
}

static void
use_garbage(filter_fixture *x)
{
    gd_filter_stats stats = filter_stats_of(x->filter);
    CHECK(stats.level <= GD_FILTER_MAX_LEVEL);
    CHECK(stats.hints <= stats.places);
    CHECK(stats.rebuilt <= GD_MAX_GROUP);
    for (uint64_t n = 0; n < 3000; n++) {
        gd_address found[GD_FILTER_CANDIDATES];
        gd_fingerprint fp = filter_fingerprint(n);
        size_t count = gd_filter_lookup(x->filter, &fp, found);
        CHECK(count <= GD_FILTER_CANDIDATES);
        for (size_t i = 0; i < count; i++) {
            CHECK(found[i].group >= 1 && found[i].group <= GD_MAX_GROUP);
            CHECK(found[i].slot < GD_MAX_SLOTS);
        }
        gd_filter_insert(x->filter, &fp, filter_address(n));
        gd_filter_remove(x->filter, &fp, filter_address(n + n % 2));
    }
    CHECK(filter_stats_of(x->filter).level <= GD_FILTER_MAX_LEVEL);
}

/* Any bytes behind the header do no harm, and clearing repairs them. */
TEST(test_garbage_is_harmless)
{
    static uint8_t garbage[FILTER_SMALL];
    filter_fixture x;
    filter_setup(&x, FILTER_SMALL);
    for (uint64_t seed = 1; seed <= 10; seed++) {
        fill_garbage(garbage, sizeof garbage, seed);
        if (seed % 3 == 0) {
            memset(garbage, 0xff, sizeof garbage);
        }
        overwrite(&x, garbage, FILTER_SMALL - FIXED_SIZE, FIXED_SIZE);
        use_garbage(&x);
        gd_filter_clear(x.filter);
        for (uint64_t n = 0; n < FILTER_PLACES / 2; n++) {
            filter_insert(x.filter, n);
        }
        CHECK_INT(filter_stats_of(x.filter).hints, FILTER_PLACES / 2);
        CHECK_INT(filter_stats_of(x.filter).level, 0);
        CHECK_INT(filter_count_found(x.filter, 0, FILTER_PLACES / 2),
                  FILTER_PLACES / 2);
    }
    filter_teardown(&x);
}

/* A hint's group is 0 only if another program wrote it. Every word of the
 * filter becomes a hint for block 1 but for its group. */
TEST(test_group_0_is_no_candidate)
{
    static uint8_t words[FILTER_SMALL];
    filter_fixture x;
    gd_fingerprint fp = filter_fingerprint(1);
    gd_address found[GD_FILTER_CANDIDATES];
    uint64_t hint = 0;
    filter_setup(&x, FILTER_SMALL);
    filter_insert(x.filter, 1);
    int fd = open(x.path, O_RDONLY);
    CHECK_INT(pread(fd, words, FILTER_SMALL, 0), FILTER_SMALL);
    close(fd);
    for (size_t at = FILTER_HEADER; at < FILTER_SMALL; at += 8) {
        uint64_t word;
        memcpy(&word, words + at, 8);
        hint |= word;
    }
    CHECK(hint != 0);
    for (size_t at = FILTER_HEADER; at < FILTER_SMALL; at += 8) {
        uint64_t groupless = hint & ~((uint64_t)GD_MAX_GROUP << 15);
        groupless |= 1; /* not all zeros, whatever the tag */
        memcpy(words + at, &groupless, 8);
    }
    overwrite(&x, words + FILTER_HEADER, FILTER_SMALL - FILTER_HEADER,
              FILTER_HEADER);
    CHECK_INT(gd_filter_lookup(x.filter, &fp, found), 0);
    filter_insert(x.filter, 1); /* such places are free */
    CHECK_INT(gd_filter_lookup(x.filter, &fp, found), 1);
    filter_teardown(&x);
}

TEST_WITH(test_faults, filter_setup(&x, FILTER_SMALL), filter_teardown(&x))
{
    filter_close(&x);
    CHECK_INT(unlink(x.path), 0);
    fault_env_fail(&x.f, FAULT_FALLOCATE, 1, ENOSPC, true);
    CHECK_INT(filter_open(&x, FILTER_SMALL), GD_NOSPACE);
    CHECK(x.filter == NULL);
    fault_env_heal(&x.f);
    fault_env_fail(&x.f, FAULT_MMAP, 1, ENOMEM, false);
    CHECK_INT(filter_open(&x, FILTER_SMALL), GD_NOMEM);
    CHECK_CONTAINS(x.err.text, x.path);
    for (uint64_t nth = 1; nth <= 2; nth++) {
        fault_env_fail(&x.f, FAULT_ALLOC, nth, ENOMEM, false);
        CHECK_INT(filter_open(&x, FILTER_SMALL), GD_NOMEM);
    }
    CHECK_INT(fault_env_leaks(&x.f), 0);
    CHECK_INT(filter_open(&x, FILTER_SMALL), GD_OK);
    gd_filter_close(x.env, NULL);
}

/* ---- following the groups ---- */

TEST(test_position)
{
    filter_fixture x;
    gd_position saved = {.newest = 9, .complete = true}, loaded;
    gd_look look = {.ended_ns = 5, .listed_ns = 4, .behind = 3};
    filter_setup(&x, FILTER_SMALL);
    gd_filter_load(x.filter, &loaded); /* a new filter */
    CHECK_INT(loaded.newest + loaded.count + loaded.complete, 0);
    gd_position_append(&saved, (gd_open_group){7, 20, 1});
    gd_position_append(&saved, (gd_open_group){9, 0, 2});
    gd_filter_save(x.filter, &saved, &look);
    filter_close(&x);
    CHECK_INT(filter_open(&x, FILTER_SMALL), GD_OK);
    gd_filter_load(x.filter, &loaded);
    CHECK(memcmp(&saved, &loaded, sizeof saved) == 0);
    look = filter_stats_of(x.filter).look;
    CHECK(look.ended_ns == 5 && look.listed_ns == 4 && look.behind == 3);
    gd_filter_clear(x.filter);
    gd_filter_load(x.filter, &loaded);
    CHECK_INT(loaded.newest + loaded.count + loaded.complete, 0);
    CHECK_INT(filter_stats_of(x.filter).look.ended_ns, 0);
    filter_teardown(&x);
}

/* These are files of version 1, whose header was shorter. */
TEST_WITH(test_old_layout_is_replaced, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    uint8_t fixed[FIXED_SIZE];
    filter_insert(x.filter, 1);
    int fd = open(x.path, O_RDONLY);
    CHECK_INT(pread(fd, fixed, sizeof fixed, 0), sizeof fixed);
    close(fd);
    CHECK_INT(gd_get32(fixed + 8), 2);
    gd_put32(fixed + 8, 1);
    gd_put64(fixed + 40, (FILTER_SMALL - 4096) / 64);
    gd_put64(fixed + 56, gd_checksum(fixed, 56, 0));
    overwrite(&x, fixed, sizeof fixed, 0);
    filter_close(&x);
    CHECK_INT(filter_open(&x, 2 * FILTER_SMALL), GD_OK);
    CHECK_INT(filter_stats_of(x.filter).bytes, 2 * FILTER_SMALL);
    CHECK(!filter_finds(x.filter, 1));
}
