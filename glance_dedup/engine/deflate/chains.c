/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chains.c - see chains.h.
 */
#include "engine/deflate/chains.h"

#include <string.h>

#include "engine/deflate/equal.h"

enum {
    SHORT = 3, /* the bytes of each chain */
    MIDDLE = 4,
    LONG = 7,
    BATCH = 4096, /* places that are linked at once */
    MIN_RING = 2 * BATCH,
    MIN_AHEAD = 262, /* zlib's: a window less this is the longest distance */
    MAX_MATCH = 258,
    WORDS = 264, /* the bytes that gd_equal_words reads */
};

gd_status
gd_chains_open(const gd_env *env, gd_chains *c, unsigned window_bits,
               unsigned memory_level, gd_error *err)
{
    c->max_distance = (1 << window_bits) - MIN_AHEAD;
    uint32_t ring = 2u << window_bits;
    c->ring_mask = (ring < MIN_RING ? MIN_RING : ring) - 1;
    c->zlib_bits = memory_level + 7;
    c->hash_bits = window_bits < 13 ? GD_CHAINS_MIN_HASH_BITS
                                    : GD_CHAINS_MAX_HASH_BITS;
    c->tables = gd_calloc(env, 1, sizeof *c->tables, err);
    return c->tables == NULL ? GD_NOMEM : GD_OK;
}

void
gd_chains_close(const gd_env *env, gd_chains *c)
{
    env->release(env, c->tables);
}

void
gd_chains_begin(gd_chains *c, const uint8_t *plain, size_t size)
{
    for (int i = 0; i < GD_CHAINS; i++) {
        memset(c->tables->heads[i], 0,
               ((size_t)1 << c->hash_bits) * sizeof **c->tables->heads);
    }
    c->plain = plain;
    c->size = (int32_t)size;
    c->linked = 0;
}

/* ---- linking places ---- */

/* Up to eight bytes, and zeros behind the end. */
static inline uint64_t
get_word(const uint8_t *at, int32_t left)
{
    uint64_t word = 0;
    if (left >= 8) {
        return gd_get64(at);
    }
    memcpy(&word, at, (size_t)left);
    return le64toh(word);
}

static inline void
link_chain(gd_chains_tables *t, int chain, unsigned bytes, uint64_t word,
           uint32_t slot, uint16_t at, unsigned hash_bits)
{
    uint64_t hash = (word << (64 - 8 * bytes)) * 0x9e3779b97f4a7c15 >>
                    (64 - hash_bits);
    t->links[chain][slot] = t->heads[chain][hash];
    t->heads[chain][hash] = at;
}

static inline void
link_place(gd_chains_tables *t, uint64_t word, uint32_t at, uint32_t mask,
           unsigned zlib_bits, unsigned hash_bits)
{
    unsigned shift = (zlib_bits + 2) / 3;
    uint32_t slot = at & mask, low = (uint32_t)word;
    uint32_t hash = ((low & 255) << 2 * shift ^ (low >> 8 & 255) << shift ^
                     (low >> 16 & 255)) & ((1u << zlib_bits) - 1);
    t->rank[slot] = ++t->counts[hash];
    link_chain(t, 0, SHORT, word, slot, (uint16_t)at, hash_bits);
    link_chain(t, 1, MIDDLE, word, slot, (uint16_t)at, hash_bits);
    link_chain(t, 2, LONG, word, slot, (uint16_t)at, hash_bits);
}

static inline __attribute__((always_inline)) void
link_range(gd_chains *c, int32_t end, unsigned zlib_bits, unsigned hash_bits)
{
    const uint8_t *plain = c->plain;
    int32_t at = c->linked, size = c->size;
    int32_t whole = end < size - 7 ? end : size - 7;
    for (; at < whole; at++) {
        link_place(c->tables, gd_get64(plain + at), (uint32_t)at, c->ring_mask,
                   zlib_bits, hash_bits);
    }
    for (; at < end; at++) {
        link_place(c->tables, get_word(plain + at, size - at), (uint32_t)at,
                   c->ring_mask, zlib_bits, hash_bits);
    }
    c->linked = end;
}

/* The hashes of qcow2 and VMDK are constants, which makes this faster. */
static __attribute__((noinline)) void
link_batch(gd_chains *c)
{
    int32_t end = c->size - c->linked > BATCH ? c->linked + BATCH : c->size;
    if (c->zlib_bits == 16 && c->hash_bits == GD_CHAINS_MIN_HASH_BITS) {
        link_range(c, end, 16, GD_CHAINS_MIN_HASH_BITS);
    } else if (c->zlib_bits == 15 && c->hash_bits == GD_CHAINS_MAX_HASH_BITS) {
        link_range(c, end, 15, GD_CHAINS_MAX_HASH_BITS);
    } else {
        link_range(c, end, c->zlib_bits, c->hash_bits);
    }
}

/* ---- following links ---- */

