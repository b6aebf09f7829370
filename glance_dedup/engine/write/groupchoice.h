/* SPDX-License-Identifier: Apache-2.0 */
/*
 * groupchoice.h - which groups of a scope a writer tries to lease, the fullest
 * first, so that few stay half full.
 *
 * What it learns of a group the handle keeps: that it is full, or another
 * scope's.  Nothing is locked here: whoever leases a group looks at it anew.
 */
#ifndef GD_GROUPCHOICE_H
#define GD_GROUPCHOICE_H

#include "engine/base/groupmap.h"
#include "engine/handle/repo.h"

/* Groups looked at: the newest of those that are not known to be full, or of
 * another scope.  So a handle learns about all of them in time, and a project's
 * group is found again behind any number of others'.  Older ones are the
 * collector's business. */
enum { GD_GROUPCHOICE_MOST = 256 };

/* The numbers of groups that have free slots, are of this scope, and are not in
 * `avoided` (or NULL). */
gd_status gd_groupchoice_list(gd_repo *repo, const gd_scope *scope,
                              const gd_groupmap *avoided,
                              uint32_t numbers[GD_GROUPCHOICE_MOST],
                              size_t *count, gd_error *err);

/* From now on this handle leaves the group out. */
void gd_groupchoice_remember_full(gd_repo *repo, uint32_t number);

#endif
