/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hints.c - see hints.h.
 */
#include "engine/write/hints.h"

#include <stdlib.h>
#include <string.h>

enum {
    GROUPS = 256,  /* counted per batch */
    PLACES = 1024, /* a power of two, above GROUPS */
    HINTS = 16384, /* kept per batch */
};

typedef struct tally {
    uint32_t group;
    uint32_t hints; /* of blocks not found and not hinted to a chosen group */
    bool chosen;
} tally;

typedef struct hint {
    const gd_address *block;
    uint16_t tally;
    bool covered; /* its block is hinted to the group just chosen */
} hint;

struct gd_hints {
    tally tallies[GROUPS];
    size_t groups;
    uint16_t places[PLACES]; /* each has a tally plus one, where its group
                              * hashes to */
    hint hints[HINTS];
    size_t count;
};

gd_status
gd_hints_open(const gd_env *env, gd_hints **hints, gd_error *err)
{
    *hints = gd_calloc(env, 1, sizeof **hints, err);
    return *hints == NULL ? GD_NOMEM : GD_OK;
}

void
gd_hints_close(const gd_env *env, gd_hints *hints)
{
    env->release(env, hints);
}

void
gd_hints_clear(gd_hints *hints)
{
    if (hints->groups > 0) {
        memset(hints->places, 0, sizeof hints->places);
    }
    hints->groups = 0;
    hints->count = 0;
}

/* The place of the group, or the free place where it belongs. */
static uint16_t *
find_place(gd_hints *hints, uint32_t group)
{
    uint32_t at = (group * UINT32_C(2654435761)) % PLACES;
    while (hints->places[at] != 0 &&
           hints->tallies[hints->places[at] - 1].group != group) {
        at = (at + 1) % PLACES;
    }
    return &hints->places[at];
}

void
gd_hints_add(gd_hints *hints, const gd_address *block, uint32_t group)
{
    uint16_t *place = find_place(hints, group);
    if (hints->count == HINTS || (*place == 0 && hints->groups == GROUPS)) {
        return;
    }
    if (*place == 0) {
        hints->tallies[hints->groups++] = (tally){.group = group};
        *place = (uint16_t)hints->groups;
    }
    hints->tallies[*place - 1].hints++;
    hints->hints[hints->count++] =
        (hint){.block = block, .tally = (uint16_t)(*place - 1)};
}

uint32_t
gd_hints_to(gd_hints *hints, uint32_t group)
{
    uint16_t place = *find_place(hints, group);
    return place == 0 ? 0 : hints->tallies[place - 1].hints;
}

/* ---- choosing ---- */

static bool
is_found(const hint *h)
{
    return h->block->group != 0;
}

static void
recount(gd_hints *hints)
{
    for (size_t i = 0; i < hints->groups; i++) {
        hints->tallies[i].hints = 0;
    }
    for (size_t i = 0; i < hints->count; i++) {
        hint *h = &hints->hints[i];
        h->covered = is_found(h);
        hints->tallies[h->tally].hints += !h->covered;
    }
}

/* Returns NULL if no group is left that a block is hinted to. */
static tally *
most_hinted(gd_hints *hints)
{
    tally *best = NULL;
    for (size_t i = 0; i < hints->groups; i++) {
        tally *t = &hints->tallies[i];
        if (!t->chosen && t->hints > (best == NULL ? 0 : best->hints)) {
            best = t;
        }
    }
    return best;
}

/* Returns how many hints, from the first, are of the same block. */
static size_t
count_run(const gd_hints *hints, size_t first)
{
    size_t n = 1;
    while (first + n < hints->count &&
           hints->hints[first + n].block == hints->hints[first].block) {
        n++;
    }
    return n;
}

/* Blocks hinted to the chosen group need no other group. */
static void
cover(gd_hints *hints, const tally *chosen)
{
    size_t run;
    for (size_t i = 0; i < hints->count; i += run) {
        hint *h = &hints->hints[i];
        run = count_run(hints, i);
        bool hit = false;
        for (size_t k = 0; k < run; k++) {
            hit = hit || &hints->tallies[h[k].tally] == chosen;
        }
        for (size_t k = 0; hit && k < run; k++) {
            hints->tallies[h[k].tally].hints -= !h[k].covered;
            h[k].covered = true;
        }
    }
}

static int
ascending(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

size_t
gd_hints_choose(gd_hints *hints, size_t most, uint32_t *groups)
{
    size_t n = 0;
    tally *best;
    recount(hints);
    while (n < most && (best = most_hinted(hints)) != NULL) {
        best->chosen = true;
        groups[n++] = best->group;
        cover(hints, best);
    }
    if (n > 1) {
        qsort(groups, n, sizeof *groups, ascending);
    }
    return n;
}

bool
gd_hints_want(const gd_hints *hints, uint32_t group)
{
    for (size_t i = 0; i < hints->count; i++) {
        const hint *h = &hints->hints[i];
        if (hints->tallies[h->tally].group == group && !is_found(h)) {
            return true;
        }
    }
    return false;
}

size_t
gd_hints_left(gd_hints *hints)
{
    size_t left = 0;
    recount(hints);
    for (size_t i = 0; i < hints->groups; i++) {
        const tally *t = &hints->tallies[i];
        left += !t->chosen && t->hints > 0;
    }
    return left;
}
