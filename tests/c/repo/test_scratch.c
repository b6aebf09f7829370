/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_scratch.c - buffers that threads borrow: used again, and no more of them
 * kept than was said.
 */
#include "engine/repo/scratch.h"

#include <pthread.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"
#include "tests/c/support/scratch_repository.h"

enum { KEPT = 2 };

static fault_env f;
static gd_scratch_list list;
static gd_error err;

static void
setup(void)
{
    fault_env_init(&f);
    gd_scratch_list_init(&list, &f.env, KEPT);
}

static void
teardown(void)
{
    gd_scratch_list_free(&list);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

static gd_scratch *
lend(void)
{
    gd_scratch *scratch = NULL;
    CHECK_INT(gd_scratch_lend(&list, &scratch, &err), GD_OK);
    return scratch;
}

TEST_WITH(test_used_again, setup(), teardown())
{
    gd_scratch *one = lend(), *two = lend(), *three = lend();
    REQUIRE(one != NULL && two != NULL && three != NULL);
    CHECK(one != two && two != three && one != three);
    memset(one->plain, 1, GD_SEGMENT_MAX);
    memset(one->in, 1, GD_READ_ONCE + GD_SEGMENT_HEADER + GD_SEGMENT_MAX);
    gd_scratch_return(&list, one);
    CHECK(lend() == one);
    gd_scratch_return(&list, one);
    gd_scratch_return(&list, two);
    CHECK(lend() == two);
    gd_scratch_return(&list, two);
    gd_scratch_return(&list, three); /* one too many */
    CHECK_INT(list.count, KEPT);
    gd_scratch_return(&list, NULL);
}

TEST_WITH(test_out_of_memory, setup(), teardown())
{
    gd_scratch *scratch;
    uint64_t n = 0;
    gd_status s;
    do {
        fault_env_fail(&f, FAULT_ALLOC, ++n, ENOMEM, false);
        s = gd_scratch_lend(&list, &scratch, &err);
        CHECK(s == GD_OK || s == GD_NOMEM);
    } while (s == GD_NOMEM && n < 10);
    fault_env_heal(&f);
    CHECK_INT(n, 5); /* each of the four allocations failed once */
    if (CHECK_INT(s, GD_OK)) {
        gd_scratch_return(&list, scratch);
    }
}

static atomic_uint wrong;

static void *
use(void *arg)
{
    uint8_t own = (uint8_t)(uintptr_t)arg;
    for (int i = 0; i < 2000 / SWEEP_STRIDE; i++) {
        gd_scratch *scratch;
        if (gd_scratch_lend(&list, &scratch, NULL) != GD_OK) {
            wrong++;
            continue;
        }
        memset(scratch->plain, own, 64);
        for (int j = 0; j < 64; j++) {
            wrong += scratch->plain[j] != own;
        }
        gd_scratch_return(&list, scratch);
    }
    return NULL;
}

TEST_WITH(test_threads, setup(), teardown())
{
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, use, (void *)(i + 1)), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    CHECK_INT(wrong, 0);
    CHECK(list.count <= KEPT);
}
