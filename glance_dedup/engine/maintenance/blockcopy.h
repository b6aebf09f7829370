/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blockcopy.h - stores blocks again at other addresses, to evacuate a group or
 * to heal.
 *
 * A copy goes through the packer like any new block.  So it is durable and
 * published before its address is given out (N7.4).  The shared lock of its
 * group is held until the relocation is closed (I6); by then the recipes are
 * merged to the copy.  Belongs to the maintainer, one thread at a time.
 */
#ifndef GD_BLOCKCOPY_H
#define GD_BLOCKCOPY_H

#include "engine/repo/repo.h"

typedef struct gd_block_copy gd_block_copy;

gd_status gd_block_copy_open(gd_repo *repo, gd_block_copy **copy,
                             gd_error *err);
void gd_block_copy_close(gd_block_copy *copy);

/* Copies the blocks at count addresses, which are numbers of 8 bytes.  The
 * copies go into groups of the same scopes, but into none that contains an
 * address given so far.  Blocks that cannot be read and verified are left
 * out. */
gd_status gd_block_copy_add(gd_block_copy *copy,
                            const uint8_t *addresses, size_t count,
                            gd_error *err);
/* Copies the block at `from`, likewise, to replace the equal block at `old`.  The
 * copy gets the mark nodedup, or does not. */
gd_status gd_block_copy_add_equal(gd_block_copy *copy, uint64_t old,
                                  uint64_t from, bool nodedup,
                                  gd_error *err);
/* Makes a sync point.  *pairs has a gd_mapping's layout.  The relocation owns
 * it, and it is valid until the relocation is closed or added to. */
gd_status gd_block_copy_finish(gd_block_copy *copy,
                               const uint8_t **pairs, size_t *count,
                               gd_error *err);

#endif
