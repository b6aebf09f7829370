/* SPDX-License-Identifier: Apache-2.0 */
/*
 * placeholder.h - the rest of an empty group whose number must stay.
 *
 * New numbers are counted from the highest, so the group that has it is never
 * removed, however empty (ownedgroup.h).  But its file may be replaced by one
 * without a fingerprint store: a *placeholder*.  This has the group's header,
 * a record of no published slots, marked as poisoned, and a hole up to where
 * segments would begin.  So it is a group like any other, of as many slots, all
 * empty, and nobody appends to it.  A later collection removes it, once another
 * group has a higher number.
 *
 * The file is made in the spool and exchanged as a rewritten one is
 * (grouprewrite.h), so a crash leaves either file, and neither has a block.
 */
#ifndef GD_PLACEHOLDER_H
#define GD_PLACEHOLDER_H

#include "engine/maintenance/ownedgroup.h"

/* Replaces the group's file, unless something in the group forbids removal, or
 * it is a placeholder already.  *bytes is the disk space given back.  The owned
 * group continues with the new file. */
gd_status gd_placeholder_leave(gd_owned_group *owned,
                               uint64_t *bytes, gd_error *err);

#endif
