/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_journal.c - one journal's file: appended records are found again,
 * wherever the file is torn, cut off or spoiled, and no others are.
 */
#include "engine/volume/journal.h"

#include "tests/c/support/journal_fixture.h"

static journal_fixture t;

TEST_JOURNAL(test_found_again)
{
    check_scan(&t, 0, GD_OK, 0);
    append_records(&t, true);
    check_scan(&t, 0, GD_OK, 7);
    check_scan(&t, t.at[7], GD_OK, 7);
    check_scan(&t, t.at[4], GD_OK, 4);
    check_scan(&t, t.at[0], GD_OK, 0);
    CHECK_INT(t.journal->records, 5);
}

TEST_JOURNAL(test_batches)
{
    static uint8_t data[GD_RECORD_DATA];
    gd_append batch[GD_JOURNAL_BATCH];
    fill_random(data, sizeof data, 1);
    for (size_t i = 0; i < GD_JOURNAL_BATCH; i++) {
        batch[i] = make_append(GD_RECORD_BYTES, i, sizeof data - i, data);
    }
    CHECK_INT(gd_journal_append(t.journal, batch, GD_JOURNAL_BATCH,
                                &t.x.err), GD_OK);
    for (size_t i = 0; i < GD_JOURNAL_BATCH; i++) {
        CHECK_INT(batch[i].at, t.at[i]);
        accept_append(&t, &batch[i]);
    }
    append_record(&t, GD_RECORD_BYTES, 0, 1);
    check_scan(&t, 0, GD_OK, GD_JOURNAL_BATCH + 1);
}

/* A head that is cut off, or of another file, is refused. */
TEST(test_head_is_checked)
{
    size_t count;
    uint8_t other[GD_ID_SIZE] = {9};
    gd_journal *journal;
    gd_volume_head head;
    gd_volume_mark *read_marks;
    journal_setup(&t);
    append_records(&t, true);
    CHECK_INT(gd_journal_open(t.x.env, t.x.root, VOLUME, 3, other, &journal,
                              &head, &read_marks, &t.x.err), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "another repository");
    CHECK(renameat(t.x.root, JOURNAL, t.x.root,
                   NEXT_JOURNAL) == 0);
    CHECK_INT(gd_journal_open(t.x.env, t.x.root, VOLUME, 4,
                              t.x.params.repository_id, &journal, &head,
                              &read_marks, &t.x.err), GD_CORRUPT);
    CHECK(renameat(t.x.root, NEXT_JOURNAL, t.x.root,
                   JOURNAL) == 0);
    scratch_flip(&t.x, JOURNAL, 4096, 1); /* a mark */
    CHECK_INT(scan_journal(&t, 0, &count, NULL), GD_CORRUPT);
    scratch_flip(&t.x, JOURNAL, 4096, 1);
    for (uint64_t length = 8191; length > 0; length /= 2) {
        scratch_truncate(&t.x, JOURNAL, length);
        CHECK_INT(scan_journal(&t, 0, &count, NULL), GD_CORRUPT);
        CHECK_CONTAINS(t.x.err.text, JOURNAL);
    }
    scratch_truncate(&t.x, JOURNAL, 0);
    CHECK_INT(scan_journal(&t, 0, &count, NULL), GD_CORRUPT);
    journal_teardown(&t);
}

/* The file ends anywhere: the whole records in front of that are found. */
TEST_JOURNAL(test_cut_off)
{
    append_records(&t, false);
    uint64_t end = t.journal->end;
    for (uint64_t length = end; length >= t.at[0];
         length -= length > t.at[6] ? 1 : 8) {
        scratch_truncate(&t.x, JOURNAL, length);
        size_t whole = records_before(&t, length);
        check_scan(&t, 0, GD_OK, whole);
        check_scan(&t, t.at[whole], GD_OK, whole);
        if (length < end) {
            check_scan(&t, end, GD_CORRUPT, whole);
        }
    }
}

/* A crash leaves some sectors as they were before the write: zeros. */
TEST_JOURNAL(test_torn)
{
    append_records(&t, false);
    check_torn(&t, JOURNAL, t.at[0], NULL);
}

/* Each damaged byte, but for padding, ends the records if no later record
 * proves that they were durable. */
TEST_JOURNAL(test_last_record_damaged)
{
    append_records(&t, false);
    uint64_t end = t.at[6] + GD_RECORD_HEAD + 1029;
    for (uint64_t at = t.at[6]; at < t.journal->end; at++) {
        scratch_flip(&t.x, JOURNAL, at, 0x10);
        check_scan(&t, 0, GD_OK, at < end ? 6 : 7);
        scratch_flip(&t.x, JOURNAL, at, 0x10);
    }
}

