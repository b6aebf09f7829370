/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compare.h - whether a stored block has the same bytes as another (I5, policy
 * `value`).
 *
 * Blocks are mostly compared in the order in which they were stored.  So the
 * last group's file, the entries around the last one, and their segment are
 * kept.  They stay valid: the caller holds the group's shared lock (I6), and
 * published blocks do not change under that lock (I2).
 *
 * Belongs to one transaction, one thread at a time.
 */
#ifndef GD_COMPARE_H
#define GD_COMPARE_H

#include "engine/repo/repo.h"

typedef struct gd_compare gd_compare;

gd_status gd_compare_open(gd_repo *repo, gd_compare **compare, gd_error *err);
void gd_compare_close(gd_compare *compare);

/* Returns whether the published block at this address is live and has this
 * fingerprint and these bytes.  A block with any fault counts as unequal.  So
 * does a cold one that the object store does not give within seconds, and from
 * then on every cold one.
 * REQUIRES: the group's shared lock, until gd_compare_close. */
bool gd_compare_block(gd_compare *compare, gd_address address,
                      const gd_fingerprint *fp, const uint8_t *data,
                      uint32_t length);
/* Returns whether the block that the entry describes has these bytes.  The
 * block was appended to this group; data has entry->plain_length bytes. */
bool gd_compare_entry(gd_compare *compare, const gd_group *group,
                      const gd_entry *entry, uint32_t slot,
                      const uint8_t *data);

#endif
