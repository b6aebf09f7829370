/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tailrecovery.h - the entries behind a group's published count: what a writer
 * left that died before it published them, or whose record a crash of the
 * machine undid (N7.3; design.rst, "What a dead writer leaves").
 */
#ifndef GD_TAILRECOVERY_H
#define GD_TAILRECOVERY_H

#include "engine/files/blockgroup.h"
#include "engine/handle/repo.h"

/* Writes the tail anew, so that the caller's own fdatasync makes it durable,
 * whatever became of the dead writer's: entries, as they were read, of slots
 * [base, base + count).  Their states become what they are now: a block that
 * does not verify is damaged, an empty entry void.  An entry that is not valid
 * stays as it is found.  Reads on all of the pool's threads: a tail may be as
 * long as what lies between two sync points.  REQUIRES: the lease. */
gd_status gd_tail_recover(gd_repo *repo, const gd_group *group, uint32_t base,
                          gd_entry *entries, uint32_t count, gd_error *err);

#endif
