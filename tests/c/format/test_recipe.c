/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_recipe.c - recipes: known bytes, merging into one extent, many pages,
 * seeking, and that damaged, exchanged or hostile pages are refused.
 */
#include "engine/format/recipe.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define NAME "images/image_-1"
#define ID "image_-1"

typedef struct fixture {
    scratch x;
    int fd;
    gd_recipe_writer *writer;
    gd_recipe_header header;
    gd_recipe recipe;
    uint8_t transaction_id[GD_ID_SIZE];
} fixture;

static void
begin(fixture *t)
{
    gd_error *err = &t->x.err;
    CHECK_INT(gd_open(t->x.env, t->x.root, NAME, O_RDWR | O_CREAT | O_TRUNC,
                      0600, &t->fd, err),
              GD_OK);
    CHECK_INT(gd_recipe_writer_open(t->x.env, t->fd, NAME, t->transaction_id,
                                    &t->writer, err),
              GD_OK);
}

static void
setup(fixture *t)
{
    memset(t, 0, sizeof *t);
    scratch_init(&t->x);
    for (int i = 0; i < GD_ID_SIZE; i++) {
        t->transaction_id[i] = (uint8_t)(0x30 + i);
        t->header.scope.id[i] = (uint8_t)(0x80 + i);
        t->header.upload_id[i] = (uint8_t)(0x60 + i);
    }
    memcpy(t->header.transaction_id, t->transaction_id, GD_ID_SIZE);
    strcpy(t->header.image_id, ID);
    strcpy(t->header.project, "proj");
    begin(t);
}

static gd_status
open_recipe(fixture *t)
{
    return gd_recipe_open(t->x.env, t->fd, NAME, &t->x.params, ID, &t->recipe,
                          &t->x.err);
}

static void
finish(fixture *t)
{
    CHECK_INT(gd_recipe_finish(t->writer, &t->x.params, &t->header, &t->x.err),
              GD_OK);
    gd_recipe_writer_close(t->writer);
    t->writer = NULL;
    if (!CHECK_INT(open_recipe(t), GD_OK)) {
        fprintf(stderr, "%s\n", t->x.err.text);
    }
}

