/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blockcopy.c - see blockcopy.h.
 */
#include "engine/maintenance/blockcopy.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/array.h"
#include "engine/base/coding.h"
#include "engine/format/pairs.h"
#include "engine/read/address_reader.h"
#include "engine/read/spare.h"
#include "engine/write/packer.h"

enum { MAX_BLOCK = 65536 };

struct gd_block_copy {
    gd_repo *repo;
    gd_packer *packer;
    gd_address_reader *reader;
    uint8_t *spare; /* a block read from spares/ */
    uint8_t *pairs; /* old and new addresses */
    size_t count, room;
};

gd_status
gd_block_copy_open(gd_repo *repo, gd_block_copy **out, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(repo, err));
    gd_block_copy *copy =
        gd_calloc(repo->env, 1, sizeof *copy, err);
    if (copy == NULL) {
        return GD_NOMEM;
    }
    copy->repo = repo;
    gd_status s = gd_address_reader_open(repo, &copy->reader, err);
    if (s == GD_OK) {
        copy->spare = gd_calloc(repo->env, MAX_BLOCK, 1, err);
        s = copy->spare == NULL ? GD_NOMEM : GD_OK;
    }
    if (s == GD_OK) {
        s = gd_packer_open(repo, &gd_global_scope, &copy->packer, err);
    }
    if (s != GD_OK) {
        gd_block_copy_close(copy);
        return s;
    }
    *out = copy;
    return GD_OK;
}

void
gd_block_copy_close(gd_block_copy *copy)
{
    const gd_env *env = copy->repo->env;
    if (copy->packer != NULL) {
        gd_packer_close(copy->packer);
    }
    gd_address_reader_close(copy->reader);
    env->release(env, copy->spare);
    env->release(env, copy->pairs);
    env->release(env, copy);
}

static int
ascending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts the addresses, drops repeated ones, and notes their groups as groups to
 * avoid.  The caller must release *sorted. */
static gd_status
take_addresses(gd_block_copy *copy, const uint8_t *addresses,
               size_t count, uint64_t **sorted, size_t *distinct,
               gd_error *err)
{
    uint64_t *numbers =
        gd_calloc(copy->repo->env, count, sizeof *numbers, err);
    if (numbers == NULL) {
        return GD_NOMEM;
    }
    *sorted = numbers;
    for (size_t i = 0; i < count; i++) {
        numbers[i] = gd_get64(addresses + 8 * i);
        if (!gd_address_is_valid(numbers[i])) {
            return gd_fail(err, GD_INVALID, "%llu is not an address",
                           (unsigned long long)numbers[i]);
        }
    }
    qsort(numbers, count, sizeof *numbers, ascending);
    gd_status s = GD_OK;
    size_t used = 0;
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        if (i > 0 && numbers[i] == numbers[used - 1]) {
            continue;
        }
        numbers[used++] = numbers[i];
        s = gd_packer_avoid(copy->packer, gd_address_of(numbers[i]).group,
                            err);
    }
    *distinct = used;
    return s;
}

static gd_status
note_pair(gd_block_copy *copy, uint64_t old, gd_address to,
          gd_error *err)
{
    uint8_t *pairs =
        gd_array_reserve(copy->repo->env, copy->pairs, &copy->room,
                         copy->count + 1, GD_PAIR_SIZE, err);
    if (pairs == NULL) {
        return GD_NOMEM;
    }
    copy->pairs = pairs;
    uint8_t *pair = copy->pairs + copy->count++ * GD_PAIR_SIZE;
    gd_put64(pair, old);
    gd_put64(pair + 8, gd_address_number(to));
    return GD_OK;
}

/* A damaged entry still has its block's fields. */
static gd_status
read_spare(gd_block_copy *copy, const gd_entry *entry,
           const uint8_t **data, bool *had, gd_error *err)
{
    if ((entry->state != GD_ENTRY_LIVE && entry->state != GD_ENTRY_DAMAGED) ||
        entry->plain_length < 1 || entry->plain_length > MAX_BLOCK) {
        return GD_OK;
    }
    *data = copy->spare;
    return gd_spare_read(copy->repo,
                         &gd_address_reader_group(copy->reader)->scope,
                         &entry->fingerprint, entry->plain_length,
                         entry->checksum, copy->spare, had, err);
}

