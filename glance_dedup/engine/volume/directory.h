/* SPDX-License-Identifier: Apache-2.0 */
/*
 * directory.h - a volume's directory: its lock, its journals' names, and its
 * end (volumes.rst, V1, V8, V9).
 */
#ifndef GD_VOLUME_DIRECTORY_H
#define GD_VOLUME_DIRECTORY_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/volumehead.h"
#include "engine/repo/repo.h"

/* Takes the owner's lock.  make: makes directory and lock file if they are
 * missing.  *fd is the lock: closing it releases it.  GD_BUSY if another
 * process owns the volume, GD_NOTFOUND if there is none. */
gd_status gd_volume_lock(const gd_env *env, int root, const char *volume,
                         bool make, int *fd, gd_error *err);

/* The numbers of the journals, sorted; the caller releases them. */
gd_status gd_volume_list_journals(const gd_env *env, int root,
                                  const char *volume, uint32_t **numbers,
                                  size_t *count, gd_error *err);
/* A journal that is gone already is fine. */
gd_status gd_volume_unlink_journal(const gd_env *env, int root,
                                   const char *volume, uint32_t number,
                                   gd_error *err);

/* Removes the files of new journals that owners before have left (V2): those
 * that it lists before confirm, unless NULL, finds that the lock was not lost.
 * REQUIRES: the owner's lock; this owner has no such file. */
gd_status gd_volume_remove_new(const gd_env *env, int root,
                               const char *volume,
                               gd_status (*confirm)(void *arg, gd_error *err),
                               void *arg, gd_error *err);

/* Deletes the volume's recipes, except those that are marked, and the base if
 * it has a size (V7).  marks: sorted. */
gd_status gd_volume_delete_recipes(gd_repo *repo, const gd_volume_head *head,
                                   const gd_volume_mark *marks, size_t count,
                                   gd_error *err);
/* Removes the journals, the lock, and the directory.
 * REQUIRES: the owner's lock; the recipes are deleted. */
gd_status gd_volume_remove(const gd_env *env, int root, const char *volume,
                           gd_error *err);
/* Removes a volume's empty directory, which has not even a lock; returns
 * whether there was one.  It needs no owner: a process that creates a volume of
 * the name meanwhile makes the directory again. */
bool gd_volume_remove_empty(const gd_env *env, int root, const char *volume);

#endif
