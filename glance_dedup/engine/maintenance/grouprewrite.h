/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grouprewrite.h - rewrites a group into a new file that keeps the addresses
 * and only the live blocks, and replaces the old file (I4).
 *
 * There are two stages:
 *
 *     lease           fsync old | write new, read it back, fsync
 *     exclusive lock  rename | fsync groups/
 *
 * The first stage takes long and disturbs nobody: meanwhile uploads find the
 * group's duplicates in the old file.  This is safe because under the lease only
 * the lessee changes anything.  Live blocks never
 * change (I2).  Nobody appends.  Only the maintainer frees or marks blocks, and
 * takes the lease to do so (I4).  The old file is checked again before the
 * exchange all the same: same lease, same name, same records, same entries.
 *
 * The rewriter need not be the maintainer.  It may be on a host that was cut
 * off from the server, which then dropped its locks, and it does not notice.
 * So it changes no file that others use: it writes its own, in the spool, and
 * renames it.  A maintainer that frees blocks of the group has first removed
 * that name from the spool (N6.2), so a late rename fails.  hosts.rst,
 * "Helpers", has the argument.
 *
 * If the group is not full, the old file is marked as poisoned before it loses
 * its name: a process that lost its locks may rename late, and a writer on
 * another host must not have appended to the old file by then.
 *
 * A crash before the rename leaves the old file, and a file in the spool that
 * nobody writes, which accounting removes.  After the rename, until groups/ is
 * fsynced, a crash may leave either file.  Both are whole, since both were
 * fsynced before, and both have the same blocks at the same addresses.  The new
 * file is marked as unsettled (group.h) before it gets the name, and
 * stays so until a holder writes its next record.  So whatever became of the
 * fsync, each holder makes the name durable before it appends or frees.
 *
 * The new file has a new generation.  So if a crash undoes the rename, a store
 * that was cached from the new file matches no other file (N7.2).  A
 * transaction may have a store of the old file, or compare by value with the
 * old file that it has open.  It holds the group's shared lock until its recipe
 * is committed, and so prevents the exchange (I6).  There is no tail (N7.3):
 * groups with unpublished entries are refused.
 *
 * Filter hints and recipes name addresses, so both stay right.  Readers that
 * have the old file open continue to read it.
 */
#ifndef GD_GROUPREWRITE_H
#define GD_GROUPREWRITE_H

#include "engine/maintenance/ownedgroup.h"

typedef struct gd_group_rewrite gd_group_rewrite;

/* Begins a new file.  If it is to be cold, it is whole at first, and becomes the
 * object (cold.rst, "Becoming cold").  With packing NULL, segments whose blocks
 * are all live are copied as they are, and the live blocks of other segments
 * are packed again.
 * Otherwise all blocks are packed again, and segments joined
 * (gd_segment_joined); the memory for that is that of the group's blocks, up to
 * 128 MiB, if segments have lists (rewritesource.h).  GD_CORRUPT names the first
 * damaged block or invalid entry: only the old file has what may still be
 * readable.  GD_BUSY, with a message, while there are unpublished entries.
 * GD_BUSY also if an older program keeps a feature from being set that the file
 * needs.  The leased group must stay open longer than this. */
gd_status gd_group_rewrite_open(gd_leased_group *leased,
                                const gd_packing *packing, bool cold,
                                gd_group_rewrite **rewriting, gd_error *err);
/* Discards the file unless it took the old one's place. */
void gd_group_rewrite_close(gd_group_rewrite *rewriting);

/* Returns GD_OK if the rewrite may go on.  GD_BUSY, with a message, if a
 * collector has announced that it wants the group, and does not have it
 * already; GD_NOSPACE if nothing can be stored any more: closing the rewrite
 * gives its space back. */
gd_status gd_group_rewrite_require_room(const gd_group_rewrite *rewriting,
                                        gd_error *err);
/* Reads or writes the next few MiB, with all threads.  Every block is verified by its
 * fingerprint, and again as read back from the new file.  *done: the file is
 * complete and durable.  *cost: bytes read and written.  Checks before each
 * segment whether to go on.  After an error the rewrite can only be closed. */
gd_status gd_group_rewrite_step(gd_group_rewrite *rewriting, bool *done,
                                uint64_t *cost, gd_error *err);
/* Returns how many slots were processed. */
uint32_t gd_group_rewrite_slots(const gd_group_rewrite *rewriting);
/* Disk bytes of the old file, and of the new one.  REQUIRES: it is complete. */
gd_status gd_group_rewrite_sizes(const gd_group_rewrite *rewriting,
                                 uint64_t *before, uint64_t *after,
                                 gd_error *err);

/* The object of a cold group, and the path of the file that becomes it.
 * REQUIRES: it is complete. */
gd_status gd_group_rewrite_object(const gd_group_rewrite *rewriting,
                                  gd_object *object, const char **path,
                                  gd_error *err);
/* Removes the segments from the file, durably, because its object has them.
 * REQUIRES: it is complete, and to be cold. */
gd_status gd_group_rewrite_cut(gd_group_rewrite *rewriting, gd_error *err);

/* Replaces the old file.  A file that is to be cold must have been cut.  owned must be of the same leased group; from here on,
 * both are of the new file.  GD_IO if the new file is not in the spool any more:
 * then this process has lost its locks.  REQUIRES: it is complete. */
gd_status gd_group_rewrite_exchange(gd_group_rewrite *rewriting,
                                    gd_owned_group *owned, gd_error *err);

/* Does all of this for an owned group, which continues with the new file.
 * *bytes is the disk space given back. */
gd_status gd_group_rewrite_owned(gd_owned_group *owned,
                                 const gd_packing *packing, uint64_t *bytes,
                                 gd_error *err);

#endif
