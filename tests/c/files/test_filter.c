/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_filter.c - hints kept, found, sampled and given up; by several threads
 * and processes; and whatever lies in the file.
 */
#include "engine/files/filter.h"

#include <pthread.h>
#include <sys/stat.h>

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum {
    SMALL = GD_FILTER_MIN_BYTES,
    PLACES = (SMALL - 4096) / 8,
    FIXED_SIZE = 64, /* of the header; after it comes what changes */
};

static const uint8_t REPOSITORY[16] = "repository no. 1";

typedef struct fixture {
    fault_env f;
    const gd_env *env; /* its table */
    char *dir;
    char path[256];
    gd_filter *filter;
    gd_error err;
} fixture;

static gd_status
open_filter(fixture *x, uint64_t budget)
{
    return gd_filter_open(x->env, x->path, REPOSITORY, budget, &x->filter,
                          &x->err);
}

static void
close_filter(fixture *x)
{
    gd_filter_close(x->env, x->filter);
    x->filter = NULL;
}

static void
setup(fixture *x, uint64_t budget)
{
    memset(x, 0, sizeof *x);
    fault_env_init(&x->f);
    x->env = &x->f.env;
    x->dir = check_mkdir_shm();
    snprintf(x->path, sizeof x->path, "%s/filter", x->dir);
    if (!CHECK_INT(open_filter(x, budget), GD_OK)) {
        fprintf(stderr, "%s\n", x->err.text);
        exit(1);
    }
}

static void
teardown(fixture *x)
{
    close_filter(x);
    CHECK_INT(fault_env_leaks(&x->f), 0);
    fault_env_destroy(&x->f);
    check_rmdir(x->dir);
}

/* The fingerprint and the address of the nth block of the tests. */
static gd_fingerprint
fingerprint(uint64_t n)
{
    gd_fingerprint fp;
    for (unsigned i = 0; i < GD_FINGERPRINT_SIZE; i += 8) {
        gd_put64(fp.bytes + i, gd_checksum(&n, sizeof n, i));
    }
    return fp;
}

static gd_address
address(uint64_t n)
{
    return (gd_address){.group = 1 + (uint32_t)(n / GD_MAX_SLOTS),
                        .slot = (uint32_t)(n % GD_MAX_SLOTS)};
}

static void
insert(gd_filter *filter, uint64_t n)
{
    gd_fingerprint fp = fingerprint(n);
    gd_filter_insert(filter, &fp, address(n));
}

/* Whether block n's hint leads to address a. */
static bool
leads_to(const gd_filter *filter, uint64_t n, gd_address a)
{
    gd_fingerprint fp = fingerprint(n);
    gd_address found[GD_FILTER_CANDIDATES];
    size_t count = gd_filter_lookup(filter, &fp, found);
    CHECK(count <= GD_FILTER_CANDIDATES);
    for (size_t i = 0; i < count; i++) {
        if (found[i].group == a.group && found[i].slot == a.slot) {
            return true;
        }
    }
    return false;
}

static bool
finds(const gd_filter *filter, uint64_t n)
{
    return leads_to(filter, n, address(n));
}

static uint64_t
count_found(const gd_filter *filter, uint64_t from, uint64_t to)
{
    uint64_t found = 0;
    for (uint64_t n = from; n < to; n++) {
        found += finds(filter, n);
    }
    return found;
}

static gd_filter_stats
stats_of(const gd_filter *filter)
{
    gd_filter_stats stats;
    gd_filter_get_stats(filter, &stats);
    return stats;
}

/* ---- hints ---- */

