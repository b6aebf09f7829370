/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_transaction.c - storing images: they read back as stored, whatever
 * their blocks, the sizes, the codec and the digest; and the files after an
 * abort, a failed sync, another transaction or a killed process.
 */
#include "engine/write/transaction.h"

#include <poll.h>
#include <signal.h>

#include "engine/files/group.h"
#include "engine/files/image_delete.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/transaction_fixture.h"

/* ---- random images ---- */

typedef struct kind {
    uint32_t block, slots, segment;
    const char *digest;
    bool by_value;
    gd_codec codec;
    unsigned threads;
    bool filter;
} kind;

/* Stores a few images that share contents; each is read back by the handle
 * that stored it, and all of them by another. */
static void
run_images(const kind *k, uint64_t seed)
{
    enum { IMAGES = 8 };
    static uint8_t data[IMAGES][600000];
    size_t lengths[IMAGES];
    char id[IMAGES][24];
    scratch_init(&the_scratch);
    the_scratch.params.block_size = k->block;
    the_scratch.params.group_slots = k->slots;
    the_scratch.params.segment_size = k->segment;
    the_scratch.params.by_value = k->by_value;
    the_scratch.params.codec = k->codec;
    the_scratch.params.threads = k->threads;
    strcpy(the_scratch.params.digest, k->digest);
    the_repo = k->filter ? scratch_repo_filter(&the_scratch)
                         : scratch_repo(&the_scratch);
    for (int i = 0; i < IMAGES; i++) {
        gd_recipe_header header;
        uint64_t dice = next_random(&seed);
        lengths[i] = minimum(dice % (150 * (size_t)k->block), sizeof data[i]);
        if (i == 5) {
            lengths[i] = k->block;
        }
        snprintf(id[i], sizeof id[i], "image-%d", i);
        fill_image(data[i], lengths[i], k->block, 40, next_random(&seed));
        size_t piece = i % 3 == 0 ? 1 + (size_t)(dice >> 40) % 5000 : 70000;
        store_in_one(id[i], data[i], lengths[i], piece, &header);
        CHECK_INT(header.size, lengths[i]);
        check_stored_image(id[i], data[i], lengths[i]);
        if (i == 4) {
            CHECK_INT(gd_image_delete(the_scratch.env, the_scratch.root,
                                      &the_scratch.params, id[1], NULL,
                                      &the_scratch.err), GD_OK);
        }
    }
    transaction_other_handle();
    for (int i = 0; i < IMAGES; i++) {
        if (i != 1) {
            check_stored_image(id[i], data[i], lengths[i]);
        }
    }
    bool equal;
    CHECK_INT(get_image(the_repo, id[1], NULL, 0, &equal, &the_scratch.err),
              GD_NOTFOUND);
    /* The same image is stored once more: with a filter and all groups
     * cached, no block is new, but for those that a weak digest or many
     * groups hide. */
    gd_recipe_header header;
    store_in_one("again", data[0], lengths[0], 70000, &header);
    check_stored_image("again", data[0], lengths[0]);
    if (k->filter && k->slots > 1000 && strcmp(k->digest, "weak-8") != 0) {
        CHECK_INT(header.new_bytes, 0);
        CHECK_INT(header.stored_bytes, 0);
    }
    transaction_teardown();
}

TEST(test_random_images)
{
    static const kind kinds[] = {
        {4096, 64, 65536, "sha256", false, GD_CODEC_LZ4, 0, true},
        {4096, 32768, 65536, "sha256", false, GD_CODEC_ZSTD, 2, true},
        {512, 64, 512, "sha256", false, GD_CODEC_LZ4, 1, true},
        {512, 64, 4096, "blake2s256", false, GD_CODEC_NONE, 0, false},
        {512, 2048, 65536, "xxh3-128", true, GD_CODEC_LZ4, 0, true},
        {512, 64, 4096, "weak-8", true, GD_CODEC_LZ4, 0, true},
        {4096, 64, 4096, "weak-8", true, GD_CODEC_ZSTD, 1, true},
        {4096, 100, 8192, "sha512-256", true, GD_CODEC_NONE, 0, true},
        {1024, 64, 1 << 20, "sha3-256", false, GD_CODEC_ZSTD, 0, true},
        {65536, 64, 65536, "sha256", false, GD_CODEC_LZ4, 2, true},
        {16384, 64, 1 << 20, "sha256", true, GD_CODEC_LZ4, 0, false},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        run_images(&kinds[i], i);
    }
}

