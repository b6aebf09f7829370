/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunker.c - fixed blocks, and content-defined chunking.  See chunker.h.
 *
 * For content-defined chunking, a hash is rolled over the bytes:
 * hash = 2 * hash + constant[byte], modulo 2^64.  It depends on the last 64
 * bytes and on nothing before them.  A block may end after a byte if the hash
 * is then small enough.  Up to the average length, only a fourth of the usual
 * number of places qualify; after it, four times as many do.  So few blocks are
 * very short or very long.  At the maximum length there is always a cut.
 *
 * The constant of byte 0 is 0, so after 64 zeros the hash is 0, and there is a
 * cut.  A block that begins with `minimum` zeros ends where the zeros end, or
 * at the maximum length.  So data after zeros is cut from its first byte,
 * wherever it lies, and a long hole is cut as fast as it can be read.
 *
 * format.rst specifies all of this: repositories that share images should cut
 * alike.
 */
#include "engine/format/chunker.h"

#include "engine/base/zero.h"

/* ---- fixed blocks ---- */

static size_t
next_fixed(const gd_chunker *chunker, const uint8_t *data, size_t len,
           size_t known, bool last)
{
    (void)data; /* a fixed cut does not depend on the data */
    (void)known;
    if (len >= chunker->max_length) {
        return chunker->max_length;
    }
    return last ? len : 0;
}

gd_status
gd_chunker_fixed(gd_chunker *chunker, size_t block_size, gd_error *err)
{
    bool power_of_two = (block_size & (block_size - 1)) == 0;
    if (!power_of_two || block_size < GD_BLOCK_MIN ||
        block_size > GD_BLOCK_MAX) {
        return gd_fail(err, GD_INVALID,
                       "the block size is %zu bytes; it must be a power of "
                       "two from %d to %d",
                       block_size, GD_BLOCK_MIN, GD_BLOCK_MAX);
    }
    *chunker = (gd_chunker){.max_length = block_size,
                            .average = block_size,
                            .next = next_fixed};
    return GD_OK;
}

/* ---- content-defined chunking: the constants ---- */

/* Constant b is number b of the generator SplitMix64 that starts with 0: its
 * mixing of b steps.  That of 0 steps is 0. */
#define STEP(b) ((uint64_t)(b) * 0x9e3779b97f4a7c15)
#define MIX_1(z) (((z) ^ ((z) >> 30)) * 0xbf58476d1ce4e5b9)
#define MIX_2(z) (((z) ^ ((z) >> 27)) * 0x94d049bb133111eb)
#define MIX_3(z) ((z) ^ ((z) >> 31))
#define C1(b) MIX_3(MIX_2(MIX_1(STEP(b))))
#define C4(b) C1(b), C1((b) + 1), C1((b) + 2), C1((b) + 3)
#define C16(b) C4(b), C4((b) + 4), C4((b) + 8), C4((b) + 12)
#define C64(b) C16(b), C16((b) + 16), C16((b) + 32), C16((b) + 48)

const uint64_t gd_gear[256] = {C64(0), C64(64), C64(128), C64(192)};

/* ---- limits ---- */

static bool
is_power_of_two(size_t n)
{
    return n != 0 && (n & (n - 1)) == 0;
}

static gd_status
require_limits(size_t minimum, size_t average, size_t maximum, gd_error *err)
{
    if (minimum < GD_GEAR_WINDOW) {
        return gd_fail(err, GD_INVALID,
                       "chunking: the minimum is %zu bytes; it must be at "
                       "least %d", minimum, GD_GEAR_WINDOW);
    }
    if (minimum >= average) {
        return gd_fail(err, GD_INVALID,
                       "chunking: the minimum, %zu bytes, is not below the "
                       "average, %zu", minimum, average);
    }
    if (average >= maximum) {
        return gd_fail(err, GD_INVALID,
                       "chunking: the average, %zu bytes, is not below the "
                       "block size, %zu, which is the maximum", average,
                       maximum);
    }
    if (!is_power_of_two(average)) {
        return gd_fail(err, GD_INVALID,
                       "chunking: the average is %zu bytes; it must be a power "
                       "of two", average);
    }
    return GD_OK;
}

/* ---- chunking ---- */

/* The hash before data[at], except for what the next byte shifts out of it.
 * REQUIRES: at >= GD_GEAR_WINDOW - 1. */
static uint64_t
hash_before(const uint8_t *data, size_t at)
{
    uint64_t hash = 0;
    for (size_t i = at - (GD_GEAR_WINDOW - 1); i < at; i++) {
        hash = (hash << 1) + gd_gear[data[i]];
    }
    return hash;
}

