/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_segment.c - segment headers and the codecs: known bytes, no flipped bit
 * passes, and no stored bytes, however hostile, decode beyond their bounds.
 */
#include "engine/format/segment.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

#define SEED UINT64_C(0x1122334455667788)

enum { LENGTH = 65536 };

typedef struct fixture {
    fault_env f;
    gd_coder *coder;
    gd_error err;
    uint8_t plain[LENGTH], back[LENGTH];
    uint8_t raw[GD_SEGMENT_HEADER + LENGTH]; /* header and stored bytes */
} fixture;

static fixture x;

static void
setup(void)
{
    memset(&x, 0, sizeof x);
    fault_env_init(&x.f);
    CHECK_INT(gd_coder_open(&x.f.env, &x.coder, &x.err), GD_OK);
    fill_image(x.plain, LENGTH, 4096, 4, 1);
}

static void
teardown(void)
{
    gd_coder_close(&x.f.env, x.coder);
    CHECK_INT(fault_env_leaks(&x.f), 0);
    fault_env_destroy(&x.f);
}

static gd_status
decode_header(gd_segment_header *header)
{
    const gd_entry_bounds bounds = {.seed = SEED, .slots = 1000};
    return gd_segment_header_decode(x.raw, sizeof x.raw, &bounds, header,
                                    "groups/00000001", 77, &x.err);
}

TEST(test_known_bytes)
{
    static const golden known[] = {
        {0, "47445347010003003d0000000030000005"}, {24, "28af6d4647682be8"}};
    static const uint8_t stored[] = {0x11, 0x22, 0x33, 0x44, 0x55};
    const gd_segment_header header = {.codec = GD_CODEC_LZ4,
                                      .blocks = 3,
                                      .first_slot = 61,
                                      .plain_length = 12288,
                                      .stored_length = sizeof stored};
    gd_segment_header back;
    setup();
    memset(x.raw, 0xee, GD_SEGMENT_HEADER);
    for (size_t cut = 0; cut <= sizeof stored; cut++) {
        struct iovec pieces[] = {{(void *)stored, cut},
                                 {(void *)(stored + cut), 5 - cut}};
        gd_segment_header_encode(&header, SEED, pieces, 2, x.raw);
        CHECK(GOLDEN_MATCHES(x.raw, GD_SEGMENT_HEADER, known));
    }
    memcpy(x.raw + GD_SEGMENT_HEADER, stored, sizeof stored);
    CHECK_INT(decode_header(&back), GD_OK);
    CHECK(back.codec == header.codec && back.blocks == header.blocks &&
          back.first_slot == header.first_slot && back.slots == NULL &&
          back.plain_length == header.plain_length &&
          back.stored_length == header.stored_length);
    CHECK(gd_segment_intact(x.raw, &back, SEED));
    CHECK(!gd_segment_intact(x.raw, &back, SEED + 1));
    for (uint32_t slot = 0; slot < 130; slot++) {
        CHECK(gd_segment_has_slot(&back, slot) ==
              (slot >= 61 && slot < 61 + 3));
    }
    teardown();
}

/* Overwrites eight bytes somewhere on the stack below. */
static __attribute__((noinline)) uint8_t
scribble(size_t at)
{
    volatile uint8_t area[8192];
    for (size_t i = 0; i < 8; i++) {
        area[at + i] = 0xcc;
    }
    return area[at];
}

/* The checksum is that of the format, whatever bytes earlier calls left on the
 * stack: xxHash's streaming state keeps a seed's secret from one use to the
 * next. */