static void
teardown(fixture *t)
{
    gd_recipe_writer_close(t->writer);
    t->x.env->close(t->x.env, t->fd);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

static gd_fingerprint
repeated(unsigned n)
{
    gd_fingerprint fp;
    memset(fp.bytes, (int)n, sizeof fp.bytes);
    return fp;
}

static void
add_block(fixture *t, uint32_t group, uint32_t slot, unsigned n,
          uint32_t length)
{
    gd_fingerprint fp = repeated(n);
    CHECK_INT(gd_recipe_add_block(t->writer, (gd_address){group, slot}, &fp,
                                  length, &t->x.err),
              GD_OK);
}

static void
add_zeros(fixture *t, uint64_t length)
{
    CHECK_INT(gd_recipe_add_zeros(t->writer, length, &t->x.err), GD_OK);
}

static bool
same_extent(const gd_extent *a, const gd_extent *b)
{
    return a->offset == b->offset && a->length == b->length &&
           a->group == b->group && a->slot == b->slot &&
           a->blocks == b->blocks && a->kind == b->kind &&
           a->digest == b->digest;
}

/* ---- writing ---- */

static void
write_known(fixture *t)
{
    add_zeros(t, 4096);
    add_zeros(t, 0);
    add_zeros(t, 4096);
    add_block(t, 5, 17, 1, 4096);
    add_block(t, 5, 18, 2, 4096);
    add_block(t, 6, 3, 3, 100);
    CHECK_INT(gd_recipe_length(t->writer), 16484);
    t->header.new_bytes = 4196;
    t->header.stored_bytes = 3000;
    t->header.created = 1700000000;
    finish(t);
}

static fixture t;

TEST_WITH(test_known_bytes, setup(&t), teardown(&t))
{
    static const golden first[] = {
        {0, "474452454349504501"},
        {16, "0102030405060708090a0b0c0d0e0f10"
             "808182838485868788898a8b8c8d8e8f"
             "303132333435363738393a3b3c3d3e3f"
             "606162636465666768696a6b6c6d6e6f6440"},
        {89, "200000000000006410000000000000b80b00000000000003"},
        {120, "02"},
        {129, "f15365000000000800040000000000696d6167655f2d31"},
        {272, "70726f6a"},
        {4088, "8a504e714f33d084"}};
    static const golden second[] = {
        {0, "0100000003"},
        {17, "20"},
        {49, "20"},
        {57, "2000000000000005000000110000000200000001000000"
             "c666f9c7478ca43e004000000000000064"},
        {104, "0600000003000000010000000100000039fcc46addcaf070"},
        {4088, "fd8df4225b5ed112"}};
    uint8_t raw[8192];
    write_known(&t);
    CHECK_INT(scratch_size(&t.x, NAME), sizeof raw);
    scratch_read(&t.x, NAME, raw, sizeof raw, 0);
    CHECK(GOLDEN_MATCHES(raw, 4096, first));
    CHECK(GOLDEN_MATCHES(raw + 4096, 4096, second));
    const gd_recipe_header *back = &t.recipe.header;
    CHECK_INT(back->size, 16484);
    CHECK_INT(back->zero_bytes, 8192);
    CHECK_INT(back->extents, 3);
    CHECK_INT(back->fragments, 2);
    CHECK(memcmp(back, &t.header, sizeof t.header) == 0);
}

/* An invalid hash is ignored, and the image can be read all the same. */
TEST_WITH(test_hash, setup(&t), teardown(&t))
{
    static const golden known[] = {{0, "06000200736861353132"}, {36, "abcd"}};
    uint8_t raw[4096];
    strcpy(t.header.hash.name, "sha512");
    memcpy(t.header.hash.value, "\xab\xcd", 2);
    t.header.hash.length = 2;
    add_zeros(&t, 77);
    finish(&t);
    scratch_read(&t.x, NAME, raw, sizeof raw, 0);
    CHECK(GOLDEN_MATCHES(raw + 400, 3688, known));
    CHECK(memcmp(&t.recipe.header, &t.header, sizeof t.header) == 0);
    static const struct {
        uint32_t at, value;
    } bad[] = {{400, 0}, {400, 5}, {400, 33}, {400, 65535}, {402, 0},
               {402, 65}, {402, 65535}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint8_t page[4096];
        memcpy(page, raw, sizeof page);
        gd_put16(page + bad[i].at, (uint16_t)bad[i].value);
        gd_put64(page + 4088, gd_checksum(page, 4088, 0));
        scratch_write(&t.x, NAME, page, sizeof page, 0);
        CHECK_INT(open_recipe(&t), GD_OK);
        CHECK_INT(t.recipe.header.hash.length, 0);
        CHECK_INT(t.recipe.header.hash.name[0], 0);
        CHECK_INT(t.recipe.header.size, 77);
    }
}

TEST_WITH(test_empty_image, setup(&t), teardown(&t))
{
    gd_recipe_page page;
    finish(&t);
    CHECK_INT(scratch_size(&t.x, NAME), 4096);
    CHECK_INT(t.recipe.header.size, 0);
    CHECK_INT(t.recipe.header.extents, 0);
    CHECK_INT(gd_recipe_read_page(&t.recipe, 1, &page, &t.x.err), GD_CORRUPT);
    CHECK_INT(page.number, 0);
}

/* Until the recipe is finished, its first page is no header. */
TEST_WITH(test_incomplete, setup(&t), teardown(&t))
{
    CHECK_INT(open_recipe(&t), GD_CORRUPT);
    for (uint32_t i = 0; i < 3500; i++) {
        add_block(&t, 1 + i % 2, i, i, 512);
    }
    CHECK(scratch_size(&t.x, NAME) > 4096);
    CHECK_INT(open_recipe(&t), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, NAME);
    finish(&t);
}

TEST(test_what_is_merged)
{
    static const struct {
        uint32_t group, slot; /* group 0: zeros */
        uint32_t extents, fragments; /* after it */
    } steps[] = {
        {1, 10, 1, 1}, {1, 11, 1, 1}, {1, 12, 1, 1}, {1, 14, 2, 2},
        {1, 13, 3, 3}, {1, 13, 4, 4}, {2, 14, 5, 5}, {0, 0, 6, 5},
        {0, 0, 6, 5},  {2, 15, 7, 5}, /* continues after the zeros */
        {0, 0, 8, 5},  {2, 17, 9, 6}, {2, 18, 9, 6},
    };
    enum { STEPS = sizeof steps / sizeof steps[0] };
    fixture t;
    setup(&t);
    for (size_t last = 0; last < STEPS; last++) {
        for (size_t i = 0; i <= last; i++) {
            if (steps[i].group == 0) {
                add_zeros(&t, 4096);
            } else {
                add_block(&t, steps[i].group, steps[i].slot, 7, 4096);
            }
        }
        finish(&t);
        CHECK_INT(t.header.extents, steps[last].extents);
        CHECK_INT(t.header.fragments, steps[last].fragments);
        CHECK_INT(t.header.size, (last + 1) * 4096);
        t.x.env->close(t.x.env, t.fd);
        begin(&t);
    }
    teardown(&t);
}

/* 1024 blocks are one extent, the next block begins another, of the same
 * fragment; each digest is of its own blocks. */
TEST_WITH(test_longest_extent, setup(&t), teardown(&t))
{
    static gd_fingerprint fps[3000];
    gd_recipe_page page;
    for (uint32_t i = 0; i < 3000; i++) {
        fps[i] = repeated(i);
        add_block(&t, 4, 100 + i, i, 512);
    }
    finish(&t);
    CHECK_INT(t.header.extents, 3);
    CHECK_INT(t.header.fragments, 1);
    REQUIRE(gd_recipe_read_page(&t.recipe, 1, &page, &t.x.err) == GD_OK);
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t blocks = i < 2 ? 1024 : 3000 - 2048;
        gd_extent wanted = {
            .offset = i * 1024 * 512,
            .length = blocks * 512,
            .group = 4,
            .slot = 100 + 1024 * i,
            .blocks = blocks,
            .kind = GD_EXTENT_BLOCKS_KIND,
            .digest = gd_checksum(&fps[1024 * i], blocks * sizeof fps[0], 0)};
        CHECK(same_extent(&page.extents[i], &wanted));
    }
}

