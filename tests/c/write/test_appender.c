/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_appender.c - a writer's place in a group: which group, what becomes of
 * a dead writer's tail (N7.3), and that nothing counts before the writer's own
 * fdatasync, nor after one that failed (N7.4, I1).
 */
#include "engine/write/appender.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define GROUP_1 "groups/00000001"
#define GROUP_2 "groups/00000002"

enum { BLOCK = 512, START = 8192 /* of the data in a group of 64 slots */ };

typedef struct fixture {
    scratch x;
    gd_repo *repo;
} fixture;

static void
setup(fixture *t)
{
    scratch_init(&t->x);
    t->x.params.block_size = BLOCK;
    t->x.params.segment_size = 4096;
    t->repo = scratch_repo_filter(&t->x);
}

static void
teardown(fixture *t)
{
    gd_repo_close(t->repo);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

/* What another process would have, which remembers nothing. */
static void
another_handle(fixture *t)
{
    gd_repo_close(t->repo);
    t->repo = scratch_repo_filter(&t->x);
}

static gd_appender *
open_appender(fixture *t)
{
    gd_appender *appender = NULL;
    if (!CHECK_INT(gd_appender_open(t->repo, &gd_global_scope, NULL, &appender,
                                    &t->x.err), GD_OK)) {
        fprintf(stderr, "%s\n", t->x.err.text);
        exit(1);
    }
    return appender;
}

static uint32_t
number_of(const gd_appender *appender)
{
    return gd_appender_group(appender)->number;
}

static void
close_appender(fixture *t, gd_appender *appender)
{
    uint32_t number = number_of(appender);
    gd_appender_close(appender);
    gd_locks_unshare(t->repo->locks, number);
}

static void
content(uint32_t group, uint32_t slot, uint8_t out[BLOCK])
{
    fill_random(out, BLOCK, (uint64_t)group << 32 | slot);
}

static gd_fingerprint
fingerprint(fixture *t, const uint8_t *block)
{
    gd_fingerprint fp;
    gd_hasher *hasher;
    CHECK_INT(gd_hasher_open(t->x.env, t->repo->digest, &hasher, NULL), GD_OK);
    CHECK_INT(gd_hasher_compute(hasher, &gd_global_scope, block, BLOCK, &fp,
                                NULL), GD_OK);
    gd_hasher_close(t->x.env, hasher);
    return fp;
}

/* Appends a segment of so many blocks, at most 8. */
static gd_status
append(fixture *t, gd_appender *appender, uint32_t blocks)
{
    uint8_t plain[8 * BLOCK];
    uint32_t number = number_of(appender), slot = 0;
    gd_new_segment segment = {.header = {.blocks = blocks,
                                         .plain_length = blocks * BLOCK,
                                         .stored_length = blocks * BLOCK}};
    for (uint32_t i = 0; i < blocks; i++) {
        uint8_t *block = plain + i * BLOCK;
        uint32_t next = 64 - gd_appender_room(appender);
        content(number, next, block);
        gd_fingerprint fp = fingerprint(t, block);
        gd_status s = gd_appender_take_slot(
            appender, &fp, gd_checksum(block, BLOCK, 0), BLOCK, i * BLOCK,
            &slot, &t->x.err);
        if (s != GD_OK) {
            return s;
        }
        CHECK_INT(slot, next);
        segment.header.first_slot = slot - i;
    }
    /* In two pieces. */
    struct iovec pieces[2] = {{plain, 100},
                              {plain + 100, blocks * BLOCK - 100}};
    segment.pieces = pieces;
    segment.piece_count = 2;
    gd_segment_header_encode(&segment.header,
                             gd_appender_group(appender)->bounds.seed, pieces,
                             2, segment.encoded);
    uint64_t written;
    gd_status s = gd_appender_append(appender, &segment, 1, &written,
                                     &t->x.err);
    CHECK(s != GD_OK || written == 32 + blocks * BLOCK);
    return s;
}

static gd_status
sync_it(fixture *t, gd_appender *appender)
{
    return gd_appender_sync(appender, &t->x.err);
}

/* A writer that stores so many segments of 5 blocks, with one sync point. */
static uint32_t
store(fixture *t, uint32_t segments)
{
    gd_appender *appender = open_appender(t);
    uint32_t number = number_of(appender);
    for (uint32_t i = 0; i < segments; i++) {
        CHECK_INT(append(t, appender, 5), GD_OK);
    }
    CHECK_INT(sync_it(t, appender), GD_OK);
    close_appender(t, appender);
    return number;
}

typedef struct contents {
    gd_published published;
    gd_entry entries[64];
} contents;

static contents
read_group(fixture *t, uint32_t number)
{
    contents c = {0};
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

/* That slots [first, end) are live, with their own contents behind them. */
static void
check_live(fixture *t, uint32_t number, uint32_t first, uint32_t end)
{
    static uint8_t in[GD_SEGMENT_HEADER + GD_SEGMENT_MAX];
    static uint8_t plain[GD_SEGMENT_MAX];
    const gd_env *env = gd_env_posix();
    contents c = read_group(t, number);
    gd_coder *coder;
    gd_group *group;
    gd_segment_header header;
    REQUIRE(gd_coder_open(env, &coder, NULL) == GD_OK);
    REQUIRE(gd_group_open(env, t->x.root, &t->x.params, number, O_RDONLY,
                          &group, NULL) == GD_OK);
    for (uint32_t slot = first; slot < end; slot++) {
        const gd_entry *entry = &c.entries[slot];
        uint8_t wanted[BLOCK];
        content(number, slot, wanted);
        if (!CHECK_INT(entry->state, GD_ENTRY_LIVE) ||
            !CHECK_INT(gd_group_read_segment(group, entry, slot, coder, in,
                                             plain, &header, &t->x.err),
                       GD_OK) ||
            !CHECK(memcmp(plain + entry->plain_offset, wanted, BLOCK) == 0)) {
            fprintf(stderr, "slot %u\n", slot);
        }
    }
    gd_group_close(group);
    gd_coder_close(env, coder);
}

static void
check_states(fixture *t, uint32_t number, uint32_t first, uint32_t end,
            gd_entry_state wanted)
{
    contents c = read_group(t, number);
    for (uint32_t slot = first; slot < end; slot++) {
        if (!CHECK_INT(c.entries[slot].state, wanted)) {
            fprintf(stderr, "slot %u\n", slot);
        }
    }
}

static unsigned
hints_for(fixture *t, uint32_t number, uint32_t slot)
{
    uint8_t block[BLOCK];
    gd_address hints[GD_FILTER_CANDIDATES];
    content(number, slot, block);
    gd_fingerprint fp = fingerprint(t, block);
    size_t count = gd_filter_lookup(t->repo->filter, &fp, hints);
    unsigned found = 0;
    for (size_t i = 0; i < count; i++) {
        found += hints[i].group == number && hints[i].slot == slot;
    }
    return found;
}

/* ---- appending ---- */

static void
test_append_and_sync(void)
{
    fixture t;
    setup(&t);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(number_of(appender), 1);
    CHECK_INT(gd_appender_room(appender), 64);
    CHECK_INT(gd_appender_unsynced(appender), 0);
    CHECK(gd_appender_entry(appender, 0) == NULL);
    CHECK_INT(append(&t, appender, 5), GD_OK);
    CHECK_INT(append(&t, appender, 3), GD_OK);
    CHECK_INT(gd_appender_room(appender), 56);
    CHECK_INT(gd_appender_unsynced(appender), 2 * 32 + 8 * BLOCK);
    CHECK_INT(gd_appender_entry(appender, 0)->segment, START);
    CHECK_INT(gd_appender_entry(appender, 7)->segment,
              START + 32 + 5 * BLOCK);
    CHECK(gd_appender_entry(appender, 8) == NULL);
    /* Nothing is on the disk but the data. */
    check_states(&t, 1, 0, 64, GD_ENTRY_EMPTY);
    CHECK_INT(read_group(&t, 1).published.sequence, 0);
    CHECK_INT(hints_for(&t, 1, 0), 0);
    CHECK_INT(sync_it(&t, appender), GD_OK);
    check_live(&t, 1, 0, 8);
    check_states(&t, 1, 8, 64, GD_ENTRY_EMPTY);
    contents c = read_group(&t, 1);
    CHECK_INT(c.published.sequence, 1);
    CHECK_INT(c.published.count, 8);
    CHECK_INT(c.published.end, START + 2 * 32 + 8 * BLOCK);
    CHECK_INT(c.published.flags, 0);
    CHECK_INT(hints_for(&t, 1, 0) + hints_for(&t, 1, 7), 2);
    CHECK_INT(gd_appender_unsynced(appender), 0);
    CHECK(gd_appender_entry(appender, 7) == NULL);
    /* Without anything new there is nothing to sync. */
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    CHECK_INT(sync_it(&t, appender), GD_OK);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs);
    CHECK_INT(append(&t, appender, 1), GD_OK);
    CHECK_INT(sync_it(&t, appender), GD_OK);
    check_live(&t, 1, 0, 9);
    CHECK_INT(read_group(&t, 1).published.sequence, 2);
    close_appender(&t, appender);
    teardown(&t);
}

/* Entries, fdatasync, record: an entry never precedes its data, the record
 * never precedes its entries' fdatasync. */
static void
test_order_of_a_sync_point(void)
{
    fixture t;
    setup(&t);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(append(&t, appender, 5), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(sync_it(&t, appender), GD_IO);
    check_live(&t, 1, 0, 5);
    CHECK_INT(read_group(&t, 1).published.count, 0);
    close_appender(&t, appender);
    appender = open_appender(&t);
    CHECK_INT(append(&t, appender, 5), GD_OK);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 1, EIO, false);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    CHECK_INT(sync_it(&t, appender), GD_IO);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs);
    check_states(&t, 2, 0, 5, GD_ENTRY_EMPTY);
    close_appender(&t, appender);
    teardown(&t);
}

