/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.h - the one bounded pool of threads of a process's handle.
 *
 * A job is an array of equal tasks.  Threads claim them one by one with an
 * atomic counter.  A thread that waits for a job works on it too, so a pool of
 * 0 threads is legal: the waiter then runs everything.
 */
#ifndef GD_POOL_H
#define GD_POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

typedef struct gd_pool gd_pool;
typedef struct gd_job gd_job;

/* The caller embeds it in its own structure.  It must stay in place from submit
 * until wait has returned.  Fields below the line belong to the pool. */
struct gd_job {
    /* worker is 0..threads-1 for the pool's threads, and threads for the
     * waiter.  So if the job has one waiter, per-worker scratch memory never
     * has two users at once. */
    void (*run)(void *arg, size_t task, unsigned worker);
    void *arg;
    size_t tasks;
    /* ---- */
    atomic_size_t next; /* the first unclaimed task */
    atomic_uint users;  /* pool threads working on it */
    gd_job *link;
    bool queued;
};

/* threads: 0..64. */
gd_status gd_pool_open(const gd_env *env, unsigned threads, gd_pool **pool,
                       gd_error *err);
/* Joins the threads.  REQUIRES: no job is running.  In a child after fork,
 * where the threads do not exist, it only frees the memory. */
void gd_pool_close(const gd_env *env, gd_pool *pool);
unsigned gd_pool_threads(const gd_pool *pool);

/* Hands the job to the threads and returns at once. */
void gd_pool_submit(gd_pool *pool, gd_job *job);
/* Helps with the tasks, then waits until every one is done. */
void gd_pool_wait(gd_pool *pool, gd_job *job);
/* Both at once.  The caller takes the place of one of the pool's threads, which
 * leaves it a processor. */
void gd_pool_run(gd_pool *pool, gd_job *job);

#endif
