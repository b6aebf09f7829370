/* SPDX-License-Identifier: Apache-2.0 */
/*
 * appender_fixture.h - a repository for tests of appenders: groups of 64
 * slots, blocks of 512 bytes whose content follows from their address.
 */
#ifndef APPENDER_FIXTURE_H
#define APPENDER_FIXTURE_H

#include "engine/write/appender.h"
#include "tests/c/support/scratch_repository.h"

#define GROUP_1 "groups/00000001"
#define GROUP_2 "groups/00000002"

enum {
    APPENDER_BLOCK = 512,
    APPENDER_START = 8192, /* of the data in a group of 64 slots */
};

typedef struct appender_fixture {
    scratch x;
    gd_repo *repo;
} appender_fixture;

void appender_setup(appender_fixture *t);

void appender_teardown(appender_fixture *t);

/* Opens a handle as another process would, without any cache. */
void appender_other_handle(appender_fixture *t);

gd_appender *open_appender(appender_fixture *t);

uint32_t appender_number(const gd_appender *appender);

void close_appender(appender_fixture *t, gd_appender *appender);

void block_content(uint32_t group, uint32_t slot, uint8_t out[APPENDER_BLOCK]);

gd_fingerprint block_fingerprint(appender_fixture *t, const uint8_t *block);

/* Appends a segment of so many blocks, at most 8. */
gd_status append_segment(appender_fixture *t, gd_appender *appender,
                         uint32_t blocks);

gd_status sync_appender(appender_fixture *t, gd_appender *appender);

/* Stores so many segments of 5 blocks as a writer, with one sync point. */
uint32_t store_segments(appender_fixture *t, uint32_t segments);

typedef struct group_contents {
    gd_published published;
    gd_entry entries[64];
} group_contents;

group_contents read_group_contents(appender_fixture *t, uint32_t number);

/* Checks that slots [first, end) are live, with their own contents. */
void check_live_slots(appender_fixture *t, uint32_t number, uint32_t first,
                      uint32_t end);

void check_slot_states(appender_fixture *t, uint32_t number, uint32_t first,
                       uint32_t end, gd_entry_state wanted);

unsigned hints_for(appender_fixture *t, uint32_t number, uint32_t slot);

/* Spoils group 1; then neither this handle nor another may write into it. */
void check_left_alone(appender_fixture *t);

void check_poisoned(appender_fixture *t, uint32_t published);

#endif
