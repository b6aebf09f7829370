/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_indexhead.c - files of the exact index: their bytes are those that
 * format-derived.rst describes, and others are refused.
 */
#include "engine/format/indexhead.h"

#include "engine/base/coding.h"
#include "engine/format/index.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

static const uint8_t CATALOG[GD_ID_SIZE] = "a catalog's id";

static gd_index_head
head_of(gd_index_kind kind, uint64_t items)
{
    gd_index_head head = {.id = {kind, 3, 5, 0x1122334455667788},
                          .items = items, .seed = 77,
                          .flags = GD_INDEX_LARGE};
    memcpy(head.catalog_id, CATALOG, GD_ID_SIZE);
    return head;
}

TEST(test_bytes)
{
    uint8_t raw[GD_INDEX_HEAD];
    char hex[17];
    gd_index_head head = head_of(GD_INDEX_RUN, 0x0102030405), back;
    gd_error err;
    gd_index_head_encode(&head, raw);
    for (int i = 0; i < 8; i++) {
        snprintf(hex + 2 * i, 3, "%02x",
                 (unsigned)(gd_checksum(raw, 504, 0) >> 8 * i & 0xff));
    }
    const golden pieces[] = {
        {0, "4744494e44455800"},
        {8, "01000000"},
        {12, "02000000"},
        {16, "6120636174616c6f6727732069640000"},
        {32, "8877665544332211"},
        {40, "0300000005000000"},
        {48, "0504030201000000"},
        {56, "4d00000000000000"},
        {64, "01000000"},
        {504, hex},
    };
    CHECK(GOLDEN_MATCHES(raw, sizeof raw, pieces));
    uint64_t length =
    gd_index_head_frame_start(&head, gd_index_head_frames(&head));
    CHECK_INT(gd_index_head_decode(raw, &head.id, CATALOG, length, &back,
                                   &err), GD_OK);
    CHECK(back.items == head.items && back.seed == head.seed &&
          back.flags == head.flags);
}

/* Every byte is checked, and so are name, catalog and length. */
TEST(test_what_is_refused)
{
    uint8_t raw[GD_INDEX_HEAD];
    gd_index_head head = head_of(GD_INDEX_RUN, 6000), back;
    gd_error err;
    gd_index_head_encode(&head, raw);
    uint64_t length = 512 + 6000 * 13 + 2 * 8;
    CHECK_INT(gd_index_head_decode(raw, &head.id, CATALOG, length, &back,
                                   &err), GD_OK);
    for (size_t i = 0; i < sizeof raw; i++) {
        raw[i] ^= 0x40;
        gd_status wanted = i == 8 || i == 9 ? GD_VERSION : GD_CORRUPT;
        CHECK_INT(gd_index_head_decode(raw, &head.id, CATALOG, length, &back,
                                       &err), wanted);
        CHECK_CONTAINS(err.text, "index/run-03-0005.1122334455667788");
        raw[i] ^= 0x40;
    }
    for (int i = -1; i < 2; i += 2) {
        CHECK_INT(gd_index_head_decode(raw, &head.id, CATALOG,
                                       length + (uint64_t)i, &back, &err),
                  GD_CORRUPT);
    }
    const gd_index_id others[] = {
        {GD_INDEX_GONE, 3, 5, 0x1122334455667788},
        {GD_INDEX_RUN, 4, 5, 0x1122334455667788},
        {GD_INDEX_RUN, 3, 4, 0x1122334455667788},
        {GD_INDEX_RUN, 3, 5, 0x1122334455667789}};
    for (size_t i = 0; i < 4; i++) {
        CHECK_INT(gd_index_head_decode(raw, &others[i], CATALOG, length, &back,
                                       &err), GD_CORRUPT);
    }
    CHECK_INT(gd_index_head_decode(raw, &head.id,
                                   (const uint8_t *)"another catalog.", length,
                                   &back, &err), GD_CORRUPT);
    /* No number of items overflows. */
    static const uint64_t many[] = {UINT64_MAX, UINT64_MAX / 13,
                                    UINT64_C(1) << 48, UINT64_MAX / 13 + 46};
    for (size_t i = 0; i < 4; i++) {
        head.items = many[i];
        gd_index_head_encode(&head, raw);
        CHECK_INT(gd_index_head_decode(raw, &head.id, CATALOG, length, &back,
                                       &err), GD_CORRUPT);
    }
}