TEST(test_checksum_is_repeatable)
{
    static const gd_segment_header header = {
        .codec = GD_CODEC_NONE, .blocks = 1, .plain_length = 4096,
        .stored_length = 4096};
    struct iovec piece = {x.plain, 4096};
    unsigned wrong = 0;
    setup();
    gd_segment_header_encode(&header, SEED, &piece, 1, x.raw);
    memcpy(x.back, x.raw, 24);
    memcpy(x.back + 24, x.plain, 4096);
    uint64_t wanted = gd_checksum(x.back, 24 + 4096, SEED);
    /* No other call may use the stack between two calls. */
    for (size_t at = 0; at + 8 <= 8192; at += 8) {
        gd_segment_header_encode(&header, SEED, &piece, 1, x.raw);
        (void)scribble(at);
        gd_segment_header_encode(&header, SEED, &piece, 1, x.raw);
        wrong += gd_get64(x.raw + 24) != wanted;
    }
    CHECK_INT(wrong, 0);
    teardown();
}

/* A segment of plain in raw.  False if compression does not pay. */
static bool
make_segment(gd_codec codec, int level, size_t length,
             gd_segment_header *header)
{
    size_t stored;
    CHECK_INT(gd_codec_compress(x.coder, codec, level, x.plain, length,
                                x.raw + GD_SEGMENT_HEADER, &stored, &x.err),
              GD_OK);
    *header = (gd_segment_header){.codec = codec,
                                  .blocks = 1,
                                  .plain_length = (uint32_t)length,
                                  .stored_length = (uint32_t)stored};
    struct iovec piece = {x.raw + GD_SEGMENT_HEADER, stored};
    gd_segment_header_encode(header, SEED, &piece, 1, x.raw);
    return stored > 0;
}

static gd_status
decode(const gd_segment_header *header)
{
    return gd_segment_decode(x.coder, header, x.raw + GD_SEGMENT_HEADER,
                             x.back, "groups/00000001", 77, &x.err);
}

TEST_WITH(test_every_flip_is_noticed, setup(), teardown())
{
    gd_segment_header header;
    REQUIRE(make_segment(GD_CODEC_LZ4, 0, 4096, &header));
    for (size_t at = 0; at < GD_SEGMENT_HEADER + header.stored_length; at++) {
        for (int bit = 0; bit < 8; bit++) {
            gd_segment_header back;
            x.raw[at] ^= (uint8_t)(1 << bit);
            if (decode_header(&back) == GD_OK &&
                back.stored_length <= LENGTH &&
                !CHECK(!gd_segment_intact(x.raw, &back, SEED))) {
                fprintf(stderr, "byte %zu\n", at);
            }
            x.raw[at] ^= (uint8_t)(1 << bit);
        }
    }
    CHECK(gd_segment_intact(x.raw, &header, SEED));
}

TEST(test_bounds_of_headers)
{
    static const struct {
        gd_segment_header header;
        gd_status wanted;
    } cases[] = {
        {{GD_CODEC_NONE, 1, 0, 1, 1, NULL}, GD_OK},
        {{GD_CODEC_NONE, 256, 32000, 1 << 20, 1 << 20, NULL}, GD_OK},
        {{GD_CODEC_ZSTD, 65535, 0, 1 << 20, 1, NULL}, GD_OK},
        {{GD_CODEC_LZ4, 1, 0, 4096, 4096, NULL}, GD_OK},
        {{GD_CODEC_NONE, 0, 0, 4096, 4096, NULL}, GD_CORRUPT},
        {{GD_CODEC_NONE, 1, 0, 0, 0, NULL}, GD_CORRUPT},
        {{GD_CODEC_NONE, 1, 0, 4096, 4095, NULL}, GD_CORRUPT},
        {{GD_CODEC_LZ4, 1, 0, 4096, 0, NULL}, GD_CORRUPT},
        {{GD_CODEC_LZ4, 1, 0, 4096, 4097, NULL}, GD_CORRUPT},
        {{GD_CODEC_LZ4, 1, 0, (1 << 20) + 1, 1, NULL}, GD_CORRUPT},
        {{GD_CODEC_LZ4, 1, 0, UINT32_MAX, UINT32_MAX, NULL}, GD_CORRUPT},
        {{(gd_codec)3, 1, 0, 4096, 4096, NULL}, GD_CORRUPT},
        {{(gd_codec)255, 1, 0, 4096, 4096, NULL}, GD_CORRUPT},
    };
    setup();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        gd_segment_header back;
        gd_segment_header_encode(&cases[i].header, SEED, NULL, 0, x.raw);
        CHECK_INT(decode_header(&back), cases[i].wanted);
        if (cases[i].wanted != GD_OK) {
            CHECK_CONTAINS(x.err.text, "groups/00000001");
            CHECK_CONTAINS(x.err.text, "77");
        }
    }
    teardown();
}

