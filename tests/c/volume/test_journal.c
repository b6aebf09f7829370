/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_journal.c - one journal's file: appended records are found again,
 * wherever the file is torn, cut off or spoiled, and no others are.
 */
#include "engine/volume/journal.h"

#include "engine/base/coding.h"
#include "engine/volume/journaltail.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define VOLUME "disk"
#define JOURNAL "volumes/disk/journal-00000003"

enum {
    SIZE = 1 << 20,
    MAX_COUNT = 64, /* records */
    MAX_LENGTH = 3000,
};

typedef struct fixture {
    scratch x;
    gd_volume_head head;
    gd_journal *journal;
    uint32_t number; /* of the journal */
    /* The appended records, and their offsets. */
    gd_record records[MAX_COUNT];
    uint64_t at[MAX_COUNT + 1];
    size_t count;
    uint8_t data[MAX_COUNT][MAX_LENGTH];
} fixture;

static fixture t;
static const gd_volume_mark marks[] = {{0, 1}, {7, 9}};

static void
setup(void)
{
    bool named;
    memset(&t, 0, sizeof t);
    scratch_init(&t.x);
    REQUIRE(mkdirat(t.x.root, "volumes/disk", 0700) == 0);
    t.head = (gd_volume_head){.journal = 3,
                              .needed = 3,
                              .size = SIZE,
                              .part_size = 65536,
                              .state = GD_VOLUME_READY,
                              .volume_id = {1},
                              .marks = 2};
    memcpy(t.head.repository_id, t.x.params.repository_id, GD_ID_SIZE);
    CHECK_INT(gd_journal_create(t.x.env, t.x.root, VOLUME, &t.head, marks,
                                NULL, &t.journal, &named, &t.x.err), GD_OK);
    CHECK(named);
    CHECK_INT(scratch_count(&t.x, "volumes/disk", "journal.new", NULL), 0);
    t.number = 3;
    t.at[0] = t.journal->end;
    CHECK_INT(t.at[0], 8192);
}

static void
teardown(void)
{
    if (t.journal != NULL) {
        gd_journal_close(t.journal);
    }
    CHECK_INT(scratch_destroy(&t.x), 0);
}

/* ---- appending ---- */

static gd_append
make_append(gd_record_kind kind, uint64_t offset, uint64_t length,
            uint8_t *data)
{
    gd_append append = {.record = {.kind = kind,
                                   .offset = offset,
                                   .length = length}};
    if (kind == GD_RECORD_BYTES) {
        append.data = data;
        append.record.checksum = gd_checksum(data, (size_t)length, 0);
    }
    return append;
}

static void
append(gd_record_kind kind, uint64_t offset, uint64_t length)
{
    uint8_t *data = t.data[t.count];
    fill_random(data, MAX_LENGTH, 100 * t.number + t.count);
    gd_append one = make_append(kind, offset, length, data);
    CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_OK);
    gd_journal_accept(t.journal, &one);
    t.records[t.count++] = one.record;
    t.at[t.count] = t.journal->end;
}

static void
sync_it(void)
{
    CHECK_INT(gd_journal_sync(t.journal, &t.x.err), GD_OK);
    t.journal->durable = t.journal->end;
}

/* Appends some records of each kind; with a sync behind the fourth, if
 * requested. */
static void
append_some(bool with_sync)
{
    append(GD_RECORD_BYTES, 0, 1);
    append(GD_RECORD_BYTES, 512, 600);
    append(GD_RECORD_ZEROS, 0, SIZE);
    append(GD_RECORD_MARK, 3, 77);
    if (with_sync) {
        sync_it();
    }
    append(GD_RECORD_BYTES, SIZE - 1600, 1600);
    append(GD_RECORD_STORED, 0, 0);
    append(GD_RECORD_BYTES, 4096, 1029);
}

/* ---- scanning ---- */

typedef struct found {
    size_t count;
    bool good;
} found;

static gd_status
note(void *arg, const gd_record *record, uint64_t at, gd_error *err)
{
    found *f = arg;
    (void)err;
    const gd_record *wanted = &t.records[f->count];
    f->good = f->good && f->count < t.count && at == t.at[f->count] &&
              record->kind == wanted->kind &&
              record->offset == wanted->offset &&
              record->length == wanted->length &&
              record->sequence == f->count + 1;
    f->count++;
    return GD_OK;
}

/* Opens and scans the file; *count: the number of records found. */
static gd_status
scan(uint64_t before, size_t *count)
{
    gd_journal *journal;
    gd_volume_head head;
    gd_volume_mark *read_marks;
    found f = {.good = true};
    *count = 0;
    gd_status s = gd_journal_open(t.x.env, t.x.root, VOLUME, t.number,
                                  t.x.params.repository_id, &journal, &head,
                                  &read_marks, &t.x.err);
    if (s != GD_OK) {
        CHECK(read_marks == NULL);
        return s;
    }
    CHECK_INT(head.marks, 2);
    CHECK_INT(read_marks[1].edition, 9);
    t.x.env->release(t.x.env, read_marks);
    s = gd_journal_scan(journal, before, before, note, &f, &t.x.err);
    CHECK(f.good);
    if (s == GD_OK) {
        CHECK_INT(journal->end, t.at[f.count]);
        CHECK_INT(journal->sequence, f.count);
    }
    *count = f.count;
    gd_journal_close(journal);
    return s;
}

