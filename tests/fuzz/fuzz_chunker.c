/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_chunker.c - the cuts of a stream do not depend on its pieces; the fast
 * cuts, and the fast test for zeros, agree with the scalar ones.
 *
 * Input: block size (1), seed of the pieces (4); for blocks cut by their
 * content, the smallest and the average one (2 each); the stream.
 */
#include "engine/base/zero.h"
#include "engine/format/chunker.h"
#include "tests/fuzz/fuzz.h"

enum { MAX_BLOCKS = 1 << 16 };

typedef struct cuts {
    uint32_t lengths[MAX_BLOCKS];
    size_t count;
} cuts;

static void
add_cut(cuts *c, size_t length, const gd_chunker *chunker)
{
    MUST(length >= 1 && length <= chunker->max_length);
    MUST(c->count < MAX_BLOCKS);
    c->lengths[c->count++] = (uint32_t)length;
}

/* Cuts the whole stream at once. */
static void
cut_whole(const gd_chunker *chunker, const uint8_t *data, size_t size, cuts *c)
{
    c->count = 0;
    while (size > 0) {
        size_t length = chunker->next(chunker, data, size, 0, true);
        MUST(length <= size);
        MUST(chunker->minimum == 0 ||
             length == gd_chunker_next_scalar(chunker, data, size, true));
        add_cut(c, length, chunker);
        data += length;
        size -= length;
    }
}

/* The copy is as long as the bytes so far, so that a read beyond it is
 * detected. */
static size_t
ask(const gd_chunker *chunker, const uint8_t *data, size_t length,
    size_t known, bool last)
{
    uint8_t *copy = malloc(length + 1);
    MUST(copy != NULL);
    memcpy(copy + 1, data, length); /* of an odd alignment */
    size_t cut = chunker->next(chunker, copy + 1, length, known, last);
    free(copy);
    MUST(cut <= length);
    return cut;
}

static void
cut_pieces(const gd_chunker *chunker, const uint8_t *data, size_t size,
           uint32_t seed, cuts *c)
{
    size_t from = 0, had = 0, known = 0; /* had: too few bytes */
    c->count = 0;
    while (from < size) {
        seed = seed * 1664525 + 1013904223;
        size_t more = 1 + (seed >> 8) % (chunker->max_length * 3 / 2);
        had = size - had < more ? size : had + more;
        for (;;) {
            size_t cut = from == had ? 0
                                     : ask(chunker, data + from, had - from,
                                           known, had == size);
            if (cut == 0) {
                MUST(had - from < chunker->max_length && had < size);
                known = had - from;
                break;
            }
            known = 0;
            add_cut(c, cut, chunker);
            from += cut;
            if (from == size) {
                break;
            }
        }
    }
}

static void
check_zeros(const uint8_t *data, size_t size)
{
    for (size_t skip = 0; skip <= size && skip < 9; skip++) {
        size_t length = size - skip;
        uint8_t *copy = malloc(length + 1);
        MUST(copy != NULL);
        memcpy(copy + 1, data + skip, length);
        MUST(gd_is_zero(copy + 1, length) ==
             gd_is_zero_scalar(copy + 1, length));
        memset(copy + 1, 0, length);
        MUST(gd_is_zero(copy + 1, length));
        if (length > 0) {
            copy[1 + (size * 7 + skip * 31) % length] = 1;
            MUST(!gd_is_zero(copy + 1, length));
        }
        free(copy);
    }
}

static gd_status
open_gear(gd_chunker *chunker, input *in, size_t block, bool good)
{
    gd_error err;
    size_t minimum = take16(in), average = take16(in);
    if (average % 4 != 0) { /* so that enough are good */
        average = (size_t)128 << average % 8;
        minimum = 64 + minimum % average;
    }
    good = good && minimum >= GD_GEAR_WINDOW && minimum < average &&
           average < block && (average & (average - 1)) == 0;
    gd_status s = gd_chunker_gear(chunker, minimum, average, block, &err);
    MUST((s == GD_OK) == good && (good || err.text[0] != '\0'));
    return s;
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static cuts whole, pieces;
    input in = {data, size};
    gd_chunker chunker;
    gd_error err;
    size_t block = (size_t)take8(&in);
    uint32_t seed = take32(&in);
    bool gear = block % 16 >= 8;
    block = block < 128 ? (size_t)512 << block % 8 : block * 16;
    bool good = block >= GD_BLOCK_MIN && block <= GD_BLOCK_MAX &&
                (block & (block - 1)) == 0;
    gd_status s = gear ? open_gear(&chunker, &in, block, good)
                       : gd_chunker_fixed(&chunker, block, &err);
    MUST(gear || (s == GD_OK) == good);
    check_zeros(in.at, in.left);
    if (s == GD_OK) {
        cut_whole(&chunker, in.at, in.left, &whole);
        cut_pieces(&chunker, in.at, in.left, seed, &pieces);
        MUST(whole.count == pieces.count);
        MUST(memcmp(whole.lengths, pieces.lengths,
                    whole.count * sizeof whole.lengths[0]) == 0);
    }
    return 0;
}
