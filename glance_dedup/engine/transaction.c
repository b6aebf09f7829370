/*
 * transaction.c - see transaction.h.
 */
#include "transaction.h"

#include <stdio.h>
#include <string.h>

#include "chunker.h"
#include "lookup.h"
#include "packer.h"
#include "spool.h"

enum {
    BATCH_BYTES = 4 << 20, /* of non-zero data */
    IN_PLACE = 1 << 20,    /* a write this large is not copied into a batch */
    HASH_TASK = 64,        /* blocks fingerprinted in one go */
    FIND_LOADS = 16,       /* stores loaded for a batch of fingerprints */
    AHEAD = 8,             /* blocks whose first bytes are fetched early */
};

/* The blocks of a stretch of the image. */
typedef struct batch {
    uint8_t *data; /* copies of blocks that do not stay where they are */
    size_t used;
    gd_block *blocks;
    size_t count;
    bool borrows; /* some blocks are still the caller's */
    const gd_scope *scope;
    uint64_t zeros_after;
    gd_job job;
    gd_hasher **hashers; /* one for each thread, and the waiter's */
    atomic_int failed;
} batch;

struct gd_transaction {
    gd_repo *repo;
    gd_chunker chunker;
    char image_id[GD_IMAGE_ID_MAX + 1];
    char project[GD_PROJECT_MAX + 1];
    gd_scope scope;
    gd_spool_file spool;
    gd_recipe_writer *recipe;
    gd_packer *packer;
    gd_lookup *lookup;
    size_t batch_blocks; /* room in the batch */
    batch batch;
    uint8_t *carry; /* the start of a block whose end is still to come */
    size_t carried;
    bool failed;
    bool linked;
};

/* ---- begin and end ---- */

static gd_status
check_project(const char *project, gd_error *err)
{
    size_t length = strnlen(project, GD_PROJECT_MAX + 1);
    if (length > GD_PROJECT_MAX) {
        return gd_fail(err, GD_INVALID, "a project's name has at most %d bytes",
                       GD_PROJECT_MAX);
    }
    return GD_OK;
}

static gd_status
check_scope(const gd_scope *scope, gd_error *err)
{
    return gd_scope_equal(scope, &gd_spares_scope)
               ? gd_fail(err, GD_INVALID, "this scope id marks spare copies")
               : GD_OK;
}

static gd_status
check_absent(gd_repo *repo, const char *image_id, gd_error *err)
{
    char name[GD_NAME_SIZE];
    struct stat st;
    gd_status s = gd_image_name(image_id, name, err);
    if (s == GD_OK && repo->env->fstatat(repo->env, repo->root, name, &st) == 0) {
        s = gd_fail(err, GD_EXISTS, "image %s exists already", image_id);
    }
    return s;
}

static gd_status
open_batch(gd_transaction *transaction, batch *b, gd_error *err)
{
    gd_repo *repo = transaction->repo;
    unsigned hashers = gd_pool_threads(repo->pool) + 1;
    b->scope = &transaction->scope;
    b->data = gd_alloc(repo->env, BATCH_BYTES, err);
    b->blocks = gd_calloc(repo->env, transaction->batch_blocks,
                          sizeof *b->blocks, err);
    b->hashers = gd_calloc(repo->env, hashers, sizeof *b->hashers, err);
    if (b->data == NULL || b->blocks == NULL || b->hashers == NULL) {
        return GD_NOMEM;
    }
    for (unsigned i = 0; i < hashers; i++) {
        gd_status s = gd_hasher_open(repo->env, repo->digest, &b->hashers[i],
                                     err);
        if (s != GD_OK) {
            return s;
        }
    }
    return GD_OK;
}

static void
close_batch(gd_transaction *transaction, batch *b)
{
    gd_repo *repo = transaction->repo;
    for (unsigned i = 0;
         b->hashers != NULL && i <= gd_pool_threads(repo->pool); i++) {
        if (b->hashers[i] != NULL) {
            gd_hasher_close(repo->env, b->hashers[i]);
        }
    }
    repo->env->release(repo->env, b->hashers);
    repo->env->release(repo->env, b->blocks);
    repo->env->release(repo->env, b->data);
}

