/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keyeddigest.h - a digest that nobody can predict without its key.
 *
 * It is GMAC with AES-256 and one nonce, so it differs from GHASH by a constant.
 * GHASH is a polynomial of the data over GF(2^128), evaluated at a secret point.
 * Two different inputs of L bytes agree at (L / 16 + 1) points at most.  So for
 * inputs that were chosen without knowing the key or a digest, and as long as AES
 * is a good cipher, the chance that two of 2 MiB have one digest is 2^-110.
 *
 * An attacker who knows the key, or two digests, can make inputs with one
 * digest.  So it is no fingerprint.
 */
#ifndef GD_KEYEDDIGEST_H
#define GD_KEYEDDIGEST_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

enum { GD_KEYED_KEY_SIZE = 32, GD_KEYED_DIGEST_SIZE = 16 };

gd_status gd_keyed_digest(const uint8_t key[GD_KEYED_KEY_SIZE],
                          const void *data, size_t len,
                          uint8_t out[GD_KEYED_DIGEST_SIZE], gd_error *err);

#endif
