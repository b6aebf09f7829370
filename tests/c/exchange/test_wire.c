/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_wire.c - descriptions and frames: exact, verified (I7), and without
 * bytes that were not requested.
 */
#include "engine/exchange/wire.h"

#include <lz4.h>
#include <zstd.h>

#include "engine/base/coding.h"
#include "engine/files/group.h"
#include "engine/files/spool.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define GROUP_1 "groups/00000001"

enum { BLOCK = 512, SEGMENT = 4096, PER_SEGMENT = SEGMENT / BLOCK };

static scratch x;
static gd_repo *repo;

static void
setup(uint32_t slots, gd_codec codec)
{
    scratch_init(&x);
    x.params.block_size = BLOCK;
    x.params.group_slots = slots;
    x.params.segment_size = SEGMENT;
    x.params.codec = codec;
    repo = scratch_repo_filter(&x);
}

static void
teardown(void)
{
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

static gd_image *
put_and_open(const char *image_id, const uint8_t *data, size_t length)
{
    if (!CHECK_INT(put_image(repo, image_id, data, length, 1 << 20, NULL,
                             &x.err),
                   GD_OK)) {
        fprintf(stderr, "%s\n", x.err.text);
        exit(1);
    }
    return require_image(repo, image_id);
}

/* Half of each block compresses, and no two are alike. */
static void
fill_blocks(uint8_t *out, size_t length, uint64_t seed)
{
    memset(out, 'b', length);
    for (size_t at = 0; at < length; at += BLOCK) {
        size_t here = length - at < BLOCK / 2 ? length - at : BLOCK / 2;
        fill_random(out + at, here, seed * 100000 + at);
    }
}

static void
write_entry(uint32_t slot, const gd_entry *entry)
{
    gd_group *group;
    REQUIRE(gd_group_open(x.env, x.root, &x.params, 1, O_RDWR, &group, NULL) ==
            GD_OK);
    CHECK_INT(gd_group_write_entries(group, slot, 1, entry, NULL), GD_OK);
    gd_group_close(group);
}

static gd_entry
read_entry(uint32_t slot)
{
    gd_group *group;
    gd_entry entry = {0};
    CHECK_INT(gd_group_open(x.env, x.root, &x.params, 1, O_RDONLY, &group,
                            NULL),
              GD_OK);
    CHECK_INT(gd_group_read_entries(group, slot, 1, &entry, NULL), GD_OK);
    gd_group_close(group);
    return entry;
}

/* ---- descriptions ---- */

/* Follows all pages and compares each block's fingerprint with the data's;
 * returns the number of extents. */
static uint64_t
check_description(gd_image *image, const uint8_t *data, size_t length)
{
    gd_hasher *hasher;
    uint64_t next = 0, extents = 0;
    CHECK_INT(gd_hasher_open(x.env, repo->digest, &hasher, NULL), GD_OK);
    for (uint64_t n = 1; n <= gd_image_pages(image); n++) {
        uint8_t *page;
        size_t size = 0;
        if (!CHECK_INT(gd_wire_describe(image, n, &page, &size, &x.err),
                       GD_OK)) {
            fprintf(stderr, "%s\n", x.err.text);
            break;
        }
        for (size_t at = 0; at < size; extents++) {
            uint64_t offset = gd_get64(page + at);
            uint64_t end = offset + gd_get64(page + at + 8);
            uint32_t blocks = gd_get32(page + at + 16);
            CHECK_INT(offset, next);
            CHECK_INT(gd_get32(page + at + 20), 0);
            at += 24;
            for (uint64_t i = offset; blocks == 0 && i < end; i++) {
                CHECK(data[i] == 0);
            }
            for (next = offset; blocks > 0; blocks--, at += 36) {
                gd_fingerprint fp;
                uint32_t here = gd_get32(page + at + 32);
                CHECK(here > 0 && next + here <= length);
                CHECK_INT(gd_hasher_compute(hasher, &gd_global_scope,
                                            data + next, here, &fp, NULL),
                          GD_OK);
                CHECK(memcmp(page + at, fp.bytes, 32) == 0);
                next += here;
            }
            CHECK(next == end || next == offset);
            next = end;
        }
        x.env->release(x.env, page);
    }
    gd_hasher_close(x.env, hasher);
    CHECK_INT(next, length);
    return extents;
}

TEST(test_describe)
{
    static uint8_t data[3000 * BLOCK + 77];
    setup(32768, GD_CODEC_LZ4);
    fill_image(data, sizeof data, BLOCK, 500, 1);
    gd_image *image = put_and_open("a", data, sizeof data);
    CHECK(gd_image_pages(image) > 3);
    CHECK_INT(check_description(image, data, sizeof data),
              gd_image_header(image)->extents);
    uint8_t *page;
    size_t size;
    CHECK_INT(gd_wire_describe(image, 0, &page, &size, &x.err), GD_CORRUPT);
    CHECK_INT(gd_wire_describe(image, gd_image_pages(image) + 1, &page, &size,
                               &x.err),
              GD_CORRUPT);
    gd_image_close(image);
    teardown();
}

/* I7: the entries must be those that the image was committed with. */
TEST(test_describe_verifies)
{
    static uint8_t data[20 * BLOCK];
    uint8_t *page;
    size_t size;
    setup(64, GD_CODEC_LZ4);
    fill_blocks(data, sizeof data, 1);
    gd_image *image = put_and_open("a", data, sizeof data);
    const gd_entry good = read_entry(3);
    gd_entry lies[5] = {good, good, good, read_entry(4), good};
    lies[0].fingerprint.bytes[5] ^= 1;
    lies[1].plain_length--;
    lies[2].state = GD_ENTRY_FREED;
    lies[4].state = GD_ENTRY_DAMAGED;
    lies[4].plain_length = 100000;
    for (int i = 0; i < 5; i++) {
        write_entry(3, &lies[i]);
        CHECK_INT(gd_wire_describe(image, 1, &page, &size, &x.err),
                  GD_CORRUPT);
        CHECK_CONTAINS(x.err.text, GROUP_1);
        CHECK(page == NULL);
    }
    /* A block that is known to be damaged can still be described. */
    lies[4].plain_length = good.plain_length;
    write_entry(3, &lies[4]);
    CHECK_INT(check_description(image, data, sizeof data), 1);
    gd_image_close(image);
    teardown();
}

/* ---- frames ---- */

/* The contents of received frames. */
typedef struct received {
    uint8_t *image; /* bytes; 0xee elsewhere */
    size_t size;
    uint64_t came;    /* bytes of places */
    uint64_t plain;   /* bytes of frames, decoded */
    unsigned frames;
    unsigned stored;  /* frames with a codec */
} received;

static void
receive_frame(received *r, const uint8_t *frame, size_t length)
{
    static uint8_t out[GD_FRAME_PLAIN];
    static uint8_t copy[2 << 20];
    REQUIRE(length >= GD_FRAME_HEADER && memcmp(frame, "GDFR", 4) == 0);
    uint32_t places = gd_get16(frame + 6), plain = gd_get32(frame + 8),
             stored = gd_get32(frame + 12);
    size_t body = (size_t)places * GD_FRAME_PLACE + stored;
    REQUIRE(length == GD_FRAME_HEADER + body && length < sizeof copy);
    CHECK(places > 0 && frame[5] == 0 && plain <= GD_FRAME_PLAIN);
    memcpy(copy, frame, 16);
    memcpy(copy + 16, frame + GD_FRAME_HEADER, body);
    CHECK(gd_checksum(copy, 16 + body, 0) == gd_get64(frame + 16));
    const uint8_t *data = frame + GD_FRAME_HEADER + places * GD_FRAME_PLACE;
    if (frame[4] == GD_CODEC_LZ4) {
        CHECK_INT(LZ4_decompress_safe((const char *)data, (char *)out,
                                      (int)stored, sizeof out),
                  plain);
        data = out;
    } else if (frame[4] == GD_CODEC_ZSTD) {
        CHECK_INT(ZSTD_decompress(out, sizeof out, data, stored), plain);
        data = out;
    } else {
        CHECK_INT(frame[4], GD_CODEC_NONE);
        CHECK_INT(stored, plain);
    }
    for (uint32_t i = 0; i < places; i++) {
        const uint8_t *place = frame + GD_FRAME_HEADER + i * GD_FRAME_PLACE;
        uint64_t offset = gd_get64(place);
        uint32_t from = gd_get32(place + 8), here = gd_get32(place + 12);
        REQUIRE(from + here <= plain && offset + here <= r->size);
        memcpy(r->image + offset, data + from, here);
        r->came += here;
    }
    r->plain += plain;
    r->frames++;
    r->stored += frame[4] != GD_CODEC_NONE;
}

/* Makes one call; *end is where the next has to continue. */
static gd_status
receive_some(gd_image *image, const gd_range *ranges, size_t count,
             received *r, uint64_t *end)
{
    gd_frames frames;
    gd_status s = gd_wire_frames(image, ranges, count, &frames, end, &x.err);
    size_t start = 0;
    for (size_t i = 0; s == GD_OK && i < frames.count; i++) {
        receive_frame(r, frames.bytes + start, frames.ends[i] - start);
        start = frames.ends[i];
    }
    CHECK(s != GD_OK || start == frames.length);
    gd_frames_free(&frames);
    return s;
}

static gd_status
receive(gd_image *image, const gd_range *ranges, size_t count, received *r)
{
    gd_status s = GD_OK;
    uint64_t end, before = 0;
    gd_range *rest = calloc(count + 1, sizeof *rest);
    if (!CHECK(rest != NULL)) {
        return GD_NOMEM;
    }
    for (size_t i = 0; i < count; i++) {
        rest[i] = ranges[i];
    }
    for (size_t done = 0; s == GD_OK && done < count;) {
        s = receive_some(image, rest + done, count - done, r, &end);
        if (s != GD_OK) {
            break;
        }
        CHECK(end > before || r->came == 0);
        before = end;
        while (done < count &&
               rest[done].offset + rest[done].length <= end) {
            done++;
        }
        if (done < count && rest[done].offset < end) {
            rest[done].length -= end - rest[done].offset;
            rest[done].offset = end;
        }
    }
    free(rest);
    return s;
}

static void
receive_nothing_yet(received *r, size_t size)
{
    *r = (received){.image = malloc(size), .size = size};
    memset(r->image, 0xee, size);
}

/* Exactly these ranges came, but for zeros. */
static void
check_received(received *r, const uint8_t *data, const gd_range *ranges,
               size_t count)
{
    uint8_t *want = malloc(r->size);
    memset(want, 0xee, r->size);
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        for (uint64_t at = ranges[i].offset;
             at < ranges[i].offset + ranges[i].length; at += BLOCK) {
            static const uint8_t zeros[BLOCK];
            size_t here = r->size - at < BLOCK ? r->size - at : BLOCK;
            if (memcmp(data + at, zeros, here) != 0) {
                memcpy(want + at, data + at, here);
                bytes += here;
            }
        }
    }
    CHECK_INT(r->came, bytes);
    CHECK(memcmp(want, r->image, r->size) == 0);
    free(want);
    free(r->image);
}