static void
test_lease_and_share(void)
{
    fixture t;
    gd_locks *other;
    setup(&t);
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &other, &t.x.err), GD_OK);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_BUSY);
    const gd_env *env = gd_env_posix();
    int raw = openat(t.x.root, GD_FILE_GROUP_LOCKS, O_RDWR | O_CLOEXEC);
    const uint64_t share = (UINT64_C(1) << 32) + 1;
    CHECK_INT(env->lock(env, raw, share, F_WRLCK), -EAGAIN);
    gd_appender_close(appender);
    CHECK_INT(gd_locks_lease(other, 1, NULL), GD_OK);
    CHECK_INT(env->lock(env, raw, share, F_WRLCK), -EAGAIN); /* I6 */
    gd_locks_unshare(t.repo->locks, 1);
    CHECK_INT(env->lock(env, raw, share, F_WRLCK), 0);
    close(raw);
    gd_locks_close(other);
    teardown(&t);
}

static void
test_close_cuts_what_is_not_synced(void)
{
    fixture t;
    setup(&t);
    CHECK_INT(store(&t, 2), 1);
    int64_t size = scratch_size(&t.x, GROUP_1);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(append(&t, appender, 8), GD_OK);
    CHECK(scratch_size(&t.x, GROUP_1) > size);
    close_appender(&t, appender);
    CHECK_INT(scratch_size(&t.x, GROUP_1), size);
    /* Slots that nobody knew of are given out again. */
    CHECK_INT(store(&t, 1), 1);
    check_live(&t, 1, 0, 15);
    /* So too after an append that failed, even if it wrote something. */
    appender = open_appender(&t);
    size = scratch_size(&t.x, GROUP_1);
    fault_env_shorten(&t.x.f, 700);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 2, ENOSPC, true);
    CHECK_INT(append(&t, appender, 8), GD_NOSPACE);
    CHECK(scratch_size(&t.x, GROUP_1) > size);
    fault_env_heal(&t.x.f);
    close_appender(&t, appender);
    CHECK_INT(scratch_size(&t.x, GROUP_1), size);
    CHECK_INT(store(&t, 1), 1);
    check_live(&t, 1, 0, 20);
    teardown(&t);
}

