/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_segment.c - segments: any header and stored bytes decode within their
 * buffers or are refused, and compressed bytes decode to the same.
 *
 * Input: flags, then either a segment as it is stored, with its header; or
 * (flag 1) codec, level, and plain bytes. With flag 2 segments may have lists;
 * with flag 4 the checksum of the list is corrected.
 */
#include "engine/base/coding.h"
#include "engine/format/segment.h"
#include "tests/fuzz/fuzz.h"

enum { SLOTS = 500, MAX_SIZE = 1 << 16 };

/* Gives a list the checksum that its bytes have. */
static void
mend_list(uint8_t *whole, const input *in)
{
    uint32_t blocks = gd_get16(whole + 6);
    if ((size_t)GD_LISTED_SLOT * blocks > in->left) {
        return;
    }
    const gd_segment_header header = {
        .codec = (gd_codec)whole[4],
        .blocks = blocks,
        .first_slot = gd_get32(whole + 8),
        .plain_length = gd_get32(whole + 12),
        .stored_length = gd_get32(whole + 16),
        .slots = whole + GD_SEGMENT_HEADER,
    };
    gd_segment_header_encode(&header, 5, NULL, 0, whole);
}

static void
require_list(const gd_segment_header *header)
{
    uint32_t found = 0;
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        found += gd_segment_has_slot(header, slot);
    }
    MUST(found == header->blocks);
    MUST(gd_segment_has_slot(header, header->first_slot));
    MUST(!gd_segment_has_slot(header, SLOTS));
}

static void
decode_whole(gd_coder *coder, uint8_t *whole, size_t length,
             const gd_entry_bounds *bounds)
{
    gd_segment_header header;
    gd_error err;
    gd_status s = gd_segment_header_decode(whole, length, bounds, &header,
                                           "file", 77, &err);
    if (s != GD_OK) {
        MUST(s == GD_CORRUPT && strstr(err.text, "file") != NULL);
        return;
    }
    uint32_t list = gd_segment_list_size(&header);
    MUST(header.codec <= GD_CODEC_ZSTD && header.blocks >= 1);
    MUST(header.plain_length >= 1 && header.plain_length <= GD_SEGMENT_MAX);
    MUST(header.stored_length > list &&
         header.stored_length - list <= header.plain_length);
    if (list > 0) {
        MUST(bounds->has_lists && list <= length - GD_SEGMENT_HEADER);
        require_list(&header);
    }
    if (header.stored_length > MAX_SIZE) {
        return; /* mostly zeros: no use */
    }
    uint8_t *plain = malloc(header.plain_length);
    MUST(plain != NULL);
    (void)gd_segment_intact(whole, &header, 5);
    s = gd_segment_decode(coder, &header, whole + GD_SEGMENT_HEADER, plain,
                          "file", 77, &err);
    MUST(s == GD_OK || s == GD_CORRUPT);
    if (s == GD_OK) {
        uint64_t sum = gd_checksum(plain, header.plain_length, 0);
        MUST(sum != 0 || header.plain_length > 0); /* all of it is set */
    }
    free(plain);
}

static void
decode(gd_coder *coder, input *in, uint8_t flags)
{
    const gd_entry_bounds bounds = {
        .seed = 5, .slots = SLOTS, .has_lists = (flags & 2) != 0};
    size_t left = in->left < MAX_SIZE ? in->left : MAX_SIZE;
    size_t length = left < GD_SEGMENT_HEADER ? GD_SEGMENT_HEADER : left;
    uint8_t *whole = calloc(GD_SEGMENT_HEADER + MAX_SIZE, 1);
    MUST(whole != NULL);
    take_bytes(in, whole, GD_SEGMENT_HEADER);
    if (bounds.has_lists && (flags & 4) != 0 && whole[5] == 1) {
        memcpy(whole + GD_SEGMENT_HEADER, in->at, length - GD_SEGMENT_HEADER);
        mend_list(whole, in);
    }
    take_bytes(in, whole + GD_SEGMENT_HEADER, length - GD_SEGMENT_HEADER);
    decode_whole(coder, whole, length, &bounds);
    free(whole);
}

static void
encode(gd_coder *coder, input *in)
{
    gd_codec codec = (gd_codec)(take8(in) % 3);
    int level = take8(in) % 6;
    size_t length = in->left, stored = 0;
    gd_error err;
    if (length == 0) {
        return;
    }
    uint8_t *out = malloc(length), *plain = malloc(length);
    MUST(out != NULL && plain != NULL);
    MUST(gd_codec_compress(coder, codec, level, in->at, length, out,
                           &stored, &err) == GD_OK);
    MUST(stored == 0 || (codec != GD_CODEC_NONE &&
                         stored < length - length / 16));
    gd_segment_header header = {
        .codec = stored == 0 ? GD_CODEC_NONE : codec,
        .blocks = 1,
        .first_slot = 3,
        .plain_length = (uint32_t)length,
        .stored_length = (uint32_t)(stored == 0 ? length : stored),
    };
    uint8_t *whole = malloc(GD_SEGMENT_HEADER + header.stored_length);
    MUST(whole != NULL);
    memcpy(whole + GD_SEGMENT_HEADER, stored == 0 ? in->at : out,
           header.stored_length);
    size_t half = header.stored_length / 2;
    struct iovec pieces[2] = {
        {whole + GD_SEGMENT_HEADER, half},
        {whole + GD_SEGMENT_HEADER + half, header.stored_length - half}};
    gd_segment_header_encode(&header, 99, pieces, 2, whole);
    gd_segment_header again;
    const gd_entry_bounds bounds = {.seed = 99, .slots = SLOTS};
    MUST(gd_segment_header_decode(
             whole, GD_SEGMENT_HEADER + (size_t)header.stored_length, &bounds,
             &again, "file", 0, &err) == GD_OK);
    MUST(again.codec == header.codec && again.blocks == 1 &&
         again.first_slot == 3 &&
         again.plain_length == header.plain_length &&
         again.stored_length == header.stored_length);
    MUST(gd_segment_intact(whole, &again, 99));
    MUST(!gd_segment_intact(whole, &again, 98));
    MUST(gd_segment_decode(coder, &again, whole + GD_SEGMENT_HEADER, plain,
                           "file", 0, &err) == GD_OK);
    MUST(memcmp(plain, in->at, length) == 0);
    free(whole);
    free(plain);
    free(out);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static gd_coder *coder; /* for the whole run, with its contexts */
    gd_error err;
    input in = {data, size};
    if (coder == NULL) {
        MUST(gd_coder_open(gd_env_posix(), &coder, &err) == GD_OK);
    }
    uint8_t flags = take8(&in);
    if ((flags & 1) == 0) {
        decode(coder, &in, flags);
    } else {
        encode(coder, &in);
    }
    return 0;
}
