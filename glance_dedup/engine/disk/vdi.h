/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vdi.h - the map of VirtualBox's VDI, dynamic or static. A file with a parent
 * is refused.
 */
#ifndef GD_VDI_H
#define GD_VDI_H

#include "engine/disk/diskmap.h"

gd_status gd_vdi_map(gd_diskmap *map, gd_error *err);

#endif
