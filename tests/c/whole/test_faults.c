/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_faults.c - the tasks of writers, readers and deleters, under faults:
 * see fault_tasks.h for the faults, and the requirements.
 */
#include "tests/c/support/fault_tasks.h"

#include "engine/base/coding.h"
#include "engine/exchange/wire.h"
#include "engine/read/address_reader.h"
#include "engine/read/image.h"
#include "engine/repo/follow.h"
#include "engine/repo/repo.h"
#include "tests/c/support/check.h"

/* ---- a handle ---- */

static gd_status
open_handle(world *w)
{
    if (w->repo != NULL) {
        gd_repo_close(w->repo);
        w->repo = NULL;
    }
    return scratch_try_repo(&w->x, true, &w->repo);
}

static void
without_filter(world *w)
{
    gd_repo_close(w->repo);
    w->repo = scratch_repo(&w->x);
}

/* Without the filter images are stored all the same. */
static gd_status
attach_filter(world *w)
{
    char path[256];
    if (w->repo->filter != NULL) {
        return GD_OK;
    }
    snprintf(path, sizeof path, "%s/another", w->x.dir);
    return gd_repo_attach_filter(w->repo, path, GD_FILTER_MIN_BYTES,
                                 &w->x.err);
}

static gd_status
rebuild_filter(world *w)
{
    gd_followed followed = {.more = true};
    gd_status s = attach_filter(w);
    while (s == GD_OK && followed.more) {
        s = gd_follow(w->repo, 1, &followed, &w->x.err);
    }
    return s;
}

/* ---- images ---- */

static void
prefer_direct(world *w)
{
    w->repo->ways = (gd_ways){.cost = {2, 1}};
}

static gd_status
put(world *w)
{
    return store_image(w, NEW);
}

static gd_status
put_and_abort(world *w)
{
    gd_transaction *transaction;
    gd_status s = gd_transaction_begin(w->repo, "given-up", "project",
                                       &gd_global_scope, &transaction,
                                       &w->x.err);
    if (s == GD_OK) {
        s = gd_transaction_write(transaction, image_data(NEW), FAULT_LENGTH,
                                 &w->x.err);
        gd_transaction_end(transaction);
    }
    return s;
}

/* Leaves no file open, and the caches empty. */
static void
set_cold(world *w)
{
    gd_repo_close(w->repo);
    w->repo = scratch_repo_filter(&w->x);
}

static gd_status
get(world *w)
{
    return fetch_image(w, KEPT);
}

static gd_status
delete(world *w)
{
    return delete_image(w, OLD);
}

/* ---- copying from another repository ---- */

static gd_status
send_image(world *w)
{
    gd_image *image;
    gd_status s = gd_image_open(w->repo, image_id_of(KEPT), NULL, &image,
                                &w->x.err);
    if (s != GD_OK) {
        return s;
    }
    for (uint64_t n = 1; s == GD_OK && n <= gd_image_pages(image); n++) {
        uint8_t *page;
        size_t length;
        s = gd_wire_describe(image, n, &page, &length, &w->x.err);
        w->x.env->release(w->x.env, page);
    }
    if (s == GD_OK) {
        gd_frames frames;
        const gd_range range = {0, FAULT_LENGTH};
        uint64_t end;
        s = gd_wire_frames(image, &range, 1, &frames, &end, &w->x.err);
        gd_frames_free(&frames);
    }
    gd_image_close(image);
    return s;
}

/* Blocks of NEW, from the first, and their addresses. */
typedef struct known {
    size_t count;
    gd_fingerprint fps[FAULT_LENGTH / FAULT_BLOCK + 1];
    uint32_t lengths[FAULT_LENGTH / FAULT_BLOCK + 1];
    gd_address addresses[FAULT_LENGTH / FAULT_BLOCK + 1];
    size_t offsets[FAULT_LENGTH / FAULT_BLOCK + 1];
} known;

/* Adds a block of NEW: known, zeros, or sent. */
static gd_status
receive_block(world *w, gd_transaction *transaction, gd_hasher *hasher,
              const uint8_t *block, uint32_t length, known *k)
{
    static const uint8_t zeros[FAULT_BLOCK];
    gd_fingerprint fp;
    gd_address address;
    if (memcmp(block, zeros, length) == 0) {
        return gd_transaction_add_zeros(transaction, length, &w->x.err);
    }
    gd_status s = gd_hasher_compute(hasher, &gd_global_scope, block, length,
                                    &fp, &w->x.err);
    if (s == GD_OK) {
        s = gd_transaction_find(transaction, &fp, &length, 1, &address,
                                &w->x.err);
    }
    if (s == GD_OK && address.group != 0) {
        s = gd_transaction_add(transaction, &fp, &length, &address, 1,
                               &w->x.err);
    } else if (s == GD_OK) {
        s = gd_transaction_write_blocks(transaction, block, &length, NULL,
                                        1, &address, &w->x.err);
    }
    size_t n = k->count++;
    k->fps[n] = fp;
    k->lengths[n] = length;
    k->addresses[n] = address;
    k->offsets[n] = (size_t)(block - image_data(NEW));
    return s;
}