static void
check_ranges(gd_image *image, const uint8_t *data, size_t size,
             const gd_range *ranges, size_t count)
{
    received r;
    receive_nothing_yet(&r, size);
    if (!CHECK_INT(receive(image, ranges, count, &r), GD_OK)) {
        fprintf(stderr, "%s\n", x.err.text);
    }
    check_received(&r, data, ranges, count);
}

TEST(test_frames_of_any_ranges)
{
    enum { BLOCKS = 2000, SIZE = BLOCKS * BLOCK + 77 };
    static uint8_t data[SIZE];
    uint64_t seed = 1;
    for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        setup(1024, (gd_codec)codec);
        fill_image(data, SIZE, BLOCK, 700, 2);
        gd_image *image = put_and_open("a", data, SIZE);
        check_ranges(image, data, SIZE, &(gd_range){0, SIZE}, 1);
        for (int i = 0; i < 200; i++) {
            gd_range ranges[40];
            size_t count = 0;
            uint64_t at = 0;
            while (count < 40) {
                uint64_t first = at + next_random(&seed) % 60;
                uint64_t end = first + 1 + next_random(&seed) % 30;
                if (end > BLOCKS) {
                    break;
                }
                ranges[count++] =
                    (gd_range){first * BLOCK, (end - first) * BLOCK};
                at = end;
            }
            check_ranges(image, data, SIZE, ranges, count);
        }
        check_ranges(image, data, SIZE,
                     &(gd_range){BLOCKS * BLOCK, 77}, 1);
        check_ranges(image, data, SIZE, NULL, 0);
        check_ranges(image, data, SIZE, &(gd_range){0, 0}, 1);
        gd_image_close(image);
        teardown();
    }
}

