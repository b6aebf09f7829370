/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_open.c - a volume in a bad state can be opened: the owner reports lost
 * bytes and reads all others, also on a full disk (volumes.rst, V5, V7, V8).
 */
#include "engine/volume/volume.h"

#include "engine/volume/volumenames.h"
#include "tests/c/support/volume_fixture.h"

/* A record that has changed on the disk is not read (I7). */
TEST(test_damaged_record_is_not_read)
{
    char name[GD_NAME_SIZE];
    uint8_t data[512];
    gd_volume_info info;
    begin_volume(false);
    gd_volume_get_info(the_volume, &info);
    journal_name(0, name);
    CHECK_OK(gd_volume_read(the_volume, data, 512, 114 * 512,
                            &the_scratch.err));
    scratch_flip(&the_scratch, name, info.journal_bytes - 1, 1);
    CHECK_INT(gd_volume_read(the_volume, data, 512, 110 * 512,
                             &the_scratch.err), GD_CORRUPT);
    CHECK_CONTAINS(model_words(), name);
    CHECK(model_checkpoint() == GD_CORRUPT); /* nor is it stored */
    CHECK_OK(gd_volume_read(the_volume, data, 512, 4 * P * 512,
                            &the_scratch.err));
    model_delete();
    model_teardown();
}

static int
list_no_images(const gd_env *env, int dir, const char *path,
               void (*visit)(void *arg, const char *name), void *arg)
{
    return strcmp(path, "images") == 0
               ? -EIO
               : fault_table.list(env, dir, path, visit, arg);
}

/* Files of an earlier owner may stay: the volume is opened. */
TEST(test_garbage_that_stays)
{
    begin_volume(false);
    model_kill();
    FAULTS->env.list = list_no_images;
    CHECK_OK(model_open());
    FAULTS->env.list = fault_table.list;
    model_compare();
    finish_volume();
}

static uint64_t read_bytes;

static ssize_t
count_pread(const gd_env *env, int fd, void *buf, size_t len, uint64_t offset)
{
    read_bytes += len;
    return fault_table.pread(env, fd, buf, len, offset);
}

/* An opening reads each journal once, even if a checkpoint was not ended. */
TEST(test_journals_are_read_once)
{
    begin_volume(false);
    CHECK_OK(model_write(0, 4 * P));
    fault_env_fail(FAULTS, FAULT_LINKAT, 1, EIO, false);
    CHECK(model_checkpoint() != GD_OK);
    fault_env_heal(FAULTS);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(model_write(i, 4 * P));
    }
    CHECK_OK(model_flush());
    CHECK_OK(model_write(0, 1)); /* it proves what is durable */
    gd_volume_info info;
    gd_volume_get_info(the_volume, &info);
    CHECK(info.head.needed < info.head.journal);
    model_kill();
    FAULTS->env.pread = count_pread;
    read_bytes = 0;
    CHECK_OK(model_open());
    FAULTS->env.pread = fault_table.pread;
    CHECK(read_bytes < info.journal_bytes + 150000);
    finish_volume();
}

/* A marked recipe is missing: no other bytes are read in its place (V7). */
TEST(test_missing_recipe)
{
    char name[GD_NAME_SIZE];
    uint8_t byte[512];
    begin_volume(true);
    CHECK_OK(model_checkpoint());
    model_close();
    CHECK_INT(scratch_count(&the_scratch, "images", "v_", NULL), 5);
    gd_volume_head head;
    CHECK_OK(gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err));
    strcpy(name, "images/");
    gd_volume_edition_id(head.volume_id, 0, 2, name + strlen(name));
    CHECK(unlinkat(the_scratch.root, name, 0) == 0);
    CHECK_OK(model_open());
    CHECK_INT(gd_volume_read(the_volume, byte, 512, 0, &the_scratch.err),
              GD_CORRUPT);
    CHECK_CONTAINS(model_words(), name);
    CHECK_OK(gd_volume_read(the_volume, byte, 512, 3 * P * 512,
                            &the_scratch.err));
    model_delete();
    model_teardown();
}

/* Damages a journal that is needed, but not the newest; returns the words of
 * the resulting error. */
static const char *
spoil(int how, const char *name, uint64_t end)
{
    uint8_t raw[GD_VOLUME_HEAD];
    gd_volume_head head;
    switch (how) {
    case 0:
        CHECK(unlinkat(the_scratch.root, name, 0) == 0);
        return "is missing; what was written to it is lost";
    case 1:
        scratch_truncate(&the_scratch, name, end - 8);
        return "is lost, though it was acknowledged";
    case 2:
        scratch_flip(&the_scratch, name, end - 8, 1);
        return "is lost, though it was acknowledged";
    default:
        scratch_read(&the_scratch, name, raw, sizeof raw, 0);
        CHECK_OK(gd_volume_head_decode(raw, name, &head, &the_scratch.err));
        head.volume_id[0] ^= 1;
        gd_volume_head_encode(&head, raw);
        scratch_write(&the_scratch, name, raw, sizeof raw, 0);
        return "is of another volume";
    }
}

