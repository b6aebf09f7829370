/* SPDX-License-Identifier: Apache-2.0 */
/*
 * monotonic.h - time that nobody sets.
 */
#ifndef GD_NBDKIT_MONOTONIC_H
#define GD_NBDKIT_MONOTONIC_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds since some moment before this process began. */
static inline uint64_t
gd_nbdkit_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* The same in milliseconds. */
static inline uint64_t
gd_nbdkit_now_ms(void)
{
    return gd_nbdkit_now_ns() / 1000000;
}

#endif
