/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_journal_recycling.c - a journal is written over the file of an earlier
 * one: the records of that one are not found (volumes.rst, V10).
 */
#include "engine/volume/journal.h"

#include "tests/c/support/journal_fixture.h"

static journal_fixture t;

enum { OLD_ROOM = 1 << 16 };

static uint8_t old_file[OLD_ROOM];

/* The journal with the next number, written over the file of this one, of which
 * nothing is known any more. */
static gd_status
recycle(bool *named)
{
    gd_journal *spare = t.journal;
    memset(old_file, 0, sizeof old_file);
    scratch_read(&t.x, JOURNAL, old_file,
                 (size_t)scratch_size(&t.x, JOURNAL), 0);
    t.journal = NULL;
    if (!gd_journal_retire(spare, VOLUME)) {
        gd_journal_close(spare);
        *named = false;
        return GD_IO;
    }
    t.number = ++t.head.journal;
    t.head.needed = t.head.journal;
    t.count = 0;
    return create_journal(&t, spare, &t.journal, named);
}

static void
setup_recycled(void)
{
    bool named;
    journal_setup(&t);
    append_records(&t, true);
    append_records(&t, true);
    sync_records(&t);
    uint64_t end = t.journal->end, start = t.at[0];
    CHECK_INT(recycle(&named), GD_OK);
    CHECK(named);
    CHECK_INT(t.journal->end, start);
    CHECK_INT(t.journal->durable, start);
    CHECK_INT(t.journal->ahead, end);
    CHECK_INT(scratch_size(&t.x, NEXT_JOURNAL), (int64_t)end);
    CHECK(!scratch_exists(&t.x, JOURNAL) && spare_journals(&t) == 0);
}

/* Wherever the new records end, none of the old ones is found behind them: they
 * have the same places, sequences and lengths. */
TEST_WITH(test_old_records_are_not_found, setup_recycled(),
          journal_teardown(&t))
{
    check_scan(&t, 0, GD_OK, 0);
    append_records(&t, true);
    for (size_t i = 0; i <= 7; i++) {
        check_scan(&t, t.at[i], GD_OK, i);
    }
    check_scan(&t, 0, GD_OK, 7);
    append_record(&t, GD_RECORD_BYTES, 0, 1); /* where an old one was */
    check_scan(&t, 0, GD_OK, 8);
    append_record(&t, GD_RECORD_BYTES, 0, 1999); /* and another one */
    check_scan(&t, 0, GD_OK, 9);
    CHECK_INT(gd_journal_wants_ahead(t.journal), 0);
}

/* An old record proves nothing durable (V5). */
TEST_WITH(test_old_records_are_no_proof, setup_recycled(), journal_teardown(&t))
{
    append_record(&t, GD_RECORD_BYTES, 0, 1);
    scratch_flip(&t.x, NEXT_JOURNAL, t.at[0], 1);
    check_scan(&t, 0, GD_OK, 0);
}

/* A crash leaves sectors as they were in the journal before. */
TEST_WITH(test_torn_over_old_records, setup_recycled(), journal_teardown(&t))
{
    append_records(&t, false);
    check_torn(&t, NEXT_JOURNAL, t.at[0], old_file);
}

/* A crash leaves the head of a record, and the bytes of the old one. */
TEST_WITH(test_head_over_old_bytes, setup_recycled(), journal_teardown(&t))
{
    append_record(&t, GD_RECORD_BYTES, 0, 1);
    append_record(&t, GD_RECORD_BYTES, 512, 600);
    uint64_t bytes = t.at[1] + GD_RECORD_HEAD;
    uint8_t now[600];
    scratch_read(&t.x, NEXT_JOURNAL, now, sizeof now, bytes);
    for (size_t i = 0; i < sizeof now; i++) {
        old_file[bytes + i] ^= 1;
    }
    scratch_write(&t.x, NEXT_JOURNAL, old_file + bytes, sizeof now, bytes);
    check_scan(&t, 0, GD_OK, 1);
    scratch_write(&t.x, NEXT_JOURNAL, now, sizeof now, bytes);
    check_scan(&t, 0, GD_OK, 2);
}