static void
check_scan(uint64_t before, gd_status status, size_t wanted)
{
    size_t count;
    gd_status s = scan(before, &count);
    if (!CHECK_INT(s, status) || !CHECK_INT(count, wanted)) {
        fprintf(stderr, "%s\n", s == GD_OK ? "" : t.x.err.text);
    }
    if (s == GD_CORRUPT) {
        CHECK_CONTAINS(t.x.err.text, "volumes/disk/journal-0000000");
    }
}

/* Returns the number of records that end at or before an offset. */
static size_t
records_before(uint64_t offset)
{
    size_t n = 0;
    while (n < t.count && t.at[n + 1] <= offset) {
        n++;
    }
    return n;
}

/* ---- tests ---- */

TEST_WITH(test_found_again, setup(), teardown())
{
    check_scan(0, GD_OK, 0);
    append_some(true);
    check_scan(0, GD_OK, 7);
    check_scan(t.at[7], GD_OK, 7);
    check_scan(t.at[4], GD_OK, 4);
    check_scan(t.at[0], GD_OK, 0);
    CHECK_INT(t.journal->records, 5);
}

TEST_WITH(test_batches, setup(), teardown())
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
        gd_journal_accept(t.journal, &batch[i]);
        t.records[t.count++] = batch[i].record;
        t.at[t.count] = t.journal->end;
    }
    append(GD_RECORD_BYTES, 0, 1);
    check_scan(0, GD_OK, GD_JOURNAL_BATCH + 1);
}

/* A head that is cut off, or of another file, is refused. */
TEST(test_head_is_checked)
{
    size_t count;
    uint8_t other[GD_ID_SIZE] = {9};
    gd_journal *journal;
    gd_volume_head head;
    gd_volume_mark *read_marks;
    setup();
    append_some(true);
    CHECK_INT(gd_journal_open(t.x.env, t.x.root, VOLUME, 3, other, &journal,
                              &head, &read_marks, &t.x.err), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "another repository");
    CHECK(renameat(t.x.root, JOURNAL, t.x.root,
                   "volumes/disk/journal-00000004") == 0);
    CHECK_INT(gd_journal_open(t.x.env, t.x.root, VOLUME, 4,
                              t.x.params.repository_id, &journal, &head,
                              &read_marks, &t.x.err), GD_CORRUPT);
    CHECK(renameat(t.x.root, "volumes/disk/journal-00000004", t.x.root,
                   JOURNAL) == 0);
    scratch_flip(&t.x, JOURNAL, 4096, 1); /* a mark */
    CHECK_INT(scan(0, &count), GD_CORRUPT);
    scratch_flip(&t.x, JOURNAL, 4096, 1);
    for (uint64_t length = 8191; length > 0; length /= 2) {
        scratch_truncate(&t.x, JOURNAL, length);
        CHECK_INT(scan(0, &count), GD_CORRUPT);
        CHECK_CONTAINS(t.x.err.text, JOURNAL);
    }
    scratch_truncate(&t.x, JOURNAL, 0);
    CHECK_INT(scan(0, &count), GD_CORRUPT);
    teardown();
}

/* The file ends anywhere: the whole records in front of that are found. */
TEST_WITH(test_cut_off, setup(), teardown())
{
    append_some(false);
    uint64_t end = t.journal->end;
    for (uint64_t length = end; length >= t.at[0];
         length -= length > t.at[6] ? 1 : 8) {
        scratch_truncate(&t.x, JOURNAL, length);
        size_t whole = records_before(length);
        check_scan(0, GD_OK, whole);
        check_scan(t.at[whole], GD_OK, whole);
        if (length < end) {
            check_scan(end, GD_CORRUPT, whole);
        }
    }
}

/* A crash leaves some sectors as they were before the write: zeros. */
TEST_WITH(test_torn, setup(), teardown())
{
    static const uint8_t nothing[512];
    uint8_t sector[512];
    append_some(false);
    for (uint64_t at = t.at[0]; at < t.journal->end; at += 512) {
        size_t length = t.journal->end - at < 512
                            ? (size_t)(t.journal->end - at)
                            : 512;
        size_t whole = records_before(at);
        scratch_read(&t.x, JOURNAL, sector, length, at);
        scratch_write(&t.x, JOURNAL, nothing, length, at);
        check_scan(0, GD_OK, whole);
        check_scan(t.journal->end, GD_CORRUPT, whole);
        scratch_write(&t.x, JOURNAL, sector, length, at);
    }
    check_scan(0, GD_OK, t.count);
}

/* Each damaged byte, but for padding, ends the records if no later record
 * proves that they were durable. */
TEST_WITH(test_last_record_damaged, setup(), teardown())
{
    append_some(false);
    uint64_t end = t.at[6] + GD_RECORD_HEAD + 1029;
    for (uint64_t at = t.at[6]; at < t.journal->end; at++) {
        scratch_flip(&t.x, JOURNAL, at, 0x10);
        check_scan(0, GD_OK, at < end ? 6 : 7);
        scratch_flip(&t.x, JOURNAL, at, 0x10);
    }
}