/* The sizes are around the borders of blocks and of the batches of 4 MiB. */
TEST(test_sizes)
{
    enum { BATCH = 4 << 20 };
    static const size_t sizes[] = {0,         1,     4095,      4096,
                                   4097,      8191,  8192,      BATCH - 1,
                                   BATCH,     BATCH + 1,        2 * BATCH - 1,
                                   2 * BATCH, 2 * BATCH + 4097};
    static uint8_t data[2 * BATCH + 4097];
    fill_image(data, sizeof data, 4096, 500, 3);
    transaction_setup();
    the_repo->params.group_slots = 1024; /* fewer files */
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char id[16];
        gd_recipe_header header;
        snprintf(id, sizeof id, "size-%zu", i);
        store_in_one(id, data, sizes[i], 1 + sizes[i] * (i + 1) / 7, &header);
        CHECK_INT(header.size, sizes[i]);
        check_stored_image(id, data, sizes[i]);
    }
    transaction_teardown();
}

TEST_WITH(test_zeros, transaction_setup(), transaction_teardown())
{
    static uint8_t data[20 << 20];
    gd_recipe_header header;
    store_in_one("zeros", data, sizeof data, 1 << 20, &header);
    CHECK_INT(header.zero_bytes, sizeof data);
    CHECK_INT(header.extents, 1);
    CHECK_INT(header.fragments, 0);
    CHECK_INT(header.stored_bytes, 0);
    CHECK_INT(scratch_count(&the_scratch, "groups", "", NULL), 0);
    check_stored_image("zeros", data, sizeof data);
    data[5 << 20] = 1; /* a single block */
    store_in_one("one", data, sizeof data, 1 << 20, &header);
    CHECK_INT(header.zero_bytes, sizeof data - 4096);
    CHECK_INT(header.new_bytes, 4096);
    CHECK_INT(header.extents, 3);
    check_stored_image("one", data, sizeof data);
    store_in_one("tail", data, 4099, 4099, &header); /* an odd block of zeros */
    CHECK_INT(header.zero_bytes, 4099);
    check_stored_image("tail", data, 4099);
    data[5 << 20] = 0;
}

/* Duplicates are found within an image, in the group now open, and between
 * images. */
TEST_WITH(test_duplicates_are_stored_once, transaction_setup(),
          transaction_teardown())
{
    static uint8_t data[200 * 4096];
    gd_recipe_header header;
    the_repo->params.group_slots = 1024;
    fill_random(data, sizeof data, 1);
    memcpy(data + 100 * 4096, data, 50 * 4096);
    store_in_one("a", data, 150 * 4096, 4096, &header);
    CHECK_INT(header.new_bytes, 100 * 4096);
    store_in_one("b", data, sizeof data, 100000, &header);
    CHECK_INT(header.new_bytes, 50 * 4096);
    store_in_one("c", data, sizeof data, 333, &header);
    CHECK_INT(header.new_bytes, 0);
    CHECK_INT(atomic_load(&the_repo->counters.hits), 50 + 150 + 200);
    CHECK_INT(atomic_load(&the_repo->counters.misses), 150);
    CHECK_INT(atomic_load(&the_repo->counters.blocks), 150 + 200 + 200);
    check_stored_image("a", data, 150 * 4096);
    check_stored_image("b", data, sizeof data);
    check_stored_image("c", data, sizeof data);
}

/* ---- one image, several transactions ---- */

