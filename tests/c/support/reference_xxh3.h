/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reference_xxh3.h - XXH3 without vector registers, to compare the quicker code
 * with.
 */
#ifndef REFERENCE_XXH3_H
#define REFERENCE_XXH3_H

#include <stddef.h>
#include <stdint.h>

uint64_t reference_xxh3_64(const void *data, size_t length, uint64_t seed);
/* The digest is in canonical order. */
void reference_xxh3_128(const void *data, size_t length, uint8_t out[16]);

#endif