static void
test_insert_lookup_remove(void)
{
    enum { MANY = PLACES / 2 };
    fixture x;
    setup(&x, SMALL);
    for (uint64_t n = 0; n < MANY; n++) {
        CHECK(!finds(x.filter, n));
        insert(x.filter, n);
        CHECK(finds(x.filter, n));
    }
    gd_filter_stats stats = stats_of(x.filter);
    CHECK_INT(stats.bytes, SMALL);
    CHECK_INT(stats.places, PLACES);
    CHECK_INT(stats.hints, MANY);
    CHECK_INT(stats.dropped, 0);
    CHECK_INT(stats.level, 0);
    CHECK_INT(count_found(x.filter, 0, MANY), MANY);
    for (uint64_t n = 0; n < MANY; n += 2) {
        gd_fingerprint fp = fingerprint(n);
        gd_filter_remove(x.filter, &fp, address(n + 1)); /* not this one */
        CHECK(finds(x.filter, n));
        gd_filter_remove(x.filter, &fp, address(n));
        CHECK(!finds(x.filter, n));
        gd_filter_remove(x.filter, &fp, address(n)); /* nothing happens */
    }
    CHECK_INT(stats_of(x.filter).hints, MANY / 2);
    CHECK_INT(count_found(x.filter, 0, MANY), MANY / 2);
    teardown(&x);
}

static void
test_bounds_of_addresses(void)
{
    static const gd_address good[] = {
        {1, 0}, {1, GD_MAX_SLOTS - 1}, {GD_MAX_GROUP, 0},
        {GD_MAX_GROUP, GD_MAX_SLOTS - 1}, {0x155aa55, 0x2a55},
    };
    static const gd_address bad[] = {
        {0, 0}, {0, 5}, {GD_MAX_GROUP + 1, 0}, {1, GD_MAX_SLOTS},
        {UINT32_MAX, UINT32_MAX},
    };
    fixture x;
    setup(&x, SMALL);
    for (uint64_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        gd_fingerprint fp = fingerprint(i);
        gd_filter_insert(x.filter, &fp, good[i]);
        CHECK(leads_to(x.filter, i, good[i]));
    }
    uint64_t before = stats_of(x.filter).hints;
    for (uint64_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        gd_address found[GD_FILTER_CANDIDATES];
        gd_fingerprint fp = fingerprint(100 + i);
        gd_filter_insert(x.filter, &fp, bad[i]);
        gd_filter_remove(x.filter, &fp, bad[i]);
        CHECK_INT(gd_filter_lookup(x.filter, &fp, found), 0);
    }
    CHECK_INT(stats_of(x.filter).hints, before);
    teardown(&x);
}

static void
test_the_same_hint_is_kept_once(void)
{
    fixture x;
    setup(&x, SMALL);
    for (int i = 0; i < 50; i++) {
        insert(x.filter, 7);
    }
    CHECK_INT(stats_of(x.filter).hints, 1);
    gd_fingerprint fp = fingerprint(7);
    gd_filter_remove(x.filter, &fp, address(7));
    CHECK_INT(stats_of(x.filter).hints, 0);
    teardown(&x);
}

/* Copies of one block: as many as two buckets have places. */
static void
test_many_addresses_of_one_fingerprint(void)
{
    fixture x;
    gd_fingerprint fp = fingerprint(1);
    gd_address found[GD_FILTER_CANDIDATES];
    setup(&x, SMALL);
    for (uint64_t n = 0; n < 100; n++) {
        gd_filter_insert(x.filter, &fp, address(n));
    }
    CHECK_INT(gd_filter_lookup(x.filter, &fp, found), GD_FILTER_CANDIDATES);
    for (uint64_t n = 0; n < GD_FILTER_CANDIDATES; n++) {
        CHECK(leads_to(x.filter, 1, address(n)));
    }
    gd_filter_stats stats = stats_of(x.filter);
    CHECK_INT(stats.hints, GD_FILTER_CANDIDATES);
    CHECK_INT(stats.dropped, 100 - GD_FILTER_CANDIDATES);
    CHECK_INT(stats.level, 0); /* the filter as a whole is not full */
    teardown(&x);
}

/* A fingerprint always has two buckets, never one twice. */
static void
test_two_buckets(void)
{
    fixture x;
    setup(&x, SMALL);
    for (uint64_t n = 0; n < 3000; n++) {
        gd_fingerprint fp = fingerprint(n);
        gd_address found[GD_FILTER_CANDIDATES];
        for (uint64_t i = 0; i < GD_FILTER_CANDIDATES; i++) {
            gd_filter_insert(x.filter, &fp, address(i));
        }
        CHECK_INT(gd_filter_lookup(x.filter, &fp, found),
                  GD_FILTER_CANDIDATES);
        for (uint64_t i = 0; i < GD_FILTER_CANDIDATES; i++) {
            gd_filter_remove(x.filter, &fp, address(i));
        }
    }
    CHECK_INT(stats_of(x.filter).dropped, 0);
    CHECK_INT(stats_of(x.filter).hints, 0);
    teardown(&x);
}

