/* SPDX-License-Identifier: Apache-2.0 */
/*
 * usage.h - what the bytes of a group's file are used for.
 *
 * This tells where the space went.  It comes from the entries; no segment is
 * read.
 */
#ifndef GD_USAGE_H
#define GD_USAGE_H

#include "engine/files/group.h"

enum { GD_CODECS = 3 };

typedef struct gd_usage {
    uint64_t plain[GD_CODECS];  /* bytes of live blocks, by codec */
    uint64_t stored[GD_CODECS]; /* bytes of the segments that have them */
    uint64_t segments;
} gd_usage;

/* Adds a group's numbers.  A damaged block counts as live, since its bytes
 * stay. */
gd_status gd_usage_add_group(const gd_group *group, gd_usage *used,
                             gd_error *err);

#endif
