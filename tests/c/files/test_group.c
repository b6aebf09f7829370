/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_group.c - a group's file: known bytes, no flipped bit passes, torn
 * published records, entries across sectors, and creation under contention.
 */
#include "engine/files/group.h"

#include <signal.h>

#include "engine/base/coding.h"
#include "engine/repo/fpcache.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define NAME "groups/00000001"

typedef struct fixture {
    scratch x;
    gd_locks *locks;
    gd_group *group; /* 1, leased */
} fixture;

static void
make_first(fixture *t)
{
    uint32_t number = 0;
    CHECK_INT(gd_group_create(t->x.env, t->x.root, &t->x.params,
                              &gd_global_scope, t->locks, &number, &t->x.err),
              GD_OK);
    CHECK_INT(number, 1);
    CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, 1, O_RDWR,
                            &t->group, &t->x.err),
              GD_OK);
}

static void
setup_slots(fixture *t, uint32_t slots)
{
    scratch_init(&t->x);
    t->x.params.group_slots = slots;
    CHECK_INT(gd_locks_open(t->x.env, t->x.root, &t->locks, &t->x.err), GD_OK);
    make_first(t);
}

/* Makes another group with the number of the first, which is lost. */
static void
make_first_again(fixture *t)
{
    gd_group_close(t->group);
    gd_locks_unlease(t->locks, 1);
    CHECK_INT(unlinkat(t->x.root, NAME, 0), 0);
    make_first(t);
}

static void
setup(fixture *t)
{
    setup_slots(t, 64);
}

