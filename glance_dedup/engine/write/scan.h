/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scan.h - cuts and fingerprints bytes that are not stored now (batch.rst,
 * stage 1a).
 */
#ifndef GD_SCAN_H
#define GD_SCAN_H

#include "engine/format/requests.h"
#include "engine/repo/repo.h"

/* Cuts data, which begins and ends with a block, as an image of this scope
 * would be cut, and fingerprints the blocks with all threads.  *scanned has
 * *count items of GD_SCANNED_SIZE bytes; the caller releases it.  Thread-safe.
 * GD_INVALID where blocks are compared by value, since a fingerprint proves too
 * little there. */
gd_status gd_scan(gd_repo *repo, const gd_scope *scope, const uint8_t *data,
                  size_t length, uint8_t **scanned, size_t *count,
                  gd_error *err);

#endif
