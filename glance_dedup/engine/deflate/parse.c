/* SPDX-License-Identifier: Apache-2.0 */
/*
 * parse.c - see parse.h.
 *
 * zlib copies its input into a buffer of two windows. When less than MIN_AHEAD
 * bytes of that are left, and the second window is nearly used up, it drops the
 * first and reads more. All bytes are in memory here, so nothing is copied, but
 * `base` and `end` move at the same places, as these have effects:
 *
 *   - no match begins at base (zlib's number of that place is 0, which also
 *     means none);
 *   - a block that began before base cannot be stored.
 *
 * Places are counted from the buffer's begin. A place that is negative is one of
 * an earlier buffer, and out of reach.
 */
#include "engine/deflate/parse.h"

#include <string.h>

#include "engine/deflate/equal.h"

enum {
    MIN_MATCH = GD_BLOCK_MIN_MATCH,
    MAX_MATCH = GD_BLOCK_MAX_MATCH,
    MIN_AHEAD = MAX_MATCH + MIN_MATCH + 1,
    TOO_FAR = 4096, /* a match of three bytes costs more than literals then */
    NONE = INT32_MIN,
};

static const gd_chains_effort efforts[] = {
    {4, 4, 8, 4, false},        {4, 5, 16, 8, false},
    {4, 6, 32, 32, false},      {4, 4, 16, 16, true},
    {8, 16, 32, 32, true},      {8, 16, 128, 128, true},
    {8, 32, 128, 256, true},    {32, 128, 258, 1024, true},
    {32, 258, 258, 4096, true},
};

gd_status
gd_parse_open(const gd_env *env, gd_parse *p, int level, unsigned window_bits,
              unsigned memory_level, gd_error *err)
{
    p->effort = p->chains.effort = efforts[level - 1];
    p->window_size = 1u << window_bits;
    p->hash_bits = memory_level + 7;
    p->origin = p->window_size;
    if (p->effort.is_lazy) {
        return gd_chains_open(env, &p->chains, window_bits, memory_level, err);
    }
    p->heads = gd_calloc(env, (size_t)1 << p->hash_bits, sizeof *p->heads, err);
    p->previous = gd_calloc(env, p->window_size, sizeof *p->previous, err);
    return p->heads == NULL || p->previous == NULL ? GD_NOMEM : GD_OK;
}

void
gd_parse_close(const gd_env *env, gd_parse *p)
{
    gd_chains_close(env, &p->chains);
    env->release(env, p->heads);
    env->release(env, p->previous);
}

/* ---- the window ---- */

static inline int32_t
max_distance(const gd_parse *p)
{
    return (int32_t)p->window_size - MIN_AHEAD;
}

static void
refill(gd_parse *p, int32_t at)
{
    int32_t window = (int32_t)p->window_size;
    if (at - p->base >= window + max_distance(p)) {
        p->base += window;
    }
    p->end = p->size - p->base > 2 * window ? p->base + 2 * window : p->size;
}

static void
end_block(gd_parse *p, int32_t at, bool is_last)
{
    gd_block_write(p->block, p->plain + p->block_start,
                   (size_t)(at - p->block_start), p->block_start >= p->base,
                   is_last);
    p->block_start = at;
    if (gd_block_has_failed(p->block)) {
        p->size = p->end = at; /* the parse ends here */
    }
}

/* ---- finding matches ---- */

/* Adds a place with at least three bytes to its chain. Returns the place before
 * it, which may be out of reach. */
static inline int32_t
insert(gd_parse *p, int32_t at)
{
    const uint8_t *bytes = p->plain + at;
    unsigned shift = (p->hash_bits + 2) / 3;
    uint32_t hash = ((uint32_t)bytes[0] << 2 * shift ^
                     (uint32_t)bytes[1] << shift ^ bytes[2]) &
                    ((1u << p->hash_bits) - 1);
    int32_t last = (int32_t)(p->heads[hash] - p->origin);
    p->heads[hash] = p->origin + (uint32_t)at;
    p->previous[(uint32_t)at & (p->window_size - 1)] = last;
    return last;
}

/* The first place begins no match, so it has no chain. */
static inline int32_t
insert_if_any(gd_parse *p, int32_t at)
{
    return at > 0 && p->size - at >= MIN_MATCH ? insert(p, at) : NONE;
}

static inline bool
is_in_reach(const gd_parse *p, int32_t at, int32_t candidate)
{
    return candidate >= at - max_distance(p) && candidate >= 0 &&
           candidate != p->base;
}

/* Follows the chain from a candidate in reach, for a match longer than
 * `length`, which is 2 or more. Returns the match's length, and its place in
 * *found; without one it returns `length`. */
static inline uint32_t
search(const gd_parse *p, int32_t at, int32_t candidate, uint32_t length,
       int32_t *found)
{
    const uint8_t *here = p->plain + at;
    uint32_t ahead = (uint32_t)(p->size - at);
    uint32_t max = ahead < MAX_MATCH ? ahead : MAX_MATCH;
    uint32_t nice = p->effort.nice_length < max ? p->effort.nice_length : max;
    uint32_t left = p->effort.max_chain, mask = p->window_size - 1;
    int32_t limit = at - max_distance(p);
    limit = limit > 0 ? limit : 0;
    if (length >= max) {
        return length;
    }
    if (length >= p->effort.good_length) {
        left >>= 2;
    }
    /* Four bytes up to that which a longer match must have, or three. */
    uint32_t filter = length < MIN_MATCH ? 0xffffff : 0xffffffff;
    uint32_t from = length < MIN_MATCH ? 0 : length - MIN_MATCH;
    uint32_t wanted = length < MIN_MATCH
                          ? here[0] | (uint32_t)here[1] << 8 |
                                (uint32_t)here[2] << 16
                          : gd_get32(here + from);
    do {
        const uint8_t *there = p->plain + candidate;
        if (((gd_get32(there + from) ^ wanted) & filter) != 0) {
            continue;
        }
        uint32_t equal = gd_equal_bytes(there, here, max);
        if (equal > length) {
            *found = candidate;
            length = equal;
            if (length >= nice) {
                break;
            }
            filter = 0xffffffff;
            from = length - MIN_MATCH;
            wanted = gd_get32(here + from);
        }
    } while ((candidate = p->previous[(uint32_t)candidate & mask]) > limit &&
             --left != 0);
    return length;
}

