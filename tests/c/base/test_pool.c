/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pool.c - every task runs exactly once, and none after wait has
 * returned.
 */
#include "engine/base/pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum { THREADS = 3, TASKS = 150, WAITERS = 6, ROUNDS = 120 };

/* A job with the memory that its tasks write. No field is atomic: the thread
 * sanitizer checks here that wait makes all of it visible, and that a worker's
 * scratch has one user at a time. */
typedef struct counting {
    gd_job job;
    unsigned runs[TASKS];
    unsigned scratch[THREADS + 1]; /* tasks by worker */
    atomic_uint bad_workers;
} counting;

static void
count_run(void *arg, size_t task, unsigned worker)
{
    counting *c = arg;
    if (worker > THREADS) {
        atomic_fetch_add(&c->bad_workers, 1);
        return;
    }
    c->runs[task]++;
    c->scratch[worker]++;
}

static void
start_counting(gd_pool *pool, counting *c, size_t tasks)
{
    memset(c, 0, sizeof *c);
    c->job.run = count_run;
    c->job.arg = c;
    c->job.tasks = tasks;
    gd_pool_submit(pool, &c->job);
}

/* The number of mistakes. */
static unsigned
finish_counting(gd_pool *pool, counting *c)
{
    gd_pool_wait(pool, &c->job);
    unsigned mistakes = atomic_load(&c->bad_workers), sum = 0;
    for (size_t i = 0; i < TASKS; i++) {
        mistakes += c->runs[i] != (i < c->job.tasks ? 1 : 0);
    }
    for (unsigned w = 0; w <= THREADS; w++) {
        sum += c->scratch[w];
    }
    mistakes += sum != c->job.tasks;
    memset(c, 0xee, sizeof *c); /* no thread may read it now */
    return mistakes;
}

TEST(test_no_threads)
{
    gd_pool *pool;
    gd_error err;
    counting c;
    REQUIRE(gd_pool_open(gd_env_posix(), 0, &pool, &err) == GD_OK);
    CHECK_INT(gd_pool_threads(pool), 0);
    start_counting(pool, &c, TASKS);
    CHECK_INT(c.runs[0], 0); /* no thread can run it yet */
    CHECK_INT(finish_counting(pool, &c), 0);
    start_counting(pool, &c, 0);
    CHECK_INT(finish_counting(pool, &c), 0);
    gd_pool_close(gd_env_posix(), pool);
}

TEST(test_one_waiter)
{
    gd_pool *pool;
    gd_error err;
    REQUIRE(gd_pool_open(gd_env_posix(), THREADS, &pool, &err) == GD_OK);
    CHECK_INT(gd_pool_threads(pool), THREADS);
    for (int round = 0; round < 300; round++) {
        counting c;
        start_counting(pool, &c, (size_t)round % TASKS);
        CHECK_INT(finish_counting(pool, &c), 0);
    }
    gd_pool_close(gd_env_posix(), pool);
}

TEST(test_jobs_waited_for_in_any_order)
{
    enum { JOBS = 5 };
    gd_pool *pool;
    gd_error err;
    static counting c[JOBS];
    REQUIRE(gd_pool_open(gd_env_posix(), THREADS, &pool, &err) == GD_OK);
    for (int round = 0; round < 60; round++) {
        for (int i = 0; i < JOBS; i++) {
            start_counting(pool, &c[i], TASKS);
        }
        for (int i = 0; i < JOBS; i++) {
            CHECK_INT(finish_counting(pool, &c[(i * 3 + round) % JOBS]), 0);
        }
    }
    gd_pool_close(gd_env_posix(), pool);
}

typedef struct waiter {
    pthread_t thread;
    gd_pool *pool;
    unsigned mistakes;
} waiter;

static void *
waiter_main(void *arg)
{
    waiter *w = arg;
    for (int round = 0; round < ROUNDS; round++) {
        counting c; /* on the stack: used again at once by the next round */
        start_counting(w->pool, &c, (size_t)(round * 37) % TASKS);
        w->mistakes += finish_counting(w->pool, &c);
    }
    return NULL;
}

static void
check_many_waiters(unsigned threads)
{
    gd_pool *pool;
    gd_error err;
    waiter waiters[WAITERS];
    REQUIRE(gd_pool_open(gd_env_posix(), threads, &pool, &err) == GD_OK);
    for (int i = 0; i < WAITERS; i++) {
        waiters[i] = (waiter){.pool = pool};
        CHECK_INT(pthread_create(&waiters[i].thread, NULL, waiter_main,
                                 &waiters[i]),
                  0);
    }
    for (int i = 0; i < WAITERS; i++) {
        pthread_join(waiters[i].thread, NULL);
        CHECK_INT(waiters[i].mistakes, 0);
    }
    gd_pool_close(gd_env_posix(), pool);
}

