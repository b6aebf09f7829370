/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ingest.c - see ingest.h.
 */
#include "engine/write/ingest.h"

#include <string.h>

#include "engine/base/zero.h"

enum {
    BATCH_BYTES = 4 << 20, /* of non-zero data */
    IN_PLACE = 1 << 20,    /* a write this large is not copied into a batch */
    AHEAD = 8,             /* how many blocks ahead the first bytes are
                            * fetched */
};

/* ---- opening and closing ---- */

static gd_status
open_batch(gd_ingest *intake, gd_batch *b, gd_error *err)
{
    const gd_env *env = intake->repo->env;
    b->data = gd_alloc(env, BATCH_BYTES, err);
    b->blocks = gd_calloc(env, intake->batch_blocks, sizeof *b->blocks, err);
    b->carry = gd_calloc(env, intake->chunker.max_length, 1, err);
    return b->data == NULL || b->blocks == NULL || b->carry == NULL ? GD_NOMEM
                                                                    : GD_OK;
}

static void
close_batch(gd_ingest *intake, gd_batch *b)
{
    const gd_env *env = intake->repo->env;
    env->release(env, b->carry);
    env->release(env, b->blocks);
    env->release(env, b->data);
    *b = (gd_batch){0};
}

/* Carried bytes stay. */
static void
clear_batch(gd_batch *b)
{
    *b = (gd_batch){.data = b->data,
                    .blocks = b->blocks,
                    .carry = b->carry,
                    .carried = b->carried};
}

gd_status
gd_ingest_open(gd_ingest *intake, gd_repo *repo, const gd_scope *scope,
               gd_error *err)
{
    *intake = (gd_ingest){.repo = repo, .chunker = repo->chunker};
    intake->batch_blocks = BATCH_BYTES / intake->chunker.average;
    GD_TRY(open_batch(intake, &intake->batch, err));
    GD_TRY(gd_packer_open(repo, scope, &intake->packer, err));
    GD_TRY(gd_hashing_open(repo, scope, &intake->hashing, err));
    GD_TRY(gd_lookup_open(repo, scope, &intake->lookup, err));
    return gd_realign_open(repo, intake->hashing, intake->lookup,
                           &intake->phase, err);
}

void
gd_ingest_close(gd_ingest *intake)
{
    close_batch(intake, &intake->batch);
    close_batch(intake, &intake->other);
    gd_realign_close(intake->repo->env, intake->phase);
    if (intake->packer != NULL) {
        gd_packer_close(intake->packer);
    }
    if (intake->lookup != NULL) {
        gd_lookup_close(intake->lookup);
    }
    if (intake->hashing != NULL) {
        gd_hashing_close(intake->hashing);
    }
}

void
gd_ingest_set_dedup(gd_ingest *intake, gd_dedup dedup)
{
    intake->dedup = dedup;
    gd_packer_set_nodedup(intake->packer, dedup == GD_DEDUP_OFF);
}

/* ---- a batch's way ---- */

/* Gives the block an address: that of an equal block of ours, or a new one. */
static gd_status
store_block(gd_ingest *intake, gd_block *block, size_t *misses, gd_error *err)
{
    if (block->address.group == 0 && intake->dedup != GD_DEDUP_OFF) {
        block->address = gd_packer_find(intake->packer, block->data,
                                        block->length, &block->fingerprint);
    }
    if (block->address.group != 0) {
        return GD_OK;
    }
    ++*misses;
    return gd_packer_add(intake->packer, block->data, block->length,
                         &block->fingerprint, block->checksum, &block->address,
                         err);
}

/* Keeps the addresses that the blocks came with where they are right.  An
 * address that could not be verified is a miss. */
static void
verify_hinted(gd_ingest *intake)
{
    gd_error ignored;
    gd_batch *b = &intake->batch;
    if (b->hinted) {
        (void)gd_lookup_verify(intake->lookup, b->blocks, b->count, &ignored);
    }
}