/* Reads as the reader of an image that is still arriving. */
static gd_status
read_back(world *w, const known *k)
{
    gd_address_reader *reader;
    static uint8_t plain[FAULT_LENGTH];
    gd_status s = gd_address_reader_open(w->repo, &reader, &w->x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_address_reader_copy(reader, k->addresses, k->fps, k->lengths,
                               k->count, plain, &w->x.err);
    const uint8_t *at = plain;
    for (size_t i = 0; s == GD_OK && i < k->count; i++) {
        CHECK(memcmp(at, image_data(NEW) + k->offsets[i], k->lengths[i]) == 0);
        at += k->lengths[i];
    }
    gd_address_reader_close(reader);
    return s;
}

static gd_status
receive_blocks(world *w, gd_transaction *transaction, gd_hasher *hasher)
{
    gd_status s = GD_OK;
    const uint8_t *data = image_data(NEW);
    static known k;
    k.count = 0;
    for (size_t at = 0; s == GD_OK && at < FAULT_LENGTH; at += FAULT_BLOCK) {
        size_t left = FAULT_LENGTH - at;
        s = receive_block(w, transaction, hasher, data + at,
                          left < FAULT_BLOCK ? (uint32_t)left : FAULT_BLOCK,
                          &k);
        if (s == GD_OK && at == 80 * FAULT_BLOCK) {
            s = gd_transaction_sync(transaction, &w->x.err);
            if (s == GD_OK) {
                s = read_back(w, &k);
            }
        }
    }
    return s;
}

static gd_status
receive_image(world *w)
{
    gd_transaction *transaction;
    gd_hasher *hasher;
    gd_recipe_header header;
    bool linked;
    gd_status s = gd_transaction_begin(w->repo, image_id_of(NEW), "project",
                                       &gd_global_scope, &transaction,
                                       &w->x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_hasher_open(w->x.env, w->repo->digest, &hasher, &w->x.err);
    if (s == GD_OK) {
        s = receive_blocks(w, transaction, hasher);
        gd_hasher_close(w->x.env, hasher);
    }
    if (s == GD_OK) {
        w->states[NEW] = IMAGE_MAYBE;
        s = gd_transaction_commit(transaction, &header, &linked, &w->x.err);
    }
    if (s == GD_OK) {
        w->states[NEW] = IMAGE_PRESENT;
    }
    gd_transaction_end(transaction);
    return s;
}

/* ---- copying within the repository ---- */

/* Stores TWIN by the addresses of KEPT's blocks and, in the middle of one, by
 * bytes. */
static gd_status
add_runs(world *w, gd_transaction *transaction)
{
    enum { CUT = 21 * FAULT_BLOCK + 100 };
    gd_image *image;
    uint64_t stored;
    gd_status s = gd_image_open(w->repo, image_id_of(KEPT), NULL, &image,
                                &w->x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_transaction_add_runs(transaction, image, 0, CUT, &stored,
                                &w->x.err);
    if (s == GD_OK) {
        s = gd_transaction_add_runs(transaction, image, CUT, FAULT_LENGTH,
                                    &stored, &w->x.err);
    }
    gd_image_close(image);
    return s;
}

static gd_status
copy_image(world *w)
{
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked;
    gd_status s = gd_transaction_begin(w->repo, image_id_of(TWIN), "project",
                                       &gd_global_scope, &transaction,
                                       &w->x.err);
    if (s != GD_OK) {
        return s;
    }
    s = add_runs(w, transaction);
    if (s == GD_OK) {
        w->states[TWIN] = IMAGE_MAYBE;
        s = gd_transaction_commit(transaction, &header, &linked, &w->x.err);
    }
    if (s == GD_OK) {
        w->states[TWIN] = IMAGE_PRESENT;
    }
    gd_transaction_end(transaction);
    return s;
}

/* ---- the table ---- */

static const fault_task TASKS[] = {
    {.name = "open", .work = open_handle},
    /* Any failure to map a file is reported as out of memory. */
    {.name = "attach-filter", .setup = without_filter, .work = attach_filter,
     .also = GD_NOMEM},
    {.name = "rebuild-filter", .setup = without_filter,
     .work = rebuild_filter, .also = GD_NOMEM},
    {.name = "put", .work = put, .again = GD_EXISTS},
    {.name = "put-by-value", .work = put, .again = GD_EXISTS,
     .by_value = true},
    {.name = "put-gear", .work = put, .again = GD_EXISTS, .gear = true},
    {.name = "put-direct", .work = put, .again = GD_EXISTS,
     .direct_io = GD_DIRECT_ON},
    {.name = "put-either-way", .setup = prefer_direct, .work = put,
     .again = GD_EXISTS, .direct_io = GD_DIRECT_AUTO},
    {.name = "put-without-filter", .setup = without_filter, .work = put,
     .again = GD_EXISTS},
    {.name = "abort", .work = put_and_abort},
    {.name = "abort-direct", .work = put_and_abort,
     .direct_io = GD_DIRECT_ON},
    {.name = "get", .setup = set_cold, .work = get},
    {.name = "delete", .work = delete, .again = GD_NOTFOUND},
    {.name = "send", .setup = set_cold, .work = send_image},
    {.name = "receive", .setup = set_cold, .work = receive_image,
     .again = GD_EXISTS},
    {.name = "copy", .setup = set_cold, .work = copy_image,
     .again = GD_EXISTS},
};

TEST(test_faults)
{
    CHECK_INT(run_fault_tasks(TASKS, sizeof TASKS / sizeof TASKS[0]), 0);
}
