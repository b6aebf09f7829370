/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.c - the bounded pool of threads.  See pool.h.
 *
 * The queue is a list of jobs that may still have unclaimed tasks, oldest
 * first.  The pool's mutex guards the queue, every job's users, and stopping.
 * A thread that works on a job is counted in its users from before it drops the
 * mutex until it holds it again, and does not touch the job after that.  The
 * waiter holds the mutex, takes the job off the queue and sees no users: then
 * every task is done, nobody will touch the job any more, and the waiter sees
 * all that the tasks wrote.
 *
 * To sleep and be woken may take longer than a task, above all where sleeping
 * halts a virtual machine's processor.  So a thread watches for a while before
 * it sleeps.  It always watches for the last tasks of a job.  It watches for
 * the next job only if the last one came soon after a thread had finished.  A
 * watching thread reads without the mutex, and believes what it read only once
 * it holds the mutex.
 */
#include "engine/base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

enum {
    MAX_THREADS = 64,
    WATCH_TASK_NS = 50000, /* about as long as falling asleep and being woken
                            * takes */
    WATCH_JOB_NS = 200000, /* and as long as the work between two jobs of one
                            * upload */
};

typedef struct worker {
    gd_pool *pool;
    pthread_t thread;
    unsigned number;
} worker;

struct gd_pool {
    const gd_env *env;
    pthread_mutex_t mutex;
    pthread_cond_t work; /* the queue is not empty, or stopping */
    pthread_cond_t idle; /* some job has no users any more */
    gd_job *head;
    gd_job *tail;
    atomic_uint queued; /* jobs in the queue */
    unsigned watching;  /* watching threads that no job counts on yet */
    int64_t idle_since; /* when a thread last finished a job */
    bool soon;          /* the next job came soon after that */
    bool stopping;
    unsigned threads; /* threads that were started */
    pid_t owner;      /* the process that started them */
    worker workers[];
};

/* Runs unclaimed tasks until none is left. */
static void
run_tasks(gd_job *job, unsigned number)
{
    for (;;) {
        /* Relaxed: a claim only needs to be unique.  The mutex makes the job
         * visible to the threads, and their work visible to the waiter. */
        size_t task =
            atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (task >= job->tasks) {
            return;
        }
        job->run(job->arg, task, number);
    }
}

/* REQUIRES: the mutex. */
static void
enqueue(gd_pool *pool, gd_job *job)
{
    job->link = NULL;
    job->queued = true;
    if (pool->tail == NULL) {
        pool->head = job;
    } else {
        pool->tail->link = job;
    }
    pool->tail = job;
    atomic_fetch_add(&pool->queued, 1);
}

/* REQUIRES: the mutex.  Does nothing if the job is not queued. */
static void
dequeue(gd_pool *pool, gd_job *job)
{
    if (!job->queued) {
        return;
    }
    gd_job *before = NULL;
    for (gd_job *j = pool->head; j != job; j = j->link) {
        before = j;
    }
    if (before == NULL) {
        pool->head = job->link;
    } else {
        before->link = job->link;
    }
    if (pool->tail == job) {
        pool->tail = before;
    }
    job->link = NULL;
    job->queued = false;
    atomic_fetch_sub(&pool->queued, 1);
}

/* Watches until the count is zero, or is not, for at most the given time.
 * Yields the processor to others that want it. */
static void
watch(const gd_env *env, atomic_uint *count, bool zero, int64_t nanoseconds)
{
    int64_t began = env->monotonic_ns(env);
    while ((atomic_load_explicit(count, memory_order_relaxed) == 0) != zero &&
           env->monotonic_ns(env) - began < nanoseconds) {
        sched_yield();
    }
}

/* REQUIRES: the mutex.  Drops it while it waits. */
static void
wait_for_job(gd_pool *pool)
{
    pool->idle_since = pool->env->monotonic_ns(pool->env);
    if (pool->soon && pool->head == NULL && !pool->stopping) {
        pool->watching++;
        pthread_mutex_unlock(&pool->mutex);
        watch(pool->env, &pool->queued, false, WATCH_JOB_NS);
        pthread_mutex_lock(&pool->mutex);
        pool->watching -= pool->watching > 0;
    }
    while (pool->head == NULL && !pool->stopping) {
        pthread_cond_wait(&pool->work, &pool->mutex);
    }
}