/* A whole image goes out as it is stored. */
TEST(test_frames_as_stored)
{
    static uint8_t data[64 * BLOCK];
    gd_range all = {0, sizeof data};
    received r;
    setup(64, GD_CODEC_LZ4);
    fill_blocks(data, sizeof data, 1);
    gd_image *image = put_and_open("a", data, sizeof data);
    receive_nothing_yet(&r, sizeof data);
    CHECK_INT(receive(image, &all, 1, &r), GD_OK);
    CHECK_INT(r.frames, 8);
    CHECK_INT(r.stored, 8);
    CHECK_INT(r.plain, sizeof data);
    check_received(&r, data, &all, 1);
    gd_image_close(image);
    teardown();
}

static bool
holds(const gd_frames *frames, const uint8_t *block)
{
    return memmem(frames->bytes, frames->length, block, BLOCK) != NULL;
}

/* Blocks of a segment that were not requested do not go out, in any form and
 * of any image. */
TEST(test_nothing_else_goes_out)
{
    static uint8_t data[2 * SEGMENT];
    for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        setup(64, (gd_codec)codec);
        fill_blocks(data, sizeof data, 1);
        gd_image *image = put_and_open("a", data, sizeof data);
        for (size_t left_out = 0; left_out < PER_SEGMENT; left_out++) {
            gd_frames frames;
            received r;
            const gd_range ranges[] = {
                {0, left_out * BLOCK},
                {(left_out + 1) * BLOCK,
                 sizeof data - (left_out + 1) * BLOCK}};
            receive_nothing_yet(&r, sizeof data);
            CHECK_INT(receive(image, ranges, 2, &r), GD_OK);
            CHECK_INT(r.stored, codec != GD_CODEC_NONE); /* the second one */
            CHECK_INT(r.plain, sizeof data - BLOCK);
            check_received(&r, data, ranges, 2);
            uint64_t end;
            CHECK_INT(gd_wire_frames(image, ranges, 2, &frames, &end, &x.err),
                      GD_OK);
            CHECK_INT(end, sizeof data);
            CHECK(!holds(&frames, data + left_out * BLOCK));
            CHECK(holds(&frames, data + (left_out + 1) % 8 * BLOCK));
            gd_frames_free(&frames);
        }
        gd_image_close(image);
        teardown();
    }
}

