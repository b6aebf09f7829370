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

enum { GD_OWN_GROUPS = 256 };

typedef struct gd_own_groups {
    _Atomic uint64_t epoch;
    _Atomic uint64_t words[GD_OWN_GROUPS]; /* by the group's number */
} gd_own_groups;

/* All are thread-safe, across processes too, but for what the lock of the
 * rebuild is required for. */

/* To be asked for before the hints are added, and given to gd_own_note. */
uint64_t gd_own_epoch(const gd_own_groups *own);
/* Slots [first, end) of the group were published here, and have their hints. */
void gd_own_note(gd_own_groups *own, uint64_t epoch, uint32_t group,
                 uint32_t first, uint32_t end);
/* Sets [first, end) to such slots; both are 0 if none are known. */
void gd_own_find(const gd_own_groups *own, uint32_t group, uint32_t *first,
                 uint32_t *end);
/* Ends the epoch, and begins one.  REQUIRES: the lock of the rebuild.  The
 * second does nothing in an epoch: so it also continues for a process that
 * died between them. */
void gd_own_end_epoch(gd_own_groups *own);
void gd_own_begin_epoch(gd_own_groups *own);

#endif
