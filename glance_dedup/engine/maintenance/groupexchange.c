/* SPDX-License-Identifier: Apache-2.0 */
/*
 * groupexchange.c - see groupexchange.h.
 */
#include "engine/maintenance/groupexchange.h"

#include <errno.h>

#include "engine/files/secondname.h"

static gd_status
rename_file(gd_repo *repo, const gd_spool_writer *file, const char *name,
            gd_error *err)
{
    const gd_env *env = repo->env;
    gd_status s =
        gd_second_name_make(env, repo->root, &repo->params, name, err);
    if (s != GD_OK) {
        return s;
    }
    int rc = env->renameat(env, repo->root, file->name, name);
    /* A network file system may have repeated the request. */
    bool done = rc == 0 || gd_same_file(env, file->fd, repo->root, name);
    gd_second_name_remove(env, repo->root, &repo->params, name);
    if (done) {
        return GD_OK;
    }
    if (rc == -ENOENT) {
        return gd_fail(err, GD_IO, "%s is gone: this process was cut off, "
                       "and lost its locks", file->name);
    }
    return gd_fail_errno(err, -rc, "cannot put %s in the place of %s",
                         file->name, name);
}

/* From the rename on, the group has the new file.  It is not written to any
 * more: this process may have been suspended since, and have lost its locks. */
static gd_status
exchange(gd_owned_group *owned, gd_spool_writer *file, uint64_t inode,
         const gd_group *target, gd_entry **entries, const gd_published *record, gd_error *err)
{
    gd_leased_group *leased = owned->leased;
    gd_repo *repo = leased->repo;
    const gd_env *env = repo->env;
    gd_group *group = leased->group;
    GD_TRY(rename_file(repo, file, group->name, err));
    if (group->content != group->fd) {
        env->close(env, group->content);
    }
    env->close(env, group->fd);
    group->fd = group->content = file->fd; /* this process wrote all of it */
    group->inode = inode;
    group->bounds = target->bounds;
    group->is_cold = target->is_cold;
    group->object = target->object;
    file->fd = -1;
    env->release(env, leased->entries);
    leased->entries = *entries;
    *entries = NULL;
    leased->published = *record;
    owned->settled = true;
    gd_status s = gd_sync_dir(env, repo->root, GD_DIR_GROUPS, err);
    if (s == GD_OK) {
        leased->published.flags &= ~(uint32_t)GD_GROUP_UNSETTLED;
    }
    owned->failed = s != GD_OK;
    gd_fpcache_drop_removed(repo->cache);
    return s;
}

gd_status
gd_group_exchange(gd_owned_group *owned, gd_spool_writer *file,
                  const gd_group *target, gd_entry **entries, const gd_published *record,
                  gd_error *err)
{
    const gd_env *env = owned->leased->repo->env;
    struct stat st;
    GD_TRY(gd_owned_group_require_usable(owned, err));
    int rc = env->fstat(env, file->fd, &st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", file->name);
    }
    GD_TRY(gd_owned_group_keep_writers_out(owned, err));
    return exchange(owned, file, st.st_ino, target, entries, record, err);
}