/* A digest of 8 bits: its few fingerprints still lie apart. */
static void
test_weak_fingerprints_spread(void)
{
    fixture x;
    setup(&x, SMALL);
    for (uint32_t n = 0; n < 256; n++) {
        gd_fingerprint fp = {{(uint8_t)n}};
        gd_filter_insert(x.filter, &fp, (gd_address){1, n});
    }
    CHECK_INT(stats_of(x.filter).hints, 256);
    for (uint32_t n = 0; n < 256; n++) {
        gd_fingerprint fp = {{(uint8_t)n}};
        gd_address found[GD_FILTER_CANDIDATES];
        CHECK_INT(gd_filter_lookup(x.filter, &fp, found), 1);
        CHECK_INT(found[0].slot, n);
    }
    teardown(&x);
}

static void
test_few_false_candidates(void)
{
    enum { ASKED = 200000 };
    fixture x;
    uint64_t candidates = 0;
    setup(&x, SMALL);
    for (uint64_t n = 0; n < PLACES / 2; n++) {
        insert(x.filter, n);
    }
    for (uint64_t n = 0; n < ASKED; n++) {
        gd_address found[GD_FILTER_CANDIDATES];
        gd_fingerprint fp = fingerprint(1000000 + n);
        candidates += gd_filter_lookup(x.filter, &fp, found);
    }
    /* Expected: eight hints, each alike with 1 in 2^20 times 1 in 3, so one
     * or none. */
    CHECK(candidates <= 8);
    teardown(&x);
}

/* ---- the sampling level ---- */

static void
test_level_halves_the_filter(void)
{
    fixture x;
    uint64_t n = 0;
    setup(&x, SMALL);
    while (stats_of(x.filter).level == 0 && n <= PLACES) {
        insert(x.filter, n++);
    }
    gd_filter_stats stats = stats_of(x.filter);
    CHECK_INT(stats.level, 1);
    /* Two choices fill the buckets evenly: next to nothing was given up
     * before seven eighths were full. */
    CHECK(n >= PLACES / 8 * 7);
    CHECK(n <= PLACES / 8 * 7 + PLACES / 100);
    CHECK(stats.dropped <= PLACES / 100);
    CHECK(stats.hints > n * 45 / 100);
    CHECK(stats.hints < n * 55 / 100);
    CHECK_INT(count_found(x.filter, 0, n), stats.hints);
    teardown(&x);
}

/* Whoever has a hint at a level had one at each lower level. */
static void
test_levels_are_nested(void)
{
    enum { MANY = 6 * PLACES };
    fixture x;
    static bool kept[MANY];
    setup(&x, SMALL);
    memset(kept, true, sizeof kept);
    uint64_t n = 0;
    for (unsigned level = 0; level < 3; level++) {
        while (stats_of(x.filter).level == level && n < MANY) {
            insert(x.filter, n++);
        }
        CHECK_INT(stats_of(x.filter).level, level + 1);
        for (uint64_t i = 0; i < n; i++) {
            bool found = finds(x.filter, i);
            CHECK(!found || kept[i]);
            kept[i] = found;
        }
    }
    teardown(&x);
}

static void
test_much_more_than_fits(void)
{
    enum { MANY = 40 * PLACES };
    fixture x;
    setup(&x, SMALL);
    for (uint64_t n = 0; n < MANY; n++) {
        insert(x.filter, n);
    }
    gd_filter_stats stats = stats_of(x.filter);
    CHECK_INT(stats.level, 6); /* 40 / 2^6 is the first below 7/8 */
    uint64_t found = count_found(x.filter, 0, MANY);
    CHECK_INT(found, stats.hints);
    CHECK(stats.hints > PLACES * 55 / 100);
    CHECK(stats.hints < PLACES * 70 / 100);
    CHECK(stats.dropped < MANY / 100);
    teardown(&x);
}