/* ---- lists ---- */

enum { LISTED_BLOCKS = 4 };

static const gd_entry_bounds with_lists = {
    .seed = SEED, .slots = 1000, .has_lists = true};

/* Makes x.raw a segment of plain blocks with these slots, whose checksums are
 * right whatever the slots are.  Returns its length. */
static size_t
make_listed_from(uint32_t first_slot, const uint16_t *slots, uint32_t blocks)
{
    uint8_t *list = x.raw + GD_SEGMENT_HEADER;
    size_t size = (size_t)GD_LISTED_SLOT * blocks;
    for (uint32_t i = 0; i < blocks; i++) {
        gd_put16(list + GD_LISTED_SLOT * i, slots[i]);
    }
    memcpy(list + size, x.plain, 400);
    gd_segment_header header = {.codec = GD_CODEC_NONE,
                                .blocks = blocks,
                                .first_slot = first_slot,
                                .plain_length = 400,
                                .stored_length = (uint32_t)(size + 400),
                                .slots = list};
    struct iovec behind = {list, size + 400};
    gd_segment_header_encode(&header, SEED, &behind, 1, x.raw);
    return GD_SEGMENT_HEADER + size + 400;
}

static size_t
make_listed(const uint16_t *slots, uint32_t blocks)
{
    return make_listed_from(slots[0], slots, blocks);
}

static gd_status
decode_listed(size_t length, gd_segment_header *header)
{
    return gd_segment_header_decode(x.raw, length, &with_lists, header,
                                    "groups/00000001", 77, &x.err);
}

TEST_WITH(test_a_list, setup(), teardown())
{
    static const uint16_t slots[] = {3, 7, 500, 999};
    static const golden known[] = {
        {0, "474453470001040003000000900100009801000071a6793a"},
        {24, "03000700f401e703"}};
    gd_segment_header header;
    size_t length = make_listed(slots, LISTED_BLOCKS);
    memcpy(x.back, x.raw, 24); /* all but the checksum of the segment */
    memcpy(x.back + 24, x.raw + GD_SEGMENT_HEADER, 8);
    CHECK(GOLDEN_MATCHES(x.back, 24 + 8, known));
    REQUIRE(CHECK_INT(decode_listed(length, &header), GD_OK));
    CHECK_INT(header.blocks, LISTED_BLOCKS);
    CHECK_INT(header.first_slot, 3);
    CHECK_INT(gd_segment_list_size(&header), 8);
    CHECK(gd_segment_intact(x.raw, &header, SEED));
    for (uint32_t slot = 0, next = 0; slot < 1002; slot++) {
        bool has = next < LISTED_BLOCKS && slots[next] == slot;
        CHECK(gd_segment_has_slot(&header, slot) == has);
        next += has;
    }
    CHECK_INT(gd_segment_decode(x.coder, &header, x.raw + GD_SEGMENT_HEADER,
                                x.back, "file", 0, &x.err), GD_OK);
    CHECK(memcmp(x.back, x.plain, 400) == 0);
    /* In groups without lists, the byte of the layout has no meaning. */
    CHECK_INT(decode_header(&header), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "impossible segment header");
}

/* The list alone decides which slots there are, whatever follows it, and
 * however short it is. */
