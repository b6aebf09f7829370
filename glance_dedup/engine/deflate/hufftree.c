/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hufftree.c - see hufftree.h.
 *
 * A heap has the nodes that have no parent yet.  An item of the heap is one
 * number: weight (16 bits), height of the node's tree (6), and the node (10).
 * Items are ordered by weight and height; the heap's shape decides between items
 * that are equal in both.
 */
#include "engine/deflate/hufftree.h"

#include <stdbool.h>
#include <string.h>

enum { NODES = 2 * GD_HUFFTREE_SYMBOLS, NODE_BITS = 10, HEIGHT_BITS = 6 };

typedef struct builder {
    uint32_t heap[GD_HUFFTREE_SYMBOLS + 2]; /* the first item is heap[1] */
    unsigned count;
    uint16_t joined[NODES]; /* from the lightest node to the root */
    unsigned joined_count;
    uint16_t parent[NODES];
    uint8_t depth[NODES];
    unsigned of_length[GD_HUFFTREE_MAX_BITS + 1]; /* symbols */
} builder;

static inline unsigned
node_of(uint32_t item)
{
    return item & ((1u << NODE_BITS) - 1);
}

static inline bool
is_not_after(uint32_t a, uint32_t b)
{
    return a >> NODE_BITS <= b >> NODE_BITS;
}

static void
sift_down(builder *b, unsigned hole, uint32_t item)
{
    for (unsigned child; (child = 2 * hole) <= b->count; hole = child) {
        if (child < b->count &&
            is_not_after(b->heap[child + 1], b->heap[child])) {
            child++;
        }
        if (is_not_after(item, b->heap[child])) {
            break;
        }
        b->heap[hole] = b->heap[child];
    }
    b->heap[hole] = item;
}

static inline uint32_t
leaf(const gd_hufftree *tree, unsigned symbol)
{
    return tree->frequency[symbol] << (NODE_BITS + HEIGHT_BITS) | symbol;
}

static void
add_leaves(builder *b, gd_hufftree *tree, unsigned symbols)
{
    int last = -1;
    for (unsigned s = 0; s < symbols; s++) {
        if (tree->frequency[s] != 0) {
            b->heap[++b->count] = leaf(tree, s);
            last = (int)s;
        }
    }
    while (b->count < 2) {
        unsigned s = last < 2 ? (unsigned)++last : 0;
        tree->frequency[s] = 1;
        b->heap[++b->count] = leaf(tree, s);
    }
    tree->max_symbol = (unsigned)last;
    for (unsigned i = b->count / 2; i >= 1; i--) {
        sift_down(b, i, b->heap[i]);
    }
}

/* Joins the two lightest nodes until one is left. */
static void
join_all(builder *b, unsigned symbols)
{
    unsigned next = symbols;
    uint32_t one_higher = 1u << NODE_BITS;
    uint32_t heights = ((1u << HEIGHT_BITS) - 1) << NODE_BITS;
    do {
        uint32_t first = b->heap[1];
        uint32_t moved = b->heap[b->count--];
        sift_down(b, 1, moved);
        uint32_t second = b->heap[1];
        b->joined[b->joined_count++] = (uint16_t)node_of(first);
        b->joined[b->joined_count++] = (uint16_t)node_of(second);
        b->parent[node_of(first)] = b->parent[node_of(second)] = (uint16_t)next;
        uint32_t height = (first & heights) > (second & heights)
                              ? first & heights : second & heights;
        uint32_t weight = (first >> (NODE_BITS + HEIGHT_BITS)) +
                          (second >> (NODE_BITS + HEIGHT_BITS));
        sift_down(b, 1, weight << (NODE_BITS + HEIGHT_BITS) |
                            (height + one_higher) | next++);
    } while (b->count >= 2);
    b->joined[b->joined_count++] = (uint16_t)node_of(b->heap[1]);
}

/* Depths from the root down, none of them more than max_bits.  Returns how many
 * nodes, inner ones included, would be deeper. */
static unsigned
find_depths(builder *b, gd_hufftree *tree, unsigned symbols, unsigned max_bits)
{
    unsigned too_deep = 0, at = b->joined_count - 1;
    b->depth[b->joined[at]] = 0;
    while (at-- > 0) {
        unsigned node = b->joined[at], depth = b->depth[b->parent[node]] + 1u;
        if (depth > max_bits) {
            depth = max_bits;
            too_deep++;
        }
        b->depth[node] = (uint8_t)depth;
        if (node < symbols) {
            tree->bits[node] = (uint8_t)depth;
            b->of_length[depth]++;
        }
    }
    return too_deep;
}

/* Makes room in the code for the symbols that were too deep: a leaf above moves
 * one down, and takes one of them as its sibling.  Then the lightest symbols get
 * the longest codes. */
static void
repair_depths(builder *b, gd_hufftree *tree, unsigned symbols,
              unsigned max_bits, unsigned too_deep)
{
    for (int left = (int)too_deep; left > 0; left -= 2) {
        unsigned bits = max_bits - 1;
        while (b->of_length[bits] == 0) {
            bits--;
        }
        b->of_length[bits]--;
        b->of_length[bits + 1] += 2;
        b->of_length[max_bits]--;
    }
    unsigned at = 0;
    for (unsigned bits = max_bits; bits > 0; bits--) {
        for (unsigned n = b->of_length[bits]; n > 0; at++) {
            if (b->joined[at] < symbols) {
                tree->bits[b->joined[at]] = (uint8_t)bits;
                n--;
            }
        }
    }
}

static unsigned
reversed(unsigned code, unsigned bits)
{
    unsigned result = 0;
    for (unsigned i = 0; i < bits; i++) {
        result = result << 1 | (code >> i & 1);
    }
    return result;
}

void
gd_hufftree_assign_codes(gd_hufftree *tree, unsigned symbols)
{
    unsigned of_length[GD_HUFFTREE_MAX_BITS + 1] = {0};
    unsigned next[GD_HUFFTREE_MAX_BITS + 1] = {0};
    for (unsigned s = 0; s < symbols; s++) {
        of_length[tree->bits[s]]++;
    }
    of_length[0] = 0;
    for (unsigned bits = 1; bits <= GD_HUFFTREE_MAX_BITS; bits++) {
        next[bits] = (next[bits - 1] + of_length[bits - 1]) << 1;
    }
    for (unsigned s = 0; s < symbols; s++) {
        unsigned bits = tree->bits[s];
        if (bits != 0) {
            tree->code[s] = (uint16_t)reversed(next[bits]++, bits);
        }
    }
}

void
gd_hufftree_build(gd_hufftree *tree, unsigned symbols, unsigned max_bits)
{
    builder b;
    b.count = b.joined_count = 0;
    memset(b.of_length, 0, sizeof b.of_length);
    memset(tree->bits, 0, sizeof tree->bits);
    add_leaves(&b, tree, symbols);
    join_all(&b, symbols);
    unsigned too_deep = find_depths(&b, tree, symbols, max_bits);
    if (too_deep > 0) {
        repair_depths(&b, tree, symbols, max_bits, too_deep);
    }
    gd_hufftree_assign_codes(tree, symbols);
}