TEST(test_interleaved)
{
    enum { TRANSACTIONS = 3, LENGTH = 900 * 512 + 77 };
    static uint8_t data[TRANSACTIONS][LENGTH];
    static const char *const ids[] = {"a", "b", "c"};
    gd_transaction *transactions[TRANSACTIONS];
    gd_recipe_header header;
    bool linked;
    uint64_t seed = 8;
    scratch_init(&the_scratch);
    the_scratch.params.block_size = 512; /* smaller batches */
    the_repo = scratch_repo_filter(&the_scratch);
    for (int i = 0; i < TRANSACTIONS; i++) {
        fill_image(data[i], LENGTH, 512, 300, (uint64_t)i);
        transactions[i] = begin_image(ids[i]);
    }
    size_t at = 0;
    while (at < LENGTH) {
        size_t here = minimum(1 + next_random(&seed) % 9000, LENGTH - at);
        for (int i = 0; i < TRANSACTIONS; i++) {
            write_all(transactions[i], data[i] + at, here);
        }
        at += here;
    }
    for (int i = TRANSACTIONS - 1; i >= 0; i--) {
        CHECK_INT(gd_transaction_commit(transactions[i], &header, &linked,
                                        &the_scratch.err),
                  GD_OK);
        CHECK(linked);
        check_stored_image(ids[i], data[i], LENGTH);
    }
    for (int i = 0; i < TRANSACTIONS; i++) {
        gd_transaction_end(transactions[i]);
    }
    transaction_other_handle();
    for (int i = 0; i < TRANSACTIONS; i++) {
        check_stored_image(ids[i], data[i], LENGTH);
    }
    transaction_teardown();
}

TEST_WITH(test_one_id_twice, transaction_setup(), transaction_teardown())
{
    uint8_t data[10000];
    gd_transaction *refused;
    gd_recipe_header header;
    bool linked;
    fill_random(data, sizeof data, 1);
    gd_transaction *first = begin_image("a"), *second = begin_image("a");
    CHECK(memcmp(gd_transaction_upload_id(first),
                 gd_transaction_upload_id(second), GD_ID_SIZE) != 0);
    write_all(first, data, sizeof data);
    write_all(second, data, 5000);
    CHECK_INT(gd_transaction_commit(first, &header, &linked, &the_scratch.err),
              GD_OK);
    CHECK(memcmp(header.upload_id, gd_transaction_upload_id(first),
                 GD_ID_SIZE) == 0);
    CHECK_INT(gd_transaction_commit(second, &header, &linked, &the_scratch.err),
              GD_EXISTS);
    CHECK(!linked);
    CHECK_INT(gd_transaction_begin(the_repo, "a", "", &gd_global_scope,
                                   &refused, &the_scratch.err), GD_EXISTS);
    CHECK_CONTAINS(the_scratch.err.text, "image a ");
    gd_transaction_end(second);
    gd_transaction_end(first);
    /* The file is the first one's. */
    CHECK_INT(scratch_count(&the_scratch, "spool", "", NULL), 1);
    check_stored_image("a", data, sizeof data);
}

TEST_WITH(test_what_is_refused, transaction_setup(), transaction_teardown())
{
    char project[GD_PROJECT_MAX + 2];
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked;
    memset(project, 'p', sizeof project);
    project[sizeof project - 1] = '\0';
    CHECK_INT(gd_transaction_begin(the_repo, "a/b", "", &gd_global_scope,
                                   &transaction, &the_scratch.err), GD_INVALID);
    CHECK_INT(gd_transaction_begin(the_repo, "", "", &gd_global_scope,
                                   &transaction, &the_scratch.err), GD_INVALID);
    CHECK_INT(gd_transaction_begin(the_repo, "a", project, &gd_global_scope,
                                   &transaction, &the_scratch.err), GD_INVALID);
    CHECK_INT(scratch_count(&the_scratch, "spool", "", NULL), 0);
    project[GD_PROJECT_MAX] = '\0';
    CHECK_INT(gd_transaction_begin(the_repo, "a", project, &gd_global_scope,
                                   &transaction, &the_scratch.err), GD_OK);
    write_all(transaction, (const uint8_t *)"data", 4);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked,
                                    &the_scratch.err), GD_OK);
    CHECK(strcmp(header.project, project) == 0);
    CHECK(strcmp(header.image_id, "a") == 0);
    /* The transaction has ended. */
    CHECK_INT(gd_transaction_write(transaction, (const uint8_t *)"x", 1,
                                   &the_scratch.err),
              GD_CLOSED);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked,
                                    &the_scratch.err), GD_CLOSED);
    CHECK(linked);
    gd_transaction_end(transaction);
    check_stored_image("a", (const uint8_t *)"data", 4);
}

/* ---- several images ---- */

enum { SEVERAL = 3, EACH = 9 * 4096 + 100 };

