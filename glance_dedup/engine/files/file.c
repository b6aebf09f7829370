/* SPDX-License-Identifier: Apache-2.0 */
/*
 * file.c - see file.h.
 */
#include "engine/files/file.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "engine/format/names.h"

enum {
    MODE_BITS = 07777,
    OPEN_TRIES = 10, /* while others create and remove the file */
};

/* The mode of a file made below root. */
static gd_status
file_mode(const gd_env *env, int root, mode_t *mode, gd_error *err)
{
    struct stat st;
    *mode = 0600;
    int rc = env->fstat(env, root, &st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat the repository's "
                             "directory");
    }
    if ((st.st_mode & S_IWGRP) != 0) {
        *mode = 0660;
    }
    return GD_OK;
}

/* Uses the descriptor, so that it changes the very file that was made. */
static gd_status
set_mode(const gd_env *env, int fd, const char *path, mode_t mode,
         gd_error *err)
{
    struct stat st;
    int rc = env->fstat(env, fd, &st);
    if (rc >= 0 && (st.st_mode & MODE_BITS) != mode) {
        rc = env->fchmod(env, fd, mode);
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot give %s the mode %04o",
                                  path, (unsigned)mode)
                  : GD_OK;
}

static gd_status
require_directory(const gd_env *env, int root, const char *path, gd_error *err)
{
    struct stat st;
    if (env->fstatat(env, root, path, &st) == 0 && !S_ISDIR(st.st_mode)) {
        return gd_fail(err, GD_CORRUPT, "%s is not a directory%s", path,
                       S_ISLNK(st.st_mode)
                           ? ", but a symbolic link, which is not followed"
                           : "");
    }
    return GD_OK;
}

gd_status
gd_file_require_directories(const gd_env *env, int root, gd_error *err)
{
    static const char *const names[] = {
        GD_DIR_GROUPS, GD_DIR_IMAGES, GD_DIR_SPOOL, GD_DIR_LOCKS,
        GD_DIR_QUARANTINE, GD_DIR_SPARES, GD_DIR_VOLUMES, GD_DIR_INDEX,
        GD_DIR_FEATURES};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        GD_TRY(require_directory(env, root, names[i], err));
    }
    return GD_OK;
}

static gd_status
require_parent(const gd_env *env, int root, const char *path, gd_error *err)
{
    char parent[GD_NAME_SIZE];
    const char *slash = strchr(path, '/');
    if (slash == NULL) {
        return GD_OK;
    }
    snprintf(parent, sizeof parent, "%.*s", (int)(slash - path), path);
    return require_directory(env, root, parent, err);
}

gd_status
gd_file_create(const gd_env *env, int root, const char *path, int flags,
               int *fd, gd_error *err)
{
    mode_t mode;
    *fd = -1;
    GD_TRY(file_mode(env, root, &mode, err));
    GD_TRY(require_parent(env, root, path, err));
    GD_TRY(gd_open(env, root, path, flags | O_CREAT | O_EXCL, mode, fd, err));
    gd_status s = set_mode(env, *fd, path, mode, err);
    if (s != GD_OK) {
        (void)env->unlinkat(env, root, path);
        env->close(env, *fd);
        *fd = -1;
    }
    return s;
}

/* alone: the file must have no other name. */
static gd_status
open_checked(const gd_env *env, int root, const char *path, int flags,
             bool alone, int *fd, gd_error *err)
{
    struct stat st;
    gd_status s = gd_open(env, root, path, flags, 0, fd, err);
    if (s != GD_OK) {
        return s;
    }
    int rc = env->fstat(env, *fd, &st);
    if (rc < 0) {
        s = gd_fail_errno(err, -rc, "cannot stat %s", path);
    } else if (!S_ISREG(st.st_mode)) {
        s = gd_fail(err, GD_CORRUPT, "%s is not an ordinary file", path);
    } else if (alone && st.st_nlink > 1) {
        s = gd_fail(err, GD_CORRUPT, "%s is a file that has another name "
                    "besides, so it may be somebody else's", path);
    }
    if (s != GD_OK) {
        env->close(env, *fd);
        *fd = -1;
    }
    return s;
}

gd_status
gd_file_open(const gd_env *env, int root, const char *path, int flags, int *fd,
             gd_error *err)
{
    return open_checked(env, root, path, flags, false, fd, err);
}

gd_status
gd_file_open_fresh(const gd_env *env, int root, const char *path, int *fd,
                   gd_error *err)
{
    int shared = env->is_shared(env, root);
    *fd = -1;
    return shared < 0
               ? gd_fail_errno(err, -shared, "cannot find out which file "
                               "system %s is on", path)
               : gd_file_open(env, root, path,
                              shared > 0 ? O_RDONLY | O_DIRECT : O_RDONLY, fd,
                              err);
}

gd_status
gd_file_open_or_create(const gd_env *env, int root, const char *path, int *fd,
                       gd_error *err)
{
    gd_status s = GD_EXISTS;
    for (int i = 0; s == GD_EXISTS && i < OPEN_TRIES; i++) {
        s = open_checked(env, root, path, O_RDWR, true, fd, err);
        if (s == GD_NOTFOUND) {
            s = gd_file_create(env, root, path, O_RDWR, fd, err);
        }
    }
    return s;
}

gd_status
gd_file_create_directory(const gd_env *env, int root, const char *path,
                         gd_error *err)
{
    int fd;
    mode_t mode;
    GD_TRY(file_mode(env, root, &mode, err));
    /* Whoever may read the directory may enter it, and files made in it get its
     * group.  The setgid bit comes from the parent: setting it may be
     * forbidden. */
    mode = mode == 0660 ? 02770 : 0700;
    int rc = env->mkdirat(env, root, path, mode & 0777);
    if (rc == -EEXIST) {
        return require_directory(env, root, path, err);
    }
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot make %s", path);
    }
    gd_status s = gd_open(env, root, path, O_RDONLY | O_DIRECTORY, 0, &fd,
                          err);
    if (s == GD_OK) {
        s = set_mode(env, fd, path, mode, err);
        env->close(env, fd);
    }
    return s == GD_OK ? gd_sync_dir(env, root, ".", err) : s;
}
