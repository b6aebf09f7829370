/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_array.c - arrays keep their elements while they grow.
 */
#include "engine/base/array.h"

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

TEST(test_grows_and_keeps)
{
    fault_env f;
    gd_error err;
    uint32_t *items = NULL;
    size_t room = 0;
    fault_env_init(&f);
    for (uint32_t n = 0; n < 1000; n++) {
        uint32_t *larger = gd_array_reserve(&f.env, items, &room, n + 1,
                                            sizeof *items, &err);
        REQUIRE(larger != NULL && room > n);
        items = larger;
        CHECK_INT(items[n], 0);
        items[n] = n + 1;
    }
    for (uint32_t n = 0; n < 1000; n++) {
        CHECK_INT(items[n], n + 1);
    }
    CHECK(fault_env_count(&f, FAULT_ALLOC) < 10);
    f.env.release(&f.env, items);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

TEST(test_no_memory)
{
    fault_env f;
    gd_error err;
    size_t room = 0;
    fault_env_init(&f);
    uint8_t *items = gd_array_reserve(&f.env, NULL, &room, 100, 1, &err);
    REQUIRE(items != NULL);
    CHECK_INT(room, 100);
    items[99] = 7;
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK(gd_array_reserve(&f.env, items, &room, 101, 1, &err) == NULL);
    CHECK_INT(err.status, GD_NOMEM);
    CHECK_INT(room, 100);
    CHECK_INT(items[99], 7);
    CHECK(gd_array_reserve(&f.env, items, &room, SIZE_MAX, 1 << 20, &err) ==
          NULL);
    f.env.release(&f.env, items);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}
