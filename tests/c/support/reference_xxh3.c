/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reference_xxh3.c - see reference_xxh3.h.  The header's own code, compiled
 * here.
 */
#include "tests/c/support/reference_xxh3.h"

#include <string.h>

#define XXH_INLINE_ALL
#define XXH_VECTOR XXH_SCALAR
#include <xxhash.h>

uint64_t
reference_xxh3_64(const void *data, size_t length, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, length, seed);
}

void
reference_xxh3_128(const void *data, size_t length, uint8_t out[16])
{
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, length));
    memcpy(out, canonical.digest, sizeof canonical.digest);
}
