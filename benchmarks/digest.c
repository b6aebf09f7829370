/* SPDX-License-Identifier: Apache-2.0 */
/*
 * digest.c - the rate at which the engine computes fingerprints, and does
 * nothing else: what storing duplicates is measured against.
 *
 *     digest FILE DIGEST BLOCK_SIZE THREADS
 *
 * reads FILE into memory, fingerprints its whole blocks in the tasks and on the
 * pool that storing uses, and prints the seconds of wall and of processor time
 * that this took.
 */
#include <stdio.h>
#include <stdlib.h>

#include "benchmarks/program.h"
#include "engine/base/pool.h"
#include "engine/format/fingerprint.h"

enum { TASK = 16, THREADS = 64 };

typedef struct work {
    const uint8_t *data;
    size_t size, blocks;
    gd_hasher *hashers[THREADS + 1];
} work;

static void
hash_task(void *arg, size_t task, unsigned worker)
{
    const work *w = arg;
    gd_fingerprint fps[TASK];
    gd_hash_input inputs[TASK];
    size_t count = 0, first = task * TASK;
    for (; count < TASK && first + count < w->blocks; count++) {
        inputs[count] = (gd_hash_input){w->data + (first + count) * w->size,
                                        w->size, &fps[count]};
    }
    if (gd_hasher_compute_many(w->hashers[worker], &gd_global_scope, inputs,
                               count, NULL) != GD_OK) {
        give_up("a fingerprint could not be computed");
    }
}

int
main(int argc, char **argv)
{
    const gd_env *env = gd_env_posix();
    gd_error err;
    gd_digest *digest;
    gd_pool *pool;
    work w = {0};
    size_t length;
    if (argc != 5) {
        give_up("FILE DIGEST BLOCK_SIZE THREADS");
    }
    w.data = load_file(argv[1], &length);
    w.size = strtoul(argv[3], NULL, 10);
    w.blocks = length / w.size;
    unsigned threads = (unsigned)strtoul(argv[4], NULL, 10);
    if (threads > THREADS ||
        gd_digest_open(env, argv[2], false, &digest, &err) != GD_OK ||
        gd_pool_open(env, threads, &pool, &err) != GD_OK) {
        give_up("no such digest, or too many threads");
    }
    for (unsigned i = 0; i <= threads; i++) {
        if (gd_hasher_open(env, digest, &w.hashers[i], &err) != GD_OK) {
            give_up(err.text);
        }
    }
    gd_job job = {.run = hash_task, .arg = &w,
                  .tasks = (w.blocks + TASK - 1) / TASK};
    double wall = seconds(CLOCK_MONOTONIC);
    double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    gd_pool_submit(pool, &job);
    gd_pool_wait(pool, &job);
    printf("%.6f %.6f\n", seconds(CLOCK_MONOTONIC) - wall,
           seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    for (unsigned i = 0; i <= threads; i++) {
        gd_hasher_close(env, w.hashers[i]);
    }
    gd_pool_close(env, pool);
    gd_digest_close(env, digest);
    return 0;
}
