/* SPDX-License-Identifier: Apache-2.0 */
/*
 * leasedgroup.h - a group that was leased to be maintained: nobody appends to
 * it, but uploads find its blocks and name them (I4).
 *
 * With the lease alone, nothing published may be changed; for that the group
 * must be owned (ownedgroup.h).  Belongs to one thread.
 */
#ifndef GD_LEASEDGROUP_H
#define GD_LEASEDGROUP_H

#include "engine/files/group.h"
#include "engine/repo/repo.h"

typedef struct gd_leased_group {
    gd_repo *repo;
    uint32_t number;
    gd_group *group; /* NULL until it is found */
    gd_published published;
    gd_entry *entries; /* of all slots, as they are in the file */
    uint64_t seen;     /* unless it is owned: checksum of records and entries */
} gd_leased_group;

/* Leases a *sealed* group: all its slots are published, and it is not poisoned,
 * so no writer comes to it.  GD_BUSY, with a message, if the group is not
 * sealed or the lease is refused; GD_NOTFOUND if there is no such group. */
gd_status gd_leased_group_open(gd_repo *repo, uint32_t number,
                               gd_leased_group **leased, gd_error *err);
/* Leases a group whether it is sealed or not, and first settles what a writer
 * left behind the published count (N7.3).  This changes the file in place, so
 * only the maintainer may do it (I4).  GD_BUSY, with a message, if the lease is
 * refused. */
gd_status gd_leased_group_open_partial(gd_repo *repo, uint32_t number,
                                       gd_leased_group **leased,
                                       gd_error *err);
/* Also closes a group after gd_leased_group_take alone. */
void gd_leased_group_close(gd_leased_group *leased);

/* Notes in the record that the published blocks were packed like this, or that
 * it would not make them smaller.  Nothing else of the group changes.  If
 * the note is lost, the group is tried again some time.  This changes the file
 * in place, so only the maintainer may do it (I4). */
gd_status gd_leased_group_note_codec(gd_leased_group *leased,
                                     const gd_packing *packing,
                                     gd_error *err);

/* The steps of opening.  ownedgroup.h takes another lock between them.  The
 * first takes only the lease. */
gd_status gd_leased_group_take(gd_repo *repo, uint32_t number,
                               gd_leased_group **leased, gd_error *err);
/* Opens the file, checks that the name still leads to it, and reads the
 * record. */
gd_status gd_leased_group_find(gd_leased_group *leased, gd_error *err);
gd_status gd_leased_group_read_entries(gd_leased_group *leased, gd_error *err);

/* GD_BUSY if another process has the lease, or the name leads to another file.
 * GD_CORRUPT if the group changed since it was opened: then locks were lost or
 * ignored.
 * REQUIRES: one of the two above has opened it. */
gd_status gd_leased_group_require_unchanged(const gd_leased_group *leased,
                                            gd_error *err);

#endif
