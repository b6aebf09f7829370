/* SPDX-License-Identifier: Apache-2.0 */
/*
 * zero.h - which bytes are all zeros.
 */
#ifndef GD_ZERO_H
#define GD_ZERO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Returns whether data[0..len) is all zeros.  Reads the bytes; never requests
 * holes from the file system.  Any alignment; len may be 0 (true).  The
 * vectorised form stops at the cache line of the first non-zero byte; the
 * scalar form is its reference in the tests. */
bool gd_is_zero(const uint8_t *data, size_t len);
bool gd_is_zero_scalar(const uint8_t *data, size_t len);

#endif