/* ---- many pages ---- */

static gd_extent expected[10000];

/* Writes an image of so many extents, no two of which can be merged; their
 * expected values are in expected. */
static void
write_extents(fixture *t, uint32_t count)
{
    uint64_t state = count, offset = 0;
    memset(expected, 0, sizeof expected);
    for (uint32_t i = 0; i < count; i++) {
        gd_extent *extent = &expected[i];
        extent->offset = offset;
        if (i % 3 == 0) {
            extent->length = 1 + next_random(&state) % 100000;
            add_zeros(t, extent->length);
        } else {
            uint32_t length = 1 + (uint32_t)(next_random(&state) % 65536);
            gd_fingerprint fp = repeated(i);
            extent->kind = GD_EXTENT_BLOCKS_KIND;
            extent->length = length;
            extent->group = 1 + (uint32_t)(next_random(&state) % GD_MAX_GROUP);
            extent->slot = 2 * (uint32_t)(next_random(&state) % 16384);
            extent->blocks = 1;
            extent->digest = gd_checksum(&fp, sizeof fp, 0);
            add_block(t, extent->group, extent->slot, i, length);
        }
        offset += extent->length;
    }
    finish(t);
    CHECK_INT(t->header.extents, count);
    CHECK_INT(t->header.size, offset);
}

static void
check_seek(fixture *t, uint64_t offset, uint32_t wanted)
{
    gd_recipe_page page;
    uint32_t index = 0;
    if (CHECK_INT(gd_recipe_seek(&t->recipe, offset, &page, &index,
                                 &t->x.err),
                  GD_OK)) {
        CHECK_INT((page.number - 1) * GD_EXTENTS_PER_PAGE + index, wanted);
        CHECK(same_extent(&page.extents[index], &expected[wanted]));
    }
}

/* The counts are around the borders of a page, of the writer's buffer of
 * sixteen, and of the binary search: every extent is read back, and found by
 * its first and by its last byte. */
TEST_WITH(test_many_pages, setup(&t), teardown(&t))
{
    static const uint32_t counts[] = {1,    2,    101,  102,  103,
                                      204,  205,  306,  1631, 1632,
                                      1633, 1734, 3264, 3265, 9999};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        uint32_t count = counts[i], pages = (count + 101) / 102;
        write_extents(&t, count);
        CHECK_INT(scratch_size(&t.x, NAME), 4096 * (1 + (int64_t)pages));
        for (uint32_t number = 1; number <= pages; number++) {
            gd_recipe_page page;
            REQUIRE(gd_recipe_read_page(&t.recipe, number, &page, &t.x.err) ==
                    GD_OK);
            CHECK_INT(page.number, number);
            uint32_t first = (number - 1) * 102;
            CHECK_INT(page.count, number < pages ? 102 : count - first);
            for (uint32_t k = 0; k < page.count; k++) {
                CHECK(same_extent(&page.extents[k], &expected[first + k]));
            }
        }
        for (uint32_t k = 0; k < count; k++) {
            check_seek(&t, expected[k].offset, k);
            check_seek(&t, expected[k].offset + expected[k].length - 1, k);
        }
        t.x.env->close(t.x.env, t.fd);
        begin(&t);
    }
}

