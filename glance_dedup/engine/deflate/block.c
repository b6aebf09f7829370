/* SPDX-License-Identifier: Apache-2.0 */
/*
 * block.c - see block.h.  The terms are those of RFC 1951.
 *
 * A code of lengths and distances begins with its base: the smallest value that
 * it stands for.  Lengths are less GD_BLOCK_MIN_MATCH here, distances less one.
 */
#include "engine/deflate/block.h"

#include <string.h>

enum {
    END_OF_BLOCK = 256,
    FIRST_LENGTH = 257,
    LENGTH_SYMBOLS = 19,
    MAX_LENGTH_BITS = 7,
    REPEAT_PREVIOUS = 16,
    REPEAT_ZERO = 17,
    REPEAT_ZERO_LONG = 18,
    MAX_FIXED_LITERALS = 288,
    FIXED_DISTANCE_BITS = 5,
    STORED = 0,
    FIXED = 1,
    DYNAMIC = 2,
};

/* One item of the code lengths: a symbol, and the value of its extra bits. */
typedef struct packed_lengths {
    uint8_t symbol[GD_BLOCK_LITERALS + GD_BLOCK_DISTANCES];
    uint8_t extra[GD_BLOCK_LITERALS + GD_BLOCK_DISTANCES];
    unsigned count;
    unsigned sent_lengths; /* of the code that codes these symbols */
} packed_lengths;

static const uint8_t length_order[LENGTH_SYMBOLS] = {
    16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};

static unsigned
highest_bit(uint32_t value)
{
    return 31 - (unsigned)__builtin_clz(value);
}

/* ---- codes of lengths and distances ---- */

/* The first 8 lengths have a code each, then four share each power of two.  The
 * longest match has a code of its own. */
static inline unsigned
length_code(uint32_t length)
{
    if (length < 8) {
        return length;
    }
    unsigned high = highest_bit(length);
    return length == 255 ? 28 : 4 * (high - 1) + (length >> (high - 2) & 3);
}

static inline unsigned
length_extra_bits(unsigned code)
{
    return code < 8 || code == 28 ? 0 : code / 4 - 1;
}

static inline unsigned
distance_code(uint32_t distance)
{
    if (distance < 4) {
        return distance;
    }
    unsigned high = highest_bit(distance);
    return 2 * high + (distance >> (high - 1) & 1);
}

static inline unsigned
distance_extra_bits(unsigned code)
{
    return code < 4 ? 0 : code / 2 - 1;
}

/* The low bits of a value are the bits that its code leaves open, as every base
 * is a multiple of their range. */
static inline uint32_t
low_bits(uint32_t value, unsigned bits)
{
    return value & ((1u << bits) - 1);
}

/* ---- the fixed codes ---- */

static unsigned
fixed_literal_bits(unsigned symbol)
{
    return symbol < 144 ? 8 : symbol < 256 ? 9 : symbol < 280 ? 7 : 8;
}

static void
set_fixed_codes(gd_block *block)
{
    for (unsigned s = 0; s < MAX_FIXED_LITERALS; s++) {
        block->literals.bits[s] = (uint8_t)fixed_literal_bits(s);
    }
    gd_hufftree_assign_codes(&block->literals, MAX_FIXED_LITERALS);
    memset(block->distances.bits, FIXED_DISTANCE_BITS, GD_BLOCK_DISTANCES);
    gd_hufftree_assign_codes(&block->distances, GD_BLOCK_DISTANCES);
}

/* ---- sizes ---- */

static void
count_symbols(gd_block *block)
{
    uint32_t *literals = block->literals.frequency;
    uint32_t *distances = block->distances.frequency;
    memset(literals, 0, sizeof block->literals.frequency);
    memset(distances, 0, sizeof block->distances.frequency);
    for (size_t i = 0; i < block->count; i++) {
        uint32_t symbol = block->symbols[i], distance = symbol >> 8;
        if (distance == 0) {
            literals[symbol]++;
        } else {
            literals[FIRST_LENGTH + length_code(symbol & 255)]++;
            distances[distance_code(distance - 1)]++;
        }
    }
    literals[END_OF_BLOCK] = 1;
}

typedef struct sizes {
    uint64_t fixed, dynamic; /* bits of the symbols */
} sizes;

/* Before the trees are built, so that frequencies are the symbols' own. */
static uint64_t
fixed_size(const gd_block *block)
{
    uint64_t bits = 0;
    for (unsigned s = 0; s < GD_BLOCK_LITERALS; s++) {
        unsigned extra = s < FIRST_LENGTH
                             ? 0 : length_extra_bits(s - FIRST_LENGTH);
        bits += (uint64_t)block->literals.frequency[s] *
                (fixed_literal_bits(s) + extra);
    }
    for (unsigned s = 0; s < GD_BLOCK_DISTANCES; s++) {
        bits += (uint64_t)block->distances.frequency[s] *
                (FIXED_DISTANCE_BITS + distance_extra_bits(s));
    }
    return bits;
}

