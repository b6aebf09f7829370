/* SPDX-License-Identifier: Apache-2.0 */
/*
 * equal.h - the length of a match.
 */
#ifndef GD_EQUAL_H
#define GD_EQUAL_H

#include "engine/base/coding.h"

/* Returns how many bytes are equal from the begin of both, at most max. */
static inline uint32_t
gd_equal_bytes(const uint8_t *a, const uint8_t *b, uint32_t max)
{
    uint32_t n = 0;
    for (; n + 8 <= max; n += 8) {
        uint64_t different = gd_get64(a + n) ^ gd_get64(b + n);
        if (different != 0) {
            return n + (uint32_t)__builtin_ctzll(different) / 8;
        }
    }
    while (n < max && a[n] == b[n]) {
        n++;
    }
    return n;
}

/* The same for at most 258 bytes.  REQUIRES: 264 bytes of both can be read. */
static inline uint32_t
gd_equal_words(const uint8_t *a, const uint8_t *b)
{
    for (uint32_t n = 0; n < 258; n += 8) {
        uint64_t different = gd_get64(a + n) ^ gd_get64(b + n);
        if (different != 0) {
            n += (uint32_t)__builtin_ctzll(different) / 8;
            return n < 258 ? n : 258;
        }
    }
    return 258;
}

#endif
