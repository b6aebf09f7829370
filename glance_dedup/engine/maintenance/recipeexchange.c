/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipeexchange.c - see recipeexchange.h.
 */
#include "engine/maintenance/recipeexchange.h"

#include "engine/files/secondname.h"

/* For the image lock: its holder soon ends, or deletes. */
enum { LOCK_MS = 100 };

static gd_status
link_unique(const gd_repo *repo, const char *from, gd_spool_kind kind,
            char name[GD_NAME_SIZE], gd_error *err)
{
    const gd_env *env = repo->env;
    uint8_t id[GD_ID_SIZE];
    GD_TRY(gd_random(env, id, GD_ID_SIZE, err));
    gd_names_spool(kind, id, name);
    int rc = env->linkat(env, repo->root, from, name);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot link %s to %s", from, name)
                  : GD_OK;
}

/* N10.6.  M keeps its own name, too, by which the accounting knows that M is
 * counted.  On a network file system that repeats requests, a rename may
 * succeed and report an error.  So what the name leads to decides. */
static gd_status
rename_over(const gd_repo *repo, const gd_recipe *old,
            const gd_spool_writer *m, bool *done, gd_error *err)
{
    const gd_env *env = repo->env;
    char x[GD_NAME_SIZE];
    GD_TRY(link_unique(repo, m->name, GD_SPOOL_EXCHANGE, x, err));
    GD_TRY(gd_second_name_make(env, repo->root, &repo->params, old->name,
                               err));
    int rc = env->renameat(env, repo->root, x, old->name);
    *done = rc >= 0 || gd_same_file(env, m->fd, repo->root, old->name);
    gd_second_name_remove(env, repo->root, &repo->params, old->name);
    if (!*done) {
        (void)env->unlinkat(env, repo->root, x);
        return gd_fail_errno(err, -rc, "cannot put %s in the place of %s",
                             m->name, old->name);
    }
    return GD_OK;
}

/* REQUIRES: the image lock. */
static gd_status
exchange_locked(const gd_repo *repo, const gd_recipe *old,
                const gd_spool_writer *m, bool *done, gd_error *err)
{
    char o[GD_NAME_SIZE];
    GD_TRY(gd_second_name_finish(repo->env, repo->root, &repo->params,
                                 old->name, err)); /* N14.3 */
    /* N10.4: otherwise a deleted image would come back (I11), or old content
     * under a new upload of the same id. */
    if (!gd_same_file(repo->env, old->fd, repo->root, old->name)) {
        return GD_OK;
    }
    /* N10.5: from here on the entry stays, whatever fails.  The accounting can
     * distinguish an unfinished merge from a finished one (N4.6). */
    GD_TRY(link_unique(repo, old->name, GD_SPOOL_REPLACED, o, err));
    GD_TRY(gd_sync_dir(repo->env, repo->root, GD_DIR_SPOOL, err));
    GD_TRY(rename_over(repo, old, m, done, err)); /* N10.6 */
    return gd_sync_dir(repo->env, repo->root, GD_DIR_IMAGES, err); /* N10.7 */
}

gd_status
gd_recipe_exchange(gd_repo *repo, const gd_recipe *old,
                   const gd_spool_writer *m, bool *done, gd_error *err)
{
    int lock;
    *done = false;
    GD_TRY(gd_repo_require_owner(repo, err));
    gd_status s = gd_locks_lock_image(repo->env, repo->root,
                                      old->header.image_id, LOCK_MS, &lock,
                                      err); /* N10.4: only tried */
    if (s == GD_BUSY) {
        return GD_OK;
    }
    if (s == GD_OK) {
        s = exchange_locked(repo, old, m, done, err);
        gd_locks_unlock_image(repo->env, lock); /* N10.7 */
    }
    return s;
}