TEST(test_many_waiters)
{
    check_many_waiters(THREADS);
    check_many_waiters(1);
    check_many_waiters(0);
}

/* Two tasks wait for each other: both end only if two threads run them, the
 * waiter and one of the pool's. */
static void
meet_run(void *arg, size_t task, unsigned worker)
{
    (void)task, (void)worker;
    pthread_barrier_wait(arg);
}

TEST(test_waiter_and_thread_work_side_by_side)
{
    gd_pool *pool;
    gd_error err;
    pthread_barrier_t barrier;
    REQUIRE(gd_pool_open(gd_env_posix(), 1, &pool, &err) == GD_OK);
    pthread_barrier_init(&barrier, NULL, 2);
    for (int round = 0; round < 50; round++) {
        gd_job job = {.run = meet_run, .arg = &barrier, .tasks = 2};
        gd_pool_submit(pool, &job);
        gd_pool_wait(pool, &job);
    }
    pthread_barrier_destroy(&barrier);
    gd_pool_close(gd_env_posix(), pool);
}

/* Gaps from none to longer than a thread watches for the next job: the test
 * would wait in vain for a thread that was not woken. */
static void
pause_for(int round)
{
    usleep((useconds_t)(round * 37 % 400));
}

TEST(test_jobs_after_any_gap)
{
    gd_pool *pool;
    gd_error err;
    pthread_barrier_t barrier;
    REQUIRE(gd_pool_open(gd_env_posix(), 2, &pool, &err) == GD_OK);
    pthread_barrier_init(&barrier, NULL, 3);
    for (int round = 0; round < 400; round++) {
        gd_job job = {.run = meet_run, .arg = &barrier, .tasks = 3};
        gd_pool_submit(pool, &job);
        gd_pool_wait(pool, &job);
        pause_for(round);
    }
    pthread_barrier_destroy(&barrier);
    gd_pool_close(gd_env_posix(), pool);
}

/* Both threads must come, one of which may watch, and be counted once. */
TEST(test_two_jobs_in_a_gap)
{
    gd_pool *pool;
    gd_error err;
    pthread_barrier_t barrier;
    REQUIRE(gd_pool_open(gd_env_posix(), 2, &pool, &err) == GD_OK);
    pthread_barrier_init(&barrier, NULL, 3);
    for (int round = 0; round < 400; round++) {
        gd_job jobs[3];
        for (int i = 0; i < 3; i++) {
            jobs[i] = (gd_job){.run = meet_run, .arg = &barrier, .tasks = 1};
        }
        gd_pool_submit(pool, &jobs[0]);
        gd_pool_submit(pool, &jobs[1]);
        gd_pool_run(pool, &jobs[2]);
        gd_pool_wait(pool, &jobs[0]);
        gd_pool_wait(pool, &jobs[1]);
        pause_for(round);
    }
    pthread_barrier_destroy(&barrier);
    gd_pool_close(gd_env_posix(), pool);
}

static void
run_with(unsigned threads)
{
    gd_pool *pool;
    gd_error err;
    pthread_barrier_t barrier;
    REQUIRE(gd_pool_open(gd_env_posix(), threads, &pool, &err) == GD_OK);
    pthread_barrier_init(&barrier, NULL, threads > 0 ? threads : 1);
    for (int round = 0; round < 100; round++) {
        gd_job job = {.run = meet_run,
                      .arg = &barrier,
                      .tasks = threads > 0 ? threads : 1};
        gd_pool_run(pool, &job);
        pause_for(round);
    }
    pthread_barrier_destroy(&barrier);
    gd_pool_close(gd_env_posix(), pool);
}

/* As many threads as the pool has run it, the caller among them. */
TEST(test_run)
{
    run_with(0);
    run_with(1);
    run_with(THREADS);
}

/* As meet_run; the threads other than the waiter take longer than it
 * watches. */
typedef struct slow {
    pthread_barrier_t barrier;
    bool done[THREADS];
} slow;

static void
slow_run(void *arg, size_t task, unsigned worker)
{
    slow *s = arg;
    pthread_barrier_wait(&s->barrier);
    if (worker < THREADS) {
        usleep(3000);
    }
    s->done[task] = true;
}

