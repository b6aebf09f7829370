/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gear.h - content-defined chunking (chunker.h): the constants of its hash
 * (format.rst, "Chunking").
 *
 * With hash = 2 * hash + gd_gear[byte], modulo 2^64, the hash behind a byte
 * depends on 64 bytes.
 */
#ifndef GD_GEAR_H
#define GD_GEAR_H

#include <stdint.h>

extern const uint64_t gd_gear[256];

#endif