/* This holds for another image's blocks in the same segment, and for those of
 * a deleted image, whose entry is freed, but whose bytes are still there. */
TEST(test_other_images_blocks)
{
    static uint8_t data[SEGMENT];
    const gd_entry freed = {.state = GD_ENTRY_FREED};
    const gd_range all = {0, 7 * BLOCK};
    setup(64, GD_CODEC_NONE);
    fill_blocks(data, sizeof data, 1);
    gd_image_close(put_and_open("other", data, sizeof data));
    gd_image *image = put_and_open("a", data, 7 * BLOCK);
    for (int gone = 0; gone < 2; gone++) {
        gd_frames frames;
        received r;
        uint64_t end;
        CHECK_INT(gd_wire_frames(image, &all, 1, &frames, &end, &x.err),
                  GD_OK);
        CHECK(holds(&frames, data + 6 * BLOCK));
        CHECK(!holds(&frames, data + 7 * BLOCK));
        gd_frames_free(&frames);
        receive_nothing_yet(&r, 7 * BLOCK);
        CHECK_INT(receive(image, &all, 1, &r), GD_OK);
        CHECK_INT(r.plain, 7 * BLOCK);
        check_received(&r, data, &all, 1);
        write_entry(7, &freed);
    }
    gd_image_close(image);
    teardown();
}

