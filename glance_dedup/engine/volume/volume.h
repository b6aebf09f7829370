/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volume.h - a disk that can be written to, on the store (volumes.rst).
 *
 * A volume is a journal plus ordinary recipes.  The process that opens it owns
 * it (V1).  All functions that take a gd_volume are thread-safe, except
 * gd_volume_close.  Offsets and lengths are in bytes, of any alignment.
 *
 * After a sync of the journal failed, every write, zero and flush fails with
 * the words of that failure; reads go on (V3).
 */
#ifndef GD_VOLUME_H
#define GD_VOLUME_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/format/volumehead.h"
#include "engine/read/image.h"
#include "engine/repo/repo.h"

typedef struct gd_volume gd_volume;

/* Properties and state of a volume. */
typedef struct gd_volume_info {
    gd_volume_head head;     /* size, state, counters, ...; as of now */
    uint64_t journal_bytes;  /* in all journals */
    uint64_t journal_records; /* not yet in a edition */
    char broken[GD_ERROR_TEXT]; /* why it takes no writes; "": it does */
    bool is_read_only; /* there is no journal of this owner: until the disk has
                        * room, or for good */
} gd_volume_info;

#define GD_VOLUME_PART (UINT64_C(256) << 20)

/* A volume that is to be made. */
typedef struct gd_volume_plan {
    uint64_t size;      /* 0: the base's, rounded up to whole sectors */
    uint64_t part_size; /* 0: GD_VOLUME_PART */
    const char *project;
    gd_scope scope;
    gd_image *base; /* NULL: it begins with zeros */
} gd_volume_plan;

/* Makes a volume, which nobody owns then.  *stored is how many bytes of the
 * base could not be shared by address.  GD_EXISTS if the name is taken;
 * GD_INVALID for a name, size or project that is not allowed, and for a size
 * less than the base's. */
gd_status gd_volume_create(gd_repo *repo, const char *name,
                           const gd_volume_plan *plan, uint64_t *stored,
                           gd_error *err);
/* Opens a volume and reads its journals (V4).  GD_NOTFOUND; GD_BUSY if another
 * process owns it; GD_CORRUPT if acknowledged bytes are lost (V5).  If the disk
 * has no room for this owner's journal, the volume is read-only at first.
 * dedup: checkpoints look up blocks; opening may make one. */
gd_status gd_volume_open(gd_repo *repo, const char *name, bool dedup,
                         gd_volume **out, gd_error *err);
/* Makes no checkpoint: the next opening reads the journal. */
void gd_volume_close(gd_volume *volume);
void gd_volume_get_info(gd_volume *volume, gd_volume_info *info);
/* The head of a volume that anybody may own, as it was at some moment. */
gd_status gd_volume_read_head(gd_repo *repo, const char *name,
                              gd_volume_head *head,
                              gd_error *err);

/* GD_INVALID for a range that does not lie within the volume.  length may be
 * 0. */
gd_status gd_volume_read(gd_volume *volume, uint8_t *out, size_t length,
                         uint64_t offset, gd_error *err);
gd_status gd_volume_write(gd_volume *volume, const uint8_t *data,
                          size_t length, uint64_t offset, gd_error *err);
/* The range reads as zeros from now on. */
gd_status gd_volume_zero(gd_volume *volume, uint64_t length, uint64_t offset,
                         gd_error *err);
/* Makes all earlier writes durable. */
gd_status gd_volume_flush(gd_volume *volume, gd_error *err);

/* Calls visit for the pieces of a range, in order, without gap: whether each
 * holds data, or is known to read as zeros.  Ends early, with GD_OK, when visit
 * returns false. */
gd_status gd_volume_extents(gd_volume *volume, uint64_t length,
                            uint64_t offset,
                            bool (*visit)(void *arg, uint64_t offset,
                                          uint64_t length, bool zeros),
                            void *arg, gd_error *err);

/* ---- hints (volumes.rst) ---- */

/* Sets whether checkpoints look up blocks from now on. */
void gd_volume_set_dedup(gd_volume *volume, bool dedup);
/* The range's bytes are likely to be written elsewhere soon: the next
 * checkpoint searches for duplicates first where they are stored.  REQUIRES:
 * the range lies within the volume. */
void gd_volume_prefetch(gd_volume *volume, uint64_t length, uint64_t offset);

/* Brings all that was written before into recipes (V6). */
gd_status gd_volume_checkpoint(gd_volume *volume, gd_error *err);
/* A checkpoint before the close.  A new head gets the counters, if they have
 * changed since the last head. */
gd_status gd_volume_final_checkpoint(gd_volume *volume, gd_error *err);
/* Returns whether a checkpoint is due: the journal is large (see "Pressure" in
 * volumes.rst). */
bool gd_volume_needs_checkpoint(gd_volume *volume);
/* Returns whether the journal has so much for each part of the volume that it
 * touches that a checkpoint is worth its cost, if nothing demands one.  See
 * "Pressure". */
bool gd_volume_is_worth_checkpoint(gd_volume *volume);
/* Gives back the space that the volume keeps for writes to come (V10).  Returns
 * whether it kept any. */
bool gd_volume_give_up_space(gd_volume *volume);
/* Closes recipes that a merge has replaced, so that they pin no blocks, and
 * groups whose names are gone, so that they take no space.  Gives back the space
 * for writes to come if the disk has no room for as much. */
void gd_volume_renew(gd_volume *volume);

/* Commits an image with the volume's bytes at one moment, no earlier than the
 * call.  *header describes the image.  GD_EXISTS if the id is taken, GD_INVALID
 * if it is one for a recipe of a volume, or if the volume's scope is its
 * project's and `project` is another. */
gd_status gd_volume_snapshot(gd_volume *volume, const char *image_id,
                             const char *project, gd_recipe_header *header,
                             gd_error *err);
/* Bytes that are added read as zeros, bytes behind a smaller size are lost: some
 * of them also if it fails. */
gd_status gd_volume_resize(gd_volume *volume, uint64_t size, gd_error *err);
/* The volume, which nobody owns, has the bytes and the size of an image from now
 * on; after an error those of before or these.  *stored is how many bytes could
 * not be shared by address.  GD_BUSY, GD_NOTFOUND; GD_INVALID if no volume may
 * have the size. */
gd_status gd_volume_roll_back(gd_repo *repo, const char *name, gd_image *image,
                              uint64_t *stored, gd_error *err);
/* A volume that nobody owns gets another name.  After an error it has either.
 * GD_BUSY, also if others look up volumes by their ids for too long;
 * GD_NOTFOUND; GD_EXISTS if the new name is taken. */
gd_status gd_volume_rename(gd_repo *repo, const char *name,
                           const char *new_name, gd_error *err);
/* Deletes a volume that nobody owns, or finishes what an owner began (V9).
 * GD_BUSY, GD_NOTFOUND. */
gd_status gd_volume_delete(gd_repo *repo, const char *name, gd_error *err);
/* The same, also if the newest journal is damaged.  Recipes of such a volume
 * stay, since its id is not known: they are garbage then. */
gd_status gd_volume_delete_damaged(gd_repo *repo, const char *name,
                                   gd_error *err);
/* As gd_volume_delete, but GD_EXISTS if the volume is neither being made nor
 * deleted when its lock is held.  For processes that only clean up: since they
 * listed the volumes, another process may have created a volume of this
 * name. */
gd_status gd_volume_reap(gd_repo *repo, const char *name, gd_error *err);

#endif