static gd_status
open_parts(gd_transaction *transaction, gd_error *err)
{
    gd_repo *repo = transaction->repo;
    gd_status s = gd_chunker_fixed(&transaction->chunker,
                                   repo->params.block_size, err);
    if (s != GD_OK) {
        return s;
    }
    transaction->batch_blocks = BATCH_BYTES / repo->params.block_size;
    transaction->carry =
        gd_calloc(repo->env, transaction->chunker.max_length, 1, err);
    s = transaction->carry == NULL ? GD_NOMEM : GD_OK;
    if (s == GD_OK) {
        s = open_batch(transaction, &transaction->batch, err);
    }
    if (s == GD_OK) {
        s = gd_packer_open(repo, &transaction->scope, &transaction->packer,
                           err);
    }
    if (s == GD_OK) {
        s = gd_lookup_open(repo, &transaction->scope, &transaction->lookup,
                           err);
    }
    if (s == GD_OK) {
        s = gd_spool_create(repo->env, repo->root, GD_SPOOL_STORE,
                            &transaction->spool, err);
    }
    if (s == GD_OK) {
        s = gd_recipe_writer_open(repo->env, transaction->spool.fd,
                                  transaction->spool.name,
                                  transaction->spool.id, &transaction->recipe,
                                  err);
    }
    return s;
}

gd_status
gd_transaction_begin(gd_repo *repo, const char *image_id, const char *project,
                     const gd_scope *scope, gd_transaction **out,
                     gd_error *err)
{
    gd_status s = gd_repo_check_owner(repo, err);
    if (s == GD_OK) {
        s = check_absent(repo, image_id, err);
    }
    if (s == GD_OK) {
        s = check_project(project, err);
    }
    if (s == GD_OK) {
        s = check_scope(scope, err);
    }
    if (s == GD_OK) {
        gd_fpcache_drop_removed(repo->cache);
        s = gd_repo_check_room(repo, gd_recipe_bytes(0), err);
    }
    if (s != GD_OK) {
        return s;
    }
    gd_transaction *transaction =
        gd_calloc(repo->env, 1, sizeof *transaction, err);
    if (transaction == NULL) {
        return GD_NOMEM;
    }
    transaction->repo = repo;
    transaction->scope = *scope;
    transaction->spool.fd = -1;
    snprintf(transaction->image_id, sizeof transaction->image_id, "%s",
             image_id);
    snprintf(transaction->project, sizeof transaction->project, "%s", project);
    s = open_parts(transaction, err);
    if (s != GD_OK) {
        gd_transaction_end(transaction);
        return s;
    }
    *out = transaction;
    return GD_OK;
}

const uint8_t *
gd_transaction_upload_id(const gd_transaction *transaction)
{
    return transaction->spool.id;
}

void
gd_transaction_end(gd_transaction *transaction)
{
    gd_repo *repo = transaction->repo;
    const gd_env *env = repo->env;
    close_batch(transaction, &transaction->batch);
    /* N8.5: the spool file first, then the locks. */
    if (transaction->linked) {
        gd_spool_close(env, &transaction->spool);
    } else {
        gd_spool_discard(env, repo->root, &transaction->spool);
    }
    gd_recipe_writer_close(transaction->recipe);
    if (transaction->packer != NULL) {
        gd_packer_close(transaction->packer);
    }
    if (transaction->lookup != NULL) {
        gd_lookup_close(transaction->lookup);
    }
    env->release(env, transaction->carry);
    env->release(env, transaction);
}

/* ---- a batch's way ---- */

static void
hash_blocks(void *arg, size_t task, unsigned worker)
{
    batch *b = arg;
    gd_hash_input inputs[HASH_TASK];
    size_t count = 0, end = (task + 1) * HASH_TASK;
    for (size_t i = task * HASH_TASK; i < end && i < b->count; i++) {
        gd_block *block = &b->blocks[i];
        inputs[count++] = (gd_hash_input){block->data, block->length,
                                          &block->fingerprint};
    }
    gd_status s = gd_hasher_compute_many(b->hashers[worker], b->scope, inputs,
                                         count, NULL);
    if (s != GD_OK) {
        atomic_store(&b->failed, (int)s);
    }
}