/* *found: how many blocks are stored already. */
static gd_status
look_up_batch(gd_ingest *intake, size_t *found, gd_error *err)
{
    gd_batch *b = &intake->batch;
    bool checksums = !intake->mostly_known;
    bool all = intake->dedup == GD_DEDUP_ALL;
    gd_status s = gd_hashing_run(intake->hashing, all ? intake->lookup : NULL,
                                 b->blocks, b->count, checksums, err);
    *found = 0;
    if (s != GD_OK) {
        return s;
    }
    verify_hinted(intake);
    if (all || (intake->dedup == GD_DEDUP_PROBE &&
                gd_lookup_probe(intake->lookup, b->blocks, b->count))) {
        gd_lookup_batch(intake->lookup, b->blocks, b->count, GD_COLD_LOADS);
    } else {
        atomic_fetch_add(&intake->repo->counters.skipped, b->count);
    }
    for (size_t i = 0; i < b->count; i++) {
        *found += b->blocks[i].address.group != 0;
    }
    /* A second fingerprint costs as much as about ten checksums. */
    intake->mostly_known = (b->count - *found) * 8 < b->count;
    return checksums || *found == b->count
               ? GD_OK
               : gd_hashing_add_checksums(intake->hashing, b->blocks, b->count,
                                          err);
}

static void
count_batch(gd_ingest *intake, size_t stored, size_t misses)
{
    gd_counters *counters = &intake->repo->counters;
    gd_batch *b = &intake->batch;
    atomic_fetch_add(&counters->blocks, b->count);
    atomic_fetch_add(&counters->zero_blocks, b->zero_blocks);
    atomic_fetch_add(&counters->hits, stored - misses);
    atomic_fetch_add(&counters->misses, misses);
    if (intake->phase != NULL) {
        gd_realign_note(intake->phase, b->count, stored - misses);
    }
}

/* Stores the blocks that were not found, and empties the batch. */
static gd_status
put_batch(gd_ingest *intake, gd_error *err)
{
    gd_batch *b = &intake->batch;
    gd_recipe_writer *recipe = intake->recipe;
    size_t done = 0, misses = 0;
    gd_status s =
        gd_repo_require_room(intake->repo, gd_recipe_bytes(b->count), err);
    for (; s == GD_OK && done < b->count; done++) {
        gd_block *block = &b->blocks[done];
        s = gd_recipe_add_zeros(recipe, block->zeros_before, err);
        if (s == GD_OK) {
            s = store_block(intake, block, &misses, err);
        }
        if (s == GD_OK) {
            s = gd_recipe_add_block(recipe, block->address,
                                    &block->fingerprint, block->length, err);
        }
        if (s == GD_OK && intake->addresses != NULL) {
            *intake->addresses++ = block->address;
        }
    }
    if (s == GD_OK) {
        s = gd_recipe_add_zeros(recipe, b->zeros_after, err);
    }
    if (s == GD_OK) {
        s = gd_packer_flush(intake->packer, err);
    }
    count_batch(intake, done, misses);
    clear_batch(b);
    return s;
}

/* ---- chunking ---- */

/* stays: data will stay in place until the batch is stored.
 * REQUIRES: the batch is not full. */
static void
take_block(gd_ingest *intake, const uint8_t *data, size_t length, bool stays)
{
    gd_batch *b = &intake->batch;
    if (gd_is_zero(data, length)) {
        b->zeros_after += length;
        b->zero_blocks++;
        return;
    }
    if (stays) {
        b->borrows = true;
    } else {
        memcpy(b->data + b->used, data, length);
        data = b->data + b->used;
        b->used += length;
    }
    b->blocks[b->count++] = (gd_block){.zeros_before = b->zeros_after,
                                       .data = data,
                                       .length = (uint32_t)length};
    b->zeros_after = 0;
}

/* Returns whether the batch may have no room for another block. */
static bool
is_full(const gd_ingest *intake)
{
    const gd_batch *b = &intake->batch;
    return b->count == intake->batch_blocks ||
           b->used + intake->chunker.max_length > BATCH_BYTES;
}

/* Like the chunker's next, except for a block that must be cut short. */
static size_t
next_cut(gd_ingest *intake, const uint8_t *data, size_t length, size_t known,
         bool last)
{
    const gd_chunker *chunker = &intake->chunker;
    size_t cut = intake->short_cut;
    if (cut == 0) {
        return chunker->next(chunker, data, length, known, last);
    }
    if (length < cut) {
        return last ? length : 0;
    }
    intake->short_cut = 0;
    return cut;
}

/* Completes the carried block with the first of these bytes, or with zeros if
 * data is NULL.  *used is how many bytes were taken. */
