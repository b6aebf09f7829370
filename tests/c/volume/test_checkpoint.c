/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_checkpoint.c - checkpoints that fail, and the next ones: each goes on
 * where the one before has stopped.
 */
#include "engine/volume/volume.h"

#include "tests/c/support/volume_fixture.h"

/* A checkpoint fails behind its first part, and the next one continues
 * there. */
TEST(test_checkpoint_goes_on)
{
    for (uint64_t nth = 1; nth <= 3; nth++) {
        begin_volume(false);
        fault_env_fail(FAULTS, FAULT_LINKAT, nth, EIO, true);
        CHECK_INT(model_checkpoint(), GD_IO);
        fault_env_heal(FAULTS);
        model_compare();
        CHECK_OK(model_checkpoint());
        model_compare();
        finish_volume();
    }
}

/* If it is unknown which journal the next owner finds, no more records are
 * written to the old one. */
TEST(test_journal_that_may_be_there)
{
    begin_volume(false);
    fault_env_fail(FAULTS, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(model_checkpoint(), GD_IO);
    fault_env_heal(FAULTS);
    CHECK(model_write(0, 9) != GD_OK);
    CHECK_CONTAINS(model_words(), "takes no more writes");
    CHECK(model_flush() != GD_OK);
    model_kill();
    finish_volume();
}

/* Parts that a volume loses and gets back begin again, even for a process with
 * their recipes open. */
TEST(test_part_comes_back)
{
    model_setup(0);
    CHECK_OK(model_create(4 * P));
    CHECK_OK(model_open());
    CHECK_OK(model_write(3 * P, 50));
    CHECK_OK(model_checkpoint());
    model_compare(); /* opens edition 1 */
    CHECK_OK(model_resize(P));
    CHECK_OK(model_resize(4 * P));
    model_compare();
    CHECK_OK(model_write(3 * P + 7, 3));
    CHECK_OK(model_checkpoint()); /* edition 1 once more */
    model_compare();
    finish_volume();
}

/* Several parts at once fail, so they are stored one at a time. */
TEST(test_parts_one_at_a_time)
{
    uint64_t made;
    begin_volume(false);
    CHECK_OK(model_checkpoint());
    made = count_checkpoints();
    for (uint64_t i = 0; i < 4; i++) {
        CHECK_OK(model_write(i * P, 2));
    }
    /* The first is that of the journal's name. */
    fault_env_fail(FAULTS, FAULT_LINKAT, 4, ENOSPC, false);
    CHECK_OK(model_checkpoint());
    fault_env_heal(FAULTS);
    CHECK_INT(count_checkpoints(), made + 1);
    model_compare();
    finish_volume();
}

static uint64_t
syncs_of_checkpoint(gd_status wanted)
{
    uint64_t before = fault_env_count(FAULTS, FAULT_FSYNC) +
                      fault_env_count(FAULTS, FAULT_FDATASYNC);
    CHECK_INT(model_checkpoint(), wanted);
    return fault_env_count(FAULTS, FAULT_FSYNC) +
           fault_env_count(FAULTS, FAULT_FDATASYNC) - before;
}

static void
write_to_parts(void)
{
    for (uint64_t i = 0; i < 4; i++) {
        CHECK_OK(model_write(i * P, 2));
    }
}

/* After a checkpoint without room, the next one does not begin with several
 * parts, which would take the room that one needs. */
TEST(test_one_part_after_no_room)
{
    begin_volume(false);
    CHECK_OK(model_checkpoint());
    write_to_parts();
    uint64_t together = syncs_of_checkpoint(GD_OK);
    write_to_parts();
    fault_env_fail(FAULTS, FAULT_LINKAT, 4, ENOSPC, true);
    (void)syncs_of_checkpoint(GD_NOSPACE);
    fault_env_heal(FAULTS);
    uint64_t singly = syncs_of_checkpoint(GD_OK);
    CHECK(singly > together);
    write_to_parts();
    CHECK_INT(syncs_of_checkpoint(GD_OK), together);
    finish_volume();
}

/* A checkpoint that failed is tried again, however little it has to store. */
TEST(test_failed_checkpoint_is_made_again)
{
    begin_volume(false);
    CHECK_OK(model_checkpoint());
    CHECK_OK(model_write(0, 1));
    CHECK(!gd_volume_is_worth_checkpoint(the_volume));
    CHECK(!gd_volume_needs_checkpoint(the_volume));
    fault_env_fail(FAULTS, FAULT_LINKAT, 2, EIO, true);
    CHECK(model_checkpoint() != GD_OK);
    fault_env_heal(FAULTS);
    CHECK(gd_volume_needs_checkpoint(the_volume));
    CHECK_OK(model_checkpoint());
    CHECK(!gd_volume_needs_checkpoint(the_volume));
    finish_volume();
}
