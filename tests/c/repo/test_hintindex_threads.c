/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_hintindex_threads.c - threads add, find and rebuild at once, in an index
 * that is a store.
 */
#include "engine/repo/hintindex.h"

#include <pthread.h>

#include "engine/base/coding.h"
#include "tests/c/support/check.h"

enum { THREADS = 4, ENTRIES = 64, ROUNDS = 30 };

typedef struct worker {
    gd_hintindex *index;
    uint32_t group; /* only this thread adds to it */
    gd_entry entries[ENTRIES];
    unsigned wrong;
} worker;

static void
take(void *arg, size_t i, gd_address hint)
{
    worker *w = arg;
    w->wrong += hint.group != w->group || hint.slot != i;
}

static void *
work(void *arg)
{
    worker *w = arg;
    gd_hintindex *index = w->index;
    const gd_fingerprint *fps[ENTRIES];
    const gd_entry_range range = {w->group, 0, ENTRIES, w->entries};
    for (uint64_t n = 0; n < ENTRIES; n++) {
        uint64_t key = w->group * 1000 + n;
        w->entries[n].state = GD_ENTRY_LIVE;
        gd_put64(w->entries[n].fingerprint.bytes, gd_checksum(&key, 8, 1));
        fps[n] = &w->entries[n].fingerprint;
    }
    for (unsigned round = 0; round < ROUNDS; round++) {
        gd_filter_stats stats;
        uint32_t first, end;
        index->add_own(index, &range);
        index->find(index, fps, ENTRIES, take, w);
        if (index->rebuild_lock(index)) {
            gd_position position;
            index->load(index, &position);
            position.newest = w->group;
            position.complete = round % 2 == 0;
            index->save(index, &range, &position,
                        &(gd_look){.behind = round});
            if (round % 8 == 7) {
                index->clear(index);
            }
            index->rebuild_unlock(index);
        }
        index->get_stats(index, &stats);
        w->wrong += stats.rebuilt > THREADS;
        index->find_own(index, w->group, &first, &end);
        w->wrong += first != 0 || (end != 0 && end != ENTRIES);
    }
    return NULL;
}

static void
run_threads(gd_kv_backend backend)
{
    char *dir = check_mkdir_shm(), path[256];
    gd_kv_options options = {THREADS * ENTRIES, 0};
    gd_hintindex *index;
    gd_error err;
    pthread_t threads[THREADS];
    worker *workers = calloc(THREADS, sizeof *workers);
    snprintf(path, sizeof path, "%s/store", dir);
    REQUIRE(gd_hintindex_of_store(gd_env_posix(), backend, path, &options,
                                  &index, &err) == GD_OK);
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i].index = index;
        workers[i].group = i + 1;
        pthread_create(&threads[i], NULL, work, &workers[i]);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_INT(workers[i].wrong, 0);
    }
    index->close(index);
    free(workers);
    check_rmdir(dir);
}

TEST(test_threads)
{
    run_threads(GD_KV_DTB);
    run_threads(GD_KV_LMDB);
}