static gd_status
take_carried(gd_ingest *intake, const uint8_t *data, size_t length,
             size_t *used, gd_error *err)
{
    gd_batch *b = &intake->batch;
    size_t before = b->carried;
    size_t wanted = intake->chunker.max_length - before;
    *used = length < wanted ? length : wanted;
    if (data == NULL) {
        memset(b->carry + before, 0, *used);
    } else {
        memcpy(b->carry + before, data, *used);
    }
    b->carried += *used;
    size_t cut = next_cut(intake, b->carry, b->carried, before, false);
    if (cut == 0) {
        return GD_OK;
    }
    if (cut < before) {
        /* A cut among the carried bytes would have been found before. */
        return gd_fail(err, GD_INVALID, "the chunker is not consistent");
    }
    *used = cut - before; /* the rest is cut in place */
    b->carried = 0;
    take_block(intake, b->carry, cut, false);
    return GD_OK;
}

/* Takes the first block of these bytes, or all of them if it does not end among
 * them. */
static gd_status
take_next(gd_ingest *intake, const uint8_t *data, size_t length, bool stays,
          size_t *used, gd_error *err)
{
    if (intake->batch.carried > 0) {
        return take_carried(intake, data, length, used, err);
    }
    *used = next_cut(intake, data, length, 0, false);
    if (*used == 0) {
        memcpy(intake->batch.carry, data, length);
        intake->batch.carried = *used = length;
        return GD_OK;
    }
    if (length > AHEAD * *used) {
        __builtin_prefetch(data + AHEAD * *used);
    }
    take_block(intake, data, *used, stays);
    return GD_OK;
}

/* recut: the batch may be cut again. */
static gd_status store_batch(gd_ingest *intake, bool recut, gd_error *err);

static gd_status
store_full(gd_ingest *intake, bool recut, gd_error *err)
{
    return is_full(intake) ? store_batch(intake, recut, err) : GD_OK;
}

static gd_status
take_bytes(gd_ingest *intake, const uint8_t *data, size_t length, bool stays,
           bool recut, gd_error *err)
{
    gd_status s = GD_OK;
    size_t used;
    while (s == GD_OK && length > 0) {
        s = take_next(intake, data, length, stays, &used, err);
        if (s == GD_OK) {
            s = store_full(intake, recut, err);
        }
        data += used;
        length -= used;
    }
    return s;
}

/* ---- cutting the batch again ---- */

gd_status
gd_ingest_take_zeros(gd_ingest *intake, uint64_t length, gd_error *err)
{
    gd_batch *b = &intake->batch;
    size_t block = intake->chunker.max_length, used;
    gd_status s = GD_OK;
    while (s == GD_OK && length > 0) {
        if (b->carried == 0 && intake->short_cut == 0 && length >= block) {
            b->zeros_after += length - length % block;
            b->zero_blocks += length / block;
            length %= block;
            continue;
        }
        s = take_carried(intake, NULL,
                         length < block ? (size_t)length : block, &used, err);
        if (s == GD_OK) {
            s = store_full(intake, false, err);
        }
        length -= used;
    }
    return s;
}

/* Counts the blocks, from the first, that are adjacent in the image and in
 * memory; *length is their total length. */
static size_t
count_run(const gd_block *blocks, size_t count, size_t *length)
{
    size_t n = 1;
    *length = blocks->length;
    while (n < count && blocks[n].zeros_before == 0 &&
           blocks[n].data == blocks->data + *length) {
        *length += blocks[n++].length;
    }
    return n;
}

/* Cuts the batch again, and the carried bytes behind it, so that the first
 * block ends after `shift` bytes, and stores it.  A last block without an end
 * is carried. */
static gd_status
cut_again(gd_ingest *intake, uint32_t shift, gd_error *err)
{
    gd_batch *from = &intake->other;
    gd_batch filled = intake->batch;
    intake->batch = intake->other;
    *from = filled;
    intake->short_cut = shift;
    gd_status s = GD_OK;
    for (size_t i = 0; s == GD_OK && i < from->count;) {
        const gd_block *first = &from->blocks[i];
        size_t length;
        i += count_run(first, from->count - i, &length);
        s = gd_ingest_take_zeros(intake, first->zeros_before, err);
        if (s == GD_OK) {
            s = take_bytes(intake, first->data, length, true, false, err);
        }
    }
    if (s == GD_OK) {
        s = gd_ingest_take_zeros(intake, from->zeros_after, err);
    }
    if (s == GD_OK) {
        s = take_bytes(intake, from->carry, from->carried, false, false, err);
    }
    if (s == GD_OK) {
        s = store_batch(intake, false, err);
    }
    from->carried = 0;
    clear_batch(from);
    atomic_fetch_add(&intake->repo->counters.phase_changes, 1);
    return s;
}

