/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal_fixture.h - one journal, and the records that were appended to it.
 */
#ifndef JOURNAL_FIXTURE_H
#define JOURNAL_FIXTURE_H

#include "engine/volume/journal.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define VOLUME "disk"
#define JOURNAL "volumes/disk/journal-00000003"
#define NEXT_JOURNAL "volumes/disk/journal-00000004"

enum {
    SIZE = 1 << 20,
    MAX_COUNT = 64, /* records */
    MAX_LENGTH = 3000,
};

typedef struct journal_fixture {
    scratch x;
    gd_volume_head head;
    gd_journal *journal;
    uint32_t number; /* of the journal */
    /* The appended records, and their offsets. */
    gd_record records[MAX_COUNT];
    uint64_t at[MAX_COUNT + 1];
    size_t count;
    uint8_t data[MAX_COUNT][MAX_LENGTH];
} journal_fixture;

#define TEST_JOURNAL(name)                                                    \
    TEST_WITH(name, journal_setup(&t), journal_teardown(&t))

void journal_setup(journal_fixture *t);
void journal_teardown(journal_fixture *t);

/* Begin, and create, a journal that has the head t->head, with its marks. It is
 * written over the file of spare, unless spare is NULL. */
gd_status begin_journal(journal_fixture *t, gd_journal *spare,
                        gd_journal **made);
gd_status create_journal(journal_fixture *t, gd_journal *spare,
                         gd_journal **made, bool *named);

gd_append make_append(gd_record_kind kind, uint64_t offset, uint64_t length,
                      uint8_t *data);
/* Accepts a record that was appended. */
void accept_append(journal_fixture *t, const gd_append *one);
/* Appends a record, and accepts it. */
void append_one(journal_fixture *t, gd_append *one);
/* Does so with a record of new bytes, or of another kind. */
void append_record(journal_fixture *t, gd_record_kind kind, uint64_t offset,
                   uint64_t length);
/* Appends some records of each kind; with a sync behind the fourth, if
 * requested. */
void append_records(journal_fixture *t, bool with_sync);
void sync_records(journal_fixture *t);

/* Opens and scans the file; *count: the number of records found. The journal is
 * closed, unless this succeeds and out is not NULL. */
gd_status scan_journal(journal_fixture *t, uint64_t before, size_t *count,
                       gd_journal **out);
void check_scan(journal_fixture *t, uint64_t before, gd_status status,
                size_t wanted);
/* Returns the number of records that end at or before an offset. */
size_t records_before(const journal_fixture *t, uint64_t offset);
/* Gives each sector from an offset to the end in turn the bytes that the file
 * old had there, or zeros if old is NULL; and checks that the records before it
 * are found. */
void check_torn(journal_fixture *t, const char *name, uint64_t from,
                const uint8_t *old);
/* Returns the number of files without a journal's name. */
unsigned spare_journals(const journal_fixture *t);

#endif
