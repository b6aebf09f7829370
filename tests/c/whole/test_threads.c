/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_threads.c - threads that store, read and delete on one handle.  Here
 * the engine works with the table of the real machine: the fault_env's mutex
 * would hide races from the thread sanitizer.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "engine/files/image_delete.h"
#include "engine/read/image.h"
#include "engine/repo/segcache.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { THREADS = 4, ROUNDS = 12, BLOCK = 512, LENGTH = 150 * BLOCK + 9 };

static scratch x;
static gd_repo *repo;
static atomic_uint odd; /* results that must not occur */
static atomic_uint winners, losers;
static pthread_barrier_t barrier;

static void
expect(bool good, const char *what, const gd_error *err)
{
    if (!good) {
        fprintf(stderr, "%s: %s\n", what, err->text);
        atomic_fetch_add(&odd, 1);
    }
}

static void
name_image(unsigned thread, unsigned round, char id[32])
{
    snprintf(id, 32, "image-%u-%u", thread, round);
}

/* All images have most of their contents in common. */
static void
make_image(unsigned thread, unsigned round, uint8_t data[LENGTH])
{
    fill_image(data, LENGTH, BLOCK, 500, thread * 1000 + round);
}

/* Images of odd rounds are deleted again, by the thread after theirs. */
static bool
is_deleted(unsigned round)
{
    return round % 2 == 1;
}

static void
store_own(unsigned thread, unsigned round)
{
    uint8_t data[LENGTH];
    char id[32];
    bool equal;
    gd_error err = {0};
    name_image(thread, round, id);
    make_image(thread, round, data);
    gd_status s = put_image(repo, id, data, LENGTH, 7777, NULL, &err);
    expect(s == GD_OK, "put", &err);
    s = get_image(repo, id, data, LENGTH, &equal, &err);
    expect(s == GD_NOTFOUND || (s == GD_OK && equal), "get", &err);
}

static void
read_others(unsigned thread, unsigned round)
{
    uint8_t data[LENGTH];
    char id[32];
    bool equal;
    gd_error err = {0};
    for (unsigned other = 0; other < THREADS; other++) {
        name_image(other, round, id);
        make_image(other, round, data);
        gd_status s = get_image(repo, id, data, LENGTH, &equal, &err);
        expect((s == GD_OK && equal) || s == GD_NOTFOUND, "get another's",
               &err);
    }
    if (round > 0 && is_deleted(round - 1)) {
        name_image((thread + 1) % THREADS, round - 1, id);
        gd_status s = gd_image_delete(x.env, x.root, &x.params, id, NULL,
                                      &err);
        expect(s == GD_OK, "delete", &err);
    }
}

/* All commit one id: one of them gets it, and readers read whole images. */
static void
contend(unsigned thread, unsigned round)
{
    uint8_t data[LENGTH];
    char id[32];
    bool equal;
    gd_error err = {0};
    name_image(THREADS, round, id);
    make_image(THREADS, round, data);
    gd_status s = put_image(repo, id, data, LENGTH, 5000 + thread, NULL, &err);
    expect(s == GD_OK || s == GD_EXISTS, "contend", &err);
    atomic_fetch_add(s == GD_OK ? &winners : &losers, 1);
    s = get_image(repo, id, data, LENGTH, &equal, &err);
    expect(s == GD_OK && equal, "get the winner's", &err);
}

static void *
run_thread(void *arg)
{
    unsigned thread = (unsigned)(uintptr_t)arg;
    for (unsigned round = 0; round < ROUNDS; round++) {
        store_own(thread, round);
        contend(thread, round);
        pthread_barrier_wait(&barrier);
        read_others(thread, round);
    }
    return NULL;
}

static void
check_rest(void)
{
    uint8_t data[LENGTH];
    char id[32];
    bool equal;
    for (unsigned thread = 0; thread <= THREADS; thread++) {
        for (unsigned round = 0; round < ROUNDS; round++) {
            bool gone = thread < THREADS && is_deleted(round) &&
                        round + 1 < ROUNDS;
            name_image(thread, round, id);
            make_image(thread, round, data);
            gd_status s = get_image(repo, id, data, LENGTH, &equal, &x.err);
            CHECK_INT(s, gone ? GD_NOTFOUND : GD_OK);
            CHECK(equal == !gone);
        }
    }
}

