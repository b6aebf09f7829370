/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_recovery.c - the next owner copies the records that it found and that
 * are not proven durable into its own journal, or stores them if there is no
 * room for copies (volumes.rst, V4).
 */
#include "engine/volume/volume.h"

#include "engine/volume/volumenames.h"
#include "tests/c/support/volume_fixture.h"

/* The machine crashes before the next owner has flushed: it had not
 * acknowledged any write, and the volume opens. */
TEST(test_crash_after_recovery)
{
    for (int failed = 0; failed < 2; failed++) {
        for (int more = 0; more < 2; more++) {
            begin_volume(false);
            CHECK_OK(model_write(20, 30));
            CHECK_OK(model_flush());
            CHECK_OK(model_write(25, 40));
            if (failed) {
                fault_env_fail(FAULTS, FAULT_FDATASYNC, 1, EIO, false);
                CHECK(model_flush() != GD_OK);
                fault_env_heal(FAULTS);
            }
            model_kill();
            CHECK_OK(model_open());
            model_compare();
            if (more) {
                CHECK_OK(model_write(28, 2));
                model_kill();
                CHECK_OK(model_open());
                model_compare();
            }
            model_crash();
            finish_volume();
        }
    }
}

/* Records that are proven durable stay where they are; the rest are copied. */
TEST(test_only_the_tail_is_copied)
{
    begin_volume(false);
    CHECK_OK(model_write(0, 4 * P));
    CHECK_OK(model_flush());
    CHECK_OK(model_write(7, 9));
    CHECK_OK(model_zero(P, 3));
    model_kill();
    uint64_t before = fault_env_count(FAULTS, FAULT_FDATASYNC);
    CHECK_OK(model_open());
    CHECK_INT(fault_env_count(FAULTS, FAULT_FDATASYNC), before + 1);
    CHECK_INT(journal_size(), 8192 + 56 + 9 * 512 + 56);
    CHECK_INT(count_journals(), 2);
    model_compare();
    CHECK(gd_volume_needs_checkpoint(the_volume));
    uint64_t made = count_checkpoints();
    CHECK_OK(model_write(8, 1));
    CHECK_OK(model_flush());
    CHECK_INT(count_checkpoints(), made);
    model_crash();
    CHECK_OK(model_open());
    model_compare();
    CHECK_OK(model_checkpoint());
    CHECK(!gd_volume_needs_checkpoint(the_volume));
    finish_volume();
}

/* Nothing was proven: all is copied, and the journal before is not needed. */
TEST(test_all_is_copied)
{
    for (int crash = 0; crash < 2; crash++) {
        model_setup(0);
        model_start_shadow();
        CHECK_OK(model_create(4 * P));
        CHECK_OK(model_open());
        for (uint64_t i = 0; i < 40; i++) {
            CHECK_OK(model_write(i, 3 * P)); /* more than a window */
        }
        CHECK_OK(model_zero(5, 2));
        CHECK_OK(model_flush());
        model_kill();
        CHECK_OK(model_open());
        CHECK_INT(count_journals(), 1);
        CHECK(!gd_volume_needs_checkpoint(the_volume));
        model_compare();
        if (crash) {
            model_crash();
        } else {
            model_kill();
        }
        CHECK_OK(model_open());
        CHECK_INT(count_journals(), 1);
        model_compare();
        finish_volume();
    }
}

/* An earlier owner has named no end of the journal before its own: then no
 * earlier one is needed. */