static const char *const several_ids[SEVERAL] = {"a", "b", "c"};
static uint8_t several[SEVERAL][EACH];

/* The second one has blocks of the first, and the last one only zeros. */
static gd_status
store_several(gd_recipe_header *header, bool *linked)
{
    memset(several, 0, sizeof several);
    fill_random(several[0], EACH, 1);
    memcpy(several[1], several[0], EACH);
    fill_random(several[1] + 4096, 4096, 2);
    gd_transaction *transaction;
    gd_status s = gd_transaction_begin(the_repo, "a", "project",
                                       &gd_global_scope, &transaction,
                                       &the_scratch.err);
    *linked = false;
    if (s != GD_OK) {
        return s;
    }
    for (size_t i = 0; s == GD_OK && i < SEVERAL; i++) {
        if (i > 0) {
            s = gd_transaction_next_image(transaction, several_ids[i],
                                          &the_scratch.err);
        }
        if (s == GD_OK) {
            s = gd_transaction_write(transaction, several[i], EACH,
                                     &the_scratch.err);
        }
    }
    if (s == GD_OK) {
        s = gd_transaction_commit(transaction, header, linked,
                                  &the_scratch.err);
    }
    gd_transaction_end(transaction);
    return s;
}

static void
check_header(size_t i, uint64_t new_bytes)
{
    gd_image *image;
    REQUIRE(gd_image_open(the_repo, several_ids[i], NULL, &image,
                          &the_scratch.err) == GD_OK);
    const gd_recipe_header *header = gd_image_header(image);
    CHECK(strcmp(header->image_id, several_ids[i]) == 0);
    CHECK(strcmp(header->project, "project") == 0);
    CHECK_INT(header->size, EACH);
    CHECK_INT(header->new_bytes, new_bytes);
    CHECK((header->stored_bytes > 0) == (new_bytes > 0));
    gd_image_close(image);
}

/* One sync for each recipe, and one of each directory. */
TEST_WITH(test_several_images, transaction_setup(), transaction_teardown())
{
    gd_recipe_header header;
    bool linked;
    store_in_one("first", (const uint8_t *)"x", 1, 1, &header); /* a group */
    uint64_t syncs = fault_env_count(&the_scratch.f, FAULT_FSYNC);
    CHECK_INT(store_several(&header, &linked), GD_OK);
    CHECK(linked);
    CHECK_INT(fault_env_count(&the_scratch.f, FAULT_FSYNC),
              syncs + SEVERAL + 2);
    CHECK_INT(scratch_count(&the_scratch, "spool", "T-", NULL), SEVERAL + 1);
    for (size_t i = 0; i < SEVERAL; i++) {
        check_stored_image(several_ids[i], several[i], EACH);
    }
    check_header(0, EACH);
    check_header(1, 4096);
    check_header(2, 0);
}

/* An image is there already: the transaction can go on with another one. */
TEST_WITH(test_next_image_is_there, transaction_setup(),
          transaction_teardown())
{
    gd_recipe_header header;
    bool linked;
    store_in_one("b", several[2], 4096, 4096, &header);
    gd_transaction *transaction = begin_image("a");
    write_all(transaction, several[0], EACH);
    CHECK_INT(gd_transaction_next_image(transaction, "b", &the_scratch.err),
              GD_EXISTS);
    CHECK_INT(gd_transaction_next_image(transaction, "../c",
                                        &the_scratch.err), GD_INVALID);
    CHECK_INT(gd_transaction_next_image(transaction, "c", &the_scratch.err),
              GD_OK);
    write_all(transaction, several[1], EACH);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked,
                                    &the_scratch.err), GD_OK);
    CHECK(strcmp(header.image_id, "c") == 0);
    CHECK_INT(gd_transaction_next_image(transaction, "d", &the_scratch.err),
              GD_CLOSED);
    gd_transaction_end(transaction);
    check_stored_image("a", several[0], EACH);
    check_stored_image("c", several[1], EACH);
}

/* Whatever fails, each image is whole or is not there, and one that is not there
 * has no entry (N8.5, N8.6). */
