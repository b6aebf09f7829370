/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slices.h - bytes of objects, out of the slices that this host has (cold.rst,
 * "Reading").
 *
 * A slice is a range of an object, GD_SLICE bytes long and aligned to that; the
 * last one is shorter.  The host keeps each in a file of its own,
 * <object id>/<slice>.  Such a file appears whole, and eviction removes it.
 * If one is missing, the program's own source brings it.  While the disk is
 * full, slices are in a second directory, in memory.
 *
 * Neither the source nor the files are trusted: the reader of a block verifies
 * it (I7).  Thread-safe.
 */
#ifndef GD_SLICES_H
#define GD_SLICES_H

#include "engine/base/env.h"
#include "engine/format/names.h"

enum { GD_SLICE = 1 << 20 };

typedef struct gd_object {
    uint32_t group; /* whose file it is */
    uint8_t id[GD_ID_SIZE];
    uint64_t length;
    uint32_t patience_ms; /* how long its reader waits for each fetch; 0: as
                           * long as it takes */
} gd_object;

/* Functions of the program that the engine calls.  Any thread may call it. */
typedef struct gd_slice_source {
    void *arg;
    /* Brings these slices into the directory, except those that are there.
     * Waits for it, as long as the object's field allows.  GD_UNAVAILABLE if
     * the object store does not give them now. */
    gd_status (*fetch)(void *arg, const gd_object *object, uint32_t first,
                       uint32_t count, gd_error *err);
    /* They will be read soon.  Waits for nothing. */
    void (*expect)(void *arg, const gd_object *object, uint32_t first,
                   uint32_t count);
} gd_slice_source;

typedef struct gd_slices gd_slices;

typedef struct gd_slice_counts {
    uint64_t reads;  /* of bytes in one slice */
    uint64_t misses; /* those for which a slice had to be fetched */
} gd_slice_counts;

/* The directories are only this user's.  They may be missing: the source makes
 * them, but not the directories that they are in.  memory may be NULL. */
gd_status gd_slices_open(const gd_env *env, const char *directory,
                         const char *memory, const gd_slice_source *source,
                         gd_slices **slices, gd_error *err);
void gd_slices_close(gd_slices *slices);

gd_slice_counts gd_slices_get_counts(const gd_slices *slices);

/* Reads bytes that lie within the object.  name is the group's, for messages.
 * GD_UNAVAILABLE also if this host cannot read the slices' files.  GD_CORRUPT
 * only if the object has no such bytes. */
gd_status gd_slices_read(const gd_slices *slices, const gd_object *object,
                         void *out, size_t length, uint64_t offset,
                         const char *name, gd_error *err);
/* Announces that these bytes will be read soon.  The source gets the numbers of
 * the missing slices. */
void gd_slices_expect(const gd_slices *slices, const gd_object *object,
                      uint64_t offset, uint64_t length);
/* Removes the slices with these bytes, which may be wrong.  The next reader has
 * them fetched again. */
void gd_slices_forget(const gd_slices *slices, const gd_object *object,
                      uint64_t offset, uint64_t length);

#endif
