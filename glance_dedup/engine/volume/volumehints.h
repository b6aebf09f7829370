/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volumehints.h - hints about a volume's bytes, before a checkpoint stores them
 * (volumes.rst, "Hints").
 */
#ifndef GD_VOLUMEHINTS_H
#define GD_VOLUMEHINTS_H

#include "engine/volume/edition.h"
#include "engine/volume/volume.h"

/* The hints for a checkpoint, which the caller releases.  NULL for want of
 * memory.  Groups that were prefetched are named once only. */
gd_edition_hints *gd_volume_take_hints(gd_volume *volume, gd_error *err);

#endif
