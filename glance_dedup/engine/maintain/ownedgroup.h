/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ownedgroup.h - a group that the maintainer has to itself: freeing in it,
 * giving its space back, and removing it (N6; I4).
 *
 * The order in which a change of published entries reaches the disk:
 *
 *     fdatasync | new generation, fdatasync | entries, fdatasync | holes
 *
 * The generation goes first.  A process may have the group's fingerprint store
 * cached, and believes it as long as the generation is the same (N7.2).  Were an
 * entry freed first, a crash before the generation would leave stale stores that
 * are believed: the next upload would name a freed block.  This way round, a
 * crash leaves a generation that changed for nothing.  It is durable before an
 * entry changes, since a cached store of another host outlives our crash; and it
 * is a random number, since one that others saw may yet be lost, and must not be
 * given to other entries then.  The first fdatasync makes the record before it
 * durable, whoever wrote it: so that a torn write of the next falls back to a
 * generation that is the last, not to an older one.
 *
 * Belongs to one thread.  After an error only gd_owned_group_close is of use:
 * what is on the disk is then for the next holder to read.
 */
#ifndef GD_OWNEDGROUP_H
#define GD_OWNEDGROUP_H

#include "engine/maintain/leasedgroup.h"

typedef struct gd_owned_group {
    gd_leased_group *leased;
    bool settled; /* every freed entry is known to be durable */
    bool failed;
} gd_owned_group;

/* Takes lease and exclusive lock (N6.1), then opens the file, and publishes what
 * a sync that failed has left in it (N7.3).  GD_BUSY, with
 * words, if either is refused; GD_NOTFOUND if there is no such group. */
gd_status gd_owned_group_open(gd_repo *repo, uint32_t number,
                              gd_owned_group **owned, gd_error *err);
/* Takes the exclusive lock, too, of a group that was leased, and makes sure that
 * the group is the one that was leased: GD_BUSY, with words, if the lock is
 * refused, or the name leads to another file; GD_CORRUPT if the group was
 * changed.  After an error only the lease is held, and the next call asks all of
 * this anew.  Else the leased group is the owned one's, and closed with it. */
gd_status gd_leased_group_exclude(gd_leased_group *leased,
                                  gd_owned_group **owned, gd_error *err);
void gd_owned_group_close(gd_owned_group *owned);

/* GD_CLOSED once anything failed. */
gd_status gd_owned_group_check(const gd_owned_group *owned, gd_error *err);

/* Frees those of the slots that are live, damaged or invalid; *freed is how
 * many.  GD_INVALID, with nothing changed, unless all are published (N6.4). */
gd_status gd_owned_group_free(gd_owned_group *owned, const uint32_t *slots,
                              size_t count, uint32_t *freed, gd_error *err);

/* Gives the whole file-system blocks back that no entry can need: not those of
 * a segment that a live or damaged entry names, be it published or not; nothing
 * behind the last published end; and nothing at all as long as an entry is
 * invalid, since nobody knows what it named.  *bytes are those of the disk. */
gd_status gd_owned_group_punch(gd_owned_group *owned, uint64_t *bytes,
                               gd_error *err);

/* Bytes of the segments that have a live block, and how many of them rewriting
 * would keep, as far as the entries tell. */
gd_status gd_owned_group_live_bytes(const gd_owned_group *owned,
                                    uint64_t *bytes, uint64_t *kept,
                                    gd_error *err);

/* Copies the stored bytes of the segments of those slots that are live into
 * quarantine/, one file each, durably, and makes the entries damaged.  Bytes
 * that cannot be read are zeros there.  *names, the files', is the caller's to
 * release, whatever is returned. */
typedef char gd_quarantine_name[GD_NAME_SIZE];
gd_status gd_owned_group_mark_damaged(gd_owned_group *owned,
                                      const uint32_t *slots, size_t count,
                                      gd_quarantine_name **names,
                                      size_t *name_count, gd_error *err);

/* Removes the group, if nothing in it is live, damaged, invalid or not
 * published, and it is not the one with the highest number, from which new
 * numbers are counted.  *removed tells. */
gd_status gd_owned_group_unlink(gd_owned_group *owned, bool *removed,
                                gd_error *err);

#endif