/* V5: the loss of a synced record is reported. */
TEST_WITH(test_durable_record_damaged, setup(), teardown())
{
    append_some(true); /* 5, 6 and 7 prove that 1 to 4 are durable */
    for (size_t i = 0; i < t.count; i++) {
        scratch_flip(&t.x, JOURNAL, t.at[i] + 30, 1);
        check_scan(0, i < 4 ? GD_CORRUPT : GD_OK, i);
        check_scan(t.at[7], GD_CORRUPT, i);
        check_scan(t.at[i], GD_OK, i); /* it is behind the length */
        scratch_flip(&t.x, JOURNAL, t.at[i] + 30, 1);
    }
    /* One proof is sufficient. */
    scratch_flip(&t.x, JOURNAL, t.at[3] + 30, 1);
    scratch_flip(&t.x, JOURNAL, t.at[4] + 30, 1);
    scratch_flip(&t.x, JOURNAL, t.at[5] + 30, 1);
    check_scan(0, GD_CORRUPT, 3);
    scratch_flip(&t.x, JOURNAL, t.at[6] + 30, 1);
    check_scan(0, GD_OK, 3); /* there is no proof */
}

/* The proof may be far behind, across the window of a scan. */
TEST_WITH(test_proof_far_behind, setup(), teardown())
{
    static uint8_t data[GD_RECORD_DATA];
    append(GD_RECORD_BYTES, 0, 100);
    append(GD_RECORD_BYTES, 0, 100);
    uint64_t durable = t.journal->end;
    for (int i = 0; i < 40; i++) {
        gd_append one = make_append(GD_RECORD_BYTES, 0, sizeof data - 8, data);
        t.journal->durable = i == 39 ? durable : t.at[0];
        CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_OK);
        gd_journal_accept(t.journal, &one);
        t.records[t.count++] = one.record;
        t.at[t.count] = t.journal->end;
    }
    check_scan(0, GD_OK, 42);
    scratch_flip(&t.x, JOURNAL, t.at[1], 1);
    check_scan(0, GD_CORRUPT, 1);
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
TEST_WITH(test_not_the_next_record, setup(), teardown())
{
    static const uint8_t nothing[GD_RECORD_HEAD];
    append_some(true);
    uint64_t end = t.journal->end, seed = t.journal->seed;
    gd_record next = {.kind = GD_RECORD_ZEROS,
                      .sequence = 8,
                      .length = 1,
                      .durable = t.at[4]};
    put_record(next, seed + 1, end); /* of another journal */
    check_scan(0, GD_OK, 7);
    next.sequence = 9; /* out of sequence */
    put_record(next, seed, end);
    check_scan(0, GD_OK, 7);
    next.sequence = 7;
    put_record(next, seed, end);
    check_scan(0, GD_OK, 7);
    next.sequence = 8;
    next.length = SIZE + 1; /* beyond the size */
    put_record(next, seed, end);
    check_scan(0, GD_OK, 7);
    next.length = 1;
    next.durable = end + 1; /* impossible value */
    put_record(next, seed, end);
    check_scan(0, GD_OK, 7);
    next.durable = end;
    put_record(next, seed, end);
    t.records[7] = next;
    t.count = 8;
    t.at[8] = end + GD_RECORD_HEAD;
    check_scan(0, GD_OK, 8);
    t.count = 7;
    /* A later record with an impossible durable offset proves nothing. */
    scratch_write(&t.x, JOURNAL, nothing, sizeof nothing, end);
    next.durable = end + 81;
    put_record(next, seed, end + 80);
    check_scan(0, GD_OK, 7);
    next.durable = end + 80;
    put_record(next, seed, end + 80);
    check_scan(0, GD_CORRUPT, 7);
    put_record(next, seed + 1, end + 80);
    check_scan(0, GD_OK, 7);
}

TEST_WITH(test_garbage_behind, setup(), teardown())
{
    static uint8_t garbage[200000];
    append_some(true);
    fill_random(garbage, sizeof garbage, 5);
    for (size_t i = 0; i + 4 < sizeof garbage; i += 64) {
        memcpy(garbage + i, "GDVR", 4);
    }
    for (size_t skew = 0; skew < 16; skew += 3) {
        scratch_write(&t.x, JOURNAL, garbage, sizeof garbage,
                      t.journal->end + skew);
        check_scan(0, GD_OK, 7);
        check_scan(t.at[7], GD_OK, 7);
    }
}

/* A guest writes bytes like records, at every alignment; it does not know the
 * seed. */
TEST_WITH(test_guest_forges_records, setup(), teardown())
{
    append(GD_RECORD_BYTES, 0, 100);
    sync_it();
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
    CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_OK);
    gd_journal_accept(t.journal, &one);
    t.records[t.count++] = one.record;
    t.at[t.count] = t.journal->end;
    check_scan(0, GD_OK, 2);
    scratch_flip(&t.x, JOURNAL, base, 1); /* its own head is torn */
    check_scan(0, GD_OK, 1);
}