/* ---- which group ---- */

static void
test_fullest_group(void)
{
    fixture t;
    setup(&t);
    gd_appender *a = open_appender(&t), *b = open_appender(&t),
                *c = open_appender(&t);
    CHECK_INT(append(&t, a, 4), GD_OK);
    CHECK_INT(append(&t, b, 8), GD_OK);
    CHECK_INT(append(&t, c, 6), GD_OK);
    CHECK(sync_it(&t, a) == GD_OK && sync_it(&t, b) == GD_OK &&
          sync_it(&t, c) == GD_OK);
    CHECK(number_of(a) == 1 && number_of(b) == 2 && number_of(c) == 3);
    close_appender(&t, a);
    close_appender(&t, b);
    close_appender(&t, c);
    a = open_appender(&t);
    b = open_appender(&t);
    c = open_appender(&t);
    CHECK_INT(number_of(a), 2);
    CHECK_INT(number_of(b), 3);
    CHECK_INT(number_of(c), 1);
    gd_appender *d = open_appender(&t);
    CHECK_INT(number_of(d), 4);
    close_appender(&t, a);
    close_appender(&t, b);
    close_appender(&t, c);
    close_appender(&t, d);
    teardown(&t);
}

static void
test_full_group(void)
{
    fixture t;
    setup(&t);
    for (int handle = 0; handle < 2; handle++) {
        gd_appender *appender = open_appender(&t);
        CHECK_INT(number_of(appender), 1 + handle);
        while (gd_appender_room(appender) > 0) {
            CHECK_INT(append(&t, appender, 8), GD_OK);
        }
        CHECK_INT(sync_it(&t, appender), GD_OK);
        close_appender(&t, appender);
        if (handle == 0) {
            another_handle(&t);
        }
    }
    CHECK_INT(store(&t, 1), 3);
    check_live(&t, 1, 0, 64);
    check_live(&t, 2, 0, 64);
    teardown(&t);
}

