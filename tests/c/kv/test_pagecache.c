/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_pagecache.c - the pages that stay, the writes of changed ones, and the
 * memory's budget.
 */
#include "engine/kv/pagecache.h"

#include <fcntl.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum { PAGES = 100, FRAMES = 16, DIRTY = FRAMES / 4 * 3 };

typedef struct fixture {
    fault_env f;
    char *dir;
    char path[256];
    int fd;
    gd_kv_stats stats;
    gd_pagecache *cache;
    gd_error err;
} fixture;

static void
setup(fixture *x, uint64_t budget)
{
    memset(x, 0, sizeof *x);
    fault_env_init(&x->f);
    x->dir = check_mkdir();
    snprintf(x->path, sizeof x->path, "%s/file", x->dir);
    CHECK_INT(gd_open(&x->f.env, AT_FDCWD, x->path, O_RDWR | O_CREAT, 0600,
                      &x->fd, &x->err), GD_OK);
    CHECK_INT(ftruncate(x->fd, (PAGES + 1) * GD_DTB_PAGE), 0);
    gd_pagecache_file file = {x->fd, x->path, PAGES, 5};
    CHECK_INT(gd_pagecache_open(&x->f.env, &file, budget, &x->stats, &x->cache,
                                &x->err), GD_OK);
}

static void
teardown(fixture *x)
{
    gd_pagecache_close(&x->f.env, x->cache);
    x->f.env.close(&x->f.env, x->fd);
    CHECK_INT(fault_env_leaks(&x->f), 0);
    fault_env_destroy(&x->f);
    check_rmdir(x->dir);
}

static uint8_t *
get(fixture *x, uint64_t number, bool change)
{
    uint8_t *page = NULL;
    CHECK_INT(gd_pagecache_get(x->cache, number, change, &page, &x->err),
              GD_OK);
    return page;
}

static void
change(fixture *x, uint64_t number)
{
    memset(get(x, number, true) + 16, (int)number, GD_DTB_PAGE - 16);
}

static fixture x;

TEST_WITH(test_dirty_limit, setup(&x, FRAMES * GD_DTB_PAGE), teardown(&x))
{
    for (uint64_t n = 1; n <= DIRTY; n++) {
        change(&x, n);
        change(&x, n);
    }
    CHECK_INT(x.stats.writes, 0);
    change(&x, 50); /* now all the others are written, at once */
    CHECK_INT(x.stats.writes, 1);
    CHECK_INT(x.stats.bytes_written, DIRTY * GD_DTB_PAGE);
    CHECK_INT(x.stats.syncs, 0);
    CHECK_INT(gd_pagecache_sync(x.cache, &x.err), GD_OK);
    CHECK_INT(x.stats.writes, 2);
    CHECK_INT(x.stats.syncs, 1);
    CHECK_INT(gd_pagecache_sync(x.cache, &x.err), GD_OK);
    CHECK_INT(x.stats.writes, 2);
}

/* Each page that is read again is unchanged, even if it was written
 * meanwhile. */
TEST_WITH(test_all_pages, setup(&x, FRAMES * GD_DTB_PAGE), teardown(&x))
{
    for (unsigned round = 0; round < 3; round++) {
        for (uint64_t n = PAGES; n >= 1; n--) {
            change(&x, n);
        }
        for (uint64_t n = 1; n <= PAGES; n++) {
            CHECK_INT(get(&x, n, false)[GD_DTB_PAGE - 1], n);
        }
    }
    CHECK(x.stats.reads >= 5 * (PAGES - FRAMES));
}

/* This is the same in random order: the hand meets changed pages
 * everywhere. */
TEST(test_any_order)
{
    fixture x;
    uint8_t wanted[PAGES + 1] = {0};
    setup(&x, FRAMES * GD_DTB_PAGE);
    for (uint64_t i = 0; i < 5000; i++) {
        uint64_t draw = gd_checksum(&i, sizeof i, 2);
        uint64_t n = 1 + draw % PAGES;
        if (draw >> 60 == 0) {
            wanted[n] = (uint8_t)i;
            memset(get(&x, n, true) + 16, wanted[n], GD_DTB_PAGE - 16);
        }
        CHECK_INT(get(&x, n, false)[GD_DTB_PAGE - 1], wanted[n]);
    }
    teardown(&x);
}

/* A page that is used repeatedly stays, while others pass through: it leaves
 * once at most, when the hand first comes round. */
TEST_WITH(test_clock, setup(&x, FRAMES * GD_DTB_PAGE), teardown(&x))
{
    for (uint64_t n = 2; n <= PAGES; n++) {
        get(&x, 1, false);
        get(&x, n, false);
    }
    CHECK(x.stats.reads <= PAGES + 1);
    CHECK_INT(x.stats.reads + x.stats.cache_hits, 2 * (PAGES - 1));
}

TEST(test_budget)
{
    fixture x;
    setup(&x, 0);
    uint64_t least = x.stats.memory;
    CHECK(least < (GD_PAGECACHE_MIN + 3) * GD_DTB_PAGE);
    teardown(&x);
    setup(&x, UINT64_MAX); /* no more than the file has */
    CHECK(x.stats.memory < (PAGES / 3 * 4 + 8) * GD_DTB_PAGE);
    for (uint64_t n = 1; n <= PAGES; n++) {
        change(&x, n);
        get(&x, n, false);
    }
    CHECK_INT(x.stats.reads, PAGES);
    CHECK_INT(x.stats.writes, 0); /* they all may wait for the sync */
    teardown(&x);
}

/* A page that could not be written stays changed, and is written later. */
TEST_WITH(test_failed_write, setup(&x, FRAMES * GD_DTB_PAGE), teardown(&x))
{
    uint8_t *page;
    for (uint64_t n = 1; n <= DIRTY; n++) {
        change(&x, 2 * n);
    }
    fault_env_fail(&x.f, FAULT_PWRITEV, 3, ENOSPC, true);
    CHECK_INT(gd_pagecache_get(x.cache, 99, true, &page, &x.err), GD_NOSPACE);
    CHECK_INT(gd_pagecache_sync(x.cache, &x.err), GD_NOSPACE);
    CHECK_INT(x.stats.bytes_written, 2 * GD_DTB_PAGE);
    fault_env_heal(&x.f);
    for (uint64_t n = 1; n <= DIRTY; n++) {
        CHECK_INT(get(&x, 2 * n, false)[GD_DTB_PAGE - 1], 2 * n);
    }
    CHECK_INT(gd_pagecache_sync(x.cache, &x.err), GD_OK);
    CHECK_INT(x.stats.bytes_written, DIRTY * GD_DTB_PAGE);
}