static void
test_clear(void)
{
    fixture x;
    setup(&x, SMALL);
    for (uint64_t n = 0; n < 10 * PLACES; n++) {
        insert(x.filter, n);
    }
    CHECK(gd_filter_rebuild_lock(x.filter));
    gd_filter_rebuild_set(x.filter, 77, true);
    gd_filter_clear(x.filter);
    gd_filter_rebuild_unlock(x.filter);
    gd_filter_stats stats = stats_of(x.filter);
    CHECK_INT(stats.hints, 0);
    CHECK_INT(stats.level, 0);
    CHECK_INT(stats.dropped, 0);
    CHECK_INT(stats.rebuilt, 0);
    CHECK(!stats.complete);
    CHECK_INT(count_found(x.filter, 0, 10 * PLACES), 0);
    for (uint64_t n = 0; n < PLACES / 2; n++) {
        insert(x.filter, n);
    }
    CHECK_INT(stats_of(x.filter).hints, PLACES / 2);
    teardown(&x);
}

/* ---- the file ---- */

static void
test_budget(void)
{
    fixture x;
    setup(&x, SMALL + 63); /* rounded down to whole buckets */
    CHECK_INT(stats_of(x.filter).bytes, SMALL);
    insert(x.filter, 1);
    close_filter(&x);
    /* The budget counts for who makes the file. */
    CHECK_INT(open_filter(&x, SMALL + 64), GD_OK);
    CHECK_INT(stats_of(x.filter).bytes, SMALL);
    CHECK(finds(x.filter, 1));
    close_filter(&x);
    CHECK_INT(unlink(x.path), 0);
    CHECK_INT(open_filter(&x, SMALL + 64), GD_OK);
    CHECK_INT(stats_of(x.filter).bytes, SMALL + 64);
    close_filter(&x);
    CHECK_INT(open_filter(&x, 0), GD_INVALID);
    CHECK_INT(open_filter(&x, SMALL - 1), GD_INVALID);
    CHECK_CONTAINS(x.err.text, "65535");
    CHECK_INT(open_filter(&x, UINT64_MAX), GD_INVALID);
    CHECK(x.filter == NULL);
    teardown(&x);
}

static void
test_hints_outlive_the_process(void)
{
    fixture x;
    gd_filter *second;
    setup(&x, SMALL);
    insert(x.filter, 1);
    gd_filter_rebuild_set(x.filter, 12345, true);
    CHECK_INT(gd_filter_open(x.env, x.path, REPOSITORY, SMALL, &second,
                             &x.err),
              GD_OK);
    CHECK(finds(second, 1));
    insert(second, 2);
    CHECK(finds(x.filter, 2));
    gd_filter_close(x.env, second);
    close_filter(&x);
    CHECK_INT(open_filter(&x, SMALL), GD_OK);
    CHECK(finds(x.filter, 1));
    CHECK(finds(x.filter, 2));
    gd_filter_stats stats = stats_of(x.filter);
    CHECK_INT(stats.rebuilt, 12345);
    CHECK(stats.complete);
    teardown(&x);
}

static void
test_foreign_files_are_replaced(void)
{
    static const uint8_t other[16] = "repository no. 2";
    fixture x;
    gd_filter *second;
    setup(&x, SMALL);
    insert(x.filter, 1);
    CHECK_INT(gd_filter_open(x.env, x.path, other, SMALL, &second, &x.err),
              GD_OK);
    CHECK(!finds(second, 1));
    insert(second, 2);
    /* Who had the old file goes on with it. */
    CHECK(finds(x.filter, 1));
    CHECK(!finds(x.filter, 2));
    gd_filter_close(x.env, second);
    close_filter(&x);
    CHECK_INT(open_filter(&x, 2 * SMALL), GD_OK);
    CHECK(!finds(x.filter, 2));
    insert(x.filter, 3);
    close_filter(&x);
    /* A size in the header that the file has not counts for nothing. */
    CHECK_INT(truncate(x.path, 1000), 0);
    CHECK_INT(open_filter(&x, SMALL), GD_OK);
    CHECK_INT(stats_of(x.filter).bytes, SMALL);
    CHECK(!finds(x.filter, 3));
    teardown(&x);
}

