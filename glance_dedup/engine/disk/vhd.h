/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhd.h - the map of a VHD file (QEMU's vpc), fixed or dynamic. A differencing
 * disk needs its parent, and is refused.
 */
#ifndef GD_VHD_H
#define GD_VHD_H

#include "engine/disk/diskmap.h"

/* Of a dynamic disk: the file begins with a copy of its footer. */
gd_status gd_vhd_map(gd_diskmap *map, gd_error *err);
/* Sets *found if the file ends with the footer of a fixed disk, and maps it
 * then. */
gd_status gd_vhd_map_fixed(gd_diskmap *map, bool *found, gd_error *err);

#endif