TEST(test_pages_that_are_not_there)
{
    static const uint64_t numbers[] = {0, 4, 5, 1 << 20, UINT64_C(1) << 52,
                                       (UINT64_C(1) << 52) + 1, UINT64_MAX};
    fixture t;
    gd_recipe_page page;
    setup(&t);
    write_extents(&t, 306);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        gd_status s = gd_recipe_read_page(&t.recipe, numbers[i], &page,
                                          &t.x.err);
        CHECK(s == GD_CORRUPT || s == GD_IO);
        CHECK_INT(page.number, 0);
    }
    teardown(&t);
}

/* ---- damage ---- */

/* Returns the first error in reading all of it; GD_OK if there is none. */
static gd_status
read_all(fixture *t)
{
    gd_recipe_page page;
    gd_status s = open_recipe(t);
    uint64_t offset = 0;
    for (uint64_t i = 1; s == GD_OK && offset < t->recipe.header.size; i++) {
        s = gd_recipe_read_page(&t->recipe, i, &page, &t->x.err);
        if (s == GD_OK) {
            const gd_extent *last = &page.extents[page.count - 1];
            CHECK_INT(page.extents[0].offset, offset);
            offset = last->offset + last->length;
        }
    }
    return s;
}

TEST_WITH(test_every_flip_is_noticed, setup(&t), teardown(&t))
{
    write_known(&t);
    for (uint64_t at = 0; at < 8192; at++) {
        for (int bit = at % 2; bit < 8; bit += 2) {
            scratch_flip(&t.x, NAME, at, (uint8_t)(1 << bit));
            gd_status s = read_all(&t);
            if (!CHECK(s == GD_CORRUPT || (s == GD_VERSION && at / 2 == 4))) {
                fprintf(stderr, "byte %u\n", (unsigned)at);
            }
            CHECK_CONTAINS(t.x.err.text, NAME);
            scratch_flip(&t.x, NAME, at, (uint8_t)(1 << bit));
        }
    }
    CHECK_INT(read_all(&t), GD_OK);
}

TEST_WITH(test_another_length, setup(&t), teardown(&t))
{
    static const uint64_t lengths[] = {0,     1,     4095,  4096,  4097,
                                       8192,  12287, 16383, 16385, 20480};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        write_extents(&t, 300);
        CHECK_INT(scratch_size(&t.x, NAME), 16384);
        scratch_truncate(&t.x, NAME, lengths[i]);
        CHECK_INT(open_recipe(&t), GD_CORRUPT);
        CHECK_CONTAINS(t.x.err.text, NAME);
        t.x.env->close(t.x.env, t.fd);
        begin(&t);
    }
}

TEST_WITH(test_exchanged_pages, setup(&t), teardown(&t))
{
    uint8_t first[4096], second[4096], foreign[4096];
    t.transaction_id[3] ^= 1;
    memcpy(t.header.transaction_id, t.transaction_id, GD_ID_SIZE);
    t.x.env->close(t.x.env, t.fd);
    gd_recipe_writer_close(t.writer);
    begin(&t);
    write_extents(&t, 300);
    scratch_read(&t.x, NAME, foreign, sizeof foreign, 4096);
    t.x.env->close(t.x.env, t.fd);
    t.transaction_id[3] ^= 1;
    memcpy(t.header.transaction_id, t.transaction_id, GD_ID_SIZE);
    begin(&t);
    write_extents(&t, 300);
    scratch_read(&t.x, NAME, first, sizeof first, 4096);
    scratch_read(&t.x, NAME, second, sizeof second, 8192);
    CHECK_INT(read_all(&t), GD_OK);
    /* Two pages exchanged; one twice; the same page of another recipe. */
    scratch_write(&t.x, NAME, second, sizeof second, 4096);
    CHECK_INT(read_all(&t), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "offset 4096");
    scratch_write(&t.x, NAME, first, sizeof first, 8192);
    CHECK_INT(read_all(&t), GD_CORRUPT);
    scratch_write(&t.x, NAME, first, sizeof first, 4096);
    CHECK_INT(read_all(&t), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "offset 8192");
    scratch_write(&t.x, NAME, second, sizeof second, 8192);
    CHECK_INT(read_all(&t), GD_OK);
    scratch_write(&t.x, NAME, foreign, sizeof foreign, 4096);
    CHECK_INT(read_all(&t), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "offset 4096");
}

/* ---- right checksums, wrong figures ---- */