static void *
worker_main(void *arg)
{
    const worker *self = arg;
    gd_pool *pool = self->pool;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        wait_for_job(pool);
        if (pool->head == NULL) {
            break;
        }
        gd_job *job = pool->head;
        atomic_fetch_add(&job->users, 1);
        pthread_mutex_unlock(&pool->mutex);
        run_tasks(job, self->number);
        pthread_mutex_lock(&pool->mutex);
        dequeue(pool, job);
        if (atomic_fetch_sub(&job->users, 1) == 1) {
            pthread_cond_broadcast(&pool->idle);
        }
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static void
join_all(gd_pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (unsigned i = 0; i < pool->threads; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    pthread_cond_destroy(&pool->idle);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
}

/* Starts the threads with every signal blocked, so that the application's
 * handlers run only in its own threads. */
static int
start_threads(gd_pool *pool, unsigned threads)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = 0;
    for (unsigned i = 0; i < threads; i++) {
        worker *w = &pool->workers[i];
        w->pool = pool;
        w->number = i;
        rc = pthread_create(&w->thread, NULL, worker_main, w);
        if (rc != 0) {
            break;
        }
        pool->threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

gd_status
gd_pool_open(const gd_env *env, unsigned threads, gd_pool **pool,
             gd_error *err)
{
    *pool = NULL;
    if (threads > MAX_THREADS) {
        return gd_fail(err, GD_INVALID,
                       "a pool of %u threads was asked for; 0 to %d are "
                       "possible",
                       threads, MAX_THREADS);
    }
    gd_pool *p =
        gd_calloc(env, 1, sizeof *p + threads * sizeof p->workers[0], err);
    if (p == NULL) {
        return GD_NOMEM;
    }
    /* With default attributes none of these can fail on Linux. */
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->idle, NULL);
    p->env = env;
    p->owner = env->getpid(env);
    int rc = start_threads(p, threads);
    if (rc != 0) {
        gd_status s = gd_fail_errno(err, rc, "cannot start thread %u of %u",
                                    p->threads + 1, threads);
        join_all(p);
        env->release(env, p);
        return s;
    }
    *pool = p;
    return GD_OK;
}

void
gd_pool_close(const gd_env *env, gd_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    /* A child after fork has the memory but not the threads, and the mutex is
     * in whatever state it was.  There is nothing to join or destroy. */
    if (pool->owner == env->getpid(env)) {
        join_all(pool);
    }
    env->release(env, pool);
}

unsigned
gd_pool_threads(const gd_pool *pool)
{
    return pool->threads;
}

/* The number of pool threads that get a task each. */
static size_t
count_useful(const gd_pool *pool, const gd_job *job)
{
    return job->tasks < pool->threads ? job->tasks : pool->threads;
}

/* Wakes this many threads for the job, less those that watch.  If more come,
 * that does no harm. */
static void
hand_out(gd_pool *pool, gd_job *job, size_t threads)
{
    atomic_init(&job->next, 0);
    atomic_init(&job->users, 0);
    job->link = NULL;
    job->queued = false;
    if (threads == 0) {
        return;
    }
    int64_t now = pool->env->monotonic_ns(pool->env);
    pthread_mutex_lock(&pool->mutex);
    pool->soon = now - pool->idle_since < WATCH_JOB_NS;
    enqueue(pool, job);
    while (threads > 0 && pool->watching > 0) {
        pool->watching--;
        threads--;
    }
    while (threads-- > 0) {
        pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->mutex);
}

void
gd_pool_submit(gd_pool *pool, gd_job *job)
{
    hand_out(pool, job, count_useful(pool, job));
}

void
gd_pool_wait(gd_pool *pool, gd_job *job)
{
    run_tasks(job, pool->threads);
    if (pool->threads == 0) {
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    dequeue(pool, job);
    if (atomic_load(&job->users) > 0) {
        pthread_mutex_unlock(&pool->mutex);
        watch(pool->env, &job->users, true, WATCH_TASK_NS);
        pthread_mutex_lock(&pool->mutex);
    }
    while (atomic_load(&job->users) > 0) {
        pthread_cond_wait(&pool->idle, &pool->mutex);
    }
    pthread_mutex_unlock(&pool->mutex);
}

void
gd_pool_run(gd_pool *pool, gd_job *job)
{
    size_t threads = count_useful(pool, job);
    hand_out(pool, job, threads > 0 ? threads - 1 : 0);
    gd_pool_wait(pool, job);
}
