/* SPDX-License-Identifier: Apache-2.0 */
/*
 * owned_fixture.h - a repository with a group that only the maintainer uses:
 * group 1 is full, group 2 is half full.
 */
#ifndef OWNED_FIXTURE_H
#define OWNED_FIXTURE_H

#include "engine/maintenance/ownedgroup.h"
#include "tests/c/support/scratch_repository.h"

enum {
    BLOCK = 4096,
    SLOTS = 64,
    PER_SEGMENT = 16,
    LENGTH = SLOTS * BLOCK,
    STORED = PER_SEGMENT * BLOCK, /* noise does not compress */
    WHOLE = GD_SEGMENT_HEADER + STORED,
};

#define GROUP_1 "groups/00000001"
#define FREE_ORDER "fdatasync pwritev fdatasync pwritev fdatasync"

typedef struct owned_fixture {
    scratch x;
    gd_repo *repo;
    uint8_t *one, *two; /* images: group 1, full; group 2 */
    uint8_t *before;    /* group 1's file */
    size_t size;
    gd_owned_group *owned;
} owned_fixture;

void owned_setup(owned_fixture *t);

void owned_teardown(owned_fixture *t);

gd_status owned_enter(owned_fixture *t, uint32_t number);

gd_status free_slots(owned_fixture *t, uint32_t first, uint32_t count,
                     uint32_t *freed);

/* Does the same, and requires success. */
void require_freed(owned_fixture *t, uint32_t first, uint32_t count);

uint64_t owned_punch(owned_fixture *t);

void read_group(owned_fixture *t, gd_published *record, gd_entry *entries);

gd_published record_of(owned_fixture *t);

unsigned count_state(owned_fixture *t, gd_entry_state state);

uint64_t segment_offset(uint32_t number);

/* Returns true if the file's bytes are unchanged. */
bool is_untouched(owned_fixture *t, uint64_t from, uint64_t to);

bool is_image(owned_fixture *t, const char *image_id, const uint8_t *data,
              size_t length);

/* Writes a published record as a crash may leave it: of an older sync
 * point. */
void set_record(owned_fixture *t, uint32_t count, uint64_t end);

#endif