static gd_status
hash_batch(gd_transaction *transaction, gd_error *err)
{
    batch *b = &transaction->batch;
    gd_pool *pool = transaction->repo->pool;
    atomic_store(&b->failed, GD_OK);
    b->job = (gd_job){.run = hash_blocks,
                      .arg = b,
                      .tasks = (b->count + HASH_TASK - 1) / HASH_TASK};
    gd_pool_submit(pool, &b->job);
    gd_pool_wait(pool, &b->job);
    gd_status s = (gd_status)atomic_load(&b->failed);
    return s == GD_OK
               ? GD_OK
               : gd_fail(err, s, "a fingerprint could not be computed");
}

/* Gives the block an address: of an equal one of ours, or a new one. */
static gd_status
store_block(gd_transaction *transaction, gd_block *block, size_t *misses,
            gd_error *err)
{
    if (block->address.group == 0) {
        block->address = gd_packer_find(transaction->packer, block->data,
                                        block->length, &block->fingerprint);
    }
    if (block->address.group != 0) {
        return GD_OK;
    }
    ++*misses;
    return gd_packer_add(transaction->packer, block->data, block->length,
                         &block->fingerprint, &block->address, err);
}

static gd_status
store_batch(gd_transaction *transaction, gd_error *err)
{
    batch *b = &transaction->batch;
    gd_counters *counters = &transaction->repo->counters;
    gd_recipe_writer *recipe = transaction->recipe;
    size_t done = 0, misses = 0;
    gd_status s = hash_batch(transaction, err);
    if (s == GD_OK) {
        s = gd_repo_check_room(transaction->repo, gd_recipe_bytes(b->count),
                               err);
    }
    if (s == GD_OK) {
        gd_lookup_batch(transaction->lookup, b->blocks, b->count,
                        GD_COLD_LOADS);
    }
    for (; s == GD_OK && done < b->count; done++) {
        gd_block *block = &b->blocks[done];
        s = gd_recipe_add_zeros(recipe, block->zeros_before, err);
        if (s == GD_OK) {
            s = store_block(transaction, block, &misses, err);
        }
        if (s == GD_OK) {
            s = gd_recipe_add_block(recipe, block->address,
                                    &block->fingerprint, block->length, err);
        }
    }
    if (s == GD_OK) {
        s = gd_recipe_add_zeros(recipe, b->zeros_after, err);
    }
    if (s == GD_OK) {
        s = gd_packer_flush(transaction->packer, err);
    }
    atomic_fetch_add(&counters->blocks, b->count);
    atomic_fetch_add(&counters->hits, done - misses);
    atomic_fetch_add(&counters->misses, misses);
    b->count = 0;
    b->used = 0;
    b->zeros_after = 0;
    b->borrows = false;
    return s;
}

