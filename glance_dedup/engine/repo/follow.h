/* SPDX-License-Identifier: Apache-2.0 */
/*
 * follow.h - an index of hints learns of blocks that others stored: other hosts,
 * and processes of this host that have another index (hints.rst,
 * "Following").  An empty index learns of all blocks in the same way.
 */
#ifndef GD_FOLLOW_H
#define GD_FOLLOW_H

#include "engine/repo/repo.h"

typedef struct gd_followed {
    bool more;            /* there are groups left to read */
    uint32_t done, total; /* groups that are known, and all; 0 if they did not
                           * have to be listed */
    uint64_t entries;     /* read */
} gd_followed;

/* Returns whether no process of the host has scanned the groups in the last so
 * many milliseconds, or the index never reached the newest group.  False
 * without an index. */
bool gd_follow_is_due(const gd_repo *repo, unsigned ms);

/* Scans the groups that may have grown, and new ones.  Reads the entries that
 * were published since the last scan (I1) of so many groups, and adds their
 * hints to the index.  Does nothing without an index, or while another process
 * of the host, or another thread, is doing it.
 *
 * Takes no lock of the repository: what it reads may be out of date, which is
 * good enough for hints.  A group that cannot be read is tried again at each
 * scan; a reader of its blocks reports it.  GD_CLOSED after a fork; an error if
 * the groups cannot be listed. */
gd_status gd_follow(gd_repo *repo, unsigned groups, gd_followed *followed,
                    gd_error *err);

#endif
