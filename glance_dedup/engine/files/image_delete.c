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

/* An image that is being deleted. */
typedef struct moving {
    const char *image_id;
    char image_name[GD_NAME_SIZE], spool_name[GD_NAME_SIZE];
    int lock, recipe; /* -1: none */
    gd_status status;
} moving;

static gd_status
link_image(const gd_env *env, int root, moving *m, gd_error *err)
{
    uint8_t id[GD_ID_SIZE];
    GD_TRY(gd_names_image(m->image_id, m->image_name, err));
    GD_TRY(gd_random(env, id, GD_ID_SIZE, err));
    gd_names_spool(GD_SPOOL_DELETED, id, m->spool_name);
    /* N9.3: a link under a name of its own.  A rename between two links of one
     * file would do nothing and report success. */
    int rc = link_entry(env, root, m->image_name, m->spool_name);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot delete image %s: no link "
                                  "%s", m->image_id, m->spool_name)
                  : GD_OK;
}

static gd_status
unlink_image(const gd_env *env, int root, const moving *m, gd_error *err)
{
    GD_TRY(require_entry(env, root, m->image_id, m->spool_name, err));
    int rc = env->unlinkat(env, root, m->image_name); /* N9.5 */
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot delete image %s",
                                  m->image_id)
                  : GD_OK;
}

/* Moves those that are good so far.  Returns the status of one that could not be
 * moved, if there is any.  From the link on an entry stays, whatever fails.  The
 * accounting settles an unfinished delete (N4.6); only it can distinguish one
 * from a finished delete. */
static gd_status
move_all(const gd_env *env, int root, moving *all, size_t count, gd_error *err)
{
    gd_status worst = GD_OK;
    size_t good = 0;
    for (moving *m = all; m < all + count; m++) {
        if (m->status == GD_OK) {
            m->status = link_image(env, root, m, err);
            worst = m->status == GD_OK ? worst : m->status;
            good += m->status == GD_OK;
        }
    }
    if (good == 0) {
        return worst;
    }
    GD_TRY(gd_sync_dir(env, root, GD_DIR_SPOOL, err)); /* N9.4 */
    for (moving *m = all; m < all + count; m++) {
        if (m->status == GD_OK) {
            m->status = unlink_image(env, root, m, err);
            worst = m->status == GD_OK ? worst : m->status;
            good -= m->status != GD_OK;
        }
    }
    if (good > 0) {
        gd_error none;
        gd_status s = gd_sync_dir(env, root, GD_DIR_IMAGES,
                                  worst == GD_OK ? err : &none); /* N9.6 */
        worst = worst == GD_OK ? s : worst;
    }
    return worst;
}

gd_status
gd_image_delete_move(const gd_env *env, int root, const char *image_id,
                     gd_error *err)
{
    moving m = {.image_id = image_id};
    return move_all(env, root, &m, 1, err);
}

/* Locks the image, and opens its recipe.  upload_id as for gd_image_delete. */
static gd_status
take_image(const gd_env *env, int root, const gd_params *params,
           unsigned timeout_ms, const uint8_t *upload_id, moving *m,
           gd_error *err)
{
    gd_recipe recipe = {.fd = -1};
    m->lock = m->recipe = -1;
    GD_TRY(gd_locks_lock_image(env, root, m->image_id, timeout_ms, &m->lock,
                               err)); /* N9.1 */
    GD_TRY(gd_second_name_finish_image(env, root, params, m->image_id, err));
    /* N9.2.  Without an upload, an image that cannot be read goes, too. */
    gd_status s =
        upload_id == NULL
            ? gd_spool_open_image(env, root, params, m->image_id, &recipe.fd,
                                  err)
            : gd_spool_open_recipe(env, root, params, m->image_id, upload_id,
                                   &recipe, err);
    m->recipe = s == GD_OK ? recipe.fd : -1;
    return s;
}

static void
release_image(const gd_env *env, const moving *m)
{
    if (m->recipe >= 0) {
        env->close(env, m->recipe);
    }
    if (m->lock >= 0) {
        gd_locks_unlock_image(env, m->lock); /* N9.7 */
    }
}

gd_status
gd_image_delete(const gd_env *env, int root, const gd_params *params,
                const char *image_id, const uint8_t *upload_id, gd_error *err)
{
    moving m = {.image_id = image_id};
    m.status = take_image(env, root, params, params->lock_timeout_ms,
                          upload_id, &m, err);
    gd_status s =
        m.status == GD_OK ? move_all(env, root, &m, 1, err) : m.status;
    release_image(env, &m);
    return s;
}

gd_status
gd_image_delete_several(const gd_env *env, int root, const gd_params *params,
                        const char (*ids)[GD_IMAGE_ID_MAX + 1], size_t count,
                        gd_error *err)
{
    moving *all = gd_calloc(env, count + 1, sizeof *all, err);
    if (all == NULL) {
        return GD_NOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        all[i].image_id = ids[i];
        /* N9.1: it waits for no lock, since it has others. */
        all[i].status =
            take_image(env, root, params, 0, NULL, &all[i], NULL);
    }
    gd_status s = move_all(env, root, all, count, err);
    for (size_t i = 0; i < count; i++) {
        release_image(env, &all[i]);
    }
    for (size_t i = 0; i < count; i++) {
        /* It may have been in use, or too many files were open. */
        if (all[i].status != GD_OK && all[i].status != GD_NOTFOUND &&
            (all[i].lock < 0 || all[i].recipe < 0)) {
            (void)gd_image_delete(env, root, params, ids[i], NULL, NULL);
        }
    }
    env->release(env, all);
    return s;
}