/* stays: data will be where it is until the batch is stored. */
static gd_status
take_block(gd_transaction *transaction, const uint8_t *data, size_t length,
           bool stays, gd_error *err)
{
    batch *b = &transaction->batch;
    if (gd_is_zero(data, length)) {
        b->zeros_after += length;
        atomic_fetch_add_explicit(&transaction->repo->counters.zero_blocks, 1,
                                  memory_order_relaxed);
        return GD_OK;
    }
    if (b->count == transaction->batch_blocks ||
        (!stays && b->used + length > BATCH_BYTES)) {
        gd_status s = store_batch(transaction, err);
        if (s != GD_OK) {
            return s;
        }
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
    return GD_OK;
}

/* ---- writing ---- */

/* Completes the carried block with the caller's first bytes.  *used: how many
 * of them are dealt with. */
static gd_status
take_carried(gd_transaction *transaction, const uint8_t *data, size_t length,
             size_t *used, gd_error *err)
{
    const gd_chunker *chunker = &transaction->chunker;
    size_t wanted = chunker->max_length - transaction->carried;
    size_t before = transaction->carried;
    *used = length < wanted ? length : wanted;
    memcpy(transaction->carry + before, data, *used);
    transaction->carried += *used;
    size_t cut = chunker->next(chunker, transaction->carry,
                               transaction->carried, false);
    if (cut == 0) {
        return GD_OK;
    }
    if (cut < before) {
        /* A cut among the carried bytes would have been seen before. */
        return gd_fail(err, GD_INVALID, "the chunker is not consistent");
    }
    *used = cut - before; /* the rest is cut from where it lies */
    transaction->carried = 0;
    return take_block(transaction, transaction->carry, cut, false, err);
}

static gd_status
take_bytes(gd_transaction *transaction, const uint8_t *data, size_t length,
           gd_error *err)
{
    const gd_chunker *chunker = &transaction->chunker;
    gd_status s = GD_OK;
    bool stays = length >= IN_PLACE;
    size_t used;
    while (s == GD_OK && length > 0 && transaction->carried > 0) {
        s = take_carried(transaction, data, length, &used, err);
        data += used;
        length -= used;
    }
    while (s == GD_OK && length > 0) {
        used = chunker->next(chunker, data, length, false);
        if (used == 0) {
            memcpy(transaction->carry, data, length);
            transaction->carried = length;
            break;
        }
        if (length > AHEAD * used) {
            __builtin_prefetch(data + AHEAD * used);
        }
        s = take_block(transaction, data, used, stays, err);
        data += used;
        length -= used;
    }
    return s;
}

static gd_status
check_under_way(const gd_transaction *transaction, gd_error *err)
{
    gd_status s = gd_repo_check_owner(transaction->repo, err);
    if (s == GD_OK && (transaction->failed || transaction->linked)) {
        s = gd_fail(err, GD_CLOSED, "the transaction of image %s has %s",
                    transaction->image_id,
                    transaction->failed ? "failed" : "ended");
    }
    return s;
}

gd_status
gd_transaction_write(gd_transaction *transaction, const uint8_t *data,
                     size_t length, gd_error *err)
{
    gd_status s = check_under_way(transaction, err);
    if (s != GD_OK) {
        return s;
    }
    s = take_bytes(transaction, data, length, err);
    if (s == GD_OK && transaction->batch.borrows) {
        s = store_batch(transaction, err);
    }
    transaction->failed = s != GD_OK;
    return s;
}

/* ---- blocks by their fingerprints ---- */

/* Stores the blocks that wait, so that what is appended next comes behind them,
 * and the batch's places are free. */
static gd_status
store_waiting(gd_transaction *transaction, gd_error *err)
{
    gd_status s = store_batch(transaction, err);
    transaction->failed = s != GD_OK;
    return s;
}

static gd_status
check_boundary(const gd_transaction *transaction, gd_error *err)
{
    gd_status s = check_under_way(transaction, err);
    if (s == GD_OK && transaction->carried > 0) {
        s = gd_fail(err, GD_INVALID,
                    "image %s: what was written last ends within a block, so "
                    "that no other can follow it", transaction->image_id);
    }
    return s;
}

/* Looks up what is in the batch's places. */
static void
find_batch(gd_transaction *transaction, size_t count)
{
    gd_block *blocks = transaction->batch.blocks;
    gd_error ignored; /* what could not be looked up was not found */
    gd_lookup_batch(transaction->lookup, blocks, count, FIND_LOADS);
    /* By its fingerprint alone; the length may be a lie. */
    (void)gd_lookup_confirm(transaction->lookup, blocks, count, &ignored);
    for (size_t i = 0; i < count; i++) {
        gd_block *block = &blocks[i];
        if (block->address.group != 0) {
            continue;
        }
        gd_address own = gd_packer_find(transaction->packer, NULL,
                                        block->length, &block->fingerprint);
        if (own.group != 0 &&
            gd_packer_added(transaction->packer, own, &block->fingerprint,
                            block->length)) {
            block->address = own;
        }
    }
}

/* Fills the batch's places from the caller's arrays, as many as fit. */
static size_t
fill_places(gd_transaction *transaction, const gd_fingerprint *fps,
            const uint32_t *lengths, const gd_address *addresses, size_t count)
{
    size_t n = count < transaction->batch_blocks ? count
                                                 : transaction->batch_blocks;
    for (size_t i = 0; i < n; i++) {
        transaction->batch.blocks[i] = (gd_block){
            .length = lengths[i],
            .fingerprint = fps[i],
            .address = addresses == NULL ? (gd_address){0, 0} : addresses[i],
        };
    }
    return n;
}

gd_status
gd_transaction_find(gd_transaction *transaction, const gd_fingerprint *fps,
                    const uint32_t *lengths, size_t count,
                    gd_address *addresses, gd_error *err)
{
    gd_status s = check_under_way(transaction, err);
    if (s == GD_OK) {
        s = store_waiting(transaction, err);
    }
    if (s != GD_OK) {
        return s;
    }
    memset(addresses, 0, count * sizeof *addresses);
    if (transaction->repo->params.by_value) {
        return GD_OK; /* nobody has bytes to compare (I5) */
    }
    for (size_t at = 0; at < count;) {
        size_t n = fill_places(transaction, fps + at, lengths + at, NULL,
                               count - at);
        find_batch(transaction, n);
        for (size_t i = 0; i < n; i++) {
            addresses[at + i] = transaction->batch.blocks[i].address;
        }
        at += n;
    }
    return GD_OK;
}

/* Only what find could have returned: under a shared lock that we hold (I6),
 * and by what the group says now, or of our own making.  *good: how many
 * of the batch's places are, from the first. */
static gd_status
count_found(gd_transaction *transaction, const gd_address *addresses,
            size_t count, size_t *good, gd_error *err)
{
    gd_block *blocks = transaction->batch.blocks;
    for (*good = 0; *good < count; ++*good) {
        uint32_t group = addresses[*good].group;
        if (!gd_lookup_holds(transaction->lookup, group) &&
            !gd_packer_holds(transaction->packer, group)) {
            return GD_OK;
        }
    }
    gd_status s = gd_lookup_confirm(transaction->lookup, blocks, count, err);
    *good = 0;
    while (*good < count &&
           (blocks[*good].address.group != 0 ||
            gd_packer_added(transaction->packer, addresses[*good],
                            &blocks[*good].fingerprint,
                            blocks[*good].length))) {
        ++*good;
    }
    return *good == count ? GD_OK : s;
}

static gd_status
check_found(gd_transaction *transaction, const gd_fingerprint *fps,
            const uint32_t *lengths, const gd_address *addresses, size_t count,
            gd_error *err)
{
    for (size_t at = 0; at < count;) {
        size_t n = fill_places(transaction, fps + at, lengths + at,
                               addresses + at, count - at);
        size_t good;
        gd_status s =
            count_found(transaction, addresses + at, n, &good, err);
        if (s != GD_OK) {
            return s;
        }
        if (good < n) {
            gd_address bad = addresses[at + good];
            return gd_fail(err, GD_INVALID,
                           "image %s: slot %u of group %08x is not where this "
                           "transaction found the block that is to be added",
                           transaction->image_id, (unsigned)bad.slot,
                           (unsigned)bad.group);
        }
        at += n;
    }
    return GD_OK;
}

gd_status
gd_transaction_add(gd_transaction *transaction, const gd_fingerprint *fps,
                   const uint32_t *lengths, const gd_address *addresses,
                   size_t count, gd_error *err)
{
    gd_status s = check_boundary(transaction, err);
    if (s == GD_OK && transaction->repo->params.by_value && count > 0) {
        s = gd_fail(err, GD_INVALID, "image %s: where blocks are compared by "
                    "value, none is found by its fingerprint",
                    transaction->image_id);
    }
    if (s == GD_OK) {
        s = store_waiting(transaction, err);
    }
    if (s == GD_OK) {
        s = check_found(transaction, fps, lengths, addresses, count, err);
    }
    if (s != GD_OK) {
        return s;
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        s = gd_recipe_add_block(transaction->recipe, addresses[i], &fps[i],
                                lengths[i], err);
    }
    gd_counters *counters = &transaction->repo->counters;
    atomic_fetch_add(&counters->blocks, count);
    atomic_fetch_add(&counters->hits, count);
    transaction->failed = s != GD_OK;
    return s;
}

gd_status
gd_transaction_add_zeros(gd_transaction *transaction, uint64_t length,
                         gd_error *err)
{
    gd_status s = check_boundary(transaction, err);
    if (s == GD_OK) {
        s = store_waiting(transaction, err);
    }
    if (s != GD_OK) {
        return s;
    }
    if (length > INT64_MAX - gd_recipe_length(transaction->recipe)) {
        return gd_fail(err, GD_INVALID, "image %s: with %llu bytes of zeros "
                       "more it would be longer than any file can be",
                       transaction->image_id, (unsigned long long)length);
    }
    uint32_t block = transaction->chunker.max_length;
    atomic_fetch_add(&transaction->repo->counters.zero_blocks,
                     length / block + (length % block != 0));
    s = gd_recipe_add_zeros(transaction->recipe, length, err);
    transaction->failed = s != GD_OK;
    return s;
}

gd_status
gd_transaction_keep(gd_transaction *transaction, gd_error *err)
{
    gd_status s = check_under_way(transaction, err);
    if (s == GD_OK) {
        s = store_waiting(transaction, err);
    }
    if (s == GD_OK) {
        s = gd_packer_sync(transaction->packer, err);
        transaction->failed = s != GD_OK;
    }
    return s;
}

/* ---- committing ---- */

static gd_status
take_last_block(gd_transaction *transaction, gd_error *err)
{
    const gd_chunker *chunker = &transaction->chunker;
    uint8_t *at = transaction->carry;
    gd_status s = GD_OK;
    while (s == GD_OK && transaction->carried > 0) {
        size_t cut = chunker->next(chunker, at, transaction->carried, true);
        s = take_block(transaction, at, cut, false, err);
        at += cut;
        transaction->carried -= cut;
    }
    return s;
}

/* N8.1: every block durable and published. */
static gd_status
store_rest(gd_transaction *transaction, gd_error *err)
{
    gd_status s = take_last_block(transaction, err);
    if (s == GD_OK) {
        s = store_batch(transaction, err);
    }
    if (s == GD_OK) {
        s = gd_packer_sync(transaction->packer, err);
    }
    return s;
}

static gd_status
finish_recipe(gd_transaction *transaction, gd_recipe_header *header,
              gd_error *err)
{
    gd_repo *repo = transaction->repo;
    memset(header, 0, sizeof *header);
    header->scope = transaction->scope;
    memcpy(header->transaction_id, transaction->spool.id, GD_ID_SIZE);
    memcpy(header->upload_id, transaction->spool.id, GD_ID_SIZE);
    memcpy(header->image_id, transaction->image_id, sizeof header->image_id);
    memcpy(header->project, transaction->project, sizeof header->project);
    header->new_bytes = gd_packer_new_bytes(transaction->packer);
    header->stored_bytes = gd_packer_stored_bytes(transaction->packer);
    header->created = (uint64_t)repo->env->now(repo->env);
    return gd_recipe_finish(transaction->recipe, &repo->params, header, err);
}

gd_status
gd_transaction_commit(gd_transaction *transaction, gd_recipe_header *header,
                      bool *linked, gd_error *err)
{
    gd_repo *repo = transaction->repo;
    *linked = transaction->linked;
    gd_status s = gd_transaction_write(transaction, NULL, 0, err);
    if (s != GD_OK) {
        return s;
    }
    s = store_rest(transaction, err);
    if (s == GD_OK) {
        s = finish_recipe(transaction, header, err);
    }
    if (s == GD_OK) {
        s = gd_spool_commit(repo->env, repo->root, &transaction->spool,
                            transaction->image_id, &transaction->linked, err);
    }
    *linked = transaction->linked;
    transaction->failed = s != GD_OK;
    return s;
}
