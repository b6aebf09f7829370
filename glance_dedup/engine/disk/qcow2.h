/* SPDX-License-Identifier: Apache-2.0 */
/*
 * qcow2.h - the map of a qcow2 file, of version 2 or 3.
 *
 * The refcounts, internal snapshots and bitmaps are not read: they do not
 * change what the disk reads as. A file whose disk depends on another file, or
 * on a key, is refused; so is one that QEMU marked as dirty or corrupt, and one
 * with a bit that the specification does not have.
 */
#ifndef GD_QCOW2_H
#define GD_QCOW2_H

#include "engine/disk/diskmap.h"

gd_status gd_qcow2_map(gd_diskmap *map, gd_error *err);

#endif
