/* SPDX-License-Identifier: Apache-2.0 */
/*
 * file.h - creates and opens a repository's own files.
 *
 * The repository's directory decides who has access to them: if its group may
 * write to it, the group may also write to everything made below it; otherwise
 * only the owner has access.  The process's umask has no effect.  Opening
 * accepts only regular files and follows no symbolic link: a FIFO, a device or
 * a directory in a file's place is GD_CORRUPT.
 */
#ifndef GD_FILE_H
#define GD_FILE_H

#include "engine/base/env.h"

/* Creates a file and opens it with flags.  GD_EXISTS if it is already there. */
gd_status gd_file_create(const gd_env *env, int root, const char *path,
                         int flags, int *fd, gd_error *err);
gd_status gd_file_open(const gd_env *env, int root, const char *path,
                       int flags, int *fd, gd_error *err);
/* Opens a file to read what others wrote to it last (N13.1): where other hosts may
 * have, beside this host's page cache. */
gd_status gd_file_open_fresh(const gd_env *env, int root, const char *path,
                             int *fd, gd_error *err);
/* Opens a file to be written in place, or creates it.  Refuses a file that has
 * a second name: it may be anybody's. */
gd_status gd_file_open_or_create(const gd_env *env, int root, const char *path,
                                 int *fd, gd_error *err);
/* Makes a directory.  One that already exists is fine. */
gd_status gd_file_create_directory(const gd_env *env, int root,
                                   const char *path,
                                   gd_error *err);
/* GD_CORRUPT if something that is not a directory has the name of one of the
 * repository's directories: a symbolic link in the middle of a path would be
 * followed. */
gd_status gd_file_require_directories(const gd_env *env, int root,
                                      gd_error *err);

#endif
