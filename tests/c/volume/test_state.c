/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_state.c - writes and flushes: a sync makes durable what was written
 * before it (volumes.rst, V3), and what a failed write or sync leaves is not
 * found.
 */
#include "engine/volume/volume.h"

#include "tests/c/support/volume_fixture.h"

/* V3, V4: a sync fails; the next owner finds the page cache's content, and its
 * first flush makes it durable. */
TEST(test_failed_sync)
{
    begin_volume(false);
    CHECK_OK(model_write(20, 30));
    CHECK_OK(model_flush());
    CHECK_OK(model_write(25, 40));
    fault_env_fail(FAULTS, FAULT_FDATASYNC, 1, EIO, false);
    CHECK(model_flush() != GD_OK);
    CHECK_CONTAINS(model_words(), "fdatasync");
    fault_env_heal(FAULTS);
    CHECK(model_flush() != GD_OK);
    CHECK(model_write(1, 1) != GD_OK);
    CHECK_CONTAINS(model_words(), "disk takes no more writes");
    CHECK(model_checkpoint() != GD_OK);
    model_compare();
    model_kill();
    CHECK_OK(model_open());
    model_compare();
    CHECK_OK(model_write(60, 10));
    CHECK_OK(model_flush());
    model_crash();
    CHECK_OK(model_open());
    model_compare();
    model_delete();
    model_teardown();
}

/* Another thread writes when the sync is over. */
static int
write_behind_sync(const gd_env *env, int fd)
{
    FAULTS->env.fdatasync = fault_table.fdatasync;
    int rc = fault_table.fdatasync(env, fd);
    CHECK_OK(model_write(77, 5));
    return rc;
}

/* V3: a sync makes durable the records from before it began. */
TEST(test_write_during_sync)
{
    begin_volume(false);
    FAULTS->env.fdatasync = write_behind_sync;
    CHECK_OK(gd_volume_flush(the_volume, &the_scratch.err));
    CHECK_OK(model_flush());
    model_crash();
    finish_volume();
}

/* A guest flushes each write: the file seldom gets longer, since zeros are
 * written ahead. No zeros overwrite a record. */
TEST(test_many_flushes)
{
    unsigned grown = 0;
    model_setup(0);
    model_start_shadow();
    CHECK_OK(model_create(6 * P));
    CHECK_OK(model_open());
    int64_t before = journal_size();
    for (unsigned i = 0; i < 300; i++) {
        CHECK_OK(model_write(i * 7 % (5 * P), 8));
        CHECK_OK(model_flush());
        grown += journal_size() > before;
        before = journal_size();
    }
    CHECK(grown > 1 && grown < 10);
    model_crash();
    finish_volume();
}

/* Zeros are no reason to use the reserve. */
TEST(test_flushes_without_zeros)
{
    gd_volume_info info;
    begin_volume(false);
    CHECK_OK(model_write(0, 4 * P));
    fill_disk(LITTLE_ROOM);
    for (unsigned i = 0; i < 5; i++) {
        CHECK_OK(model_write(i, 1));
        CHECK_OK(model_flush());
        gd_volume_get_info(the_volume, &info);
        CHECK_INT(journal_size(), info.journal_bytes);
    }
    empty_disk();
    CHECK_OK(model_write(9, 1));
    CHECK_OK(model_flush());
    CHECK(journal_size() > (int64_t)info.journal_bytes + 65536);
    finish_volume();
}

/* Old records do not come back over newer ones when a write failed between. */
TEST(test_failed_write_is_overwritten)
{
    begin_volume(false);
    fault_env_shorten(FAULTS, 65536 + 56);
    fault_env_fail(FAULTS, FAULT_PWRITEV, 3, ENOSPC, true);
    CHECK_INT(model_write(0, 4 * P), GD_NOSPACE);
    fault_env_heal(FAULTS);
    CHECK_OK(model_write(P, P)); /* as long as their first record */
    CHECK_OK(model_flush());
    model_kill();
    finish_volume();
}