static gd_status
with_value(fixture *t, uint64_t page, size_t offset, uint64_t value,
           size_t length)
{
    uint8_t raw[4096], kept[4096];
    scratch_read(&t->x, NAME, raw, sizeof raw, page * 4096);
    memcpy(kept, raw, sizeof raw);
    for (size_t i = 0; i < length; i++) {
        raw[offset + i] = (uint8_t)(value >> 8 * i);
    }
    uint64_t seed = page == 0 ? 0 : gd_get64(t->transaction_id);
    gd_put64(raw + 4088, gd_checksum(raw, 4088, seed));
    scratch_write(&t->x, NAME, raw, sizeof raw, page * 4096);
    gd_status s = read_all(t);
    scratch_write(&t->x, NAME, kept, sizeof kept, page * 4096);
    return s;
}

/* ---- with a disk ---- */

static const gd_recipe_encoder encoder = {GD_RECIPE_ZLIB, 6, 12, 9, 0, 0, 0};

static void
add_derived(fixture *t, gd_extent extent)
{
    CHECK_INT(gd_recipe_add_derived(t->writer, &extent, &t->x.err), GD_OK);
}

/* A disk of 8 KiB, whose second half is derived, behind a header of 5 bytes. */
static void
write_disk(fixture *t)
{
    add_zeros(t, 4096);
    add_block(t, 5, 17, 1, 4096);
    add_zeros(t, GD_RECIPE_REST_ALIGN - 8192);
    add_block(t, 5, 18, 2, 5);
    add_derived(t, (gd_extent){.length = 5, .plain = GD_RECIPE_REST_ALIGN});
    add_derived(t, (gd_extent){.length = 300, .plain = 4096,
                               .plain_length = 4096, .encoder = 1,
                               .digest = 0x1122334455667788});
    t->header.disk.size = 8192;
    t->header.disk.format = 1;
    t->header.disk.flags = GD_RECIPE_PROVEN;
    t->header.disk.encoders = 1;
    t->header.disk.encoder[0] = encoder;
    finish(t);
}

TEST_WITH(test_known_bytes_of_a_disk, setup(&t), teardown(&t))
{
    static const golden disk[] = {
        {0, "05002000000000000020000000000000"
            "02000000000000002c01000000000000"
            "0101010001060c09"}};
    static const golden table[] = {
        {0, "02000000020000000000000000000000"
            "05000000000000000000200000000000"
            "0000000002"},
        {48, "05000000000000002c01000000000000"
             "001000000000000000100000020100"},
        {80, "8877665544332211"}};
    uint8_t raw[3 * GD_RECIPE_PAGE];
    write_disk(&t);
    CHECK_INT(t.recipe.header.size, 305);
    CHECK_INT(t.recipe.header.disk.plain_size, GD_RECIPE_REST_ALIGN + 5);
    CHECK_INT(scratch_size(&t.x, NAME), sizeof raw);
    scratch_read(&t.x, NAME, raw, sizeof raw, 0);
    CHECK_INT(raw[8], 2);
    CHECK(GOLDEN_MATCHES(raw + 500, 3588, disk));
    CHECK(GOLDEN_MATCHES(raw + 2 * GD_RECIPE_PAGE, 4088, table));
    CHECK(memcmp(&t.recipe.header, &t.header, sizeof t.header) == 0);
}

/* A table of three pages is walked over from any offset. */
TEST_WITH(test_many_derived_extents, setup(&t), teardown(&t))
{
    enum { COUNT = 2 * GD_EXTENTS_PER_PAGE + 10 };
    add_zeros(&t, GD_RECIPE_REST_ALIGN);
    for (unsigned i = 0; i < COUNT; i++) {
        add_derived(&t, (gd_extent){.length = 1 + i, .plain = i});
    }
    t.header.disk.size = 512;
    t.header.disk.format = 5;
    finish(&t);
    uint64_t size = COUNT * (COUNT + 1) / 2;
    CHECK_INT(t.recipe.header.size, size);
    for (uint64_t from = 0; from < size; from += 1 + size / 50) {
        gd_extent_cursor cursor;
        gd_extent_part part;
        gd_extent_cursor_open(&cursor, &t.recipe, from, size - from);
        cursor.derived = true;
        uint64_t at = from;
        while (cursor.offset < cursor.end &&
               CHECK_INT(gd_extent_cursor_next(&cursor, &part, &t.x.err),
                         GD_OK)) {
            CHECK_INT(part.extent->kind, GD_EXTENT_DERIVED);
            CHECK_INT(part.extent->length, part.extent->plain + 1);
            CHECK_INT(part.extent->offset + part.from, at);
            at += part.length;
        }
        CHECK_INT(at, size);
    }
}

