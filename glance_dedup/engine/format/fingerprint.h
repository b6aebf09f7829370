/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fingerprint.h - the hash of a block's content.
 *
 * A fingerprint fills GD_FINGERPRINT_SIZE bytes: a longer digest is cut, a
 * shorter one is padded with zeros.  The digest is a parameter of the
 * repository.
 */
#ifndef GD_FINGERPRINT_H
#define GD_FINGERPRINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

enum { GD_FINGERPRINT_SIZE = 32, GD_SCOPE_SIZE = 16 };

typedef struct gd_fingerprint {
    uint8_t bytes[GD_FINGERPRINT_SIZE];
} gd_fingerprint;

/* The blocks that a block may be a duplicate of (access.rst, "Scopes"). */
typedef struct gd_scope {
    uint8_t id[GD_SCOPE_SIZE];
} gd_scope;

/* Zeros: of all. */
extern const gd_scope gd_global_scope;
/* 0xff: the scope in the files of spares/, which have blocks of any scope. */
extern const gd_scope gd_spares_scope;

/* A digest by name.  Immutable after creation, so threads may share it. */
typedef struct gd_digest gd_digest;

/* name is one of: any digest of OpenSSL of 160 bits or more ("sha256",
 * "sha512-256", "blake2s256", "sha3-256"; extendable-output ones like shake are
 * refused); "xxh3-128" (XXH128 in canonical, big-endian order; not
 * cryptographic); or, only with allow_weak, "weak-8" (the first byte of
 * SHA-256; for tests).  Capitals and small letters are the same.  GD_INVALID
 * names the mistake and gives examples. */
gd_status gd_digest_open(const gd_env *env, const char *name, bool allow_weak,
                         gd_digest **digest, gd_error *err);
void gd_digest_close(const gd_env *env, gd_digest *digest);

/* Returns whether blocks with equal fingerprints may be taken as equal (I5). */
bool gd_digest_is_cryptographic(const gd_digest *digest);

/* Memory of one thread that computes fingerprints: contexts are made once, not
 * per block.  A hasher belongs to one thread at a time.  Close it before its
 * digest. */
typedef struct gd_hasher gd_hasher;
gd_status gd_hasher_open(const gd_env *env, const gd_digest *digest,
                         gd_hasher **hasher, gd_error *err);
void gd_hasher_close(const gd_env *env, gd_hasher *hasher);
/* Hashes the scope's id before the data, except for the global scope. */
gd_status gd_hasher_compute(gd_hasher *hasher, const gd_scope *scope,
                            const void *data, size_t len, gd_fingerprint *out,
                            gd_error *err);

/* A block whose fingerprint is wanted. */
typedef struct gd_hash_input {
    const void *data;
    size_t length;
    gd_fingerprint *out;
} gd_hash_input;

/* The same for many blocks, in parallel lanes where possible (sha256mb.h).
 * After an error any of the outputs may hold anything. */
gd_status gd_hasher_compute_many(gd_hasher *hasher, const gd_scope *scope,
                                 const gd_hash_input *inputs, size_t count,
                                 gd_error *err);

static inline bool
gd_fingerprint_equal(const gd_fingerprint *a, const gd_fingerprint *b)
{
    return __builtin_memcmp(a->bytes, b->bytes, GD_FINGERPRINT_SIZE) == 0;
}

static inline bool
gd_scope_equal(const gd_scope *a, const gd_scope *b)
{
    return __builtin_memcmp(a->id, b->id, GD_SCOPE_SIZE) == 0;
}

#endif