TEST(test_chain_without_ends)
{
    for (int named = 0; named < 2; named++) {
        char name[GD_NAME_SIZE];
        gd_volume_head head;
        uint8_t raw[GD_VOLUME_HEAD];
        begin_volume(false);
        CHECK_OK(model_flush());
        CHECK_OK(model_write(2, 7));
        model_kill();
        CHECK_OK(model_open());
        CHECK_OK(model_write(5, 7));
        CHECK_OK(model_flush());
        CHECK_OK(model_write(9, 7));
        model_kill();
        CHECK_OK(gd_volume_read_head(the_repo, "disk", &head,
                                     &the_scratch.err));
        CHECK_INT(head.needed, head.journal - 1);
        CHECK(head.before > 0);
        gd_volume_journal_name("disk", head.journal, name);
        head.before = named ? head.before : 0;
        head.before_durable = head.before;
        scratch_read(&the_scratch, name, raw, sizeof raw, 0);
        gd_volume_head_encode(&head, raw);
        scratch_write(&the_scratch, name, raw, sizeof raw, 0);
        CHECK_OK(model_open());
        CHECK_INT(count_journals(), named ? 3 : 1);
        model_compare();
        CHECK_OK(model_flush());
        model_kill();
        finish_volume();
    }
}

static unsigned reads_meanwhile;

static ssize_t
read_in_write(const gd_env *env, int fd, const struct iovec *iov, int count,
              uint64_t offset)
{
    uint8_t got[512];
    FAULTS->env.pwritev = fault_table.pwritev;
    CHECK_OK(gd_volume_read(the_volume, got, sizeof got, 0,
                            &the_scratch.err));
    if (++reads_meanwhile < 2) { /* one of the head, and one of the copies */
        FAULTS->env.pwritev = read_in_write;
    }
    return fault_table.pwritev(env, fd, iov, count, offset);
}

/* The volume can be read while the tail is copied. */
TEST(test_reads_beside_the_copies)
{
    begin_on_full_disk();
    empty_disk();
    FAULTS->env.pwritev = read_in_write;
    reads_meanwhile = 0;
    alarm(120); /* if the read waits for the copies */
    gd_status s = gd_volume_checkpoint(the_volume, &the_scratch.err);
    alarm(0);
    FAULTS->env.pwritev = fault_table.pwritev;
    CHECK_OK(s);
    CHECK_INT(reads_meanwhile, 2);
    model_compare();
    finish_volume();
}

/* ---- a full disk ---- */

/* Without room for the copies, the volume can be read. */
TEST(test_no_room_for_copies)
{
    gd_volume_info info;
    begin_on_full_disk();
    gd_volume_get_info(the_volume, &info);
    CHECK(info.is_read_only);
    model_compare();
    CHECK_INT(model_flush(), GD_NOSPACE);
    empty_disk();
    CHECK_OK(model_flush());
    gd_volume_get_info(the_volume, &info);
    CHECK(!info.is_read_only);
    finish_volume();
}

/* There is no room for the copies, but for the editions: opening makes a
 * checkpoint, and the volume can be written to. */
TEST(test_checkpoint_instead_of_copies)
{
    for (int outcome = 0; outcome < 3; outcome++) {
        gd_volume_info info;
        begin_volume(outcome == 1);
        for (int i = 0; i < 8; i++) {
            CHECK_OK(model_write(0, P));
        }
        CHECK_OK(model_zero(4 * P, 1));
        CHECK_OK(model_flush());
        model_kill();
        fill_disk(ROOM_FOR_A_PART);
        CHECK_OK(model_open());
        gd_volume_get_info(the_volume, &info);
        CHECK(!info.is_read_only);
        CHECK_INT(count_checkpoints(), 1);
        CHECK_INT(info.head.needed, info.head.journal);
        model_compare();
        model_check_nothing_left();
        CHECK_OK(model_write(3, 3));
        CHECK_OK(model_flush());
        empty_disk();
        if (outcome == 2) {
            model_crash();
            CHECK_OK(model_open());
        }
        finish_volume();
    }
}

static void
kill_behind_many_writes(void)
{
    begin_volume(false);
    for (int i = 0; i < 8; i++) {
        CHECK_OK(model_write(0, 2 * P));
    }
    CHECK_OK(model_flush());
    model_kill();
}

static int
link_all_but_part_1(const gd_env *env, int dir, const char *from,
                    const char *to)
{
    return strstr(to, "_1_2") != NULL
               ? -EIO
               : fault_table.linkat(env, dir, from, to);
}

/* The checkpoint stops behind its first part, and then there is room for the
 * copies: the edition has no mark, and is made again. */