/* The newest 256 are looked at. */
static void
test_look_back(void)
{
    fixture t;
    uint32_t number = 0;
    setup(&t);
    CHECK_INT(store(&t, 1), 1);
    while (number < 256) {
        REQUIRE(gd_group_create(t.x.env, t.x.root, &t.x.params,
                                &gd_global_scope, t.repo->locks, &number,
                                &t.x.err) == GD_OK);
        gd_locks_unlease(t.repo->locks, number);
    }
    CHECK_INT(store(&t, 1), 1);
    REQUIRE(gd_group_create(t.x.env, t.x.root, &t.x.params, &gd_global_scope,
                            t.repo->locks, &number, &t.x.err) == GD_OK);
    gd_locks_unlease(t.repo->locks, number);
    CHECK(store(&t, 1) > 1);
    teardown(&t);
}

/* Spoils group 1; then neither this handle nor another may write into it. */
static void
check_left_alone(fixture *t)
{
    int64_t size = scratch_size(&t->x, GROUP_1);
    uint8_t *before = malloc((size_t)size + 1);
    uint8_t *after = malloc((size_t)size + 1);
    scratch_read(&t->x, GROUP_1, before, (size_t)size, 0);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(store(t, 1), 2);
        another_handle(t);
    }
    CHECK_INT(scratch_size(&t->x, GROUP_1), size);
    scratch_read(&t->x, GROUP_1, after, (size_t)size, 0);
    CHECK(memcmp(before, after, (size_t)size) == 0);
    free(before);
    free(after);
}

static void
test_what_is_left_alone(void)
{
    enum { SHORT, NO_STORE, HEADER, FOREIGN, EMPTY, LONG, CASES };
    for (int i = 0; i < CASES; i++) {
        fixture t;
        setup(&t);
        CHECK_INT(store(&t, 2), 1);
        uint64_t end = read_group(&t, 1).published.end;
        switch (i) {
        case SHORT:
            scratch_truncate(&t.x, GROUP_1, end - 1);
            break;
        case NO_STORE:
            scratch_truncate(&t.x, GROUP_1, 4096);
            break;
        case HEADER:
            scratch_flip(&t.x, GROUP_1, 80, 1);
            break;
        case FOREIGN:
            scratch_flip(&t.x, GROUP_1, 20, 1);
            break;
        case EMPTY:
            scratch_truncate(&t.x, GROUP_1, 0);
            break;
        case LONG:
            scratch_write(&t.x, GROUP_1, "", 1, UINT32_MAX - 20000);
            break;
        }
        if (i == LONG) {
            /* 54 more blocks might not be addressable by 32 bits. */
            CHECK_INT(store(&t, 1), 2);
            CHECK_INT(read_group(&t, 1).published.count, 10);
        } else {
            check_left_alone(&t);
        }
        teardown(&t);
    }
}

static void
test_the_collector_is_in_it(void)
{
    fixture t;
    setup(&t);
    CHECK_INT(store(&t, 2), 1);
    const gd_env *env = gd_env_posix();
    int raw = openat(t.x.root, GD_FILE_GROUP_LOCKS, O_RDWR | O_CLOEXEC);
    CHECK_INT(env->lock(env, raw, (UINT64_C(1) << 32) + 1, F_WRLCK), 0);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(number_of(appender), 2);
    close_appender(&t, appender);
    close(raw);
    /* It is not remembered as one never to be used. */
    CHECK_INT(store(&t, 1), 1);
    teardown(&t);
}

/* I1: made, but its maker failed to make its name durable: that is done before
 * the first block goes in. */
static void
test_name_is_made_durable(void)
{
    fixture t;
    gd_appender *appender;
    setup(&t);
    fault_env_fail(&t.x.f, FAULT_FSYNC, 2, EIO, false);
    CHECK_INT(gd_appender_open(t.repo, &gd_global_scope, NULL, &appender,
                               &t.x.err), GD_IO);
    CHECK(scratch_exists(&t.x, GROUP_1));
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FSYNC);
    appender = open_appender(&t);
    CHECK_INT(number_of(appender), 1);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FSYNC), syncs + 1);
    close_appender(&t, appender);
    another_handle(&t);
    syncs = fault_env_count(&t.x.f, FAULT_FSYNC);
    CHECK_INT(store(&t, 1), 1); /* still without a sync point: once more */
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FSYNC), syncs + 1);
    another_handle(&t);
    CHECK_INT(store(&t, 1), 1);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FSYNC), syncs + 1);
    teardown(&t);
}

/* ---- tails ---- */

/* A group whose first 10 slots are published, and behind them a tail of 20, in
 * four segments: the record of their sync point is lost. */
static void
make_tail(fixture *t)
{
    uint8_t lost[512] = {0};
    CHECK_INT(store(t, 2), 1);
    CHECK_INT(store(t, 4), 1);
    scratch_write(&t->x, GROUP_1, lost, sizeof lost, 512); /* sequence 2 */
    CHECK_INT(read_group(t, 1).published.count, 10);
    CHECK_INT(unlinkat(t->x.root, "filter", 0), 0); /* another host */
    another_handle(t);
}

