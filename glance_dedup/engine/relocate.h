/*
 * relocate.h - stores blocks anew at other addresses, for the evacuation of a
 * group and for healing.
 *
 * A copy goes through the packer like any new block, so it is durable and
 * published before its address is given out (N7.4), and the shared lock of its
 * group is held until the relocation is closed (I6): by then the recipes are
 * merged to it.  Belongs to the maintainer, one thread at a time.
 */
#ifndef GD_RELOCATE_H
#define GD_RELOCATE_H

#include "repo.h"

typedef struct gd_relocation gd_relocation;

gd_status gd_relocation_open(gd_repo *repo, gd_relocation **relocation,
                             gd_error *err);
void gd_relocation_close(gd_relocation *relocation);

/* Copies the blocks at count addresses, numbers of 8 bytes, into groups of
 * their scopes that none of the addresses given so far lies in.  Those that
 * cannot be had verified are left out. */
gd_status gd_relocation_add(gd_relocation *relocation,
                            const uint8_t *addresses, size_t count,
                            gd_error *err);
/* Makes a sync point.  *pairs: a gd_mapping's, the relocation's until it is
 * closed or added to. */
gd_status gd_relocation_finish(gd_relocation *relocation,
                               const uint8_t **pairs, size_t *count,
                               gd_error *err);

#endif