TEST(test_several_images_under_faults)
{
    static const fault_call calls[] = {FAULT_ANY, FAULT_ALLOC};
    for (size_t kind = 0; kind < 2; kind++) {
        for (uint64_t nth = 1, done = 0; done == 0; nth++) {
            gd_recipe_header header;
            bool linked;
            unsigned there = 0;
            transaction_setup();
            fault_env_fail(&the_scratch.f, calls[kind], nth,
                           kind == 0 ? EIO : ENOMEM, false);
            gd_status s = store_several(&header, &linked);
            done = fault_env_faults(&the_scratch.f) == 0;
            fault_env_heal(&the_scratch.f);
            CHECK(s == GD_OK || !done);
            for (size_t i = 0; i < SEVERAL; i++) {
                char name[GD_NAME_SIZE];
                snprintf(name, sizeof name, "images/%s", several_ids[i]);
                if (scratch_exists(&the_scratch, name)) {
                    there++;
                    check_stored_image(several_ids[i], several[i], EACH);
                }
            }
            CHECK((there > 0) == linked);
            CHECK(s != GD_OK || there == SEVERAL);
            CHECK(scratch_count(&the_scratch, "spool", "T-", NULL) >= there);
            transaction_teardown();
        }
    }
}

/* ---- aborts ---- */

/* Large writes are not copied before they are fingerprinted: the caller may
 * use the memory again as soon as the call returns. The lengths are odd, so
 * that blocks cross from one write to the next; small ones are in between. */
TEST(test_large_writes)
{
    enum { LARGE = (1 << 20) + 777, SMALL = 5000, WRITES = 9 };
    static uint8_t data[WRITES * LARGE], lent[LARGE];
    gd_recipe_header header;
    bool linked;
    size_t length = 0;
    transaction_setup();
    the_scratch.params.threads = 2;
    transaction_other_handle();
    gd_transaction *transaction = begin_image("large");
    for (uint64_t i = 0; i < WRITES; i++) {
        size_t n = i % 3 == 2 ? SMALL : LARGE;
        fill_random(lent, n, i % 5); /* some bytes are repeated */
        memset(lent + n / 2, 0, n / 8);
        memcpy(data + length, lent, n);
        length += n;
        write_all(transaction, lent, n);
        memset(lent, 0xdd, sizeof lent);
    }
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked,
                                    &the_scratch.err), GD_OK);
    gd_transaction_end(transaction);
    CHECK_INT(header.size, length);
    check_stored_image("large", data, length);
    transaction_other_handle();
    check_stored_image("large", data, length);
    transaction_teardown();
}

/* ---- bytes that change while they are stored ---- */

static uint8_t *changing; /* a byte of the caller's that changes once */

static void
change_once(void)
{
    if (changing != NULL) {
        *changing ^= 1;
        changing = NULL;
    }
}

/* Before a batch is stored the disk's free space is read. */
static int
change_at_free_space(const gd_env *env, int fd, gd_space *space)
{
    (void)env;
    (void)fd;
    change_once();
    *space = (gd_space){.free = 1 << 30, .total = 1 << 30};
    return 0;
}

/* While a batch is looked up tables are read. */
static ssize_t
change_at_pread(const gd_env *env, int fd, void *buf, size_t len,
                uint64_t offset)
{
    (void)env;
    change_once();
    ssize_t n = pread(fd, buf, len, (off_t)offset);
    return n < 0 ? -errno : n;
}

/* The fingerprint and the stored bytes of a block are of different contents:
 * that must be an error now, since reading could not detect it. The change
 * comes behind the fingerprint, with the first batch (kind 0), or with one
 * behind duplicates, before (1) or after (2) new blocks were checked once
 * more. */
