/* SPDX-License-Identifier: Apache-2.0 */
/*
 * monotonic.h - time that nobody sets.
 */
#ifndef GD_NBDKIT_MONOTONIC_H
#define GD_NBDKIT_MONOTONIC_H

#include <stdint.h>
#include <time.h>

/* Milliseconds since some moment before this process began. */
static inline uint64_t
gd_nbdkit_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

#endif
