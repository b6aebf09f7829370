/* SPDX-License-Identifier: Apache-2.0 */
/*
 * groupexchange.h - puts a whole, durable file of the spool in the place of a
 * group's file (I4; grouprewrite.h has the order and its reasons).
 */
#ifndef GD_GROUPEXCHANGE_H
#define GD_GROUPEXCHANGE_H

#include "engine/files/spool.h"
#include "engine/maintenance/ownedgroup.h"

/* Replaces the group's file by this one, target's, which has these entries, of
 * all slots, and this record, marked as unsettled.  Writers are kept out of the old file
 * first.  After the rename the owned group is of the new file: it takes the
 * descriptor and the entries.  GD_IO if the file is not in the spool any more:
 * then this process has lost its locks.  REQUIRES: the file is synced. */
gd_status gd_group_exchange(gd_owned_group *owned, gd_spool_writer *file,
                            const gd_group *target, gd_entry **entries, const gd_published *record,
                            gd_error *err);

#endif
