/* SPDX-License-Identifier: Apache-2.0 */
/*
 * requests.h - what the ranks of a batch backup send each other (batch.rst,
 * "Stages").
 *
 * Everything is laid out as records of the exact index (index.h), a key and 40
 * bits:
 *
 *     request    the first 8 bytes of a fingerprint; the requester
 *     reference  the first 8 bytes of a fingerprint; an address
 *     answer     the requester, in the upper 40 bits; an address, 0 if it is
 *                not known, or GD_ANSWER_WAIT
 *
 * A requester is a rank << 28 | the number of one of its blocks.  Everything
 * here is computation on memory.
 */
#ifndef GD_REQUESTS_H
#define GD_REQUESTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/format/index.h"

enum {
    GD_SCANNED_SIZE = 36, /* a fingerprint and a length; a block of zeros has
                           * only zeros as its fingerprint */
    GD_NUMBER_BITS = 28,
    GD_RANK_BITS = 12,
    GD_REQUESTER_SHIFT = 64 - GD_RANK_BITS - GD_NUMBER_BITS,
};

/* No address: the last one that 40 bits can hold. */
#define GD_ANSWER_WAIT ((UINT64_C(1) << 40) - 1)

/* Writes requests for the blocks that are not zeros; the first block has this
 * requester, the next one the next.  out has room for count.  Returns how many
 * it wrote. */
size_t gd_requests_make(const uint8_t *scanned, size_t count,
                        uint64_t requester, uint8_t *out);

/* The number of the part in which a key lies, of so many equal parts. */
static inline uint64_t
gd_requests_part_of_key(uint64_t key, uint64_t parts)
{
    return (uint64_t)((unsigned __int128)key * parts >> 64);
}

/* Sorts records stably by the part in which their keys lie.  counts[i] is how
 * many lie in part first + i, of which there are `ways`.  out has room for all.
 * False if one lies in another part. */
bool gd_requests_split(const uint8_t *records, size_t count, uint64_t parts,
                       uint64_t first, size_t ways, size_t *counts,
                       uint8_t *out);

/* Answers sorted requests, of which addresses[i] is the address in the index,
 * or 0.  Of the requests with one unknown key, the first gets 0, and the others
 * wait.  answers has room for count records, and waiting, too.  Returns how
 * many wait. */
size_t gd_requests_answer(const gd_item *requests, const uint64_t *addresses,
                          size_t count, uint8_t *answers, uint8_t *waiting);
/* Answers those of the sorted requests whose key is among the sorted
 * references, and copies the others to `left`, in order.  answers and left have
 * room for count each.  Returns the number of answers. */
size_t gd_requests_resolve(const gd_item *requests, size_t count,
                           const gd_item *references, size_t reference_count,
                           uint8_t *answers, uint8_t *left);
/* Puts each answer's address, or its other value, in its requester's place; the
 * first place, of 8 bytes, is that of block number `first`.  False if an answer
 * has no place. */
bool gd_requests_fill_answers(const uint8_t *answers, size_t count,
                              uint64_t first,
                              uint8_t *places, size_t place_count);

#endif