static gd_status
with_disk(const gd_recipe_disk *disk)
{
    return gd_recipe_disk_is_valid(disk, 305) ? GD_OK : GD_CORRUPT;
}

TEST(test_bounds_of_a_disk)
{
    const gd_recipe_disk good = {.plain_size = GD_RECIPE_REST_ALIGN + 5,
                                 .size = 8192,
                                 .derived = 2,
                                 .derived_bytes = 300,
                                 .format = 1,
                                 .flags = GD_RECIPE_PROVEN,
                                 .encoders = 1,
                                 .encoder = {encoder}};
    gd_recipe_disk bad;
    CHECK_INT(with_disk(&good), GD_OK);
#define BAD(field, value)                                                     \
    (bad = good, bad.field = (value), CHECK_INT(with_disk(&bad), GD_CORRUPT))
    BAD(size, 0);
    BAD(size, 511);
    BAD(size, 8191);
    BAD(size, GD_RECIPE_REST_ALIGN + 512);
    BAD(size, (UINT64_C(1) << 62) + 512);
    BAD(size, UINT64_MAX - 511);
    BAD(plain_size, GD_RECIPE_REST_ALIGN - 1);
    BAD(plain_size, UINT64_C(1) << 63);
    BAD(derived, 0);
    BAD(derived, 306);
    BAD(derived_bytes, 306);
    BAD(format, 0);
    BAD(format, 6);
    BAD(flags, 2);
    BAD(encoders, 0); /* and one that is not zeros */
    BAD(encoders, 2);
    BAD(encoders, 16);
    BAD(encoders, UINT16_MAX);
    BAD(encoder[0].id, 2);
    BAD(encoder[0].level, 0);
    BAD(encoder[0].window_bits, 16);
    BAD(encoder[0].memory_level, 10);
    BAD(encoder[0].strategy, 5);
    BAD(encoder[0].header, 2);
    BAD(encoder[0].reserved, 1);
#undef BAD
}

TEST(test_bounds_of_derived_extents)
{
    const gd_recipe_header header = {.size = 305,
                                     .disk = {.plain_size = 1000,
                                              .encoders = 1}};
    const gd_extent good = {.length = 300, .plain = 500, .plain_length = 500,
                            .encoder = 1, .kind = GD_EXTENT_DERIVED,
                            .digest = 7};
    const gd_extent copied = {.length = 500, .plain = 500,
                              .kind = GD_EXTENT_DERIVED};
    gd_extent bad;
    CHECK(gd_recipe_is_derived(&header, &good));
    CHECK(gd_recipe_is_derived(&header, &copied));
#define BAD(from, field, value)                                               \
    (bad = from, bad.field = (value),                                         \
     CHECK(!gd_recipe_is_derived(&header, &bad)))
    BAD(good, length, 0);
    BAD(good, length, GD_DERIVED_MAX + 1);
    BAD(good, plain, 501);
    BAD(good, plain, UINT64_MAX);
    BAD(good, plain_length, 0);
    BAD(good, plain_length, 501);
    BAD(good, plain_length, GD_DEFLATE_MAX_PLAIN + 1);
    BAD(good, encoder, 2);
    BAD(good, kind, GD_EXTENT_BLOCKS_KIND);
    BAD(good, reserved, 1);
    BAD(copied, length, 501);
    BAD(copied, length, UINT64_MAX);
    BAD(copied, plain, 1001);
    BAD(copied, plain_length, 1);
    BAD(copied, digest, 1);
#undef BAD
}

