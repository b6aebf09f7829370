/* SPDX-License-Identifier: Apache-2.0 */
/*
 * linearmap.h - Dmdedup's linear stores (Tarasov et al., OLS 2014): from a number
 * below the capacity to a value, for directmap.c.
 *
 * INRAM's is an array in memory.  DTB's is a file of pages of 510 values, read and
 * changed through a cache (pagecache.h), with an empty page in the place of the
 * header.  LMDB and LevelDB keep numbers in ascending order anyway, so theirs is a
 * key-value store (kv.h).
 */
#ifndef BENCHMARKS_LINEARMAP_H
#define BENCHMARKS_LINEARMAP_H

#include "engine/kv/kv.h"

typedef struct linear_map linear_map;

/* Opens the map at path, or makes an empty one.  INRAM's is always empty. */
gd_status linear_map_open(const gd_env *env, gd_kv_backend backend,
                          const char *path, const gd_kv_options *options,
                          linear_map **map, gd_error *err);
void linear_map_close(linear_map *map);

/* Of the numbers from first on.  The value 0: absent. */
gd_status linear_map_get(linear_map *map, uint64_t first, uint64_t *values,
                         size_t count, gd_error *err);
gd_status linear_map_put(linear_map *map, uint64_t first,
                         const uint64_t *values, size_t count, gd_error *err);
gd_status linear_map_commit(linear_map *map, gd_error *err);

/* Bytes reserved for the array or the cache. */
uint64_t linear_map_memory(const linear_map *map);

#endif
