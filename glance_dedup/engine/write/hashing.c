/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hashing.c - see hashing.h.
 */
#include "engine/write/hashing.h"

#include "engine/base/coding.h"
#include "engine/format/sha256mb.h"
#include "engine/write/packer.h"

/* Blocks fingerprinted in one task.  They are few, since at the end of a batch
 * all threads wait for the last tasks. */
enum {
    TASK = GD_SHA256MB_LANES,
    TASK_BY_VALUE = 64, /* a task reads whole segments */
};

struct gd_hashing {
    gd_repo *repo;
    gd_scope scope;
    gd_hasher **hashers; /* one for each thread, and one for the caller */
    /* Of the current run: */
    gd_block *blocks;
    size_t count, task;
    gd_lookup *lookup;
    bool checksums;
    gd_job job;
    atomic_int failed;
};

gd_status
gd_hashing_open(gd_repo *repo, const gd_scope *scope, gd_hashing **out,
                gd_error *err)
{
    unsigned count = gd_pool_threads(repo->pool) + 1;
    gd_hashing *hashing = gd_calloc(repo->env, 1, sizeof *hashing, err);
    if (hashing == NULL) {
        return GD_NOMEM;
    }
    hashing->repo = repo;
    hashing->scope = *scope;
    hashing->hashers =
        gd_calloc(repo->env, count, sizeof *hashing->hashers, err);
    gd_status s = hashing->hashers == NULL ? GD_NOMEM : GD_OK;
    for (unsigned i = 0; s == GD_OK && i < count; i++) {
        s = gd_hasher_open(repo->env, repo->digest, &hashing->hashers[i],
                           err);
    }
    if (s != GD_OK) {
        gd_hashing_close(hashing);
        return s;
    }
    *out = hashing;
    return GD_OK;
}

void
gd_hashing_close(gd_hashing *hashing)
{
    gd_repo *repo = hashing->repo;
    for (unsigned i = 0; hashing->hashers != NULL &&
                         i <= gd_pool_threads(repo->pool); i++) {
        gd_hasher_close(repo->env, hashing->hashers[i]);
    }
    repo->env->release(repo->env, hashing->hashers);
    repo->env->release(repo->env, hashing);
}

static void
hash_blocks(void *arg, size_t task, unsigned worker)
{
    gd_hashing *hashing = arg;
    gd_hash_input inputs[TASK_BY_VALUE];
    size_t first = task * hashing->task, count = hashing->count - first;
    gd_block *blocks = hashing->blocks + first;
    count = count < hashing->task ? count : hashing->task;
    for (size_t i = 0; i < count; i++) {
        if (hashing->checksums) {
            blocks[i].checksum =
                gd_checksum(blocks[i].data, blocks[i].length, 0);
        }
        inputs[i] = (gd_hash_input){blocks[i].data, blocks[i].length,
                                    &blocks[i].fingerprint};
    }
    gd_status s = gd_hasher_compute_many(hashing->hashers[worker],
                                         &hashing->scope, inputs, count, NULL);
    if (s != GD_OK) {
        atomic_store(&hashing->failed, (int)s);
    } else if (hashing->repo->params.by_value && hashing->lookup != NULL) {
        gd_lookup_compare(hashing->lookup, blocks, count, worker);
    }
}

static void
add_checksums(void *arg, size_t task, unsigned worker)
{
    gd_hashing *hashing = arg;
    gd_hash_input inputs[TASK];
    gd_fingerprint again[TASK];
    gd_block *asked[TASK];
    size_t first = task * TASK, n = 0;
    for (size_t i = first; i < hashing->count && i < first + TASK; i++) {
        gd_block *block = &hashing->blocks[i];
        if (block->address.group == 0) {
            block->checksum = gd_checksum(block->data, block->length, 0);
            inputs[n] = (gd_hash_input){block->data, block->length, &again[n]};
            asked[n++] = block;
        }
    }
    gd_status s = n == 0 ? GD_OK
                         : gd_hasher_compute_many(hashing->hashers[worker],
                                                  &hashing->scope, inputs, n,
                                                  NULL);
    for (size_t i = 0; s == GD_OK && i < n; i++) {
        if (!gd_fingerprint_equal(&again[i], &asked[i]->fingerprint)) {
            s = GD_IO;
        }
    }
    if (s != GD_OK) {
        atomic_store(&hashing->failed, (int)s);
    }
}

/* Runs the task on all threads, over pieces of the blocks. */
static gd_status
run_job(gd_hashing *hashing, void (*run)(void *arg, size_t task, unsigned worker),
        gd_block *blocks, size_t count, size_t task, gd_error *err)
{
    hashing->blocks = blocks;
    hashing->count = count;
    hashing->task = task;
    atomic_store(&hashing->failed, GD_OK);
    hashing->job = (gd_job){.run = run,
                            .arg = hashing,
                            .tasks = (count + task - 1) / task};
    gd_pool_run(hashing->repo->pool, &hashing->job);
    gd_status s = (gd_status)atomic_load(&hashing->failed);
    return s == GD_OK || s == GD_IO
               ? s
               : gd_fail(err, s, "a fingerprint could not be computed");
}

gd_status
gd_hashing_run(gd_hashing *hashing, gd_lookup *lookup, gd_block *blocks,
               size_t count, bool checksums, gd_error *err)
{
    bool by_value = hashing->repo->params.by_value;
    hashing->lookup = lookup;
    hashing->checksums = checksums;
    return run_job(hashing, hash_blocks, blocks, count,
                   by_value ? TASK_BY_VALUE : TASK, err);
}

gd_status
gd_hashing_add_checksums(gd_hashing *hashing, gd_block *blocks, size_t count,
                         gd_error *err)
{
    gd_status s = run_job(hashing, add_checksums, blocks, count, TASK, err);
    return s == GD_IO ? gd_fail(err, s, GD_CHANGED_IN_MEMORY) : s;
}
