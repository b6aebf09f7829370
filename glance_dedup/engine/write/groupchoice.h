/* SPDX-License-Identifier: Apache-2.0 */
/*
 * groupchoice.h - which groups of a scope a writer tries to lease, fullest
 * first.
 *
 * Starting with the fullest leaves few groups half full.  The handle remembers
 * which groups are full or belong to another scope.  Nothing is locked here, so
 * the lessee must check a group again.
 */
#ifndef GD_GROUPCHOICE_H
#define GD_GROUPCHOICE_H

#include "engine/base/groupmap.h"
#include "engine/repo/repo.h"

/* Number of groups that are examined: the newest ones that are not known to be
 * full or of another scope.  So a handle examines all groups in time, and finds
 * a project's group behind any number of others.  The collector takes care of
 * older groups. */
enum { GD_GROUPCHOICE_MAX = 256 };

/* Lists the numbers of groups that have free slots, are of this scope, and are
 * not in `avoided` (which may be NULL). */
gd_status gd_groupchoice_list(gd_repo *repo, const gd_scope *scope,
                              const gd_groupmap *avoided,
                              uint32_t numbers[GD_GROUPCHOICE_MAX],
                              size_t *count, gd_error *err);

/* This handle will not list the group again. */
void gd_groupchoice_remember_full(gd_repo *repo, uint32_t number);

#endif