static void
teardown(fixture *t)
{
    gd_group_close(t->group);
    gd_locks_close(t->locks);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

/* Opens the group once more, and closes it again. */
static gd_status
try_open(fixture *t)
{
    gd_group *group;
    gd_status s = gd_group_open(t->x.env, t->x.root, &t->x.params, 1, O_RDONLY,
                                &group, &t->x.err);
    if (s == GD_OK) {
        gd_group_close(group);
    }
    return s;
}

/* ---- the header ---- */

/* The identity is not random. */
static int
draw_known(const gd_env *env, void *buf, size_t len)
{
    (void)env;
    for (size_t i = 0; i < len; i++) {
        ((uint8_t *)buf)[i] = (uint8_t)(0xa0 + i);
    }
    return 0;
}

static fixture t;

TEST_WITH(test_known_header, setup(&t), teardown(&t))
{
    static const golden known[] = {
        {0, "474447524f5550000100000001000000"
            "0102030405060708090a0b0c0d0e0f10"},
        {48, "4000000000100000736861323536"},
        {72, "a0a1a2a3a4a5a6a7a8a9aaabacadaeaf"},
        {504, "27ad3eb49a490238"}};
    uint8_t raw[8192];
    uint64_t seed = t.group->bounds.seed;
    make_first_again(&t);
    CHECK(t.group->bounds.seed != seed);
    t.x.f.env.random = draw_known;
    make_first_again(&t);
    /* The file has a header, no records, room for the table, and no more. */
    CHECK_INT(scratch_size(&t.x, NAME), 4096 + 4096);
    scratch_read(&t.x, NAME, raw, sizeof raw, 0);
    CHECK(GOLDEN_MATCHES(raw, sizeof raw, known));
    CHECK(t.group->bounds.seed == UINT64_C(0x3802499ab43ead27));
    CHECK_INT(t.group->bounds.slots, 64);
    CHECK_INT(t.group->bounds.max_block, 4096);
    CHECK_INT(scratch_count(&t.x, "spool", "", NULL), 0);
    struct stat st;
    CHECK_INT(fstatat(t.x.root, NAME, &st, 0), 0);
    CHECK_INT(st.st_mode & 0777, 0600);
    CHECK_INT(st.st_nlink, 1);
    CHECK(st.st_blocks * 512 >= 8192); /* the table's room is there */
}

TEST_WITH(test_every_flip_of_the_header, setup(&t), teardown(&t))
{
    for (uint64_t at = 0; at < 512; at++) {
        for (int bit = 0; bit < 8; bit++) {
            scratch_flip(&t.x, NAME, at, (uint8_t)(1 << bit));
            gd_status s = try_open(&t);
            if (!CHECK(s == GD_CORRUPT || (s == GD_VERSION && at / 2 == 4))) {
                fprintf(stderr, "byte %u\n", (unsigned)at);
            }
            CHECK_CONTAINS(t.x.err.text, NAME);
            scratch_flip(&t.x, NAME, at, (uint8_t)(1 << bit));
        }
    }
    CHECK_INT(try_open(&t), GD_OK);
}

/* Puts a value into the header, and corrects the checksum. */
static gd_status
open_with(fixture *t, size_t offset, uint64_t value, size_t length)
{
    uint8_t raw[512], kept[512];
    scratch_read(&t->x, NAME, raw, sizeof raw, 0);
    memcpy(kept, raw, sizeof raw);
    for (size_t i = 0; i < length; i++) {
        raw[offset + i] = (uint8_t)(value >> 8 * i);
    }
    gd_put64(raw + 504, gd_checksum(raw, 504, 0));
    scratch_write(&t->x, NAME, raw, sizeof raw, 0);
    gd_status s = try_open(t);
    scratch_write(&t->x, NAME, kept, sizeof kept, 0);
    return s;
}

TEST(test_bounds_of_the_header)
{
    static const struct {
        size_t offset;
        uint64_t value;
        size_t length;
        gd_status wanted;
        const char *words;
    } cases[] = {
        {8, 2, 2, GD_OK, ""}, /* a group with lists */
        {8, 3, 2, GD_CORRUPT, "names no object"},
        {8, 4, 2, GD_VERSION, "version 4"},
        {8, 65535, 2, GD_VERSION, "version 65535"},
        {10, 9, 2, GD_OK, ""}, /* a minor version */
        {12, 2, 4, GD_CORRUPT, "another's name"},
        {16, 0, 1, GD_CORRUPT, "another repository"},
        {31, 0, 1, GD_CORRUPT, "another repository"},
        {48, 63, 4, GD_CORRUPT, "bounds"},
        {48, 0, 4, GD_CORRUPT, "bounds"},
        {48, 32768, 4, GD_OK, ""},
        {48, 32769, 4, GD_CORRUPT, "bounds"},
        {48, UINT32_MAX, 4, GD_CORRUPT, "bounds"},
        {52, 0, 4, GD_CORRUPT, "bounds"},
        {52, 512, 4, GD_OK, ""},
        /* Buffers have room for the repository's largest. */
        {52, 4097, 4, GD_CORRUPT, "bounds"},
        {52, 65536, 4, GD_CORRUPT, "bounds"},
        {52, UINT32_MAX, 4, GD_CORRUPT, "bounds"},
        {56, 'S', 1, GD_CORRUPT, "another digest"},
        {61, 0, 1, GD_CORRUPT, "another digest"},
        {71, 'x', 1, GD_CORRUPT, "another digest than the repository's, sha256"},
        {72, 0, 8, GD_OK, ""}, /* a byte of the identity */
        {88, UINT64_MAX, 8, GD_OK, ""}, /* reserved */
        {496, UINT64_MAX, 8, GD_OK, ""},
    };
    fixture t;
    setup(&t);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_INT(open_with(&t, cases[i].offset, cases[i].value,
                            cases[i].length),
                  cases[i].wanted);
        if (cases[i].wanted != GD_OK) {
            CHECK_CONTAINS(t.x.err.text, cases[i].words);
            CHECK_CONTAINS(t.x.err.text, NAME);
        }
    }
    teardown(&t);
}

