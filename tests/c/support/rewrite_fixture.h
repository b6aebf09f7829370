/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rewrite_fixture.h - a repository whose groups are rewritten: group 1 is full,
 * group 2 is half full.
 */
#ifndef REWRITE_FIXTURE_H
#define REWRITE_FIXTURE_H

#include "engine/maintenance/grouprewrite.h"
#include "tests/c/support/scratch_repository.h"

enum {
    BLOCK = 4096,
    SLOTS = 64,
    PER_SEGMENT = 16,
    LENGTH = SLOTS * BLOCK,
    WHOLE = GD_SEGMENT_HEADER + PER_SEGMENT * BLOCK,
};

#define GROUP_1 "groups/00000001"
#define ORDER "fsync pwritev fallocate pwritev fsync renameat fsync"

typedef struct rewrite_fixture {
    scratch x;
    gd_repo *repo;
    uint8_t *one, *two; /* images: group 1, full; group 2, half full */
    gd_leased_group *leased;
    gd_owned_group *owned; /* if set, only it is closed */
} rewrite_fixture;

gd_status rewrite_put(rewrite_fixture *t, const char *image_id,
                      const uint8_t *data, size_t length);

bool rewrite_is_image(rewrite_fixture *t, const char *image_id,
                      const uint8_t *data, size_t length);

/* texts: blocks that compress. */
void rewrite_setup(rewrite_fixture *t, bool texts);

void rewrite_teardown(rewrite_fixture *t);

void own_group(rewrite_fixture *t, uint32_t number);

void free_group_slots(rewrite_fixture *t, uint32_t first, uint32_t count);

gd_status rewrite_group(rewrite_fixture *t, uint64_t *bytes);

void require_rewritten(rewrite_fixture *t);

/* Reads the group's file, checks it, and returns the number of live blocks. */
unsigned check_group_file(rewrite_fixture *t, uint32_t number,
                          gd_published *record, gd_entry entries[SLOTS]);

bool is_spool_clean(rewrite_fixture *t);

#endif
