/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vmdk.h - the map of a VMDK file that is a sparse extent with its descriptor,
 * monolithicSparse or streamOptimized.
 *
 * A file is refused if its descriptor names other files, or is missing, and if
 * it was not closed.
 */
#ifndef GD_VMDK_H
#define GD_VMDK_H

#include "engine/disk/diskmap.h"

gd_status gd_vmdk_map(gd_diskmap *map, gd_error *err);

#endif
