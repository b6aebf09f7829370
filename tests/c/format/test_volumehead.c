/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_volumehead.c - the head of a volume's journal: known bytes, each bound,
 * each damaged byte, and hostile counts.
 */
#include "engine/format/volumehead.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define NAME "volumes/disk/journal-00000007"

enum { CHECKED = GD_VOLUME_HEAD - 8 };

static gd_error err;

static gd_volume_head
example(void)
{
    gd_volume_head head = {.journal = 7,
                           .needed = 5,
                           .before = 0x1122334455667788,
                           .before_durable = 0x1122334455660008,
                           .seed = 0x0102030405060708,
                           .size = 0x50000,
                           .base_size = 0x40200,
                           .part_size = 0x10000,
                           .state = GD_VOLUME_READY,
                           .created = 0x65000000,
                           .marks = 2,
                           .marks_checksum = 0xa1a2a3a4a5a6a7a8,
                           .project = "proj",
                           .source = "image_-1",
                           .counters = {.read = 1,
                                        .written = 2,
                                        .zeroed = 3,
                                        .flushes = 4,
                                        .checkpoints = 5,
                                        .unique = 6,
                                        .duplicate = 7,
                                        .zero = 8,
                                        .overwritten = 9,
                                        .skipped = 10,
                                        .prefetches = 11,
                                        .prefetched = 12}};
    for (int i = 0; i < GD_ID_SIZE; i++) {
        head.repository_id[i] = (uint8_t)(0x10 + i);
        head.volume_id[i] = (uint8_t)(0x20 + i);
        head.scope.id[i] = (uint8_t)(0x30 + i);
    }
    return head;
}

/* The memory is exactly as long as a head, so that the address sanitizer
 * detects reads beyond it. */
static gd_status
decode(const uint8_t in[GD_VOLUME_HEAD], gd_volume_head *head)
{
    uint8_t *copy = malloc(GD_VOLUME_HEAD);
    memcpy(copy, in, GD_VOLUME_HEAD);
    gd_status s = gd_volume_head_decode(copy, NAME, head, &err);
    free(copy);
    return s;
}

static void
seal(uint8_t raw[GD_VOLUME_HEAD])
{
    gd_put64(raw + CHECKED, gd_checksum(raw, CHECKED, 0));
}

static gd_status
decode_sealed(uint8_t raw[GD_VOLUME_HEAD])
{
    gd_volume_head head;
    seal(raw);
    return decode(raw, &head);
}

TEST(test_known_bytes)
{
    static const golden wanted[] = {
        {0, "4744564f4c4a0000" "0100" "0000" "07000000"
            "101112131415161718191a1b1c1d1e1f"
            "202122232425262728292a2b2c2d2e2f"
            "303132333435363738393a3b3c3d3e3f"
            "0807060504030201" "0000050000000000" "0002040000000000"
            "0000010000000000" "02000000" "05000000" "8877665544332211"
            "0000006500000000" "02000000" "04000000" "a8a7a6a5a4a3a2a1"},
        {136, "70726f6a"},
        {264, "696d6167655f2d31"},
        {392, "0100000000000000" "0200000000000000" "0300000000000000"
              "0400000000000000" "0500000000000000" "0600000000000000"
              "0700000000000000" "0800000000000000" "0900000000000000"
              "0a00000000000000" "0b00000000000000" "0c00000000000000"},
        {520, "0800665544332211"},
        {4088, "175743680150744d"}};
    const gd_volume_head head = example();
    gd_volume_head again;
    uint8_t raw[GD_VOLUME_HEAD];
    memset(raw, 0x5a, sizeof raw);
    gd_volume_head_encode(&head, raw);
    CHECK(GOLDEN_MATCHES(raw, sizeof raw, wanted));
    CHECK_INT(decode(raw, &again), GD_OK);
    uint8_t back[GD_VOLUME_HEAD];
    gd_volume_head_encode(&again, back);
    CHECK(memcmp(raw, back, sizeof raw) == 0);
    CHECK(strcmp(again.project, "proj") == 0);
    CHECK(strcmp(again.source, "image_-1") == 0);
    CHECK_INT(again.counters.overwritten, 9);
    CHECK_INT(again.counters.prefetched, 12);
    gd_put64(raw + 520, 0); /* up to the end */
    seal(raw);
    CHECK_INT(decode(raw, &again), GD_OK);
    CHECK(again.before_durable == head.before);
}