static uint64_t
code_size(const gd_hufftree *tree, unsigned symbols, const uint32_t *counted)
{
    uint64_t bits = 0;
    for (unsigned s = 0; s < symbols; s++) {
        bits += (uint64_t)counted[s] * tree->bits[s];
    }
    return bits;
}

/* ---- the lengths of the codes, packed ---- */

static void
pack(packed_lengths *packed, unsigned symbol, unsigned extra)
{
    packed->symbol[packed->count] = (uint8_t)symbol;
    packed->extra[packed->count++] = (uint8_t)extra;
}

/* A run of zeros is at most 138 long.  Of another length, the first is sent
 * unless it follows the same length, and runs of 3 to 6 after it are repeats. */
static void
pack_run(packed_lengths *packed, unsigned length, unsigned run, bool follows)
{
    if (length == 0 && run >= 3) {
        pack(packed, run <= 10 ? REPEAT_ZERO : REPEAT_ZERO_LONG,
             run <= 10 ? run - 3 : run - 11);
        return;
    }
    if (length != 0 && !follows && run >= 4) {
        pack(packed, length, 0);
        run--;
        follows = true;
    }
    if (length != 0 && follows && run >= 3) {
        pack(packed, REPEAT_PREVIOUS, run - 3);
        return;
    }
    for (; run > 0; run--) {
        pack(packed, length, 0);
    }
}

/* The codes of literals and of distances are packed one after the other: no run
 * spans both. */
static void
pack_lengths(packed_lengths *packed, const gd_hufftree *tree)
{
    unsigned previous = UINT32_MAX;
    for (unsigned at = 0; at <= tree->max_symbol;) {
        unsigned length = tree->bits[at], run = 1;
        unsigned max = length == 0 ? 138 : length == previous ? 6 : 7;
        while (run < max && at + run <= tree->max_symbol &&
               tree->bits[at + run] == length) {
            run++;
        }
        pack_run(packed, length, run, length == previous);
        previous = length;
        at += run;
    }
}

static unsigned
extra_bits_of_repeat(unsigned symbol)
{
    return symbol == REPEAT_PREVIOUS ? 2 : symbol == REPEAT_ZERO ? 3
           : symbol == REPEAT_ZERO_LONG ? 7 : 0;
}

/* Returns the bits of the whole description of the codes. */
static uint64_t
make_description(gd_block *block, packed_lengths *packed)
{
    gd_hufftree *tree = &block->lengths;
    packed->count = 0;
    pack_lengths(packed, &block->literals);
    pack_lengths(packed, &block->distances);
    memset(tree->frequency, 0, sizeof tree->frequency);
    for (unsigned i = 0; i < packed->count; i++) {
        tree->frequency[packed->symbol[i]]++;
    }
    gd_hufftree_build(tree, LENGTH_SYMBOLS, MAX_LENGTH_BITS);
    packed->sent_lengths = LENGTH_SYMBOLS;
    while (packed->sent_lengths > 4 &&
           tree->bits[length_order[packed->sent_lengths - 1]] == 0) {
        packed->sent_lengths--;
    }
    uint64_t bits = 5 + 5 + 4 + 3 * packed->sent_lengths;
    for (unsigned i = 0; i < packed->count; i++) {
        bits += tree->bits[packed->symbol[i]] +
                extra_bits_of_repeat(packed->symbol[i]);
    }
    return bits;
}

/* ---- writing ---- */

static void
write_description(gd_block *block, const packed_lengths *packed)
{
    gd_bitwriter *w = &block->writer;
    const gd_hufftree *tree = &block->lengths;
    gd_bitwriter_add(w, block->literals.max_symbol + 1 - 257, 5);
    gd_bitwriter_add(w, block->distances.max_symbol, 5);
    gd_bitwriter_add(w, packed->sent_lengths - 4, 4);
    gd_bitwriter_drain(w);
    for (unsigned i = 0; i < packed->sent_lengths; i++) {
        gd_bitwriter_add(w, tree->bits[length_order[i]], 3);
        gd_bitwriter_drain(w);
    }
    for (unsigned i = 0; i < packed->count; i++) {
        unsigned symbol = packed->symbol[i];
        gd_bitwriter_add(w, tree->code[symbol], tree->bits[symbol]);
        gd_bitwriter_add(w, packed->extra[i], extra_bits_of_repeat(symbol));
        gd_bitwriter_drain(w);
    }
}

static inline void
add_code(gd_bitwriter *w, const gd_hufftree *tree, unsigned symbol)
{
    gd_bitwriter_add(w, tree->code[symbol], tree->bits[symbol]);
}

