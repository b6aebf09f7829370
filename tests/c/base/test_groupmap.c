/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_groupmap.c - the map agrees with an array, whatever the keys.
 */
#include "engine/base/groupmap.h"

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { KEYS = 3000 };

TEST(test_absent_groups_count_zero)
{
    gd_groupmap map;
    gd_groupmap_init(&map, gd_env_posix());
    CHECK_INT(gd_groupmap_get(&map, 1), 0);
    CHECK_INT(map.places, 0);
    uint32_t *count = gd_groupmap_at(&map, 7, NULL);
    REQUIRE(count != NULL);
    CHECK_INT(*count, 0);
    *count = 3;
    CHECK_INT(gd_groupmap_get(&map, 7), 3);
    CHECK_INT(gd_groupmap_get(&map, 8), 0);
    CHECK_INT(map.used, 1);
    gd_groupmap_free(&map);
    CHECK_INT(gd_groupmap_get(&map, 7), 0);
    gd_groupmap_free(&map); /* twice does no harm */
}

/* Keys that are far apart, consecutive, or differ only in their high bits. */
static uint32_t
key(unsigned i)
{
    switch (i % 3) {
    case 0:
        return i + 1;
    case 1:
        return 0x1000000 - i;
    default:
        return i << 12;
    }
}

TEST(test_agrees_with_an_array)
{
    fault_env f;
    static uint32_t wanted[KEYS];
    gd_groupmap map;
    uint64_t state = 1;
    fault_env_init(&f);
    gd_groupmap_init(&map, &f.env);
    memset(wanted, 0, sizeof wanted);
    for (int step = 0; step < 20 * KEYS; step++) {
        unsigned i = (unsigned)(next_random(&state) % KEYS);
        uint32_t *count = gd_groupmap_at(&map, key(i), NULL);
        REQUIRE(count != NULL);
        CHECK_INT(*count, wanted[i]);
        *count = wanted[i] = (uint32_t)next_random(&state);
    }
    for (unsigned i = 0; i < KEYS; i++) {
        CHECK_INT(gd_groupmap_get(&map, key(i)), wanted[i]);
    }
    CHECK(map.used <= KEYS && map.used * 4 <= map.places * 3 + 4);
    gd_groupmap_free(&map);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

/* Without memory no count is lost, and later calls succeed again. */
TEST(test_out_of_memory)
{
    fault_env f;
    gd_groupmap map;
    gd_error err;
    fault_env_init(&f);
    gd_groupmap_init(&map, &f.env);
    fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, true);
    CHECK(gd_groupmap_at(&map, 1, &err) == NULL);
    CHECK_INT(err.status, GD_NOMEM);
    CHECK_INT(gd_groupmap_get(&map, 1), 0);
    fault_env_heal(&f);
    uint32_t filled = 0, failed = 0;
    for (uint32_t group = 1; group <= 200; group++) {
        fault_env_fail(&f, FAULT_ALLOC, 1, ENOMEM, true);
        uint32_t *count = gd_groupmap_at(&map, group, &err);
        fault_env_heal(&f);
        if (count == NULL) {
            failed++;
            CHECK_INT(gd_groupmap_get(&map, group), 0);
            count = gd_groupmap_at(&map, group, &err);
        }
        REQUIRE(count != NULL);
        *count = ++filled;
    }
    CHECK(failed >= 3); /* at first, and when it grew to 128 and to 256 */
    for (uint32_t group = 1; group <= 200; group++) {
        CHECK_INT(gd_groupmap_get(&map, group), group);
    }
    gd_groupmap_free(&map);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}
