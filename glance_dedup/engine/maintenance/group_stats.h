/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group_stats.h - statistics of a block group, from its entries; no segment is
 * read.
 */
#ifndef GD_GROUP_STATS_H
#define GD_GROUP_STATS_H

#include "engine/maintenance/leasedgroup.h"

/* Estimates the result of a rewrite, to decide whether it is worth its time:
 * freed entries do not record their blocks.  *bytes: of the segments that have
 * a live block; *kept: how many of these a rewrite would keep. */
gd_status gd_group_stats_live_bytes(const gd_leased_group *leased,
                                    uint64_t *bytes,
                                    uint64_t *kept, gd_error *err);

enum { GD_CODECS = 3 };

/* The use of the bytes of a group's file. */
typedef struct gd_usage {
    uint64_t plain[GD_CODECS];  /* bytes of live blocks, by codec */
    uint64_t stored[GD_CODECS]; /* bytes of the segments that have them */
    uint64_t segments;
} gd_usage;

/* Adds a group's numbers.  A damaged block counts as live, since its bytes
 * stay. */
gd_status gd_group_stats_add_usage(const gd_group *group, gd_usage *used,
                                   gd_error *err);

/* A slot is in use if it has a block, or had one that is damaged or not valid
 * now. */
typedef struct gd_slot_use {
    bool is_lost;    /* a slot is counted, and not in use: */
    uint32_t lost;   /* the first one */
    uint32_t in_use;
    uint32_t freed;  /* slots whose block was freed */
    uint32_t unused; /* published slots in use that are not counted */
    uint64_t unused_bytes; /* of their blocks, before compression */
} gd_slot_use;

/* Takes the entries of slots 0 to count - 1, as Maintenance.entries lists them,
 * and their counts, 32 bits each.  unused has room for as many slots, and gets
 * the unused ones, 32 bits each. */
void gd_group_stats_judge_slots(const uint8_t *entries, const uint8_t *counts,
                                size_t count, size_t published,
                                gd_slot_use *use, uint8_t *unused);

#endif