TEST(test_bounds_of_the_header)
{
    static const struct {
        size_t offset;
        uint64_t value;
        size_t length;
        gd_status wanted;
    } cases[] = {
        {8, 2, 2, GD_CORRUPT},           /* with a disk, but of no size */
        {8, 3, 2, GD_VERSION},
        {8, 65535, 2, GD_VERSION},
        {10, 7, 2, GD_OK},
        {16, 9, 1, GD_CORRUPT},          /* another repository */
        {80, 16483, 8, GD_CORRUPT},      /* less than the extents have */
        {80, 16485, 8, GD_CORRUPT},      /* and more */
        {80, UINT64_MAX, 8, GD_CORRUPT},
        {80, UINT64_C(1) << 63, 8, GD_CORRUPT},
        {88, 16485, 8, GD_CORRUPT},
        {112, 0, 8, GD_CORRUPT},
        {112, 2, 8, GD_CORRUPT},
        {112, 4, 8, GD_CORRUPT},
        {112, 103, 8, GD_CORRUPT},
        {112, 16485, 8, GD_CORRUPT},
        {112, UINT64_MAX, 8, GD_CORRUPT},
        {112, UINT64_MAX - 100, 8, GD_CORRUPT},
        {136, 7, 2, GD_CORRUPT},         /* the id is longer than that */
        {136, 9, 2, GD_CORRUPT},         /* or shorter */
        {136, 129, 2, GD_CORRUPT},
        {136, 65535, 2, GD_CORRUPT},
        {138, 3, 2, GD_CORRUPT},
        {138, 5, 2, GD_CORRUPT},
        {138, 129, 2, GD_CORRUPT},
        {138, 65535, 2, GD_CORRUPT},
        {144, 'j', 1, GD_CORRUPT},       /* another image's */
        {145, 0, 1, GD_CORRUPT},
        {271, 'x', 1, GD_CORRUPT},
        {399, 'x', 1, GD_CORRUPT},
        {272, 'P', 1, GD_OK},
        {140, UINT32_MAX, 4, GD_OK},     /* reserved */
        {400, UINT64_MAX, 8, GD_OK},
        {4080, UINT64_MAX, 8, GD_OK},
    };
    fixture t;
    setup(&t);
    write_known(&t);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (!CHECK_INT(with_value(&t, 0, cases[i].offset, cases[i].value,
                                  cases[i].length),
                       cases[i].wanted)) {
            fprintf(stderr, "case %zu\n", i);
        }
        if (cases[i].wanted != GD_OK) {
            CHECK_CONTAINS(t.x.err.text, NAME);
        }
    }
    teardown(&t);
}

/* A seek ends even if the recipe has as many pages as its header has. */
TEST_WITH(test_more_pages_than_bytes, setup(&t), teardown(&t))
{
    gd_recipe_page page;
    uint32_t index;
    uint8_t raw[4096];
    write_known(&t);
    scratch_read(&t.x, NAME, raw, sizeof raw, 0);
    gd_put64(raw + 80, INT64_MAX);
    gd_put64(raw + 112, INT64_MAX);
    gd_put64(raw + 4088, gd_checksum(raw, 4088, 0));
    scratch_write(&t.x, NAME, raw, sizeof raw, 0);
    CHECK_INT(open_recipe(&t), GD_CORRUPT);
    gd_put64(raw + 112, 102 * (uint64_t)1000000); /* 4 GB, all holes */
    gd_put64(raw + 4088, gd_checksum(raw, 4088, 0));
    scratch_write(&t.x, NAME, raw, sizeof raw, 0);
    scratch_truncate(&t.x, NAME, 4096 * (uint64_t)1000001);
    CHECK_INT(open_recipe(&t), GD_OK);
    CHECK_INT(gd_recipe_seek(&t.recipe, 1 << 20, &page, &index, &t.x.err),
              GD_CORRUPT);
}

TEST(test_bounds_of_extents)
{
    enum { FIRST = 8, SECOND = 48, THIRD = 88 };
    static const struct {
        size_t offset;
        uint64_t value;
        size_t length;
        gd_status wanted;
    } cases[] = {
        {0, 0, 4, GD_CORRUPT},                   /* the page's number */
        {0, 2, 4, GD_CORRUPT},
        {4, 2, 4, GD_CORRUPT},                   /* and count */
        {4, 4, 4, GD_CORRUPT},
        {4, UINT32_MAX, 4, GD_CORRUPT},
        {FIRST + 8, 0, 8, GD_CORRUPT},           /* no length */
        {FIRST + 8, 8191, 8, GD_CORRUPT},        /* a gap */
        {FIRST + 8, 8193, 8, GD_CORRUPT},        /* an overlap */
        {FIRST + 8, UINT64_MAX, 8, GD_CORRUPT},
        {SECOND, 8191, 8, GD_CORRUPT},
        {SECOND, 8193, 8, GD_CORRUPT},
        {SECOND, UINT64_MAX, 8, GD_CORRUPT},
        {THIRD + 8, 101, 8, GD_CORRUPT},         /* beyond the size */
        {THIRD + 8, UINT64_MAX - 16384, 8, GD_CORRUPT},
        {FIRST + 16, 1, 4, GD_CORRUPT},          /* zeros with an address */
        {FIRST + 20, 1, 4, GD_CORRUPT},
        {FIRST + 24, 1, 4, GD_CORRUPT},
        {FIRST + 28, 2, 1, GD_CORRUPT},          /* no such kind */
        {FIRST + 28, 1, 1, GD_CORRUPT},          /* blocks without a group */
        {SECOND + 28, 0, 1, GD_CORRUPT},
        {SECOND + 29, 1, 1, GD_CORRUPT},
        {SECOND + 16, 0, 4, GD_CORRUPT},
        {SECOND + 16, GD_MAX_GROUP, 4, GD_OK},
        {SECOND + 16, GD_MAX_GROUP + 1, 4, GD_CORRUPT},
        {SECOND + 20, GD_MAX_SLOTS - 1, 4, GD_OK},
        {SECOND + 20, GD_MAX_SLOTS, 4, GD_CORRUPT},
        {SECOND + 20, UINT32_MAX, 4, GD_CORRUPT},
        {SECOND + 24, 0, 4, GD_CORRUPT},
        {SECOND + 24, 1024, 4, GD_OK},
        {SECOND + 24, 1025, 4, GD_CORRUPT},
        {SECOND + 24, UINT32_MAX, 4, GD_CORRUPT},
        {THIRD + 24, 101, 4, GD_CORRUPT},        /* more blocks than bytes */
        {SECOND + 32, 0, 8, GD_OK},              /* for the reader to find */
        {THIRD + 40, UINT64_MAX, 8, GD_OK},      /* behind the last extent */
    };
    fixture t;
    setup(&t);
    write_known(&t);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (!CHECK_INT(with_value(&t, 1, cases[i].offset, cases[i].value,
                                  cases[i].length),
                       cases[i].wanted)) {
            fprintf(stderr, "case %zu\n", i);
        }
    }
    teardown(&t);
}

