/* SPDX-License-Identifier: Apache-2.0 */
/*
 * groupmap.c - open addressing with linear probing.
 */
#include "engine/base/groupmap.h"

void
gd_groupmap_init(gd_groupmap *map, const gd_env *env)
{
    *map = (gd_groupmap){.env = env};
}

void
gd_groupmap_free(gd_groupmap *map)
{
    map->env->release(map->env, map->items);
    gd_groupmap_init(map, map->env);
}

/* The group's place, or the free one where it belongs.
 * REQUIRES: places > used. */
static gd_groupmap_item *
find(const gd_groupmap *map, uint32_t group)
{
    size_t mask = map->places - 1;
    size_t at = (group * UINT32_C(2654435761)) & mask;
    while (map->items[at].group != 0 && map->items[at].group != group) {
        at = (at + 1) & mask;
    }
    return &map->items[at];
}

static gd_status
grow(gd_groupmap *map, gd_error *err)
{
    gd_groupmap larger = {.env = map->env, .used = map->used};
    larger.places = map->places == 0 ? 64 : map->places * 2;
    larger.items = gd_calloc(map->env, larger.places, sizeof *larger.items, err);
    if (larger.items == NULL) {
        return GD_NOMEM;
    }
    for (size_t i = 0; i < map->places; i++) {
        if (map->items[i].group != 0) {
            *find(&larger, map->items[i].group) = map->items[i];
        }
    }
    map->env->release(map->env, map->items);
    *map = larger;
    return GD_OK;
}

uint32_t *
gd_groupmap_at(gd_groupmap *map, uint32_t group, gd_error *err)
{
    gd_groupmap_item *item = map->places == 0 ? NULL : find(map, group);
    if (item == NULL || item->group == 0) {
        if (map->used * 4 >= map->places * 3) {
            if (grow(map, err) != GD_OK) {
                return NULL;
            }
            item = find(map, group);
        }
        item->group = group;
        map->used++;
    }
    return &item->count;
}

uint32_t
gd_groupmap_get(const gd_groupmap *map, uint32_t group)
{
    return map->places == 0 ? 0 : find(map, group)->count;
}