TEST_WITH(test_what_is_no_group, setup(&t), teardown(&t))
{
    for (uint64_t length = 0; length < 512; length += 73) {
        scratch_truncate(&t.x, NAME, length);
        CHECK_INT(try_open(&t), GD_CORRUPT);
    }
    CHECK_INT(unlinkat(t.x.root, NAME, 0), 0);
    CHECK_INT(try_open(&t), GD_NOTFOUND);
    CHECK_CONTAINS(t.x.err.text, NAME);
    CHECK_INT(symlinkat("../locks/groups", t.x.root, NAME), 0);
    CHECK_INT(try_open(&t), GD_IO);
    CHECK_INT(unlinkat(t.x.root, NAME, 0), 0);
    CHECK_INT(mkdirat(t.x.root, NAME, 0700), 0);
    CHECK_INT(try_open(&t), GD_CORRUPT); /* not a file */
    CHECK_INT(unlinkat(t.x.root, NAME, AT_REMOVEDIR), 0);
}

/* ---- published records ---- */

static void
write_record(fixture *t, uint64_t sequence)
{
    const gd_published record = {.sequence = sequence,
                                 .generation = 10 + sequence,
                                 .count = (uint32_t)sequence,
                                 .end = 8192 + sequence};
    CHECK_INT(gd_group_write_published(t->group, &record, &t->x.err), GD_OK);
}

static uint64_t
read_sequence(fixture *t)
{
    gd_published record;
    CHECK_INT(gd_group_read_published(t->group, &record, &t->x.err), GD_OK);
    if (record.sequence == 0) {
        CHECK(record.generation == 0 && record.count == 0 &&
              record.flags == 0 && record.end == 0);
    } else {
        CHECK_INT(record.generation, 10 + record.sequence);
        CHECK_INT(record.count, record.sequence);
        CHECK_INT(record.end, 8192 + record.sequence);
    }
    return record.sequence;
}

/* No record could supersede it. */
TEST(test_record_with_an_impossible_sequence)
{
    static const uint64_t sequences[] = {UINT64_MAX, UINT64_C(1) << 63};
    fixture t;
    setup(&t);
    write_record(&t, 4);
    write_record(&t, 5);
    for (int i = 0; i < 2; i++) {
        const gd_published record = {.sequence = sequences[i], .count = 1};
        CHECK_INT(gd_group_write_published(t.group, &record, &t.x.err),
                  GD_OK);
        CHECK_INT(read_sequence(&t), i == 0 ? 4 : 0);
    }
    write_record(&t, 6);
    CHECK_INT(read_sequence(&t), 6);
    teardown(&t);
}

TEST(test_known_record)
{
    static const golden known[] = {{0, "05"},
                                   {8, "03"},
                                   {16, "0700000001000000563412"},
                                   {32, "0213"},
                                   {504, "5fe321189855877f"}};
    gd_published record = {5, 3, 7, GD_GROUP_POISONED, 0x123456,
                           GD_CODEC_ZSTD, 19, false, 64};
    gd_published back;
    uint8_t raw[512];
    fixture t;
    setup(&t);
    t.x.f.env.random = draw_known;
    make_first_again(&t);
    CHECK_INT(read_sequence(&t), 0);
    CHECK_INT(gd_group_write_published(t.group, &record, &t.x.err), GD_OK);
    scratch_read(&t.x, NAME, raw, sizeof raw, 1024); /* odd: record 1 */
    CHECK(GOLDEN_MATCHES(raw, sizeof raw, known));
    CHECK_INT(gd_group_read_published(t.group, &back, &t.x.err), GD_OK);
    CHECK(back.sequence == 5 && back.generation == 3 && back.count == 7 &&
          back.flags == record.flags && back.end == record.end);
    CHECK(back.codec == record.codec && back.level == record.level &&
          !back.similar);
    record.similar = true;
    CHECK_INT(gd_group_write_published(t.group, &record, &t.x.err), GD_OK);
    scratch_read(&t.x, NAME, raw, sizeof raw, 1024);
    CHECK_INT(raw[33], 0x80 | 19);
    CHECK_INT(gd_group_read_published(t.group, &back, &t.x.err), GD_OK);
    CHECK(back.codec == record.codec && back.level == record.level &&
          back.similar);
    teardown(&t);
}

