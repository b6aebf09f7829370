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

enum {
    MIN_MATCH = GD_BLOCK_MIN_MATCH,
    MAX_MATCH = GD_BLOCK_MAX_MATCH,
    MIN_AHEAD = MAX_MATCH + MIN_MATCH + 1,
    TOO_FAR = 4096, /* a match of three bytes costs more than literals then */
    NONE = INT32_MIN,
};

gd_parse_effort
gd_parse_effort_of(int level)
{
    static const gd_parse_effort efforts[] = {
        {4, 4, 8, 4, false},        {4, 5, 16, 8, false},
        {4, 6, 32, 32, false},      {4, 4, 16, 16, true},
        {8, 16, 32, 32, true},      {8, 16, 128, 128, true},
        {8, 32, 128, 256, true},    {32, 128, 258, 1024, true},
        {32, 258, 258, 4096, true},
    };
    return efforts[level - 1];
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

static inline uint32_t
equal_bytes(const uint8_t *a, const uint8_t *b, uint32_t max)
{
    uint32_t n = 0;
    for (; n + 8 <= max; n += 8) {
        uint64_t different = gd_get64(a + n) ^ gd_get64(b + n);
        if (different != 0) {
            return n + (uint32_t)__builtin_ctzll(different) / 8;
        }
    }
    while (n < max && a[n] == b[n]) {
        n++;
    }
    return n;
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
        uint32_t equal = equal_bytes(there, here, max);
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

void
gd_parse_begin(gd_parse *p, const uint8_t *plain, size_t size, gd_block *block)
{
    p->plain = plain;
    p->size = (int32_t)size;
    p->base = p->end = p->block_start = 0;
    p->block = block;
}

void
gd_parse_greedy(gd_parse *p)
{
    int32_t at = 0, found = 0;
    for (;;) {
        if (p->end - at < MIN_AHEAD) {
            refill(p, at);
            if (at == p->end) {
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
search_lazily(const gd_parse *p, int32_t at, int32_t candidate,
              uint32_t before, int32_t *found)
{
    if (before >= p->effort.lazy_length || !is_in_reach(p, at, candidate)) {
        return 2;
    }
    uint32_t length = search(p, at, candidate, before, found);
    bool is_useless = length <= 5 &&
                      (!p->short_matches ||
                       (length == MIN_MATCH && at - *found > TOO_FAR));
    return is_useless ? 2 : length;
}

void
gd_parse_lazy(gd_parse *p)
{
    int32_t at = 0, found = 0;
    uint32_t length = 2;
    bool has_literal = false; /* the byte before `at`, if no match has it */
    for (;;) {
        if (p->end - at < MIN_AHEAD) {
            refill(p, at);
            if (at == p->end) {
                break;
            }
        }
        int32_t candidate = insert_if_any(p, at), found_before = found;
        uint32_t before = length;
        length = search_lazily(p, at, candidate, before, &found);
        if (before >= MIN_MATCH && length <= before) {
            gd_block_add_match(p->block, (uint32_t)(at - 1 - found_before),
                               before);
            int32_t next = at - 1 + (int32_t)before;
            int32_t last = p->size - MIN_MATCH;
            last = last < next - 1 ? last : next - 1;
            while (++at <= last) {
                insert(p, at);
            }
            at = next;
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

static uint32_t
run_length(const gd_parse *p, int32_t at)
{
    uint32_t ahead = (uint32_t)(p->size - at);
    if (at == 0 || ahead < MIN_MATCH) {
        return 0;
    }
    const uint8_t *here = p->plain + at;
    return equal_bytes(here - 1, here, ahead < MAX_MATCH ? ahead : MAX_MATCH);
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
