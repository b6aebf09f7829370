/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spool.c - see spool.h.
 *
 * The order of the steps is the protocol.  Each line that must not move names
 * the rule that it serves.
 */
#include "engine/files/spool.h"

#include <errno.h>
#include <string.h>

#include "engine/files/file.h"
#include "engine/files/locks.h"
#include "engine/files/secondname.h"

enum { TRIES = 100 };

static gd_status
new_name(const gd_env *env, gd_spool_kind kind, uint8_t id[GD_ID_SIZE],
         char name[GD_NAME_SIZE], gd_error *err)
{
    GD_TRY(gd_random(env, id, GD_ID_SIZE, err));
    gd_names_spool(kind, id, name);
    return GD_OK;
}

/* Takes byte 0 if the name still leads to the file (N7.1).  Sets *taken if it
 * does. */
static gd_status
take_file(const gd_env *env, int root, const gd_spool_writer *file,
          bool *taken,
          gd_error *err)
{
    *taken = false;
    int rc = env->lock(env, file->fd, GD_BYTE_WRITER, F_RDLCK);
    if (rc == -EAGAIN) {
        return GD_OK;
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot lock %s (does the file "
                                  "system support OFD locks?)", file->name)
                  : gd_find_same(env, file->fd, root, file->name, taken, err);
}

/* Creates a file and takes it, under a name of its own. */
static gd_status
create_once(const gd_env *env, int root, gd_spool_kind kind,
            gd_spool_writer *file, bool *taken, gd_error *err)
{
    *taken = false;
    GD_TRY(new_name(env, kind, file->id, file->name, err));
    GD_TRY(gd_file_create(env, root, file->name, O_RDWR, &file->fd, err));
    gd_status s = take_file(env, root, file, taken, err);
    if (s == GD_OK && *taken) {
        return GD_OK;
    }
    env->close(env, file->fd);
    file->fd = -1;
    if (s != GD_OK) {
        (void)env->unlinkat(env, root, file->name);
    }
    return s;
}

gd_status
gd_spool_create(const gd_env *env, int root, gd_spool_kind kind,
                gd_spool_writer *file, gd_error *err)
{
    gd_error none;
    gd_status s = GD_OK;
    err = err == NULL ? &none : err;
    for (int i = 0; i < TRIES; i++) {
        /* N7.1: between creating and locking, a maintainer may have judged that
         * the file belongs to a dead transaction.  If it is on another host, any
         * step may then report that there is no such file. */
        bool taken;
        s = create_once(env, root, kind, file, &taken, err);
        if (taken ||
            (s != GD_OK && s != GD_EXISTS && !gd_is_forgotten(s, err))) {
            return s;
        }
    }
    return gd_is_forgotten(s, err)
               ? s
               : gd_fail(err, GD_BUSY, "no spool file could be had in %d tries",
                         TRIES);
}

/* A link can succeed and yet report an error: a network file system may repeat
 * a request and answer EEXIST.  So the file that the name leads to decides.  If
 * that cannot be found out, nothing is certain.  An image that exists must not
 * lose its spool entry (N8.5), so *linked is then true, and the accounting will
 * find out. */
static gd_status
link_image(const gd_env *env, int root, const gd_spool_writer *file,
           const char *image_id, const char *image_name, bool *linked,
           gd_error *err)
{
    struct stat named;
    int rc = env->linkat(env, root, file->name, image_name);
    bool ours = rc >= 0 || gd_same_file(env, file->fd, root, image_name);
    *linked = ours;
    if (ours) {
        return GD_OK;
    }
    int found = env->renew(env, root, image_name);
    if (found >= 0) {
        found = env->fstatat(env, root, image_name, &named);
    }
    *linked = found < 0 && found != -ENOENT;
    if (rc != -EEXIST) {
        return gd_fail_errno(err, -rc, "cannot commit image %s", image_id);
    }
    return *linked ? gd_fail_errno(err, -found, "cannot find out whether image "
                                   "%s was committed", image_id)
                   : gd_fail(err, GD_EXISTS, "image %s exists already",
                             image_id);
}

gd_status
gd_spool_sync_recipe(const gd_env *env, const gd_spool_writer *file,
                     const char *image_id, gd_error *err)
{
    int rc = env->fsync(env, file->fd); /* N8.2 */
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot fsync the recipe of image "
                                  "%s", image_id)
                  : GD_OK;
}