/* A block that an image has many times goes out once. */
TEST(test_repeated_blocks)
{
    static uint8_t data[40 * BLOCK];
    const gd_range all = {0, sizeof data}, some = {8 * BLOCK, 20 * BLOCK};
    received r;
    setup(64, GD_CODEC_LZ4);
    for (size_t i = 0; i < 40; i++) {
        fill_random(data + i * BLOCK, BLOCK, i % 8);
    }
    gd_image *image = put_and_open("a", data, sizeof data);
    receive_nothing_yet(&r, sizeof data);
    CHECK_INT(receive(image, &all, 1, &r), GD_OK);
    CHECK_INT(r.plain, 8 * BLOCK);
    CHECK_INT(r.frames, 1);
    check_received(&r, data, &all, 1);
    receive_nothing_yet(&r, sizeof data);
    CHECK_INT(receive(image, &(gd_range){BLOCK, 3 * BLOCK}, 1, &r), GD_OK);
    CHECK_INT(r.plain, 3 * BLOCK);
    free(r.image);
    check_ranges(image, data, sizeof data, &some, 1);
    gd_image_close(image);
    teardown();
}

/* More than a megabyte of single blocks makes several plain frames. */
TEST(test_large_frames)
{
    enum { SIZE = 9 << 20 };
    static uint8_t data[SIZE];
    static gd_range ranges[SIZE / BLOCK / 2];
    size_t count = 0;
    received r;
    setup(32768, GD_CODEC_LZ4);
    fill_blocks(data, SIZE, 1);
    gd_image *image = put_and_open("a", data, SIZE);
    for (uint64_t at = 0; at < 6 << 20; at += 2 * BLOCK) {
        ranges[count++] = (gd_range){at, BLOCK};
    }
    receive_nothing_yet(&r, SIZE);
    CHECK_INT(receive(image, ranges, count, &r), GD_OK);
    CHECK_INT(r.frames, 3);
    check_received(&r, data, ranges, count);
    check_ranges(image, data, SIZE, &(gd_range){1 << 20, 4 << 20}, 1);
    /* A call ends with the last block that fits, and returns its end. */
    const gd_range most = {3 * BLOCK, GD_FRAMES_PLAIN};
    uint64_t end;
    receive_nothing_yet(&r, SIZE);
    CHECK_INT(receive_some(image, &(gd_range){3 * BLOCK, 8 << 20}, 1, &r,
                           &end),
              GD_OK);
    CHECK_INT(end, most.offset + most.length);
    check_received(&r, data, &most, 1);
    gd_image_close(image);
    teardown();
}

