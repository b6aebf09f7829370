/* SPDX-License-Identifier: Apache-2.0 */
/*
 * appender.h - one writer's place in a group: the lease, the slots it gives
 * out, and the sync point (I1, I4; N7.3, N7.4).
 *
 * Slots are given out in order.  Data is written as it comes.  Entries are
 * written only at the sync point, so an entry never precedes its data:
 *
 *     append ... append | entries, fdatasync, publish, hints
 *
 * Nobody else knows the segments appended since the last sync point, so they
 * can be taken back.  Belongs to one transaction, one thread at a time, with
 * one exception: while one thread appends segments, another may take slots.
 */
#ifndef GD_APPENDER_H
#define GD_APPENDER_H

#include "engine/files/group.h"
#include "engine/repo/repo.h"

typedef struct gd_appender gd_appender;

/* A segment ready to be written: its header, also in encoded form, and its
 * stored bytes in pieces. */
typedef struct gd_new_segment {
    gd_segment_header header;
    uint8_t encoded[GD_SEGMENT_HEADER];
    struct iovec *pieces;
    int piece_count;
} gd_new_segment;

/* Leases the fullest free group of this scope that is not in `avoided` (which
 * may be NULL), after recovering what a dead writer left there.  If there is
 * none, makes a new group.  The lease is held until gd_appender_close.  The
 * group's shared lock is taken too, and the caller must release it, but only
 * after the recipe is committed or given up (I6). */
gd_status gd_appender_open(gd_repo *repo, const gd_scope *scope,
                           const gd_groupmap *avoided,
                           gd_appender **appender, gd_error *err);
/* Ends the lease.  Data that is not synced is cut off. */
void gd_appender_close(gd_appender *appender);

const gd_group *gd_appender_group(const gd_appender *appender);
/* Slots still to be given out. */
uint32_t gd_appender_room(const gd_appender *appender);
/* Returns whether so much was appended since the last sync point that another
 * is due. */
bool gd_appender_is_due(const gd_appender *appender);

/* Gives out the next slot.  REQUIRES: room. */
gd_status gd_appender_take_slot(gd_appender *appender,
                                const gd_fingerprint *fp, uint64_t checksum,
                                uint32_t length, uint32_t plain_offset,
                                uint32_t *slot, gd_error *err);
/* The entry of a slot given out since the last sync point, else NULL.  Valid
 * until the next sync point.  Entries of consecutive slots are adjacent in
 * memory.  The entry's segment is 0 until it is appended. */
gd_entry *gd_appender_entry(gd_appender *appender, uint32_t slot);
/* Writes segments whose slots were given out, in one write.  *written is the
 * number of bytes.  After an error the appender can only be closed. */
gd_status gd_appender_append(gd_appender *appender, gd_new_segment *segments,
                             size_t count, uint64_t *written, gd_error *err);
/* Makes a sync point.  After an error the group is poisoned, and the appender
 * can only be closed.  A second fdatasync is never tried, since it could
 * succeed after the first reported the loss (I1). */
gd_status gd_appender_sync(gd_appender *appender, gd_error *err);

/* Recovers and publishes the tail of a group to which nobody appends now
 * (N7.3), so that the collector can judge it, or the group can be recompressed.
 * A poisoned group stays poisoned.
 * REQUIRES: the lease. */
gd_status gd_appender_recover_tail(gd_repo *repo, gd_group *group,
                                   gd_published *published, gd_error *err);

#endif