TEST(test_copies_behind_a_part)
{
    kill_behind_many_writes();
    fill_disk(ROOM_FOR_A_PART);
    FAULTS->env.linkat = link_all_but_part_1;
    CHECK_OK(model_open());
    CHECK_INT(model_write(0, 1), GD_NOSPACE);
    CHECK_INT(model_checkpoint(), GD_IO);
    FAULTS->env.linkat = fault_table.linkat;
    empty_disk();
    model_compare();
    CHECK_OK(model_checkpoint());
    model_compare();
    finish_volume();
}

/* The owner waits for space, and the disk has room for the editions of what it
 * found, not for the copies. */
static void
begin_with_room_for_editions(void)
{
    kill_behind_many_writes();
    fill_disk(0);
    CHECK_OK(model_open());
    CHECK_INT(model_write(0, 1), GD_NOSPACE);
    disk_room = ROOM_FOR_A_PART;
}

/* A resizing makes it writable, too. */
TEST(test_resize_instead_of_copies)
{
    begin_with_room_for_editions();
    CHECK_OK(model_resize(5 * P));
    model_compare();
    empty_disk();
    finish_volume();
}

static const char *unlinkable; /* part of names that get no link */
static unsigned links_left;    /* of these */

static int
link_some(const gd_env *env, int dir, const char *from, const char *to)
{
    return strstr(to, unlinkable) != NULL && links_left-- == 0
               ? -ENOSPC
               : fault_table.linkat(env, dir, from, to);
}

static void
refuse_link(const char *name, unsigned after)
{
    unlinkable = name;
    links_left = after;
    FAULTS->env.linkat = link_some;
}

/* There is little room, so not even the first try is of several parts, whose
 * blocks a second one would store again. */
TEST(test_no_copies_one_part_at_a_time)
{
    kill_behind_many_writes();
    fill_disk(ROOM_FOR_A_PART);
    refuse_link("images/v_", 2);
    CHECK_OK(model_open());
    CHECK_INT(model_write(0, 1), GD_NOSPACE);
    FAULTS->env.linkat = fault_table.linkat;
    model_compare();
    CHECK_OK(model_checkpoint());
    empty_disk();
    finish_volume();
}

/* The editions are there, and the head that has their marks is not. */
TEST(test_no_head_behind_the_editions)
{
    for (int outcome = 0; outcome < 3; outcome++) {
        begin_with_room_for_editions();
        refuse_link("journal-", 0);
        CHECK_INT(model_checkpoint(), GD_NOSPACE);
        FAULTS->env.linkat = fault_table.linkat;
        model_compare();
        CHECK_INT(count_checkpoints(), 0);
        if (outcome == 0) {
            CHECK_OK(model_checkpoint());
            CHECK_INT(count_checkpoints(), 1);
            model_compare();
        } else if (outcome == 1) {
            model_kill();
        } else {
            model_crash();
        }
        empty_disk();
        finish_volume();
    }
}

static int
link_without_sync(const gd_env *env, int dir, const char *from, const char *to)
{
    int rc = fault_table.linkat(env, dir, from, to);
    if (strstr(to, "journal-") != NULL) {
        fault_env_fail(FAULTS, FAULT_FSYNC, 1, EIO, false);
    }
    return rc;
}

/* The head is there, and may be lost: this owner writes no more, and the next
 * one finds either. */
TEST(test_unsynced_head_behind_the_editions)
{
    for (int crash = 0; crash < 2; crash++) {
        gd_volume_info info;
        begin_with_room_for_editions();
        FAULTS->env.linkat = link_without_sync;
        CHECK_INT(model_checkpoint(), GD_IO);
        FAULTS->env.linkat = fault_table.linkat;
        fault_env_heal(FAULTS);
        gd_volume_get_info(the_volume, &info);
        CHECK(info.is_read_only);
        CHECK_INT(model_flush(), GD_IO);
        CHECK_INT(model_checkpoint(), GD_IO);
        model_compare();
        empty_disk();
        if (crash) {
            model_crash();
        } else {
            model_kill();
        }
        finish_volume();
    }
}
