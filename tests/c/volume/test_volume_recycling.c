/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_volume_recycling.c - files of stored journals become journals again,
 * old records in them are not found, and none keeps its room from a write
 * (volumes.rst, V10).
 */
#include "engine/volume/volume.h"

#include "engine/volume/volumenames.h"
#include "tests/c/support/volume_fixture.h"

/* Two files take turns as journals. */
TEST(test_journals_are_recycled)
{
    ino_t inodes[6];
    begin_volume(false);
    for (int i = 0; i < 6; i++) {
        inodes[i] = journal_inode();
        CHECK_OK(model_write(0, P));
        CHECK_OK(model_flush());
        CHECK_OK(model_write(0, 1));
        CHECK_OK(model_checkpoint());
        CHECK_INT(count_spares(), 1);
        CHECK_INT(count_journals(), 1);
        CHECK(i < 2 || inodes[i] == inodes[i - 2]);
        model_compare();
    }
    CHECK(inodes[0] != inodes[1]);
    CHECK_OK(model_write(0, 1));
    CHECK_OK(model_flush());
    gd_volume_info info;
    gd_volume_get_info(the_volume, &info);
    CHECK(journal_size() > (int64_t)info.journal_bytes + P * 512);
    gd_volume_give_up_space(the_volume);
    CHECK_INT(journal_size(), info.journal_bytes);
    CHECK_INT(count_spares(), 0);
    finish_volume();
}

/* An owner that is closed leaves no spare, and one that dies leaves one to be
 * removed by the next. */
TEST(test_spare_of_a_former_owner)
{
    for (int dies = 0; dies < 2; dies++) {
        begin_volume(false);
        CHECK_OK(model_checkpoint());
        CHECK_OK(model_write(5, 9));
        if (dies) {
            model_kill();
        } else {
            model_close();
        }
        CHECK_INT(count_spares(), dies);
        CHECK_OK(model_open());
        CHECK_INT(count_spares(), 0);
        model_compare();
        finish_volume();
    }
}

/* The owner dies with old records behind its own, of the same lengths. */
TEST(test_old_records_behind_the_end)
{
    for (int crash = 0; crash < 2; crash++) {
        for (uint64_t rounds = 2; rounds < 5; rounds++) {
            begin_volume(false);
            for (uint64_t i = 0; i < rounds; i++) {
                for (uint64_t k = 0; k < 9 - i; k++) {
                    CHECK_OK(model_write(10 * k, 3));
                    CHECK_OK(model_flush());
                }
                CHECK_OK(i + 1 < rounds ? model_checkpoint() : GD_OK);
            }
            if (crash) {
                model_crash();
            } else {
                model_kill();
            }
            CHECK_OK(model_open());
            model_compare();
            finish_volume();
        }
    }
}

static unsigned overwrites;

/* The file of the journal that is read is to be written over meanwhile. */
static ssize_t
overwrite_in_read(const gd_env *env, int fd, void *buf, size_t len,
                  uint64_t offset)
{
    FAULTS->env.pread = fault_table.pread;
    for (unsigned i = 0; i < overwrites; i++) {
        CHECK_OK(model_write(0, 8));
        CHECK_OK(model_checkpoint());
    }
    CHECK_OK(model_write(0, 8));
    return fault_table.pread(env, fd, buf, len, offset);
}

/* A journal that somebody reads is not recycled. */
TEST(test_read_journal_is_not_recycled)
{
    for (overwrites = 1; overwrites <= 3; overwrites++) {
        uint8_t before[8 * 512], got[8 * 512];
        begin_volume(false);
        CHECK_OK(model_checkpoint());
        CHECK_OK(model_write(0, 8));
        CHECK_OK(gd_volume_read(the_volume, before, sizeof before, 0,
                                &the_scratch.err));
        FAULTS->env.pread = overwrite_in_read;
        CHECK_OK(gd_volume_read(the_volume, got, sizeof got, 0,
                                &the_scratch.err));
        FAULTS->env.pread = fault_table.pread;
        CHECK(memcmp(before, got, sizeof got) == 0);
        finish_volume();
    }
}

/* Nobody holds the journals of which another process reads the head. */
TEST(test_head_is_read_beside_recycling)
{
    for (overwrites = 1; overwrites <= 3; overwrites++) {
        gd_volume_head head;
        gd_volume_info before, after;
        begin_volume(false);
        CHECK_OK(model_checkpoint());
        CHECK_OK(model_write(0, 8));
        gd_volume_get_info(the_volume, &before);
        FAULTS->env.pread = overwrite_in_read;
        CHECK_OK(gd_volume_read_head(the_repo, "disk", &head,
                                     &the_scratch.err));
        FAULTS->env.pread = fault_table.pread;
        gd_volume_get_info(the_volume, &after);
        CHECK(head.journal >= before.head.journal &&
              head.journal <= after.head.journal);
        CHECK_INT(head.size, after.head.size);
        CHECK(memcmp(head.volume_id, after.head.volume_id, GD_ID_SIZE) == 0);
        finish_volume();
    }
}