static void
overwrite(const fixture *x, const void *data, size_t len, off_t offset)
{
    int fd = open(x->path, O_RDWR);
    CHECK(fd >= 0);
    CHECK_INT(pwrite(fd, data, len, offset), (ssize_t)len);
    close(fd);
}

static void
test_damaged_headers_are_replaced(void)
{
    fixture x;
    setup(&x, SMALL);
    for (unsigned i = 0; i < FIXED_SIZE; i++) {
        insert(x.filter, 1);
        close_filter(&x);
        overwrite(&x, "\xa5", 1, i);
        CHECK_INT(open_filter(&x, SMALL), GD_OK);
        CHECK(!finds(x.filter, 1));
    }
    teardown(&x);
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
use_garbage(fixture *x)
{
    gd_filter_stats stats = stats_of(x->filter);
    CHECK(stats.level <= GD_FILTER_MAX_LEVEL);
    CHECK(stats.hints <= stats.places);
    CHECK(stats.rebuilt <= GD_MAX_GROUP);
    for (uint64_t n = 0; n < 3000; n++) {
        gd_address found[GD_FILTER_CANDIDATES];
        gd_fingerprint fp = fingerprint(n);
        size_t count = gd_filter_lookup(x->filter, &fp, found);
        CHECK(count <= GD_FILTER_CANDIDATES);
        for (size_t i = 0; i < count; i++) {
            CHECK(found[i].group >= 1 && found[i].group <= GD_MAX_GROUP);
            CHECK(found[i].slot < GD_MAX_SLOTS);
        }
        gd_filter_insert(x->filter, &fp, address(n));
        gd_filter_remove(x->filter, &fp, address(n + n % 2));
    }
    CHECK(stats_of(x->filter).level <= GD_FILTER_MAX_LEVEL);
}

/* Whatever is behind the header: no harm, and clearing mends it. */
static void
test_garbage_is_harmless(void)
{
    static uint8_t garbage[SMALL];
    fixture x;
    setup(&x, SMALL);
    for (uint64_t seed = 1; seed <= 10; seed++) {
        fill_garbage(garbage, sizeof garbage, seed);
        if (seed % 3 == 0) {
            memset(garbage, 0xff, sizeof garbage);
        }
        overwrite(&x, garbage, SMALL - FIXED_SIZE, FIXED_SIZE);
        use_garbage(&x);
        gd_filter_clear(x.filter);
        for (uint64_t n = 0; n < PLACES / 2; n++) {
            insert(x.filter, n);
        }
        CHECK_INT(stats_of(x.filter).hints, PLACES / 2);
        CHECK_INT(stats_of(x.filter).level, 0);
        CHECK_INT(count_found(x.filter, 0, PLACES / 2), PLACES / 2);
    }
    teardown(&x);
}

/* A hint's group may be 0 only by foreign hands.  Every word of the filter
 * becomes a hint for block 1 but for its group. */
static void
test_group_0_is_no_candidate(void)
{
    static uint8_t words[SMALL];
    fixture x;
    gd_fingerprint fp = fingerprint(1);
    gd_address found[GD_FILTER_CANDIDATES];
    uint64_t hint = 0;
    setup(&x, SMALL);
    insert(x.filter, 1);
    int fd = open(x.path, O_RDONLY);
    CHECK_INT(pread(fd, words, SMALL, 0), SMALL);
    close(fd);
    for (size_t at = 4096; at < SMALL; at += 8) {
        uint64_t word;
        memcpy(&word, words + at, 8);
        hint |= word;
    }
    CHECK(hint != 0);
    for (size_t at = 4096; at < SMALL; at += 8) {
        uint64_t groupless = hint & ~((uint64_t)GD_MAX_GROUP << 15);
        groupless |= 1; /* not all zeros, whatever the tag */
        memcpy(words + at, &groupless, 8);
    }
    overwrite(&x, words + 4096, SMALL - 4096, 4096);
    CHECK_INT(gd_filter_lookup(x.filter, &fp, found), 0);
    insert(x.filter, 1); /* such places are free */
    CHECK_INT(gd_filter_lookup(x.filter, &fp, found), 1);
    teardown(&x);
}

static void
test_faults(void)
{
    fixture x;
    setup(&x, SMALL);
    close_filter(&x);
    CHECK_INT(unlink(x.path), 0);
    fault_env_fail(&x.f, FAULT_FALLOCATE, 1, ENOSPC, true);
    CHECK_INT(open_filter(&x, SMALL), GD_NOSPACE);
    CHECK(x.filter == NULL);
    fault_env_heal(&x.f);
    fault_env_fail(&x.f, FAULT_MMAP, 1, ENOMEM, false);
    CHECK_INT(open_filter(&x, SMALL), GD_NOMEM);
    CHECK_CONTAINS(x.err.text, x.path);
    for (uint64_t nth = 1; nth <= 2; nth++) {
        fault_env_fail(&x.f, FAULT_ALLOC, nth, ENOMEM, false);
        CHECK_INT(open_filter(&x, SMALL), GD_NOMEM);
    }
    CHECK_INT(fault_env_leaks(&x.f), 0);
    CHECK_INT(open_filter(&x, SMALL), GD_OK);
    gd_filter_close(x.env, NULL);
    teardown(&x);
}

/* ---- the rebuild lock ---- */

static void
test_rebuild_lock(void)
{
    fixture x;
    gd_filter *second;
    setup(&x, SMALL);
    CHECK_INT(gd_filter_open(x.env, x.path, REPOSITORY, SMALL, &second,
                             &x.err),
              GD_OK);
    CHECK(gd_filter_rebuild_lock(x.filter));
    CHECK(!gd_filter_rebuild_lock(x.filter)); /* nor another thread */
    CHECK(!gd_filter_rebuild_lock(second));
    gd_filter_rebuild_unlock(x.filter);
    CHECK(gd_filter_rebuild_lock(second));
    CHECK(!gd_filter_rebuild_lock(x.filter));
    gd_filter_close(x.env, second); /* gives the lock back */
    CHECK(gd_filter_rebuild_lock(x.filter));
    gd_filter_rebuild_unlock(x.filter);
    fault_env_fail(&x.f, FAULT_LOCK, 1, ENOLCK, false);
    CHECK(!gd_filter_rebuild_lock(x.filter));
    CHECK(gd_filter_rebuild_lock(x.filter));
    teardown(&x);
}

/* ---- the users' lock ---- */

/* Who tidies up has it exclusively; -1 if somebody uses the file. */
static int
take_for_dead(const char *path)
{
    const gd_env *env = gd_env_posix();
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    if (env->lock(env, fd, 2, F_WRLCK) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static void
test_users_lock(void)
{
    fixture x;
    gd_filter *second;
    setup(&x, SMALL);
    CHECK_INT(gd_filter_open(x.env, x.path, REPOSITORY, SMALL, &second,
                             &x.err),
              GD_OK);
    CHECK_INT(take_for_dead(x.path), -1);
    int other = open(x.path, O_RDWR | O_CLOEXEC);
    CHECK(!gd_filter_take_unused(x.env, other, false));
    gd_filter_close(x.env, second);
    CHECK_INT(take_for_dead(x.path), -1);
    gd_filter_close(x.env, x.filter);
    CHECK(gd_filter_take_unused(x.env, other, true)); /* by another byte */
    fault_env_fail(&x.f, FAULT_LOCK, 1, ENOLCK, false);
    CHECK(!gd_filter_take_unused(x.env, other, false));
    CHECK(gd_filter_take_unused(x.env, other, false));
    CHECK_INT(take_for_dead(x.path), -1);
    close(other);
    int fd = take_for_dead(x.path);
    CHECK(fd >= 0);
    /* It is waited for, though not for ever. */
    CHECK_INT(open_filter(&x, SMALL), GD_OK);
    gd_filter_close(x.env, x.filter);
    close(fd);
    /* Without locks there is a filter all the same. */
    fault_env_fail(&x.f, FAULT_LOCK, 1, ENOLCK, false);
    CHECK_INT(open_filter(&x, SMALL), GD_OK);
    teardown(&x);
}

/* Somebody takes it for dead between its opening and its lock. */
static const char *victim;

static int
unlink_and_lock(const gd_env *env, int fd, uint64_t byte, short type)
{
    if (victim != NULL) {
        CHECK_INT(unlink(victim), 0);
        victim = NULL;
    }
    return gd_env_posix()->lock(env, fd, byte, type);
}

static void
test_unlinked_while_it_is_opened(void)
{
    fixture x;
    gd_filter *second;
    struct stat before, after;
    setup(&x, SMALL);
    CHECK_INT(stat(x.path, &before), 0);
    gd_env env = *gd_env_posix();
    env.lock = unlink_and_lock;
    victim = x.path;
    CHECK_INT(gd_filter_open(&env, x.path, REPOSITORY, SMALL, &second,
                             &x.err),
              GD_OK);
    /* The one that is used has the name. */
    CHECK_INT(stat(x.path, &after), 0);
    CHECK(before.st_ino != after.st_ino);
    CHECK_INT(take_for_dead(x.path), -1);
    gd_filter_close(&env, second);
    teardown(&x);
}

static void
wait_for(pid_t child)
{
    int status = -1;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
}

static void
test_rebuild_lock_dies_with_the_process(void)
{
    fixture x;
    setup(&x, SMALL);
    pid_t child = fork();
    if (child == 0) {
        gd_filter *own;
        bool good = gd_filter_open(gd_env_posix(), x.path, REPOSITORY, SMALL,
                                   &own, NULL) == GD_OK &&
                    gd_filter_rebuild_lock(own);
        gd_filter_rebuild_set(own, 5, false);
        _exit(good ? 0 : 1);
    }
    wait_for(child);
    CHECK(gd_filter_rebuild_lock(x.filter));
    CHECK_INT(stats_of(x.filter).rebuilt, 5);
    CHECK(!stats_of(x.filter).complete);
    teardown(&x);
}

/* ---- at once ---- */

enum { WORKERS = 4, EACH = 15000, BIG = WORKERS * EACH * 8 * 2 + 4096 };

/* Inserts its share and removes every fifth of it; the number of hints of its
 * own that it did not find though it had just stored them. */
static uint64_t
work(gd_filter *filter, uint64_t number)
{
    uint64_t missed = 0;
    for (uint64_t n = number * EACH; n < (number + 1) * EACH; n++) {
        gd_fingerprint fp = fingerprint(n);
        gd_filter_insert(filter, &fp, address(n));
        missed += !finds(filter, n);
        if (n % 5 == 0) {
            gd_filter_remove(filter, &fp, address(n));
        }
    }
    return missed;
}

static void
check_work(const fixture *x)
{
    gd_filter_stats stats = stats_of(x->filter);
    CHECK_INT(stats.level, 0);
    CHECK_INT(stats.dropped, 0);
    CHECK_INT(stats.hints, WORKERS * EACH / 5 * 4);
    CHECK_INT(count_found(x->filter, 0, WORKERS * EACH),
              WORKERS * EACH / 5 * 4);
}

static void
test_several_processes(void)
{
    fixture x;
    pid_t children[WORKERS];
    setup(&x, BIG);
    for (int i = 0; i < WORKERS; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            gd_filter *own;
            bool good = gd_filter_open(gd_env_posix(), x.path, REPOSITORY,
                                       BIG, &own, NULL) == GD_OK &&
                        work(own, (uint64_t)i) == 0;
            gd_filter_close(gd_env_posix(), own);
            gd_filter_close(x.env, x.filter); /* what it inherited */
            _exit(good ? 0 : 1);
        }
    }
    for (int i = 0; i < WORKERS; i++) {
        wait_for(children[i]);
    }
    check_work(&x);
    teardown(&x);
}

typedef struct worker {
    pthread_t thread;
    gd_filter *filter;
    uint64_t number;
    uint64_t missed;
} worker;

static void *
worker_main(void *arg)
{
    worker *w = arg;
    w->missed = work(w->filter, w->number);
    return NULL;
}

static void
start_workers(gd_filter *filter, worker workers[WORKERS])
{
    for (uint64_t i = 0; i < WORKERS; i++) {
        workers[i] = (worker){.filter = filter, .number = i};
        CHECK_INT(pthread_create(&workers[i].thread, NULL, worker_main,
                                 &workers[i]),
                  0);
    }
}

static void
test_several_threads(void)
{
    fixture x;
    worker workers[WORKERS];
    setup(&x, BIG);
    start_workers(x.filter, workers);
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK_INT(workers[i].missed, 0);
    }
    check_work(&x);
    teardown(&x);
}

enum { CONTESTED = 2000, COPIES = GD_FILTER_CANDIDATES / WORKERS };

typedef struct contestant {
    pthread_t thread;
    gd_filter *filter;
    pthread_barrier_t *barrier;
    uint64_t number;
} contestant;

/* All of them want places in the same two buckets at the same time. */
static void *
contestant_main(void *arg)
{
    contestant *c = arg;
    for (uint64_t n = 0; n < CONTESTED; n++) {
        gd_fingerprint fp = fingerprint(n);
        pthread_barrier_wait(c->barrier);
        for (uint64_t i = 0; i < COPIES; i++) {
            gd_filter_insert(c->filter, &fp,
                             address(n * 100 + c->number * COPIES + i));
        }
    }
    return NULL;
}

/* No hint overwrites another: what is counted is there. */
static void
test_threads_in_the_same_buckets(void)
{
    fixture x;
    pthread_barrier_t barrier;
    contestant c[WORKERS];
    uint64_t found = 0;
    setup(&x, BIG);
    pthread_barrier_init(&barrier, NULL, WORKERS);
    for (uint64_t i = 0; i < WORKERS; i++) {
        c[i] = (contestant){0, x.filter, &barrier, i};
        CHECK_INT(pthread_create(&c[i].thread, NULL, contestant_main, &c[i]),
                  0);
    }
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(c[i].thread, NULL);
    }
    for (uint64_t n = 0; n < CONTESTED; n++) {
        gd_fingerprint fp = fingerprint(n);
        gd_address candidates[GD_FILTER_CANDIDATES];
        found += gd_filter_lookup(x.filter, &fp, candidates);
    }
    gd_filter_stats stats = stats_of(x.filter);
    CHECK_INT(found, stats.hints);
    CHECK_INT(stats.hints + stats.dropped, CONTESTED * WORKERS * COPIES);
    CHECK(stats.hints > CONTESTED * WORKERS * COPIES / 10 * 7);
    pthread_barrier_destroy(&barrier);
    teardown(&x);
}

