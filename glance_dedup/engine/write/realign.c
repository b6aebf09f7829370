/* SPDX-License-Identifier: Apache-2.0 */
/*
 * realign.c - see realign.h.
 *
 * The sample consists of pairs of whole blocks, adjacent in the stream and in
 * memory.  Within a pair lies one candidate for each other phase.  The number
 * of pairs depends on the filter's level, since a twin without a hint is not
 * found: it is enough for PAIRS hints if all have twins.  The first candidate
 * found has its group's store loaded, and the others are then found there
 * without hints.
 *
 * Contents that occur in any image, such as a block of 0xff bytes, are found at
 * all phases, again and again at one address.  So finds count by their
 * addresses, and one is not enough.
 *
 * A sample costs as much as its candidates' fingerprints.  It is paid with
 * credit.  A new transaction has some, and each stored block earns some; a
 * block that was found earns many times as much.  So for unique data, whose
 * samples all fail, 1/16 more is fingerprinted.  An image that changes its
 * phase all the time has few blocks found, and so gets few samples.
 */
#include "engine/write/realign.h"

#include <string.h>

#include "engine/base/zero.h"

enum {
    SECTOR = 512,
    CANDIDATES = 448, /* most in a sample */
    PAIRS = 4,        /* in a sample, if all fingerprints have hints; but */
    PAIRS_MIN = 8,
    PAIRS_MAX = 64,
    BATCH_MIN = 16,   /* fewest blocks that are worth a sample */
    HARDLY = 16,      /* fewer than one in so many found is hardly any */
    FINDS_MIN = 2,
    PRICE = 16,       /* of a candidate */
    EARNED_FOUND = 8,
    EARNED_MISSED = 1,
    CREDIT = 2 * CANDIDATES * PRICE, /* at first, and at most */
};

struct gd_realign {
    gd_repo *repo;
    gd_hashing *hashing;
    gd_lookup *lookup;
    uint32_t block_size;
    size_t others; /* phases other than the current one */
    size_t credit;
    /* Pair by pair; within a pair by phase. */
    gd_block candidates[CANDIDATES];
};

gd_status
gd_realign_open(gd_repo *repo, gd_hashing *hashing, gd_lookup *lookup,
                gd_realign **out, gd_error *err)
{
    uint32_t block_size = repo->params.block_size;
    *out = NULL;
    if (repo->params.cut_average != 0 || block_size == SECTOR) {
        return GD_OK;
    }
    gd_realign *phase = gd_calloc(repo->env, 1, sizeof *phase, err);
    if (phase == NULL) {
        return GD_NOMEM;
    }
    phase->repo = repo;
    phase->hashing = hashing;
    phase->lookup = lookup;
    phase->block_size = block_size;
    phase->others = block_size / SECTOR - 1;
    phase->credit = CREDIT;
    *out = phase;
    return GD_OK;
}

void
gd_realign_close(const gd_env *env, gd_realign *phase)
{
    env->release(env, phase);
}

/* ---- the sample ---- */

static size_t
count_pairs(const gd_realign *phase)
{
    gd_filter_stats stats;
    gd_hintindex *index = phase->repo->index;
    index->get_stats(index, &stats);
    size_t pairs = (size_t)PAIRS << stats.level;
    pairs = pairs < PAIRS_MIN ? PAIRS_MIN : pairs;
    pairs = pairs > PAIRS_MAX ? PAIRS_MAX : pairs;
    size_t room = CANDIDATES / phase->others;
    return pairs < room ? pairs : room;
}

static bool
is_pair(const gd_realign *phase, const gd_block *block)
{
    return block[0].length == phase->block_size &&
           block[1].length == phase->block_size &&
           block[1].zeros_before == 0 &&
           block[1].data == block[0].data + block[0].length;
}

/* Returns false if one is all zeros, which nobody looks up. */
static bool
cut_pair(const gd_realign *phase, const gd_block *block, gd_block *candidates)
{
    for (size_t i = 0; i < phase->others; i++) {
        const uint8_t *data = block->data + (i + 1) * SECTOR;
        if (gd_is_zero(data, phase->block_size)) {
            return false;
        }
        candidates[i] = (gd_block){.data = data, .length = phase->block_size};
    }
    return true;
}

/* Takes one pair from each of `pairs` parts of the batch, if there is one, and
 * returns how many. */
static size_t
take_sample(gd_realign *phase, const gd_block *blocks, size_t count,
            size_t pairs)
{
    size_t taken = 0;
    for (size_t part = 0; part < pairs; part++) {
        size_t at = part * count / pairs, end = (part + 1) * count / pairs;
        for (bool is = false; !is && at < end && at + 1 < count; at++) {
            is = is_pair(phase, &blocks[at]) &&
                 cut_pair(phase, &blocks[at],
                          &phase->candidates[taken * phase->others]);
            taken += is;
        }
    }
    return taken;
}

/* ---- the choice ---- */

/* Returns whether the candidate was found where no earlier one of its phase
 * was. */
static bool
is_new_find(const gd_realign *phase, size_t other, size_t pair)
{
    const gd_block *all = &phase->candidates[other];
    gd_address found = all[pair * phase->others].address;
    for (size_t i = 0; found.group != 0 && i < pair; i++) {
        gd_address before = all[i * phase->others].address;
        if (before.group == found.group && before.slot == found.slot) {
            return false;
        }
    }
    return found.group != 0;
}

/* The phase that finds most; *most is how many. */
static uint32_t
find_best(const gd_realign *phase, size_t pairs, size_t *most)
{
    size_t best = 0;
    *most = 0;
    for (size_t other = 0; other < phase->others; other++) {
        size_t finds = 0;
        for (size_t pair = 0; pair < pairs; pair++) {
            finds += is_new_find(phase, other, pair);
        }
        if (finds > *most) {
            *most = finds;
            best = other;
        }
    }
    return (uint32_t)(best + 1) * SECTOR;
}

bool
gd_realign_is_lost(size_t count, size_t found)
{
    return count >= BATCH_MIN && found * HARDLY <= count;
}

uint32_t
gd_realign_choose(gd_realign *phase, const gd_block *blocks, size_t count,
                  size_t found)
{
    if (!gd_realign_is_lost(count, found) || phase->repo->index == NULL) {
        return 0; /* without hints, no phase finds anything */
    }
    size_t pairs = count_pairs(phase), most;
    if (phase->credit < pairs * phase->others * PRICE) {
        return 0;
    }
    pairs = take_sample(phase, blocks, count, pairs);
    size_t candidates = pairs * phase->others;
    gd_error ignored; /* then nothing is found */
    if (pairs < FINDS_MIN ||
        gd_hashing_run(phase->hashing, phase->lookup, phase->candidates,
                       candidates, false, &ignored) != GD_OK) {
        return 0;
    }
    phase->credit -= candidates * PRICE;
    atomic_fetch_add(&phase->repo->counters.phase_samples, candidates);
    gd_lookup_batch(phase->lookup, phase->candidates, candidates,
                    GD_COLD_LOADS);
    uint32_t shift = find_best(phase, pairs, &most);
    /* It must be twice the share found at the current phase.  Otherwise the
     * gain is not worth the block that is cut short. */
    return most >= FINDS_MIN && most * count > 2 * found * pairs ? shift : 0;
}

void
gd_realign_note(gd_realign *phase, size_t count, size_t found)
{
    phase->credit += found * EARNED_FOUND + (count - found) * EARNED_MISSED;
    phase->credit = phase->credit < CREDIT ? phase->credit : CREDIT;
}
