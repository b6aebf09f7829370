/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_tailrecovery.c - a long tail, renewed on many threads: the result is
 * the same as on one. test_appender.c tests each kind of entry.
 */
#include "engine/write/tailrecovery.h"

#include "engine/base/pool.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define GROUP_1 "groups/00000001"

enum {
    BLOCK = 512,
    SLOTS = 1024,
    USED = 1000,
    SEGMENT = 32 + 8 * BLOCK, /* of eight blocks, with its header */
    SEGMENTS = USED / 8,
    THREADS = 3,
};

typedef struct fixture {
    scratch x;
    gd_repo *repo;
    gd_group *group;
    gd_entry entries[SLOTS];
} fixture;

/* Makes a group in which everything is a tail: an image, some of whose blocks
 * were spoiled, and some of whose entries are missing or spoiled. */
static void
setup(fixture *t, unsigned threads)
{
    static uint8_t data[USED * BLOCK];
    static const uint8_t nothing[56] = {0};
    scratch_init(&t->x);
    t->x.params.block_size = BLOCK;
    t->x.params.segment_size = 8 * BLOCK;
    t->x.params.group_slots = SLOTS;
    t->x.params.codec = GD_CODEC_NONE;
    t->x.params.threads = threads;
    t->repo = scratch_repo(&t->x);
    fill_random(data, sizeof data, 1);
    CHECK_INT(put_image(t->repo, "image", data, sizeof data, sizeof data, NULL,
                        &t->x.err), GD_OK);
    for (uint32_t i = 0; i < SEGMENTS; i += 7) {
        scratch_flip(&t->x, GROUP_1,
                     gd_fptable_data_start(SLOTS) + i * SEGMENT +
                                         (i % 2 == 0 ? 40 + i : 0), 1);
    }
    for (uint32_t slot = 3; slot < USED; slot += 101) {
        scratch_write(&t->x, GROUP_1, nothing, sizeof nothing,
                      gd_entry_offset(slot));
        scratch_flip(&t->x, GROUP_1, gd_entry_offset(slot + 13), 1);
    }
    CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, 1, O_RDWR,
                            &t->group, &t->x.err), GD_OK);
    CHECK_INT(gd_group_read_entries(t->group, 0, USED, t->entries, &t->x.err),
              GD_OK);
}

