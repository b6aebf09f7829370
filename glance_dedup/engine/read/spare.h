/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spare.h - second copies of blocks that many images need (format.rst, "Spare
 * copies").
 *
 * Nothing refers to a file in spares/.  Its blocks are found by their
 * fingerprints, and verified by them, so losing a file, or having a stale one,
 * costs only redundancy.  If fingerprints are not cryptographic, another block
 * may have the lost block's fingerprint.  Then no spare copies are written, and
 * existing ones are not read (I5).  Only the maintainer writes; reading is
 * thread-safe.
 */
#ifndef GD_SPARE_H
#define GD_SPARE_H

#include "engine/format/address.h"
#include "engine/repo/repo.h"

/* Rewrites spares/<number> with the blocks at these addresses.  The file is
 * whole and durable before it takes its name.  Each block is read and verified;
 * a damaged one is taken from its existing copy.  If that is not possible
 * either, returns GD_CORRUPT, and the old file stays.  Without addresses,
 * removes the file.  *bytes is the file's length.  GD_INVALID if fingerprints
 * are not cryptographic.
 * REQUIRES: the caller is the maintainer. */
gd_status gd_spare_write(gd_repo *repo, uint32_t number,
                         const gd_address *addresses, size_t count,
                         uint64_t *bytes, gd_error *err);

/* Looks for a copy of the block with this scope, fingerprint, length and
 * checksum.  If one verifies, copies it to out and sets *found. */
gd_status gd_spare_read(gd_repo *repo, const gd_scope *scope,
                        const gd_fingerprint *fp, uint32_t length,
                        uint64_t checksum, uint8_t *out, bool *found,
                        gd_error *err);

#endif