/* ---- the strategies ---- */

/* Before numbers of places can overflow, the tables are cleared. */
void
gd_parse_begin(gd_parse *p, const uint8_t *plain, size_t size, gd_block *block)
{
    p->origin += (uint32_t)p->size + p->window_size;
    if (p->heads != NULL && p->origin > INT32_MAX - 2 * (uint32_t)size) {
        memset(p->heads, 0, ((size_t)1 << p->hash_bits) * sizeof *p->heads);
        p->origin = p->window_size;
    }
    p->plain = plain;
    p->size = (int32_t)size;
    p->base = p->end = p->block_start = 0;
    p->block = block;
    if (p->effort.is_lazy) {
        gd_chains_begin(&p->chains, plain, size);
    }
}

static void
parse_greedily(gd_parse *p)
{
    int32_t at = 0, found = 0;
    for (;;) {
        if (p->end - at < MIN_AHEAD) {
            refill(p, at);
            if (at >= p->end) {
                break;
            }
        }
        int32_t candidate = insert_if_any(p, at);
        uint32_t length = 2;
        if (is_in_reach(p, at, candidate)) {
            length = search(p, at, candidate, 2, &found);
        }
        if (length < MIN_MATCH) {
            gd_block_add_literal(p->block, p->plain[at++]);
        } else {
            gd_block_add_match(p->block, (uint32_t)(at - found), length);
            int32_t next = at + (int32_t)length;
            if (length <= p->effort.lazy_length &&
                p->size - next >= MIN_MATCH) {
                while (++at < next) {
                    insert(p, at);
                }
            }
            at = next;
        }
        if (gd_block_is_full(p->block)) {
            end_block(p, at, false);
        }
    }
    end_block(p, at, true);
}

/* The match at `at`, if it can be longer than the one before it. */
static inline uint32_t
search_lazily(gd_parse *p, int32_t at, uint32_t before, uint32_t *distance)
{
    if (before >= p->effort.lazy_length) {
        return 2;
    }
    uint32_t length = gd_chains_search(&p->chains, at, before, p->base,
                                       distance);
    bool is_useless = length <= 5 &&
                      (!p->short_matches ||
                       (length == MIN_MATCH && *distance > TOO_FAR));
    return is_useless ? 2 : length;
}

static void
parse_lazily(gd_parse *p)
{
    int32_t at = 0;
    uint32_t length = 2, distance = 0;
    bool has_literal = false; /* the byte before `at`, if no match has it */
    for (;;) {
        if (p->end - at < MIN_AHEAD) {
            refill(p, at);
            if (at >= p->end) {
                break;
            }
        }
        uint32_t before = length, distance_before = distance;
        length = search_lazily(p, at, before, &distance);
        if (before >= MIN_MATCH && length <= before) {
            gd_block_add_match(p->block, distance_before, before);
            at += (int32_t)before - 1;
            length = 2;
            has_literal = false;
            if (gd_block_is_full(p->block)) {
                end_block(p, at, false);
            }
        } else {
            if (has_literal) {
                gd_block_add_literal(p->block, p->plain[at - 1]);
                if (gd_block_is_full(p->block)) {
                    end_block(p, at, false);
                }
            }
            has_literal = true;
            at++;
        }
    }
    if (has_literal) {
        gd_block_add_literal(p->block, p->plain[at - 1]);
    }
    end_block(p, at, true);
}

void
gd_parse_matches(gd_parse *p)
{
    if (p->effort.is_lazy) {
        parse_lazily(p);
    } else {
        parse_greedily(p);
    }
}

static uint32_t
run_length(const gd_parse *p, int32_t at)
{
    uint32_t ahead = (uint32_t)(p->size - at);
    if (at == 0 || ahead < MIN_MATCH) {
        return 0;
    }
    const uint8_t *here = p->plain + at;
    return gd_equal_bytes(here - 1, here, ahead < MAX_MATCH ? ahead : MAX_MATCH);
}

void
gd_parse_runs(gd_parse *p)
{
    for (int32_t at = 0;;) {
        if (p->end - at <= MAX_MATCH) {
            refill(p, at);
            if (at == p->end) {
                end_block(p, at, true);
                return;
            }
        }
        uint32_t length = run_length(p, at);
        if (length >= MIN_MATCH) {
            gd_block_add_match(p->block, 1, length);
            at += (int32_t)length;
        } else {
            gd_block_add_literal(p->block, p->plain[at++]);
        }
        if (gd_block_is_full(p->block)) {
            end_block(p, at, false);
        }
    }
}

void
gd_parse_literals(gd_parse *p)
{
    for (int32_t at = 0;;) {
        if (at == p->end) {
            refill(p, at);
            if (at == p->end) {
                end_block(p, at, true);
                return;
            }
        }
        gd_block_add_literal(p->block, p->plain[at++]);
        if (gd_block_is_full(p->block)) {
            end_block(p, at, false);
        }
    }
}
