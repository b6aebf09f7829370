/* SPDX-License-Identifier: Apache-2.0 */
/*
 * coding.h - integers on disk (little-endian) and checksums.
 *
 * Every multi-byte integer of the format is encoded here and nowhere else.
 * The checksum is XXH3-64 (xxHash specification, 0.8): it finds damage, not
 * forgery.  A seed ties a record to its place, so that a record copied
 * elsewhere fails its check.
 */
#ifndef GD_CODING_H
#define GD_CODING_H

#include <endian.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>
/* Where the library can choose its code by the processor, this header redirects
 * its names to the functions that do. */
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>
#endif

static inline void
gd_put16(uint8_t *p, uint16_t v)
{
    v = htole16(v);
    memcpy(p, &v, sizeof v);
}

static inline void
gd_put32(uint8_t *p, uint32_t v)
{
    v = htole32(v);
    memcpy(p, &v, sizeof v);
}

static inline void
gd_put64(uint8_t *p, uint64_t v)
{
    v = htole64(v);
    memcpy(p, &v, sizeof v);
}

static inline uint16_t
gd_get16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return le16toh(v);
}

static inline uint32_t
gd_get32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return le32toh(v);
}

static inline uint64_t
gd_get64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return le64toh(v);
}

/* Big-endian integers, of formats that are not ours. */
static inline uint16_t
gd_get16_be(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return be16toh(v);
}

static inline uint32_t
gd_get32_be(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return be32toh(v);
}

static inline uint64_t
gd_get64_be(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return be64toh(v);
}

/* Numbers of so many bytes, at most 8. */
static inline void
gd_put_number(uint8_t *p, size_t bytes, uint64_t v)
{
    v = htole64(v);
    memcpy(p, &v, bytes);
}

static inline uint64_t
gd_get_number(const uint8_t *p, size_t bytes)
{
    uint64_t v = 0;
    memcpy(&v, p, bytes);
    return le64toh(v);
}

/* The first of sorted items, each of which begins with a number, whose number
 * is not less than this one; count if there is none. */
static inline size_t
gd_lower_bound(const uint8_t *items, size_t item_size, size_t count,
               uint64_t number)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (gd_get64(items + middle * item_size) < number) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static inline uint64_t
gd_checksum(const void *data, size_t len, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, len, seed);
}

#endif
