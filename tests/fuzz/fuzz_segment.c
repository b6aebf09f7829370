/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_segment.c - segments: any header and stored bytes decode within their
 * buffers or are refused, and what is compressed decodes to the same.
 *
 * Input: flags, then either a segment as it is stored, with its header; or (flag
 * 1) codec, level, and plain bytes.
 */
#include "engine/base/coding.h"
#include "engine/format/segment.h"
#include "tests/fuzz/fuzz.h"

static void
decode(gd_coder *coder, input *in)
{
    gd_segment_header header;
    gd_error err;
    uint8_t raw[GD_SEGMENT_HEADER];
    take_bytes(in, raw, sizeof raw);
    gd_status s = gd_segment_header_decode(raw, &header, "file", 77, &err);
    if (s != GD_OK) {
        MUST(s == GD_CORRUPT && strstr(err.text, "file") != NULL);
        return;
    }
    MUST(header.codec <= GD_CODEC_ZSTD && header.blocks >= 1);
    MUST(header.plain_length >= 1 && header.plain_length <= GD_SEGMENT_MAX);
    MUST(header.stored_length >= 1 &&
         header.stored_length <= header.plain_length);
    if (header.stored_length > 1 << 16) {
        return; /* zeros for the most part: nothing to learn */
    }
    uint8_t *whole = malloc(GD_SEGMENT_HEADER + header.stored_length);
    uint8_t *plain = malloc(header.plain_length);
    MUST(whole != NULL && plain != NULL);
    memcpy(whole, raw, sizeof raw);
    take_bytes(in, whole + GD_SEGMENT_HEADER, header.stored_length);
    (void)gd_segment_intact(whole, &header, 5);
    s = gd_segment_decode(coder, &header, whole + GD_SEGMENT_HEADER, plain,
                          "file", 77, &err);
    MUST(s == GD_OK || s == GD_CORRUPT);
    if (s == GD_OK) {
        uint64_t sum = gd_checksum(plain, header.plain_length, 0);
        MUST(sum != 0 || header.plain_length > 0); /* all of it is set */
    }
    free(plain);
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
    MUST(gd_segment_compress(coder, codec, level, in->at, length, out,
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
    MUST(gd_segment_header_decode(whole, &again, "file", 0, &err) == GD_OK);
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
    static gd_coder *coder; /* for the whole run: contexts are kept, too */
    gd_error err;
    input in = {data, size};
    if (coder == NULL) {
        MUST(gd_coder_open(gd_env_posix(), &coder, &err) == GD_OK);
    }
    if ((take8(&in) & 1) == 0) {
        decode(coder, &in);
    } else {
        encode(coder, &in);
    }
    return 0;
}
