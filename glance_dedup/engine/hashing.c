/*
 * hashing.c - see hashing.h.
 */
#include "hashing.h"

#include "multibuffer.h"

/* Blocks fingerprinted in one go: few, since at the end of a batch all wait for
 * the last ones. */
enum {
    TASK = GD_MULTIBUFFER_LANES,
    TASK_BY_VALUE = 64, /* a task reads whole segments */
};

struct gd_hashing {
    gd_repo *repo;
    gd_scope scope;
    gd_hasher **hashers; /* one for each thread, and the waiter's */
    /* Of the run under way: */
    gd_block *blocks;
    size_t count, task;
    gd_lookup *lookup;
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
        if (hashing->hashers[i] != NULL) {
            gd_hasher_close(repo->env, hashing->hashers[i]);
        }
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
        inputs[i] = (gd_hash_input){blocks[i].data, blocks[i].length,
                                    &blocks[i].fingerprint};
    }
    gd_status s = gd_hasher_compute_many(hashing->hashers[worker],
                                         &hashing->scope, inputs, count, NULL);
    if (s != GD_OK) {
        atomic_store(&hashing->failed, (int)s);
    } else if (hashing->repo->params.by_value) {
        gd_lookup_compare(hashing->lookup, blocks, count, worker);
    }
}

gd_status
gd_hashing_run(gd_hashing *hashing, gd_lookup *lookup, gd_block *blocks,
               size_t count, gd_error *err)
{
    gd_pool *pool = hashing->repo->pool;
    hashing->lookup = lookup;
    hashing->blocks = blocks;
    hashing->count = count;
    hashing->task = hashing->repo->params.by_value ? TASK_BY_VALUE : TASK;
    atomic_store(&hashing->failed, GD_OK);
    hashing->job = (gd_job){.run = hash_blocks,
                            .arg = hashing,
                            .tasks = (count + hashing->task - 1) /
                                     hashing->task};
    gd_pool_run(pool, &hashing->job);
    gd_status s = (gd_status)atomic_load(&hashing->failed);
    return s == GD_OK
               ? GD_OK
               : gd_fail(err, s, "a fingerprint could not be computed");
}
