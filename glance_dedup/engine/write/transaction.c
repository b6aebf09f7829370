/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transaction.c - see transaction.h.
 */
#include "engine/write/transaction.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/array.h"
#include "engine/files/locks.h"
#include "engine/files/secondname.h"
#include "engine/files/spool.h"
#include "engine/read/image.h"
#include "engine/write/addruns.h"
#include "engine/write/disktable.h"
#include "engine/write/ingest.h"

enum { FIND_LOADS = 16 }; /* stores loaded for a batch of fingerprints */

/* An image of a transaction. */
typedef struct target {
    char image_id[GD_IMAGE_ID_MAX + 1];
    gd_spool_writer spool;
    gd_recipe_writer *recipe;
    gd_content_hash hash;
    gd_disk_table table;
    uint64_t new_bytes, stored_bytes; /* known when it has ended */
    bool linked;
} target;

struct gd_transaction {
    gd_repo *repo;
    char project[GD_PROJECT_MAX + 1];
    gd_scope scope;
    gd_ingest intake;
    gd_recipe old; /* of a conversion; fd -1: this is an upload */
    target *image; /* the present one: the last of these */
    target **images;
    size_t count, room;
    uint64_t new_bytes, stored_bytes; /* of the images before the present one */
    uint64_t credited_new, credited_stored;
    bool failed;
    bool linked; /* any image */
};

/* ---- begin and end ---- */

static gd_status
require_project(const char *project, gd_error *err)
{
    return strnlen(project, GD_PROJECT_MAX + 1) > GD_PROJECT_MAX
               ? gd_fail(err, GD_INVALID, "a project's name has at most %d "
                         "bytes", GD_PROJECT_MAX)
               : GD_OK;
}

static gd_status
require_scope(const gd_scope *scope, gd_error *err)
{
    return gd_scope_equal(scope, &gd_spares_scope)
               ? gd_fail(err, GD_INVALID, "this scope id marks spare copies")
               : GD_OK;
}

static gd_status
require_absent(gd_repo *repo, const char *image_id, gd_error *err)
{
    char name[GD_NAME_SIZE];
    struct stat st;
    const gd_env *env = repo->env;
    gd_status s = gd_names_image(image_id, name, err);
    if (s == GD_OK && env->fstatat(env, repo->root, name, &st) == 0) {
        /* Another host may have deleted the file. */
        (void)env->renew(env, repo->root, name);
        if (env->fstatat(env, repo->root, name, &st) == 0) {
            s = gd_fail(err, GD_EXISTS, "image %s exists already", image_id);
        }
    }
    return s;
}

/* Begins an image, which is the present one then. */
static gd_status
open_image(gd_transaction *transaction, const char *image_id, gd_error *err)
{
    gd_repo *repo = transaction->repo;
    const gd_env *env = repo->env;
    target **images =
        gd_array_reserve(env, transaction->images, &transaction->room,
                         transaction->count + 1, sizeof(target *), err);
    if (images == NULL) {
        return GD_NOMEM;
    }
    transaction->images = images;
    target *image = gd_calloc(env, 1, sizeof *image, err);
    if (image == NULL) {
        return GD_NOMEM;
    }
    image->spool.fd = -1;
    snprintf(image->image_id, sizeof image->image_id, "%s", image_id);
    images[transaction->count++] = transaction->image = image;
    GD_TRY(gd_spool_create(env, repo->root,
                           transaction->old.fd < 0 ? GD_SPOOL_STORE
                                                   : GD_SPOOL_MERGED,
                           &image->spool, err));
    GD_TRY(gd_recipe_writer_open(env, image->spool.fd, image->spool.name,
                                 image->spool.id, &image->recipe, err));
    transaction->intake.recipe = image->recipe;
    return GD_OK;
}

/* The caller fills in scope, project, and the old recipe. */
static gd_status
allocate(gd_repo *repo, gd_transaction **out, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(repo, err));
    gd_fpcache_drop_some_removed(repo->cache);
    GD_TRY(gd_repo_require_room(repo, gd_recipe_bytes(0), err));
    *out = gd_calloc(repo->env, 1, sizeof **out, err);
    if (*out == NULL) {
        return GD_NOMEM;
    }
    (*out)->repo = repo;
    (*out)->old.fd = -1;
    return GD_OK;
}

