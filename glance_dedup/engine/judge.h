/*
 * judge.h - a recipe's file opened by the maintainer, to be judged and settled
 * (N3 to N6).
 *
 * The looks and the locks of N4 are here, one function each; their order is
 * the accounting's.  Nothing here decides that an entry is dead: a look that
 * failed is an error, never "no".  Belongs to one thread.
 */
#ifndef GD_JUDGE_H
#define GD_JUDGE_H

#include <stdbool.h>
#include <stdint.h>

#include "env.h"
#include "names.h"
#include "params.h"
#include "recipe.h"
#include "status.h"

typedef struct gd_judged {
    const gd_env *env;
    int root;
    const gd_params *params;
    int fd;
    char name[GD_NAME_SIZE];
    gd_spool_kind kind; /* 0 in images/ */
    uint8_t id[GD_ID_SIZE]; /* of an entry: the digits of its name */
    uint64_t inode;
    uint64_t modified; /* when it was last written, nanoseconds since 1970 */
    uint64_t links;   /* names of the inode when it was opened */
    bool complete;    /* it has a valid header page, in recipe */
    gd_error damage;  /* why not; GD_OK where there never was one */
    gd_recipe recipe;
} gd_judged;

typedef struct gd_spool_base {
    char name[2 + 2 * GD_ID_SIZE + 1]; /* inside spool/ */
} gd_spool_base;

/* The entries of the spool, sorted by name; released by the caller.  What is
 * not named as an entry is left out. */
gd_status gd_judged_list(const gd_env *env, int root, gd_spool_base **entries,
                         size_t *count, gd_error *err);

/* Opens a spool entry, base being its name inside spool/.  GD_NOTFOUND if it
 * is gone, GD_INVALID if no entry is called so.  A damaged one opens.
 * params must outlive it. */
gd_status gd_judged_open_entry(const gd_env *env, int root,
                               const gd_params *params, const char *base,
                               gd_judged *judged, gd_error *err);
/* Opens images/<image_id>, without locks. */
gd_status gd_judged_open_image(const gd_env *env, int root,
                               const gd_params *params, const char *image_id,
                               gd_judged *judged, gd_error *err);
/* Lets go of its locks, too. */
void gd_judged_close(gd_judged *judged);

/* N4's look: whether images/<the header's id> is this inode, now.  A header
 * that was not valid at the last look is read again: its writer may have
 * completed and committed it since (N4.3). */
gd_status gd_judged_live(gd_judged *judged, bool *live, gd_error *err);

/* Takes GD_BYTE_WRITER or GD_BYTE_USERS exclusively, until it is closed.
 * GD_BUSY, without words, if it is refused. */
gd_status gd_judged_lock(const gd_judged *judged, int byte, gd_error *err);

/* One extent of blocks, as the accounts count it. */
typedef struct gd_run {
    uint32_t group;
    uint32_t slot;
    uint32_t blocks;
} gd_run;

/* Every extent of blocks in so many of the recipe's pages of extents, the first
 * of which is number 0, in order; released by the caller.  GD_INVALID if it has
 * fewer pages.  REQUIRES: complete. */
gd_status gd_judged_runs(const gd_judged *judged, uint64_t first,
                         uint64_t pages, gd_run **runs, size_t *count,
                         gd_error *err);
/* Verifies that all extents together make up the image; how many blocks they
 * name.  REQUIRES: complete. */
gd_status gd_judged_measure(const gd_judged *judged, uint64_t *blocks,
                            gd_error *err);

/* Removes this name, if it still leads to this inode.  Not synced. */
gd_status gd_judged_unlink(const gd_judged *judged, gd_error *err);
/* Gives the inode a name in quarantine/, durably. */
gd_status gd_judged_set_aside(const gd_judged *judged, char name[GD_NAME_SIZE],
                              gd_error *err);
/* N9 for a recipe of images/ that cannot be read: like any delete, but only if
 * the name still leads to this inode.  REQUIRES: set aside. */
gd_status gd_judged_delete(const gd_judged *judged, gd_error *err);

#endif