/* ---- appends that fail ---- */

/* The bytes of a failed append must not be found behind a later one. */
TEST(test_failed_append_is_gone)
{
    uint8_t *data = t.data[MAX_COUNT - 1];
    for (unsigned nth = 2; nth <= 4; nth++) {
        gd_append batch[3];
        setup();
        append(GD_RECORD_BYTES, 0, 100);
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
        append(GD_RECORD_BYTES, 512, 512);
        sync_it();
        check_scan(0, GD_OK, 2);
        append(GD_RECORD_BYTES, 0, 100);
        check_scan(0, GD_OK, 3);
        teardown();
    }
}

/* If the bytes cannot be removed, no record is appended. */
TEST_WITH(test_failed_append_cannot_be_removed, setup(), teardown())
{
    uint8_t *data = t.data[MAX_COUNT - 1];
    gd_append one = make_append(GD_RECORD_BYTES, 0, 512, data);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 1, EIO, false);
    fault_env_fail(&t.x.f, FAULT_FTRUNCATE, 1, EIO, false);
    CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_IO);
    CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_IO);
    CHECK_CONTAINS(t.x.err.text, JOURNAL);
    append(GD_RECORD_BYTES, 0, 100);
    check_scan(0, GD_OK, 1);
}

/* ---- zeros ahead ---- */

static uint64_t
file_size(void)
{
    return (uint64_t)scratch_size(&t.x, JOURNAL);
}

/* Records overwrite them, and the file does not get longer; when they are used
 * up, as many are written again as the journal has bytes, within bounds. */
TEST_WITH(test_zeros_ahead, setup(), teardown())
{
    static uint8_t data[GD_RECORD_DATA];
    append_some(true);
    uint64_t end = t.journal->end, size = end + 65536;
    gd_journal_write_ahead(t.journal);
    CHECK_INT(file_size(), size);
    CHECK_INT(t.journal->end, end);
    CHECK_INT(gd_journal_wants_ahead(t.journal), 0);
    gd_journal_write_ahead(t.journal); /* there are some */
    CHECK_INT(file_size(), size);
    check_scan(0, GD_OK, 7);
    check_scan(end, GD_OK, 7);
    for (int i = 0; i < 4; i++) {
        append(GD_RECORD_BYTES, 0, MAX_LENGTH);
        sync_it();
        check_scan(0, GD_OK, t.count);
    }
    CHECK_INT(file_size(), size);
    for (int i = 0; i < 40; i++) {
        gd_append one = make_append(GD_RECORD_BYTES, 0, sizeof data, data);
        CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_OK);
        gd_journal_accept(t.journal, &one);
        t.records[t.count++] = one.record;
        t.at[t.count] = t.journal->end;
        uint64_t wanted = gd_journal_wants_ahead(t.journal);
        CHECK(i > 0 || wanted > 65536);
        CHECK(i > 0 || wanted >= t.journal->end - t.journal->durable);
        CHECK(wanted <= 1 << 20 && wanted <= t.journal->end);
        gd_journal_write_ahead(t.journal);
        CHECK(file_size() >= t.journal->end);
        sync_it();
    }
    CHECK_INT(file_size() - t.journal->end,
              t.journal->ahead - t.journal->end);
    check_scan(0, GD_OK, t.count);
}

/* A sync that is larger than the zeros would be has none: the next one of this
 * size would need new ones. */
TEST_WITH(test_no_zeros_for_large_syncs, setup(), teardown())
{
    static uint8_t data[GD_RECORD_DATA];
    append(GD_RECORD_BYTES, 0, 100);
    sync_it();
    for (unsigned i = 0; i < 40; i++) {
        gd_append one = make_append(GD_RECORD_BYTES, 0, sizeof data, data);
        CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_OK);
        gd_journal_accept(t.journal, &one);
        bool small = t.journal->end - t.journal->durable <= 1 << 20;
        CHECK((gd_journal_wants_ahead(t.journal) > 0) == small);
    }
    sync_it();
    CHECK_INT(gd_journal_wants_ahead(t.journal), 1 << 20);
}

/* A crash leaves zeros where sectors of records were not written, or the file
 * as it was before the zeros. */
TEST_WITH(test_torn_over_zeros, setup(), teardown())
{
    static const uint8_t nothing[512];
    uint8_t sector[512];
    append(GD_RECORD_BYTES, 0, 100);
    gd_journal_write_ahead(t.journal);
    sync_it();
    uint64_t end = t.journal->end;
    append_some(false);
    for (uint64_t at = end; at < t.journal->end; at += 512) {
        scratch_read(&t.x, JOURNAL, sector, 512, at);
        scratch_write(&t.x, JOURNAL, nothing, 512, at);
        check_scan(0, GD_OK, records_before(at));
        check_scan(t.journal->end, GD_CORRUPT, records_before(at));
        scratch_write(&t.x, JOURNAL, sector, 512, at);
    }
    check_scan(0, GD_OK, t.count);
    /* V5: the first record was durable. */
    scratch_flip(&t.x, JOURNAL, t.at[0], 1);
    check_scan(0, GD_CORRUPT, 0);
}

