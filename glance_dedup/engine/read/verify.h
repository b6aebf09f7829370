/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.h - reading segments outside of images, and whether their blocks match
 * their entries, by checksum and by fingerprint.
 *
 * For code that writes blocks again, or judges them.  Reading an image verifies
 * the checksum only: see plan.h.
 */
#ifndef GD_VERIFY_H
#define GD_VERIFY_H

#include "engine/files/group.h"
#include "engine/format/fingerprint.h"

/* Memory of one thread that reads segments and verifies their blocks. */
typedef struct gd_decoder {
    gd_coder *coder;
    gd_hasher *hasher;
    uint8_t *in;    /* room for a segment's header and stored bytes */
    uint8_t *plain; /* room for its plain bytes */
} gd_decoder;

/* REQUIRES: *decoder is all zeros.  It must be closed after a failure, too.  If
 * digest is NULL, it has no hasher. */
gd_status gd_decoder_open(const gd_env *env, const gd_digest *digest,
                          gd_decoder *decoder, gd_error *err);
void gd_decoder_close(const gd_env *env, gd_decoder *decoder);

enum { GD_VERIFIED_AT_ONCE = 64 };

typedef struct gd_verified {
    const gd_entry *entry;
    uint32_t slot;
    bool good;
} gd_verified;

/* Finds out which of the blocks are good.  Their entries belong to this
 * segment, whose bytes are plain.  An error means that this could not be found
 * out.  hasher may be NULL: then only checksums are compared.
 * REQUIRES: count <= GD_VERIFIED_AT_ONCE. */
gd_status gd_verify_blocks(const gd_group *group,
                           const gd_segment_header *header,
                           const uint8_t *plain, gd_hasher *hasher,
                           gd_verified *blocks, size_t count, gd_error *err);

#endif
