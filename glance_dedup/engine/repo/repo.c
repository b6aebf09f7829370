/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repo.c - see repo.h.
 */
#include "engine/repo/repo.h"

#include <errno.h>
#include <string.h>

#include "engine/files/file.h"
#include "engine/files/freespace.h"
#include "engine/format/names.h"
#include "engine/repo/metacache.h"
#include "engine/repo/segcache.h"
#include "engine/repo/spareindex.h"

/* ---- opening and closing ---- */

static gd_status
require_params(const gd_params *params, const gd_digest *digest, gd_error *err)
{
    if (params->group_slots < GD_SLOTS_MIN ||
        params->group_slots > GD_MAX_SLOTS) {
        return gd_fail(err, GD_INVALID, "group slots: %u is not %d to %d",
                       params->group_slots, GD_SLOTS_MIN, GD_MAX_SLOTS);
    }
    uint32_t segment = params->segment_size;
    if (segment < params->block_size || segment > GD_SEGMENT_MAX ||
        (segment & (segment - 1)) != 0) {
        return gd_fail(err, GD_INVALID,
                       "segment size: %u is not a power of two from the block "
                       "size, %u, to %d", segment, params->block_size,
                       GD_SEGMENT_MAX);
    }
    if (!params->by_value && !gd_digest_is_cryptographic(digest)) {
        return gd_fail(err, GD_INVALID,
                       "fingerprint %s is not cryptographic: it needs "
                       "comparison by value", params->digest);
    }
    return gd_codec_require_level(params->codec, params->codec_level, err);
}

static gd_status
open_locks(gd_repo *repo, const char *path, gd_error *err)
{
    GD_TRY(gd_locks_open(repo->env, repo->root, &repo->locks, err));
    gd_status s = gd_locks_lock_features_shared(repo->locks, GD_FEATURE_COUNT,
                                                err);
    if (s == GD_BUSY) {
        return gd_fail(err, GD_BUSY,
                       "a feature that this program does not know is being "
                       "set in the repository %s: use a newer program", path);
    }
    /* With the lock, so nobody sets one between (N15.2). */
    return s == GD_OK ? gd_features_require_known(repo->env, repo->root, err)
                      : s;
}

static gd_status
open_parts(gd_repo *repo, const char *path, bool allow_weak_digest,
           gd_error *err)
{
    const gd_env *env = repo->env;
    /* The end of the path may be a symbolic link: that is the operator's
     * choice. */
    int rc;
    do {
        rc = env->openat(env, AT_FDCWD, path,
                         O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    } while (rc == -EINTR);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot open the repository %s", path);
    }
    repo->root = rc;
    rc = env->is_shared(env, repo->root);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot find out which file system %s "
                             "is on", path);
    }
    repo->params.shared = rc > 0;
    GD_TRY(gd_file_require_directories(env, repo->root, err));
    GD_TRY(gd_digest_open(env, repo->params.digest, allow_weak_digest,
                          &repo->digest, err));
    GD_TRY(require_params(&repo->params, repo->digest, err));
    GD_TRY(gd_chunker_open(&repo->chunker, repo->params.cut_minimum,
                           repo->params.cut_average, repo->params.block_size,
                           err));
    GD_TRY(gd_pool_open(env, repo->params.threads, &repo->pool, err));
    repo->scratch.most += gd_pool_threads(repo->pool);
    GD_TRY(open_locks(repo, path, err));
    GD_TRY(gd_fpcache_open(env, repo->root, &repo->params,
                           gd_repo_kept_open(repo, GD_GROUPS_SHARE),
                           &repo->cache, err));
    GD_TRY(gd_segcache_open(env, &repo->segcache, err));
    GD_TRY(gd_metacache_open(env, GD_METACACHE_BUDGET, &repo->metacache, err));
    return gd_spare_index_open(env, repo->root, &repo->params, &repo->spares,
                               err);
}

gd_status
gd_repo_open(const gd_env *env, const char *path, const gd_params *params,
             bool allow_weak_digest, gd_repo **out, gd_error *err)
{
    gd_repo *repo = gd_calloc(env, 1, sizeof *repo, err);
    if (repo == NULL) {
        return GD_NOMEM;
    }
    repo->env = env;
    repo->owner = env->getpid(env);
    repo->root = -1;
    repo->params = *params;
    pthread_mutex_init(&repo->mutex, NULL);
    pthread_mutex_init(&repo->features_mutex, NULL);
    gd_scratch_list_init(&repo->scratch, env, GD_SCRATCH_SPARE);
    gd_groupmap_init(&repo->full, env);
    gd_groupmap_init(&repo->scopes, env);
    gd_status s = open_parts(repo, path, allow_weak_digest, err);
    if (s != GD_OK) {
        gd_repo_close(repo);
        return s;
    }
    *out = repo;
    return GD_OK;
}