TEST(test_slow_tasks_are_waited_for)
{
    gd_pool *pool;
    gd_error err;
    REQUIRE(gd_pool_open(gd_env_posix(), THREADS, &pool, &err) == GD_OK);
    for (int round = 0; round < 20; round++) {
        slow s = {0};
        pthread_barrier_init(&s.barrier, NULL, THREADS);
        gd_job job = {.run = slow_run, .arg = &s, .tasks = THREADS};
        gd_pool_run(pool, &job);
        for (int i = 0; i < THREADS; i++) {
            CHECK(s.done[i]);
        }
        pthread_barrier_destroy(&s.barrier);
    }
    gd_pool_close(gd_env_posix(), pool);
}

typedef struct outer {
    gd_pool *pool;
    unsigned mistakes[4];
} outer;

static void
outer_run(void *arg, size_t task, unsigned worker)
{
    (void)worker;
    outer *o = arg;
    counting c;
    start_counting(o->pool, &c, TASKS);
    o->mistakes[task] = finish_counting(o->pool, &c);
}

TEST(test_job_within_a_job)
{
    gd_pool *pool;
    gd_error err;
    REQUIRE(gd_pool_open(gd_env_posix(), THREADS, &pool, &err) == GD_OK);
    for (int round = 0; round < 30; round++) {
        outer o = {.pool = pool, .mistakes = {9, 9, 9, 9}};
        gd_job job = {.run = outer_run, .arg = &o, .tasks = 4};
        gd_pool_submit(pool, &job);
        gd_pool_wait(pool, &job);
        for (int i = 0; i < 4; i++) {
            CHECK_INT(o.mistakes[i], 0);
        }
    }
    gd_pool_close(gd_env_posix(), pool);
}

typedef struct signals {
    pthread_barrier_t barrier;
    atomic_uint open_to_signals;
} signals;

static void
signals_run(void *arg, size_t task, unsigned worker)
{
    (void)task;
    signals *s = arg;
    sigset_t now;
    pthread_barrier_wait(&s->barrier); /* so that every thread takes one */
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    bool open = sigismember(&now, SIGTERM) == 0 ||
                sigismember(&now, SIGPROF) == 0 ||
                sigismember(&now, SIGCHLD) == 0;
    if (worker < THREADS && open) {
        atomic_fetch_add(&s->open_to_signals, 1);
    }
}

TEST(test_threads_block_signals)
{
    gd_pool *pool;
    gd_error err;
    signals s;
    sigset_t before, after;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    REQUIRE(gd_pool_open(gd_env_posix(), THREADS, &pool, &err) == GD_OK);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int i = 1; i < 32; i++) {
        CHECK_INT(sigismember(&after, i), sigismember(&before, i));
    }
    pthread_barrier_init(&s.barrier, NULL, THREADS + 1);
    atomic_init(&s.open_to_signals, 0);
    gd_job job = {.run = signals_run, .arg = &s, .tasks = THREADS + 1};
    gd_pool_submit(pool, &job);
    gd_pool_wait(pool, &job);
    CHECK_INT(atomic_load(&s.open_to_signals), 0);
    pthread_barrier_destroy(&s.barrier);
    gd_pool_close(gd_env_posix(), pool);
}

/* The child has none of the threads: closing must not wait for them. */
TEST(test_close_after_fork)
{
    gd_pool *pool;
    gd_error err;
    counting c;
    REQUIRE(gd_pool_open(gd_env_posix(), THREADS, &pool, &err) == GD_OK);
    start_counting(pool, &c, TASKS);
    CHECK_INT(finish_counting(pool, &c), 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        gd_pool_close(gd_env_posix(), pool);
        _exit(7);
    }
    int status = 0;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    start_counting(pool, &c, TASKS);
    CHECK_INT(finish_counting(pool, &c), 0);
    gd_pool_close(gd_env_posix(), pool);
}

TEST(test_refusals)
{
    fault_env f;
    gd_pool *pool;
    gd_error err;
    fault_env_init(&f);
    CHECK_INT(gd_pool_open(&f.env, 65, &pool, &err), GD_INVALID);
    CHECK_CONTAINS(err.text, "65");
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK_INT(gd_pool_open(&f.env, 2, &pool, &err), GD_NOMEM);
    CHECK(pool == NULL);
    CHECK_INT(gd_pool_open(&f.env, 64, &pool, &err), GD_OK);
    gd_pool_close(&f.env, pool);
    gd_pool_close(&f.env, NULL);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}
