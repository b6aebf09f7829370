/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backend.h - what a backend of kv.h provides: one table of functions.
 *
 * kv.c checks the arguments and counts the keys; a backend does neither.
 */
#ifndef GD_KV_BACKEND_H
#define GD_KV_BACKEND_H

#include "engine/kv/kv.h"

/* The meaning of each is that of the function of kv.h with its name. */
typedef struct gd_kv_calls {
    void (*close)(gd_kv *kv);
    gd_status (*get)(gd_kv *kv, const uint64_t *keys, uint64_t *values,
                     size_t count, gd_error *err);
    gd_status (*put)(gd_kv *kv, const gd_kv_pair *pairs, size_t count,
                     gd_error *err);
    gd_status (*commit)(gd_kv *kv, gd_error *err);
    /* A later pair is never in the store without all earlier ones, whenever a
     * crash comes. */
    bool keeps_order;
} gd_kv_calls;

/* The first member of each backend's own structure. */
struct gd_kv {
    const gd_env *env;
    const gd_kv_calls *calls;
    gd_kv_options options;
    gd_kv_stats stats;
};

/* Each allocates a store, zeroed but for what it sets, and opens it. */
typedef gd_status gd_kv_opener(const gd_env *env, const char *path,
                               const gd_kv_options *options, gd_kv **kv,
                               gd_error *err);
gd_kv_opener gd_inram_open;
gd_kv_opener gd_dtb_open;
gd_kv_opener gd_lmdb_open;
gd_kv_opener gd_leveldb_open;

/* Each removes a store's files; a missing one does not matter. */
typedef gd_status gd_kv_remover(const gd_env *env, const char *path,
                                gd_error *err);
gd_kv_remover gd_lmdb_remove;
gd_kv_remover gd_leveldb_remove;
/* Of a store that is the one file at path. */
gd_kv_remover gd_kv_remove_file;

/* GD_DENIED unless the file is a regular one of this user, to which nobody else
 * may write. */
gd_status gd_kv_require_private(const gd_env *env, const struct stat *st,
                                const char *path, gd_error *err);

#endif
