/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_races.c - transactions, readers and deleters beside the maintainer, all
 * on one handle: they share caches of groups, of fingerprint tables, of
 * segments and of spare copies, the filter, the locks and the pool. As in
 * test_threads.c the table is that of the real machine, so that no mutex of a
 * test hides a race from the thread sanitizer.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "engine/files/filter.h"
#include "engine/files/image_delete.h"
#include "engine/maintenance/ownedgroup.h"
#include "engine/read/image.h"
#include "engine/read/spare.h"
#include "engine/repo/follow.h"
#include "engine/repo/segcache.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"
#include "tests/c/support/simple_maintainer.h"

enum {
    WRITERS = 2,
    READERS = 2,
    KEPT = 3, /* images that stay */
    ROUNDS = 14,
    BLOCK = 512,
    LENGTH = 90 * BLOCK + 5,
    POOL = 2,
    FORKS = 10,
};

static scratch x;
static gd_repo *repo;
static uint8_t kept[KEPT][LENGTH];
static const char *const kept_ids[KEPT] = {"kept-0", "kept-1", "kept-2"};
static atomic_uint odd; /* results that must not occur */
static atomic_uint writing; /* writers that are not done */

static void
expect(bool good, const char *what, const gd_error *err)
{
    if (!good) {
        fprintf(stderr, "%s: %s\n", what, err->text);
        atomic_fetch_add(&odd, 1);
    }
}