/* Frees the transaction if it fails. */
static gd_status
open_parts(gd_transaction *transaction, const char *image_id, gd_error *err)
{
    gd_status s = gd_ingest_open(&transaction->intake, transaction->repo,
                                 &transaction->scope, err);
    if (s == GD_OK) {
        s = open_image(transaction, image_id, err);
    }
    if (s != GD_OK) {
        gd_transaction_end(transaction);
    }
    return s;
}

gd_status
gd_transaction_begin(gd_repo *repo, const char *image_id, const char *project,
                     const gd_scope *scope, gd_transaction **out,
                     gd_error *err)
{
    gd_transaction *transaction;
    GD_TRY(gd_repo_require_owner(repo, err));
    GD_TRY(require_absent(repo, image_id, err));
    GD_TRY(require_project(project, err));
    GD_TRY(require_scope(scope, err));
    GD_TRY(allocate(repo, &transaction, err));
    transaction->scope = *scope;
    snprintf(transaction->project, sizeof transaction->project, "%s", project);
    GD_TRY(open_parts(transaction, image_id, err));
    *out = transaction;
    return GD_OK;
}

gd_status
gd_transaction_begin_conversion(gd_repo *repo, const char *image_id,
                                gd_transaction **out, gd_error *err)
{
    gd_transaction *transaction;
    GD_TRY(allocate(repo, &transaction, err));
    const gd_recipe_header *old = &transaction->old.header;
    gd_status s = gd_spool_open_recipe(repo->env, repo->root, &repo->params,
                                       image_id, NULL, &transaction->old, err);
    if (s != GD_OK) {
        repo->env->release(repo->env, transaction);
        return s;
    }
    transaction->scope = old->scope;
    memcpy(transaction->project, old->project, sizeof transaction->project);
    GD_TRY(open_parts(transaction, image_id, err));
    transaction->image->hash = old->hash;
    *out = transaction;
    return GD_OK;
}

const uint8_t *
gd_transaction_upload_id(const gd_transaction *transaction)
{
    return transaction->image->spool.id;
}

void
gd_transaction_set_lookup_mode(gd_transaction *transaction, gd_dedup dedup)
{
    gd_ingest_set_dedup(&transaction->intake, dedup);
}

void
gd_transaction_prefetch_groups(gd_transaction *transaction,
                               const uint32_t *groups,
                               size_t count)
{
    gd_lookup_expect(transaction->intake.lookup, groups, count);
}

uint64_t
gd_transaction_prefetched_groups(const gd_transaction *transaction)
{
    return gd_lookup_expected(transaction->intake.lookup);
}

void
gd_transaction_end(gd_transaction *transaction)
{
    gd_repo *repo = transaction->repo;
    const gd_env *env = repo->env;
    /* N8.5: the spool files first, then the locks. */
    for (size_t i = 0; i < transaction->count; i++) {
        target *image = transaction->images[i];
        if (image->linked) {
            gd_spool_close(env, &image->spool);
        } else {
            gd_spool_discard(env, repo->root, &image->spool);
        }
        gd_recipe_writer_close(image->recipe);
        env->release(env, image);
    }
    env->release(env, transaction->images);
    gd_ingest_close(&transaction->intake);
    if (transaction->old.fd >= 0) {
        env->close(env, transaction->old.fd);
    }
    env->release(env, transaction);
}

/* ---- writing ---- */

static gd_status
require_under_way(const gd_transaction *transaction, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(transaction->repo, err));
    if (transaction->failed || transaction->linked) {
        return gd_fail(err, GD_CLOSED, "the transaction of image %s has %s",
                       transaction->image->image_id,
                       transaction->failed ? "failed" : "ended");
    }
    return GD_OK;
}

/* The same, and that plain bytes may be appended. */
static gd_status
require_plain(const gd_transaction *transaction, gd_error *err)
{
    GD_TRY(require_under_way(transaction, err));
    return transaction->image->table.recipe == NULL
               ? GD_OK
               : gd_fail(err, GD_INVALID, "image %s: its table has begun: there "
                         "can be no more plain bytes",
                         transaction->image->image_id);
}