/* The bytes of a failed append are not overwritten with zeros, but cut off,
 * with the zeros behind them; then there are new zeros. */
TEST_WITH(test_failed_append_over_zeros, setup(), teardown())
{
    append(GD_RECORD_BYTES, 0, 100);
    gd_journal_write_ahead(t.journal);
    gd_append batch[3];
    uint8_t *data = t.data[MAX_COUNT - 1];
    for (size_t i = 0; i < 3; i++) {
        batch[i] = make_append(GD_RECORD_BYTES, 512 * i, 512, data);
    }
    CHECK_INT(gd_journal_append(t.journal, batch, 3, &t.x.err), GD_OK);
    gd_journal_accept(t.journal, &batch[0]);
    t.records[t.count++] = batch[0].record;
    t.at[t.count] = t.journal->end;
    uint64_t size = file_size();
    CHECK_INT(gd_journal_wants_ahead(t.journal), 0);
    gd_journal_write_ahead(t.journal);
    CHECK_INT(file_size(), size);
    append(GD_RECORD_BYTES, 512, 512); /* as long as the one that failed */
    CHECK_INT(file_size(), t.journal->end);
    check_scan(0, GD_OK, 3);
    CHECK(gd_journal_wants_ahead(t.journal) > 0);
    gd_journal_write_ahead(t.journal);
    CHECK(file_size() > t.journal->end);
    append(GD_RECORD_BYTES, 0, 100);
    check_scan(0, GD_OK, 4);
}

/* The journal needs no zeros. */
TEST(test_no_zeros_ahead)
{
    for (unsigned nth = 1; nth <= 2; nth++) {
        setup();
        append_some(true);
        fault_env_shorten(&t.x.f, 8192);
        fault_env_fail(&t.x.f, FAULT_PWRITEV, nth, ENOSPC, false);
        gd_journal_write_ahead(t.journal);
        fault_env_heal(&t.x.f);
        CHECK(gd_journal_wants_ahead(t.journal) > 0);
        check_scan(0, GD_OK, 7);
        append(GD_RECORD_BYTES, 0, 2000);
        check_scan(0, GD_OK, 8);
        teardown();
    }
}

/* ---- recycling (V10) ---- */

#define RECYCLED "volumes/disk/journal-00000004"

/* The number of files without a journal's name. */
static unsigned
spares(void)
{
    return (unsigned)scratch_count(&t.x, "volumes/disk", "journal.new", NULL);
}

enum { OLD_ROOM = 1 << 16 };

static uint8_t old_file[OLD_ROOM];

/* The journal with the next number, written over the file of this one, of which
 * nothing is known any more. */
static gd_status
recycle(bool *named)
{
    gd_journal *spare = t.journal;
    memset(old_file, 0, sizeof old_file);
    scratch_read(&t.x, JOURNAL, old_file, (size_t)file_size(), 0);
    t.journal = NULL;
    if (!gd_journal_retire(spare, VOLUME)) {
        gd_journal_close(spare);
        *named = false;
        return GD_IO;
    }
    t.number = ++t.head.journal;
    t.head.needed = t.head.journal;
    t.count = 0;
    return gd_journal_create(t.x.env, t.x.root, VOLUME, &t.head, marks, spare,
                             &t.journal, named, &t.x.err);
}

static void
setup_recycled(void)
{
    bool named;
    setup();
    append_some(true);
    append_some(true);
    sync_it();
    uint64_t end = t.journal->end, start = t.at[0];
    CHECK_INT(recycle(&named), GD_OK);
    CHECK(named);
    CHECK_INT(t.journal->end, start);
    CHECK_INT(t.journal->durable, start);
    CHECK_INT(t.journal->ahead, end);
    CHECK_INT(scratch_size(&t.x, RECYCLED), (int64_t)end);
    CHECK(!scratch_exists(&t.x, JOURNAL) && spares() == 0);
}

/* Wherever the new records end, none of the old ones is found behind them: they
 * have the same places, sequences and lengths. */
TEST_WITH(test_old_records_are_not_found, setup_recycled(), teardown())
{
    check_scan(0, GD_OK, 0);
    append_some(true);
    for (size_t i = 0; i <= 7; i++) {
        check_scan(t.at[i], GD_OK, i);
    }
    check_scan(0, GD_OK, 7);
    append(GD_RECORD_BYTES, 0, 1); /* the same place as that of an old one */
    check_scan(0, GD_OK, 8);
    append(GD_RECORD_BYTES, 0, 1999); /* and another one */
    check_scan(0, GD_OK, 9);
    CHECK_INT(gd_journal_wants_ahead(t.journal), 0);
}

/* An old record proves nothing durable (V5). */
TEST_WITH(test_old_records_are_no_proof, setup_recycled(), teardown())
{
    append(GD_RECORD_BYTES, 0, 1);
    scratch_flip(&t.x, RECYCLED, t.at[0], 1);
    check_scan(0, GD_OK, 0);
}

