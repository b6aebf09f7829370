/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image_delete.h - the steps that delete an image (N9).
 *
 * All functions are thread-safe.
 */
#ifndef GD_IMAGE_DELETE_H
#define GD_IMAGE_DELETE_H

#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/params.h"

/* Moves images/<image_id> into the spool, without reading it (N9.3 to N9.6).
 * REQUIRES: the image lock. */
gd_status gd_image_delete_move(const gd_env *env, int root,
                               const char *image_id, gd_error *err);

/* Deletes several images, each as gd_image_delete does, but with one sync of each
 * directory for all.  It deletes images whose lock another process has
 * afterwards, one at a time, and leaves those that cannot be opened, without an
 * error. */
gd_status gd_image_delete_several(const gd_env *env, int root,
                                  const gd_params *params,
                                  const char (*ids)[GD_IMAGE_ID_MAX + 1],
                                  size_t count, gd_error *err);

/* Deletes an image: its recipe moves into the spool.  With upload_id (not
 * NULL), only if the image is of that upload; else GD_NOTFOUND. */
gd_status gd_image_delete(const gd_env *env, int root, const gd_params *params,
                          const char *image_id, const uint8_t *upload_id,
                          gd_error *err);

#endif
