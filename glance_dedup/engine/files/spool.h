/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spool.h - the spool: recipes in flight, and the steps by which an image
 * comes into being and goes (N7.1, N8, N9; rule numbers in spool.c).
 *
 * One commit point (I3): the link to images/<id>.  Before it the image does not
 * exist, after it it does.  All functions are thread-safe.
 */
#ifndef GD_SPOOL_H
#define GD_SPOOL_H

#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/names.h"
#include "engine/format/params.h"

/* A spool file of our own making, with its writer's lock byte held for as long
 * as fd is open. */
typedef struct gd_spool_file {
    int fd;
    uint8_t id[GD_ID_SIZE];
    char name[GD_NAME_SIZE];
} gd_spool_file;

gd_status gd_spool_create(const gd_env *env, int root, gd_spool_kind kind,
                          gd_spool_file *file, gd_error *err);

/* Makes the complete recipe in file the image's.  *linked tells, whatever is
 * returned, whether the image may exist now: after the link an error is
 * reported and the image stays (N8.6).  GD_EXISTS: the id was taken first. */
gd_status gd_spool_commit(const gd_env *env, int root,
                          const gd_spool_file *file, const char *image_id,
                          bool *linked, gd_error *err);

/* Unlinks the spool file and lets go of it.  REQUIRES: a recipe was never
 * linked to images/ (N8.5). */
void gd_spool_discard(const gd_env *env, int root, gd_spool_file *file);
/* Lets go of the writer's lock; the file stays for the accounting. */
void gd_spool_close(const gd_env *env, gd_spool_file *file);

/* Opens images/<id> with its users' lock byte held shared, and makes sure that
 * the name still leads to it (N11).  GD_NOTFOUND if there is none. */
gd_status gd_spool_open_image(const gd_env *env, int root,
                              const char *image_id, int *fd, gd_error *err);
/* Whether somebody, in any process, has the image open; also if that cannot be
 * told.  It is only asked: the byte is never taken on an image (N3). */
bool gd_spool_is_read(const gd_env *env, int root, const char *image_id);

/* N9.3 to N9.6: moves images/<image_id> into the spool, without looking
 * inside.  REQUIRES: the image lock. */
gd_status gd_spool_move_image(const gd_env *env, int root,
                              const char *image_id, gd_error *err);

/* Deletes an image: its recipe moves into the spool.  With upload_id (or
 * NULL), only if the image is of that upload, else GD_NOTFOUND. */
gd_status gd_spool_delete(const gd_env *env, int root, const gd_params *params,
                          const char *image_id, const uint8_t *upload_id,
                          gd_error *err);

#endif