static void
teardown(fixture *t)
{
    gd_group_close(t->group);
    gd_repo_close(t->repo);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

static gd_status
renew(fixture *t)
{
    return gd_tailrecovery_run(t->repo, t->group, 0, t->entries, USED,
                               &t->x.err);
}

static unsigned
count_state(const fixture *t, gd_entry_state state)
{
    unsigned n = 0;
    for (uint32_t i = 0; i < USED; i++) {
        n += t->entries[i].state == state;
    }
    return n;
}

TEST(test_threads_make_no_difference)
{
    static fixture one, many;
    setup(&one, 0);
    setup(&many, THREADS);
    CHECK_INT(renew(&one), GD_OK);
    CHECK_INT(renew(&many), GD_OK);
    CHECK(memcmp(one.entries, many.entries, USED * sizeof one.entries[0]) ==
          0);
    /* 18 segments were hit: 9 in one block each, 9 in the header. */
    CHECK_INT(count_state(&many, GD_ENTRY_VOID), 10);
    CHECK_INT(count_state(&many, GD_ENTRY_INVALID), 10);
    unsigned damaged = count_state(&many, GD_ENTRY_DAMAGED);
    CHECK(damaged >= 9 + 9 * 6 && damaged <= 9 + 9 * 8);
    /* The entries on the disk are the returned ones. */
    for (int i = 0; i < 2; i++) {
        fixture *t = i == 0 ? &one : &many;
        static gd_entry again[SLOTS];
        CHECK_INT(gd_group_read_entries(t->group, 0, USED, again, &t->x.err),
                  GD_OK);
        for (uint32_t slot = 0; slot < USED; slot++) {
            CHECK_INT(again[slot].state, t->entries[slot].state);
        }
    }
    teardown(&one);
    teardown(&many);
}

/* Returns the number of segments that have a live block and a wrong
 * checksum. */
static unsigned
count_torn(fixture *t, const gd_entry *entries)
{
    static uint8_t in[SEGMENT];
    gd_segment_header header;
    unsigned torn = 0;
    for (uint32_t i = 0; i < USED; i++) {
        if (entries[i].state != GD_ENTRY_LIVE) {
            continue;
        }
        scratch_read(&t->x, GROUP_1, in, sizeof in, entries[i].segment);
        torn += gd_segment_header_decode(in, sizeof in, &t->group->bounds,
                                         &header, GROUP_1, 0, NULL) != GD_OK ||
                !gd_segment_intact(in, &header, t->group->bounds.seed);
        i = i / 8 * 8 + 7;
    }
    return torn;
}

/* Torn blocks will be freed one day, and then tears and damage look the same:
 * so a segment with any used block gets its checksum again, and a header
 * without garbage. Nothing else of it changes, and a second owner, after a
 * crash, has no work left. */
TEST(test_checksums_are_mended)
{
    static fixture t;
    static uint8_t before[SEGMENTS * SEGMENT], after[sizeof before];
    static gd_entry again[SLOTS];
    uint64_t start = gd_fptable_data_start(SLOTS);
    setup(&t, THREADS);
    /* All blocks are good here: the checksum is wrong, and a reserved byte. */
    scratch_flip(&t.x, GROUP_1, start + 1 * SEGMENT + 25, 1);
    scratch_flip(&t.x, GROUP_1, start + 2 * SEGMENT + 21, 1);
    scratch_read(&t.x, GROUP_1, before, sizeof before, start);
    CHECK_INT(renew(&t), GD_OK);
    CHECK_INT(count_torn(&t, t.entries), 0);
    CHECK_INT(t.entries[8].state, GD_ENTRY_LIVE);
    scratch_read(&t.x, GROUP_1, after, sizeof after, start);
    CHECK_INT(after[2 * SEGMENT + 21], 0);
    for (size_t i = 0; i < sizeof after; i++) {
        size_t at = i % SEGMENT;
        CHECK(before[i] == after[i] || (at >= 24 && at < 32) || at == 21);
    }
    CHECK_INT(gd_group_read_entries(t.group, 0, USED, again, &t.x.err), GD_OK);
    CHECK_INT(gd_tailrecovery_run(t.repo, t.group, 0, again, USED, &t.x.err),
              GD_OK);
    scratch_read(&t.x, GROUP_1, before, sizeof before, start);
    CHECK(memcmp(before, after, sizeof after) == 0);
    CHECK_INT(count_torn(&t, again), 0);
    teardown(&t);
}

/* No bytes are written over unreadable ones. */
TEST(test_reading_fails)
{
    for (uint64_t n = 1; n <= SEGMENTS; n += 31) {
        static fixture t;
        static gd_entry before[SLOTS], after[SLOTS];
        setup(&t, THREADS);
        memcpy(before, t.entries, sizeof before);
        fault_env_fail(&t.x.f, FAULT_PREAD, n, EIO, false);
        CHECK_INT(renew(&t), GD_IO);
        CHECK_CONTAINS(t.x.err.text, GROUP_1);
        fault_env_heal(&t.x.f);
        CHECK_INT(gd_group_read_entries(t.group, 0, USED, after, &t.x.err),
                  GD_OK);
        CHECK(memcmp(before, after, USED * sizeof before[0]) == 0);
        teardown(&t);
    }
}

/* A thread without memory reports that, or does without: it never marks a
 * block as damaged. */
TEST(test_no_memory)
{
    static fixture good, t;
    bool struck = true;
    setup(&good, 0);
    CHECK_INT(renew(&good), GD_OK);
    for (uint64_t n = 1; struck && n < 100; n++) {
        setup(&t, THREADS);
        uint64_t faults = fault_env_faults(&t.x.f);
        fault_env_fail(&t.x.f, FAULT_ALLOC, n, ENOMEM, false);
        gd_status s = renew(&t);
        struck = fault_env_faults(&t.x.f) > faults;
        fault_env_heal(&t.x.f);
        CHECK(s == GD_NOMEM ||
              (s == GD_OK && memcmp(good.entries, t.entries,
                                    USED * sizeof t.entries[0]) == 0));
        CHECK(struck || s == GD_OK);
        teardown(&t);
    }
    CHECK(!struck);
    teardown(&good);
}
