/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spool.h - the spool: recipes in flight, and the steps that commit and open an
 * image (N7.1, N8, N11; rule numbers in spool.c).  image_delete.h deletes one.
 *
 * There is one commit point (I3): the link to images/<id>.  Before it the image
 * does not exist; after it, it does.  All functions are thread-safe.
 */
#ifndef GD_SPOOL_H
#define GD_SPOOL_H

#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/names.h"
#include "engine/format/params.h"
#include "engine/format/recipe.h"

/* A spool file that this process made.  Its writer's lock byte is held while fd
 * is open. */
typedef struct gd_spool_writer {
    int fd;
    uint8_t id[GD_ID_SIZE];
    char name[GD_NAME_SIZE];
} gd_spool_writer;

gd_status gd_spool_create(const gd_env *env, int root, gd_spool_kind kind,
                          gd_spool_writer *file, gd_error *err);

/* A commit syncs the recipe and the spool directory (N8.2), links the recipe,
 * and syncs the images' directory (N8.3).  Several images may take each step
 * together: a sync of a directory serves all that was done before it. */

/* Makes the complete recipe durable. */
gd_status gd_spool_sync_recipe(const gd_env *env, const gd_spool_writer *file,
                               const char *image_id, gd_error *err);
/* Makes the recipe the image's.  *linked is set in any case: whether the image
 * may exist now.  From then on the image stays (N8.6).  GD_EXISTS: another image
 * took the id first. */
gd_status gd_spool_link(const gd_env *env, int root,
                        const gd_spool_writer *file, const char *image_id,
                        bool *linked, gd_error *err);

/* Unlinks the spool file and releases it.  REQUIRES: a recipe was never linked
 * to images/ (N8.5). */
void gd_spool_discard(const gd_env *env, int root, gd_spool_writer *file);
/* Releases the writer's lock.  The file stays for the accounting. */
void gd_spool_close(const gd_env *env, gd_spool_writer *file);

/* Opens images/<id> and holds its users' lock byte shared.  Makes sure that the
 * name still leads to the file (N11).  GD_NOTFOUND if there is none. */
gd_status gd_spool_open_image(const gd_env *env, int root,
                              const gd_params *params, const char *image_id,
                              int *fd, gd_error *err);
/* The same, and reads the recipe's header, which must be of this upload; NULL:
 * of any.  After an error recipe->fd is -1; otherwise the caller closes it. */
gd_status gd_spool_open_recipe(const gd_env *env, int root,
                               const gd_params *params, const char *image_id,
                               const uint8_t *upload_id, gd_recipe *recipe,
                               gd_error *err);
/* Returns whether any process has the image open; true also if that cannot be
 * found out.  It only queries the lock: the byte is never taken on an image
 * (N3). */
bool gd_spool_is_read(const gd_env *env, int root, const char *image_id);

#endif