/* All blocks were recompressed, or those of the first slots. Older programs
 * know only bytes 32 and 33, and write the next six as zeros. */
TEST(test_what_a_codec_covers)
{
    static const struct {
        uint32_t count, covered;
        const char *stored; /* bytes 32 to 39 */
        uint32_t found;
    } cases[] = {
        {64, 64, "0213000000000000", 64}, {64, 63, "000002133f000000", 63},
        {9, 9, "0000021309000000", 9},    {9, 0, "0000000000000000", 0},
        {9, 10, "000002130a000000", 0},   {9, 64, "0213000000000000", 9},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const gd_published record = {
            .sequence = 1, .count = cases[i].count, .codec = GD_CODEC_ZSTD,
            .level = 19, .covered = cases[i].covered};
        const golden known[] = {{32, cases[i].stored}};
        gd_published back;
        uint8_t raw[504];
        fixture t;
        setup(&t);
        CHECK_INT(gd_group_write_published(t.group, &record, &t.x.err), GD_OK);
        scratch_read(&t.x, NAME, raw, sizeof raw, 1024);
        memset(raw, 0, 32);
        CHECK(GOLDEN_MATCHES(raw, sizeof raw, known));
        CHECK_INT(gd_group_read_published(t.group, &back, &t.x.err), GD_OK);
        CHECK_INT(back.covered, cases[i].found);
        CHECK(back.codec == (cases[i].found > 0 ? GD_CODEC_ZSTD : 0) &&
              back.level == (cases[i].found > 0 ? 19 : 0));
        teardown(&t);
    }
}

TEST(test_the_higher_record_counts)
{
    fixture t;
    uint8_t zeros[512] = {0}, raw[512];
    setup(&t);
    for (uint64_t sequence = 1; sequence <= 6; sequence++) {
        write_record(&t, sequence);
        CHECK_INT(read_sequence(&t), sequence);
    }
    /* 5 lies at 1024, 6 at 512.  A torn write of 7 destroys 5 only. */
    scratch_read(&t.x, NAME, raw, sizeof raw, 1024);
    scratch_write(&t.x, NAME, zeros, 100, 1024);
    CHECK_INT(read_sequence(&t), 6);
    scratch_write(&t.x, NAME, raw, sizeof raw, 1024);
    scratch_write(&t.x, NAME, zeros, 512, 512);
    CHECK_INT(read_sequence(&t), 5);
    scratch_write(&t.x, NAME, zeros, 1, 1024);
    CHECK_INT(read_sequence(&t), 0);
    teardown(&t);
}

TEST_WITH(test_every_flip_of_a_record, setup(&t), teardown(&t))
{
    write_record(&t, 3);
    write_record(&t, 4); /* at 512 */
    for (uint64_t at = 0; at < 512; at++) {
        uint8_t with = (uint8_t)(1 << at % 8);
        scratch_flip(&t.x, NAME, 512 + at, with);
        CHECK_INT(read_sequence(&t), 3);
        scratch_flip(&t.x, NAME, 1024 + at, with);
        CHECK_INT(read_sequence(&t), 0);
        scratch_flip(&t.x, NAME, 512 + at, with);
        CHECK_INT(read_sequence(&t), 4);
        scratch_flip(&t.x, NAME, 1024 + at, with);
    }
}

/* The record has more slots than the group; another is of another group. */
TEST(test_records_that_do_not_fit)
{
    fixture t;
    gd_published record = {.sequence = 9, .count = 65};
    uint8_t raw[512] = {0};
    setup(&t);
    write_record(&t, 2);
    CHECK_INT(gd_group_write_published(t.group, &record, &t.x.err), GD_OK);
    CHECK_INT(read_sequence(&t), 2);
    gd_put64(raw, 9);
    gd_put64(raw + 504, gd_checksum(raw, 504, t.group->bounds.seed ^ 1));
    scratch_write(&t.x, NAME, raw, sizeof raw, 1024);
    CHECK_INT(read_sequence(&t), 2);
    scratch_truncate(&t.x, NAME, 1535);
    CHECK_INT(gd_group_read_published(t.group, &record, &t.x.err), GD_CORRUPT);
    teardown(&t);
}