/* Counts the blocks that this transaction stored, which no look-up finds. */
static size_t
count_own(gd_ingest *intake)
{
    size_t own = 0;
    for (size_t i = 0; i < intake->batch.count; i++) {
        const gd_block *block = &intake->batch.blocks[i];
        own += block->address.group == 0 &&
               gd_packer_find(intake->packer, block->data, block->length,
                              &block->fingerprint).group != 0;
    }
    return own;
}

/* Returns false if there is no memory to cut into. */
static bool
ensure_other(gd_ingest *intake)
{
    gd_error ignored;
    gd_batch *other = &intake->other;
    if (other->data == NULL && open_batch(intake, other, &ignored) != GD_OK) {
        close_batch(intake, other);
    }
    return other->data != NULL;
}

/* Returns how many bytes later to cut the batch; 0: it stays as it is. */
static uint32_t
choose_shift(gd_ingest *intake, size_t found)
{
    const gd_batch *b = &intake->batch;
    if (intake->phase == NULL || intake->told ||
        intake->dedup != GD_DEDUP_ALL) {
        return 0;
    }
    uint32_t shift =
        gd_realign_choose(intake->phase, b->blocks, b->count, found);
    return shift > 0 &&
                   gd_realign_is_lost(b->count, found + count_own(intake)) &&
                   ensure_other(intake)
               ? shift
               : 0;
}

static gd_status
store_batch(gd_ingest *intake, bool recut, gd_error *err)
{
    size_t found;
    GD_TRY(look_up_batch(intake, &found, err));
    uint32_t shift = recut ? choose_shift(intake, found) : 0;
    return shift > 0 ? cut_again(intake, shift, err) : put_batch(intake, err);
}

gd_status
gd_ingest_store(gd_ingest *intake, gd_error *err)
{
    return store_batch(intake, false, err);
}

/* ---- taking ---- */

gd_status
gd_ingest_take(gd_ingest *intake, const uint8_t *data, size_t length,
               gd_error *err)
{
    gd_status s =
        take_bytes(intake, data, length, length >= IN_PLACE, true, err);
    return s == GD_OK && intake->batch.borrows
               ? store_batch(intake, true, err)
               : s;
}

/* Moves the addresses of the non-zero blocks, which are packed at the front, to
 * their blocks' places.  data is behind the last block. */
static void
spread_addresses(gd_ingest *intake, const uint8_t *data,
                 const uint32_t *lengths, size_t count, gd_address *addresses)
{
    const gd_address *stored = intake->addresses;
    while (count-- > 0) {
        data -= lengths[count];
        addresses[count] = gd_is_zero(data, lengths[count])
                               ? (gd_address){0, 0}
                               : *--stored;
    }
}

gd_status
gd_ingest_take_blocks(gd_ingest *intake, const uint8_t *data,
                      const uint32_t *lengths, const gd_address *old,
                      size_t count, gd_address *addresses, gd_error *err)
{
    gd_status s = GD_OK;
    intake->addresses = addresses;
    if (intake->dedup == GD_DEDUP_OFF || intake->repo->params.by_value) {
        old = NULL; /* copies stay copies (I14); the fingerprint proves nothing
                     * (I5) */
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        size_t before = intake->batch.count;
        take_block(intake, data, lengths[i], true);
        if (old != NULL && old[i].group != 0 && intake->batch.count > before) {
            intake->batch.blocks[before].address = old[i];
            intake->batch.hinted = true;
        }
        data += lengths[i];
        s = store_full(intake, false, err);
    }
    if (s == GD_OK) {
        s = store_batch(intake, false, err);
    }
    if (s == GD_OK) {
        spread_addresses(intake, data, lengths, count, addresses);
    }
    intake->addresses = NULL;
    return s;
}

static gd_status
take_last_block(gd_ingest *intake, gd_error *err)
{
    gd_batch *b = &intake->batch;
    const uint8_t *at = b->carry;
    while (b->carried > 0) {
        size_t cut = next_cut(intake, at, b->carried, 0, true);
        take_block(intake, at, cut, false);
        at += cut;
        b->carried -= cut;
        GD_TRY(store_full(intake, false, err));
    }
    return GD_OK;
}

static gd_status
store_last(gd_ingest *intake, bool recut, gd_error *err)
{
    GD_TRY(take_last_block(intake, err));
    return store_batch(intake, recut, err);
}

gd_status
gd_ingest_finish(gd_ingest *intake, gd_error *err)
{
    gd_status s = store_last(intake, true, err);
    return s == GD_OK && intake->batch.carried > 0 /* it was cut again */
               ? store_last(intake, false, err)
               : s;
}
