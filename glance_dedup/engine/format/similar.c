/* SPDX-License-Identifier: Apache-2.0 */
/*
 * similar.c - see similar.h.
 *
 * A place is sampled if the rolling hash behind it is small.  The hash depends
 * on 64 bytes, so equal bytes are sampled alike wherever they lie in a block.
 * Feature f is the largest value that the f-th linear function has over all
 * sampled hashes.
 *
 * Each value of a feature remembers the cluster of the last block that had it.
 * A block joins the cluster that most of its features name, if at least three
 * do; otherwise it begins a cluster.  Blocks with one or two features in common
 * do not become smaller together, and an image whose blocks are scattered is
 * slower to read.
 */
#include "engine/format/similar.h"

#include <string.h>

#include "engine/format/chunker.h"

enum {
    NEEDED = 3,  /* features in common */
    PROBES = 16, /* so that no blocks make a table slow */
};

/* ---- features ---- */

/* One place in 128 is sampled.  The hash of 64 zeros is 0: not sampled, since
 * any two blocks may have zeros. */
#define SAMPLED (UINT64_MAX / 128)

static void
raise_features(uint64_t hash, uint32_t features[GD_SIMILAR_FEATURES])
{
    uint64_t spread = hash * 0x9e3779b97f4a7c15;
    spread ^= spread >> 29;
    for (int f = 0; f < GD_SIMILAR_FEATURES; f++) {
        uint64_t value = spread * (gd_gear[2 * f + 1] | 1) + gd_gear[2 * f + 2];
        uint32_t high = (uint32_t)(value >> 32);
        if (high > features[f]) {
            features[f] = high;
        }
    }
}

void
gd_similar_features_of(const uint8_t *block, size_t length, gd_similar_features *out)
{
    uint64_t hash = 0;
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < length; i++) {
        hash = (hash << 1) + gd_gear[block[i]];
        if (hash - 1 < SAMPLED) {
            raise_features(hash, out->feature);
        }
    }
}

/* ---- clusters ---- */

/* The cluster of the last block that had a feature of this value. */
typedef struct place {
    uint32_t value; /* 0: free */
    uint32_t cluster;
} place;

typedef struct clusters {
    place *places; /* a table for each feature */
    uint32_t mask; /* places of a table, less one */
    uint32_t *next; /* the block behind a block in its cluster; itself: none */
    uint32_t *last; /* of a cluster, which has the number of its first block */
} clusters;

/* Returns where the table has the value, or where to put it. */
static place *
find_place(const clusters *c, int feature, uint32_t value)
{
    place *table = c->places + (size_t)feature * (c->mask + 1);
    uint32_t at = (value * UINT32_C(2654435761)) >> 7;
    for (int i = 0; i < PROBES; i++, at++) {
        place *found = &table[at & c->mask];
        if (found->value == value || found->value == 0) {
            return found;
        }
    }
    return &table[at & c->mask]; /* another value is forgotten */
}

/* The cluster that most features name, if NEEDED do; else the block's own. */
static uint32_t
choose(place *const named[GD_SIMILAR_FEATURES], const gd_similar_features *features,
       uint32_t block)
{
    uint32_t chosen = block;
    int most = NEEDED - 1;
    for (int f = 0; f < GD_SIMILAR_FEATURES; f++) {
        int votes = 0;
        for (int other = f; other < GD_SIMILAR_FEATURES; other++) {
            votes += features->feature[other] != 0 &&
                     named[other]->value == features->feature[other] &&
                     named[other]->cluster == named[f]->cluster;
        }
        if (votes > most) {
            most = votes;
            chosen = named[f]->cluster;
        }
    }
    return chosen;
}

static void
add_block(clusters *c, const gd_similar_features *features, uint32_t block)
{
    place *named[GD_SIMILAR_FEATURES];
    for (int f = 0; f < GD_SIMILAR_FEATURES; f++) {
        named[f] = find_place(c, f, features->feature[f]);
    }
    uint32_t cluster = choose(named, features, block);
    for (int f = 0; f < GD_SIMILAR_FEATURES; f++) {
        if (features->feature[f] != 0) {
            *named[f] = (place){features->feature[f], cluster};
        }
    }
    c->next[block] = block;
    if (cluster != block) {
        c->next[c->last[cluster]] = block;
    }
    c->last[cluster] = block;
}

/* Writes the clusters one after the other.  A cluster begins with a block that
 * none points to, so each block that was written is marked by its place in
 * last. */
static void
list_clusters(clusters *c, uint32_t count, uint32_t *order)
{
    uint32_t used = 0;
    for (uint32_t first = 0; first < count; first++) {
        if (c->last[first] == UINT32_MAX) {
            continue; /* it was written with its cluster */
        }
        uint32_t block = first;
        for (;; block = c->next[block]) {
            c->last[block] = UINT32_MAX;
            order[used++] = block;
            if (c->next[block] == block) {
                break;
            }
        }
    }
}

gd_status
gd_similar_order(const gd_env *env, const gd_similar_features *blocks, uint32_t count,
                 uint32_t *order, gd_error *err)
{
    uint32_t room = 16;
    while (room < 2 * (uint64_t)count) {
        room *= 2;
    }
    clusters c = {
        .places = gd_calloc(env, (size_t)GD_SIMILAR_FEATURES * room, sizeof(place), err),
        .mask = room - 1,
        .next = gd_calloc(env, count + 1, sizeof(uint32_t), err),
        .last = gd_calloc(env, count + 1, sizeof(uint32_t), err),
    };
    bool enough = c.places != NULL && c.next != NULL && c.last != NULL;
    for (uint32_t block = 0; enough && block < count; block++) {
        add_block(&c, &blocks[block], block);
    }
    if (enough) {
        list_clusters(&c, count, order);
    }
    env->release(env, c.places);
    env->release(env, c.next);
    env->release(env, c.last);
    return enough ? GD_OK : GD_NOMEM;
}
