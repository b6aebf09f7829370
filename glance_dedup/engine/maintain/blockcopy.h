/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blockcopy.h - stores blocks anew at other addresses, for the evacuation of a
 * group and for healing.
 *
 * A copy goes through the packer like any new block, so it is durable and
 * published before its address is given out (N7.4), and the shared lock of its
 * group is held until the relocation is closed (I6): by then the recipes are
 * merged to it.  Belongs to the maintainer, one thread at a time.
 */
#ifndef GD_BLOCKCOPY_H
#define GD_BLOCKCOPY_H

#include "engine/handle/repo.h"

typedef struct gd_block_copy gd_block_copy;

gd_status gd_block_copy_open(gd_repo *repo, gd_block_copy **copy,
                             gd_error *err);
void gd_block_copy_close(gd_block_copy *copy);

/* Copies the blocks at count addresses, numbers of 8 bytes, into groups of
 * their scopes that none of the addresses given so far lies in.  Those that
 * cannot be had verified are left out. */
gd_status gd_block_copy_add(gd_block_copy *copy,
                            const uint8_t *addresses, size_t count,
                            gd_error *err);
/* Makes a sync point.  *pairs: a gd_mapping's, the relocation's until it is
 * closed or added to. */
gd_status gd_block_copy_finish(gd_block_copy *copy,
                               const uint8_t **pairs, size_t *count,
                               gd_error *err);

#endif