/* A forked child that closes the volume takes nothing from its owner. */
TEST(test_close_in_a_child)
{
    int status = 0;
    begin_volume(false);
    CHECK_OK(model_write(0, P));
    CHECK_OK(model_checkpoint());
    CHECK_OK(model_write(0, 1));
    CHECK_OK(model_flush());
    int64_t size = journal_size();
    CHECK_INT(count_spares(), 1);
    pid_t child = fork();
    if (child == 0) {
        gd_volume_close(the_volume);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK_INT(count_spares(), 1);
    CHECK_INT(journal_size(), size);
    CHECK_OK(model_checkpoint());
    model_compare();
    finish_volume();
}

/* A journal that is stored, and not recycled, gives its blocks back at once. */
TEST(test_stored_journal_is_cut)
{
    char name[GD_NAME_SIZE];
    struct stat st = {.st_size = -1};
    begin_volume(false);
    journal_name(0, name);
    int fd = openat(the_scratch.root, name, O_RDONLY | O_CLOEXEC);
    fill_disk(ROOM_FOR_A_PART);
    CHECK_OK(model_checkpoint());
    empty_disk();
    CHECK(fstat(fd, &st) == 0 && st.st_size == 0 && st.st_nlink == 0);
    close(fd);
    finish_volume();
}

/* ---- a full disk ---- */

/* A spare does not keep a write from its room, nor is one kept without room. */
TEST(test_spare_on_a_full_disk)
{
    begin_volume(false);
    CHECK_OK(model_checkpoint());
    CHECK_INT(count_spares(), 1);
    fill_disk(LITTLE_ROOM);
    CHECK_OK(model_write(0, 1));
    CHECK_INT(count_spares(), 1);
    CHECK_INT(model_write(0, 4 * P), GD_NOSPACE);
    CHECK_INT(count_spares(), 0);
    empty_disk();
    CHECK_OK(model_checkpoint());
    CHECK_INT(count_spares(), 1);
    finish_volume();
}

static int
link_when_trimmed(const gd_env *env, int dir, const char *from, const char *to)
{
    return strstr(to, "images/v_") != NULL && journal_size() > 8192
               ? -ENOSPC
               : fault_table.linkat(env, dir, from, to);
}

/* Nor does the space of the active journal keep a checkpoint from its room. */
TEST(test_kept_space_or_a_checkpoint)
{
    begin_volume(false);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(model_write(0, 2 * P));
        CHECK_OK(model_checkpoint());
    }
    CHECK_OK(model_write(0, 1));
    FAULTS->env.linkat = link_when_trimmed;
    CHECK_OK(model_checkpoint());
    FAULTS->env.linkat = fault_table.linkat;
    model_compare();
    finish_volume();
}

/* Nor does a spare keep its room from others. */
TEST(test_spare_or_an_upload)
{
    for (int reserve = 0; reserve < 2; reserve++) {
        begin_volume(false);
        CHECK_OK(model_checkpoint());
        gd_volume_renew(the_volume);
        CHECK_INT(count_spares(), 1);
        fill_disk(LITTLE_ROOM);
        the_repo->params.reserve *= (uint64_t)reserve;
        gd_volume_renew(the_volume);
        CHECK_INT(count_spares(), 0);
        CHECK_OK(model_checkpoint());
        CHECK_INT(count_spares(), 0);
        empty_disk();
        finish_volume();
    }
}

/* The zeros that a shrinking volume needs come before a spare, too. */
TEST(test_spare_or_a_shrink)
{
    begin_volume(false);
    CHECK_OK(model_checkpoint());
    CHECK_INT(count_spares(), 1);
    fault_env_fail(FAULTS, FAULT_PWRITEV, 1, ENOSPC, false);
    CHECK_OK(model_resize(P + 30));
    fault_env_heal(FAULTS);
    model_compare();
    finish_volume();
}

/* A write over bytes that the file has may use the reserve.  If the file system
 * has no room for another one, the spare goes first. */
TEST(test_spare_or_a_write)
{
    begin_volume(false);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(model_write(0, P));
        CHECK_OK(model_checkpoint());
    }
    CHECK_INT(count_spares(), 1);
    fill_disk(LITTLE_ROOM);
    CHECK_OK(model_write(0, P / 2)); /* more than the room */
    CHECK_INT(count_spares(), 1);
    empty_disk();
    fault_env_fail(FAULTS, FAULT_PWRITEV, 1, ENOSPC, false);
    CHECK_OK(model_write(7, P));
    fault_env_heal(FAULTS);
    CHECK_INT(count_spares(), 0);
    model_compare();
    finish_volume();
}
