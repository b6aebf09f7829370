/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal_fixture.c - see journal_fixture.h.
 */
#include "tests/c/support/journal_fixture.h"

#include "engine/base/coding.h"
#include "tests/c/support/transaction_fixture.h"

static const gd_volume_mark marks[] = {{0, 1}, {7, 9}};

void
journal_setup(journal_fixture *t)
{
    bool named;
    memset(t, 0, sizeof *t);
    scratch_init(&t->x);
    REQUIRE(mkdirat(t->x.root, "volumes/disk", 0700) == 0);
    t->head = (gd_volume_head){.journal = 3,
                              .needed = 3,
                              .size = SIZE,
                              .part_size = 65536,
                              .state = GD_VOLUME_READY,
                              .volume_id = {1},
                              .marks = 2};
    memcpy(t->head.repository_id, t->x.params.repository_id, GD_ID_SIZE);
    CHECK_INT(create_journal(t, NULL, &t->journal, &named), GD_OK);
    CHECK(named);
    CHECK_INT(spare_journals(t), 0);
    t->number = 3;
    t->at[0] = t->journal->end;
    CHECK_INT(t->at[0], 8192);
}

void
journal_teardown(journal_fixture *t)
{
    if (t->journal != NULL) {
        gd_journal_close(t->journal);
    }
    CHECK_INT(scratch_destroy(&t->x), 0);
}

gd_status
begin_journal(journal_fixture *t, gd_journal *spare, gd_journal **made)
{
    return gd_journal_begin(t->x.env, t->x.root, VOLUME, &t->head,
                            t->head.marks > 0 ? marks : NULL, spare, made,
                            &t->x.err);
}

gd_status
create_journal(journal_fixture *t, gd_journal *spare, gd_journal **made,
               bool *named)
{
    return gd_journal_create(t->x.env, t->x.root, VOLUME, &t->head,
                             t->head.marks > 0 ? marks : NULL, spare, made,
                             named, &t->x.err);
}

/* ---- appending ---- */

gd_append
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

void
accept_append(journal_fixture *t, const gd_append *one)
{
    gd_journal_accept(t->journal, one);
    t->records[t->count++] = one->record;
    t->at[t->count] = t->journal->end;
}

void
append_one(journal_fixture *t, gd_append *one)
{
    CHECK_INT(gd_journal_append(t->journal, one, 1, &t->x.err), GD_OK);
    accept_append(t, one);
}

void
append_record(journal_fixture *t, gd_record_kind kind, uint64_t offset,
              uint64_t length)
{
    uint8_t *data = t->data[t->count];
    fill_random(data, MAX_LENGTH, 100 * t->number + t->count);
    gd_append one = make_append(kind, offset, length, data);
    append_one(t, &one);
}

void
sync_records(journal_fixture *t)
{
    CHECK_INT(gd_journal_sync(t->journal, &t->x.err), GD_OK);
    t->journal->durable = t->journal->end;
}

void
append_records(journal_fixture *t, bool with_sync)
{
    append_record(t, GD_RECORD_BYTES, 0, 1);
    append_record(t, GD_RECORD_BYTES, 512, 600);
    append_record(t, GD_RECORD_ZEROS, 0, SIZE);
    append_record(t, GD_RECORD_MARK, 3, 77);
    if (with_sync) {
        sync_records(t);
    }
    append_record(t, GD_RECORD_BYTES, SIZE - 1600, 1600);
    append_record(t, GD_RECORD_STORED, 0, 0);
    append_record(t, GD_RECORD_BYTES, 4096, 1029);
}

/* ---- scanning ---- */

typedef struct found {
    const journal_fixture *t;
    size_t count;
    bool good;
} found;

static gd_status
note(void *arg, const gd_record *record, uint64_t at, GD_UNUSED gd_error *err)
{
    found *f = arg;
    const journal_fixture *t = f->t;
    const gd_record *wanted = &t->records[f->count];
    f->good = f->good && f->count < t->count && at == t->at[f->count] &&
              record->kind == wanted->kind &&
              record->offset == wanted->offset &&
              record->length == wanted->length &&
              record->sequence == f->count + 1;
    f->count++;
    return GD_OK;
}

gd_status
scan_journal(journal_fixture *t, uint64_t before, size_t *count,
             gd_journal **out)
{
    gd_journal *journal;
    gd_volume_head head;
    gd_volume_mark *found_marks;
    found f = {.t = t, .good = true};
    *count = 0;
    gd_status s = gd_journal_open(t->x.env, t->x.root, VOLUME, t->number,
                                  t->x.params.repository_id, &journal, &head,
                                  &found_marks, &t->x.err);
    if (s != GD_OK) {
        CHECK(found_marks == NULL);
        return s;
    }
    CHECK_INT(head.marks, 2);
    CHECK_INT(found_marks[1].edition, 9);
    t->x.env->release(t->x.env, found_marks);
    s = gd_journal_scan(journal, before, before, note, &f, &t->x.err);
    CHECK(f.good);
    if (s == GD_OK) {
        CHECK_INT(journal->end, t->at[f.count]);
        CHECK_INT(journal->sequence, f.count);
    }
    *count = f.count;
    if (s == GD_OK && out != NULL) {
        *out = journal;
    } else {
        gd_journal_close(journal);
    }
    return s;
}

void
check_scan(journal_fixture *t, uint64_t before, gd_status status,
           size_t wanted)
{
    size_t count;
    gd_status s = scan_journal(t, before, &count, NULL);
    if (!CHECK_INT(s, status) || !CHECK_INT(count, wanted)) {
        fprintf(stderr, "%s\n", s == GD_OK ? "" : t->x.err.text);
    }
    if (s == GD_CORRUPT) {
        CHECK_CONTAINS(t->x.err.text, "volumes/disk/journal-0000000");
    }
}

size_t
records_before(const journal_fixture *t, uint64_t offset)
{
    size_t n = 0;
    while (n < t->count && t->at[n + 1] <= offset) {
        n++;
    }
    return n;
}

void
check_torn(journal_fixture *t, const char *name, uint64_t from,
           const uint8_t *old)
{
    static const uint8_t nothing[512];
    uint8_t sector[512];
    for (uint64_t at = from; at < t->journal->end; at += sizeof sector) {
        size_t length = minimum(sizeof sector, t->journal->end - at);
        size_t whole = records_before(t, at);
        scratch_read(&t->x, name, sector, length, at);
        scratch_write(&t->x, name, old == NULL ? nothing : old + at, length,
                      at);
        check_scan(t, 0, GD_OK, whole);
        check_scan(t, t->journal->end, GD_CORRUPT, whole);
        scratch_write(&t->x, name, sector, length, at);
    }
    check_scan(t, 0, GD_OK, t->count);
}

unsigned
spare_journals(const journal_fixture *t)
{
    return scratch_count(&t->x, "volumes/disk", "journal.new", NULL);
}