/* Notes the end of a step after which, if it failed, nothing can be added. */
static gd_status
end_step(gd_transaction *transaction, gd_status s)
{
    transaction->failed = s != GD_OK;
    return s;
}

gd_status
gd_transaction_write(gd_transaction *transaction, const uint8_t *data,
                     size_t length, gd_error *err)
{
    GD_TRY(require_plain(transaction, err));
    return end_step(transaction, gd_ingest_take(&transaction->intake, data,
                                                length, err));
}

/* ---- blocks by their fingerprints ---- */

/* Stores the waiting blocks, so that the next appended blocks follow them, and
 * the batch's places are free. */
static gd_status
store_waiting(gd_transaction *transaction, gd_error *err)
{
    return end_step(transaction, gd_ingest_store(&transaction->intake, err));
}

/* Before blocks are noted that do not come in a stream of bytes. */
static gd_status
start_blocks(gd_transaction *transaction, gd_error *err)
{
    GD_TRY(require_plain(transaction, err));
    if (transaction->intake.batch.carried > 0) {
        return gd_fail(err, GD_INVALID,
                       "image %s: what was written last ends within a block, "
                       "so that no other can follow it",
                       transaction->image->image_id);
    }
    return store_waiting(transaction, err);
}

/* Looks up the blocks in the batch's places. */
static void
find_batch(gd_ingest *intake, size_t count)
{
    gd_block *blocks = intake->batch.blocks;
    gd_error ignored; /* a block that could not be looked up was not found */
    gd_lookup_batch(intake->lookup, blocks, count, FIND_LOADS);
    /* They were found by fingerprint alone, and the length may be wrong. */
    (void)gd_lookup_confirm(intake->lookup, blocks, count, &ignored);
    for (size_t i = 0; i < count; i++) {
        gd_block *block = &blocks[i];
        if (block->address.group != 0) {
            continue;
        }
        gd_address own = gd_packer_find(intake->packer, NULL, block->length,
                                        &block->fingerprint);
        if (own.group != 0 &&
            gd_packer_added(intake->packer, own, &block->fingerprint,
                            block->length)) {
            block->address = own;
        }
    }
}

/* Fills the batch's places from the caller's arrays, as many as fit. */
static size_t
fill_places(gd_ingest *intake, const gd_fingerprint *fps,
            const uint32_t *lengths, const gd_address *addresses, size_t count)
{
    size_t n = count < intake->batch_blocks ? count : intake->batch_blocks;
    for (size_t i = 0; i < n; i++) {
        intake->batch.blocks[i] = (gd_block){
            .length = lengths[i],
            .fingerprint = fps[i],
            .address = addresses[i],
        };
    }
    return n;
}

/* Finds the blocks in the batch's places: anywhere, or at the places'
 * addresses. */
typedef gd_status find_step(gd_ingest *intake, size_t count, gd_error *err);

static gd_status
find_anywhere(gd_ingest *intake, size_t count, GD_UNUSED gd_error *err)
{
    find_batch(intake, count);
    return GD_OK;
}

static gd_status
find_there(gd_ingest *intake, size_t count, gd_error *err)
{
    return gd_lookup_verify(intake->lookup, intake->batch.blocks, count, err);
}

static gd_status
find_blocks(gd_transaction *transaction, const gd_fingerprint *fps,
            const uint32_t *lengths, size_t count, gd_address *addresses,
            find_step *find, gd_error *err)
{
    gd_ingest *intake = &transaction->intake;
    gd_status s = require_under_way(transaction, err);
    if (s == GD_OK) {
        s = store_waiting(transaction, err);
    }
    intake->told = true;
    if (transaction->repo->params.by_value) { /* no bytes to compare (I5) */
        memset(addresses, 0, count * sizeof *addresses);
        count = 0;
    }
    for (size_t at = 0; s == GD_OK && at < count;) {
        size_t n = fill_places(intake, fps + at, lengths + at, addresses + at,
                               count - at);
        s = find(intake, n, err);
        for (size_t i = 0; i < n; i++) {
            addresses[at + i] = intake->batch.blocks[i].address;
        }
        at += n;
    }
    return s;
}

