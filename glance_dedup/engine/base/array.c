/* SPDX-License-Identifier: Apache-2.0 */
/*
 * array.c - see array.h.
 */
#include "engine/base/array.h"

#include <string.h>

enum { MIN_COUNT = 16 };

void *
gd_array_reserve(const gd_env *env, void *array, size_t *room, size_t wanted,
                 size_t size, gd_error *err)
{
    size_t larger = *room < MIN_COUNT / 2 ? MIN_COUNT : *room * 2;
    if (wanted <= *room) {
        return array;
    }
    larger = larger < wanted ? wanted : larger;
    void *moved = gd_calloc(env, larger, size, err);
    if (moved == NULL) {
        return NULL;
    }
    if (*room > 0) {
        memcpy(moved, array, *room * size);
    }
    env->release(env, array);
    *room = larger;
    return moved;
}
