/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pagecache.h - the pages of DTB's file that are in memory, up to a budget.
 *
 * A page that is to leave is chosen by clock: pages used since the hand last
 * passed stay, and so do changed ones.  When three quarters of the pages in
 * memory are changed, all of them are written, in the order of the file, so
 * there always is one that may leave (Dmdedup's limit, too).
 *
 * Pages are read and written beside the kernel's page cache where the file is
 * open so.  Memory for finding a page takes four bytes for each page of the
 * file.
 */
#ifndef GD_KV_PAGECACHE_H
#define GD_KV_PAGECACHE_H

#include "engine/kv/dtbpage.h"

enum { GD_PAGECACHE_MIN = 8 }; /* pages in memory, whatever the budget */

typedef struct gd_pagecache gd_pagecache;

/* Objects that the cache uses; all of them stay the caller's. */
typedef struct gd_pagecache_file {
    int fd;
    const char *name;
    uint64_t pages; /* behind the header */
    uint64_t seed;
} gd_pagecache_file;

/* budget is in bytes.  Counts go to stats. */
gd_status gd_pagecache_open(const gd_env *env, const gd_pagecache_file *file,
                            uint64_t budget, gd_kv_stats *stats,
                            gd_pagecache **cache, gd_error *err);
/* Writes nothing.  cache may be NULL. */
void gd_pagecache_close(const gd_env *env, gd_pagecache *cache);

/* The page, which is valid, until the next call.  number is from 1 to pages.
 * Only after a call with change may the caller change it. */
gd_status gd_pagecache_get(gd_pagecache *cache, uint64_t number, bool change,
                           uint8_t **page, gd_error *err);
/* Writes all changed pages, and syncs the file.  After a failed sync this and
 * every later change fails. */
gd_status gd_pagecache_sync(gd_pagecache *cache, gd_error *err);

#endif
