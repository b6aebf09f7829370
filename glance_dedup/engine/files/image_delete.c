/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image_delete.c - see image_delete.h.
 *
 * The order of the steps is the protocol.  Each line that must not move names
 * the rule that it serves.
 */
#include "engine/files/image_delete.h"

#include <errno.h>

#include "engine/files/file.h"
#include "engine/files/freespace.h"
#include "engine/files/locks.h"
#include "engine/files/secondname.h"
#include "engine/files/spool.h"

/* A name may need a block of the directory or, on a tmpfs, an inode.  If there
 * is none, give up what is reserved for the catalog: otherwise nothing could
 * ever free space again. */
static int
link_entry(const gd_env *env, int root, const char *from, const char *to)
{
    unsigned given = 0;
    int rc = env->linkat(env, root, from, to);
    while ((rc == -ENOSPC || rc == -EDQUOT) &&
           gd_freespace_give_up(env, root, &given)) {
        rc = env->linkat(env, root, from, to);
    }
    return rc;
}

/* If the server was out of reach during the fsync, it may have dropped this
 * host's locks, and a maintainer may have settled the entry (N4.6).  Without
 * the entry, the recipe would be lost to the accounts. */
static gd_status
require_entry(const gd_env *env, int root, const char *image_id,
              const char *spool_name, gd_error *err)
{
    struct stat st;
    int rc = env->renew(env, root, GD_DIR_SPOOL);
    if (rc >= 0) {
        rc = env->fstatat(env, root, spool_name, &st);
    }
    if (rc == -ENOENT) {
        return gd_fail(err, GD_BUSY, "image %s was not deleted: this process "
                       "was cut off, and lost its locks; delete it again",
                       image_id);
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot delete image %s: "
                                  "cannot look at %s", image_id, spool_name)
                  : GD_OK;
}

gd_status
gd_image_delete_move(const gd_env *env, int root, const char *image_id,
                     gd_error *err)
{
    uint8_t id[GD_ID_SIZE];
    char image_name[GD_NAME_SIZE], spool_name[GD_NAME_SIZE];
    GD_TRY(gd_names_image(image_id, image_name, err));
    GD_TRY(gd_random(env, id, GD_ID_SIZE, err));
    gd_names_spool(GD_SPOOL_DELETED, id, spool_name);
    /* N9.3: a link under a name of its own.  A rename between two links of one
     * file would do nothing and report success. */
    int rc = link_entry(env, root, image_name, spool_name);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot delete image %s: no link %s",
                             image_id, spool_name);
    }
    /* From here on the entry stays, whatever fails.  The accounting settles an
     * unfinished delete (N4.6); only it can distinguish one from a finished
     * delete. */
    GD_TRY(gd_sync_dir(env, root, GD_DIR_SPOOL, err)); /* N9.4 */
    GD_TRY(require_entry(env, root, image_id, spool_name, err));
    rc = env->unlinkat(env, root, image_name); /* N9.5 */
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot delete image %s", image_id);
    }
    return gd_sync_dir(env, root, GD_DIR_IMAGES, err); /* N9.6 */
}

gd_status
gd_image_delete(const gd_env *env, int root, const gd_params *params,
                const char *image_id, const uint8_t *upload_id, gd_error *err)
{
    int lock;
    gd_recipe recipe;
    GD_TRY(gd_locks_lock_image(env, root, image_id, params->lock_timeout_ms,
                               &lock, err)); /* N9.1 */
    gd_status s = gd_second_name_finish_image(env, root, params, image_id,
                                              err);
    /* N9.2.  Without an upload, an image that cannot be read goes, too. */
    if (s == GD_OK) {
        s = upload_id == NULL
                ? gd_spool_open_image(env, root, params, image_id, &recipe.fd,
                                      err)
                : gd_spool_open_recipe(env, root, params, image_id, upload_id,
                                       &recipe, err);
    }
    if (s == GD_OK) {
        s = gd_image_delete_move(env, root, image_id, err);
        env->close(env, recipe.fd);
    }
    gd_locks_unlock_image(env, lock); /* N9.7 */
    return s;
}