/* Where the tail's segment i lies: each has 5 blocks, as those before it. */
static uint64_t
tail_segment(uint32_t i)
{
    return START + (2 + (uint64_t)i) * (32 + 5 * BLOCK);
}

/* The next writer's; what it appends comes behind the tail. */
static void
check_next_writer(fixture *t)
{
    gd_appender *appender = open_appender(t);
    CHECK_INT(number_of(appender), 1);
    CHECK_INT(gd_appender_room(appender), 64 - 30);
    CHECK_INT(read_group(t, 1).published.count, 30);
    CHECK_INT(append(t, appender, 5), GD_OK);
    CHECK_INT(gd_appender_entry(appender, 30)->state, GD_ENTRY_LIVE);
    CHECK_INT(sync_it(t, appender), GD_OK);
    close_appender(t, appender);
    check_live(t, 1, 0, 10);
    check_live(t, 1, 30, 35);
    CHECK_INT(read_group(t, 1).published.count, 35);
}

static void
test_whole_tail_is_renewed(void)
{
    fixture t;
    setup(&t);
    make_tail(&t);
    contents before = read_group(&t, 1);
    uint64_t writes = fault_env_count(&t.x.f, FAULT_PWRITEV);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    gd_appender *appender = open_appender(&t);
    /* Its four segments, their entries, and the record. */
    CHECK_INT(fault_env_count(&t.x.f, FAULT_PWRITEV), writes + 6);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs + 1);
    close_appender(&t, appender);
    contents after = read_group(&t, 1);
    CHECK_INT(after.published.count, 30);
    CHECK(memcmp(before.entries, after.entries, sizeof before.entries) == 0);
    check_live(&t, 1, 0, 30);
    CHECK_INT(hints_for(&t, 1, 10) + hints_for(&t, 1, 29), 2);
    check_next_writer(&t);
    check_live(&t, 1, 0, 35);
    teardown(&t);
}

/* Both records lost: everything is a tail. */
static void
test_no_record_at_all(void)
{
    fixture t;
    uint8_t lost[512] = {0};
    setup(&t);
    make_tail(&t);
    scratch_write(&t.x, GROUP_1, lost, sizeof lost, 1024);
    CHECK_INT(read_group(&t, 1).published.sequence, 0);
    check_next_writer(&t);
    check_live(&t, 1, 0, 35);
    teardown(&t);
}

/* Only what does not verify goes: a block, or all where the header is torn, or
 * none, where it is the segment's own checksum. */
static void
test_torn_segment(void)
{
    static const struct {
        uint64_t place;
        uint32_t first, end;
    } torn[] = {{0, 15, 20},  {4, 15, 20},  {8, 16, 20},   {16, 15, 20},
                {24, 15, 15}, {32, 15, 16}, {1100, 17, 18}, {2591, 19, 20}};
    for (size_t i = 0; i < sizeof torn / sizeof torn[0]; i++) {
        fixture t;
        setup(&t);
        make_tail(&t);
        contents c = read_group(&t, 1);
        scratch_flip(&t.x, GROUP_1, tail_segment(1) + torn[i].place, 4);
        check_next_writer(&t);
        check_live(&t, 1, 10, torn[i].first);
        check_states(&t, 1, torn[i].first, torn[i].end, GD_ENTRY_DAMAGED);
        check_live(&t, 1, torn[i].end, 30);
        if (torn[i].first < torn[i].end) {
            CHECK_INT(hints_for(&t, 1, torn[i].first), 0);
            /* It still says which block it was, and where. */
            contents now = read_group(&t, 1);
            CHECK_INT(now.entries[torn[i].first].segment,
                      c.entries[torn[i].first].segment);
        }
        teardown(&t);
    }
}

/* The file ends in the last segment, or behind the published part. */
static void
test_data_that_is_missing(void)
{
    fixture t;
    setup(&t);
    make_tail(&t);
    scratch_truncate(&t.x, GROUP_1, tail_segment(3) + 100);
    check_next_writer(&t);
    check_live(&t, 1, 10, 25);
    check_states(&t, 1, 25, 30, GD_ENTRY_DAMAGED);
    teardown(&t);
    setup(&t);
    make_tail(&t);
    scratch_truncate(&t.x, GROUP_1, tail_segment(0));
    check_next_writer(&t);
    check_states(&t, 1, 10, 30, GD_ENTRY_DAMAGED);
    teardown(&t);
}

