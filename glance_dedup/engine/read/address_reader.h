/* SPDX-License-Identifier: Apache-2.0 */
/*
 * address_reader.h - reads single blocks by their addresses, verified by
 * checksum and by fingerprint (I7).
 *
 * The maintainer uses it to read blocks one at a time, mostly in the order of
 * their slots, so the last segment is kept.  It also reads back what a
 * transaction has stored, before there is a recipe.  Belongs to one thread at a
 * time.
 */
#ifndef GD_ADDRESS_READER_H
#define GD_ADDRESS_READER_H

#include "engine/repo/repo.h"

typedef struct gd_address_reader gd_address_reader;

gd_status gd_address_reader_open(gd_repo *repo, gd_address_reader **reader,
                                 gd_error *err);
void gd_address_reader_close(gd_address_reader *reader);

/* *data has entry->plain_length bytes.  The reader owns it, and it is valid
 * until the next call.  If the block is GD_CORRUPT, entry is still filled in as
 * far as it could be read; its state describes the block. */
gd_status gd_address_reader_read(gd_address_reader *reader, gd_address address,
                                 gd_entry *entry, const uint8_t **data,
                                 gd_error *err);

/* Copies blocks to out, one behind the other.  Each must have this fingerprint
 * and length (I7); otherwise GD_CORRUPT names its group and slot.  No group
 * stays open.
 * REQUIRES: the groups' shared locks are held (I6), and the blocks lie before a
 * sync point (I1). */
gd_status gd_address_reader_copy(gd_address_reader *reader,
                                 const gd_address *addresses,
                                 const gd_fingerprint *fps,
                                 const uint32_t *lengths, size_t count,
                                 uint8_t *out, gd_error *err);

/* The group of the last read; NULL if it could not be opened.  Valid until the
 * next read. */
const gd_group *gd_address_reader_group(const gd_address_reader *reader);

#endif
