/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_filter_users.c - a filter with several users: its locks, and threads
 * and processes that keep and find hints at once.
 */
#include <pthread.h>
#include <sys/stat.h>

#include "tests/c/support/check.h"
#include "tests/c/support/filter_fixture.h"

static filter_fixture x;

/* ---- the rebuild lock ---- */

TEST_WITH(test_rebuild_lock, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    gd_filter *second;
    CHECK_INT(gd_filter_open(x.env, x.path, FILTER_REPOSITORY,
                             FILTER_SMALL, &second, &x.err),
              GD_OK);
    CHECK(gd_filter_rebuild_lock(x.filter));
    CHECK(!gd_filter_rebuild_lock(x.filter)); /* not by a thread */
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
}

/* ---- the users' lock ---- */

/* A cleaner takes this lock exclusively; -1 if a process uses the file. */
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

TEST_WITH(test_users_lock, filter_setup(&x, FILTER_SMALL), filter_teardown(&x))
{
    gd_filter *second;
    CHECK_INT(gd_filter_open(x.env, x.path, FILTER_REPOSITORY,
                             FILTER_SMALL, &second, &x.err),
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
    /* The opener waits for it, though not for ever. */
    CHECK_INT(filter_open(&x, FILTER_SMALL), GD_OK);
    gd_filter_close(x.env, x.filter);
    close(fd);
    /* Without locks there is a filter all the same. */
    fault_env_fail(&x.f, FAULT_LOCK, 1, ENOLCK, false);
    CHECK_INT(filter_open(&x, FILTER_SMALL), GD_OK);
}

/* A cleaner takes it for dead between its opening and its lock. */
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

TEST_WITH(test_unlinked_while_it_is_opened, filter_setup(&x, FILTER_SMALL),
          filter_teardown(&x))
{
    gd_filter *second;
    struct stat before, after;
    CHECK_INT(stat(x.path, &before), 0);
    gd_env env = *gd_env_posix();
    env.lock = unlink_and_lock;
    victim = x.path;
    CHECK_INT(gd_filter_open(&env, x.path, FILTER_REPOSITORY,
                             FILTER_SMALL, &second, &x.err),
              GD_OK);
    /* The file that is used has the name. */
    CHECK_INT(stat(x.path, &after), 0);
    CHECK(before.st_ino != after.st_ino);
    CHECK_INT(take_for_dead(x.path), -1);
    gd_filter_close(&env, second);
}

static void
wait_for(pid_t child)
{
    int status = -1;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
}

TEST(test_rebuild_lock_dies_with_the_process)
{
    filter_fixture x;
    filter_setup(&x, FILTER_SMALL);
    pid_t child = fork();
    if (child == 0) {
        gd_filter *own;
        bool good = gd_filter_open(gd_env_posix(), x.path, FILTER_REPOSITORY,
                                   FILTER_SMALL, &own, NULL) == GD_OK &&
                    gd_filter_rebuild_lock(own);
        filter_save(own, 5, false);
        _exit(good ? 0 : 1);
    }
    wait_for(child);
    CHECK(gd_filter_rebuild_lock(x.filter));
    CHECK_INT(filter_stats_of(x.filter).rebuilt, 5);
    CHECK(!filter_stats_of(x.filter).complete);
    filter_teardown(&x);
}

/* ---- concurrent users ---- */

enum {
    WORKERS = 4,
    EACH = 15000,
    BIG = WORKERS * EACH * 8 * 2 + FILTER_HEADER,
};

/* Inserts its part and removes every fifth of it; returns the number of its
 * own hints that it did not find though it had just stored them. */
static uint64_t
work(gd_filter *filter, uint64_t number)
{
    uint64_t missed = 0;
    for (uint64_t n = number * EACH; n < (number + 1) * EACH; n++) {
        gd_fingerprint fp = filter_fingerprint(n);
        gd_filter_insert(filter, &fp, filter_address(n));
        missed += !filter_finds(filter, n);
        if (n % 5 == 0) {
            gd_filter_remove(filter, &fp, filter_address(n));
        }
    }
    return missed;
}

static void
check_work(const filter_fixture *x)
{
    gd_filter_stats stats = filter_stats_of(x->filter);
    CHECK_INT(stats.level, 0);
    CHECK_INT(stats.dropped, 0);
    CHECK_INT(stats.hints, WORKERS * EACH / 5 * 4);
    CHECK_INT(filter_count_found(x->filter, 0, WORKERS * EACH),
              WORKERS * EACH / 5 * 4);
}

TEST(test_several_processes)
{
    filter_fixture x;
    pid_t children[WORKERS];
    filter_setup(&x, BIG);
    for (int i = 0; i < WORKERS; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            gd_filter *own;
            bool good = gd_filter_open(gd_env_posix(), x.path,
                                       FILTER_REPOSITORY, BIG, &own,
                                       NULL) == GD_OK &&
                        work(own, (uint64_t)i) == 0;
            gd_filter_close(gd_env_posix(), own);
            gd_filter_close(x.env, x.filter); /* the inherited handle */
            _exit(good ? 0 : 1);
        }
    }
    for (int i = 0; i < WORKERS; i++) {
        wait_for(children[i]);
    }
    check_work(&x);
    filter_teardown(&x);
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

TEST(test_several_threads)
{
    filter_fixture x;
    worker workers[WORKERS];
    filter_setup(&x, BIG);
    start_workers(x.filter, workers);
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
        CHECK_INT(workers[i].missed, 0);
    }
    check_work(&x);
    filter_teardown(&x);
}