TEST(test_damaged_bytes)
{
    const gd_volume_head head = example();
    gd_volume_head again;
    uint8_t raw[GD_VOLUME_HEAD];
    gd_volume_head_encode(&head, raw);
    for (size_t i = 0; i < sizeof raw; i++) {
        for (int bit = 0; bit < 8; bit++) {
            raw[i] ^= (uint8_t)(1 << bit);
            gd_status s = decode(raw, &again);
            /* Another version is reported before any other field is used. */
            bool good = s == GD_CORRUPT ||
                        (s == GD_VERSION && (i == 8 || i == 9));
            if (!CHECK(good)) {
                fprintf(stderr, "byte %zu, bit %d: %d\n", i, bit, (int)s);
            }
            CHECK_CONTAINS(err.text, NAME);
            raw[i] ^= (uint8_t)(1 << bit);
        }
    }
    CHECK_INT(decode(raw, &again), GD_OK);
}

typedef struct bound {
    unsigned at;    /* offset of the field */
    unsigned bytes; /* 4 or 8 */
    uint64_t value;
    gd_status status;
} bound;

TEST(test_bounds)
{
    static const bound bounds[] = {
        {12, 4, 0, GD_CORRUPT},             /* no journal's number */
        {12, 4, 4, GD_CORRUPT},             /* less than the needed one */
        {12, 4, 5, GD_OK},
        {12, 4, UINT32_MAX, GD_OK},
        {100, 4, 0, GD_CORRUPT},            /* needed */
        {100, 4, 7, GD_OK},
        {100, 4, 8, GD_CORRUPT},
        {72, 8, 0, GD_CORRUPT},             /* size */
        {72, 8, 0x50001, GD_CORRUPT},
        {72, 8, 0x40000, GD_CORRUPT},       /* less than the base's */
        {72, 8, 0x40200, GD_OK},
        {72, 8, UINT64_C(1) << 46, GD_OK},
        {72, 8, (UINT64_C(1) << 46) + 512, GD_CORRUPT},
        {72, 8, UINT64_MAX - 511, GD_CORRUPT},
        {80, 8, 0, GD_OK},                  /* base */
        {80, 8, 0x50000, GD_OK},
        {80, 8, 0x50001, GD_CORRUPT},
        {80, 8, UINT64_MAX, GD_CORRUPT},
        {88, 8, 0, GD_CORRUPT},             /* part */
        {88, 8, 0x8000, GD_CORRUPT},
        {88, 8, 0x18000, GD_CORRUPT},
        {88, 8, UINT64_C(1) << 40, GD_CORRUPT}, /* two marks, one part */
        {88, 8, UINT64_C(1) << 41, GD_CORRUPT},
        {88, 8, UINT64_C(1) << 63, GD_CORRUPT},
        {96, 4, 0, GD_CORRUPT},             /* state */
        {96, 4, 1, GD_OK},
        {96, 4, 3, GD_OK},
        {96, 4, 4, GD_CORRUPT},
        {96, 4, UINT32_MAX, GD_CORRUPT},
        {120, 4, 5, GD_OK},                 /* marks */
        {120, 4, 6, GD_CORRUPT},
        {120, 4, UINT32_MAX, GD_CORRUPT},
        {124, 4, 4, GD_OK},                 /* the length of "proj" */
        {124, 4, 3, GD_CORRUPT},
        {124, 4, 128, GD_CORRUPT},
        {124, 4, 129, GD_CORRUPT},
        {124, 4, UINT32_MAX, GD_CORRUPT},
        {264, 4, 0x2f2e2e2f, GD_CORRUPT},   /* no image's id */
        {264, 8, 0, GD_OK},
        {520, 8, 0x1122334455667788, GD_OK}, /* durable before */
        {520, 8, 0x1122334455667789, GD_CORRUPT},
    };
    const gd_volume_head head = example();
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        uint8_t raw[GD_VOLUME_HEAD];
        gd_volume_head_encode(&head, raw);
        if (bounds[i].bytes == 4) {
            gd_put32(raw + bounds[i].at, (uint32_t)bounds[i].value);
        } else {
            gd_put64(raw + bounds[i].at, bounds[i].value);
        }
        if (!CHECK_INT(decode_sealed(raw), bounds[i].status)) {
            fprintf(stderr, "offset %u, value %" PRIx64 "\n", bounds[i].at,
                    bounds[i].value);
        }
        if (bounds[i].status != GD_OK) {
            CHECK_CONTAINS(err.text, NAME);
        }
    }
}