/* V5: the loss of a synced record is reported. */
TEST_JOURNAL(test_durable_record_damaged)
{
    append_records(&t, true); /* 5, 6 and 7 prove that 1 to 4 are durable */
    for (size_t i = 0; i < t.count; i++) {
        scratch_flip(&t.x, JOURNAL, t.at[i] + 30, 1);
        check_scan(&t, 0, i < 4 ? GD_CORRUPT : GD_OK, i);
        check_scan(&t, t.at[7], GD_CORRUPT, i);
        check_scan(&t, t.at[i], GD_OK, i); /* it is behind the length */
        scratch_flip(&t.x, JOURNAL, t.at[i] + 30, 1);
    }
    /* One proof is sufficient. */
    scratch_flip(&t.x, JOURNAL, t.at[3] + 30, 1);
    scratch_flip(&t.x, JOURNAL, t.at[4] + 30, 1);
    scratch_flip(&t.x, JOURNAL, t.at[5] + 30, 1);
    check_scan(&t, 0, GD_CORRUPT, 3);
    scratch_flip(&t.x, JOURNAL, t.at[6] + 30, 1);
    check_scan(&t, 0, GD_OK, 3); /* there is no proof */
}

/* The proof may be far behind, across the window of a scan. */
TEST_JOURNAL(test_proof_far_behind)
{
    static uint8_t data[GD_RECORD_DATA];
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    uint64_t durable = t.journal->end;
    for (int i = 0; i < 40; i++) {
        gd_append one = make_append(GD_RECORD_BYTES, 0, sizeof data - 8, data);
        t.journal->durable = i == 39 ? durable : t.at[0];
        append_one(&t, &one);
    }
    check_scan(&t, 0, GD_OK, 42);
    scratch_flip(&t.x, JOURNAL, t.at[1], 1);
    check_scan(&t, 0, GD_CORRUPT, 1);
    CHECK_CONTAINS(t.x.err.text, "acknowledged");
}

static void
put_record(gd_record record, uint64_t seed, uint64_t at)
{
    uint8_t raw[GD_RECORD_HEAD];
    gd_record_encode(&record, seed, raw);
    scratch_write(&t.x, JOURNAL, raw, sizeof raw, at);
}

/* The bytes behind the end are not the next record of this journal. */
TEST_JOURNAL(test_not_the_next_record)
{
    static const uint8_t nothing[GD_RECORD_HEAD];
    append_records(&t, true);
    uint64_t end = t.journal->end, seed = t.journal->seed;
    gd_record next = {.kind = GD_RECORD_ZEROS,
                      .sequence = 8,
                      .length = 1,
                      .durable = t.at[4]};
    put_record(next, seed + 1, end); /* of another journal */
    check_scan(&t, 0, GD_OK, 7);
    next.sequence = 9; /* out of sequence */
    put_record(next, seed, end);
    check_scan(&t, 0, GD_OK, 7);
    next.sequence = 7;
    put_record(next, seed, end);
    check_scan(&t, 0, GD_OK, 7);
    next.sequence = 8;
    next.length = SIZE + 1; /* beyond the size */
    put_record(next, seed, end);
    check_scan(&t, 0, GD_OK, 7);
    next.length = 1;
    next.durable = end + 1; /* impossible value */
    put_record(next, seed, end);
    check_scan(&t, 0, GD_OK, 7);
    next.durable = end;
    put_record(next, seed, end);
    t.records[7] = next;
    t.count = 8;
    t.at[8] = end + GD_RECORD_HEAD;
    check_scan(&t, 0, GD_OK, 8);
    t.count = 7;
    /* A later record with an impossible durable offset proves nothing. */
    scratch_write(&t.x, JOURNAL, nothing, sizeof nothing, end);
    next.durable = end + 81;
    put_record(next, seed, end + 80);
    check_scan(&t, 0, GD_OK, 7);
    next.durable = end + 80;
    put_record(next, seed, end + 80);
    check_scan(&t, 0, GD_CORRUPT, 7);
    put_record(next, seed + 1, end + 80);
    check_scan(&t, 0, GD_OK, 7);
}

TEST_JOURNAL(test_garbage_behind)
{
    static uint8_t garbage[200000];
    append_records(&t, true);
    fill_random(garbage, sizeof garbage, 5);
    for (size_t i = 0; i + 4 < sizeof garbage; i += 64) {
        memcpy(garbage + i, "GDVR", 4);
    }
    for (size_t skew = 0; skew < 16; skew += 3) {
        scratch_write(&t.x, JOURNAL, garbage, sizeof garbage,
                      t.journal->end + skew);
        check_scan(&t, 0, GD_OK, 7);
        check_scan(&t, t.at[7], GD_OK, 7);
    }
}

/* A guest writes bytes like records, at every alignment; it does not know the
 * seed. */