/* ---- entries ---- */

static gd_entry
some_entry(uint32_t slot, uint32_t slots)
{
    gd_entry entry = {.checksum = slot,
                      .segment = (uint32_t)gd_fptable_data_start(slots) + slot,
                      .plain_length = 1 + slot % 4096,
                      .stored_length = 1 + slot,
                      .state = GD_ENTRY_LIVE};
    fill_random(entry.fingerprint.bytes, GD_FINGERPRINT_SIZE, slot);
    return entry;
}

static void
check_entries(fixture *t, uint32_t first, uint32_t count, uint32_t slots)
{
    static gd_entry entries[200];
    CHECK_INT(gd_group_read_entries(t->group, first, count, entries,
                                    &t->x.err),
              GD_OK);
    for (uint32_t i = 0; i < count; i++) {
        gd_entry wanted = some_entry(first + i, slots);
        CHECK_INT(entries[i].state, GD_ENTRY_LIVE);
        CHECK(gd_fingerprint_equal(&entries[i].fingerprint,
                                   &wanted.fingerprint));
        CHECK_INT(entries[i].segment, wanted.segment);
    }
}

/* Every run of slots crosses none, one or several borders of sectors: bytes
 * beside it stay, and so do the zeros at the sectors' ends. */
TEST(test_entries_across_sectors)
{
    enum { SLOTS = 100 };
    static gd_entry entries[SLOTS];
    static uint8_t raw[512 * 12], cleared[512 * 12];
    fixture t;
    setup_slots(&t, SLOTS);
    for (uint32_t first = 0; first < 20; first++) {
        for (uint32_t count = 1; first + count <= SLOTS;
             count += 1 + count / 4) {
            scratch_write(&t.x, NAME, cleared, sizeof cleared, 4096);
            for (uint32_t i = 0; i < count; i++) {
                entries[i] = some_entry(first + i, SLOTS);
            }
            CHECK_INT(gd_group_write_entries(t.group, first, count, entries,
                                             &t.x.err),
                      GD_OK);
            check_entries(&t, first, count, SLOTS);
            CHECK_INT(gd_group_read_entries(t.group, 0, SLOTS, entries,
                                            &t.x.err),
                      GD_OK);
            for (uint32_t slot = 0; slot < SLOTS; slot++) {
                bool ours = slot >= first && slot < first + count;
                CHECK_INT(entries[slot].state,
                          ours ? GD_ENTRY_LIVE : GD_ENTRY_EMPTY);
            }
            scratch_read(&t.x, NAME, raw, sizeof raw, 4096);
            for (size_t at = 504; at < sizeof raw; at += 512) {
                CHECK(gd_get64(raw + at) == 0);
            }
        }
    }
    teardown(&t);
}

/* Later entries of a sector leave the earlier ones' bytes unchanged. */
TEST_WITH(test_entries_join_a_sector, setup(&t), teardown(&t))
{
    for (uint32_t slot = 0; slot < 64; slot++) {
        gd_entry entry = some_entry(slot, 64);
        CHECK_INT(gd_group_write_entries(t.group, slot, 1, &entry, &t.x.err),
                  GD_OK);
        check_entries(&t, 0, slot + 1, 64);
    }
    CHECK_INT(scratch_size(&t.x, NAME), 8192);
}