/* A match takes at most 15 + 5 + 15 + 13 bits. */
static void
write_symbols(gd_block *block)
{
    gd_bitwriter w = block->writer;
    const gd_hufftree *literals = &block->literals;
    for (size_t i = 0; i < block->count; i++) {
        uint32_t symbol = block->symbols[i], distance = symbol >> 8;
        if (distance == 0) {
            add_code(&w, literals, symbol);
        } else {
            unsigned length = symbol & 255, code = length_code(length);
            add_code(&w, literals, FIRST_LENGTH + code);
            unsigned bits = length_extra_bits(code);
            gd_bitwriter_add(&w, low_bits(length, bits), bits);
            code = distance_code(--distance);
            add_code(&w, &block->distances, code);
            bits = distance_extra_bits(code);
            gd_bitwriter_add(&w, low_bits(distance, bits), bits);
        }
        gd_bitwriter_drain(&w);
    }
    add_code(&w, literals, END_OF_BLOCK);
    gd_bitwriter_drain(&w);
    block->writer = w;
}

static void
write_stored(gd_block *block, const uint8_t *plain, size_t length)
{
    gd_bitwriter *w = &block->writer;
    gd_bitwriter_align(w);
    gd_bitwriter_add(w, length | (~(uint64_t)length & 0xffff) << 16, 32);
    gd_bitwriter_drain(w);
    memcpy(w->at, plain, length);
    w->at += length;
}

/* Begins a block of so many bytes, its first three bits and what has not been
 * drained before it aside. */
static bool
begin_type(gd_block *block, unsigned type, uint64_t bytes, bool is_last)
{
    gd_bitwriter *w = &block->writer;
    if ((uint64_t)(block->end - w->at) < bytes + 2 + GD_BITWRITER_SLACK) {
        block->overflow = true;
        return false;
    }
    gd_bitwriter_add(w, type << 1 | is_last, 3);
    gd_bitwriter_drain(w);
    return true;
}

static uint64_t
in_bytes(uint64_t bits)
{
    return (bits + 7) / 8;
}

static void
write_shortest(gd_block *block, const uint8_t *plain, size_t length,
               bool can_store, bool is_last)
{
    packed_lengths packed;
    uint32_t literals[GD_BLOCK_LITERALS], distances[GD_BLOCK_DISTANCES];
    count_symbols(block);
    memcpy(literals, block->literals.frequency, sizeof literals);
    memcpy(distances, block->distances.frequency, sizeof distances);
    uint64_t fixed = fixed_size(block);
    gd_hufftree_build(&block->literals, GD_BLOCK_LITERALS,
                      GD_HUFFTREE_MAX_BITS);
    gd_hufftree_build(&block->distances, GD_BLOCK_DISTANCES,
                      GD_HUFFTREE_MAX_BITS);
    uint64_t own = make_description(block, &packed) +
                   code_size(&block->literals, GD_BLOCK_LITERALS, literals) +
                   code_size(&block->distances, GD_BLOCK_DISTANCES, distances);
    for (unsigned s = FIRST_LENGTH; s < GD_BLOCK_LITERALS; s++) {
        own += (uint64_t)literals[s] * length_extra_bits(s - FIRST_LENGTH);
    }
    for (unsigned s = 0; s < GD_BLOCK_DISTANCES; s++) {
        own += (uint64_t)distances[s] * distance_extra_bits(s);
    }
    uint64_t fixed_bytes = in_bytes(fixed + 3), bytes = in_bytes(own + 3);
    bool is_fixed = fixed_bytes <= bytes || block->is_fixed_only;
    bytes = is_fixed ? fixed_bytes : bytes;
    if (can_store && length + 4 <= bytes) {
        if (begin_type(block, STORED, length + 4, is_last)) {
            write_stored(block, plain, length);
        }
    } else if (begin_type(block, is_fixed ? FIXED : DYNAMIC, bytes, is_last)) {
        if (is_fixed) {
            set_fixed_codes(block);
        } else {
            write_description(block, &packed);
        }
        write_symbols(block);
    }
}

void
gd_block_begin(gd_block *block, uint32_t *symbols, size_t max_count,
               uint8_t *out, size_t room)
{
    block->symbols = symbols;
    block->count = 0;
    block->max_count = max_count;
    block->writer = (gd_bitwriter){0, 0, out};
    block->end = out + room;
    block->overflow = block->is_other = false;
    block->expected = NULL;
}

/* The bytes from `begin` on are complete. */
static void
compare(gd_block *block, const uint8_t *begin)
{
    size_t length = (size_t)(block->writer.at - begin);
    if (length > block->expected_length ||
        memcmp(begin, block->expected, length) != 0) {
        block->is_other = true;
        return;
    }
    block->expected += length;
    block->expected_length -= length;
}

void
gd_block_write(gd_block *block, const uint8_t *plain, size_t length,
               bool can_store, bool is_last)
{
    const uint8_t *begin = block->writer.at;
    if (!gd_block_has_failed(block)) {
        write_shortest(block, plain, length, can_store, is_last);
    }
    if (is_last && !gd_block_has_failed(block)) {
        gd_bitwriter_align(&block->writer);
    }
    if (block->expected != NULL && !gd_block_has_failed(block)) {
        compare(block, begin);
    }
    block->count = 0;
}
