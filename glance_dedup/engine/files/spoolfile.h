/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spoolfile.h - a recipe's file opened by the maintainer, to be judged and
 * settled (N3 to N6).
 *
 * The checks and the locks of N4 are here, one function each.  The accounting
 * decides their order.  Nothing here decides that an entry is dead: a check
 * that failed is an error, never "no".  Belongs to one thread.
 */
#ifndef GD_SPOOLFILE_H
#define GD_SPOOLFILE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/names.h"
#include "engine/format/params.h"
#include "engine/format/recipe.h"
#include "engine/format/runs.h"

typedef struct gd_spool_file {
    const gd_env *env;
    int root;
    const gd_params *params;
    int fd;           /* for names and locks */
    int content;      /* opened last, to be read; fd at first */
    char name[GD_NAME_SIZE];
    gd_spool_kind kind; /* 0 in images/ */
    uint8_t id[GD_ID_SIZE]; /* the entry's id, from the digits of its name */
    uint64_t inode;
    uint64_t modified; /* when it was last written, nanoseconds since 1970 */
    uint64_t links;   /* names of the inode when it was opened */
    bool complete;    /* it has a valid header page, in recipe */
    gd_error damage;  /* why it is not complete; GD_OK if there never was a
                       * header */
    gd_recipe recipe;
} gd_spool_file;

typedef struct gd_spool_base {
    char name[2 + 2 * GD_ID_SIZE + 1]; /* inside spool/ */
} gd_spool_base;

/* The entries of the spool, sorted by name.  The caller releases the list.
 * Files without an entry's name are left out. */
gd_status gd_spool_file_list(const gd_env *env, int root,
                             gd_spool_base **entries, size_t *count,
                             gd_error *err);

/* Opens a spool entry; base is its name inside spool/.  GD_NOTFOUND if it is
 * gone, GD_INVALID if base is not the name of an entry.  A damaged entry opens,
 * too.  params must outlive it. */
gd_status gd_spool_file_open(const gd_env *env, int root,
                             const gd_params *params, const char *base,
                             gd_spool_file *entry, gd_error *err);
/* Opens images/<image_id>, without locks. */
gd_status gd_spool_file_open_image(const gd_env *env, int root,
                                   const gd_params *params,
                                   const char *image_id,
                                   gd_spool_file *entry, gd_error *err);
/* Returns whether images/<image_id> is the file with this inode that was last
 * written at this time (nanoseconds since 1970).  A recipe is written once, so
 * then it is the one that was read before.  False also if that cannot be found
 * out. */
bool gd_spool_file_is_same(const gd_env *env, int root, const char *image_id,
                           uint64_t inode, uint64_t modified);
/* Releases its locks, too. */
void gd_spool_file_close(gd_spool_file *entry);

/* Finds out, for N4, whether images/<the header's id> is this inode now.  If
 * the header was not valid at the last check, reads it again: its writer may
 * have completed and committed it since (N4.3). */
gd_status gd_spool_file_live(gd_spool_file *entry, bool *live, gd_error *err);

/* Takes GD_BYTE_WRITER or GD_BYTE_USERS exclusively, until the entry is closed.
 * Returns GD_BUSY and leaves `*err` untouched if another has it. */
gd_status gd_spool_file_lock(const gd_spool_file *entry, int byte,
                             gd_error *err);

/* Reads all extents of blocks in some of the recipe's pages of extents, in
 * order; the first page is number 0.  The caller releases them.  GD_INVALID if
 * the recipe has fewer pages.  REQUIRES: complete. */
gd_status gd_spool_file_runs(const gd_spool_file *entry, uint64_t first,
                             uint64_t pages, gd_run **runs, size_t *count,
                             gd_error *err);
/* Verifies that the extents together make up the image, and counts the blocks
 * they name.  REQUIRES: complete. */
gd_status gd_spool_file_measure(const gd_spool_file *entry, uint64_t *blocks,
                                gd_error *err);

/* Removes this name if it still leads to this inode.  Does not sync. */
gd_status gd_spool_file_unlink(const gd_spool_file *entry, gd_error *err);
/* Gives the inode a name in quarantine/, durably. */
gd_status gd_spool_file_set_aside(const gd_spool_file *entry,
                                  char name[GD_NAME_SIZE], gd_error *err);
/* N9 for a recipe of images/ that cannot be read.  Like any delete, but only if
 * the name still leads to this inode.  REQUIRES: set aside. */
gd_status gd_spool_file_delete(const gd_spool_file *entry, gd_error *err);

#endif