/* A crash leaves sectors as they were in the journal before. */
TEST_WITH(test_torn_over_old_records, setup_recycled(), teardown())
{
    uint8_t sector[512];
    append_some(false);
    for (uint64_t at = t.at[0]; at < t.journal->end; at += 512) {
        size_t length = t.journal->end - at < 512
                            ? (size_t)(t.journal->end - at)
                            : 512;
        size_t whole = records_before(at);
        scratch_read(&t.x, RECYCLED, sector, length, at);
        scratch_write(&t.x, RECYCLED, old_file + at, length, at);
        check_scan(0, GD_OK, whole);
        check_scan(t.journal->end, GD_CORRUPT, whole);
        scratch_write(&t.x, RECYCLED, sector, length, at);
    }
    check_scan(0, GD_OK, t.count);
}

/* A crash leaves the head of a record, and the bytes of the old one. */
TEST_WITH(test_head_over_old_bytes, setup_recycled(), teardown())
{
    append(GD_RECORD_BYTES, 0, 1);
    append(GD_RECORD_BYTES, 512, 600);
    uint64_t bytes = t.at[1] + GD_RECORD_HEAD;
    uint8_t now[600];
    scratch_read(&t.x, RECYCLED, now, sizeof now, bytes);
    for (size_t i = 0; i < sizeof now; i++) {
        old_file[bytes + i] ^= 1;
    }
    scratch_write(&t.x, RECYCLED, old_file + bytes, sizeof now, bytes);
    check_scan(0, GD_OK, 1);
    scratch_write(&t.x, RECYCLED, now, sizeof now, bytes);
    check_scan(0, GD_OK, 2);
}

/* The name goes before the head is written, and comes when it is durable. */
TEST_WITH(test_order_of_recycling, setup(), teardown())
{
    bool named;
    append_some(true);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(recycle(&named), GD_OK);
    scratch_check_trace(&t.x, "renameat pwritev fdatasync linkat unlinkat "
                        "fsync");
    check_scan(0, GD_OK, 0);
}

/* An owner that was cut off makes its next journal while the next owner does: the
 * name leads to the next owner's file. */
TEST_WITH(test_two_owners_make_a_journal, setup(), teardown())
{
    bool named;
    gd_journal *mine, *other, *found_one;
    gd_volume_mark *read_marks;
    gd_volume_head head, other_head = t.head;
    other_head.journal = ++t.head.journal;
    CHECK_INT(gd_journal_begin(t.x.env, t.x.root, VOLUME, &t.head, marks,
                               NULL, &mine, &t.x.err), GD_OK);
    CHECK_INT(gd_journal_begin(t.x.env, t.x.root, VOLUME, &other_head, marks,
                               NULL, &other, &t.x.err), GD_OK);
    CHECK_INT(gd_journal_publish(mine, VOLUME, &named, &t.x.err), GD_OK);
    CHECK_INT(gd_journal_publish(other, VOLUME, &named, &t.x.err), GD_BUSY);
    CHECK(!named);
    CHECK_INT(gd_journal_open(t.x.env, t.x.root, VOLUME, 4,
                              t.x.params.repository_id, &found_one, &head,
                              &read_marks, &t.x.err), GD_OK);
    CHECK(head.seed == t.head.seed);
    t.x.env->release(t.x.env, read_marks);
    gd_journal_close(found_one);
    gd_journal_close(mine);
    CHECK_INT(spares(), 0);
}

/* A journal that cannot be begun leaves no file, and no spare. */
TEST_WITH(test_failed_begin_removes_the_spare, setup(), teardown())
{
    gd_journal *made, *spare = t.journal;
    t.journal = NULL;
    CHECK(gd_journal_retire(spare, VOLUME));
    CHECK_INT(spares(), 1);
    t.head.journal = 0;
    CHECK_INT(gd_journal_begin(t.x.env, t.x.root, VOLUME, &t.head, marks,
                               spare, &made, &t.x.err), GD_INVALID);
    CHECK_INT(spares(), 0);
}

/* Whatever fails, there is a whole journal or none, and no spare is left
 * open. */
TEST(test_recycling_under_faults)
{
    bool named;
    for (uint64_t nth = 1, done = 0; done == 0; nth++) {
        setup();
        append_some(true);
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
        CHECK(named || !scratch_exists(&t.x, RECYCLED));
        if (named) {
            check_scan(0, GD_OK, 0);
        }
        if (s != GD_OK) {
            t.journal = NULL;
            CHECK_INT(spares(), 0);
        }
        teardown();
    }
}

static int (*real_renameat)(const gd_env *env, int dir, const char *from,
                            const char *to);

static int
rename_and_fail(const gd_env *env, int dir, const char *from, const char *to)
{
    CHECK_INT(real_renameat(env, dir, from, to), 0);
    return -EIO;
}

/* A rename can succeed and report an error. */
TEST_WITH(test_renamed_with_an_error, setup(), teardown())
{
    real_renameat = t.x.f.env.renameat;
    t.x.f.env.renameat = rename_and_fail;
    CHECK(!gd_journal_retire(t.journal, VOLUME));
    CHECK_INT(spares(), 0);
}

