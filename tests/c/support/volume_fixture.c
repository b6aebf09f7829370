/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volume_fixture.c - see volume_fixture.h.
 */
#include "tests/c/support/volume_fixture.h"

#include "engine/volume/volumenames.h"

void
begin_volume(bool clone)
{
    model_setup(clone ? 2 * P + 100 : 0);
    model_start_shadow();
    CHECK_OK(clone ? model_clone(4 * P + 3) : model_create(4 * P + 3));
    CHECK_OK(model_open());
    CHECK_OK(model_write(0, 200));
    CHECK_OK(model_write(3 * P, 10));
    CHECK_OK(model_checkpoint());
    CHECK_OK(model_write(100, 60));
    CHECK_OK(model_zero(P + 5, 20));
    CHECK_OK(model_flush());
    CHECK_OK(model_write(4 * P, 3));
    CHECK_OK(model_write(110, 5));
}

void
use_volume(void)
{
    uint64_t most = model_sectors();
    model_compare();
    CHECK_OK(model_write(most / 4, most / 2));
    CHECK_OK(model_zero(most / 8, most / 8));
    CHECK_OK(model_flush());
    CHECK_OK(model_write(0, 1));
    model_compare();
    CHECK_OK(model_checkpoint());
    model_compare();
}

void
finish_volume(void)
{
    model_close();
    CHECK_OK(model_open());
    if (the_volume != NULL) {
        use_volume();
        model_close();
        CHECK_OK(model_open());
        model_compare();
        CHECK_OK(model_checkpoint());
        model_check_nothing_left();
    }
    model_delete();
    model_teardown();
}

/* ---- its files ---- */

void
journal_name(uint32_t back, char name[GD_NAME_SIZE])
{
    gd_volume_info info;
    gd_volume_get_info(the_volume, &info);
    gd_volume_journal_name("disk", info.head.journal - back, name);
}

int64_t
journal_size(void)
{
    char name[GD_NAME_SIZE];
    journal_name(0, name);
    return scratch_size(&the_scratch, name);
}

ino_t
journal_inode(void)
{
    char name[GD_NAME_SIZE];
    struct stat st = {0};
    journal_name(0, name);
    CHECK(fstatat(the_scratch.root, name, &st, 0) == 0);
    return st.st_ino;
}

unsigned
count_journals(void)
{
    return scratch_count(&the_scratch, "volumes/disk", "journal-", NULL);
}

unsigned
count_spares(void)
{
    return scratch_count(&the_scratch, "volumes/disk", "journal.new", NULL);
}

uint64_t
count_checkpoints(void)
{
    gd_volume_info info;
    gd_volume_get_info(the_volume, &info);
    return info.head.counters.checkpoints;
}

/* ---- a full disk ---- */

uint64_t disk_room;

/* A hundredth of the total is the reserve. */
static int
little_space(GD_UNUSED const gd_env *env, GD_UNUSED int fd, gd_space *space)
{
    *space = (gd_space){.total = 1000 << 20, .free = (10 << 20) + disk_room};
    return 0;
}

void
fill_disk(uint64_t room)
{
    disk_room = room;
    FAULTS->env.free_space = little_space;
    the_repo->params.reserve = 64 << 20;
}

void
empty_disk(void)
{
    FAULTS->env.free_space = fault_table.free_space;
    the_repo->params.reserve = the_scratch.params.reserve;
}

void
begin_on_full_disk(void)
{
    begin_volume(false);
    CHECK_OK(model_write(0, 4 * P));
    CHECK_OK(model_flush());
    model_kill();
    fill_disk(LITTLE_ROOM);
    CHECK_OK(model_open());
}
