/* SPDX-License-Identifier: Apache-2.0 */
/*
 * file.h - making and opening a repository's own files.
 *
 * Whose they are, the repository's directory says: if it lets its group write,
 * whatever is made below it does, too; else it is its owner's alone.  The
 * process's umask has no say.  What is opened is an ordinary file, and no
 * symbolic link is followed to it: a FIFO, a device or a directory in a file's
 * place is GD_CORRUPT.
 */
#ifndef GD_FILE_H
#define GD_FILE_H

#include "engine/base/env.h"

/* Makes a file that was not there, open as flags say; else GD_EXISTS. */
gd_status gd_file_create(const gd_env *env, int root, const char *path,
                         int flags, int *fd, gd_error *err);
gd_status gd_file_open(const gd_env *env, int root, const char *path,
                       int flags, int *fd, gd_error *err);
/* Opens a file to be written in place, or makes it.  One that has another name
 * besides is refused: it may be anybody's. */
gd_status gd_file_open_or_create(const gd_env *env, int root, const char *path,
                                 int *fd, gd_error *err);
/* Makes a directory; one that is there already is as good. */
gd_status gd_directory_create(const gd_env *env, int root, const char *path,
                              gd_error *err);
/* GD_CORRUPT if one of the repository's directories is there, but is none: a
 * symbolic link in a path's middle would be followed. */
gd_status gd_directories_check(const gd_env *env, int root, gd_error *err);

#endif
