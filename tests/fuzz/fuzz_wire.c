/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_wire.c - descriptions and frames for other repositories: any ranges are
 * refused, or give frames that another implementation of their layout, here,
 * decodes to exactly the requested bytes, and to no byte of another block.
 *
 * Input: cutting and storing of the images (2 bytes), their contents (4),
 * flags (1: ranges lie on blocks' borders), then ranges of 4 bytes.
 */
#include "engine/base/coding.h"
#include "engine/exchange/wire.h"
#include "engine/files/spool.h"
#include "engine/format/segment.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/repository.h"

enum {
    BLOCK = 512,
    LENGTH = 70 * BLOCK + 99,
    RANGES = 40,
    EXTENT = 24,
    BLOCK_RECORD = 36,
};

static uint8_t content[LENGTH], other[LENGTH];
static bool border[LENGTH + 1]; /* of a block */

/* ---- frames, taken apart ---- */

typedef struct frame {
    uint8_t codec;
    uint16_t places;
    uint32_t plain_length, stored_length;
    const uint8_t *place, *stored;
} frame;

/* Returns the frame at `at`; its length must be the whole `left`. */
static frame
parse_frame(const uint8_t *at, size_t left)
{
    frame f;
    MUST(left >= GD_FRAME_HEADER && memcmp(at, "GDFR", 4) == 0);
    f.codec = at[4];
    f.places = gd_get16(at + 6);
    f.plain_length = gd_get32(at + 8);
    f.stored_length = gd_get32(at + 12);
    f.place = at + GD_FRAME_HEADER;
    f.stored = f.place + (size_t)f.places * GD_FRAME_PLACE;
    MUST(at[5] == 0 && f.places >= 1 && f.plain_length <= GD_FRAME_PLAIN);
    MUST(left == GD_FRAME_HEADER + (size_t)f.places * GD_FRAME_PLACE +
                     f.stored_length);
    uint8_t *covered = malloc(left);
    MUST(covered != NULL);
    memcpy(covered, at, 16);
    memcpy(covered + 16, f.place, left - GD_FRAME_HEADER);
    MUST(gd_get64(at + 16) == gd_checksum(covered, left - 8, 0));
    free(covered);
    return f;
}

/* Marks the image's bytes in the frame; each byte of the frame is of one. */
static void
take_frame(gd_coder *coder, const frame *f, uint8_t *got)
{
    gd_error err;
    gd_segment_header header = {.codec = (gd_codec)f->codec,
                                .plain_length = f->plain_length,
                                .stored_length = f->stored_length};
    uint8_t *plain = malloc(f->plain_length);
    uint8_t *used = calloc(1, f->plain_length);
    MUST(plain != NULL && used != NULL);
    MUST(gd_segment_decode(coder, &header, f->stored, plain, "frame", 0,
                           &err) == GD_OK);
    for (uint32_t i = 0; i < f->places; i++) {
        const uint8_t *place = f->place + i * GD_FRAME_PLACE;
        uint64_t to = gd_get64(place);
        uint32_t from = gd_get32(place + 8), length = gd_get32(place + 12);
        MUST(length >= 1 && from <= f->plain_length &&
             length <= f->plain_length - from);
        MUST(to < LENGTH && length <= LENGTH - to);
        MUST(memcmp(plain + from, content + to, length) == 0);
        for (uint32_t k = 0; k < length; k++) {
            MUST(got[to + k] == 0);
            got[to + k] = 1;
            used[from + k] = 1;
        }
    }
    MUST(memchr(used, 0, f->plain_length) == NULL);
    free(used);
    free(plain);
}

/* ---- requests ---- */

static bool
are_legal(const gd_range *ranges, size_t count)
{
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t to;
        if (ranges[i].offset < end ||
            __builtin_add_overflow(ranges[i].offset, ranges[i].length, &to) ||
            to > LENGTH ||
            (ranges[i].length > 0 &&
             (!border[ranges[i].offset] || !border[to]))) {
            return false;
        }
        end = to;
    }
    return true;
}

static bool
is_wanted(const gd_range *ranges, size_t count, uint64_t offset)
{
    for (size_t i = 0; i < count; i++) {
        if (offset >= ranges[i].offset &&
            offset - ranges[i].offset < ranges[i].length) {
            return true;
        }
    }
    return false;
}

