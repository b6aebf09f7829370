/* SPDX-License-Identifier: Apache-2.0 */
/*
 * groupmap.h - a map from group numbers to counts; absent groups count 0.
 *
 * It grows by doubling and never shrinks: there are at most as many keys as
 * groups.  Not thread-safe.
 */
#ifndef GD_GROUPMAP_H
#define GD_GROUPMAP_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

typedef struct gd_groupmap_item {
    uint32_t group; /* 0: a free place */
    uint32_t count;
} gd_groupmap_item;

typedef struct gd_groupmap {
    const gd_env *env;
    gd_groupmap_item *items;
    size_t places; /* a power of two, or 0 */
    size_t used;
} gd_groupmap;

void gd_groupmap_init(gd_groupmap *map, const gd_env *env);
void gd_groupmap_free(gd_groupmap *map);
/* Returns a pointer to the group's count, adding the group with 0 if absent.
 * The pointer is valid until the next call.  NULL when out of memory. */
uint32_t *gd_groupmap_at(gd_groupmap *map, uint32_t group, gd_error *err);
uint32_t gd_groupmap_get(const gd_groupmap *map, uint32_t group);

#endif
