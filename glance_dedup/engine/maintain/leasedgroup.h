/* SPDX-License-Identifier: Apache-2.0 */
/*
 * leasedgroup.h - a group that the maintainer has leased: nobody appends to it,
 * but uploads find its blocks and name them (I4).
 *
 * Nothing that is published may be changed by who has the lease alone: for that
 * the group must be owned (ownedgroup.h).  Belongs to one thread.
 */
#ifndef GD_LEASEDGROUP_H
#define GD_LEASEDGROUP_H

#include "engine/files/blockgroup.h"
#include "engine/handle/repo.h"

typedef struct gd_leased_group {
    gd_repo *repo;
    uint32_t number;
    gd_group *group; /* NULL until it was found */
    gd_published published;
    gd_entry *entries; /* of all slots, as they are in the file */
    uint64_t seen;     /* of a sealed group: checksum of records and entries */
} gd_leased_group;

/* Leases a group that is *sealed*: all its slots are published, and it is not
 * poisoned, so that no writer comes to it.  GD_BUSY, with words, of another, or
 * if the lease is refused; GD_NOTFOUND if there is no such group. */
gd_status gd_leased_group_open(gd_repo *repo, uint32_t number,
                               gd_leased_group **leased, gd_error *err);
/* Also of one that was taken, and no more. */
void gd_leased_group_close(gd_leased_group *leased);

/* Has the record say that its segments were compressed with this, or would not
 * be smaller for it.  Nothing else of the group changes; what is not written
 * is tried again some time. */
gd_status gd_leased_group_note_codec(gd_leased_group *leased, gd_codec codec,
                                     int level, gd_error *err);

/* The steps of opening, for ownedgroup.h, which takes another lock between
 * them.  The lease alone: */
gd_status gd_leased_group_take(gd_repo *repo, uint32_t number,
                               gd_leased_group **leased, gd_error *err);
/* Opens the file, makes sure that the name still leads to it, reads the
 * record. */
gd_status gd_leased_group_find(gd_leased_group *leased, gd_error *err);
gd_status gd_leased_group_read_entries(gd_leased_group *leased, gd_error *err);

/* GD_BUSY if the name leads to another file.  GD_CORRUPT if the group is not what
 * it was when it was opened: then locks were lost, or nobody cared for them.
 * REQUIRES: opened as sealed. */
gd_status gd_leased_group_check_unchanged(const gd_leased_group *leased,
                                          gd_error *err);

#endif