TEST(test_packed)
{
    uint8_t raw[GD_INDEX_HEAD];
    gd_index_head head = head_of(GD_INDEX_SHARD, 5000), back;
    gd_error err;
    head.length = 512 + 32768 + 1000;
    gd_index_head_encode(&head, raw);
    CHECK_INT(gd_get64(raw + 72), head.length);
    CHECK_INT(gd_index_head_decode(raw, &head.id, CATALOG, head.length, &back,
                                   &err), GD_OK);
    CHECK(gd_index_head_is_packed(&back));
    CHECK_INT(back.items, 5000);
    CHECK_INT(gd_index_head_frames(&back), 2);
    CHECK_INT(gd_index_head_frame_start(&back, 1), 512 + 32768);
    CHECK_INT(gd_index_head_frame_start(&back, 2), head.length);
    for (int i = -1; i < 2; i += 2) {
        CHECK_INT(gd_index_head_decode(raw, &head.id, CATALOG,
                                       head.length + (uint64_t)i, &back, &err),
                  GD_CORRUPT);
    }
    /* The frames cannot have so few items, nor so many. */
    static const uint64_t impossible[] = {1, 0, 8193, UINT64_MAX};
    for (size_t i = 0; i < 4; i++) {
        head.items = impossible[i];
        gd_index_head_encode(&head, raw);
        CHECK_INT(gd_index_head_decode(raw, &head.id, CATALOG, head.length,
                                       &back, &err), GD_CORRUPT);
    }
    static const uint64_t lengths[] = {0, 511, 512};
    for (size_t i = 0; i < 3; i++) {
        head.items = i == 2 ? 0 : 1;
        head.length = lengths[i];
        gd_index_head_encode(&head, raw);
        CHECK_INT(gd_index_head_decode(raw, &head.id, CATALOG, head.length,
                                       &back, &err),
                  i == 2 ? GD_OK : GD_CORRUPT);
    }
    CHECK_INT(gd_index_head_frames(&back), 0);
}

TEST(test_names)
{
    static const char *const bad[] = {
        "shard-03-0005.112233445566778", "shard-03-0005.11223344556677889",
        "shard-03-0008.1122334455667788", "shard-11-0000.1122334455667788",
        "shards-03-0005.1122334455667788", "-03-0005.1122334455667788",
        "shard-03-0005-1122334455667788", "shard-3-00005.1122334455667788",
        "shard-03-0005.112233445566778A", "", "-", "shard", "cursors"};
    gd_index_id id;
    char name[GD_NAME_SIZE];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(!gd_names_parse_index(bad[i], &id));
    }
    for (unsigned kind = GD_INDEX_SHARD; kind <= GD_INDEX_NEW; kind++) {
        const gd_index_id made = {(gd_index_kind)kind, 16, 65535, UINT64_MAX};
        gd_names_index(&made, name);
        REQUIRE(gd_names_parse_index(name + 6, &id));
        CHECK(id.kind == made.kind && id.bits == 16 && id.shard == 65535 &&
              id.number == UINT64_MAX);
    }
    CHECK(gd_names_parse_index("shard-00-0000.0000000000000001", &id));
}

/* ---- frames ---- */

static gd_status
check_items(gd_index_kind kind, uint8_t *items, size_t count,
            const uint8_t *before)
{
    gd_index_head head = head_of(kind, count);
    gd_error err;
    head.id.bits = 4;
    head.id.shard = 7;
    gd_index_head_seal_frame(&head, 0, items, count);
    return gd_index_head_require_frame(&head, 0, items, before, &err);
}

TEST(test_records_of_a_frame)
{
    enum { R = GD_INDEX_RECORD };
    const uint64_t key = UINT64_C(0x7123456789abcdef);
    uint8_t items[2 * R + 8], last[R];
    gd_index_put_record(items, key, 1 << 15);
    gd_index_put_record(items + R, key, 2 << 15);
    CHECK_INT(check_items(GD_INDEX_RUN, items, 2, NULL), GD_OK);
    CHECK_INT(check_items(GD_INDEX_GONE, items, 2, NULL), GD_OK);
    CHECK_INT(check_items(GD_INDEX_SHARD, items, 2, NULL), GD_CORRUPT);
    CHECK_INT(check_items(GD_INDEX_SHARD, items, 1, NULL), GD_OK);
    gd_index_put_record(last, key, 1 << 15);
    CHECK_INT(check_items(GD_INDEX_RUN, items, 1, last), GD_CORRUPT);
    gd_index_put_record(last, key + 1, 1 << 15);
    CHECK_INT(check_items(GD_INDEX_RUN, items, 1, last), GD_CORRUPT);
    gd_index_put_record(last, key - 1, 9 << 15);
    CHECK_INT(check_items(GD_INDEX_SHARD, items, 1, last), GD_OK);
    gd_index_put_record(items, key, 5); /* group 0 */
    CHECK_INT(check_items(GD_INDEX_RUN, items, 1, NULL), GD_CORRUPT);
    gd_index_put_record(items, key + (UINT64_C(1) << 60), 1 << 15);
    CHECK_INT(check_items(GD_INDEX_RUN, items, 1, NULL), GD_CORRUPT);
}