TEST_WITH(test_what_follows_a_list, setup(), teardown())
{
    static const uint16_t slots[] = {3, 7, 500, 999};
    gd_segment_header header;
    memset(x.plain, 0, 400);
    for (uint32_t blocks = 1; blocks <= LISTED_BLOCKS; blocks++) {
        size_t length = make_listed(slots, blocks);
        CHECK_INT(decode_listed(length, &header), GD_OK);
        CHECK_INT(gd_segment_list_size(&header), GD_LISTED_SLOT * blocks);
        CHECK(!gd_segment_has_slot(&header, 0));
        for (uint32_t i = 0; i < LISTED_BLOCKS; i++) {
            CHECK(gd_segment_has_slot(&header, slots[i]) == (i < blocks));
        }
        CHECK_INT(gd_segment_decode(x.coder, &header,
                                    x.raw + GD_SEGMENT_HEADER, x.back, "file",
                                    0, &x.err), GD_OK);
        CHECK(memcmp(x.back, x.plain, 400) == 0);
    }
}

/* No change of the list results in another valid list. */
TEST_WITH(test_each_bit_of_a_list, setup(), teardown())
{
    static const uint16_t slots[] = {3, 7, 500, 999};
    gd_segment_header header;
    size_t length = make_listed(slots, LISTED_BLOCKS);
    for (size_t bit = 0; bit < 8 * (size_t)(GD_SEGMENT_HEADER + 8); bit++) {
        bool of_segment = bit / 8 >= 24 && bit / 8 < GD_SEGMENT_HEADER;
        x.raw[bit / 8] ^= (uint8_t)(1 << bit % 8);
        gd_status s = decode_listed(length, &header);
        /* With one changed bit it is a segment without a list: then its length
         * is wrong. */
        if (!CHECK_INT(s, of_segment ? GD_OK : GD_CORRUPT)) {
            fprintf(stderr, "bit %zu\n", bit);
        }
        x.raw[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    CHECK_INT(decode_listed(length, &header), GD_OK);
}

/* The checksums of these wrong lists are right. */
TEST_WITH(test_wrong_lists, setup(), teardown())
{
    static const uint16_t wrong[][LISTED_BLOCKS] = {
        {3, 7, 7, 999},    /* one twice */
        {3, 500, 7, 999},  /* two swapped */
        {7, 3, 500, 999},
        {3, 7, 999, 500},
        {3, 7, 500, 1000}, /* not in the group */
        {3, 7, 500, 65535},
    };
    gd_segment_header header;
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        size_t length = make_listed(wrong[i], LISTED_BLOCKS);
        CHECK_INT(decode_listed(length, &header), GD_CORRUPT);
        CHECK_CONTAINS(x.err.text, "groups/00000001");
        CHECK_CONTAINS(x.err.text, "list of slots that is not right");
    }
    /* The first slot is not the header's. */
    size_t length =
        make_listed_from(2, (const uint16_t[]){3, 7, 500, 999}, 4);
    CHECK_INT(decode_listed(length, &header), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "list of slots that is not right");
    /* The list is longer than the bytes that were read, and than the
     * segment. */
    length = make_listed((const uint16_t[]){3, 7, 500, 999}, 4);
    for (size_t read = GD_SEGMENT_HEADER; read < length; read++) {
        CHECK_INT(decode_listed(read, &header),
                  read < GD_SEGMENT_HEADER + 8 ? GD_CORRUPT : GD_OK);
    }
    gd_put16(x.raw + 6, 204);
    CHECK_INT(decode_listed(length, &header), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "longer list of slots than bytes");
    /* The list is as long as the segment, which then has no block. */
    gd_put16(x.raw + 6, 4);
    gd_put32(x.raw + 16, 8);
    CHECK_INT(decode_listed(length, &header), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "longer list of slots than bytes");
    gd_put32(x.raw + 16, 408);
    CHECK_INT(decode_listed(length, &header), GD_OK);
    gd_put16(x.raw + 6, 0);
    CHECK_INT(decode_listed(length, &header), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "impossible segment header");
    /* The layout is unknown. */
    (void)make_listed((const uint16_t[]){3, 7, 500, 999}, 4);
    x.raw[5] = 2;
    CHECK_INT(decode_listed(length, &header), GD_CORRUPT);
    CHECK_CONTAINS(x.err.text, "impossible segment header");
}

/* ---- codecs ---- */

TEST_WITH(test_round_trips, setup(), teardown())
{
    static const size_t lengths[] = {1, 2, 15, 16, 17, 31, 32, 500, 4096,
                                     4097, 12345, 65535, LENGTH};
    unsigned paid = 0;
    memset(x.plain, 't', 4096);
    for (int codec = GD_CODEC_NONE; codec <= GD_CODEC_ZSTD; codec++) {
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
            gd_segment_header header;
            int level = codec == GD_CODEC_ZSTD ? (int)i : 0;
            size_t length = lengths[i];
            if (make_segment((gd_codec)codec, level, length, &header)) {
                paid++;
                CHECK(header.stored_length < length - length / 16);
                memset(x.back, 0xee, LENGTH);
                CHECK_INT(decode(&header), GD_OK);
                CHECK(memcmp(x.back, x.plain, length) == 0);
                CHECK(length == LENGTH || x.back[length] == 0xee);
            } else {
                CHECK(codec == GD_CODEC_NONE || length <= 32);
            }
        }
    }
    CHECK(paid >= 2 * 6);
}