TEST(test_other_bounds)
{
    gd_volume_head head = example(), again;
    uint8_t raw[GD_VOLUME_HEAD];
    gd_volume_head_encode(&head, raw);
    memset(raw + 32, 0, GD_ID_SIZE);
    CHECK_INT(decode_sealed(raw), GD_CORRUPT); /* no volume's id */
    gd_volume_head_encode(&head, raw);
    gd_put16(raw + 8, 2);
    CHECK_INT(decode_sealed(raw), GD_VERSION);
    CHECK_CONTAINS(err.text, NAME " has format version 2");
    gd_volume_head_encode(&head, raw);
    gd_put16(raw + 10, 9); /* a minor version changes nothing */
    CHECK_INT(decode_sealed(raw), GD_OK);
    /* Fields of full length have no zero behind them. */
    gd_volume_head_encode(&head, raw);
    memset(raw + 136, 'p', 128 + 128);
    gd_put32(raw + 124, 128);
    seal(raw);
    CHECK_INT(decode(raw, &again), GD_OK);
    CHECK_INT(strlen(again.project), 128);
    CHECK_INT(strlen(again.source), 128);
    /* The largest volume has the most parts. */
    head.size = GD_VOLUME_MAX_SIZE;
    head.part_size = UINT64_C(1) << 16;
    head.marks = 1U << 30;
    gd_volume_head_encode(&head, raw);
    CHECK_INT(decode(raw, &again), GD_OK);
    CHECK_INT(gd_volume_head_records_start(again.marks),
              4096 + (INT64_C(1) << 34));
    CHECK_INT(gd_volume_head_parts(&again), 1 << 30);
    head.marks++;
    gd_volume_head_encode(&head, raw);
    CHECK_INT(decode(raw, &again), GD_CORRUPT);
}

/* ---- marks ---- */

static gd_status
decode_marks(gd_volume_head *head, const gd_volume_mark *marks,
             uint32_t count)
{
    size_t bytes = (size_t)count * GD_VOLUME_MARK;
    uint8_t *raw = malloc(bytes + (bytes == 0));
    gd_volume_mark *got = malloc(count * sizeof *got + (count == 0));
    gd_volume_marks_encode(marks, count, raw);
    head->marks = count;
    head->marks_checksum = gd_checksum(raw, bytes, head->seed);
    gd_status s = gd_volume_marks_decode(raw, head, NAME, got, &err);
    CHECK(s != GD_OK || count == 0 ||
          memcmp(got, marks, count * sizeof *got) == 0);
    free(raw);
    free(got);
    return s;
}

TEST(test_marks)
{
    static const golden wanted[] = {{0, "01000000000000000300000000000000"
                                        "0400000000000000ffffffffffffffff"}};
    static const gd_volume_mark good[] = {{1, 3}, {4, UINT64_MAX}};
    static const gd_volume_mark bad[][2] = {
        {{1, 0}, {4, 1}},          /* no edition */
        {{4, 1}, {1, 1}},          /* out of order */
        {{1, 1}, {1, 2}},          /* twice */
        {{1, 1}, {5, 1}},          /* no such part */
        {{1, 1}, {UINT64_MAX, 1}},
    };
    uint8_t raw[32];
    gd_volume_head head = example();
    gd_volume_marks_encode(good, 2, raw);
    CHECK(GOLDEN_MATCHES(raw, sizeof raw, wanted));
    CHECK_INT(decode_marks(&head, good, 2), GD_OK);
    CHECK_INT(decode_marks(&head, good, 0), GD_OK);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_INT(decode_marks(&head, bad[i], 2), GD_CORRUPT);
        CHECK_CONTAINS(err.text, NAME);
    }
}

TEST(test_damaged_marks)
{
    static const gd_volume_mark marks[] = {{0, 3}, {4, 1}};
    gd_volume_mark got[2];
    uint8_t raw[32];
    gd_volume_head head = example();
    gd_volume_marks_encode(marks, 2, raw);
    head.marks_checksum = gd_checksum(raw, sizeof raw, head.seed);
    for (size_t i = 0; i < sizeof raw; i++) {
        raw[i] ^= 1;
        CHECK_INT(gd_volume_marks_decode(raw, &head, NAME, got, &err),
                  GD_CORRUPT);
        raw[i] ^= 1;
    }
    CHECK_INT(gd_volume_marks_decode(raw, &head, NAME, got, &err), GD_OK);
    head.seed++; /* those of another journal */
    CHECK_INT(gd_volume_marks_decode(raw, &head, NAME, got, &err),
              GD_CORRUPT);
}

TEST(test_where_records_begin)
{
    CHECK_INT(gd_volume_head_records_start(0), 4096);
    CHECK_INT(gd_volume_head_records_start(1), 8192);
    CHECK_INT(gd_volume_head_records_start(256), 8192);
    CHECK_INT(gd_volume_head_records_start(257), 12288);
    CHECK_INT(gd_volume_head_records_start(UINT32_MAX),
              4096 + (INT64_C(1) << 36));
}
