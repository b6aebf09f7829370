/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tailrecovery.h - recovers the entries behind a group's published count (N7.3;
 * design.rst, "What a dead writer leaves").
 *
 * A writer left them that died before it published them, or a crash of the
 * machine undid the record that published them.
 */
#ifndef GD_TAILRECOVERY_H
#define GD_TAILRECOVERY_H

#include "engine/files/group.h"
#include "engine/repo/repo.h"

/* Rewrites the tail, so that the caller's own fdatasync makes it durable,
 * whatever happened to the dead writer's.  entries are those of slots [base,
 * base + count), as they were read; their states are updated.  A block that
 * does not verify becomes damaged, and an empty entry void.  An invalid entry
 * stays as it is.  Reads on all of the pool's threads, since a tail may be as
 * long as the data between two sync points.
 * REQUIRES: the lease. */
gd_status gd_tailrecovery_run(gd_repo *repo, const gd_group *group,
                              uint32_t base,
                              gd_entry *entries, uint32_t count,
                              gd_error *err);

#endif