TEST(test_changed_in_memory)
{
    enum { PIECE = 1 << 20 };
    static uint8_t known[2 * PIECE], data[PIECE];
    gd_recipe_header header;
    bool linked;
    for (int kind = 0; kind < 3; kind++) {
        scratch_init(&the_scratch);
        the_scratch.params.reserve = 1;
        the_scratch.f.env.free_space = change_at_free_space;
        the_repo = scratch_repo_filter(&the_scratch);
        fill_random(known, sizeof known, 1);
        fill_random(data, sizeof data, 2);
        store_in_one("known", known, sizeof known, PIECE, NULL);
        transaction_other_handle();
        gd_transaction *transaction = begin_image("changed");
        if (kind > 0) {
            write_all(transaction, known, PIECE);
            memcpy(data + PIECE / 8, known + PIECE, PIECE - PIECE / 8);
        }
        if (kind == 1) {
            the_scratch.f.env.pread = change_at_pread;
        }
        changing = data + 5000;
        gd_status s = gd_transaction_write(transaction, data, PIECE,
                                           &the_scratch.err);
        CHECK(changing == NULL);
        if (s == GD_OK) {
            s = gd_transaction_commit(transaction, &header, &linked,
                                      &the_scratch.err);
        }
        CHECK_INT(s, GD_IO);
        CHECK_CONTAINS(the_scratch.err.text, "changed in memory");
        gd_transaction_end(transaction);
        store_in_one("again", data, sizeof data, PIECE, NULL);
        check_stored_image("again", data, sizeof data);
        transaction_teardown();
    }
}

TEST_WITH(test_abort, transaction_setup(), transaction_teardown())
{
    static uint8_t data[9 << 20];
    gd_recipe_header header;
    bool equal;
    the_repo->params.group_slots = 32768;
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin_image("a");
    write_all(transaction, data, sizeof data);
    CHECK_INT(scratch_count(&the_scratch, "spool", "T-", NULL), 1);
    gd_transaction_end(transaction);
    CHECK_INT(scratch_count(&the_scratch, "spool", "", NULL), 0);
    CHECK_INT(get_image(the_repo, "a", NULL, 0, &equal, &the_scratch.err),
              GD_NOTFOUND);
    CHECK_INT(scratch_size(&the_scratch, "groups/00000001"),
              gd_fptable_data_start(32768));
    store_in_one("a", data, sizeof data, 1 << 20, &header);
    CHECK_INT(header.new_bytes, sizeof data);
    CHECK_INT(scratch_count(&the_scratch, "groups", "", NULL), 1);
    check_stored_image("a", data, sizeof data);
}

/* Groups that were full before the abort were synced: the next upload finds
 * their blocks. */
TEST_WITH(test_abort_after_sync_points, transaction_setup(),
          transaction_teardown())
{
    static uint8_t data[5 << 20];
    gd_recipe_header header;
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin_image("a");
    write_all(transaction, data, sizeof data); /* the first 4 MiB are stored */
    write_all(transaction, data, sizeof data);
    gd_transaction_end(transaction);
    store_in_one("a", data, 4 << 20, 1 << 20, &header);
    CHECK(header.new_bytes < 64 * 4096 * 20);
    check_stored_image("a", data, 4 << 20);
}

/* I1: after a failed fdatasync the upload fails; the next one stores all of it
 * again, in another group, and is whole. */
TEST_WITH(test_failed_sync_at_the_commit, transaction_setup(),
          transaction_teardown())
{
    static uint8_t data[40 * 4096];
    gd_recipe_header header;
    gd_recipe_page page;
    gd_image *image;
    bool linked;
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin_image("a");
    write_all(transaction, data, sizeof data);
    uint64_t syncs = fault_env_count(&the_scratch.f, FAULT_FDATASYNC);
    fault_env_fail(&the_scratch.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked,
                                    &the_scratch.err), GD_IO);
    CHECK(!linked);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked,
                                    &the_scratch.err), GD_CLOSED);
    CHECK_INT(gd_transaction_write(transaction, data, 1, &the_scratch.err),
              GD_CLOSED);
    gd_transaction_end(transaction);
    CHECK_INT(fault_env_count(&the_scratch.f, FAULT_FDATASYNC), syncs + 1);
    CHECK(!scratch_exists(&the_scratch, "images/a"));
    for (int handle = 0; handle < 2; handle++) {
        const char *id = handle == 0 ? "a" : "b";
        store_in_one(id, data, sizeof data, 5000, &header);
        CHECK_INT(header.new_bytes, handle == 0 ? sizeof data : 0);
        REQUIRE(gd_image_open(the_repo, id, NULL, &image, &the_scratch.err) ==
                GD_OK);
        REQUIRE(gd_image_extents(image, 1, &page, &the_scratch.err) == GD_OK);
        for (uint32_t i = 0; i < page.count; i++) {
            CHECK_INT(page.extents[i].group, 2);
        }
        gd_image_close(image);
        check_stored_image(id, data, sizeof data);
        transaction_other_handle();
    }
}