TEST_WITH(test_bounds_of_entries, setup(&t), teardown(&t))
{
    gd_entry entries[64];
    gd_error *err = &t.x.err;
    CHECK_INT(gd_group_read_entries(t.group, 64, 0, entries, err), GD_OK);
    CHECK_INT(gd_group_read_entries(t.group, 63, 1, entries, err), GD_OK);
    CHECK_INT(gd_group_read_entries(t.group, 64, 1, entries, err), GD_CORRUPT);
    CHECK_CONTAINS(err->text, NAME);
    CHECK_INT(gd_group_read_entries(t.group, 0, 65, entries, err), GD_CORRUPT);
    CHECK_INT(gd_group_read_entries(t.group, UINT32_MAX, 1, entries, err),
              GD_CORRUPT);
    CHECK_INT(gd_group_read_entries(t.group, 1, UINT32_MAX, entries, err),
              GD_CORRUPT);
    scratch_truncate(&t.x, NAME, 4096 + 512 + 55);
    CHECK_INT(gd_group_read_entries(t.group, 0, 9, entries, err), GD_OK);
    CHECK_INT(gd_group_read_entries(t.group, 9, 1, entries, err), GD_CORRUPT);
    CHECK_CONTAINS(err->text, NAME);
    fault_env_fail(&t.x.f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK_INT(gd_group_read_entries(t.group, 0, 9, entries, err), GD_NOMEM);
}

TEST_WITH(test_load_store, setup(&t), teardown(&t))
{
    gd_entry entries[64];
    gd_fptable *store;
    for (uint32_t slot = 0; slot < 64; slot++) {
        entries[slot] = some_entry(slot, 64);
    }
    CHECK_INT(gd_group_write_entries(t.group, 0, 64, entries, &t.x.err),
              GD_OK);
    for (uint32_t count = 0; count <= 64; count += 16) {
        const gd_published record = {.sequence = 1, .generation = 5,
                                     .count = count, .end = 8192};
        REQUIRE(gd_group_load_table(t.group, &record, &store, &t.x.err) ==
                GD_OK);
        for (uint32_t slot = 0; slot < 64; slot++) {
            uint32_t probe = 0, found = 99;
            CHECK_INT(gd_fptable_find(store, &entries[slot].fingerprint,
                                      &probe, &found),
                      slot < count); /* not beyond the published count */
            CHECK(slot >= count || found == slot);
        }
        CHECK(gd_group_is_table(t.group, &record, store));
        for (int i = 0; i < 3; i++) {
            gd_published other = record;
            other.sequence += i == 0;
            other.generation += i == 1;
            other.count += i == 2;
            CHECK(!gd_group_is_table(t.group, &other, store));
        }
        gd_fptable_free(t.x.env, store);
    }
}

/* ---- segments ---- */

/* A raw segment of two blocks of 100 bytes, slots 7 and 8, at the data's
 * start. */
static gd_entry
write_segment(fixture *t, uint8_t plain[200])
{
    uint8_t raw[GD_SEGMENT_HEADER + 200];
    const gd_segment_header header = {
        .codec = GD_CODEC_NONE, .blocks = 2, .first_slot = 7,
        .plain_length = 200, .stored_length = 200};
    fill_random(plain, 200, 3);
    struct iovec piece = {plain, 200};
    gd_segment_header_encode(&header, t->group->bounds.seed, &piece, 1, raw);
    memcpy(raw + GD_SEGMENT_HEADER, plain, 200);
    scratch_write(&t->x, NAME, raw, sizeof raw, 8192);
    return (gd_entry){.segment = 8192,
                      .plain_offset = 100,
                      .plain_length = 100,
                      .stored_length = 200,
                      .state = GD_ENTRY_LIVE};
}

TEST_WITH(test_read_segment, setup(&t), teardown(&t))
{
    static uint8_t in[GD_SEGMENT_HEADER + GD_SEGMENT_MAX];
    static uint8_t plain[GD_SEGMENT_MAX];
    uint8_t wanted[200];
    gd_segment_header header;
    gd_coder *coder;
    CHECK_INT(gd_coder_open(t.x.env, &coder, &t.x.err), GD_OK);
    const gd_entry good = write_segment(&t, wanted);
    CHECK_INT(gd_group_read_segment(t.group, &good, 8, coder, in, plain,
                                    &header, &t.x.err),
              GD_OK);
    CHECK(memcmp(plain, wanted, 200) == 0);
    CHECK(gd_segment_intact(in, &header, t.group->bounds.seed));
    CHECK_INT(gd_group_read_segment(t.group, &good, 7, coder, in, plain,
                                    &header, &t.x.err),
              GD_OK);
    /* The entry belongs to another segment. */
    gd_entry bad[6];
    for (int i = 0; i < 6; i++) {
        bad[i] = good;
    }
    bad[0].stored_length--;
    bad[1].codec = GD_CODEC_LZ4;
    bad[2].plain_offset = 101;
    bad[3].segment += 4;
    bad[4].segment = 1 << 30; /* behind the end */
    bad[5].stored_length++;
    for (int i = 0; i < 6; i++) {
        CHECK_INT(gd_group_read_segment(t.group, &bad[i], 8, coder, in, plain,
                                        &header, &t.x.err),
                  GD_CORRUPT);
        CHECK_CONTAINS(t.x.err.text, NAME);
    }
    static const uint32_t others[] = {0, 6, 9, 63, UINT32_MAX};
    for (int i = 0; i < 5; i++) {
        CHECK_INT(gd_group_read_segment(t.group, &good, others[i], coder, in,
                                        plain, &header, &t.x.err),
                  GD_CORRUPT);
    }
    gd_coder_close(t.x.env, coder);
}

/* ---- creation ---- */

static gd_status
create(fixture *t, uint32_t *number)
{
    return gd_group_create(t->x.env, t->x.root, &t->x.params, &gd_global_scope,
                           t->locks, number, &t->x.err);
}

TEST_WITH(test_create_counts_up, setup(&t), teardown(&t))
{
    uint32_t number;
    char name[GD_NAME_SIZE];
    CHECK_INT(create(&t, &number), GD_OK);
    CHECK_INT(number, 2);
    gd_names_group(7, name);
    scratch_write(&t.x, name, "", 0, 0); /* any file takes its number */
    scratch_write(&t.x, "groups/zzzz", "", 0, 0);
    CHECK_INT(create(&t, &number), GD_OK);
    CHECK_INT(number, 8);
    for (uint32_t n = 1; n <= 8; n++) {
        gd_status mine = n <= 2 || n == 8 ? GD_BUSY : GD_OK;
        CHECK_INT(gd_locks_lease(t.locks, n, NULL), mine);
    }
    gd_names_group(GD_MAX_GROUP, name);
    scratch_write(&t.x, name, "", 0, 0);
    CHECK_INT(create(&t, &number), GD_NOSPACE);
}

/* Another writer has its lease, or its name was taken after the directory was
 * listed: the next number is used. */
TEST_WITH(test_create_beside_others, setup(&t), teardown(&t))
{
    gd_locks *other;
    uint32_t number;
    CHECK_INT(gd_locks_open(t.x.env, t.x.root, &other, &t.x.err), GD_OK);
    CHECK_INT(gd_locks_lease(other, 2, NULL), GD_OK);
    CHECK_INT(create(&t, &number), GD_OK);
    CHECK_INT(number, 3);
    fault_env_fail(&t.x.f, FAULT_LINKAT, 1, EEXIST, false);
    CHECK_INT(create(&t, &number), GD_OK);
    CHECK_INT(number, 5);
    CHECK_INT(gd_locks_lease(other, 4, NULL), GD_OK); /* was given back */
    CHECK_INT(gd_locks_lease(other, 5, NULL), GD_BUSY);
    CHECK_INT(scratch_count(&t.x, "spool", "", NULL), 0);
    gd_locks_close(other);
}

/* Processes that create at the same time get groups of their own. */
TEST(test_create_under_contention)
{
    enum { PROCESSES = 4, EACH = 25 };
    fixture t;
    int pipes[2];
    uint32_t number;
    pid_t children[PROCESSES];
    static bool seen[2 + PROCESSES * EACH * 3];
    setup(&t);
    memset(seen, 0, sizeof seen);
    REQUIRE(pipe(pipes) == 0);
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            gd_locks *own;
            if (gd_locks_open(t.x.env, t.x.root, &own, NULL) != GD_OK) {
                _exit(1);
            }
            for (int k = 0; k < EACH; k++) {
                number = 0;
                (void)gd_group_create(t.x.env, t.x.root, &t.x.params,
                                      &gd_global_scope, own, &number, NULL);
                if (write(pipes[1], &number, sizeof number) < 0) {
                    _exit(1);
                }
            }
            pause(); /* the leases stay its own until it is killed */
        }
    }
    for (int i = 0; i < PROCESSES * EACH; i++) {
        REQUIRE(read(pipes[0], &number, sizeof number) == sizeof number);
        REQUIRE(number >= 2 && number < sizeof seen);
        CHECK(!seen[number]);
        seen[number] = true;
        gd_group *group;
        if (CHECK_INT(gd_group_open(t.x.env, t.x.root, &t.x.params, number,
                                    O_RDONLY, &group, &t.x.err),
                      GD_OK)) {
            gd_group_close(group);
        }
    }
    CHECK_INT(scratch_count(&t.x, "spool", "", NULL), 0);
    CHECK_INT(scratch_count(&t.x, "groups", "", NULL), 1 + PROCESSES * EACH);
    for (int i = 0; i < PROCESSES; i++) {
        kill(children[i], SIGKILL);
        waitpid(children[i], NULL, 0);
    }
    close(pipes[0]);
    close(pipes[1]);
    teardown(&t);
}

