/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grouprewrite.h - a group's rewriting: a new file with the same addresses and
 * only what lives, put in the old one's place (I4).  Two stages:
 *
 *     lease           fsync old | write new, read it back, fsync
 *     exclusive lock  rename | fsync groups/
 *
 * The first takes long and disturbs nobody: uploads find the group's duplicates
 * in the old file meanwhile.  It stands on this: in a group that is full, or
 * held exclusively, nothing changes but by who has its lease.  Live blocks never
 * do (I2); nobody appends; only the maintainer frees or marks, and takes the
 * lease for it (I4).  Before the exchange the old file is looked at again all
 * the same: same name, same records, same entries.
 *
 * A crash before the rename leaves the old file, and one in the spool that
 * nobody writes, which accounting removes.  After it, until groups/ is fsynced,
 * either may be there.  Both are whole, since both were fsynced before, and both
 * have the same blocks at the same addresses.  The new one is marked as
 * unsettled (blockgroup.h) before it gets the name: so who comes after an error,
 * or a crash of this process, makes the name durable before he appends or
 * frees.
 *
 * The new file's generation is new: a store that was cached from a file that a
 * crash took away again fits no other (N7.2).  A transaction that has one of the
 * old file, or compares by value with what it has open of it, holds the group's
 * shared lock until its recipe is committed, and so keeps the exchange off (I6).
 * The tail (N7.3) is none: entries that are not published are refused.
 *
 * Filter hints and recipes name addresses, so both stay right.  Readers that
 * have the old file open read on in it.
 */
#ifndef GD_GROUPREWRITE_H
#define GD_GROUPREWRITE_H

#include "engine/maintain/ownedgroup.h"

typedef struct gd_group_rewrite gd_group_rewrite;

/* Begins a new file.  Segments all of whose blocks live are copied as they are,
 * and of others the live blocks packed anew, unless codec is given (NULL: not):
 * then all are, and joined (gd_segment_joined).  GD_CORRUPT names the first
 * block that is damaged, or entry that is not valid: only the old file has what
 * may be read after all.  GD_BUSY, with words, while there are entries that are
 * not published.  The group must stay open for longer. */
gd_status gd_group_rewrite_open(gd_leased_group *leased, const gd_codec *codec,
                                int level, gd_group_rewrite **rewriting,
                                gd_error *err);
/* Discards the file unless it took the old one's place. */
void gd_group_rewrite_close(gd_group_rewrite *rewriting);

/* Writes the next few MiB, with all threads; every block is verified by its
 * fingerprint, and once more as it can be read from the new file.  *done: the
 * file is complete and durable.  *cost: bytes read and written.  After an error
 * it can only be closed. */
gd_status gd_group_rewrite_step(gd_group_rewrite *rewriting, bool *done,
                                uint64_t *cost, gd_error *err);
/* Slots that were gone through. */
uint32_t gd_group_rewrite_slots(const gd_group_rewrite *rewriting);
/* Bytes of the disk that the old file takes, and the new one will.
 * REQUIRES: it is complete. */
gd_status gd_group_rewrite_sizes(const gd_group_rewrite *rewriting,
                                 uint64_t *before, uint64_t *after,
                                 gd_error *err);

/* Puts the file in the old one's place.  owned: of the same leased group, both of
 * which are of the new file from here on.  REQUIRES: it is complete. */
gd_status gd_group_rewrite_exchange(gd_group_rewrite *rewriting,
                                    gd_owned_group *owned, gd_error *err);

/* All of it, of a group that is owned.  *bytes are those of the disk that were
 * given back; the group goes on with the new file. */
gd_status gd_owned_group_rewrite(gd_owned_group *owned, const gd_codec *codec,
                                 int level, uint64_t *bytes, gd_error *err);

#endif