/* Gaps become void; what is torn stays as it is, and so do the others. */
static void
test_torn_entries(void)
{
    fixture t;
    uint8_t zeros[GD_ENTRY_SIZE] = {0};
    setup(&t);
    make_tail(&t);
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(12) + 35, 1);
    scratch_write(&t.x, GROUP_1, zeros, sizeof zeros, gd_entry_offset(20));
    scratch_write(&t.x, GROUP_1, zeros, 30, gd_entry_offset(24));
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(29) + 55, 1);
    check_next_writer(&t);
    static const uint32_t torn[] = {12, 20, 24, 29, 30};
    for (uint32_t slot = 10, i = 0; slot < 30; slot++) {
        if (slot == torn[i]) {
            check_states(&t, 1, slot, slot + 1,
                         slot == 20 ? GD_ENTRY_VOID : GD_ENTRY_INVALID);
            i++;
        } else {
            check_live(&t, 1, slot, slot + 1);
        }
    }
    teardown(&t);
}

static void
write_entry(fixture *t, uint32_t slot, const gd_entry *entry)
{
    gd_group *group;
    REQUIRE(gd_group_open(gd_env_posix(), t->x.root, &t->x.params, 1, O_RDWR,
                          &group, NULL) == GD_OK);
    CHECK_INT(gd_group_write_entries(group, slot, 1, entry, NULL), GD_OK);
    gd_group_close(group);
}

/* Entries that are whole but name what they should not. */
static void
test_entries_that_lie(void)
{
    fixture t;
    setup(&t);
    make_tail(&t);
    contents c = read_group(&t, 1);
    gd_entry lie = c.entries[11];
    lie.fingerprint.bytes[31] ^= 1; /* not of this content */
    write_entry(&t, 11, &lie);
    lie = c.entries[16];
    lie.checksum ^= 1;
    write_entry(&t, 16, &lie);
    write_entry(&t, 22, &c.entries[10]); /* of another slot's segment */
    lie = c.entries[27];
    lie.plain_offset += BLOCK; /* its neighbour's bytes */
    write_entry(&t, 27, &lie);
    check_next_writer(&t);
    static const uint32_t lies[] = {11, 16, 22, 27, 30};
    for (uint32_t slot = 10, i = 0; slot < 30; slot++) {
        if (slot == lies[i]) {
            check_states(&t, 1, slot, slot + 1, GD_ENTRY_DAMAGED);
            i++;
        } else {
            check_live(&t, 1, slot, slot + 1);
        }
    }
    teardown(&t);
}

/* What was void, freed or damaged in the tail is so still. */
static void
test_other_states_are_kept(void)
{
    fixture t;
    setup(&t);
    make_tail(&t);
    contents c = read_group(&t, 1);
    gd_entry entry = {.state = GD_ENTRY_VOID};
    write_entry(&t, 10, &entry);
    entry.state = GD_ENTRY_FREED;
    write_entry(&t, 11, &entry);
    entry = c.entries[12];
    entry.state = GD_ENTRY_DAMAGED;
    write_entry(&t, 12, &entry);
    check_next_writer(&t);
    check_states(&t, 1, 10, 11, GD_ENTRY_VOID);
    check_states(&t, 1, 11, 12, GD_ENTRY_FREED);
    check_states(&t, 1, 12, 13, GD_ENTRY_DAMAGED);
    CHECK(read_group(&t, 1).entries[12].checksum == c.entries[12].checksum);
    check_live(&t, 1, 13, 30);
    teardown(&t);
}

/* However thin it is, and however far behind the record: a slot that was used
 * once is used up, and so are all before it. */
static void
test_tail_of_a_large_group(void)
{
    static const uint32_t slots[] = {0, 1023, 1024, 2500, 4094};
    const gd_entry freed = {.state = GD_ENTRY_FREED};
    for (size_t i = 0; i < sizeof slots / sizeof slots[0]; i++) {
        fixture t;
        gd_entry entries[2];
        uint32_t slot = slots[i], before = slot - (slot > 0);
        setup(&t);
        t.x.params.group_slots = 4096;
        another_handle(&t);
        close_appender(&t, open_appender(&t)); /* makes the group */
        write_entry(&t, 0, &freed);
        write_entry(&t, slot, &freed);
        gd_appender *appender = open_appender(&t);
        const gd_group *group = gd_appender_group(appender);
        CHECK_INT(group->number, 1);
        CHECK_INT(gd_appender_room(appender), 4096 - slot - 1);
        CHECK_INT(gd_group_read_entries(group, before, 2, entries, NULL),
                  GD_OK);
        CHECK_INT(entries[slot - before].state, GD_ENTRY_FREED);
        CHECK(slot == 0 || entries[0].state == GD_ENTRY_VOID);
        close_appender(&t, appender);
        teardown(&t);
    }
}