gd_status
gd_spool_link(const gd_env *env, int root, const gd_spool_writer *file,
              const char *image_id, bool *linked, gd_error *err)
{
    char image_name[GD_NAME_SIZE];
    *linked = false;
    GD_TRY(gd_names_image(image_id, image_name, err));
    return link_image(env, root, file, image_id, image_name, linked, err);
}

void
gd_spool_close(const gd_env *env, gd_spool_writer *file)
{
    if (file->fd >= 0) {
        env->close(env, file->fd);
        file->fd = -1;
    }
}

void
gd_spool_discard(const gd_env *env, int root, gd_spool_writer *file)
{
    if (file->fd >= 0) {
        (void)env->unlinkat(env, root, file->name);
        gd_spool_close(env, file);
    }
}

gd_status
gd_spool_open_image(const gd_env *env, int root, const gd_params *params,
                    const char *image_id, int *fd, gd_error *err)
{
    char name[GD_NAME_SIZE], where[GD_NAME_SIZE];
    int flags = params->shared ? O_RDONLY | O_DIRECT : O_RDONLY; /* N13.1 */
    gd_status s = gd_names_image(image_id, name, err);
    for (int i = 0; s == GD_OK && i < TRIES; i++) {
        s = gd_second_name_open_any(env, root, params, name, flags, where, fd,
                                    err);
        if (s == GD_NOTFOUND) {
            return gd_fail(err, GD_NOTFOUND, "there is no image %s", image_id);
        }
        if (s != GD_OK) {
            return s;
        }
        /* N11: the maintainer refuses this byte only on an inode that is no
         * longer the image's. */
        int rc = env->lock(env, *fd, GD_BYTE_USERS, F_RDLCK);
        bool same = false;
        s = rc >= 0 ? gd_find_same(env, *fd, root, where, &same, err)
            : rc == -EAGAIN ? GD_OK
                            : gd_fail_errno(err, -rc, "cannot lock %s", where);
        if (same) {
            return GD_OK;
        }
        env->close(env, *fd);
        *fd = -1;
        if (s != GD_OK) {
            return s;
        }
        env->sleep_ms(env, i < 10 ? 0 : 5);
    }
    if (s != GD_OK) {
        return s;
    }
    return gd_fail(err, GD_BUSY, "image %s changed %d times while it was "
                   "being opened", image_id, TRIES);
}

static gd_status
open_recipe_once(const gd_env *env, int root, const gd_params *params,
                 const char *image_id, const uint8_t *upload_id,
                 gd_recipe *recipe, gd_error *err)
{
    char name[GD_NAME_SIZE];
    int fd;
    recipe->fd = -1;
    GD_TRY(gd_names_image(image_id, name, err));
    GD_TRY(gd_spool_open_image(env, root, params, image_id, &fd, err));
    gd_status s = gd_recipe_open(env, fd, name, params, image_id, recipe,
                                 err);
    if (s == GD_OK && upload_id != NULL &&
        memcmp(recipe->header.upload_id, upload_id, GD_ID_SIZE) != 0) {
        s = gd_fail(err, GD_NOTFOUND,
                    "image %s is of another upload than the one named",
                    image_id);
    }
    if (s != GD_OK) {
        env->close(env, fd);
        recipe->fd = -1;
    }
    return s;
}

/* Another host's merge may replace the recipe between its opening and its
 * reading. */
gd_status
gd_spool_open_recipe(const gd_env *env, int root, const gd_params *params,
                     const char *image_id, const uint8_t *upload_id,
                     gd_recipe *recipe, gd_error *err)
{
    gd_error none;
    gd_status s;
    unsigned tries = 0;
    err = err == NULL ? &none : err;
    do {
        s = open_recipe_once(env, root, params, image_id, upload_id, recipe,
                             err);
    } while (gd_is_forgotten(s, err) && ++tries < TRIES);
    return s;
}

bool
gd_spool_is_read(const gd_env *env, int root, const char *image_id)
{
    char name[GD_NAME_SIZE];
    if (gd_names_image(image_id, name, NULL) != GD_OK) {
        return false;
    }
    int fd = env->openat(env, root, name,
                         O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0);
    if (fd < 0) {
        /* Nobody reads a file that is not a recipe.  A program that has a lease
         * on it (Samba, knfsd) has it open; we do not wait for that program. */
        return fd != -ENOENT && fd != -ELOOP && fd != -ENXIO;
    }
    int rc = env->is_locked(env, fd, GD_BYTE_USERS);
    env->close(env, fd);
    return rc != 0;
}
