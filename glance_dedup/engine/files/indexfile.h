/* SPDX-License-Identifier: Apache-2.0 */
/*
 * indexfile.h - writing and reading one file of the exact index, from its
 * beginning to its end (format-derived.rst).
 *
 * A file is written under a name of kind GD_INDEX_NEW, which its maker locks.
 * It gets its own name by a link, when it is whole and synced, and never
 * changes then.  Each end of a file has one frame in memory.
 *
 * One thread at a time may use a writer or a reader.
 */
#ifndef GD_INDEXFILE_H
#define GD_INDEXFILE_H

#include "engine/base/env.h"
#include "engine/format/indexhead.h"

typedef struct gd_index_writer gd_index_writer;
typedef struct gd_index_reader gd_index_reader;

/* ---- writing ---- */

/* Begins a file.  REQUIRES: index/ exists. */
gd_status gd_index_writer_create(const gd_env *env, int root,
                                 const gd_index_id *id,
                                 const uint8_t catalog_id[GD_ID_SIZE],
                                 gd_index_writer **writer, gd_error *err);
/* Appends items. */
gd_status gd_index_writer_append(gd_index_writer *writer, const uint8_t *items,
                                 size_t count, gd_error *err);
/* Appends the remaining records, writes the head, and makes the file durable,
 * but not its name. */
gd_status gd_index_writer_seal(gd_index_writer *writer, uint32_t flags,
                               gd_error *err);
/* Gives a sealed file its name.  The caller syncs the directory.  GD_EXISTS if
 * the name is taken; GD_BUSY if somebody took this maker for dead. */
gd_status gd_index_writer_publish(gd_index_writer *writer, gd_error *err);
uint64_t gd_index_writer_written(const gd_index_writer *writer); /* items */
/* Closes, and removes a file that has no name of its own.  NULL: nothing. */
void gd_index_writer_discard(gd_index_writer *writer);

/* Removes the files that dead makers left. */
gd_status gd_indexfile_remove_dead(const gd_env *env, int root,
                                   const gd_index_id *id, gd_error *err);

/* ---- reading ---- */

/* GD_CORRUPT if the head, the name, the catalog (NULL: any is right) or the
 * length is wrong. */
gd_status gd_index_reader_open(const gd_env *env, int root,
                               const gd_index_id *id,
                               const uint8_t catalog_id[GD_ID_SIZE],
                               gd_index_reader **reader, gd_error *err);
const gd_index_head *gd_index_reader_head(const gd_index_reader *reader);
/* The items of any frame, until the next call.  GD_CORRUPT if they cannot be
 * trusted. */
gd_status gd_index_reader_frame(gd_index_reader *reader, uint64_t frame,
                                const uint8_t **items, size_t *count,
                                gd_error *err);
/* The items of the frame behind the last one that was read; *count is 0 at the
 * end.  They are in order over the frames' borders, too. */
gd_status gd_index_reader_next(gd_index_reader *reader, const uint8_t **items,
                               size_t *count, gd_error *err);
/* NULL: nothing. */
void gd_index_reader_close(gd_index_reader *reader);
/* Reads all. */
gd_status gd_indexfile_verify(const gd_env *env, int root,
                              const gd_index_id *id,
                              const uint8_t catalog_id[GD_ID_SIZE],
                              gd_error *err);

#endif