/* N8.6: after the link an error is reported, and the image stays. */
TEST_WITH(test_failure_after_the_link, transaction_setup(),
          transaction_teardown())
{
    uint8_t data[10000];
    gd_recipe_header header;
    bool linked;
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin_image("a");
    write_all(transaction, data, sizeof data);
    /* The syncs are, of the new group: file and directory; of the recipe: the
     * file, spool/ and images/; before the first block, groups/ once more. */
    uint64_t before = fault_env_count(&the_scratch.f, FAULT_FSYNC);
    gd_transaction *probe = begin_image("probe");
    write_all(probe, data, sizeof data);
    CHECK_INT(gd_transaction_commit(probe, &header, &linked, &the_scratch.err),
              GD_OK);
    gd_transaction_end(probe);
    uint64_t needed = fault_env_count(&the_scratch.f, FAULT_FSYNC) - before;
    CHECK_INT(needed, 6);
    /* Group 1 exists. */
    fault_env_fail(&the_scratch.f, FAULT_FSYNC, 3, EIO, false);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked,
                                    &the_scratch.err), GD_IO);
    CHECK(linked);
    gd_transaction_end(transaction);
    CHECK_INT(scratch_count(&the_scratch, "spool", "T-", NULL), 2);
    check_stored_image("a", data, sizeof data);
}

/* ---- killed writers ---- */

/* Waits until a child has acknowledged an image. */
static void
await_acknowledgement(int fd)
{
    struct pollfd pipe = {.fd = fd, .events = POLLIN};
    CHECK_INT(poll(&pipe, 1, 60000), 1);
    CHECK((pipe.revents & POLLIN) != 0);
}

/* A child that stores images without end is killed at any moment, every other
 * one not before it has acknowledged an image; acknowledged images are there,
 * and the repository works. */
TEST(test_killed_writers)
{
    enum { KILLS = 25, LENGTH = 300 * 512, ROOM = 10000 };
    static uint8_t data[LENGTH];
    unsigned acknowledged = 0;
    uint64_t seed = 5;
    transaction_setup();
    gd_repo_close(the_repo);
    the_scratch.params.block_size = 512;
    the_scratch.params.segment_size = 2048;
    for (int i = 0; i < KILLS; i++) {
        int pipes[2];
        REQUIRE(pipe(pipes) == 0);
        pid_t child = fork();
        if (child == 0) {
            the_repo = scratch_repo_filter(&the_scratch);
            for (unsigned n = 0;; n++) {
                char id[32];
                snprintf(id, sizeof id, "image-%d-%u", i, n);
                fill_image(data, LENGTH, 512, 2000,
                           (uint64_t)i * ROOM + n);
                if (put_image(the_repo, id, data, LENGTH, 9999, NULL,
                              &the_scratch.err) != GD_OK || write(pipes[1], &n,
                                                                  sizeof n) !=
                    sizeof n) {
                    fprintf(stderr, "%s\n", the_scratch.err.text);
                    _exit(1);
                }
            }
        }
        close(pipes[1]);
        if (i % 2 == 0) {
            await_acknowledgement(pipes[0]);
        }
        usleep((useconds_t)(next_random(&seed) % 20000));
        kill(child, SIGKILL);
        int status = 0;
        waitpid(child, &status, 0);
        CHECK(WIFSIGNALED(status));
        unsigned n;
        the_repo = scratch_repo_filter(&the_scratch);
        while (read(pipes[0], &n, sizeof n) == sizeof n) {
            char id[32];
            snprintf(id, sizeof id, "image-%d-%u", i, n);
            fill_image(data, LENGTH, 512, 2000, (uint64_t)i * ROOM + n);
            check_stored_image(id, data, LENGTH);
            acknowledged++;
        }
        gd_repo_close(the_repo);
        close(pipes[0]);
    }
    CHECK(acknowledged > KILLS / 2);
    the_repo = scratch_repo_filter(&the_scratch);
    fill_image(data, LENGTH, 512, 2000, 77777777);
    store_in_one("last", data, LENGTH, LENGTH, NULL);
    check_stored_image("last", data, LENGTH);
    transaction_teardown();
}