/* Far too small for them, and cleared all the time: nobody falls over, and
 * the counts come out right enough for the filter to go on. */
static void
test_threads_in_a_full_filter(void)
{
    fixture x;
    worker workers[WORKERS];
    setup(&x, SMALL);
    start_workers(x.filter, workers);
    for (uint32_t i = 1; i <= 20; i++) {
        gd_filter_clear(x.filter);
        gd_filter_rebuild_set(x.filter, i, true);
        CHECK(stats_of(x.filter).hints <= PLACES);
    }
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    for (uint64_t n = 0; n < 10 * PLACES; n++) {
        insert(x.filter, n);
    }
    uint64_t found = count_found(x.filter, 0, 10 * PLACES);
    CHECK(found > PLACES / 4);
    CHECK(found <= PLACES);
    teardown(&x);
}

int
main(int argc, char **argv)
{
    BEGIN(argc, argv);
    RUN(test_insert_lookup_remove);
    RUN(test_bounds_of_addresses);
    RUN(test_the_same_hint_is_kept_once);
    RUN(test_many_addresses_of_one_fingerprint);
    RUN(test_two_buckets);
    RUN(test_weak_fingerprints_spread);
    RUN(test_few_false_candidates);
    RUN(test_level_halves_the_filter);
    RUN(test_levels_are_nested);
    RUN(test_much_more_than_fits);
    RUN(test_clear);
    RUN(test_budget);
    RUN(test_hints_outlive_the_process);
    RUN(test_foreign_files_are_replaced);
    RUN(test_damaged_headers_are_replaced);
    RUN(test_garbage_is_harmless);
    RUN(test_group_0_is_no_candidate);
    RUN(test_faults);
    RUN(test_rebuild_lock);
    RUN(test_users_lock);
    RUN(test_unlinked_while_it_is_opened);
    RUN(test_rebuild_lock_dies_with_the_process);
    RUN(test_several_processes);
    RUN(test_several_threads);
    RUN(test_threads_in_the_same_buckets);
    RUN(test_threads_in_a_full_filter);
    return REPORT();
}