gd_status
gd_repo_attach_filter(gd_repo *repo, const char *path, uint64_t budget,
                      gd_error *err)
{
    gd_filter *filter;
    GD_TRY(gd_filter_open(repo->env, path, repo->params.repository_id,
                          budget, &filter, err));
    gd_hintindex *index;
    gd_status s = gd_hintindex_of_filter(repo->env, filter, &index, err);
    if (s != GD_OK) {
        gd_filter_close(repo->env, filter);
        return s;
    }
    /* Set before any group is read into the filter: a block that is published
     * meanwhile is either read, or its hint goes to this filter. */
    repo->filter = filter;
    repo->index = index;
    return GD_OK;
}

gd_status
gd_repo_attach_store(gd_repo *repo, gd_kv_backend backend, const char *path,
                     const gd_kv_options *options, gd_error *err)
{
    gd_hintindex *index;
    gd_status s =
        gd_hintindex_of_store(repo->env, backend, path, options, &index, err);
    if (s == GD_OK) {
        repo->index = index;
    }
    return s;
}

void
gd_repo_close(gd_repo *repo)
{
    const gd_env *env = repo->env;
    gd_hintindex *index = repo->index;
    if (index != NULL) {
        index->close(index);
    }
    gd_filter_close(env, repo->filter);
    if (repo->spares != NULL) {
        gd_spare_index_close(repo->spares);
    }
    if (repo->segcache != NULL) {
        gd_segcache_close(repo->segcache);
    }
    if (repo->metacache != NULL) {
        gd_metacache_close(repo->metacache);
    }
    if (repo->cache != NULL) {
        gd_fpcache_close(repo->cache);
    }
    if (repo->locks != NULL) {
        gd_locks_close(repo->locks);
    }
    gd_pool_close(env, repo->pool);
    gd_scratch_list_free(&repo->scratch);
    gd_digest_close(env, repo->digest);
    if (repo->root >= 0) {
        env->close(env, repo->root);
    }
    env->release(env, repo->unfinished.numbers);
    gd_groupmap_free(&repo->full);
    gd_groupmap_free(&repo->scopes);
    pthread_mutex_destroy(&repo->mutex);
    pthread_mutex_destroy(&repo->features_mutex);
    env->release(env, repo);
}

gd_status
gd_repo_require_owner(const gd_repo *repo, gd_error *err)
{
    if (repo->env->getpid(repo->env) != repo->owner) {
        return gd_fail(err, GD_CLOSED,
                       "this handle was opened by process %ld, before a fork",
                       (long)repo->owner);
    }
    return GD_OK;
}

uint64_t
gd_repo_kept_open(const gd_repo *repo, unsigned share)
{
    uint64_t count = repo->env->descriptor_limit(repo->env) / share;
    count = count > GD_KEPT_OPEN_MIN ? count : GD_KEPT_OPEN_MIN;
    return count < GD_KEPT_OPEN_MAX ? count : GD_KEPT_OPEN_MAX;
}

gd_status
gd_repo_try_feature(gd_repo *repo, gd_feature feature, unsigned timeout_ms,
                    gd_error *err)
{
    unsigned bit = 1U << feature;
    if ((atomic_load(&repo->used_features) & bit) != 0) {
        return GD_OK;
    }
    /* Two threads would let go of each other's locks. */
    pthread_mutex_lock(&repo->features_mutex);
    gd_status s = gd_features_set(repo->env, repo->root, repo->locks, feature,
                                  timeout_ms, err);
    if (s == GD_OK) {
        atomic_fetch_or(&repo->used_features, bit);
    }
    pthread_mutex_unlock(&repo->features_mutex);
    return s;
}

gd_status
gd_repo_use_feature(gd_repo *repo, gd_feature feature, gd_error *err)
{
    return gd_repo_try_feature(repo, feature, repo->params.lock_timeout_ms,
                               err);
}

gd_freespace
gd_repo_keeps(const gd_repo *repo)
{
    const gd_params *params = &repo->params;
    gd_freespace keep = {.reserve = params->reserve};
    if (gd_features_is_set(repo->env, repo->root, GD_FEATURE_COLD)) {
        keep.moving = gd_fptable_data_start(params->group_slots) +
                      params->group_slots *
                          ((uint64_t)params->block_size + GD_SEGMENT_HEADER);
        /* Writes without a check must not use it up: the catalog, recipes, and
         * writers that check at the same time. */
        keep.moving += keep.moving / 2;
    }
    return keep;
}

gd_status
gd_repo_require_room(const gd_repo *repo, uint64_t bytes, gd_error *err)
{
    return gd_freespace_check(repo->env, repo->root, gd_repo_keeps(repo),
                              bytes, err);
}

gd_status
gd_repo_require_room_to_spare(const gd_repo *repo, uint64_t bytes,
                              gd_error *err)
{
    gd_freespace keep = gd_repo_keeps(repo);
    keep.reserve = keep.reserve == 0 ? 1 : keep.reserve; /* then it compares */
    return gd_freespace_check(repo->env, repo->root, keep, bytes, err);
}

gd_status
gd_repo_require_room_to_move(const gd_repo *repo, uint64_t bytes,
                             gd_error *err)
{
    gd_freespace keep = {.reserve = repo->params.reserve};
    return gd_freespace_check(repo->env, repo->root, keep, bytes, err);
}

/* ---- groups ---- */
