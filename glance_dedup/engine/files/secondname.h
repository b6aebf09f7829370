/* SPDX-License-Identifier: Apache-2.0 */
/*
 * secondname.h - a file of a group or an image keeps a second name while
 * another file takes its name (N14).
 *
 * Only where hosts share files: each function does nothing, or the plain
 * thing, if params->shared is false.
 */
#ifndef GD_SECONDNAME_H
#define GD_SECONDNAME_H

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/names.h"
#include "engine/format/params.h"

/* Before a rename over name.  REQUIRES: the lock of N14.1, and the name was
 * settled. */
gd_status gd_second_name_make(const gd_env *env, int root,
                              const gd_params *params, const char *name,
                              gd_error *err);
/* After it, whether it succeeded or not.  What stays is settled later. */
void gd_second_name_remove(const gd_env *env, int root,
                           const gd_params *params, const char *name);

/* N14.3.  REQUIRES: the lock of N14.1. */
gd_status gd_second_name_finish(const gd_env *env, int root,
                                const gd_params *params,
                                const char *name, gd_error *err);

gd_status gd_second_name_finish_image(const gd_env *env, int root,
                                      const gd_params *params,
                                      const char *image_id, gd_error *err);
/* All images, each under its lock: for a new maintainer. */
gd_status gd_second_name_finish_images(const gd_env *env, int root,
                                       const gd_params *params, gd_error *err);

/* N14.2: opens a file by its name or its second name.  where becomes the one
 * that led to it. */
gd_status gd_second_name_open_any(
    const gd_env *env, int root, const gd_params *params, const char *name,
    int flags, char where[GD_NAME_SIZE], int *fd, gd_error *err);

#endif
