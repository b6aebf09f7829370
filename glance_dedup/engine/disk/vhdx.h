/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vhdx.h - the map of a VHDX file. A file with a log that must be replayed, or
 * with a parent, is refused.
 */
#ifndef GD_VHDX_H
#define GD_VHDX_H

#include "engine/disk/diskmap.h"

gd_status gd_vhdx_map(gd_diskmap *map, gd_error *err);

#endif
