/* SPDX-License-Identifier: Apache-2.0 */
/*
 * appender_fixture.c - see appender_fixture.h.
 */
#include "tests/c/support/appender_fixture.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"

void
appender_setup(appender_fixture *t)
{
    scratch_init(&t->x);
    t->x.params.block_size = APPENDER_BLOCK;
    t->x.params.segment_size = 4096;
    t->repo = scratch_repo_filter(&t->x);
}

void
appender_teardown(appender_fixture *t)
{
    gd_repo_close(t->repo);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

void
appender_other_handle(appender_fixture *t)
{
    gd_repo_close(t->repo);
    t->repo = scratch_repo_filter(&t->x);
}

gd_appender *
open_appender(appender_fixture *t)
{
    gd_appender *appender = NULL;
    if (!CHECK_INT(gd_appender_open(t->repo, &gd_global_scope, NULL, &appender,
                                    &t->x.err), GD_OK)) {
        fprintf(stderr, "%s\n", t->x.err.text);
        exit(1);
    }
    return appender;
}

uint32_t
appender_number(const gd_appender *appender)
{
    return gd_appender_group(appender)->number;
}

void
close_appender(appender_fixture *t, gd_appender *appender)
{
    uint32_t number = appender_number(appender);
    gd_appender_close(appender);
    gd_locks_unlock_shared(t->repo->locks, number);
}

void
block_content(uint32_t group, uint32_t slot, uint8_t out[APPENDER_BLOCK])
{
    fill_random(out, APPENDER_BLOCK, (uint64_t)group << 32 | slot);
}

gd_fingerprint
block_fingerprint(appender_fixture *t, const uint8_t *block)
{
    gd_fingerprint fp;
    gd_hasher *hasher;
    CHECK_INT(gd_hasher_open(t->x.env, t->repo->digest, &hasher, NULL), GD_OK);
    CHECK_INT(gd_hasher_compute(hasher, &gd_global_scope, block,
                                APPENDER_BLOCK, &fp, NULL), GD_OK);
    gd_hasher_close(t->x.env, hasher);
    return fp;
}

gd_status
append_segment(appender_fixture *t, gd_appender *appender, uint32_t blocks)
{
    uint8_t plain[8 * APPENDER_BLOCK];
    uint32_t number = appender_number(appender), slot = 0;
    uint32_t length = blocks * APPENDER_BLOCK;
    gd_new_segment segment = {.header = {.blocks = blocks,
                                         .plain_length = length,
                                         .stored_length = length}};
    for (uint32_t i = 0; i < blocks; i++) {
        uint8_t *block = plain + i * APPENDER_BLOCK;
        uint32_t next = 64 - gd_appender_room(appender);
        block_content(number, next, block);
        gd_fingerprint fp = block_fingerprint(t, block);
        gd_status s = gd_appender_take_slot(
            appender, &fp, gd_checksum(block, APPENDER_BLOCK, 0),
            APPENDER_BLOCK, i * APPENDER_BLOCK, &slot, &t->x.err);
        if (s != GD_OK) {
            return s;
        }
        CHECK_INT(slot, next);
        segment.header.first_slot = slot - i;
    }
    /* The segment comes in two pieces. */
    struct iovec pieces[2] = {{plain, 100},
                              {plain + 100, blocks * APPENDER_BLOCK - 100}};
    segment.pieces = pieces;
    segment.piece_count = 2;
    gd_segment_header_encode(&segment.header,
                             gd_appender_group(appender)->bounds.seed, pieces,
                             2, segment.encoded);
    uint64_t written;
    gd_status s = gd_appender_append(appender, &segment, 1, &written,
                                     &t->x.err);
    CHECK(s != GD_OK || written == 32 + blocks * APPENDER_BLOCK);
    return s;
}

gd_status
sync_appender(appender_fixture *t, gd_appender *appender)
{
    return gd_appender_sync(appender, &t->x.err);
}

uint32_t
store_segments(appender_fixture *t, uint32_t segments)
{
    gd_appender *appender = open_appender(t);
    uint32_t number = appender_number(appender);
    for (uint32_t i = 0; i < segments; i++) {
        CHECK_INT(append_segment(t, appender, 5), GD_OK);
    }
    CHECK_INT(sync_appender(t, appender), GD_OK);
    close_appender(t, appender);
    return number;
}

group_contents
read_group_contents(appender_fixture *t, uint32_t number)
{
    group_contents c = {0};
    gd_group *group;
    if (CHECK_INT(gd_group_open(gd_env_posix(), t->x.root, &t->x.params,
                                number, O_RDONLY, &group, &t->x.err),
                  GD_OK)) {
        CHECK_INT(gd_group_read_published(group, &c.published, NULL), GD_OK);
        CHECK_INT(gd_group_read_entries(group, 0, 64, c.entries, NULL), GD_OK);
        gd_group_close(group);
    }
    return c;
}

void
check_live_slots(appender_fixture *t, uint32_t number, uint32_t first,
                 uint32_t end)
{
    static uint8_t in[GD_SEGMENT_HEADER + GD_SEGMENT_MAX];
    static uint8_t plain[GD_SEGMENT_MAX];
    const gd_env *env = gd_env_posix();
    group_contents c = read_group_contents(t, number);
    gd_coder *coder;
    gd_group *group;
    gd_segment_header header;
    REQUIRE(gd_coder_open(env, &coder, NULL) == GD_OK);
    REQUIRE(gd_group_open(env, t->x.root, &t->x.params, number, O_RDONLY,
                          &group, NULL) == GD_OK);
    for (uint32_t slot = first; slot < end; slot++) {
        const gd_entry *entry = &c.entries[slot];
        uint8_t wanted[APPENDER_BLOCK];
        block_content(number, slot, wanted);
        if (!CHECK_INT(entry->state, GD_ENTRY_LIVE) ||
            !CHECK_INT(gd_group_read_segment(group, entry, slot, coder, in,
                                             plain, &header, &t->x.err),
                       GD_OK) || !CHECK(memcmp(plain + entry->plain_offset,
                                               wanted, APPENDER_BLOCK) == 0)) {
            fprintf(stderr, "slot %u\n", slot);
        }
    }
    gd_group_close(group);
    gd_coder_close(env, coder);
}

void
check_slot_states(appender_fixture *t, uint32_t number, uint32_t first,
                  uint32_t end, gd_entry_state wanted)
{
    group_contents c = read_group_contents(t, number);
    for (uint32_t slot = first; slot < end; slot++) {
        if (!CHECK_INT(c.entries[slot].state, wanted)) {
            fprintf(stderr, "slot %u\n", slot);
        }
    }
}

unsigned
hints_for(appender_fixture *t, uint32_t number, uint32_t slot)
{
    uint8_t block[APPENDER_BLOCK];
    gd_address hints[GD_FILTER_CANDIDATES];
    block_content(number, slot, block);
    gd_fingerprint fp = block_fingerprint(t, block);
    size_t count = gd_filter_lookup(t->repo->filter, &fp, hints);
    unsigned found = 0;
    for (size_t i = 0; i < count; i++) {
        found += hints[i].group == number && hints[i].slot == slot;
    }
    return found;
}

/* Spoils group 1; then neither this handle nor another may write into it. */
void
check_left_alone(appender_fixture *t)
{
    int64_t size = scratch_size(&t->x, GROUP_1);
    uint8_t *before = malloc((size_t)size + 1);
    uint8_t *after = malloc((size_t)size + 1);
    scratch_read(&t->x, GROUP_1, before, (size_t)size, 0);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(store_segments(t, 1), 2);
        appender_other_handle(t);
    }
    CHECK_INT(scratch_size(&t->x, GROUP_1), size);
    scratch_read(&t->x, GROUP_1, after, (size_t)size, 0);
    CHECK(memcmp(before, after, (size_t)size) == 0);
    free(before);
    free(after);
}

void
check_poisoned(appender_fixture *t, uint32_t published)
{
    group_contents c = read_group_contents(t, 1);
    CHECK_INT(c.published.flags, GD_GROUP_POISONED);
    CHECK_INT(c.published.count, published);
}
