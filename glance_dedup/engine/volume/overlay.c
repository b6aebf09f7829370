/* SPDX-License-Identifier: Apache-2.0 */
/*
 * overlay.c - see overlay.h.
 */
#include "engine/volume/overlay.h"

#include <stddef.h>

struct gd_overlay_node {
    gd_piece piece; /* first: a piece of the list is a node */
    unsigned height;
    gd_overlay_node *next[];
};

/* The places that lead to the first node at or behind an offset. */
typedef struct path {
    gd_overlay_node **links[GD_OVERLAY_HEIGHT];
} path;

void
gd_overlay_init(gd_overlay *overlay, const gd_env *env)
{
    *overlay = (gd_overlay){.env = env, .random = 0x9e3779b97f4a7c15u};
}

void
gd_overlay_clear(gd_overlay *overlay)
{
    gd_overlay_node *node = overlay->first[0];
    while (node != NULL) {
        gd_overlay_node *next = node->next[0];
        overlay->env->release(overlay->env, node);
        node = next;
    }
    gd_overlay_init(overlay, overlay->env);
}

/* Each level has a quarter of the nodes of the one below. */
static unsigned
choose_height(gd_overlay *overlay)
{
    unsigned height = 1;
    overlay->random ^= overlay->random << 13;
    overlay->random ^= overlay->random >> 7;
    overlay->random ^= overlay->random << 17;
    for (uint64_t bits = overlay->random;
         height < GD_OVERLAY_HEIGHT && (bits & 3) == 0; bits >>= 2) {
        height++;
    }
    return height;
}

static gd_overlay_node *
make_node(gd_overlay *overlay, const gd_piece *piece, gd_error *err)
{
    unsigned height = choose_height(overlay);
    gd_overlay_node *node = gd_alloc(
        overlay->env, sizeof *node + height * sizeof node->next[0], err);
    if (node != NULL) {
        node->piece = *piece;
        node->height = height;
    }
    return node;
}

/* Goes to the first node whose piece ends behind offset. */
static void
seek_end(gd_overlay *overlay, uint64_t offset, path *at)
{
    gd_overlay_node **links = overlay->first;
    for (int level = GD_OVERLAY_HEIGHT - 1; level >= 0; level--) {
        while (links[level] != NULL &&
               gd_piece_end(&links[level]->piece) <= offset) {
            links = links[level]->next;
        }
        at->links[level] = &links[level];
    }
}

/* Puts a node in at a path, which leads behind it afterwards. */
static void
link_node(gd_overlay *overlay, path *at, gd_overlay_node *node)
{
    for (unsigned level = 0; level < node->height; level++) {
        node->next[level] = *at->links[level];
        *at->links[level] = node;
        at->links[level] = &node->next[level];
    }
    overlay->count++;
}

static void
unlink_first(gd_overlay *overlay, path *at)
{
    gd_overlay_node *node = *at->links[0];
    for (unsigned level = 0; level < node->height; level++) {
        *at->links[level] = node->next[level];
    }
    overlay->env->release(overlay->env, node);
    overlay->count--;
}

/* Cuts off the piece's first bytes. */
static void
cut_front(gd_piece *piece, uint64_t bytes)
{
    piece->offset += bytes;
    piece->length -= bytes;
    piece->from += piece->journal == NULL ? 0 : (uint32_t)bytes;
}

static void
count_replaced(const gd_piece *old, uint64_t bytes, uint64_t *replaced)
{
    *replaced += old->journal == NULL ? 0 : bytes;
}

/* The new piece lies within an old one, and leaves something of it on both
 * sides. */
static void
split(gd_overlay *overlay, path *at, gd_overlay_node *node,
      gd_overlay_node *rest, uint64_t *replaced)
{
    gd_overlay_node *old = *at->links[0];
    uint64_t before = node->piece.offset - old->piece.offset;
    rest->piece = old->piece;
    cut_front(&rest->piece, before + node->piece.length);
    old->piece.length = before;
    count_replaced(&old->piece, node->piece.length, replaced);
    for (unsigned level = 0; level < old->height; level++) {
        at->links[level] = &old->next[level];
    }
    link_node(overlay, at, node);
    link_node(overlay, at, rest);
}

/* Makes room for a piece: what it covers goes, and the path leads to its
 * place.  No old piece surrounds it. */
static void
make_room(gd_overlay *overlay, path *at, const gd_piece *piece,
          uint64_t *replaced)
{
    uint64_t end = gd_piece_end(piece);
    gd_overlay_node *old = *at->links[0];
    if (old != NULL && old->piece.offset < piece->offset) {
        uint64_t keep = piece->offset - old->piece.offset;
        count_replaced(&old->piece, old->piece.length - keep, replaced);
        old->piece.length = keep;
        for (unsigned level = 0; level < old->height; level++) {
            at->links[level] = &old->next[level];
        }
    }
    while ((old = *at->links[0]) != NULL && old->piece.offset < end) {
        if (gd_piece_end(&old->piece) <= end) {
            count_replaced(&old->piece, old->piece.length, replaced);
            unlink_first(overlay, at);
        } else {
            uint64_t cut = end - old->piece.offset;
            count_replaced(&old->piece, cut, replaced);
            cut_front(&old->piece, cut);
        }
    }
}

gd_status
gd_overlay_put(gd_overlay *overlay, const gd_piece *piece, uint64_t *replaced,
               gd_error *err)
{
    path at;
    gd_overlay_node *node = make_node(overlay, piece, err);
    if (node == NULL) {
        return GD_NOMEM;
    }
    seek_end(overlay, piece->offset, &at);
    const gd_overlay_node *old = *at.links[0];
    if (old != NULL && old->piece.offset < piece->offset &&
        gd_piece_end(&old->piece) > gd_piece_end(piece)) {
        gd_overlay_node *rest = make_node(overlay, piece, err);
        if (rest == NULL) {
            overlay->env->release(overlay->env, node);
            return GD_NOMEM;
        }
        split(overlay, &at, node, rest, replaced);
        return GD_OK;
    }
    make_room(overlay, &at, piece, replaced);
    link_node(overlay, &at, node);
    return GD_OK;
}

const gd_piece *
gd_overlay_find(const gd_overlay *overlay, uint64_t offset)
{
    gd_overlay_node *const *links = overlay->first;
    for (int level = GD_OVERLAY_HEIGHT - 1; level >= 0; level--) {
        while (links[level] != NULL &&
               gd_piece_end(&links[level]->piece) <= offset) {
            links = links[level]->next;
        }
    }
    return links[0] == NULL ? NULL : &links[0]->piece;
}

const gd_piece *
gd_overlay_next(const gd_piece *piece)
{
    const gd_overlay_node *node = (const gd_overlay_node *)piece;
    return node->next[0] == NULL ? NULL : &node->next[0]->piece;
}