/* The name goes before the head is written, and comes when it is durable. */
TEST_JOURNAL(test_order_of_recycling)
{
    bool named;
    append_records(&t, true);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(recycle(&named), GD_OK);
    scratch_check_trace(&t.x, "renameat pwritev fdatasync linkat unlinkat "
                        "fsync");
    check_scan(&t, 0, GD_OK, 0);
}

/* A journal that cannot be begun leaves no file, and no spare. */
TEST_JOURNAL(test_failed_begin_removes_the_spare)
{
    gd_journal *made, *spare = t.journal;
    t.journal = NULL;
    CHECK(gd_journal_retire(spare, VOLUME));
    CHECK_INT(spare_journals(&t), 1);
    t.head.journal = 0;
    CHECK_INT(begin_journal(&t, spare, &made), GD_INVALID);
    CHECK_INT(spare_journals(&t), 0);
}

/* Whatever fails, there is a whole journal or none, and no spare is left
 * open. */
TEST(test_recycling_under_faults)
{
    bool named;
    for (uint64_t nth = 1, done = 0; done == 0; nth++) {
        journal_setup(&t);
        append_records(&t, true);
        uint64_t bad = nth % 2; /* a record behind the end, too */
        gd_append one = make_append(GD_RECORD_BYTES, 0, 100, t.data[60]);
        if (bad) {
            CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_OK);
        }
        fault_env_fail(&t.x.f, FAULT_ANY, nth, EIO, false);
        gd_status s = recycle(&named);
        done = fault_env_faults(&t.x.f) == 0;
        fault_env_heal(&t.x.f);
        CHECK(s == GD_OK || !done);
        CHECK(named || !scratch_exists(&t.x, NEXT_JOURNAL));
        if (named) {
            check_scan(&t, 0, GD_OK, 0);
        }
        if (s != GD_OK) {
            t.journal = NULL;
            CHECK_INT(spare_journals(&t), 0);
        }
        journal_teardown(&t);
    }
}

/* A rename can succeed and report an error. */
TEST_JOURNAL(test_renamed_with_an_error)
{
    t.x.f.env.renameat = fault_lying_renameat;
    CHECK(!gd_journal_retire(t.journal, VOLUME));
    CHECK_INT(spare_journals(&t), 0);
}

/* A file is kept up to a size. */
TEST_JOURNAL(test_long_file_is_cut)
{
    bool named;
    t.journal->ahead = GD_JOURNAL_MAX_SPARE + 4096;
    scratch_truncate(&t.x, JOURNAL, t.journal->ahead);
    gd_journal *spare = t.journal;
    CHECK(gd_journal_retire(spare, VOLUME));
    CHECK_INT(scratch_size(&t.x, spare->new_name), GD_JOURNAL_MAX_SPARE);
    t.number = ++t.head.journal;
    CHECK_INT(create_journal(&t, spare, &t.journal, &named), GD_OK);
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    gd_journal_trim(t.journal);
    CHECK_INT(scratch_size(&t.x, NEXT_JOURNAL), (int64_t)t.journal->end);
    check_scan(&t, 0, GD_OK, 1);
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    check_scan(&t, 0, GD_OK, 2);
}

/* A trim does not forget the records of a failed append. */
TEST_JOURNAL(test_trim_behind_a_failed_append)
{
    gd_append one = make_append(GD_RECORD_BYTES, 0, 512, t.data[60]);
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_OK);
    gd_journal_trim(t.journal);
    append_record(&t, GD_RECORD_BYTES, 0, 400);
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    check_scan(&t, 0, GD_OK, 3);
}

TEST_JOURNAL(test_spare_is_removed)
{
    gd_journal *spare = t.journal;
    t.journal = NULL;
    CHECK(gd_journal_retire(spare, VOLUME));
    fault_env_start_trace(&t.x.f);
    gd_journal_abandon(spare);
    /* XFS frees the blocks of an unlinked file only later. */
    scratch_check_trace(&t.x, "ftruncate unlinkat");
    CHECK_INT(scratch_count(&t.x, "volumes/disk", "", NULL), 0);
}
