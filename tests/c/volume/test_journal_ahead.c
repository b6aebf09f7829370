/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_journal_ahead.c - what is behind the records of a journal: the bytes of
 * appends that failed, and zeros that are written ahead.
 */
#include "engine/volume/journal.h"

#include "tests/c/support/journal_fixture.h"

static journal_fixture t;

/* ---- appends that fail ---- */

/* The bytes of a failed append must not be found behind a later one. */
TEST(test_failed_append_is_gone)
{
    uint8_t *data = t.data[MAX_COUNT - 1];
    for (unsigned nth = 2; nth <= 4; nth++) {
        gd_append batch[3];
        journal_setup(&t);
        append_record(&t, GD_RECORD_BYTES, 0, 100);
        fill_random(data, MAX_LENGTH, 99);
        for (size_t i = 0; i < 3; i++) {
            batch[i] = make_append(GD_RECORD_BYTES, 512 * i, 512, data);
        }
        fault_env_shorten(&t.x.f, GD_RECORD_HEAD + 512);
        fault_env_fail(&t.x.f, FAULT_PWRITEV, nth, ENOSPC, false);
        gd_status s = gd_journal_append(t.journal, batch, 3, &t.x.err);
        CHECK_INT(s, nth <= 3 ? GD_NOSPACE : GD_OK);
        fault_env_heal(&t.x.f);
        /* It was not accepted, even if it succeeded. */
        append_record(&t, GD_RECORD_BYTES, 512, 512);
        sync_records(&t);
        check_scan(&t, 0, GD_OK, 2);
        append_record(&t, GD_RECORD_BYTES, 0, 100);
        check_scan(&t, 0, GD_OK, 3);
        journal_teardown(&t);
    }
}

/* If the bytes cannot be removed, no record is appended. */
TEST_JOURNAL(test_failed_append_cannot_be_removed)
{
    uint8_t *data = t.data[MAX_COUNT - 1];
    gd_append one = make_append(GD_RECORD_BYTES, 0, 512, data);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 1, EIO, false);
    fault_env_fail(&t.x.f, FAULT_FTRUNCATE, 1, EIO, false);
    CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_IO);
    CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_IO);
    CHECK_CONTAINS(t.x.err.text, JOURNAL);
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    check_scan(&t, 0, GD_OK, 1);
}

/* ---- zeros ahead ---- */

static uint64_t
file_size(void)
{
    return (uint64_t)scratch_size(&t.x, JOURNAL);
}

/* Records overwrite them, and the file does not get longer; when they are used
 * up, as many are written again as the journal has bytes, within bounds. */
TEST_JOURNAL(test_zeros_ahead)
{
    static uint8_t data[GD_RECORD_DATA];
    append_records(&t, true);
    uint64_t end = t.journal->end, size = end + 65536;
    gd_journal_write_ahead(t.journal);
    CHECK_INT(file_size(), size);
    CHECK_INT(t.journal->end, end);
    CHECK_INT(gd_journal_wants_ahead(t.journal), 0);
    gd_journal_write_ahead(t.journal); /* there are some */
    CHECK_INT(file_size(), size);
    check_scan(&t, 0, GD_OK, 7);
    check_scan(&t, end, GD_OK, 7);
    for (int i = 0; i < 4; i++) {
        append_record(&t, GD_RECORD_BYTES, 0, MAX_LENGTH);
        sync_records(&t);
        check_scan(&t, 0, GD_OK, t.count);
    }
    CHECK_INT(file_size(), size);
    for (int i = 0; i < 40; i++) {
        gd_append one = make_append(GD_RECORD_BYTES, 0, sizeof data, data);
        append_one(&t, &one);
        uint64_t wanted = gd_journal_wants_ahead(t.journal);
        CHECK(i > 0 || wanted > 65536);
        CHECK(i > 0 || wanted >= t.journal->end - t.journal->durable);
        CHECK(wanted <= 1 << 20 && wanted <= t.journal->end);
        gd_journal_write_ahead(t.journal);
        CHECK(file_size() >= t.journal->end);
        sync_records(&t);
    }
    CHECK_INT(file_size() - t.journal->end,
              t.journal->ahead - t.journal->end);
    check_scan(&t, 0, GD_OK, t.count);
}

/* A sync that is larger than the zeros would be has none: the next one of this
 * size would need new ones. */
TEST_JOURNAL(test_no_zeros_for_large_syncs)
{
    static uint8_t data[GD_RECORD_DATA];
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    sync_records(&t);
    for (unsigned i = 0; i < 40; i++) {
        gd_append one = make_append(GD_RECORD_BYTES, 0, sizeof data, data);
        append_one(&t, &one);
        bool small = t.journal->end - t.journal->durable <= 1 << 20;
        CHECK((gd_journal_wants_ahead(t.journal) > 0) == small);
    }
    sync_records(&t);
    CHECK_INT(gd_journal_wants_ahead(t.journal), 1 << 20);
}

/* A crash leaves zeros where sectors of records were not written, or the file
 * as it was before the zeros. */
TEST_JOURNAL(test_torn_over_zeros)
{
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    gd_journal_write_ahead(t.journal);
    sync_records(&t);
    uint64_t end = t.journal->end;
    append_records(&t, false);
    check_torn(&t, JOURNAL, end, NULL);
    /* V5: the first record was durable. */
    scratch_flip(&t.x, JOURNAL, t.at[0], 1);
    check_scan(&t, 0, GD_CORRUPT, 0);
}

/* The bytes of a failed append are not overwritten with zeros, but cut off,
 * with the zeros behind them; then there are new zeros. */
TEST_JOURNAL(test_failed_append_over_zeros)
{
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    gd_journal_write_ahead(t.journal);
    gd_append batch[3];
    uint8_t *data = t.data[MAX_COUNT - 1];
    for (size_t i = 0; i < 3; i++) {
        batch[i] = make_append(GD_RECORD_BYTES, 512 * i, 512, data);
    }
    CHECK_INT(gd_journal_append(t.journal, batch, 3, &t.x.err), GD_OK);
    accept_append(&t, &batch[0]);
    uint64_t size = file_size();
    CHECK_INT(gd_journal_wants_ahead(t.journal), 0);
    gd_journal_write_ahead(t.journal);
    CHECK_INT(file_size(), size);
    /* As long as the one that failed. */
    append_record(&t, GD_RECORD_BYTES, 512, 512);
    CHECK_INT(file_size(), t.journal->end);
    check_scan(&t, 0, GD_OK, 3);
    CHECK(gd_journal_wants_ahead(t.journal) > 0);
    gd_journal_write_ahead(t.journal);
    CHECK(file_size() > t.journal->end);
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    check_scan(&t, 0, GD_OK, 4);
}

/* The journal needs no zeros. */
TEST(test_no_zeros_ahead)
{
    for (unsigned nth = 1; nth <= 2; nth++) {
        journal_setup(&t);
        append_records(&t, true);
        fault_env_shorten(&t.x.f, 8192);
        fault_env_fail(&t.x.f, FAULT_PWRITEV, nth, ENOSPC, false);
        gd_journal_write_ahead(t.journal);
        fault_env_heal(&t.x.f);
        CHECK(gd_journal_wants_ahead(t.journal) > 0);
        check_scan(&t, 0, GD_OK, 7);
        append_record(&t, GD_RECORD_BYTES, 0, 2000);
        check_scan(&t, 0, GD_OK, 8);
        journal_teardown(&t);
    }
}
