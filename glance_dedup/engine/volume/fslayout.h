/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fslayout.h - places of the bytes of a disk's file systems that are rarely
 * stored already (volumes.rst, "Hints").
 *
 * Of ext2 to ext4 these are all copies of the superblock and of the group
 * descriptors, the journal and the inode tables; of XFS the log and the headers
 * of its allocation groups, copies of the superblock among them.  File systems
 * are looked for at the beginning of the disk, and in the partitions of an MBR
 * or a GPT, of sectors of 512 bytes.
 *
 * All that is read is hostile (I10): it decides which bytes are read next and
 * which ranges are named, but never more than a bounded number of either, and
 * none outside the disk.
 */
#ifndef GD_FSLAYOUT_H
#define GD_FSLAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/read/plan.h"

enum { GD_FS_RANGES = 1280 };

/* Sorted; no two meet. */
typedef struct gd_fslayout {
    size_t count;
    gd_range ranges[GD_FS_RANGES];
} gd_fslayout;

/* Reads from the disk; false: it cannot. */
typedef bool gd_fs_reader(void *arg, uint8_t *out, size_t length,
                          uint64_t offset);

/* Looks at a disk of this size.  *copies: what a file system keeps several copies
 * of, in case one is lost; *found: the rest. */
void gd_fslayout_find(gd_fs_reader *read, void *arg, uint64_t size,
                      gd_fslayout *found, gd_fslayout *copies);
/* The first range that ends behind `at`; NULL: there is none. */
const gd_range *gd_fslayout_next(const gd_fslayout *layout, uint64_t at);

#endif