/* A tail up to the last slot leaves no room, but it is made durable. */
static void
test_tail_that_fills_the_group(void)
{
    fixture t;
    uint8_t lost[512] = {0};
    setup(&t);
    CHECK_INT(store(&t, 12), 1);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(append(&t, appender, 4), GD_OK);
    CHECK_INT(sync_it(&t, appender), GD_OK);
    close_appender(&t, appender);
    scratch_write(&t.x, GROUP_1, lost, sizeof lost, 512);
    another_handle(&t);
    CHECK_INT(store(&t, 1), 2);
    CHECK_INT(read_group(&t, 1).published.count, 64);
    check_live(&t, 1, 0, 64);
    teardown(&t);
}

/* Whatever call fails once while the tail is treated, no block of it is given
 * up: committed recipes may name them. */
static void
test_tail_survives_any_failure(void)
{
    static const int errors[] = {EIO, ENOSPC, ENOMEM};
    for (int kind = 0; kind < 3; kind++) {
        fault_call call = errors[kind] == ENOMEM ? FAULT_ALLOC : FAULT_ANY;
        bool struck = true;
        for (uint64_t n = 1; struck; n++) {
            fixture t;
            gd_appender *appender;
            setup(&t);
            make_tail(&t);
            uint64_t faults = fault_env_faults(&t.x.f);
            fault_env_fail(&t.x.f, call, n, errors[kind], false);
            gd_status s = gd_appender_open(t.repo, &gd_global_scope, NULL,
                                           &appender, &t.x.err);
            struck = fault_env_faults(&t.x.f) > faults;
            fault_env_heal(&t.x.f);
            if (s == GD_OK) {
                close_appender(&t, appender);
            }
            check_live(&t, 1, 0, 30);
            another_handle(&t);
            uint32_t number = store(&t, 1);
            contents c = read_group(&t, 1);
            bool poisoned = (c.published.flags & GD_GROUP_POISONED) != 0;
            CHECK(poisoned ? number > 1 && c.published.count == 10
                           : c.published.count >= 30 || number > 1);
            check_live(&t, 1, 0, 30);
            if (check_all.failures > 0) {
                fprintf(stderr, "call %u, error %d\n", (unsigned)n,
                        errors[kind]);
                struck = false;
            }
            teardown(&t);
        }
    }
}

/* ---- failed sync points ---- */

static void
check_poisoned(fixture *t, uint32_t published)
{
    contents c = read_group(t, 1);
    CHECK_INT(c.published.flags, GD_GROUP_POISONED);
    CHECK_INT(c.published.count, published);
}

static void
test_failed_fdatasync_poisons(void)
{
    fixture t;
    bool cold;
    gd_fpstore *store_now;
    setup(&t);
    CHECK_INT(store(&t, 1), 1);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(append(&t, appender, 5), GD_OK);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(sync_it(&t, appender), GD_IO);
    CHECK_CONTAINS(t.x.err.text, "fdatasync " GROUP_1);
    close_appender(&t, appender);
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs + 1);
    check_poisoned(&t, 5);
    /* Nothing of it is found, here or elsewhere; what came before is. */
    for (int handle = 0; handle < 2; handle++) {
        CHECK_INT(hints_for(&t, 1, 4), 1);
        CHECK_INT(hints_for(&t, 1, 5), 0);
        CHECK_INT(gd_locks_share(t.repo->locks, 1, NULL), GD_OK);
        REQUIRE(gd_fpcache_store(t.repo->cache, 1, &store_now, &cold,
                                 &t.x.err) == GD_OK);
        CHECK_INT(store_now->count, 5);
        gd_fpcache_return_store(t.repo->cache, store_now);
        gd_locks_unshare(t.repo->locks, 1);
        another_handle(&t);
    }
    check_left_alone(&t);
    check_poisoned(&t, 5);
    teardown(&t);
}

static gd_status
fill(fixture *t, gd_appender *appender, int failing_sync, uint64_t *syncs)
{
    while (gd_appender_room(appender) > 0) {
        CHECK_INT(append(t, appender, 8), GD_OK);
    }
    *syncs = fault_env_count(&t->x.f, FAULT_FDATASYNC);
    if (failing_sync > 0) {
        fault_env_fail(&t->x.f, FAULT_FDATASYNC, (uint64_t)failing_sync, EIO,
                       false);
    }
    gd_status s = sync_it(t, appender);
    *syncs = fault_env_count(&t->x.f, FAULT_FDATASYNC) - *syncs;
    return s;
}

/* Else a crash of the machine leaves as many tails to be renewed as groups were
 * filled before it (I8). */
static void
test_record_of_a_full_group_is_synced(void)
{
    fixture t;
    uint64_t syncs;
    setup(&t);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(fill(&t, appender, 0, &syncs), GD_OK);
    CHECK_INT(syncs, 2);
    CHECK_INT(read_group(&t, 1).published.count, 64);
    close_appender(&t, appender);
    /* An error of it is one of the sync point, though all is there. */
    appender = open_appender(&t);
    CHECK_INT(number_of(appender), 2);
    CHECK_INT(fill(&t, appender, 2, &syncs), GD_IO);
    CHECK_INT(syncs, 2);
    contents c = read_group(&t, 2);
    CHECK_INT(c.published.flags, GD_GROUP_POISONED);
    CHECK_INT(c.published.count, 64);
    close_appender(&t, appender);
    teardown(&t);
}