TEST(test_bad_ranges)
{
    enum { SIZE = 40 * BLOCK + 77 };
    static uint8_t data[SIZE];
    static const gd_range bad[][2] = {
        {{0, BLOCK}, {0, BLOCK}},            /* twice */
        {{0, 2 * BLOCK}, {BLOCK, BLOCK}},    /* overlapping */
        {{4 * BLOCK, BLOCK}, {0, BLOCK}},    /* not sorted */
        {{1, BLOCK - 1}, {BLOCK, 0}},        /* within a block */
        {{0, BLOCK - 1}, {BLOCK, 0}},
        {{0, BLOCK + 1}, {2 * BLOCK, 0}},
        {{39 * BLOCK, BLOCK + 76}, {SIZE, 0}},
        {{40 * BLOCK, BLOCK}, {SIZE, 0}},    /* behind the end */
        {{SIZE, 1}, {SIZE, 0}},
        {{SIZE + 1, 0}, {SIZE + 1, 0}},
        {{0, UINT64_MAX}, {SIZE, 0}},
        {{UINT64_MAX, UINT64_MAX}, {SIZE, 0}},
        {{BLOCK, UINT64_MAX - BLOCK + 1}, {SIZE, 0}},
    };
    received r;
    setup(64, GD_CODEC_LZ4);
    fill_blocks(data, SIZE, 1);
    memset(data + 10 * BLOCK, 0, 5 * BLOCK);
    gd_image *image = put_and_open("a", data, SIZE);
    receive_nothing_yet(&r, SIZE);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        if (!CHECK_INT(receive(image, bad[i], 2, &r), GD_INVALID)) {
            fprintf(stderr, "ranges %zu\n", i);
        }
        CHECK_CONTAINS(x.err.text, "images/a");
    }
    CHECK_INT(r.came, 0);
    free(r.image);
    /* Zeros may be cut anywhere. */
    const gd_range cut = {10 * BLOCK + 3, 100},
                   over[] = {{9 * BLOCK, BLOCK + 7}, {14 * BLOCK + 1, 1023}};
    check_ranges(image, data, SIZE, &cut, 0);
    receive_nothing_yet(&r, SIZE);
    CHECK_INT(receive(image, &cut, 1, &r), GD_OK);
    CHECK_INT(r.frames, 0);
    CHECK_INT(receive(image, over, 2, &r), GD_OK);
    CHECK_INT(r.came, 2 * BLOCK);
    CHECK(memcmp(r.image + 15 * BLOCK, data + 15 * BLOCK, BLOCK) == 0);
    free(r.image);
    gd_image_close(image);
    teardown();
}

/* I7: each byte of a segment's blocks is damaged, stored and in pieces. */
TEST(test_damaged_blocks_do_not_go_out)
{
    static uint8_t data[2 * SEGMENT];
    const gd_range all = {0, sizeof data}, some = {BLOCK, 2 * SEGMENT - BLOCK};
    received r;
    setup(64, GD_CODEC_NONE);
    fill_blocks(data, sizeof data, 1);
    gd_image *image = put_and_open("a", data, sizeof data);
    for (uint64_t at = 8192 + 32 + BLOCK; at < 8192 + 32 + SEGMENT; at += 97) {
        scratch_flip(&x, GROUP_1, at, 0x10);
        receive_nothing_yet(&r, sizeof data);
        CHECK_INT(receive(image, &all, 1, &r), GD_CORRUPT);
        CHECK_CONTAINS(x.err.text, GROUP_1);
        CHECK_INT(receive(image, &some, 1, &r), GD_CORRUPT);
        CHECK_INT(r.came, 0);
        free(r.image);
        scratch_flip(&x, GROUP_1, at, 0x10);
    }
    const gd_entry good = read_entry(3), other = read_entry(4);
    write_entry(3, &other); /* valid, but not the entry of "a" */
    receive_nothing_yet(&r, sizeof data);
    CHECK_INT(receive(image, &all, 1, &r), GD_CORRUPT);
    free(r.image);
    write_entry(3, &good);
    check_ranges(image, data, sizeof data, &all, 1);
    gd_image_close(image);
    teardown();
}

