/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory_large.h - large blocks of memory, which are kept for the next run.
 */
#ifndef MEMORY_LARGE_H
#define MEMORY_LARGE_H

#include <stddef.h>
#include <stdint.h>

enum { MEMORY_LARGE = 1 << 16 }; /* bytes, at least */

void *memory_large_alloc(size_t size);
/* Only touched pages cost time. */
void memory_large_clear(uint8_t *block, size_t size);
/* The block may have any size. */
void memory_large_release(void *block);

#endif
