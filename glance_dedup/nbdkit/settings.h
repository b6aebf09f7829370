/* SPDX-License-Identifier: Apache-2.0 */
/*
 * settings.h - the keys of nbdkit's command line.
 *
 * `glance-dedup volume serve` writes them: it reads repository.json, so the
 * plugin parses no JSON.  It only makes sure that the file has not changed
 * since, as an upgrade changes it.  Every number is checked here again, since
 * anybody can start nbdkit.
 */
#ifndef GD_NBDKIT_SETTINGS_H
#define GD_NBDKIT_SETTINGS_H

#include "engine/repo/repo.h"

/* The text for nbdkit --help. */
#define GD_NBDKIT_KEYS \
    "repository=DIR         (required) The repository's directory.\n" \
    "volume=NAME            (required) The volume.\n" \
    "parameters=DIGITS      (required) XXH3 of repository.json, which has\n" \
    "repository-id=DIGITS, block-size, group-slots, segment-size,\n" \
    "fingerprint, compare (all required), cut-minimum and cut-average.\n" \
    "codec, codec-level, codec-yields, direct-io, threads, lock-timeout-ms,\n" \
    "reserve, segment-cache, index, index-path, index-bytes, index-keys: how\n" \
    "to store and read.\n" \
    "dedupd-socket=PATH     dedupd's socket, absolute. It fetches what lies in\n" \
    "the object store.\n" \
    "slice-memory=PATH      Where dedupd puts what it fetches while the disk is\n" \
    "full, absolute.\n" \
    "dedup=yes|no           Whether to look for blocks that are there already."

typedef struct gd_nbdkit_settings {
    char *repository; /* an absolute path */
    char *volume;
    /* Source of hints: the filter if there is no backend (GD_KV_BACKENDS). */
    gd_kv_backend index;
    char *dedupd_socket; /* NULL: cold groups cannot be read */
    char *slice_memory;  /* NULL: there are no slices in memory */
    char *index_path; /* NULL: use no index */
    uint64_t index_bytes; /* of a new filter, or of a store's cache */
    uint64_t index_keys;  /* for which a store has room */
    uint64_t segment_cache; /* bytes */
    bool no_dedup;
    bool has_id;
    bool has_checksum;
    uint64_t checksum; /* of repository.json */
    gd_params params;
} gd_nbdkit_settings;

void gd_nbdkit_settings_init(gd_nbdkit_settings *settings);
void gd_nbdkit_settings_release(gd_nbdkit_settings *settings);
/* GD_INVALID for an unknown key or a value out of its bounds. */
gd_status gd_nbdkit_settings_set(gd_nbdkit_settings *settings,
                                 const char *key, const char *value,
                                 gd_error *err);
/* GD_INVALID if a key that is required is missing. */
gd_status gd_nbdkit_settings_check(const gd_nbdkit_settings *settings,
                                   gd_error *err);
/* GD_BUSY if repository.json is not the file that the settings were made from.
 * From then on nobody upgrades it as long as repo is open (repo.h). */
gd_status gd_nbdkit_settings_compare(const gd_nbdkit_settings *settings,
                                     const gd_repo *repo, gd_error *err);

#endif