TEST_JOURNAL(test_guest_forges_records)
{
    append_record(&t, GD_RECORD_BYTES, 0, 100);
    sync_records(&t);
    uint64_t base = t.journal->end;
    uint8_t *data = t.data[t.count];
    memset(data, 0, MAX_LENGTH);
    for (size_t i = 0; i + GD_RECORD_HEAD <= 2800; i += GD_RECORD_HEAD) {
        const gd_record forged = {.kind = GD_RECORD_ZEROS,
                                  .sequence = t.count + 1,
                                  .length = SIZE,
                                  .durable = base + GD_RECORD_HEAD + i};
        gd_record_encode(&forged, i, data + i);
    }
    gd_append one = make_append(GD_RECORD_BYTES, 0, 2800, data);
    append_one(&t, &one);
    check_scan(&t, 0, GD_OK, 2);
    scratch_flip(&t.x, JOURNAL, base, 1); /* its own head is torn */
    check_scan(&t, 0, GD_OK, 1);
}

/* ---- making one ---- */

/* Whatever fails, there is a whole journal or none. */
TEST(test_create_under_faults)
{
    gd_journal *other;
    bool named;
    for (uint64_t nth = 1, done = 0; done == 0; nth++) {
        journal_setup(&t);
        t.head.journal = 4;
        fault_env_fail(&t.x.f, FAULT_ANY, nth, EIO, false);
        gd_status s = create_journal(&t, NULL, &other, &named);
        done = fault_env_faults(&t.x.f) == 0;
        fault_env_heal(&t.x.f);
        CHECK(s == GD_OK || !done);
        bool there = scratch_exists(&t.x, NEXT_JOURNAL);
        CHECK(named || !there);
        if (s == GD_OK) {
            CHECK(there && named);
            gd_journal_close(other);
        }
        journal_teardown(&t);
    }
}

/* V2: a name when the head is durable, and a durable name before records. */
TEST_JOURNAL(test_order_of_creating)
{
    gd_journal *other;
    bool named;
    t.head.journal = 4;
    t.head.marks = 0;
    fault_env_start_trace(&t.x.f);
    CHECK_INT(create_journal(&t, NULL, &other, &named), GD_OK);
    scratch_check_trace(&t.x, "pwritev fdatasync linkat unlinkat "
                        "fsync");
    gd_journal_close(other);
}

/* An owner that was cut off does not replace the next owner's journal (V1). */
TEST_JOURNAL(test_another_owner_has_made_it)
{
    gd_journal *mine, *other;
    bool named;
    struct stat before, after;
    t.head.journal = 4;
    t.head.marks = 0;
    CHECK_INT(create_journal(&t, NULL, &mine, &named), GD_OK);
    CHECK_INT(fstatat(t.x.root, mine->name, &before, 0), 0);
    CHECK_INT(create_journal(&t, NULL, &other, &named), GD_BUSY);
    CHECK(!named);
    CHECK_CONTAINS(t.x.err.text, "this one was cut off");
    CHECK_INT(fstatat(t.x.root, mine->name, &after, 0), 0);
    CHECK(before.st_ino == after.st_ino);
    gd_journal_close(mine);
}

/* An owner that was cut off makes its next journal while the next owner does:
 * the name leads to the next owner's file. */
TEST_JOURNAL(test_two_owners_make_a_journal)
{
    bool named;
    gd_journal *mine, *other, *found_one;
    gd_volume_mark *read_marks;
    gd_volume_head head;
    t.head.journal++;
    CHECK_INT(begin_journal(&t, NULL, &mine), GD_OK);
    uint64_t seed = t.head.seed;
    CHECK_INT(begin_journal(&t, NULL, &other), GD_OK);
    CHECK_INT(gd_journal_publish(mine, VOLUME, &named, &t.x.err), GD_OK);
    CHECK_INT(gd_journal_publish(other, VOLUME, &named, &t.x.err), GD_BUSY);
    CHECK(!named);
    CHECK_INT(gd_journal_open(t.x.env, t.x.root, VOLUME, 4,
                              t.x.params.repository_id, &found_one, &head,
                              &read_marks, &t.x.err), GD_OK);
    CHECK(head.seed == seed && seed != t.head.seed);
    t.x.env->release(t.x.env, read_marks);
    gd_journal_close(found_one);
    gd_journal_close(mine);
    CHECK_INT(spare_journals(&t), 0);
}

/* By this lock a file system can report lost locks to the owner as errors. */
TEST_JOURNAL(test_holds_a_lock)
{
    gd_journal *made;
    bool named;
    const gd_env *env = gd_env_posix();
    t.head.journal = 4;
    t.head.marks = 0;
    CHECK_INT(create_journal(&t, NULL, &made, &named), GD_OK);
    int raw = openat(t.x.root, made->name, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->is_locked(env, raw, 0), 1);
    gd_journal_close(made);
    CHECK_INT(env->is_locked(env, raw, 0), 0);
    close(raw);
}

TEST_JOURNAL(test_last_number)
{
    gd_journal *other;
    bool named;
    t.head.journal = 0; /* one more than the last */
    t.head.marks = 0;
    CHECK(create_journal(&t, NULL, &other, &named) != GD_OK);
    CHECK(!named);
    CHECK_INT(scratch_count(&t.x, "volumes/disk", "", NULL), 1);
}
