/* SPDX-License-Identifier: Apache-2.0 */
/*
 * zero.c - see zero.h.
 */
#include "engine/base/zero.h"

#include <string.h>

/* 16 bytes: every 64-bit machine has registers of this size.  Where wider ones
 * may be used, the compiler joins two or four of these. */
typedef uint64_t vec __attribute__((vector_size(16)));

enum {
    VEC = sizeof(vec),
    LINE = 64,
    STRIDE = 256, /* bytes ORed together between two tests */
};

static inline vec
load(const uint8_t *p)
{
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline vec
or_line(const uint8_t *p)
{
    return (load(p) | load(p + VEC)) | (load(p + 2 * VEC) | load(p + 3 * VEC));
}

static inline bool
is_zero_vec(vec v)
{
    return (v[0] | v[1]) == 0;
}

/* Data that is not zeros usually shows it in its first 16 bytes, or in its
 * first line.  Only after those does it pay to test less often. */
bool
gd_is_zero(const uint8_t *data, size_t len)
{
    if (len < VEC) {
        return gd_is_zero_scalar(data, len);
    }
    const uint8_t *end = data + len;
    if (!is_zero_vec(load(data))) {
        return false;
    }
    const uint8_t *p = data;
    for (; (size_t)(end - p) >= STRIDE; p += STRIDE) {
        vec any = (or_line(p) | or_line(p + LINE)) |
                  (or_line(p + 2 * LINE) | or_line(p + 3 * LINE));
        if (!is_zero_vec(any)) {
            return false;
        }
    }
    vec any = {0, 0};
    for (; (size_t)(end - p) >= VEC; p += VEC) {
        any |= load(p);
    }
    /* The rest is shorter than a vector.  Read it together with bytes before
     * it; those were found to be zero or are in any. */
    any |= load(end - VEC);
    return is_zero_vec(any);
}

bool
gd_is_zero_scalar(const uint8_t *data, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (data[i] != 0) {
            return false;
        }
    }
    return true;
}