/* The old file of a rewritten group is at hand, without appended blocks. */
TEST(test_rewritten_group)
{
    static uint8_t data[40 * BLOCK];
    const gd_range all = {0, sizeof data};
    static uint8_t bytes[64000];
    for (int what = 0; what < 2; what++) {
        setup(64, GD_CODEC_NONE);
        fill_blocks(data, sizeof data, 1);
        gd_image *image = put_and_open("a", data, 20 * BLOCK);
        check_ranges(image, data, 20 * BLOCK, &(gd_range){0, BLOCK}, 1);
        gd_image_close(image);
        size_t size = (size_t)scratch_size(&x, GROUP_1);
        REQUIRE(size < sizeof bytes);
        scratch_read(&x, GROUP_1, bytes, size, 0);
        scratch_write(&x, "spool/new", bytes, size, 0);
        CHECK_INT(renameat(x.root, "spool/new", x.root, GROUP_1), 0);
        gd_repo *other = scratch_repo_filter(&x);
        CHECK_INT(put_image(other, "b", data, sizeof data, 4096, NULL,
                            &x.err),
                  GD_OK);
        gd_repo_close(other);
        image = require_image(repo, "b");
        if (what == 0) {
            check_ranges(image, data, sizeof data, &all, 1);
        } else {
            check_description(image, data, sizeof data);
        }
        gd_image_close(image);
        teardown();
    }
}

TEST(test_golden_frame)
{
    uint8_t data[BLOCK];
    gd_frames frames;
    memset(data, 'x', sizeof data);
    setup(64, GD_CODEC_NONE);
    gd_image *image = put_and_open("a", data, sizeof data);
    uint64_t end;
    CHECK_INT(gd_wire_frames(image, &(gd_range){0, BLOCK}, 1, &frames, &end,
                             &x.err),
              GD_OK);
    REQUIRE(frames.count == 1 && frames.length == 24 + 16 + BLOCK);
    uint8_t sum[8], header[24 + 16];
    uint8_t hashed[16 + 16 + BLOCK];
    memcpy(header, frames.bytes, sizeof header);
    memcpy(hashed, header, 16);
    memcpy(hashed + 16, frames.bytes + 24, 16 + BLOCK);
    gd_put64(sum, gd_checksum(hashed, sizeof hashed, 0));
    CHECK(memcmp(header + 16, sum, 8) == 0);
    memset(header + 16, 0, 8);
    const golden pieces[] = {{0, "474446520000010000020000"
                                 "00020000"},
                             {36, "00020000"}};
    CHECK(GOLDEN_MATCHES(header, sizeof header, pieces));
    CHECK(memcmp(frames.bytes + 40, data, BLOCK) == 0);
    gd_frames_free(&frames);
    gd_image_close(image);
    teardown();
}

TEST(test_failures)
{
    static const int errors[] = {EIO, ENOMEM};
    static uint8_t data[100 * BLOCK];
    const gd_range ranges[] = {{0, 30 * BLOCK}, {31 * BLOCK, 69 * BLOCK}};
    setup(64, GD_CODEC_ZSTD);
    fill_blocks(data, sizeof data, 1);
    gd_image_close(put_and_open("a", data, sizeof data));
    for (int kind = 0; kind < 2; kind++) {
        bool struck = true;
        unsigned failed = 0;
        for (uint64_t n = 1; struck; n++) {
            uint8_t *page = NULL;
            size_t length;
            received r;
            gd_repo_close(repo);
            repo = scratch_repo_filter(&x);
            gd_image *image = require_image(repo, "a");
            uint64_t faults = fault_env_faults(&x.f);
            fault_env_fail(&x.f, kind == 0 ? FAULT_ANY : FAULT_ALLOC, n,
                           errors[kind], kind == 0 && n % 2 == 0);
            receive_nothing_yet(&r, sizeof data);
            gd_status s = gd_wire_describe(image, 1, &page, &length, &x.err);
            x.env->release(x.env, page);
            gd_status t = receive(image, ranges, 2, &r);
            struck = fault_env_faults(&x.f) > faults;
            fault_env_heal(&x.f);
            CHECK(s == GD_OK || s == (kind == 0 ? GD_IO : GD_NOMEM));
            CHECK(t == GD_OK || t == (kind == 0 ? GD_IO : GD_NOMEM));
            failed += (s != GD_OK) + (t != GD_OK);
            if (t == GD_OK) {
                check_received(&r, data, ranges, 2);
            } else {
                CHECK_INT(r.came, 0);
                free(r.image);
            }
            gd_image_close(image);
        }
        CHECK(failed > 5);
    }
    teardown();
}
