/* SPDX-License-Identifier: Apache-2.0 */
/*
 * features.c - see features.h.
 */
#include "engine/files/features.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/listing.h"
#include "engine/files/file.h"
#include "engine/format/names.h"

enum {
    NAME_ROOM = 64, /* of an unknown feature, in a message */
    STEP_MS = 5,
};

static const char *const names[GD_FEATURE_COUNT] = {
    [GD_FEATURE_VOLUMES] = "volumes",
    [GD_FEATURE_LISTED_SEGMENTS] = "listed-segments",
    [GD_FEATURE_COLD] = "cold",
    [GD_FEATURE_NODEDUP] = "nodedup",
    [GD_FEATURE_DISKS] = "disks",
};

gd_status
gd_features_parse(const char *name, gd_feature *feature, gd_error *err)
{
    for (unsigned f = 0; f < GD_FEATURE_COUNT; f++) {
        if (strcmp(name, names[f]) == 0) {
            *feature = (gd_feature)f;
            return GD_OK;
        }
    }
    return gd_fail(err, GD_INVALID, "there is no feature '%.40s'", name);
}

typedef struct found_name {
    bool is_known;
    char name[NAME_ROOM];
} found_name;

static bool
parse(const char *name, void *item)
{
    found_name *found = item;
    gd_feature feature;
    found->is_known = gd_features_parse(name, &feature, NULL) == GD_OK;
    snprintf(found->name, sizeof found->name, "%s", name);
    return true;
}

/* To callers GD_NOTFOUND means that an image is missing. */
static gd_status
require_directory(gd_status s, gd_error *err)
{
    return s != GD_NOTFOUND
               ? s
               : gd_fail(err, GD_CORRUPT, "the directory features is missing: "
                                          "restore it from a backup");
}

gd_status
gd_features_require_known(const gd_env *env, int root, gd_error *err)
{
    const gd_listing listing = {
        .size = sizeof(found_name), .what = "the features", .parse = parse};
    void *items;
    size_t count;
    gd_status s =
        gd_list(env, root, GD_DIR_FEATURES, &listing, &items, &count, err);
    s = require_directory(s, err);
    const found_name *found = items;
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        if (!found[i].is_known) {
            s = gd_fail(err, GD_VERSION,
                        "the repository uses the feature '%s', which this "
                        "program does not know: use a newer program",
                        found[i].name);
        }
    }
    env->release(env, items);
    return s;
}

static void
file_of(gd_feature feature, char name[GD_NAME_SIZE])
{
    snprintf(name, GD_NAME_SIZE, GD_DIR_FEATURES "/%s", names[feature]);
}

bool
gd_features_is_set(const gd_env *env, int root, gd_feature feature)
{
    char name[GD_NAME_SIZE];
    struct stat st;
    file_of(feature, name);
    return env->fstatat(env, root, name, &st) == 0;
}

/* N15.2: meanwhile no program is open that does not know the feature.  If
 * another process sets it, that one excludes them.  *alone: this one does. */
static gd_status
exclude_others(const gd_env *env, int root, gd_locks *locks,
               gd_feature feature, unsigned timeout_ms, bool *alone,
               gd_error *err)
{
    gd_status s = gd_locks_lock_features_exclusive(locks, feature, err);
    for (unsigned waited = 0;
         s == GD_BUSY && !gd_features_is_set(env, root, feature);
         waited += STEP_MS) {
        if (waited >= timeout_ms) {
            return gd_fail(err, GD_BUSY,
                           "a program that does not know the feature '%s' has "
                           "the repository open: stop the older programs on "
                           "all hosts, and upgrade them", names[feature]);
        }
        env->sleep_ms(env, STEP_MS);
        s = gd_locks_lock_features_exclusive(locks, feature, err);
    }
    *alone = s == GD_OK;
    return s == GD_BUSY ? GD_OK : s;
}

static gd_status
make_file(const gd_env *env, int root, gd_feature feature, gd_error *err)
{
    char name[GD_NAME_SIZE];
    int fd;
    file_of(feature, name);
    GD_TRY(gd_file_open_or_create(env, root, name, &fd, err));
    env->close(env, fd);
    return GD_OK;
}

gd_status
gd_features_set(const gd_env *env, int root, gd_locks *locks,
                gd_feature feature, unsigned timeout_ms, gd_error *err)
{
    gd_status s = GD_OK;
    bool is_new = false;
    if (!gd_features_is_set(env, root, feature)) {
        s = exclude_others(env, root, locks, feature, timeout_ms, &is_new, err);
        if (s != GD_OK) {
            return s;
        }
    }
    if (is_new) {
        s = make_file(env, root, feature, err);
    }
    /* Also if it is set: the process that set it may have been killed before
     * the name was durable. */
    if (s == GD_OK) {
        s = gd_sync_dir(env, root, GD_DIR_FEATURES, err);
    }
    if (is_new) {
        gd_locks_unlock_features_exclusive(locks, feature);
    }
    return require_directory(s, err);
}
