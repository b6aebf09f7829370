/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volumenames.h - the names of a volume's files and recipes
 * (format-volumes.rst).
 */
#ifndef GD_VOLUMENAMES_H
#define GD_VOLUMENAMES_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/names.h"

enum { GD_VOLUME_NAME_MAX = 64 };

#define GD_VOLUME_LOCK "lock"
#define GD_VOLUME_NEW "journal.new" /* begins the names of new journals */
#define GD_VOLUME_CONTROL "control"

/* GD_INVALID unless the name has 1 to 64 characters of A-Z a-z 0-9 _ -. */
gd_status gd_volume_require_name(const char *volume, gd_error *err);
/* The rest REQUIRES a name that was checked. */
void gd_volume_directory(const char *volume, char name[GD_NAME_SIZE]);
void gd_volume_file_name(const char *volume, const char *file,
                         char name[GD_NAME_SIZE]);
void gd_volume_journal_name(const char *volume, uint32_t number,
                            char name[GD_NAME_SIZE]);
/* Draws a name for a new journal, that no other process has (V2). */
gd_status gd_volume_draw_new_name(const gd_env *env, const char *volume,
                                  char name[GD_NAME_SIZE], gd_error *err);
/* base is a name inside the volume's directory. */
bool gd_volume_journal_parse(const char *base, uint32_t *number);

/* Ids of recipes. */
void gd_volume_edition_id(const uint8_t volume_id[GD_ID_SIZE], uint64_t part,
                          uint64_t edition, char id[GD_IMAGE_ID_MAX + 1]);
void gd_volume_base_id(const uint8_t volume_id[GD_ID_SIZE],
                       char id[GD_IMAGE_ID_MAX + 1]);
/* Prefix of the ids of all the volume's recipes. */
void gd_volume_id_prefix(const uint8_t volume_id[GD_ID_SIZE],
                         char id[GD_IMAGE_ID_MAX + 1]);
/* Returns whether an id begins as those of volumes' recipes do: no image of a
 * user may have it, since the owner of the volume deletes what it does not need
 * (V7).  base/imageids.py has the same rule. */
bool gd_volume_is_recipe(const char *image_id);

#endif
