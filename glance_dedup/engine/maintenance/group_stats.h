/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group_stats.h - how much of a group's segments a rewrite would keep, as far
 * as the entries tell.
 *
 * Freed entries do not say what they were, so this is an estimate.  It decides
 * only whether a rewrite is worth its time.
 */
#ifndef GD_GROUP_STATS_H
#define GD_GROUP_STATS_H

#include "engine/maintenance/leasedgroup.h"

/* *bytes: of the segments that have a live block; *kept: how many of these a
 * rewrite would keep. */
gd_status gd_group_stats_live_bytes(const gd_leased_group *leased,
                                    uint64_t *bytes,
                                    uint64_t *kept, gd_error *err);

#endif