TEST(test_pairs_and_cursors_of_a_frame)
{
    uint8_t items[16 + 8];
    gd_put64(items, 1 << 15);
    gd_put64(items + 8, 2 << 15);
    CHECK_INT(check_items(GD_INDEX_PAIRS, items, 1, NULL), GD_OK);
    gd_put64(items + 8, 1 << 15);
    CHECK_INT(check_items(GD_INDEX_PAIRS, items, 1, NULL), GD_CORRUPT);
    gd_put64(items + 8, UINT64_C(1) << 40);
    CHECK_INT(check_items(GD_INDEX_PAIRS, items, 1, NULL), GD_CORRUPT);
    gd_put64(items, 3);
    gd_put64(items + 8, 1 << 15);
    CHECK_INT(check_items(GD_INDEX_PAIRS, items, 1, NULL), GD_CORRUPT);

    gd_put32(items, 1);
    gd_put32(items + 4, 32768);
    gd_put32(items + 8, 2);
    gd_put32(items + 12, 0);
    CHECK_INT(check_items(GD_INDEX_CURSORS, items, 2, NULL), GD_OK);
    gd_put32(items + 4, 32769);
    CHECK_INT(check_items(GD_INDEX_CURSORS, items, 2, NULL), GD_CORRUPT);
    gd_put32(items + 4, 1);
    gd_put32(items + 8, 1);
    CHECK_INT(check_items(GD_INDEX_CURSORS, items, 2, NULL), GD_CORRUPT);
    gd_put32(items, 0);
    CHECK_INT(check_items(GD_INDEX_CURSORS, items, 1, NULL), GD_CORRUPT);
    gd_put32(items, 1 << 25);
    CHECK_INT(check_items(GD_INDEX_CURSORS, items, 1, NULL), GD_CORRUPT);
}

/* A frame in another's place is detected, and so is any changed bit. */
TEST(test_checksum)
{
    uint8_t items[GD_INDEX_RECORD + 8];
    gd_index_head head = head_of(GD_INDEX_RUN, 20000);
    gd_error err;
    head.items = 5040 + 1;
    head.id.bits = head.id.shard = 0;
    gd_index_put_record(items, 99, 1 << 15);
    gd_index_head_seal_frame(&head, 1, items, 1);
    CHECK_INT(gd_index_head_require_frame(&head, 1, items, NULL, &err), GD_OK);
    for (size_t i = 0; i < sizeof items; i++) {
        items[i] ^= 1;
        CHECK_INT(gd_index_head_require_frame(&head, 1, items, NULL, &err),
                  GD_CORRUPT);
        items[i] ^= 1;
    }
    head.seed++;
    CHECK_INT(gd_index_head_require_frame(&head, 1, items, NULL, &err),
              GD_CORRUPT);
    head.seed--;
    gd_index_head_seal_frame(&head, 0, items, 1);
    CHECK_INT(gd_index_head_require_frame(&head, 1, items, NULL, &err),
              GD_CORRUPT);
}

TEST(test_geometry)
{
    CHECK_INT(gd_index_head_frame_items(GD_INDEX_SHARD), 5040);
    CHECK_INT(gd_index_head_frame_items(GD_INDEX_PAIRS), 4095);
    CHECK_INT(gd_index_head_frame_items(GD_INDEX_CURSORS), 8191);
    for (uint64_t items = 0; items < 3 * 5040; items += 5039) {
        gd_index_head head = head_of(GD_INDEX_RUN, items);
        uint64_t frames = (items + 5039) / 5040, sum = 0;
        CHECK_INT(gd_index_head_frames(&head), frames);
        for (uint64_t i = 0; i < frames; i++) {
            CHECK_INT(gd_index_head_frame_start(&head, i),
                      512 + i * (5040 * 13 + 8));
            sum += gd_index_head_items_in(&head, i);
        }
        CHECK_INT(sum, items);
        CHECK_INT(gd_index_head_frame_start(&head, frames),
                  512 + items * 13 + frames * 8);
    }
}
