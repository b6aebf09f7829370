/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compare.h - whether a stored block has the very bytes of another one (I5,
 * policy `value`).
 *
 * Blocks are mostly compared in the order in which they were stored.  So what
 * was read last is kept: the group's file, entries around the last one, and
 * their segment.  It stays true, since the caller has the group's shared lock
 * (I6), and what was published does not change under that (I2).
 *
 * Belongs to one transaction, one thread at a time.
 */
#ifndef GD_COMPARE_H
#define GD_COMPARE_H

#include "engine/handle/repo.h"

typedef struct gd_compare gd_compare;

gd_status gd_compare_open(gd_repo *repo, gd_compare **compare, gd_error *err);
void gd_compare_close(gd_compare *compare);

/* Whether the published block of this address is live, with this fingerprint
 * and these bytes.  Anything that is wrong with it makes it unequal.
 * REQUIRES: the group's shared lock, until gd_compare_close. */
bool gd_compare_block(gd_compare *compare, gd_address address,
                      const gd_fingerprint *fp, const uint8_t *data,
                      uint32_t length);
/* Whether the block that the entry describes, appended to this group, has these
 * bytes, entry->plain_length of them. */
bool gd_compare_entry(gd_compare *compare, const gd_group *group,
                      const gd_entry *entry, uint32_t slot,
                      const uint8_t *data);

#endif