typedef struct request {
    const uint8_t *here;
    uint32_t at, max, nice, left, reach;
    int32_t barred;
    bool has_words; /* WORDS bytes are ahead */
} request;

/* Returns whether zlib's search would get as far as this match. The head of its
 * chain may be one byte farther away than the places after it. */
static inline bool
is_visited(const gd_chains *c, const request *r, uint32_t away)
{
    const uint16_t *rank = c->tables->rank;
    uint16_t visited = (uint16_t)(rank[r->at & c->ring_mask] -
                                  rank[(r->at - away) & c->ring_mask]);
    return visited <= r->left &&
           (away < (uint32_t)c->max_distance ||
            (visited == 1 && (int32_t)(r->at - away) != r->barred));
}

static inline uint32_t
match_length(const request *r, const uint8_t *there)
{
    return r->has_words ? gd_equal_words(there, r->here)
                        : gd_equal_bytes(there, r->here, r->max);
}

/* Four bytes, of which the last makes a match longer than `length`; three of
 * them if `length` is 2. */
static inline uint32_t
get_wanted(const request *r, uint32_t from)
{
    return r->has_words || r->max - from >= 4
               ? gd_get32(r->here + from)
               : (uint32_t)get_word(r->here + from, (int32_t)(r->max - from));
}

/* Follows one chain for a match longer than `length`, up to `enough` bytes.
 * Returns `length` if there is none. A place is in the chain if its first bytes
 * are equal, but also if only the hash is. After as many places as zlib visits,
 * the rank ends the search, too: this limits the time, not the result. */
static inline __attribute__((always_inline)) uint32_t
follow(const gd_chains *c, const request *r, int chain, uint32_t length,
       uint32_t enough, uint32_t *distance)
{
    const uint16_t *links = c->tables->links[chain];
    bool is_first = chain == 0 && length < SHORT;
    uint32_t filter = is_first ? 0xffffff : 0xffffffff;
    uint32_t from = is_first ? 0 : length - 3;
    uint32_t wanted = get_wanted(r, from) & filter;
    uint32_t away = 0, steps = r->left, place = r->at;
    for (;;) {
        place = links[place & c->ring_mask];
        uint32_t next = (r->at - place) & (GD_CHAINS_RING - 1);
        if (next - away - 1 >= r->reach - away) {
            return length; /* not farther, or too far */
        }
        away = next;
        const uint8_t *there = r->here - away;
        if ((gd_get32(there + from) & filter) == wanted) {
            uint32_t equal = match_length(r, there);
            if (equal > length) {
                if (!is_visited(c, r, away)) {
                    return length;
                }
                *distance = away;
                length = equal;
                if (length >= enough) {
                    return length;
                }
                filter = 0xffffffff;
                from = length - 3;
                wanted = gd_get32(r->here + from);
                continue;
            }
        }
        if (steps > 0) {
            steps--;
        } else if (gd_equal_bytes(there, r->here, SHORT) == SHORT &&
                   !is_visited(c, r, away)) {
            return length;
        }
    }
}

/* Searches for a long match first: if there is one, no shorter one matters, and
 * if there is none, the search for a shorter one ends at the first that has the
 * length between the chains. */
static inline uint32_t
search_chains(const gd_chains *c, const request *r, uint32_t length,
              uint32_t *distance)
{
    uint32_t least = length < LONG - 1 ? LONG - 1 : length;
    uint32_t found = follow(c, r, 2, least, r->nice, distance);
    if (found > least || length >= LONG - 1) {
        return found;
    }
    least = length < MIDDLE - 1 ? MIDDLE - 1 : length;
    found = follow(c, r, 1, least, LONG - 1, distance);
    if (found > least || length >= MIDDLE - 1) {
        return found;
    }
    return follow(c, r, 0, length, MIDDLE - 1, distance);
}

uint32_t
gd_chains_search(gd_chains *c, int32_t at, uint32_t length, int32_t barred,
                 uint32_t *distance)
{
    if (at >= c->linked) {
        link_batch(c);
    }
    const gd_chains_effort *effort = &c->effort;
    uint32_t ahead = (uint32_t)(c->size - at);
    uint32_t max = ahead < MAX_MATCH ? ahead : MAX_MATCH;
    if (at == 0 || length >= max) {
        return length;
    }
    uint32_t reach = (uint32_t)(at - 1 < c->max_distance ? at - 1
                                                         : c->max_distance);
    uint32_t nearest = (uint16_t)(
        at - c->tables->links[0][(uint32_t)at & c->ring_mask]);
    if (nearest - 1 >= reach) {
        return length;
    }
    request r = {c->plain + at, (uint32_t)at, max,
                 effort->nice_length < max ? effort->nice_length : max,
                 effort->max_chain >> (length >= effort->good_length ? 2 : 0),
                 reach, barred, ahead >= WORDS};
    return r.has_words ? search_chains(c, &r, length, distance)
                       : follow(c, &r, 0, length, r.nice, distance);
}