/* A file is kept up to a size. */
TEST_WITH(test_long_file_is_cut, setup(), teardown())
{
    bool named;
    t.journal->ahead = GD_JOURNAL_MAX_SPARE + 4096;
    scratch_truncate(&t.x, JOURNAL, t.journal->ahead);
    gd_journal *spare = t.journal;
    CHECK(gd_journal_retire(spare, VOLUME));
    CHECK_INT(scratch_size(&t.x, spare->new_name), GD_JOURNAL_MAX_SPARE);
    t.number = ++t.head.journal;
    CHECK_INT(gd_journal_create(t.x.env, t.x.root, VOLUME, &t.head, marks,
                                spare, &t.journal, &named, &t.x.err), GD_OK);
    append(GD_RECORD_BYTES, 0, 100);
    gd_journal_trim(t.journal);
    CHECK_INT(scratch_size(&t.x, RECYCLED), (int64_t)t.journal->end);
    check_scan(0, GD_OK, 1);
    append(GD_RECORD_BYTES, 0, 100);
    check_scan(0, GD_OK, 2);
}

/* A trim does not forget the records of a failed append. */
TEST_WITH(test_trim_behind_a_failed_append, setup(), teardown())
{
    gd_append one = make_append(GD_RECORD_BYTES, 0, 512, t.data[60]);
    append(GD_RECORD_BYTES, 0, 100);
    CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_OK);
    gd_journal_trim(t.journal);
    append(GD_RECORD_BYTES, 0, 400);
    append(GD_RECORD_BYTES, 0, 100);
    check_scan(0, GD_OK, 3);
}

TEST_WITH(test_spare_is_removed, setup(), teardown())
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

/* ---- copying the tail (V4) ---- */

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
    gd_volume_head head;
    gd_volume_mark *read_marks;
    gd_status s = gd_journal_open(t.x.env, t.x.root, VOLUME, 3,
                                  t.x.params.repository_id, journal, &head,
                                  &read_marks, &t.x.err);
    t.x.env->release(t.x.env, read_marks);
    found f = {.good = true};
    return s == GD_OK
               ? gd_journal_scan(*journal, 0, 0, note, &f, &t.x.err)
               : s;
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
    gd_volume_head head = t.head;
    head.journal++;
    CHECK_INT(gd_journal_begin(t.x.env, t.x.root, VOLUME, &head, marks, NULL,
                               &made, &t.x.err), GD_OK);
    CHECK(!scratch_exists(&t.x, RECYCLED));
    visited = 0;
    gd_status s = gd_journal_tail_copy(&tail, made, note_copy, &t, &t.x.err);
    gd_journal_close(found_one);
    if (s != GD_OK) {
        gd_journal_abandon(made);
        CHECK_INT(spares(), 0);
        return s;
    }
    CHECK_INT(gd_journal_publish(made, VOLUME, &named, &t.x.err), GD_OK);
    CHECK_INT(made->durable, made->end);
    gd_journal_close(t.journal);
    t.journal = made;
    t.number = head.journal;
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
        setup();
        append_some(true);
        CHECK_INT(copy_from(t.at[first]), GD_OK);
        forget(first);
        CHECK_INT(visited, t.count);
        CHECK_INT(t.journal->end, t.at[t.count]);
        check_scan(0, GD_OK, t.count);
        append(GD_RECORD_BYTES, 0, 100);
        check_scan(0, GD_OK, t.count);
        teardown();
    }
}

/* A scan finds out up to where the records are proven to be durable. */
TEST_WITH(test_proven_end, setup(), teardown())
{
    gd_journal *journal;
    append_some(false);
    CHECK_INT(read_back(&journal), GD_OK);
    CHECK_INT(journal->durable, t.at[0]);
    gd_journal_close(journal);
    sync_it();
    uint64_t end = t.journal->end;
    append_some(false);
    CHECK_INT(read_back(&journal), GD_OK);
    CHECK_INT(journal->durable, end);
    gd_journal_close(journal);
}

/* The volume has become smaller: what the new journal could not have is not
 * copied, or it would be the end of its records. */
TEST_WITH(test_tail_beyond_the_size, setup(), teardown())
{
    append(GD_RECORD_BYTES, SIZE - 600, 600);
    append(GD_RECORD_BYTES, SIZE - 512, 100);
    append(GD_RECORD_ZEROS, SIZE - 1024, 1024);
    append(GD_RECORD_BYTES, 512, 100);
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
    append(GD_RECORD_BYTES, 0, 100);
    sync_it();
    append(GD_RECORD_BYTES, 0, 100);
    check_scan(0, GD_OK, 5);
}

/* A record that proves a place where no record begins proves nothing. */
TEST_WITH(test_proven_place_without_a_record, setup(), teardown())
{
    gd_journal *journal;
    append_some(false);
    t.journal->durable = t.at[4] + 8;
    append(GD_RECORD_BYTES, 0, 100);
    CHECK_INT(read_back(&journal), GD_OK);
    CHECK_INT(journal->durable, t.at[0]);
    gd_journal_close(journal);
    t.journal->durable = t.at[5];
    append(GD_RECORD_BYTES, 0, 100);
    CHECK_INT(read_back(&journal), GD_OK);
    CHECK_INT(journal->durable, t.at[5]);
    gd_journal_close(journal);
}

