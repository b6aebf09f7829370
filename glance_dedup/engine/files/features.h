/* SPDX-License-Identifier: Apache-2.0 */
/*
 * features.h - the features of the format that a repository uses (format.rst,
 * "Features").
 *
 * A feature is set when it is first used, and stays.  The order is part of the
 * format: a program knows the first so many features.
 */
#ifndef GD_FEATURES_H
#define GD_FEATURES_H

#include <stdbool.h>

#include "engine/files/locks.h"

typedef enum gd_feature {
    GD_FEATURE_VOLUMES,
    GD_FEATURE_LISTED_SEGMENTS, /* groups of version 2 */
    GD_FEATURE_COLD,            /* groups of version 3 */
    GD_FEATURE_NODEDUP,         /* entries with the mark nodedup */
    GD_FEATURE_DISKS,           /* recipes of version 2 */
} gd_feature;

enum { GD_FEATURE_COUNT = 5 };

/* Finds the feature whose file in features/ has this name.  GD_INVALID: no
 * feature of this program has it. */
gd_status gd_features_parse(const char *name, gd_feature *feature,
                            gd_error *err);

/* Returns GD_VERSION if a feature is set that this program does not know; the
 * message names it. */
gd_status gd_features_require_known(const gd_env *env, int root,
                                    gd_error *err);
/* Returns whether a feature is set; false also if that cannot be found out. */
bool gd_features_is_set(const gd_env *env, int root, gd_feature feature);
/* Sets a feature durably (N15.1).  A feature that is set already is made
 * durable.  Waits up to timeout_ms for other programs; then GD_BUSY: one that
 * does not know the feature has the repository open. */
gd_status gd_features_set(const gd_env *env, int root, gd_locks *locks,
                          gd_feature feature, unsigned timeout_ms,
                          gd_error *err);

#endif