static gd_status
put(const char *image_id, const gd_scope *scope, const uint8_t *data,
    gd_error *err)
{
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked;
    gd_status s = gd_transaction_begin(repo, image_id, "project", scope,
                                       &transaction, err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_transaction_write(transaction, data, LENGTH, err);
    if (s == GD_OK) {
        s = gd_transaction_commit(transaction, &header, &linked, err);
    }
    gd_transaction_end(transaction);
    return s;
}

/* Stores and deletes images, with blocks in common with those that stay. */
static void *
write_images(void *arg)
{
    unsigned writer = (unsigned)(uintptr_t)arg;
    static const gd_scope own = {{7}};
    for (unsigned round = 0; round < ROUNDS; round++) {
        static _Thread_local uint8_t data[LENGTH];
        char id[32];
        bool equal;
        gd_error err = {0};
        snprintf(id, sizeof id, "image-%u-%u", writer, round);
        fill_image(data, LENGTH, BLOCK, 120, round % 3);
        gd_status s = put(id, round % 2 == 0 ? &gd_global_scope : &own, data,
                          &err);
        expect(s == GD_OK, "put", &err);
        s = get_image(repo, id, data, LENGTH, &equal, &err);
        expect(s == GD_OK && equal, "get", &err);
        s = gd_image_delete(x.env, repo->root, &repo->params, id, NULL, &err);
        expect(s == GD_OK, "delete", &err);
    }
    atomic_fetch_sub(&writing, 1);
    return NULL;
}

static void *
read_images(void *arg)
{
    unsigned reader = (unsigned)(uintptr_t)arg;
    for (unsigned i = reader; atomic_load(&writing) > 0; i++) {
        bool equal;
        gd_error err = {0};
        gd_segcache_stats stats;
        gd_status s = get_image(repo, kept_ids[i % KEPT], kept[i % KEPT],
                                LENGTH, &equal, &err);
        expect(s == GD_OK && equal, "get what stays", &err);
        gd_segcache_get_stats(repo->segcache, &stats);
        if (i % 7 == 0) {
            gd_segcache_set_budget(repo->segcache, i % 14 == 0 ? 9000 : 1 << 20);
        }
    }
    return NULL;
}

static void
maintain(unsigned round, gd_error *err)
{
    size_t spooled;
    unsigned similar = round % 4 == 3 ? MAINTAINER_SIMILAR : 0;
    gd_status s = maintainer_collect(
        repo, round % 8 | similar,
        round % 2 == 0 ? GD_CODEC_NONE : GD_CODEC_ZSTD, &spooled, err);
    expect(s == GD_OK, "collect", err);
    s = maintainer_merge(repo, kept_ids[round % KEPT], err);
    expect(s == GD_OK || s == GD_BUSY, "merge", err);
    s = maintainer_evacuate(repo, 1 + round % 4, err);
    expect(s == GD_OK, "evacuate", err);
    s = maintainer_spare(repo, 1 + round % 3, round % 60, err);
    expect(s == GD_OK, "spare copies", err);
    s = maintainer_scrub(repo, err);
    expect(s == GD_OK, "scrub", err);
}

/* The intent comes and goes while transactions check it. */
static void
announce(unsigned round)
{
    for (uint32_t group = 1; group < 6; group++) {
        (void)gd_locks_announce(repo->locks, group, NULL);
    }
    for (uint32_t group = 1; group < 6; group += 2) {
        gd_locks_withdraw(repo->locks, group);
    }
    if (round % 2 == 0) {
        gd_locks_withdraw_all(repo->locks);
    }
}

static void
change_filter(unsigned round, gd_error *err)
{
    gd_followed followed;
    if (round % 3 == 0 && gd_filter_rebuild_lock(repo->filter)) {
        gd_filter_clear(repo->filter);
        gd_filter_rebuild_unlock(repo->filter);
    }
    gd_status s = gd_follow(repo, 2, &followed, err);
    expect(s == GD_OK, "follow the groups", err);
}

static void *
maintain_all(void *arg)
{
    (void)arg;
    for (unsigned round = 0; atomic_load(&writing) > 0; round++) {
        gd_error err = {0};
        announce(round);
        maintain(round, &err);
        change_filter(round, &err);
    }
    gd_locks_withdraw_all(repo->locks);
    return NULL;
}

static void
check_rest(void)
{
    size_t spooled;
    gd_error err = {0};
    expect(maintainer_collect(repo, MAINTAINER_REWRITE | MAINTAINER_UNLINK,
                              GD_CODEC_NONE, &spooled, &err) == GD_OK,
           "the last collection", &err);
    CHECK_INT(spooled, 0);
    CHECK_INT(scratch_count(&x, "spool", "", NULL), 0);
    for (unsigned i = 0; i < KEPT; i++) {
        bool equal;
        CHECK_INT(get_image(repo, kept_ids[i], kept[i], LENGTH, &equal,
                            &x.err), GD_OK);
        CHECK(equal);
    }
}

/* The child is forked while all threads work, so that its copies of mutexes
 * may be held for ever: each entry point must refuse before it takes one
 * (repo.h). */
static bool
all_refuse(void)
{
    gd_error err;
    gd_image *image;
    gd_transaction *transaction;
    gd_owned_group *owned;
    gd_followed followed;
    alarm(60); /* ends the child if one waits */
    return gd_image_open(repo, kept_ids[0], NULL, &image, &err) ==
               GD_CLOSED &&
           gd_transaction_begin(repo, "more", "", &gd_global_scope,
                                &transaction, &err) == GD_CLOSED &&
           gd_owned_group_open(repo, 1, &owned, &err) == GD_CLOSED &&
           gd_follow(repo, 1, &followed, &err) == GD_CLOSED;
}

static void
fork_in_the_middle(void)
{
    pid_t child = fork();
    if (child == 0) {
        _exit(all_refuse() ? 0 : 1);
    }
    int status = -1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    CHECK_INT(status, 0);
}

static void
start(unsigned pool_threads, bool by_value)
{
    scratch_init(&x);
    x.env = gd_env_posix();
    x.params.block_size = BLOCK;
    x.params.segment_size = 2048;
    x.params.by_value = by_value;
    x.params.threads = pool_threads;
    x.params.lock_timeout_ms = 20000;
    repo = scratch_repo_filter(&x);
    CHECK(repo->filter != NULL);
    gd_segcache_set_budget(repo->segcache, 1 << 16);
    for (unsigned i = 0; i < KEPT; i++) {
        fill_image(kept[i], LENGTH, BLOCK, 120, i);
        CHECK_INT(put_image(repo, kept_ids[i], kept[i], LENGTH, 9000, NULL,
                            &x.err), GD_OK);
    }
}

static void
run(unsigned pool_threads, bool by_value)
{
    pthread_t threads[WRITERS + READERS + 1];
    unsigned count = 0;
    start(pool_threads, by_value);
    const gd_env *counting = &x.f.env;
    atomic_store(&odd, 0);
    atomic_store(&writing, WRITERS);
    for (unsigned i = 0; i < WRITERS; i++) {
        CHECK_INT(pthread_create(&threads[count++], NULL, write_images,
                                 (void *)(uintptr_t)i), 0);
    }
    for (unsigned i = 0; i < READERS; i++) {
        CHECK_INT(pthread_create(&threads[count++], NULL, read_images,
                                 (void *)(uintptr_t)i), 0);
    }
    CHECK_INT(pthread_create(&threads[count++], NULL, maintain_all, NULL), 0);
    for (int i = 0; i < FORKS; i++) {
        fork_in_the_middle();
    }
    while (count > 0) {
        pthread_join(threads[--count], NULL);
    }
    check_rest();
    CHECK_INT(atomic_load(&odd), 0);
    gd_repo_close(repo);
    x.env = counting;
    CHECK_INT(scratch_destroy(&x), 0);
}

TEST(test_beside_the_maintainer)
{
    run(POOL, false);
    run(0, true);
}

enum { SPARED = 30, HURT = 4 };

static void *
read_hurt(void *arg)
{
    (void)arg;
    for (unsigned i = 0; i < 4 * ROUNDS; i++) {
        bool equal;
        gd_error err = {0};
        gd_status s = get_image(repo, kept_ids[0], kept[0], LENGTH, &equal,
                                &err);
        expect(s == GD_OK && equal, "get from spare copies", &err);
    }
    return NULL;
}

static void
hurt_group(const gd_address addresses[SPARED])
{
    gd_owned_group *owned;
    gd_quarantine_name *names;
    size_t count;
    uint64_t bytes;
    uint32_t slots[HURT];
    for (uint32_t i = 0; i < HURT; i++) {
        slots[i] = i * 5;
    }
    CHECK_INT(gd_spare_write(repo, 1, addresses, SPARED, &bytes, &x.err),
              GD_OK);
    CHECK_INT(gd_owned_group_open(repo, 1, &owned, &x.err), GD_OK);
    CHECK_INT(gd_owned_group_mark_damaged(owned, slots, HURT, &names, &count,
                                          &x.err), GD_OK);
    x.env->release(x.env, names);
    gd_owned_group_close(owned);
}

/* Readers find damaged blocks' copies while these are written again. */
TEST(test_spare_copies_are_shared)
{
    pthread_t threads[READERS + 1];
    gd_address addresses[SPARED];
    for (uint32_t i = 0; i < SPARED; i++) {
        addresses[i] = (gd_address){1, i};
    }
    start(0, false);
    atomic_store(&odd, 0);
    hurt_group(addresses);
    for (unsigned i = 0; i < READERS + 1; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, read_hurt, NULL), 0);
    }
    for (unsigned i = 0; i < ROUNDS; i++) {
        uint64_t bytes;
        CHECK_INT(gd_spare_write(repo, 1, addresses, SPARED - i, &bytes,
                                 &x.err), GD_OK);
    }
    for (unsigned i = 0; i < READERS + 1; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(atomic_load(&odd), 0);
    CHECK(atomic_load(&repo->counters.spare_reads) > 0);
    gd_repo_close(repo);
    x.env = &x.f.env;
    CHECK_INT(scratch_destroy(&x), 0);
}

/* Handles come and go, each with a pool that has just been at work. */
TEST(test_pools_shut_down)
{
    start(POOL, false);
    for (int i = 0; i < 6; i++) {
        char id[32];
        snprintf(id, sizeof id, "more-%d", i);
        CHECK_INT(put_image(repo, id, kept[i % KEPT], LENGTH, 500, NULL,
                            &x.err), GD_OK);
        gd_repo_close(repo);
        repo = scratch_repo_filter(&x);
    }
    gd_repo_close(repo);
    x.env = &x.f.env;
    CHECK_INT(scratch_destroy(&x), 0);
}
