/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spare.h - second copies of blocks that many images need (format.rst, "Spare
 * copies").
 *
 * Nothing refers to a file of spares/: its blocks are found by their
 * fingerprints, and verified by them.  So a lost or stale one loses nothing but
 * redundancy.  Where fingerprints are not cryptographic another block may have
 * that of the one that was lost: then none is written, and what is there is not
 * read (I5).  Only the maintainer writes; reading is thread-safe.
 */
#ifndef GD_SPARE_H
#define GD_SPARE_H

#include "engine/format/address.h"
#include "engine/handle/repo.h"

/* Writes spares/<number> anew with the blocks of these addresses: whole and
 * durable before it takes its name.  Each block is read and verified; one that
 * is damaged is taken from the copy that is there, else GD_CORRUPT, and the old
 * file stays.  Without addresses the file is removed.  *bytes: its length.
 * GD_INVALID where fingerprints are not cryptographic.
 * REQUIRES: the caller is the maintainer. */
gd_status gd_spare_write(gd_repo *repo, uint32_t number,
                         const gd_address *addresses, size_t count,
                         uint64_t *bytes, gd_error *err);

/* Looks for the block of `length` bytes with this fingerprint, which is of this
 * scope, and checksum, and copies it to out if a copy that verifies is there. */
gd_status gd_spare_read(gd_repo *repo, const gd_scope *scope,
                        const gd_fingerprint *fp, uint32_t length,
                        uint64_t checksum, uint8_t *out, bool *found,
                        gd_error *err);

#endif