static void
run(bool by_value, unsigned pool_threads)
{
    pthread_t threads[THREADS];
    scratch_init(&x);
    const gd_env *counting = x.env;
    x.env = gd_env_posix();
    x.params.block_size = BLOCK;
    x.params.segment_size = 4096;
    x.params.by_value = by_value;
    x.params.threads = pool_threads;
    x.params.lock_timeout_ms = 20000;
    repo = scratch_repo_filter(&x);
    CHECK(repo->filter != NULL);
    atomic_store(&odd, 0);
    atomic_store(&winners, 0);
    atomic_store(&losers, 0);
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (unsigned i = 0; i < THREADS; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, run_thread,
                                 (void *)(uintptr_t)i),
                  0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    pthread_barrier_destroy(&barrier);
    CHECK_INT(atomic_load(&odd), 0);
    CHECK_INT(atomic_load(&winners), ROUNDS);
    CHECK_INT(atomic_load(&losers), ROUNDS * (THREADS - 1));
    check_rest();
    gd_repo_close(repo);
    repo = scratch_repo_filter(&x);
    check_rest();
    gd_repo_close(repo);
    x.env = counting;
    CHECK_INT(scratch_destroy(&x), 0);
}

TEST(test_threads_by_hash)
{
    run(false, 2);
    run(false, 0);
}

TEST(test_threads_by_value)
{
    run(true, 1);
}

/* One of the segments that the pool decodes is damaged. */
TEST(test_damage_among_many)
{
    static uint8_t data[64 * 4096];
    bool equal;
    uint64_t offset = gd_fptable_data_start(2048) + sizeof data / 3;
    scratch_init(&x);
    x.params.block_size = BLOCK;
    x.params.group_slots = 2048;
    x.params.segment_size = 4096;
    x.params.threads = 3;
    repo = scratch_repo(&x);
    fill_random(data, sizeof data, 1);
    CHECK_INT(put_image(repo, "a", data, sizeof data, 7777, NULL, &x.err),
              GD_OK);
    for (int round = 0; round < 10; round++) {
        CHECK_INT(get_image(repo, "a", data, sizeof data, &equal, &x.err),
                  GD_OK);
        CHECK(equal);
        scratch_flip(&x, "groups/00000001", offset, 1);
        CHECK_INT(get_image(repo, "a", data, sizeof data, &equal, &x.err),
                  GD_CORRUPT);
        CHECK_CONTAINS(x.err.text, "groups/00000001: the block of slot");
        scratch_flip(&x, "groups/00000001", offset, 1);
    }
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* Threads read the same image, mostly from the cache. */
static void *
read_cached(void *arg)
{
    bool equal;
    gd_error err = {0};
    for (int round = 0; round < ROUNDS; round++) {
        gd_status s = get_image(repo, "a", arg, 64 * 4096, &equal, &err);
        expect(s == GD_OK && equal, "get", &err);
    }
    return NULL;
}

TEST(test_cached_segments)
{
    static uint8_t data[64 * 4096];
    pthread_t threads[THREADS];
    gd_segcache_stats stats;
    scratch_init(&x);
    const gd_env *counting = x.env;
    x.env = gd_env_posix();
    x.params.block_size = BLOCK;
    x.params.group_slots = 2048;
    x.params.segment_size = 4096;
    x.params.threads = 2;
    repo = scratch_repo(&x);
    gd_segcache_set_budget(repo->segcache, sizeof data * 3 / 4);
    fill_random(data, sizeof data, 1);
    CHECK_INT(put_image(repo, "a", data, sizeof data, 7777, NULL, &x.err),
              GD_OK);
    atomic_store(&odd, 0);
    for (unsigned i = 0; i < THREADS; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, read_cached, data), 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(atomic_load(&odd), 0);
    gd_segcache_set_budget(repo->segcache, sizeof data);
    CHECK(read_cached(data) == NULL);
    gd_segcache_get_stats(repo->segcache, &stats);
    CHECK(stats.hits >= (ROUNDS - 1) * 64);
    CHECK_INT(atomic_load(&odd), 0);
    gd_repo_close(repo);
    x.env = counting;
    CHECK_INT(scratch_destroy(&x), 0);
}
