/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ownedgroup.h - a group that a process has to itself: freeing blocks in it,
 * giving its space back, and removing it (N6; I4).
 *
 * Only the maintainer may do these.  Another process that has a group to itself
 * may only replace its file (grouprewrite.h).
 *
 * A change of published entries reaches the disk in this order:
 *
 *     fdatasync | new generation, fdatasync | entries, fdatasync | holes
 *
 * The generation goes first.  A process may have the group's fingerprint store
 * cached, and trusts it as long as the generation is the same (N7.2).  If an
 * entry were freed first, a crash before the new generation would leave stale
 * stores that are trusted, and the next upload would name a freed block.  In
 * this order, a crash only leaves a generation that changed for nothing.  The
 * generation is durable before an entry changes, since a store cached by
 * another host outlives our crash.  It is a random number: a generation that
 * others saw may still be lost, and must then not be given to other entries.
 * The first fdatasync makes the previous record durable, also another
 * process's.  So if the next write is torn, the group falls back to the last
 * generation, not to an older one.
 *
 * Belongs to one thread.  After an error only gd_owned_group_close may be
 * called; the next holder reads the disk's content.
 */
#ifndef GD_OWNEDGROUP_H
#define GD_OWNEDGROUP_H

#include "engine/maintenance/leasedgroup.h"

typedef struct gd_owned_group {
    gd_leased_group *leased;
    bool settled; /* every freed entry is known to be durable */
    bool failed;
} gd_owned_group;

/* Takes the lease and the exclusive lock (N6.1), then opens the file, and
 * publishes the entries that a dead writer left there (N7.3).  GD_BUSY, with a
 * message, if either is refused; GD_NOTFOUND if there is no such group. */
gd_status gd_owned_group_open(gd_repo *repo, uint32_t number,
                              gd_owned_group **owned, gd_error *err);
/* Also takes the exclusive lock of a leased group, and checks that the group is
 * still the one that was leased.  GD_BUSY, with a message, if the lock is
 * refused or the name leads to another file; GD_CORRUPT if the group was
 * changed.  After an error only the lease is held, and the next call checks all
 * of this again.  After success the owned group has the leased group, and
 * closes it. */
gd_status gd_owned_group_lock(gd_leased_group *leased,
                              gd_owned_group **owned, gd_error *err);
void gd_owned_group_close(gd_owned_group *owned);

/* GD_CLOSED after any failure. */
gd_status gd_owned_group_require_usable(const gd_owned_group *owned,
                                        gd_error *err);

/* Frees those of the slots that are live, damaged or invalid; *freed is how
 * many.  Returns GD_INVALID and changes nothing unless all are published
 * (N6.4). */
gd_status gd_owned_group_free(gd_owned_group *owned, const uint32_t *slots,
                              size_t count, uint32_t *freed, gd_error *err);

/* Gives back the whole file-system blocks that no entry can need.  It keeps the
 * segments that a live or damaged entry names, published or not, and everything
 * behind the last published end.  It gives nothing back while an entry is
 * invalid, since nobody knows what that entry named.  *bytes is the disk
 * space. */
gd_status gd_owned_group_punch(gd_owned_group *owned, uint64_t *bytes,
                               gd_error *err);

/* Bytes of the segments that have a live block, and how many of these bytes a
 * rewrite would keep, as far as the entries show it. */
gd_status gd_owned_group_live_bytes(const gd_owned_group *owned,
                                    uint64_t *bytes, uint64_t *kept,
                                    gd_error *err);

/* Copies the stored bytes of the live slots' segments into quarantine/,
 * durably, one file each, and marks the entries as damaged.  Bytes that cannot
 * be read are zeros there.  *names are the files' names; the caller must
 * release them, even after an error. */
typedef char gd_quarantine_name[GD_NAME_SIZE];
gd_status gd_owned_group_mark_damaged(gd_owned_group *owned,
                                      const uint32_t *slots, size_t count,
                                      gd_quarantine_name **names,
                                      size_t *name_count, gd_error *err);

/* Before the group's name is taken from its file: notes in it, durably, that
 * nobody appends any more, unless the group is full.  This cannot be undone. */
gd_status gd_owned_group_keep_writers_out(gd_owned_group *owned,
                                          gd_error *err);

/* Returns whether no slot is live, damaged, invalid or unpublished. */
bool gd_owned_group_is_empty(const gd_owned_group *owned);

/* Removes the group if it is empty.  The group with the highest number stays,
 * since new numbers are counted from it (placeholder.h).  *removed: it was. */
gd_status gd_owned_group_unlink(gd_owned_group *owned, bool *removed,
                                gd_error *err);

#endif
