/* SPDX-License-Identifier: Apache-2.0 */
/*
 * secondname.c - see secondname.h.
 */
#include "engine/files/secondname.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/listing.h"
#include "engine/files/file.h"
#include "engine/files/locks.h"

gd_status
gd_second_name_make(const gd_env *env, int root, const gd_params *params,
                    const char *name, gd_error *err)
{
    char second[GD_NAME_SIZE];
    if (!params->shared) {
        return GD_OK;
    }
    gd_names_second(name, second);
    int rc = env->linkat(env, root, name, second); /* N14.1 */
    /* A network file system may have repeated the request, and nobody else
     * makes this name. */
    return rc < 0 && rc != -EEXIST
               ? gd_fail_errno(err, -rc, "cannot link %s to %s", name, second)
               : GD_OK;
}

void
gd_second_name_remove(const gd_env *env, int root, const gd_params *params,
                      const char *name)
{
    char second[GD_NAME_SIZE];
    if (params->shared) {
        gd_names_second(name, second);
        (void)env->unlinkat(env, root, second);
    }
}

/* Finds out from the server whether there is a file of that name. */
static gd_status
find_name(const gd_env *env, int root, const char *name, bool *found,
          gd_error *err)
{
    struct stat st;
    int rc = env->renew(env, root, name);
    if (rc >= 0) {
        rc = env->fstatat(env, root, name, &st);
    }
    *found = rc >= 0;
    return rc < 0 && rc != -ENOENT
               ? gd_fail_errno(err, -rc, "cannot look for %s", name)
               : GD_OK;
}

gd_status
gd_second_name_finish(const gd_env *env, int root, const gd_params *params,
                      const char *name, gd_error *err)
{
    char second[GD_NAME_SIZE];
    bool present, left;
    if (!params->shared) {
        return GD_OK;
    }
    gd_names_second(name, second);
    gd_status s = find_name(env, root, second, &left, err);
    if (s != GD_OK || !left) {
        return s;
    }
    s = find_name(env, root, name, &present, err);
    if (s != GD_OK) {
        return s;
    }
    int rc = present ? env->unlinkat(env, root, second)
                     : env->renameat(env, root, second, name);
    return rc < 0 && rc != -ENOENT
               ? gd_fail_errno(err, -rc, "cannot settle %s, which was being "
                               "replaced when a host died", name)
               : GD_OK;
}

gd_status
gd_second_name_finish_image(const gd_env *env, int root,
                            const gd_params *params,
                            const char *image_id, gd_error *err)
{
    char name[GD_NAME_SIZE];
    GD_TRY(gd_names_image(image_id, name, err));
    return gd_second_name_finish(env, root, params, name, err);
}

typedef struct image_name {
    char id[GD_IMAGE_ID_MAX + 1];
} image_name;

/* Of second names. */
static bool
parse_second_name(const char *base, void *item)
{
    image_name *image = item;
    char name[GD_NAME_SIZE];
    size_t length = strnlen(base, sizeof image->id + 1);
    if (length < 2 || length > sizeof image->id || base[length - 1] != '~') {
        return false;
    }
    memcpy(image->id, base, length - 1);
    return gd_names_image(image->id, name, NULL) == GD_OK;
}

static gd_status
lock_and_settle(const gd_env *env, int root, const gd_params *params,
                const char *image_id, gd_error *err)
{
    int lock;
    gd_status s = gd_locks_lock_image(env, root, image_id,
                                      params->lock_timeout_ms,
                                      &lock, err);
    if (s == GD_OK) {
        s = gd_second_name_finish_image(env, root, params, image_id, err);
        gd_locks_unlock_image(env, lock);
    }
    return s;
}

gd_status
gd_second_name_finish_images(const gd_env *env, int root,
                             const gd_params *params,
                             gd_error *err)
{
    static const gd_listing listing = {
        sizeof(image_name), "the images whose names are unsettled",
        parse_second_name, NULL};
    void *items;
    size_t count;
    if (!params->shared) {
        return GD_OK;
    }
    gd_status s = gd_list(env, root, GD_DIR_IMAGES, &listing, &items, &count,
                          err);
    const image_name *images = items;
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        s = lock_and_settle(env, root, params, images[i].id, err);
    }
    env->release(env, items);
    return s;
}

gd_status
gd_second_name_open_any(const gd_env *env, int root, const gd_params *params,
                        const char *name, int flags, char where[GD_NAME_SIZE],
                        int *fd, gd_error *err)
{
    snprintf(where, GD_NAME_SIZE, "%s", name);
    gd_status s = gd_file_open(env, root, where, flags, fd, err);
    if (s == GD_NOTFOUND && params->shared) {
        gd_names_second(name, where);
        s = gd_file_open(env, root, where, flags, fd, err);
    }
    if (s == GD_NOTFOUND && params->shared) {
        snprintf(where, GD_NAME_SIZE, "%s", name);
        s = gd_file_open(env, root, where, flags, fd, err);
    }
    return s;
}
