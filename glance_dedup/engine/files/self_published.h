/* SPDX-License-Identifier: Apache-2.0 */
/*
 * self_published.h - which entries the users of an index have published, and
 * added to it, themselves: nobody needs to read these from the groups.
 *
 * One word for each of the groups that were appended to last, in memory that
 * the users of the index share: 25 bits of group, 16 bits each for the first
 * slot and the one behind the last, 7 bits of epoch.  A word that is lost or
 * overwritten costs a second reading.  A word is believed only in its epoch:
 * emptying the index ends one before, and begins another after, so no word is
 * believed whose hints were removed.  An even epoch is no epoch: nothing is
 * noted, and nothing believed.
 */
#ifndef GD_SELF_PUBLISHED_H
#define GD_SELF_PUBLISHED_H

#include <stdatomic.h>
#include <stdint.h>

enum { GD_SELF_PUBLISHED_GROUPS = 256 };

typedef struct gd_self_published {
    _Atomic uint64_t epoch;
    /* by the group's number */
    _Atomic uint64_t words[GD_SELF_PUBLISHED_GROUPS];
} gd_self_published;

/* All are thread-safe, across processes too, but for what the lock of the
 * rebuild is required for. */

/* To be asked for before the hints are added, and given to
 * gd_self_published_add. */
uint64_t gd_self_published_epoch(const gd_self_published *own);
/* Slots [first, end) of the group were published here, and have their hints. */
void gd_self_published_add(gd_self_published *own, uint64_t epoch,
                           uint32_t group,
                           uint32_t first, uint32_t end);
/* Sets [first, end) to such slots; both are 0 if none are known. */
void gd_self_published_find(const gd_self_published *own, uint32_t group,
                            uint32_t *first,
                            uint32_t *end);
/* Ends the epoch, and begins one.  REQUIRES: the lock of the rebuild.  The
 * second does nothing in an epoch: so it also continues for a process that
 * died between them. */
void gd_self_published_end_epoch(gd_self_published *own);
void gd_self_published_begin_epoch(gd_self_published *own);

#endif
