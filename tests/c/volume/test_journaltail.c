/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_journaltail.c - the last records of a journal are copied into the next
 * one (volumes.rst, V4).
 */
#include "engine/volume/journaltail.h"

#include "tests/c/support/journal_fixture.h"

static journal_fixture t;

static size_t visited;

static gd_status
note_copy(void *arg, gd_journal *to, const gd_append *append, gd_error *err)
{
    CHECK(arg == &t && to != t.journal);
    CHECK_INT(append->at, to->end);
    visited++;
    return append->record.offset == 4096 && append->record.length == 77
               ? gd_fail(err, GD_IO, "refused")
               : GD_OK;
}

static gd_status
read_back(gd_journal **journal)
{
    size_t count;
    return scan_journal(&t, 0, &count, journal);
}

/* Copies the records from `from` on into the next journal, which is t.journal
 * then. */
static gd_status
copy_from(uint64_t from)
{
    bool named;
    gd_journal *found_one, *made;
    CHECK_INT(read_back(&found_one), GD_OK);
    const gd_journal_tail tail = {found_one, from};
    t.head.journal = t.number + 1;
    CHECK_INT(begin_journal(&t, NULL, &made), GD_OK);
    CHECK(!scratch_exists(&t.x, NEXT_JOURNAL));
    visited = 0;
    gd_status s = gd_journal_tail_copy(&tail, made, note_copy, &t, &t.x.err);
    gd_journal_close(found_one);
    if (s != GD_OK) {
        gd_journal_abandon(made);
        CHECK_INT(spare_journals(&t), 0);
        return s;
    }
    CHECK_INT(gd_journal_publish(made, VOLUME, &named, &t.x.err), GD_OK);
    CHECK_INT(made->durable, made->end);
    gd_journal_close(t.journal);
    t.journal = made;
    t.number = t.head.journal;
    return GD_OK;
}

/* Forgets the first records, and those that are not copied. */
static void
forget(size_t count)
{
    size_t kept = 0;
    uint64_t at = t.at[0];
    for (size_t i = count; i < t.count; i++) {
        gd_record_kind kind = t.records[i].kind;
        if (kind == GD_RECORD_BYTES || kind == GD_RECORD_ZEROS) {
            t.records[kept++] = t.records[i];
            at += gd_record_size(&t.records[kept - 1]);
            t.at[kept] = at;
        }
    }
    t.count = kept;
}

TEST(test_tail_is_copied)
{
    for (size_t first = 0; first <= 7; first++) {
        journal_setup(&t);
        append_records(&t, true);
        CHECK_INT(copy_from(t.at[first]), GD_OK);
        forget(first);
        CHECK_INT(visited, t.count);
        CHECK_INT(t.journal->end, t.at[t.count]);
        check_scan(&t, 0, GD_OK, t.count);
        append_record(&t, GD_RECORD_BYTES, 0, 100);
        check_scan(&t, 0, GD_OK, t.count);
        journal_teardown(&t);
    }
}

/* A scan finds out up to where the records are proven to be durable. */
TEST_JOURNAL(test_proven_end)
{
    gd_journal *journal;
    append_records(&t, false);
    CHECK_INT(read_back(&journal), GD_OK);
    CHECK_INT(journal->durable, t.at[0]);
    gd_journal_close(journal);
    sync_records(&t);
    uint64_t end = t.journal->end;
    append_records(&t, false);
    CHECK_INT(read_back(&journal), GD_OK);
    CHECK_INT(journal->durable, end);
    gd_journal_close(journal);
}

/* The volume has become smaller: what the new journal could not have is not
 * copied, or it would be the end of its records. */
TEST_JOURNAL(test_tail_beyond_the_size)
{
    append_record(&t, GD_RECORD_BYTES, SIZE - 600, 600);
    append_record(&t, GD_RECORD_BYTES, SIZE - 512, 100);
    append_record(&t, GD_RECORD_ZEROS, SIZE - 1024, 1024);
    append_record(&t, GD_RECORD_BYTES, 512, 100);
    t.head.size = SIZE - 512;
    CHECK_INT(copy_from(t.at[0]), GD_OK);
    t.records[0].length -= 512;
    t.records[1] = t.records[2];
    t.records[1].length -= 512;
    t.records[2] = t.records[3];
    t.count = 4;
    forget(0);
    t.count = 3;
    CHECK_INT(visited, 3);
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    sync_records(&t);
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    check_scan(&t, 0, GD_OK, 5);
}

/* A record that proves a place where no record begins proves nothing. */
TEST_JOURNAL(test_proven_place_without_a_record)
{
    gd_journal *journal;
    append_records(&t, false);
    t.journal->durable = t.at[4] + 8;
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    CHECK_INT(read_back(&journal), GD_OK);
    CHECK_INT(journal->durable, t.at[0]);
    gd_journal_close(journal);
    t.journal->durable = t.at[5];
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    CHECK_INT(read_back(&journal), GD_OK);
    CHECK_INT(journal->durable, t.at[5]);
    gd_journal_close(journal);
}

/* Longer than what is read at once, with records across its ends. */
TEST_JOURNAL(test_long_tail_is_copied)
{
    static uint8_t data[GD_RECORD_DATA];
    fill_random(data, sizeof data, 3);
    for (int i = 0; i < 60; i++) {
        gd_append one = make_append(GD_RECORD_BYTES, (uint64_t)i,
                                    sizeof data - 9 * (uint64_t)i, data);
        append_one(&t, &one);
    }
    CHECK_INT(copy_from(t.at[1]), GD_OK);
    forget(1);
    check_scan(&t, 0, GD_OK, 59);
}

/* A place where no record begins, a record that has changed, and a visitor that
 * fails. */
TEST_JOURNAL(test_bad_tails)
{
    append_records(&t, true);
    CHECK_INT(copy_from(t.at[1] + 8), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, JOURNAL);
    CHECK_INT(copy_from(t.at[7] - 8), GD_CORRUPT);
    append_record(&t, GD_RECORD_BYTES, 4096, 77);
    CHECK_INT(copy_from(t.at[0]), GD_IO);
}
