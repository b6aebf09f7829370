/* SPDX-License-Identifier: Apache-2.0 */
/*
 * array.h - arrays that grow by doubling.
 */
#ifndef GD_ARRAY_H
#define GD_ARRAY_H

#include <stddef.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

/* Returns the array with room for at least `wanted` items of `size` bytes; it
 * may have moved, and new places are zeros.  *room is how many items it has
 * room for.  Returns NULL when out of memory; then the old array stays. */
void *gd_array_reserve(const gd_env *env, void *array, size_t *room,
                       size_t wanted, size_t size, gd_error *err);

#endif
