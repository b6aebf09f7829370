/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chains.h - finds the match that zlib's lazy levels find, without a visit to
 * most of the places that zlib visits.
 *
 * Those levels insert every place into a chain of places with the same hash of
 * three bytes, and search the nearest ones, up to a number. Here each place is
 * in several chains, by the hash of 3 bytes and of more, and has a rank: how
 * many places came before it in zlib's chain. A search for a match of at least
 * so many bytes follows the chain of that many; the rank of a match says whether
 * zlib would have come so far.
 *
 * Tables have only the low 16 bits of a place. So an entry may name another place
 * than it was made for, if that is 65536 places or more away. Its hash has no
 * nearer place then, and each place is compared before it counts: such an entry
 * costs time, and changes no result.
 */
#ifndef GD_CHAINS_H
#define GD_CHAINS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

/* A small window's hashes have few bits, so that the caches hold the tables. */
enum {
    GD_CHAINS = 3,
    GD_CHAINS_MIN_HASH_BITS = 13,
    GD_CHAINS_MAX_HASH_BITS = 15,
    GD_CHAINS_RING = 65536,
};

/* Limits of the search of a level. */
typedef struct gd_chains_effort {
    uint32_t good_length; /* behind a match of this length a quarter of the
                           * chain is enough */
    uint32_t lazy_length; /* behind one of this length there is no search; if
                           * the level is greedy, longer ones are not inserted */
    uint32_t nice_length; /* ends a search */
    uint32_t max_chain;   /* the places to visit */
    bool is_lazy;
} gd_chains_effort;

/* Places are their low 16 bits. */
typedef struct gd_chains_tables {
    uint16_t heads[GD_CHAINS][1 << GD_CHAINS_MAX_HASH_BITS]; /* of each hash,
                                                        * the last place */
    uint16_t counts[1 << 16];     /* of zlib's hashes: the places so far */
    uint16_t links[GD_CHAINS][GD_CHAINS_RING]; /* the place before */
    uint16_t rank[GD_CHAINS_RING];
} gd_chains_tables;

typedef struct gd_chains {
    gd_chains_effort effort;
    int32_t max_distance;
    uint32_t ring_mask;
    unsigned zlib_bits; /* of zlib's hash */
    unsigned hash_bits; /* of the others */
    gd_chains_tables *tables;
    const uint8_t *plain;
    int32_t size, linked;
} gd_chains;

/* Makes the tables.  After a failure, too, gd_chains_close frees them. */
gd_status gd_chains_open(const gd_env *env, gd_chains *chains,
                         unsigned window_bits, unsigned memory_level,
                         gd_error *err);
void gd_chains_close(const gd_env *env, gd_chains *chains);

void gd_chains_begin(gd_chains *chains, const uint8_t *plain, size_t size);

/* Finds a match at `at` that is longer than `length` (2 or more) and returns
 * its length, and its distance in *distance; without one, returns `length`.
 * `barred` is a place which is in no chain if it is as far as can be.
 * REQUIRES: `at` never decreases, and grows by at most 258. */
uint32_t gd_chains_search(gd_chains *chains, int32_t at, uint32_t length,
                          int32_t barred, uint32_t *distance);

#endif