/* A needed journal is missing, ends early, is damaged, or is another
 * volume's. */
TEST(test_spoiled_chain)
{
    for (int how = 0; how < 4; how++) {
        char first[GD_NAME_SIZE];
        begin_volume(false);
        model_kill();
        CHECK_OK(model_open()); /* a second journal, which needs the first */
        CHECK_OK(model_write(3, 3));
        CHECK_OK(model_checkpoint()); /* the first is not needed then */
        CHECK_OK(model_write(9, 3));
        /* A checkpoint that fails leaves a frozen journal. The first link is
         * the next journal's. */
        fault_env_fail(FAULTS, FAULT_LINKAT, 2, EIO, true);
        CHECK(model_checkpoint() != GD_OK);
        fault_env_heal(FAULTS);
        CHECK_OK(model_write(12, 3));
        CHECK_OK(model_flush());
        CHECK_OK(model_write(12, 1)); /* it proves what is durable */
        model_close();
        CHECK_INT(count_journals(), 2);
        gd_volume_head head;
        CHECK_OK(gd_volume_read_head(the_repo, "disk", &head,
                                     &the_scratch.err));
        CHECK_INT(head.needed, head.journal - 1);
        gd_volume_journal_name("disk", head.needed, first);
        const char *words = spoil(how, first, head.before);
        CHECK_INT(model_open(), GD_CORRUPT);
        CHECK_CONTAINS(model_words(), words);
        the_volume = NULL;
        model_delete();
        model_teardown();
    }
}

/* Journals of owners that were killed cannot be stored for want of space: the
 * volume can be opened, read and written all the same. */
TEST(test_opened_on_a_full_disk)
{
    begin_volume(false);
    for (unsigned i = 0; i < 8; i++) {
        model_kill();
        /* The first link is the journal's. */
        fault_env_fail(FAULTS, FAULT_LINKAT, 2, ENOSPC, true);
        CHECK_OK(model_open());
        CHECK_OK(model_write(3 * i, 3));
        CHECK_INT(model_checkpoint(), GD_NOSPACE);
        fault_env_heal(FAULTS);
    }
    finish_volume();
}

/* There is no room for the owner's own journal: everything can be read, and
 * nothing written. When there is room, a checkpoint makes it writable. */
TEST(test_opened_without_room_for_a_journal)
{
    static const fault_call calls[] = {FAULT_PWRITEV, FAULT_LINKAT};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (int settled = 0; settled < 2; settled++) {
            gd_volume_info info;
            begin_volume(false);
            if (settled) {
                CHECK_OK(model_checkpoint());
                model_close();
            } else {
                model_kill();
            }
            fault_env_fail(FAULTS, calls[i], 1, ENOSPC, true);
            CHECK_OK(model_open());
            gd_volume_get_info(the_volume, &info);
            CHECK(info.is_read_only);
            CHECK_CONTAINS(info.broken, "until the disk has room");
            model_compare();
            CHECK_INT(model_write(3, 3), GD_NOSPACE);
            CHECK_INT(model_checkpoint(), GD_NOSPACE);
            CHECK_INT(model_resize(2 * P), GD_NOSPACE);
            CHECK(gd_volume_needs_checkpoint(the_volume));
            fault_env_heal(FAULTS);
            CHECK_OK(model_checkpoint());
            gd_volume_get_info(the_volume, &info);
            CHECK(!info.is_read_only && info.broken[0] == '\0');
            use_volume();
            finish_volume();
        }
    }
}

/* A head claims that billions of journals are needed: no memory is allocated
 * for them. */
TEST(test_long_chain)
{
    char name[GD_NAME_SIZE];
    gd_volume_head head;
    uint8_t raw[GD_VOLUME_HEAD];
    model_setup(0);
    CHECK_OK(model_create(P));
    CHECK_OK(gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err));
    head.journal = UINT32_MAX;
    gd_volume_head_encode(&head, raw);
    gd_volume_journal_name("disk", UINT32_MAX, name);
    scratch_write(&the_scratch, name, raw, sizeof raw, 0);
    CHECK_INT(model_open(), GD_CORRUPT);
    CHECK_CONTAINS(model_words(), "journal 2 of volume disk is missing");
    model_teardown();
}

/* V8: journals that are no longer needed are ignored when a crash brings them
 * back. */
TEST(test_old_journal_comes_back)
{
    static uint8_t old[1 << 20];
    char name[GD_NAME_SIZE];
    begin_volume(false);
    gd_volume_head head;
    CHECK_OK(gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err));
    gd_volume_journal_name("disk", head.journal, name);
    int64_t length = scratch_size(&the_scratch, name);
    CHECK(length > 0 && length <= (int64_t)sizeof old);
    scratch_read(&the_scratch, name, old, (size_t)length, 0);
    CHECK_OK(model_checkpoint());
    CHECK_OK(model_write(100, 60));
    CHECK_OK(model_flush());
    CHECK(!scratch_exists(&the_scratch, name));
    scratch_write(&the_scratch, name, old, (size_t)length, 0);
    model_kill();
    finish_volume();
}
