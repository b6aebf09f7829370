/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shards.h - the exact index as a whole: which of its files count, runs that
 * are added to it, and looking for a fingerprint (merging.rst).
 *
 * A handle is of one repository and one catalog.  It may hold the lock of the
 * runs.  One thread at a time may use it.
 */
#ifndef GD_SHARDS_H
#define GD_SHARDS_H

#include "engine/base/env.h"
#include "engine/files/indexfile.h"

typedef struct gd_shards gd_shards;

/* Makes index/ if it is missing.  If catalog_id is NULL, it makes nothing, and
 * the catalog is that of the highest cursors; GD_NOTFOUND if there are none. */
gd_status gd_shards_open(const gd_env *env, int root, uint64_t reserve,
                         const uint8_t *catalog_id, gd_shards **shards,
                         gd_error *err);
/* Releases the lock, too. */
void gd_shards_close(gd_shards *shards);

/* The lock of the runs: its holder writes runs and cursors, splits shards, and
 * cleans up.  Returns GD_BUSY and leaves `*err` untouched if another handle has
 * it. */
gd_status gd_shards_lock(gd_shards *shards, gd_error *err);
void gd_shards_unlock(gd_shards *shards);

/* The files in index/, sorted: by kind, by the first fingerprint that a file
 * can have, by bits, and by number.  The caller releases the files.  GD_BUSY if
 * the shards change all the time. */
typedef struct gd_index_list {
    gd_index_id *files;
    size_t count;
} gd_index_list;
gd_status gd_shards_list(gd_shards *shards, gd_index_list *list,
                         gd_error *err);

/* The shards of a list that count, in the order of fingerprints.  *complete:
 * they cover all fingerprints.  The caller releases *current, which is NULL if
 * there are none. */
gd_status gd_shards_current(gd_shards *shards, const gd_index_list *list,
                            gd_index_id **current, size_t *count,
                            bool *complete, gd_error *err);
/* The same of what lies in index/ now. */
gd_status gd_shards_rescan(gd_shards *shards, gd_index_id **current,
                           size_t *count, bool *complete, gd_error *err);
/* Finds out whether this shard counts now. */
gd_status gd_shards_counts(gd_shards *shards, const gd_index_id *id,
                           bool *counts, gd_error *err);
/* A generation for this shard, higher than any that it, or one below it, has in
 * the list; GD_CORRUPT if there is none. */
gd_status gd_shards_next(const gd_index_list *list, uint32_t bits,
                         uint32_t shard, uint64_t *generation, gd_error *err);

/* Writes a file whole, and makes it and its name durable. */
gd_status gd_shards_write(gd_shards *shards, const gd_index_id *id,
                          const uint8_t *items, size_t count, gd_error *err);
/* Writes sorted records, each once, as runs (or GD_INDEX_GONE) of the shards
 * that count, durably.  GD_CORRUPT if these do not cover them.  REQUIRES: the
 * lock of the runs. */
gd_status gd_shards_add(gd_shards *shards, gd_index_kind kind,
                        const uint8_t *records, size_t count, gd_error *err);
/* Makes empty shards where none covers the fingerprints.  REQUIRES: the lock
 * of the runs. */
gd_status gd_shards_fill(gd_shards *shards, gd_error *err);
/* Removes what means nothing: files of dead makers, shards that do not count,
 * and cursors of lower generations.  REQUIRES: the lock of the runs. */
gd_status gd_shards_tidy(gd_shards *shards, gd_error *err);
/* Removes a file, or moves it to quarantine/, in place of the last one there.
 * One that is missing is fine. */
gd_status gd_shards_remove(gd_shards *shards, const gd_index_id *id,
                           gd_error *err);
gd_status gd_shards_set_aside(gd_shards *shards, const gd_index_id *id,
                              gd_error *err);
gd_status gd_shards_sync(gd_shards *shards, gd_error *err);
gd_status gd_shards_verify(gd_shards *shards, const gd_index_id *id,
                           gd_error *err);
/* Opens a file to read it. */
gd_status gd_shards_read(gd_shards *shards, const gd_index_id *id,
                         gd_index_reader **reader, gd_error *err);

/* The address that the index has for the fingerprint that begins like this; 0:
 * none. */
gd_status gd_shards_find(gd_shards *shards, uint64_t key, uint64_t *address,
                         gd_error *err);

/* ---- for merging (duplicate_search.h) ---- */

const gd_env *gd_shards_env(const gd_shards *shards);
/* Takes a byte of locks/index by a descriptor of its own: closing it releases
 * the lock.  Returns GD_BUSY and leaves `*err` untouched if another has it. */
gd_status gd_shards_take_byte(gd_shards *shards, uint64_t byte, int *fd,
                              gd_error *err);
gd_status gd_shards_create(gd_shards *shards, const gd_index_id *id,
                           gd_index_writer **writer, gd_error *err);
/* GD_NOSPACE if the disk has no room for so many bytes. */
gd_status gd_shards_require_room(gd_shards *shards, uint64_t bytes,
                                 gd_error *err);
/* A bit for each number that a group has, up to *highest.  The caller releases
 * *groups. */
gd_status gd_shards_groups(gd_shards *shards, uint8_t **groups,
                           uint32_t *highest, gd_error *err);

#endif