/* Any bytes with a right checksum give an error, or values within bounds. */
TEST(test_hostile_pages)
{
    fixture t;
    uint64_t state = 4;
    unsigned good = 0;
    setup(&t);
    write_known(&t);
    for (int i = 0; i < 20000; i++) {
        size_t offset = next_random(&state) % 128;
        uint64_t value = next_random(&state);
        size_t length = 1 + next_random(&state) % 8;
        value = i % 2 == 0 ? value : value % 70000;
        gd_status s = with_value(&t, i % 3 == 0, offset, value, length);
        good += s == GD_OK;
        CHECK(s == GD_OK || s == GD_CORRUPT || s == GD_VERSION);
    }
    CHECK(good > 0);
    teardown(&t);
}

/* ---- failures ---- */

TEST_WITH(test_failures, setup(&t), teardown(&t))
{
    gd_recipe_writer *writer;
    fault_env_fail(&t.x.f, FAULT_ALLOC, 1, ENOMEM, false);
    CHECK_INT(gd_recipe_writer_open(t.x.env, t.fd, NAME, t.transaction_id,
                                    &writer, &t.x.err),
              GD_NOMEM);
    /* The pages are written when sixteen are full, the rest at the end. */
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 1, ENOSPC, true);
    gd_status s = GD_OK;
    gd_fingerprint fp = repeated(1);
    uint32_t i;
    for (i = 0; s == GD_OK && i < 5000; i++) {
        s = gd_recipe_add_block(t.writer, (gd_address){1 + i % 2, 7}, &fp, 512,
                                &t.x.err);
    }
    CHECK_INT(s, GD_NOSPACE);
    CHECK_INT(i, 16 * 102 + 1);
    CHECK_CONTAINS(t.x.err.text, NAME);
    gd_recipe_writer_close(t.writer);
    fault_env_heal(&t.x.f);
    t.x.env->close(t.x.env, t.fd);
    for (uint64_t n = 1; n <= 2; n++) {
        begin(&t);
        add_zeros(&t, 77);
        fault_env_fail(&t.x.f, FAULT_PWRITEV, n, EIO, false);
        CHECK_INT(gd_recipe_finish(t.writer, &t.x.params, &t.header,
                                   &t.x.err),
                  GD_IO);
        CHECK_INT(open_recipe(&t), GD_CORRUPT);
        gd_recipe_writer_close(t.writer);
        t.x.env->close(t.x.env, t.fd);
    }
    begin(&t);
    fault_env_heal(&t.x.f);
    write_known(&t);
    fault_env_fail(&t.x.f, FAULT_FSTAT, 1, EIO, false);
    CHECK_INT(open_recipe(&t), GD_IO);
    fault_env_fail(&t.x.f, FAULT_PREAD, 1, EIO, false);
    CHECK_INT(open_recipe(&t), GD_IO);
    fault_env_fail(&t.x.f, FAULT_PREAD, 2, EIO, false);
    CHECK_INT(read_all(&t), GD_IO);
    fault_env_shorten(&t.x.f, 100);
    fault_env_interrupt(&t.x.f, 3);
    CHECK_INT(read_all(&t), GD_OK);
}