/* The last byte of a sixteenth decides; out has no more room than plain. */
TEST_WITH(test_what_does_not_pay, setup(), teardown())
{
    fill_random(x.plain, LENGTH, 9);
    for (int codec = GD_CODEC_LZ4; codec <= GD_CODEC_ZSTD; codec++) {
        uint8_t *out = malloc(4096); /* a sanitizer sees its end */
        bool paid = false;
        for (size_t text = 0; text < 1024; text++) {
            size_t stored;
            memset(x.plain, 'a', text);
            CHECK_INT(gd_codec_compress(x.coder, (gd_codec)codec, 0, x.plain,
                                        4096, out, &stored, &x.err),
                      GD_OK);
            CHECK(stored < 4096 - 256);
            CHECK(!paid || stored > 0);
            paid = stored > 0;
        }
        CHECK(paid);
        free(out);
        fill_random(x.plain, LENGTH, 9);
    }
}

/* Bytes that are cut short, longer, noise, of another codec, or have any bit
 * flipped give an error, or bytes within the lengths of the header. */
TEST_WITH(test_hostile_bytes, setup(), teardown())
{
    for (int codec = GD_CODEC_LZ4; codec <= GD_CODEC_ZSTD; codec++) {
        gd_segment_header header;
        fill_image(x.plain, LENGTH, 4096, 4, 1);
        REQUIRE(make_segment((gd_codec)codec, 0, 4096, &header));
        uint32_t whole = header.stored_length;
        for (uint32_t plain = 1; plain < 9000; plain += 127) {
            header.plain_length = plain;
            CHECK_INT(decode(&header), GD_CORRUPT); /* never is it 4096 */
            CHECK_CONTAINS(x.err.text, "groups/00000001");
        }
        header.plain_length = 4096;
        for (uint32_t stored = 1; stored < whole; stored++) {
            header.stored_length = stored;
            CHECK_INT(decode(&header), GD_CORRUPT);
        }
        header.stored_length = whole;
        for (uint32_t bit = 0; bit < 8 * whole; bit++) {
            x.raw[GD_SEGMENT_HEADER + bit / 8] ^= (uint8_t)(1 << bit % 8);
            memset(x.back, 0xee, LENGTH);
            (void)decode(&header);
            CHECK(x.back[4096] == 0xee);
            x.raw[GD_SEGMENT_HEADER + bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        CHECK_INT(decode(&header), GD_OK);
        header.codec = codec == GD_CODEC_LZ4 ? GD_CODEC_ZSTD : GD_CODEC_LZ4;
        CHECK_INT(decode(&header), GD_CORRUPT);
        for (uint64_t seed = 0; seed < 300; seed++) {
            fill_random(x.raw + GD_SEGMENT_HEADER, whole, seed);
            header.codec = (gd_codec)codec;
            memset(x.back, 0xee, LENGTH);
            (void)decode(&header);
            CHECK(x.back[4096] == 0xee);
        }
    }
}
