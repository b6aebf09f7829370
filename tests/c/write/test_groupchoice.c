/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_groupchoice.c - the groups that a writer leases, and those that it
 * leaves alone.
 */
#include "engine/write/groupchoice.h"

#include "tests/c/support/appender_fixture.h"
#include "tests/c/support/check.h"

static appender_fixture t;

/* ---- the chosen group ---- */

TEST_WITH(test_fullest_group, appender_setup(&t), appender_teardown(&t))
{
    gd_appender *a = open_appender(&t), *b = open_appender(&t),
                *c = open_appender(&t);
    CHECK_INT(append_segment(&t, a, 4), GD_OK);
    CHECK_INT(append_segment(&t, b, 8), GD_OK);
    CHECK_INT(append_segment(&t, c, 6), GD_OK);
    CHECK(sync_appender(&t, a) == GD_OK && sync_appender(&t, b) == GD_OK &&
          sync_appender(&t, c) == GD_OK);
    CHECK(appender_number(a) == 1 && appender_number(b) == 2 &&
          appender_number(c) == 3);
    close_appender(&t, a);
    close_appender(&t, b);
    close_appender(&t, c);
    a = open_appender(&t);
    b = open_appender(&t);
    c = open_appender(&t);
    CHECK_INT(appender_number(a), 2);
    CHECK_INT(appender_number(b), 3);
    CHECK_INT(appender_number(c), 1);
    gd_appender *d = open_appender(&t);
    CHECK_INT(appender_number(d), 4);
    close_appender(&t, a);
    close_appender(&t, b);
    close_appender(&t, c);
    close_appender(&t, d);
}

TEST_WITH(test_full_group, appender_setup(&t), appender_teardown(&t))
{
    for (int handle = 0; handle < 2; handle++) {
        gd_appender *appender = open_appender(&t);
        CHECK_INT(appender_number(appender), 1 + handle);
        while (gd_appender_room(appender) > 0) {
            CHECK_INT(append_segment(&t, appender, 8), GD_OK);
        }
        CHECK_INT(sync_appender(&t, appender), GD_OK);
        close_appender(&t, appender);
        if (handle == 0) {
            appender_other_handle(&t);
        }
    }
    CHECK_INT(store_segments(&t, 1), 3);
    check_live_slots(&t, 1, 0, 64);
    check_live_slots(&t, 2, 0, 64);
}

/* A writer considers the newest 256. */
TEST(test_look_back)
{
    appender_fixture t;
    uint32_t number = 0;
    appender_setup(&t);
    CHECK_INT(store_segments(&t, 1), 1);
    while (number < 256) {
        REQUIRE(gd_group_create(t.x.env, t.x.root, &t.x.params,
                                &gd_global_scope, t.repo->locks, &number,
                                &t.x.err) == GD_OK);
        gd_locks_unlease(t.repo->locks, number);
    }
    CHECK_INT(store_segments(&t, 1), 1);
    REQUIRE(gd_group_create(t.x.env, t.x.root, &t.x.params, &gd_global_scope,
                            t.repo->locks, &number, &t.x.err) == GD_OK);
    gd_locks_unlease(t.repo->locks, number);
    CHECK(store_segments(&t, 1) > 1);
    appender_teardown(&t);
}

TEST(test_what_is_left_alone)
{
    enum { SHORT, NO_STORE, HEADER, FOREIGN, EMPTY, LONG, CASES };
    for (int i = 0; i < CASES; i++) {
        appender_fixture t;
        appender_setup(&t);
        CHECK_INT(store_segments(&t, 2), 1);
        uint64_t end = read_group_contents(&t, 1).published.end;
        switch (i) {
        case SHORT:
            scratch_truncate(&t.x, GROUP_1, end - 1);
            break;
        case NO_STORE:
            scratch_truncate(&t.x, GROUP_1, 4096);
            break;
        case HEADER:
            scratch_flip(&t.x, GROUP_1, 80, 1);
            break;
        case FOREIGN:
            scratch_flip(&t.x, GROUP_1, 20, 1);
            break;
        case EMPTY:
            scratch_truncate(&t.x, GROUP_1, 0);
            break;
        case LONG:
            scratch_write(&t.x, GROUP_1, "", 1, UINT32_MAX - 20000);
            break;
        }
        if (i == LONG) {
            /* 54 more blocks might not be addressable by 32 bits. */
            CHECK_INT(store_segments(&t, 1), 2);
            CHECK_INT(read_group_contents(&t, 1).published.count, 10);
        } else {
            check_left_alone(&t);
        }
        appender_teardown(&t);
    }
}

TEST_WITH(test_the_collector_is_in_it, appender_setup(&t),
          appender_teardown(&t))
{
    CHECK_INT(store_segments(&t, 2), 1);
    const gd_env *env = gd_env_posix();
    int raw = openat(t.x.root, GD_FILE_GROUP_LOCKS, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->lock(env, raw, (UINT64_C(1) << 32) + 1, F_WRLCK), 0);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(appender_number(appender), 2);
    close_appender(&t, appender);
    close(raw);
    /* It is not recorded as unusable. */
    CHECK_INT(store_segments(&t, 1), 1);
}

/* I1: the group was made, but its maker failed to make its name durable: that
 * is done before the first block is written. */
TEST_WITH(test_name_is_made_durable, appender_setup(&t), appender_teardown(&t))
{
    gd_appender *appender;
    fault_env_fail(&t.x.f, FAULT_FSYNC, 2, EIO, false);
    CHECK_INT(gd_appender_open(t.repo, &gd_global_scope, NULL, &appender,
                               &t.x.err), GD_IO);
    CHECK(scratch_exists(&t.x, GROUP_1));
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FSYNC);
    appender = open_appender(&t);
    CHECK_INT(appender_number(appender), 1);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FSYNC), syncs + 1);
    close_appender(&t, appender);
    appender_other_handle(&t);
    syncs = fault_env_count(&t.x.f, FAULT_FSYNC);
    /* There is still no sync point: the directory is synced once more. */
    CHECK_INT(store_segments(&t, 1), 1);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FSYNC), syncs + 1);
    appender_other_handle(&t);
    CHECK_INT(store_segments(&t, 1), 1);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FSYNC), syncs + 1);
}