gd_status
gd_transaction_find(gd_transaction *transaction, const gd_fingerprint *fps,
                    const uint32_t *lengths, size_t count,
                    gd_address *addresses, gd_error *err)
{
    memset(addresses, 0, count * sizeof *addresses);
    return find_blocks(transaction, fps, lengths, count, addresses,
                       find_anywhere, err);
}

gd_status
gd_transaction_find_at(gd_transaction *transaction, const gd_fingerprint *fps,
                       const uint32_t *lengths, size_t count,
                       gd_address *addresses, gd_error *err)
{
    return find_blocks(transaction, fps, lengths, count, addresses, find_there,
                       err);
}

/* Accepts only addresses that find could have returned.  Either we hold the
 * shared lock (I6), and the group confirms the block; or we stored the block.
 * *good is how many of the batch's places are good, from the first. */
static gd_status
count_found(const gd_ingest *intake, const gd_address *addresses, size_t count,
            size_t *good, gd_error *err)
{
    gd_block *blocks = intake->batch.blocks;
    for (*good = 0; *good < count; ++*good) {
        uint32_t group = addresses[*good].group;
        if (!gd_lookup_holds(intake->lookup, group) &&
            !gd_packer_holds(intake->packer, group)) {
            return GD_OK;
        }
    }
    gd_status s = gd_lookup_confirm(intake->lookup, blocks, count, err);
    *good = 0;
    while (*good < count &&
           (blocks[*good].address.group != 0 ||
            gd_packer_added(intake->packer, addresses[*good],
                            &blocks[*good].fingerprint,
                            blocks[*good].length))) {
        ++*good;
    }
    return *good == count ? GD_OK : s;
}

