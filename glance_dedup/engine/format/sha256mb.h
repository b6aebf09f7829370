/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sha256mb.h - SHA-256 of several blocks at once, one in each lane of the
 * processor's vector registers.
 *
 * It uses libipsec-mb, which chooses its code by the processor: 16 lanes with
 * AVX-512, 8 with AVX2, two interleaved with the SHA extensions.  The library
 * may be missing.  If its header exists at build time, the library is looked
 * for at run time, so that a build does not depend on it.  Without the header,
 * or with GD_WITHOUT_IPSEC_MB defined, gd_sha256mb_open never finds it.
 *
 * The library allocates the manager (200 KiB) itself, not through the env
 * table.
 */
#ifndef GD_SHA256MB_H
#define GD_SHA256MB_H

#include "engine/format/fingerprint.h"

enum {
    GD_SHA256MB_LANES = 16, /* blocks in one call, at most */
    /* Bytes, with the scope's id: the library counts bytes in 16 bits. */
    GD_SHA256MB_MAX = 65534,
};

/* Belongs to one thread at a time. */
typedef struct gd_sha256mb gd_sha256mb;

/* NULL if the library is missing or fails its own test. */
gd_sha256mb *gd_sha256mb_open(const gd_env *env);
void gd_sha256mb_close(gd_sha256mb *sha256mb);

/* Computes the SHA-256 of each input: of the scope's id (NULL: none) and then
 * its data.  false: not done (a block too long, no memory); any of the outputs
 * may then hold anything.  REQUIRES: count <= GD_SHA256MB_LANES. */
bool gd_sha256mb_hash(gd_sha256mb *sha256mb, const gd_scope *scope,
                      const gd_hash_input *inputs, size_t count);

#endif
