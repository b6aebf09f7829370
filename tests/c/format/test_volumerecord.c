/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_volumerecord.c - the records of a volume's journal: known bytes, each
 * bound, and each damaged byte.
 */
#include "engine/format/volumerecord.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define SEED UINT64_C(0x0102030405060708)
#define SIZE UINT64_C(0x100000)

static const gd_record example = {.kind = GD_RECORD_BYTES,
                                  .sequence = 0x1112131415161718,
                                  .offset = 0xff000,
                                  .length = 0x1000,
                                  .durable = 0x2122232425262728,
                                  .checksum = 0x3132333435363738};

static bool
decode(const uint8_t raw[GD_RECORD_HEAD], uint64_t seed, uint64_t size)
{
    gd_record record;
    uint8_t *copy = malloc(GD_RECORD_HEAD);
    memcpy(copy, raw, GD_RECORD_HEAD);
    bool good = gd_record_decode(copy, seed, size, &record);
    free(copy);
    return good;
}

static bool
allowed(uint32_t kind, uint64_t offset, uint64_t length)
{
    uint8_t raw[GD_RECORD_HEAD];
    const gd_record record = {.kind = (gd_record_kind)kind,
                              .offset = offset,
                              .length = length};
    gd_record_encode(&record, SEED, raw);
    return decode(raw, SEED, SIZE);
}

TEST(test_known_bytes)
{
    static const golden wanted[] = {
        {0, "47445652" "01000000" "1817161514131211" "00f00f0000000000"
            "0010000000000000" "2827262524232221" "3837363534333231"
            "1a9c742faffb2d9b"}};
    uint8_t raw[GD_RECORD_HEAD];
    gd_record again;
    gd_record_encode(&example, SEED, raw);
    CHECK(GOLDEN_MATCHES(raw, sizeof raw, wanted));
    CHECK(gd_record_decode(raw, SEED, SIZE, &again));
    CHECK(again.kind == example.kind && again.sequence == example.sequence &&
          again.offset == example.offset && again.length == example.length &&
          again.durable == example.durable &&
          again.checksum == example.checksum);
}

TEST(test_damaged_bytes)
{
    uint8_t raw[GD_RECORD_HEAD];
    gd_record_encode(&example, SEED, raw);
    for (size_t i = 0; i < 8 * sizeof raw; i++) {
        raw[i / 8] ^= (uint8_t)(1 << i % 8);
        CHECK(!decode(raw, SEED, SIZE));
        raw[i / 8] ^= (uint8_t)(1 << i % 8);
    }
    CHECK(decode(raw, SEED, SIZE));
    CHECK(!decode(raw, SEED + 1, SIZE)); /* another journal's */
    CHECK(!decode(raw, SEED, SIZE - 1)); /* beyond the volume's end */
}

TEST(test_bounds)
{
    CHECK(!allowed(0, 0, 1));
    CHECK(!allowed(5, 0, 1));
    CHECK(!allowed(UINT32_MAX, 0, 1));
    for (uint32_t kind = GD_RECORD_BYTES; kind <= GD_RECORD_ZEROS; kind++) {
        CHECK(!allowed(kind, 0, 0));
        CHECK(allowed(kind, 0, 1));
        CHECK(allowed(kind, SIZE - 1, 1));
        CHECK(!allowed(kind, SIZE - 1, 2));
        CHECK(!allowed(kind, SIZE, 1));
        CHECK(!allowed(kind, SIZE, 0));
        CHECK(!allowed(kind, UINT64_MAX, 1));
        CHECK(!allowed(kind, 1, UINT64_MAX));
        CHECK(!allowed(kind, UINT64_MAX, UINT64_MAX));
        CHECK(allowed(kind, SIZE - 65536, 65536));
        CHECK(allowed(kind, 0, 65537) == (kind == GD_RECORD_ZEROS));
        CHECK(allowed(kind, 0, SIZE) == (kind == GD_RECORD_ZEROS));
    }
    CHECK(allowed(GD_RECORD_MARK, 0, 1));
    CHECK(allowed(GD_RECORD_MARK, SIZE, UINT64_MAX));
    CHECK(!allowed(GD_RECORD_MARK, 0, 0));
    CHECK(allowed(GD_RECORD_STORED, 0, 0));
    CHECK(!allowed(GD_RECORD_STORED, 1, 0));
    CHECK(!allowed(GD_RECORD_STORED, 0, 1));
}

TEST(test_sizes)
{
    gd_record record = {.kind = GD_RECORD_BYTES};
    static const uint64_t sizes[][2] = {
        {1, 64}, {7, 64}, {8, 64}, {9, 72}, {65536, 65592}, {65529, 65592}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        record.length = sizes[i][0];
        CHECK_INT(gd_record_size(&record), sizes[i][1]);
    }
    record.kind = GD_RECORD_ZEROS;
    CHECK_INT(gd_record_size(&record), GD_RECORD_HEAD);
    record.kind = GD_RECORD_MARK;
    record.length = UINT64_MAX;
    CHECK_INT(gd_record_size(&record), GD_RECORD_HEAD);
}