static gd_status
require_found(gd_transaction *transaction, const gd_fingerprint *fps,
              const uint32_t *lengths, const gd_address *addresses,
              size_t count,
              gd_error *err)
{
    for (size_t at = 0; at < count;) {
        size_t n = fill_places(&transaction->intake, fps + at, lengths + at,
                               addresses + at, count - at);
        size_t good;
        gd_status s =
            count_found(&transaction->intake, addresses + at, n, &good, err);
        if (s != GD_OK) {
            return s;
        }
        if (good < n) {
            gd_address bad = addresses[at + good];
            return gd_fail(err, GD_INVALID,
                           "image %s: slot %u of group %08x is not where this "
                           "transaction found the block that is to be added",
                           transaction->image->image_id, (unsigned)bad.slot,
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
    gd_status s = start_blocks(transaction, err);
    if (s == GD_OK && transaction->repo->params.by_value && count > 0) {
        s = gd_fail(err, GD_INVALID, "image %s: where blocks are compared by "
                    "value, none is found by its fingerprint",
                    transaction->image->image_id);
    }
    if (s == GD_OK) {
        s = require_found(transaction, fps, lengths, addresses, count, err);
    }
    if (s != GD_OK) {
        return s;
    }
    for (size_t i = 0; s == GD_OK && i < count; i++) {
        s = gd_recipe_add_block(transaction->intake.recipe, addresses[i],
                                &fps[i], lengths[i], err);
    }
    gd_counters *counters = &transaction->repo->counters;
    atomic_fetch_add(&counters->blocks, count);
    atomic_fetch_add(&counters->hits, count);
    return end_step(transaction, s);
}

static gd_status
require_lengths(const gd_transaction *transaction, const uint32_t *lengths,
                size_t count, gd_error *err)
{
    size_t most = transaction->intake.chunker.max_length;
    for (size_t i = 0; i < count; i++) {
        if (lengths[i] == 0 || lengths[i] > most) {
            return gd_fail(err, GD_INVALID,
                           "image %s: a block has 1 to %zu bytes, not %u",
                           transaction->image->image_id, most,
                           (unsigned)lengths[i]);
        }
    }
    return GD_OK;
}

gd_status
gd_transaction_write_blocks(gd_transaction *transaction, const uint8_t *data,
                            const uint32_t *lengths, const gd_address *old,
                            size_t count, gd_address *addresses, gd_error *err)
{
    GD_TRY(start_blocks(transaction, err));
    GD_TRY(require_lengths(transaction, lengths, count, err));
    transaction->intake.told = true;
    gd_status s = gd_ingest_take_blocks(&transaction->intake, data, lengths,
                                        old, count, addresses, err);
    return end_step(transaction, s);
}

static gd_status
require_longer(const gd_transaction *transaction, uint64_t length,
               gd_error *err)
{
    return length <= INT64_MAX - gd_recipe_length(transaction->intake.recipe)
               ? GD_OK
               : gd_fail(err, GD_INVALID, "image %s: with %llu bytes more it "
                         "would be longer than any file can be",
                         transaction->image->image_id,
                         (unsigned long long)length);
}

gd_status
gd_transaction_write_zeros(gd_transaction *transaction, uint64_t length,
                           gd_error *err)
{
    GD_TRY(require_plain(transaction, err));
    GD_TRY(require_longer(transaction, length, err));
    return end_step(transaction, gd_ingest_take_zeros(&transaction->intake,
                                                      length, err));
}

static gd_status
require_same_handle(const gd_transaction *transaction, const gd_image *source,
                    gd_error *err)
{
    return source->repo == transaction->repo
               ? GD_OK
               : gd_fail(err, GD_INVALID,
                         "image %s: the image to copy from was opened by "
                         "another handle", transaction->image->image_id);
}

static gd_status
require_source(const gd_transaction *transaction, const gd_image *source,
               uint64_t from, uint64_t to, gd_error *err)
{
    uint64_t size = gd_image_header(source)->disk.plain_size;
    GD_TRY(require_same_handle(transaction, source, err));
    if (from > to || to > size) {
        return gd_fail(err, GD_INVALID,
                       "image %s: bytes %llu to %llu are not within image %s, "
                       "which has %llu", transaction->image->image_id,
                       (unsigned long long)from, (unsigned long long)to,
                       gd_image_header(source)->image_id,
                       (unsigned long long)size);
    }
    return require_longer(transaction, to - from, err);
}

gd_status
gd_transaction_add_runs(gd_transaction *transaction, gd_image *source,
                        uint64_t from, uint64_t to, uint64_t *stored,
                        gd_error *err)
{
    *stored = 0;
    GD_TRY(start_blocks(transaction, err));
    GD_TRY(require_source(transaction, source, from, to, err));
    transaction->intake.told = true;
    gd_status s = gd_add_runs(&transaction->intake, source,
                              (gd_range){from, to - from}, stored, err);
    return end_step(transaction, s);
}

gd_status
gd_transaction_add_zeros(gd_transaction *transaction, uint64_t length,
                         gd_error *err)
{
    GD_TRY(start_blocks(transaction, err));
    GD_TRY(require_longer(transaction, length, err));
    transaction->intake.told = true;
    uint32_t block = transaction->intake.chunker.max_length;
    atomic_fetch_add(&transaction->repo->counters.zero_blocks,
                     length / block + (length % block != 0));
    gd_status s = gd_recipe_add_zeros(transaction->intake.recipe, length,
                                      err);
    return end_step(transaction, s);
}

gd_status
gd_transaction_sync(gd_transaction *transaction, gd_error *err)
{
    gd_status s = require_under_way(transaction, err);
    if (s == GD_OK) {
        s = store_waiting(transaction, err);
    }
    if (s == GD_OK) {
        s = gd_packer_sync(transaction->intake.packer, err);
        transaction->failed = s != GD_OK;
    }
    return s;
}

void
gd_transaction_count(const gd_transaction *transaction, uint64_t *new_bytes,
                     uint64_t *stored_bytes)
{
    gd_packer_count(transaction->intake.packer, new_bytes, stored_bytes);
}

gd_status
gd_transaction_measure(gd_transaction *transaction, uint64_t *stored_bytes,
                       uint64_t *found_bytes, gd_error *err)
{
    uint64_t new_bytes = 0;
    gd_status s = require_under_way(transaction, err);
    if (s == GD_OK) {
        s = store_waiting(transaction, err);
    }
    if (s == GD_OK) {
        s = gd_packer_write(transaction->intake.packer, err);
        transaction->failed = s != GD_OK;
    }
    gd_packer_count(transaction->intake.packer, &new_bytes, stored_bytes);
    *found_bytes = gd_recipe_block_bytes(transaction->intake.recipe) -
                   new_bytes;
    return s;
}

uint64_t
gd_transaction_kept_bytes(const gd_transaction *transaction)
{
    return gd_packer_kept(transaction->intake.packer);
}

void
gd_transaction_credit(gd_transaction *transaction, uint64_t new_bytes,
                      uint64_t stored_bytes)
{
    transaction->credited_new += new_bytes;
    transaction->credited_stored += stored_bytes;
}

/* ---- committing ---- */

/* N8.1: every block is durable and published. */
static gd_status
store_rest(gd_transaction *transaction, gd_error *err)
{
    GD_TRY(gd_ingest_finish(&transaction->intake, err));
    return gd_packer_sync(transaction->intake.packer, err);
}

/* The present image gets no more bytes: what it has stored is what was stored
 * since the one before it ended. */
static void
count_image(gd_transaction *transaction)
{
    target *image = transaction->image;
    uint64_t new_bytes, stored_bytes;
    gd_packer_count(transaction->intake.packer, &new_bytes, &stored_bytes);
    image->new_bytes = new_bytes - transaction->new_bytes;
    image->stored_bytes = stored_bytes - transaction->stored_bytes;
    transaction->new_bytes = new_bytes;
    transaction->stored_bytes = stored_bytes;
}

/* Fills in what a recipe does not take from the image's old one. */
static void
fill_header(const gd_transaction *transaction, const target *image,
            gd_recipe_header *header)
{
    memcpy(header->transaction_id, image->spool.id, GD_ID_SIZE);
    header->disk = image->table.header.disk;
    header->hash = image->hash;
    header->new_bytes = image->new_bytes;
    header->stored_bytes = image->stored_bytes;
    if (image == transaction->image) {
        header->new_bytes += transaction->credited_new;
        header->stored_bytes += transaction->credited_stored;
    }
}

static gd_status
finish_recipe(gd_transaction *transaction, const target *image,
              gd_recipe_header *header, gd_error *err)
{
    gd_repo *repo = transaction->repo;
    memset(header, 0, sizeof *header);
    fill_header(transaction, image, header);
    GD_TRY(gd_disk_table_require_whole(&image->table, err));
    header->scope = transaction->scope;
    memcpy(header->upload_id, image->spool.id, GD_ID_SIZE);
    memcpy(header->image_id, image->image_id, sizeof header->image_id);
    memcpy(header->project, transaction->project, sizeof header->project);
    header->created = (uint64_t)repo->env->now(repo->env);
    return gd_recipe_finish(image->recipe, &repo->params, header, err);
}

gd_status
gd_transaction_set_hash(gd_transaction *transaction, const char *name,
                        const uint8_t *value, size_t length, gd_error *err)
{
    gd_content_hash *hash = &transaction->image->hash;
    size_t name_length = strnlen(name, GD_HASH_NAME_MAX + 1);
    if (name_length == 0 || name_length > GD_HASH_NAME_MAX || length == 0 ||
        length > GD_HASH_MAX) {
        return gd_fail(err, GD_INVALID,
                       "a hash has a name of 1 to %d bytes and a value of 1 to "
                       "%d", GD_HASH_NAME_MAX, GD_HASH_MAX);
    }
    memset(hash, 0, sizeof *hash);
    memcpy(hash->name, name, name_length);
    memcpy(hash->value, value, length);
    hash->length = (uint32_t)length;
    return GD_OK;
}

/* Links the image, under the image lock if its name may be missing for a moment
 * (N14.4). */
static gd_status
name_image(gd_transaction *transaction, target *image, gd_error *err)
{
    gd_repo *repo = transaction->repo;
    bool locks = repo->params.shared;
    int lock = -1;
    gd_status s = GD_OK;
    if (locks) {
        s = gd_locks_lock_image(repo->env, repo->root, image->image_id,
                                repo->params.lock_timeout_ms, &lock, err);
        locks = s == GD_OK;
    }
    if (locks) {
        s = gd_second_name_finish_image(repo->env, repo->root, &repo->params,
                                        image->image_id, err);
    }
    if (s == GD_OK) {
        s = gd_spool_link(repo->env, repo->root, &image->spool,
                          image->image_id, &image->linked, err);
        transaction->linked = transaction->linked || image->linked;
    }
    if (locks) {
        gd_locks_unlock_image(repo->env, lock);
    }
    return s;
}

/* N8.2 and N8.3, each step for all images.  *header: that of the last one. */
static gd_status
name_images(gd_transaction *transaction, gd_recipe_header *header,
            gd_error *err)
{
    gd_repo *repo = transaction->repo;
    for (size_t i = 0; i < transaction->count; i++) {
        const target *image = transaction->images[i];
        GD_TRY(finish_recipe(transaction, image, header, err));
        GD_TRY(gd_spool_sync_recipe(repo->env, &image->spool, image->image_id,
                                    err));
    }
    GD_TRY(gd_sync_dir(repo->env, repo->root, GD_DIR_SPOOL, err)); /* N8.2 */
    for (size_t i = 0; i < transaction->count; i++) {
        GD_TRY(name_image(transaction, transaction->images[i], err));
    }
    return gd_sync_dir(repo->env, repo->root, GD_DIR_IMAGES, err); /* N8.3 */
}

/* ---- several images ---- */

/* The blocks of the present image are packed, so that its bytes can be counted;
 * they are synced by the commit. */
static gd_status
begin_next(gd_transaction *transaction, const char *image_id, gd_error *err)
{
    GD_TRY(gd_ingest_finish(&transaction->intake, err));
    GD_TRY(gd_packer_write(transaction->intake.packer, err));
    count_image(transaction);
    return open_image(transaction, image_id, err);
}

gd_status
gd_transaction_next_image(gd_transaction *transaction, const char *image_id,
                          gd_error *err)
{
    GD_TRY(require_under_way(transaction, err));
    GD_TRY(require_absent(transaction->repo, image_id, err));
    GD_TRY(gd_repo_require_room(transaction->repo, gd_recipe_bytes(0), err));
    return end_step(transaction, begin_next(transaction, image_id, err));
}

/* ---- images with a disk ---- */

/* F10: the feature is set before there is such a recipe. */
static gd_status
begin_table(gd_transaction *transaction, const gd_recipe_disk *disk,
            uint64_t size, gd_error *err)
{
    target *image = transaction->image;
    GD_TRY(require_plain(transaction, err));
    GD_TRY(gd_repo_use_feature(transaction->repo, GD_FEATURE_DISKS, err));
    gd_status s = gd_ingest_finish(&transaction->intake, err);
    if (s == GD_OK) {
        s = gd_disk_table_begin(&image->table, image->recipe, disk, size, err);
    }
    return end_step(transaction, s);
}

gd_status
gd_transaction_begin_table(gd_transaction *transaction,
                           const gd_recipe_disk *disk, gd_error *err)
{
    return transaction->old.fd >= 0
               ? begin_table(transaction, disk, transaction->old.header.size,
                             err)
               : gd_fail(err, GD_INVALID, "image %s: only a conversion makes a "
                         "table", transaction->image->image_id);
}

gd_status
gd_transaction_add_derived(gd_transaction *transaction,
                           const gd_extent *extents, size_t count,
                           gd_error *err)
{
    gd_disk_table *table = &transaction->image->table;
    GD_TRY(require_under_way(transaction, err));
    if (table->recipe == NULL) {
        return gd_fail(err, GD_INVALID, "image %s: its table has not begun",
                       transaction->image->image_id);
    }
    GD_TRY(gd_repo_require_room(transaction->repo, gd_recipe_bytes(count),
                                err));
    return end_step(transaction,
                    gd_disk_table_add(table, extents, count, err));
}

gd_status
gd_transaction_copy_table(gd_transaction *transaction, const gd_image *source,
                          gd_error *err)
{
    const gd_recipe_header *header = gd_image_header(source);
    if (!gd_recipe_has_disk(header)) {
        return GD_OK;
    }
    GD_TRY(require_same_handle(transaction, source, err));
    GD_TRY(begin_table(transaction, &header->disk, header->size, err));
    gd_disk_table *table = &transaction->image->table;
    gd_status s = gd_repo_require_room(
        transaction->repo, gd_recipe_bytes(header->disk.derived), err);
    if (s == GD_OK && table->header.disk.plain_size != header->disk.plain_size) {
        s = gd_fail(err, GD_INVALID, "image %s: it has not the plain bytes that "
                    "the table is for", transaction->image->image_id);
    }
    if (s == GD_OK) {
        s = gd_disk_table_copy(table, &source->recipe, err);
    }
    return end_step(transaction, s);
}

/* N10.2.  The header keeps the old one's fields of the upload. */
static gd_status
sync_converted(gd_transaction *transaction, gd_recipe_header *header,
               gd_error *err)
{
    gd_repo *repo = transaction->repo;
    const target *image = transaction->image;
    *header = transaction->old.header;
    fill_header(transaction, image, header);
    GD_TRY(gd_recipe_finish(image->recipe, &repo->params, header, err));
    GD_TRY(gd_fsync(repo->env, image->spool.fd, image->spool.name, err));
    return gd_sync_dir(repo->env, repo->root, GD_DIR_SPOOL, err);
}

/* Of a conversion back to the file: its bytes are the plain bytes. */
static gd_status
finish_file(gd_transaction *transaction, gd_error *err)
{
    const target *image = transaction->image;
    GD_TRY(gd_ingest_finish(&transaction->intake, err));
    uint64_t length = gd_recipe_length(image->recipe);
    uint64_t size = transaction->old.header.size;
    return length == size
               ? GD_OK
               : gd_fail(err, GD_INVALID, "image %s: %llu bytes are not its "
                         "%llu", image->image_id, (unsigned long long)length,
                         (unsigned long long)size);
}

gd_status
gd_transaction_finish(gd_transaction *transaction, gd_recipe_header *header,
                      gd_error *err)
{
    target *image = transaction->image;
    GD_TRY(require_under_way(transaction, err));
    if (transaction->old.fd < 0) {
        return gd_fail(err, GD_INVALID, "image %s: this is no conversion",
                       image->image_id);
    }
    gd_status s = image->table.recipe == NULL
                      ? finish_file(transaction, err)
                      : gd_disk_table_require_whole(&image->table, err);
    if (s == GD_OK) {
        s = gd_packer_sync(transaction->intake.packer, err); /* N8.1 */
    }
    if (s == GD_OK) {
        count_image(transaction);
        s = sync_converted(transaction, header, err);
    }
    image->linked = transaction->linked = s == GD_OK;
    return end_step(transaction, s);
}

const gd_recipe *
gd_transaction_old(const gd_transaction *transaction)
{
    return &transaction->old;
}

gd_status
gd_transaction_require_finished(const gd_transaction *transaction,
                                const gd_spool_writer **spool, gd_error *err)
{
    *spool = &transaction->image->spool;
    return transaction->old.fd >= 0 && transaction->linked
               ? GD_OK
               : gd_fail(err, GD_INVALID,
                         "image %s: no conversion was finished",
                         transaction->image->image_id);
}

/* ---- the commit ---- */

gd_status
gd_transaction_commit(gd_transaction *transaction, gd_recipe_header *header,
                      bool *linked, gd_error *err)
{
    *linked = transaction->linked;
    GD_TRY(require_under_way(transaction, err));
    if (transaction->old.fd >= 0) {
        return gd_fail(err, GD_INVALID, "image %s: a conversion is exchanged",
                       transaction->image->image_id);
    }
    gd_status s = store_rest(transaction, err);
    if (s == GD_OK) {
        count_image(transaction);
        s = name_images(transaction, header, err);
    }
    *linked = transaction->linked;
    return end_step(transaction, s);
}