/* *had: the block was read and verified, here or from its spare copy.  Returns
 * an error only if its cause is not the block. */
static gd_status
read_block(gd_block_copy *copy, gd_address address, gd_entry *entry,
           const uint8_t **data, bool *had, gd_error *err)
{
    gd_status s = gd_address_reader_read(copy->reader, address, entry,
                                         data, err);
    *had = s == GD_OK;
    return s == GD_CORRUPT || s == GD_NOTFOUND || s == GD_IO
               ? read_spare(copy, entry, data, had, err)
               : s;
}

/* Stores the block at `from` again, for the address `old`.  nodedup: the copy's
 * mark; NULL: it is the block's. */
static gd_status
copy_block(gd_block_copy *copy, uint64_t old, uint64_t from,
           const bool *nodedup, gd_error *err)
{
    gd_address to;
    gd_entry entry;
    const uint8_t *data;
    bool had;
    gd_status s =
        read_block(copy, gd_address_of(from), &entry, &data, &had, err);
    if (s != GD_OK || !had) {
        return s;
    }
    s = gd_packer_set_scope(
        copy->packer,
        &gd_address_reader_group(copy->reader)->scope, err);
    if (s == GD_OK) {
        gd_packer_set_nodedup(copy->packer, nodedup == NULL
                                                ? entry.nodedup
                                                : *nodedup); /* I14 */
        s = gd_packer_add(copy->packer, data, entry.plain_length,
                          &entry.fingerprint, entry.checksum, &to, err);
    }
    return s == GD_OK ? note_pair(copy, old, to, err) : s;
}

gd_status
gd_block_copy_add(gd_block_copy *copy, const uint8_t *addresses,
                  size_t count, gd_error *err)
{
    uint64_t *numbers = NULL;
    size_t distinct = 0;
    gd_status s = gd_repo_require_owner(copy->repo, err);
    if (s != GD_OK || count == 0) {
        return s;
    }
    s = take_addresses(copy, addresses, count, &numbers, &distinct, err);
    for (size_t i = 0; s == GD_OK && i < distinct; i++) {
        s = copy_block(copy, numbers[i], numbers[i], NULL, err);
    }
    copy->repo->env->release(copy->repo->env, numbers);
    return s;
}

gd_status
gd_block_copy_add_equal(gd_block_copy *copy, uint64_t old, uint64_t from,
                        bool nodedup, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(copy->repo, err));
    if (!gd_address_is_valid(old) || !gd_address_is_valid(from)) {
        return gd_fail(err, GD_INVALID, "%llu or %llu is not an address",
                       (unsigned long long)old, (unsigned long long)from);
    }
    GD_TRY(gd_packer_avoid(copy->packer, gd_address_of(old).group, err));
    return copy_block(copy, old, from, &nodedup, err);
}

static int
by_old_address(const void *a, const void *b)
{
    uint64_t x = gd_get64(a), y = gd_get64(b);
    return x < y ? -1 : x > y;
}

gd_status
gd_block_copy_finish(gd_block_copy *copy, const uint8_t **pairs,
                     size_t *count, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(copy->repo, err));
    GD_TRY(gd_packer_sync(copy->packer, err));
    /* A block that was added twice has two copies; either will do. */
    size_t used = 0;
    if (copy->count > 0) {
        qsort(copy->pairs, copy->count, GD_PAIR_SIZE, by_old_address);
    }
    for (size_t i = 0; i < copy->count; i++) {
        const uint8_t *pair = copy->pairs + i * GD_PAIR_SIZE;
        if (used == 0 ||
            gd_get64(copy->pairs + (used - 1) * GD_PAIR_SIZE) !=
                gd_get64(pair)) {
            memmove(copy->pairs + used * GD_PAIR_SIZE, pair, GD_PAIR_SIZE);
            used++;
        }
    }
    copy->count = used;
    *pairs = copy->pairs;
    *count = used;
    return GD_OK;
}