/* The first cut of a length in [from, to), or 0.  *hash is the hash before
 * data[from - 1] on entry; if there is no cut, before data[to - 1] on return.
 * Takes two bytes per step, since each step waits for the one before it. */
static inline size_t
find_cut(const uint8_t *data, size_t from, size_t to, uint64_t limit,
         uint64_t *hash)
{
    uint64_t h = *hash;
    size_t length = from;
    for (; length + 1 < to; length += 2) {
        uint64_t one = gd_gear[data[length - 1]];
        uint64_t two = (one << 1) + gd_gear[data[length]];
        one += h << 1;
        h = (h << 2) + two;
        if (one < limit) {
            return length;
        }
        if (h < limit) {
            return length + 1;
        }
    }
    if (length < to) {
        h = (h << 1) + gd_gear[data[length - 1]];
        if (h < limit) {
            return length;
        }
    }
    *hash = h;
    return 0;
}

/* Counts the zeros at the start of data[0..len).  The first `known` bytes are
 * known to be zeros. */
static size_t
count_zeros(const uint8_t *data, size_t len, size_t known)
{
    enum { ONCE = 256 };
    size_t at = known;
    while (len - at >= ONCE && gd_is_zero(data + at, ONCE)) {
        at += ONCE;
    }
    while (at < len && data[at] == 0) {
        at++;
    }
    return at;
}

/* Returns the length of the block, or 0 if len bytes are too few to find it. */
static size_t
end_of_block(const gd_chunker *chunker, size_t len, bool last)
{
    if (len >= chunker->max_length) {
        return chunker->max_length;
    }
    return last ? len : 0;
}

/* The length of a block that begins with `minimum` zeros. */
static size_t
next_zeros(const gd_chunker *chunker, const uint8_t *data, size_t len,
           size_t known, bool last)
{
    size_t most = len < chunker->max_length ? len : chunker->max_length;
    size_t from = known > chunker->minimum ? known : chunker->minimum;
    size_t zeros = count_zeros(data, most, from);
    return zeros < most ? zeros : end_of_block(chunker, len, last);
}

static size_t
next_gear(const gd_chunker *chunker, const uint8_t *data, size_t len,
          size_t known, bool last)
{
    size_t minimum = chunker->minimum, average = chunker->average;
    if (len < minimum) {
        return last ? len : 0;
    }
    if (gd_is_zero(data, minimum)) {
        return next_zeros(chunker, data, len, known, last);
    }
    size_t from = known >= minimum ? known + 1 : minimum;
    size_t to = len < chunker->max_length ? len + 1 : chunker->max_length;
    size_t turn = average + 1 < to ? average + 1 : to;
    size_t cut = 0;
    if (from < to) {
        uint64_t hash = hash_before(data, from - 1);
        if (from < turn) {
            cut = find_cut(data, from, turn, chunker->hard, &hash);
            from = turn;
        }
        if (cut == 0) {
            cut = find_cut(data, from, to, chunker->easy, &hash);
        }
    }
    return cut != 0 ? cut : end_of_block(chunker, len, last);
}

size_t
gd_chunker_next_scalar(const gd_chunker *chunker, const uint8_t *data,
                       size_t len,
                       bool last)
{
    uint64_t hash = 0;
    bool zeros = true; /* all so far */
    size_t most = len < chunker->max_length ? len : chunker->max_length;
    for (size_t length = 1; length <= most; length++) {
        uint8_t byte = data[length - 1];
        if (zeros && length > chunker->minimum && byte != 0) {
            return length - 1;
        }
        zeros = zeros && byte == 0;
        hash = (hash << 1) + gd_gear[byte];
        uint64_t limit =
            length <= chunker->average ? chunker->hard : chunker->easy;
        if (length >= chunker->minimum && length < chunker->max_length &&
            hash < limit && !zeros) {
            return length;
        }
    }
    return end_of_block(chunker, len, last);
}

gd_status
gd_chunker_gear(gd_chunker *chunker, size_t minimum, size_t average,
                size_t maximum, gd_error *err)
{
    GD_TRY(gd_chunker_fixed(chunker, maximum, err));
    GD_TRY(require_limits(minimum, average, maximum, err));
    /* One in `average` hashes is less than this limit. */
    uint64_t limit = UINT64_MAX / average + 1;
    *chunker = (gd_chunker){.max_length = maximum,
                            .next = next_gear,
                            .minimum = minimum,
                            .average = average,
                            .hard = limit / 4,
                            .easy = limit * 4};
    return GD_OK;
}

gd_status
gd_chunker_open(gd_chunker *chunker, size_t minimum, size_t average,
                size_t maximum, gd_error *err)
{
    return average == 0
               ? gd_chunker_fixed(chunker, maximum, err)
               : gd_chunker_gear(chunker, minimum, average, maximum, err);
}