/* Longer than what is read at once, with records across its ends. */
TEST_WITH(test_long_tail_is_copied, setup(), teardown())
{
    static uint8_t data[GD_RECORD_DATA];
    fill_random(data, sizeof data, 3);
    for (int i = 0; i < 60; i++) {
        gd_append one = make_append(GD_RECORD_BYTES, (uint64_t)i,
                                    sizeof data - 9 * (uint64_t)i, data);
        CHECK_INT(gd_journal_append(t.journal, &one, 1, &t.x.err), GD_OK);
        gd_journal_accept(t.journal, &one);
        t.records[t.count++] = one.record;
        t.at[t.count] = t.journal->end;
    }
    CHECK_INT(copy_from(t.at[1]), GD_OK);
    forget(1);
    check_scan(0, GD_OK, 59);
}

/* A place where no record begins, a record that has changed, and a visitor that
 * fails. */
TEST_WITH(test_bad_tails, setup(), teardown())
{
    append_some(true);
    CHECK_INT(copy_from(t.at[1] + 8), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, JOURNAL);
    CHECK_INT(copy_from(t.at[7] - 8), GD_CORRUPT);
    append(GD_RECORD_BYTES, 4096, 77);
    CHECK_INT(copy_from(t.at[0]), GD_IO);
}

/* ---- making one ---- */

/* Whatever fails, there is a whole journal or none. */
TEST(test_create_under_faults)
{
    gd_journal *other;
    bool named;
    for (uint64_t nth = 1, done = 0; done == 0; nth++) {
        setup();
        t.head.journal = 4;
        fault_env_fail(&t.x.f, FAULT_ANY, nth, EIO, false);
        gd_status s = gd_journal_create(
            t.x.env, t.x.root, VOLUME, &t.head,
            (gd_volume_mark[]){{0, 1}, {7, 9}}, NULL, &other, &named,
            &t.x.err);
        done = fault_env_faults(&t.x.f) == 0;
        fault_env_heal(&t.x.f);
        CHECK(s == GD_OK || !done);
        bool there = scratch_exists(&t.x, "volumes/disk/journal-00000004");
        CHECK(named || !there);
        if (s == GD_OK) {
            CHECK(there && named);
            gd_journal_close(other);
        }
        teardown();
    }
}

/* V2: a name when the head is durable, and a durable name before records. */
TEST_WITH(test_order_of_creating, setup(), teardown())
{
    gd_journal *other;
    bool named;
    t.head.journal = 4;
    t.head.marks = 0;
    fault_env_start_trace(&t.x.f);
    CHECK_INT(gd_journal_create(t.x.env, t.x.root, VOLUME, &t.head, NULL,
                                NULL, &other, &named, &t.x.err), GD_OK);
    scratch_check_trace(&t.x, "pwritev fdatasync linkat unlinkat "
                        "fsync");
    gd_journal_close(other);
}

/* An owner that was cut off does not replace the next owner's journal (V1). */
TEST_WITH(test_another_owner_has_made_it, setup(), teardown())
{
    gd_journal *mine, *other;
    bool named;
    struct stat before, after;
    t.head.journal = 4;
    t.head.marks = 0;
    CHECK_INT(gd_journal_create(t.x.env, t.x.root, VOLUME, &t.head, NULL,
                                NULL, &mine, &named, &t.x.err), GD_OK);
    CHECK_INT(fstatat(t.x.root, mine->name, &before, 0), 0);
    CHECK_INT(gd_journal_create(t.x.env, t.x.root, VOLUME, &t.head, NULL,
                                NULL, &other, &named, &t.x.err), GD_BUSY);
    CHECK(!named);
    CHECK_CONTAINS(t.x.err.text, "this one was cut off");
    CHECK_INT(fstatat(t.x.root, mine->name, &after, 0), 0);
    CHECK(before.st_ino == after.st_ino);
    gd_journal_close(mine);
}

/* By this lock a file system can report lost locks to the owner as errors. */
TEST_WITH(test_holds_a_lock, setup(), teardown())
{
    gd_journal *made;
    bool named;
    const gd_env *env = gd_env_posix();
    t.head.journal = 4;
    t.head.marks = 0;
    CHECK_INT(gd_journal_create(t.x.env, t.x.root, VOLUME, &t.head, NULL,
                                NULL, &made, &named, &t.x.err), GD_OK);
    int raw = openat(t.x.root, made->name, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->is_locked(env, raw, 0), 1);
    gd_journal_close(made);
    CHECK_INT(env->is_locked(env, raw, 0), 0);
    close(raw);
}

TEST_WITH(test_last_number, setup(), teardown())
{
    gd_journal *other;
    bool named;
    t.head.journal = 0; /* one more than the last */
    t.head.marks = 0;
    CHECK(gd_journal_create(t.x.env, t.x.root, VOLUME, &t.head, NULL, NULL,
                            &other, &named, &t.x.err) != GD_OK);
    CHECK(!named);
    CHECK_INT(scratch_count(&t.x, "volumes/disk", "", NULL), 1);
}