static void
check_frames(const gd_frames *frames, const gd_range *ranges, size_t count)
{
    static uint8_t got[LENGTH];
    gd_coder *coder;
    gd_error err;
    memset(got, 0, sizeof got);
    MUST(gd_coder_open(gd_env_posix(), &coder, &err) == GD_OK);
    size_t at = 0;
    for (size_t i = 0; i < frames->count; i++) {
        frame f = parse_frame(frames->bytes + at, frames->ends[i] - at);
        take_frame(coder, &f, got);
        at = frames->ends[i];
    }
    MUST(at == frames->length);
    gd_coder_close(gd_env_posix(), coder);
    for (size_t i = 0; i < LENGTH; i++) {
        if (is_wanted(ranges, count, i)) {
            MUST(got[i] == 1 || content[i] == 0); /* zeros are left out */
        } else {
            MUST(got[i] == 0);
        }
    }
}

static void
mark_borders(const gd_chunker *chunker)
{
    memset(border, 0, sizeof border);
    border[0] = true;
    for (size_t at = 0; at < LENGTH;) {
        at += chunker->next(chunker, content + at, LENGTH - at, 0, true);
        border[at] = true;
    }
}

/* Returns the offset so many blocks further on, or the end. */
static uint64_t
further(uint64_t at, uint64_t blocks)
{
    while (at < LENGTH && blocks > 0) {
        at++;
        blocks -= border[at];
    }
    return at;
}

static void
ask(repository *r, gd_image *image, input *in, bool on_borders)
{
    gd_range ranges[RANGES];
    gd_frames frames;
    size_t count = 0;
    uint64_t end = 0, behind;
    while (in->left > 0 && count < RANGES) {
        uint64_t gap = take16(in), length = take16(in);
        if (on_borders) {
            gap = further(end, gap % 8) - end;
            length = further(end + gap, length % 20) - end - gap;
        } else if (gap > 65000) {
            length = UINT64_MAX - length;
        }
        ranges[count++] = (gd_range){end + gap, length};
        end += gap + length;
    }
    gd_status s =
        gd_wire_frames(image, ranges, count, &frames, &behind, &r->err);
    if (s == GD_OK) {
        MUST(behind == end); /* the frames are small */
        check_frames(&frames, ranges, count);
    } else {
        MUST(s == GD_INVALID && r->err.text[0] != '\0');
    }
    MUST(s == GD_OK || !are_legal(ranges, count));
    gd_frames_free(&frames);
}

/* ---- descriptions ---- */

static void
check_description(repository *r, gd_image *image)
{
    uint64_t offset = 0;
    for (uint64_t i = 1; i <= gd_image_pages(image); i++) {
        uint8_t *out;
        size_t length;
        MUST(gd_wire_describe(image, i, &out, &length, &r->err) == GD_OK);
        for (size_t at = 0; at < length;) {
            MUST(length - at >= EXTENT && gd_get64(out + at) == offset);
            uint64_t bytes = gd_get64(out + at + 8), sum = 0;
            uint32_t blocks = gd_get32(out + at + 16);
            at += EXTENT;
            MUST((length - at) / BLOCK_RECORD >= blocks);
            for (uint32_t k = 0; k < blocks; k++, at += BLOCK_RECORD) {
                sum += gd_get32(out + at + GD_FINGERPRINT_SIZE);
            }
            MUST(blocks == 0 || sum == bytes);
            offset += bytes;
        }
        r->env->release(r->env, out);
    }
    MUST(offset == LENGTH);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static repository r;
    gd_image *image;
    input in = {data, size};
    uint8_t how = take8(&in), kinds = 1 + take8(&in) % 120;
    uint16_t seed = take16(&in), seed_other = take16(&in);
    uint8_t flags = take8(&in);
    repository_init(&r);
    r.params.codec = (gd_codec)(how % 3);
    r.params.segment_size = 512U << (how >> 2) % 6;
    if ((how & 64) != 0) {
        r.params.cut_minimum = 64;
        r.params.cut_average = 128;
    }
    repository_fill(content, LENGTH, BLOCK, kinds, seed);
    repository_fill(other, LENGTH, BLOCK, kinds, seed_other);
    MUST(repository_open(&r, (how & 128) == 0) == GD_OK);
    /* The image's blocks are then among another's. */
    MUST(repository_put(&r, "other", &gd_global_scope, other, LENGTH, 4000,
                        NULL) == GD_OK);
    MUST(repository_put(&r, "image", &gd_global_scope, content, LENGTH, 4000,
                        NULL) == GD_OK);
    MUST(gd_image_open(r.repo, "image", NULL, &image, &r.err) == GD_OK);
    check_description(&r, image);
    mark_borders(&r.repo->chunker);
    ask(&r, image, &in, (flags & 1) != 0);
    gd_image_close(image);
    repository_destroy(&r);
    return 0;
}
