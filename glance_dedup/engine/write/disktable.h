/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disktable.h - writes the table of a recipe of version 2: how the file is made
 * from the plain bytes before it (image-disks.rst).
 */
#ifndef GD_DISKTABLE_H
#define GD_DISKTABLE_H

#include "engine/format/recipe.h"

typedef struct gd_disk_table {
    gd_recipe_writer *recipe; /* NULL: none has begun */
    gd_recipe_header header;  /* its size and disk: what the table must fit */
    uint64_t file; /* bytes of the file so far */
} gd_disk_table;

/* Begins the table of a file of `size` bytes; all plain bytes are added.  disk
 * has the disk's size, format, flags and encoders.  GD_INVALID if it is not
 * possible. */
gd_status gd_disk_table_begin(gd_disk_table *table, gd_recipe_writer *recipe,
                              const gd_recipe_disk *disk, uint64_t size,
                              gd_error *err);
/* Adds extents in the order of the file; their offsets are ignored.  GD_INVALID
 * for one that is not within file and plain bytes. */
gd_status gd_disk_table_add(gd_disk_table *table, const gd_extent *extents,
                            size_t count, gd_error *err);
/* Adds all extents of another recipe's table. */
gd_status gd_disk_table_copy(gd_disk_table *table, const gd_recipe *source,
                             gd_error *err);
/* GD_INVALID unless the table describes the whole file. */
gd_status gd_disk_table_require_whole(const gd_disk_table *table,
                                      gd_error *err);

#endif