/* Each of the steps fails: there is no group, or a whole one; never a lease
 * that is kept, nor a spool file. */
TEST(test_create_fails)
{
    static const struct {
        fault_call call;
        int sys_errno;
        gd_status wanted;
    } cases[] = {
        {FAULT_LIST, EIO, GD_IO},          {FAULT_LOCK, EIO, GD_IO},
        {FAULT_RANDOM, EIO, GD_IO},        {FAULT_OPENAT, ENOSPC, GD_NOSPACE},
        {FAULT_PWRITEV, ENOSPC, GD_NOSPACE},
        {FAULT_FALLOCATE, ENOSPC, GD_NOSPACE},
        {FAULT_FSYNC, EIO, GD_IO},         {FAULT_LINKAT, EIO, GD_IO},
        {FAULT_LINKAT, EDQUOT, GD_NOSPACE},
    };
    fixture t;
    uint32_t number;
    setup(&t);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fault_env_fail(&t.x.f, cases[i].call, 1, cases[i].sys_errno, false);
        CHECK_INT(create(&t, &number), cases[i].wanted);
        fault_env_heal(&t.x.f);
        CHECK_INT(scratch_count(&t.x, "spool", "", NULL), 0);
        CHECK_INT(scratch_count(&t.x, "groups", "", NULL), 1);
        CHECK_INT(gd_locks_lease(t.locks, 2, NULL), GD_OK);
        gd_locks_unlease(t.locks, 2);
    }
    /* The call is interrupted by a signal, which is no failure. */
    fault_env_fail(&t.x.f, FAULT_FALLOCATE, 1, EINTR, false);
    CHECK_INT(create(&t, &number), GD_OK);
    CHECK_INT(number, 2);
    fault_env_heal(&t.x.f);
    /* Its name may not be durable: the group is there, but it is not
     * returned. */
    fault_env_fail(&t.x.f, FAULT_FSYNC, 2, EIO, false);
    CHECK_INT(create(&t, &number), GD_IO);
    CHECK(scratch_exists(&t.x, "groups/00000003"));
    CHECK_INT(gd_locks_lease(t.locks, 3, NULL), GD_OK);
    CHECK_INT(create(&t, &number), GD_OK);
    CHECK_INT(number, 4);
    teardown(&t);
}