enum { CONTESTED = 2000, COPIES = GD_FILTER_CANDIDATES / WORKERS };

typedef struct contestant {
    pthread_t thread;
    gd_filter *filter;
    pthread_barrier_t *barrier;
    uint64_t number;
} contestant;

/* All threads want places in the same two buckets at the same time. */
static void *
contestant_main(void *arg)
{
    contestant *c = arg;
    for (uint64_t n = 0; n < CONTESTED; n++) {
        gd_fingerprint fp = filter_fingerprint(n);
        pthread_barrier_wait(c->barrier);
        for (uint64_t i = 0; i < COPIES; i++) {
            gd_filter_insert(c->filter, &fp,
                             filter_address(n * 100 + c->number * COPIES + i));
        }
    }
    return NULL;
}

/* No hint overwrites another: counted hints are there. */
TEST(test_threads_in_the_same_buckets)
{
    filter_fixture x;
    pthread_barrier_t barrier;
    contestant c[WORKERS];
    uint64_t found = 0;
    filter_setup(&x, BIG);
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
        gd_fingerprint fp = filter_fingerprint(n);
        gd_address candidates[GD_FILTER_CANDIDATES];
        found += gd_filter_lookup(x.filter, &fp, candidates);
    }
    gd_filter_stats stats = filter_stats_of(x.filter);
    CHECK_INT(found, stats.hints);
    CHECK_INT(stats.hints + stats.dropped, CONTESTED * WORKERS * COPIES);
    CHECK(stats.hints > CONTESTED * WORKERS * COPIES / 10 * 7);
    pthread_barrier_destroy(&barrier);
    filter_teardown(&x);
}

/* The filter is far too small, and cleared all the time: no thread fails, and
 * the counts stay right enough for the filter to work. */
TEST(test_threads_in_a_full_filter)
{
    filter_fixture x;
    worker workers[WORKERS];
    filter_setup(&x, FILTER_SMALL);
    start_workers(x.filter, workers);
    for (uint32_t i = 1; i <= 20; i++) {
        gd_filter_clear(x.filter);
        filter_save(x.filter, i, true);
        CHECK(filter_stats_of(x.filter).hints <= FILTER_PLACES);
    }
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    for (uint64_t n = 0; n < 10 * FILTER_PLACES; n++) {
        filter_insert(x.filter, n);
    }
    uint64_t found = filter_count_found(x.filter, 0, 10 * FILTER_PLACES);
    CHECK(found > FILTER_PLACES / 4);
    CHECK(found <= FILTER_PLACES);
    filter_teardown(&x);
}