/* The mark could not be written either: then there is a tail like others. */
static void
test_poison_that_is_lost(void)
{
    fixture t;
    setup(&t);
    CHECK_INT(store(&t, 1), 1);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(append(&t, appender, 5), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 2, EIO, false);
    CHECK_INT(sync_it(&t, appender), GD_IO);
    close_appender(&t, appender);
    CHECK_INT(read_group(&t, 1).published.flags, 0);
    CHECK_INT(store(&t, 1), 2); /* this handle remembers */
    another_handle(&t);
    uint64_t writes = fault_env_count(&t.x.f, FAULT_PWRITEV);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    appender = open_appender(&t);
    CHECK(number_of(appender) <= 2); /* both have 5 slots */
    if (number_of(appender) == 1) {
        CHECK_INT(fault_env_count(&t.x.f, FAULT_PWRITEV), writes + 3);
        CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs + 1);
        CHECK_INT(read_group(&t, 1).published.count, 10);
    }
    check_live(&t, 1, 0, 10);
    close_appender(&t, appender);
    teardown(&t);
}

static void
test_failed_fdatasync_of_a_tail(void)
{
    fixture t;
    setup(&t);
    make_tail(&t);
    uint64_t syncs = fault_env_count(&t.x.f, FAULT_FDATASYNC);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    gd_appender *appender = open_appender(&t);
    CHECK_INT(number_of(appender), 2); /* another one is taken instead */
    CHECK_INT(fault_env_count(&t.x.f, FAULT_FDATASYNC), syncs + 1);
    close_appender(&t, appender);
    check_poisoned(&t, 10);
    CHECK_INT(hints_for(&t, 1, 10), 0);
    check_left_alone(&t);
    check_live(&t, 1, 0, 30); /* a committed recipe may be lucky */
    teardown(&t);
}

/* The entries could be written in part only, or the record not: the slots of
 * entries that are on the disk are used up. */
static void
test_other_failures_of_a_sync_point(void)
{
    for (uint64_t n = 1; n <= 4; n++) {
        fixture t;
        setup(&t);
        CHECK_INT(store(&t, 1), 1);
        gd_appender *appender = open_appender(&t);
        CHECK_INT(append(&t, appender, 8), GD_OK);
        CHECK_INT(append(&t, appender, 8), GD_OK);
        fault_env_shorten(&t.x.f, 300);
        fault_env_fail(&t.x.f, FAULT_PWRITEV, n, EIO, true);
        CHECK_INT(sync_it(&t, appender), GD_IO);
        fault_env_heal(&t.x.f);
        close_appender(&t, appender);
        CHECK_INT(read_group(&t, 1).published.count, 5);
        contents before = read_group(&t, 1);
        another_handle(&t);
        CHECK_INT(store(&t, 1), 1);
        contents after = read_group(&t, 1);
        uint32_t used = 0;
        for (uint32_t slot = 0; slot < 64; slot++) {
            const gd_entry *entry = &before.entries[slot];
            if (entry->state == GD_ENTRY_LIVE) {
                CHECK(memcmp(entry, &after.entries[slot], sizeof *entry) == 0);
            }
            used += entry->state != GD_ENTRY_EMPTY;
        }
        CHECK_INT(after.published.count, used + 5);
        CHECK(n == 1 ? used == 5 : used > 5);
        teardown(&t);
    }
}

int
main(int argc, char **argv)
{
    BEGIN(argc, argv);
    RUN(test_append_and_sync);
    RUN(test_order_of_a_sync_point);
    RUN(test_lease_and_share);
    RUN(test_close_cuts_what_is_not_synced);
    RUN(test_fullest_group);
    RUN(test_full_group);
    RUN(test_look_back);
    RUN(test_what_is_left_alone);
    RUN(test_the_collector_is_in_it);
    RUN(test_name_is_made_durable);
    RUN(test_whole_tail_is_renewed);
    RUN(test_no_record_at_all);
    RUN(test_torn_segment);
    RUN(test_data_that_is_missing);
    RUN(test_torn_entries);
    RUN(test_entries_that_lie);
    RUN(test_other_states_are_kept);
    RUN(test_tail_of_a_large_group);
    RUN(test_tail_that_fills_the_group);
    RUN(test_tail_survives_any_failure);
    RUN(test_failed_fdatasync_poisons);
    RUN(test_record_of_a_full_group_is_synced);
    RUN(test_poison_that_is_lost);
    RUN(test_failed_fdatasync_of_a_tail);
    RUN(test_other_failures_of_a_sync_point);
    return REPORT();
}
