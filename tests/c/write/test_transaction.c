/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_transaction.c - storing images: what goes in comes out, whatever its
 * blocks, the sizes, the codec and the digest; and what an abort, a failed
 * sync, another transaction or a killed process leaves.
 */
#include "engine/write/transaction.h"

#include <poll.h>
#include <signal.h>

#include "engine/files/blockgroup.h"
#include "engine/files/spool.h"
#include "engine/read/reader.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

static scratch x;
static gd_repo *repo;

static void
setup(void)
{
    scratch_init(&x);
    repo = scratch_repo_filter(&x);
}

static void
teardown(void)
{
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

static void
another_handle(void)
{
    gd_repo_close(repo);
    repo = scratch_repo_filter(&x);
}

static gd_transaction *
begin(const char *image_id)
{
    gd_transaction *transaction = NULL;
    if (!CHECK_INT(gd_transaction_begin(repo, image_id, "project",
                                        &gd_global_scope, &transaction,
                                        &x.err), GD_OK)) {
        fprintf(stderr, "%s\n", x.err.text);
        exit(1);
    }
    return transaction;
}

static void
write_all(gd_transaction *transaction, const uint8_t *data, size_t length)
{
    CHECK_INT(gd_transaction_write(transaction, data, length, &x.err), GD_OK);
}

static void
put(const char *image_id, const uint8_t *data, size_t length, size_t piece,
    gd_recipe_header *header)
{
    if (!CHECK_INT(put_image(repo, image_id, data, length, piece, header,
                             &x.err),
                   GD_OK)) {
        fprintf(stderr, "%s: %s\n", image_id, x.err.text);
    }
}

static void
check_image(const char *image_id, const uint8_t *data, size_t length)
{
    bool equal;
    gd_status s = get_image(repo, image_id, data, length, &equal, &x.err);
    if (!CHECK_INT(s, GD_OK) || !CHECK(equal)) {
        fprintf(stderr, "%s: %s\n", image_id, s == GD_OK ? "" : x.err.text);
    }
}

static size_t
minimum(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* ---- whatever comes ---- */

typedef struct kind {
    uint32_t block, slots, segment;
    const char *digest;
    bool by_value;
    gd_codec codec;
    unsigned threads;
    bool filter;
} kind;

/* A few images that share contents; each is read back by the handle that
 * stored it, and all of them by another. */
static void
run_images(const kind *k, uint64_t seed)
{
    enum { IMAGES = 8 };
    static uint8_t data[IMAGES][600000];
    size_t lengths[IMAGES];
    char id[IMAGES][16];
    scratch_init(&x);
    x.params.block_size = k->block;
    x.params.group_slots = k->slots;
    x.params.segment_size = k->segment;
    x.params.by_value = k->by_value;
    x.params.codec = k->codec;
    x.params.threads = k->threads;
    strcpy(x.params.digest, k->digest);
    repo = k->filter ? scratch_repo_filter(&x) : scratch_repo(&x);
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
        put(id[i], data[i], lengths[i], piece, &header);
        CHECK_INT(header.size, lengths[i]);
        check_image(id[i], data[i], lengths[i]);
        if (i == 4) {
            CHECK_INT(gd_spool_delete(x.env, x.root, &x.params, id[1], NULL,
                                      &x.err),
                      GD_OK);
        }
    }
    another_handle();
    for (int i = 0; i < IMAGES; i++) {
        if (i != 1) {
            check_image(id[i], data[i], lengths[i]);
        }
    }
    bool equal;
    CHECK_INT(get_image(repo, id[1], NULL, 0, &equal, &x.err), GD_NOTFOUND);
    /* The same once more: with a filter and all groups at hand, nothing is
     * new, but for what a weak digest or many groups hide. */
    gd_recipe_header header;
    put("again", data[0], lengths[0], 70000, &header);
    check_image("again", data[0], lengths[0]);
    if (k->filter && k->slots > 1000 && strcmp(k->digest, "weak-8") != 0) {
        CHECK_INT(header.new_bytes, 0);
        CHECK_INT(header.stored_bytes, 0);
    }
    teardown();
}

static void
test_random_images(void)
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

/* Around the borders of blocks and of the batches of 4 MiB. */
static void
test_sizes(void)
{
    enum { BATCH = 4 << 20 };
    static const size_t sizes[] = {0,         1,     4095,      4096,
                                   4097,      8191,  8192,      BATCH - 1,
                                   BATCH,     BATCH + 1,        2 * BATCH - 1,
                                   2 * BATCH, 2 * BATCH + 4097};
    static uint8_t data[2 * BATCH + 4097];
    fill_image(data, sizeof data, 4096, 500, 3);
    setup();
    repo->params.group_slots = 1024; /* fewer files */
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char id[16];
        gd_recipe_header header;
        snprintf(id, sizeof id, "size-%zu", i);
        put(id, data, sizes[i], 1 + sizes[i] * (i + 1) / 7, &header);
        CHECK_INT(header.size, sizes[i]);
        check_image(id, data, sizes[i]);
    }
    teardown();
}

static void
test_zeros(void)
{
    static uint8_t data[20 << 20];
    gd_recipe_header header;
    setup();
    put("zeros", data, sizeof data, 1 << 20, &header);
    CHECK_INT(header.zero_bytes, sizeof data);
    CHECK_INT(header.extents, 1);
    CHECK_INT(header.fragments, 0);
    CHECK_INT(header.stored_bytes, 0);
    CHECK_INT(scratch_count(&x, "groups", "", NULL), 0);
    check_image("zeros", data, sizeof data);
    data[5 << 20] = 1; /* a single block */
    put("one", data, sizeof data, 1 << 20, &header);
    CHECK_INT(header.zero_bytes, sizeof data - 4096);
    CHECK_INT(header.new_bytes, 4096);
    CHECK_INT(header.extents, 3);
    check_image("one", data, sizeof data);
    put("tail", data, 4099, 4099, &header); /* an odd block of zeros */
    CHECK_INT(header.zero_bytes, 4099);
    check_image("tail", data, 4099);
    data[5 << 20] = 0;
    teardown();
}

/* Within an image, in the group now open, and between images. */
static void
test_duplicates_are_stored_once(void)
{
    static uint8_t data[200 * 4096];
    gd_recipe_header header;
    setup();
    repo->params.group_slots = 1024;
    fill_random(data, sizeof data, 1);
    memcpy(data + 100 * 4096, data, 50 * 4096);
    put("a", data, 150 * 4096, 4096, &header);
    CHECK_INT(header.new_bytes, 100 * 4096);
    put("b", data, sizeof data, 100000, &header);
    CHECK_INT(header.new_bytes, 50 * 4096);
    put("c", data, sizeof data, 333, &header);
    CHECK_INT(header.new_bytes, 0);
    CHECK_INT(atomic_load(&repo->counters.hits), 50 + 150 + 200);
    CHECK_INT(atomic_load(&repo->counters.misses), 150);
    CHECK_INT(atomic_load(&repo->counters.blocks), 150 + 200 + 200);
    check_image("a", data, 150 * 4096);
    check_image("b", data, sizeof data);
    check_image("c", data, sizeof data);
    teardown();
}

/* ---- one image, several transactions ---- */

static void
test_interleaved(void)
{
    enum { TRANSACTIONS = 3, LENGTH = 900 * 512 + 77 };
    static uint8_t data[TRANSACTIONS][LENGTH];
    static const char *const ids[] = {"a", "b", "c"};
    gd_transaction *transactions[TRANSACTIONS];
    gd_recipe_header header;
    bool linked;
    uint64_t seed = 8;
    scratch_init(&x);
    x.params.block_size = 512; /* for small batches */
    repo = scratch_repo_filter(&x);
    for (int i = 0; i < TRANSACTIONS; i++) {
        fill_image(data[i], LENGTH, 512, 300, (uint64_t)i);
        transactions[i] = begin(ids[i]);
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
                                        &x.err),
                  GD_OK);
        CHECK(linked);
        check_image(ids[i], data[i], LENGTH);
    }
    for (int i = 0; i < TRANSACTIONS; i++) {
        gd_transaction_end(transactions[i]);
    }
    another_handle();
    for (int i = 0; i < TRANSACTIONS; i++) {
        check_image(ids[i], data[i], LENGTH);
    }
    teardown();
}

static void
test_one_id_twice(void)
{
    uint8_t data[10000];
    gd_transaction *refused;
    gd_recipe_header header;
    bool linked;
    setup();
    fill_random(data, sizeof data, 1);
    gd_transaction *first = begin("a"), *second = begin("a");
    CHECK(memcmp(gd_transaction_upload_id(first),
                 gd_transaction_upload_id(second), GD_ID_SIZE) != 0);
    write_all(first, data, sizeof data);
    write_all(second, data, 5000);
    CHECK_INT(gd_transaction_commit(first, &header, &linked, &x.err), GD_OK);
    CHECK(memcmp(header.upload_id, gd_transaction_upload_id(first),
                 GD_ID_SIZE) == 0);
    CHECK_INT(gd_transaction_commit(second, &header, &linked, &x.err),
              GD_EXISTS);
    CHECK(!linked);
    CHECK_INT(gd_transaction_begin(repo, "a", "", &gd_global_scope, &refused,
                                   &x.err), GD_EXISTS);
    CHECK_CONTAINS(x.err.text, "image a ");
    gd_transaction_end(second);
    gd_transaction_end(first);
    CHECK_INT(scratch_count(&x, "spool", "", NULL), 1); /* the first's */
    check_image("a", data, sizeof data);
    teardown();
}

static void
test_what_is_refused(void)
{
    char project[GD_PROJECT_MAX + 2];
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked;
    setup();
    memset(project, 'p', sizeof project);
    project[sizeof project - 1] = '\0';
    CHECK_INT(gd_transaction_begin(repo, "a/b", "", &gd_global_scope,
                                   &transaction, &x.err), GD_INVALID);
    CHECK_INT(gd_transaction_begin(repo, "", "", &gd_global_scope,
                                   &transaction, &x.err), GD_INVALID);
    CHECK_INT(gd_transaction_begin(repo, "a", project, &gd_global_scope,
                                   &transaction, &x.err), GD_INVALID);
    CHECK_INT(scratch_count(&x, "spool", "", NULL), 0);
    project[GD_PROJECT_MAX] = '\0';
    CHECK_INT(gd_transaction_begin(repo, "a", project, &gd_global_scope,
                                   &transaction, &x.err), GD_OK);
    write_all(transaction, (const uint8_t *)"data", 4);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &x.err),
              GD_OK);
    CHECK(strcmp(header.project, project) == 0);
    CHECK(strcmp(header.image_id, "a") == 0);
    /* It has ended. */
    CHECK_INT(gd_transaction_write(transaction, (const uint8_t *)"x", 1,
                                   &x.err),
              GD_CLOSED);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &x.err),
              GD_CLOSED);
    CHECK(linked);
    gd_transaction_end(transaction);
    check_image("a", (const uint8_t *)"data", 4);
    teardown();
}

/* ---- giving up ---- */

/* Large writes are not copied before they are fingerprinted: the caller may do
 * with the memory what it likes as soon as the call returns.  Odd lengths, so
 * that blocks cross from one write to the next; small ones in between. */
static void
test_large_writes(void)
{
    enum { LARGE = (1 << 20) + 777, SMALL = 5000, WRITES = 9 };
    static uint8_t data[WRITES * LARGE], lent[LARGE];
    gd_recipe_header header;
    bool linked;
    size_t length = 0;
    setup();
    x.params.threads = 2;
    another_handle();
    gd_transaction *transaction = begin("large");
    for (uint64_t i = 0; i < WRITES; i++) {
        size_t n = i % 3 == 2 ? SMALL : LARGE;
        fill_random(lent, n, i % 5); /* some of it again */
        memset(lent + n / 2, 0, n / 8);
        memcpy(data + length, lent, n);
        length += n;
        write_all(transaction, lent, n);
        memset(lent, 0xdd, sizeof lent);
    }
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &x.err),
              GD_OK);
    gd_transaction_end(transaction);
    CHECK_INT(header.size, length);
    check_image("large", data, length);
    another_handle();
    check_image("large", data, length);
    teardown();
}

/* ---- bytes that change while they are stored ---- */

static uint8_t *changing; /* a byte of the caller's, to be changed once */

static void
change_once(void)
{
    if (changing != NULL) {
        *changing ^= 1;
        changing = NULL;
    }
}

/* Before a batch is stored the disk's room is asked for. */
static int
change_at_free_space(const gd_env *env, int fd, gd_space *space)
{
    (void)env;
    (void)fd;
    change_once();
    *space = (gd_space){.free = 1 << 30, .total = 1 << 30};
    return 0;
}

/* While a batch is looked up stores are read. */
static ssize_t
change_at_pread(const gd_env *env, int fd, void *buf, size_t len,
                uint64_t offset)
{
    (void)env;
    change_once();
    ssize_t n = pread(fd, buf, len, (off_t)offset);
    return n < 0 ? -errno : n;
}

/* The fingerprint and the stored bytes of a block are not of one content: that
 * must be an error now, since reading could not notice it.  The change comes
 * behind the fingerprint, with the first batch (kind 0), or with one behind
 * duplicates, before (1) or after (2) what is new was looked at once more. */
static void
test_changed_in_memory(void)
{
    enum { PIECE = 1 << 20 };
    static uint8_t known[2 * PIECE], data[PIECE];
    gd_recipe_header header;
    bool linked;
    for (int kind = 0; kind < 3; kind++) {
        scratch_init(&x);
        x.params.reserve = 1;
        x.f.env.free_space = change_at_free_space;
        repo = scratch_repo_filter(&x);
        fill_random(known, sizeof known, 1);
        fill_random(data, sizeof data, 2);
        put("known", known, sizeof known, PIECE, NULL);
        another_handle();
        gd_transaction *transaction = begin("changed");
        if (kind > 0) {
            write_all(transaction, known, PIECE);
            memcpy(data + PIECE / 8, known + PIECE, PIECE - PIECE / 8);
        }
        if (kind == 1) {
            x.f.env.pread = change_at_pread;
        }
        changing = data + 5000;
        gd_status s = gd_transaction_write(transaction, data, PIECE, &x.err);
        CHECK(changing == NULL);
        if (s == GD_OK) {
            s = gd_transaction_commit(transaction, &header, &linked, &x.err);
        }
        CHECK_INT(s, GD_IO);
        CHECK_CONTAINS(x.err.text, "changed in memory");
        gd_transaction_end(transaction);
        put("again", data, sizeof data, PIECE, NULL);
        check_image("again", data, sizeof data);
        teardown();
    }
}

static void
test_abort(void)
{
    static uint8_t data[9 << 20];
    gd_recipe_header header;
    bool equal;
    setup();
    repo->params.group_slots = 32768;
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin("a");
    write_all(transaction, data, sizeof data);
    CHECK_INT(scratch_count(&x, "spool", "T-", NULL), 1);
    gd_transaction_end(transaction);
    CHECK_INT(scratch_count(&x, "spool", "", NULL), 0);
    CHECK_INT(get_image(repo, "a", NULL, 0, &equal, &x.err), GD_NOTFOUND);
    CHECK_INT(scratch_size(&x, "groups/00000001"), gd_data_start(32768));
    put("a", data, sizeof data, 1 << 20, &header);
    CHECK_INT(header.new_bytes, sizeof data);
    CHECK_INT(scratch_count(&x, "groups", "", NULL), 1);
    check_image("a", data, sizeof data);
    teardown();
}

/* Groups that were full before the abort were synced: what they hold is found
 * by the next upload. */
static void
test_abort_after_sync_points(void)
{
    static uint8_t data[5 << 20];
    gd_recipe_header header;
    setup();
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin("a");
    write_all(transaction, data, sizeof data); /* the first 4 MiB are stored */
    write_all(transaction, data, sizeof data);
    gd_transaction_end(transaction);
    put("a", data, 4 << 20, 1 << 20, &header);
    CHECK(header.new_bytes < 64 * 4096 * 20);
    check_image("a", data, 4 << 20);
    teardown();
}

/* I1: after a failed fdatasync the upload fails; the next one stores all of it
 * anew, in another group, and is whole. */
static void
test_failed_sync_at_the_commit(void)
{
    static uint8_t data[40 * 4096];
    gd_recipe_header header;
    gd_recipe_page page;
    gd_image *image;
    bool linked;
    setup();
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin("a");
    write_all(transaction, data, sizeof data);
    uint64_t syncs = fault_env_count(&x.f, FAULT_FDATASYNC);
    fault_env_fail(&x.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &x.err),
              GD_IO);
    CHECK(!linked);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &x.err),
              GD_CLOSED);
    CHECK_INT(gd_transaction_write(transaction, data, 1, &x.err), GD_CLOSED);
    gd_transaction_end(transaction);
    CHECK_INT(fault_env_count(&x.f, FAULT_FDATASYNC), syncs + 1);
    CHECK(!scratch_exists(&x, "images/a"));
    for (int handle = 0; handle < 2; handle++) {
        const char *id = handle == 0 ? "a" : "b";
        put(id, data, sizeof data, 5000, &header);
        CHECK_INT(header.new_bytes, handle == 0 ? sizeof data : 0);
        REQUIRE(gd_image_open(repo, id, NULL, &image, &x.err) == GD_OK);
        REQUIRE(gd_image_extents(image, 1, &page, &x.err) == GD_OK);
        for (uint32_t i = 0; i < page.count; i++) {
            CHECK_INT(page.extents[i].group, 2);
        }
        gd_image_close(image);
        check_image(id, data, sizeof data);
        another_handle();
    }
    teardown();
}

/* N8.6: after the link an error is reported, and the image stays. */
static void
test_failure_after_the_link(void)
{
    uint8_t data[10000];
    gd_recipe_header header;
    bool linked;
    setup();
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin("a");
    write_all(transaction, data, sizeof data);
    /* Of the group made: file and directory; of the recipe: the file, spool/
     * and images/; before the first block, groups/ once more. */
    uint64_t before = fault_env_count(&x.f, FAULT_FSYNC);
    gd_transaction *probe = begin("probe");
    write_all(probe, data, sizeof data);
    CHECK_INT(gd_transaction_commit(probe, &header, &linked, &x.err), GD_OK);
    gd_transaction_end(probe);
    uint64_t needed = fault_env_count(&x.f, FAULT_FSYNC) - before;
    CHECK_INT(needed, 6);
    fault_env_fail(&x.f, FAULT_FSYNC, 3, EIO, false); /* group 1 is there */
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &x.err),
              GD_IO);
    CHECK(linked);
    gd_transaction_end(transaction);
    CHECK_INT(scratch_count(&x, "spool", "T-", NULL), 2);
    check_image("a", data, sizeof data);
    teardown();
}

/* ---- killed ---- */

/* Wait until a child has acknowledged an image. */
static void
await_acknowledgement(int fd)
{
    struct pollfd pipe = {.fd = fd, .events = POLLIN};
    CHECK_INT(poll(&pipe, 1, 60000), 1);
    CHECK((pipe.revents & POLLIN) != 0);
}

/* A child that stores images without end is killed at any moment, every other
 * one not before it has acknowledged one; what it acknowledged is there, and
 * the repository goes on. */
static void
test_killed_writers(void)
{
    enum { KILLS = 25, LENGTH = 300 * 512, ROOM = 10000 };
    static uint8_t data[LENGTH];
    unsigned acknowledged = 0;
    uint64_t seed = 5;
    setup();
    gd_repo_close(repo);
    x.params.block_size = 512;
    x.params.segment_size = 2048;
    for (int i = 0; i < KILLS; i++) {
        int pipes[2];
        REQUIRE(pipe(pipes) == 0);
        pid_t child = fork();
        if (child == 0) {
            repo = scratch_repo_filter(&x);
            for (unsigned n = 0;; n++) {
                char id[32];
                snprintf(id, sizeof id, "image-%d-%u", i, n);
                fill_image(data, LENGTH, 512, 2000,
                           (uint64_t)i * ROOM + n);
                if (put_image(repo, id, data, LENGTH, 9999, NULL, &x.err) !=
                        GD_OK ||
                    write(pipes[1], &n, sizeof n) != sizeof n) {
                    fprintf(stderr, "%s\n", x.err.text);
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
        repo = scratch_repo_filter(&x);
        while (read(pipes[0], &n, sizeof n) == sizeof n) {
            char id[32];
            snprintf(id, sizeof id, "image-%d-%u", i, n);
            fill_image(data, LENGTH, 512, 2000, (uint64_t)i * ROOM + n);
            check_image(id, data, LENGTH);
            acknowledged++;
        }
        gd_repo_close(repo);
        close(pipes[0]);
    }
    CHECK(acknowledged > KILLS / 2);
    repo = scratch_repo_filter(&x);
    fill_image(data, LENGTH, 512, 2000, 77777777);
    put("last", data, LENGTH, LENGTH, NULL);
    check_image("last", data, LENGTH);
    teardown();
}

/* ---- blocks by their fingerprints ---- */

enum { PULL_BLOCK = 512 };

typedef struct pulled {
    gd_fingerprint fps[400];
    uint32_t lengths[400];
    gd_address addresses[400];
    size_t count;
} pulled;

static void
setup_pull(bool by_value)
{
    scratch_init(&x);
    x.params.block_size = PULL_BLOCK;
    x.params.segment_size = 4096;
    x.params.by_value = by_value;
    repo = scratch_repo_filter(&x);
}

/* The fingerprints of all blocks of some bytes. */
static void
describe(pulled *p, const uint8_t *data, size_t length)
{
    gd_hasher *hasher;
    p->count = 0;
    REQUIRE(gd_hasher_open(repo->env, repo->digest, &hasher, NULL) == GD_OK);
    for (size_t at = 0; at < length; at += PULL_BLOCK) {
        p->lengths[p->count] = (uint32_t)minimum(PULL_BLOCK, length - at);
        CHECK_INT(gd_hasher_compute(hasher, &gd_global_scope, data + at,
                                    p->lengths[p->count], &p->fps[p->count],
                                    NULL), GD_OK);
        p->count++;
    }
    gd_hasher_close(repo->env, hasher);
}

static void
find_blocks(gd_transaction *transaction, pulled *p)
{
    if (!CHECK_INT(gd_transaction_find(transaction, p->fps, p->lengths,
                                       p->count, p->addresses, &x.err),
                   GD_OK)) {
        fprintf(stderr, "%s\n", x.err.text);
    }
}

static size_t
count_addresses(const pulled *p)
{
    size_t found = 0;
    for (size_t i = 0; i < p->count; i++) {
        found += p->addresses[i].group != 0;
    }
    return found;
}

static gd_status
add_blocks(gd_transaction *transaction, const pulled *p, size_t first,
           size_t count)
{
    return gd_transaction_add(transaction, p->fps + first, p->lengths + first,
                              p->addresses + first, count, &x.err);
}

static void
commit(gd_transaction *transaction, gd_recipe_header *header)
{
    bool linked;
    if (!CHECK_INT(gd_transaction_commit(transaction, header, &linked, &x.err),
                   GD_OK)) {
        fprintf(stderr, "%s\n", x.err.text);
    }
    gd_transaction_end(transaction);
}

/* Blocks of several groups, each for itself and in no order of theirs, between
 * written ones and zeros. */
static void
test_find_and_add(void)
{
    enum { BLOCKS = 200, NEW = 6 * PULL_BLOCK };
    static uint8_t data[BLOCKS * PULL_BLOCK + 99], own[NEW], want[300000];
    static pulled p;
    gd_recipe_header header;
    size_t length = 0;
    setup_pull(false);
    fill_random(data, sizeof data, 1);
    fill_random(own, sizeof own, 2);
    put("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin("b");
    describe(&p, data, sizeof data);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), BLOCKS + 1);
    /* The last block first: it is a short one. */
    CHECK_INT(add_blocks(transaction, &p, BLOCKS, 1), GD_OK);
    memcpy(want, data + BLOCKS * PULL_BLOCK, 99);
    length = 99;
    for (size_t i = BLOCKS; i-- > 100;) {
        CHECK_INT(add_blocks(transaction, &p, i, 1), GD_OK);
        memcpy(want + length, data + i * PULL_BLOCK, PULL_BLOCK);
        length += PULL_BLOCK;
    }
    for (int i = 0; i < 3; i++) {
        size_t here = 2 * PULL_BLOCK;
        write_all(transaction, own + i * here, here / 2);
        write_all(transaction, own + i * here + here / 2, here / 2);
        memcpy(want + length, own + i * here, here);
        length += here;
        CHECK_INT(add_blocks(transaction, &p, (size_t)i * 30, 30), GD_OK);
        memcpy(want + length, data + i * 30 * PULL_BLOCK, 30 * PULL_BLOCK);
        length += 30 * PULL_BLOCK;
        CHECK_INT(gd_transaction_add_zeros(transaction, 1000, &x.err), GD_OK);
        length += 1000;
    }
    write_all(transaction, own, 77);
    memcpy(want + length, own, 77);
    length += 77;
    commit(transaction, &header);
    CHECK_INT(header.size, length);
    CHECK_INT(header.zero_bytes, 3000);
    CHECK_INT(header.new_bytes, 6 * PULL_BLOCK + 77);
    check_image("b", want, length);
    another_handle();
    check_image("b", want, length);
    teardown();
}

static void
test_find_what_is_not_there(void)
{
    static uint8_t data[20 * PULL_BLOCK];
    static pulled p;
    setup_pull(false);
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin("b");
    describe(&p, data, sizeof data);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 0);
    gd_transaction_end(transaction);
    put("a", data, sizeof data, sizeof data, NULL);
    transaction = begin("b");
    p.lengths[3] = 511; /* a length that does not belong to it */
    p.lengths[4] = 0;
    p.fps[5].bytes[31] ^= 1;
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 17);
    CHECK(p.addresses[3].group == 0 && p.addresses[4].group == 0 &&
          p.addresses[5].group == 0);
    p.count = 0;
    find_blocks(transaction, &p);
    CHECK_INT(add_blocks(transaction, &p, 0, 0), GD_OK);
    gd_transaction_end(transaction);
    teardown();
}

/* What this transaction wrote itself: not synced yet, synced, and in a group
 * that is full. */
static void
test_find_own_blocks(void)
{
    enum { BLOCKS = 100 };
    static uint8_t data[BLOCKS * PULL_BLOCK], want[4 * sizeof data];
    static pulled p;
    gd_recipe_header header;
    setup_pull(false);
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin("a");
    describe(&p, data, sizeof data);
    write_all(transaction, data, 10 * PULL_BLOCK);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 10);
    CHECK_INT(add_blocks(transaction, &p, 0, 10), GD_OK);
    CHECK_INT(add_blocks(transaction, &p, 9, 2), GD_INVALID);
    p.addresses[2].slot++; /* the neighbour's */
    CHECK_INT(add_blocks(transaction, &p, 2, 1), GD_INVALID);
    p.lengths[3]--;
    CHECK_INT(add_blocks(transaction, &p, 3, 1), GD_INVALID);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 9);
    p.lengths[3]++;
    write_all(transaction, data, sizeof data); /* of 64 slots: a second group */
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), BLOCKS);
    CHECK_INT(gd_transaction_keep(transaction, &x.err), GD_OK);
    CHECK_INT(add_blocks(transaction, &p, 0, BLOCKS), GD_OK);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), BLOCKS);
    CHECK_INT(add_blocks(transaction, &p, 50, 50), GD_OK);
    p.lengths[0] = p.lengths[BLOCKS - 1] = 100;
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), BLOCKS - 2);
    commit(transaction, &header);
    CHECK_INT(header.new_bytes, sizeof data);
    memcpy(want, data, 10 * PULL_BLOCK);
    memcpy(want + 10 * PULL_BLOCK, data, 10 * PULL_BLOCK);
    memcpy(want + 20 * PULL_BLOCK, data, sizeof data);
    memcpy(want + 120 * PULL_BLOCK, data, sizeof data);
    memcpy(want + 220 * PULL_BLOCK, data + 50 * PULL_BLOCK, 50 * PULL_BLOCK);
    check_image("a", want, 270 * PULL_BLOCK);
    teardown();
}

/* Each address that find did not return, whoever names it. */
static void
test_add_takes_nothing_on_trust(void)
{
    enum { BLOCKS = 130 };
    static uint8_t data[BLOCKS * PULL_BLOCK];
    static pulled p, all, bad;
    setup_pull(false);
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin("probe");
    describe(&all, data, sizeof data);
    find_blocks(transaction, &all);
    CHECK_INT(count_addresses(&all), BLOCKS);
    gd_transaction_end(transaction);
    /* This one finds blocks of the third group only. */
    transaction = begin("b");
    p = all;
    p.count = 2;
    p.fps[0] = all.fps[BLOCKS - 1];
    p.fps[1] = all.fps[BLOCKS - 2];
    find_blocks(transaction, &p);
    CHECK_INT(p.addresses[0].group, 3);
    CHECK_INT(add_blocks(transaction, &p, 0, 2), GD_OK);

    /* It is there, but nobody holds its group's lock for us. */
    CHECK_INT(add_blocks(transaction, &all, 0, 1), GD_INVALID);
    CHECK_CONTAINS(x.err.text, "slot 0 of group 00000001");
    /* An entry that is not published: its block may not be durable. */
    gd_group *group;
    gd_entry entry;
    REQUIRE(gd_group_open(x.env, x.root, &x.params, 3, O_RDWR, &group, NULL) ==
            GD_OK);
    CHECK_INT(gd_group_read_entries(group, p.addresses[0].slot, 1, &entry,
                                    NULL),
              GD_OK);
    CHECK_INT(gd_group_write_entries(group, 40, 1, &entry, NULL), GD_OK);
    bad = p;
    bad.addresses[0].slot = 40;
    CHECK_INT(add_blocks(transaction, &bad, 0, 1), GD_INVALID);
    static const gd_address wrong[] = {
        {0, 0}, {2, 0}, {3, 63}, {3, 64}, {3, UINT32_MAX}, {99, 0},
        {UINT32_MAX, 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        bad = p;
        bad.addresses[0] = wrong[i];
        CHECK_INT(add_blocks(transaction, &bad, 0, 2), GD_INVALID);
        bad = p; /* also behind a good one */
        bad.addresses[1] = wrong[i];
        CHECK_INT(add_blocks(transaction, &bad, 0, 2), GD_INVALID);
    }
    bad = p;
    bad.fps[1] = p.fps[0];
    CHECK_INT(add_blocks(transaction, &bad, 0, 2), GD_INVALID);
    bad = p;
    bad.lengths[1] = 1;
    CHECK_INT(add_blocks(transaction, &bad, 0, 2), GD_INVALID);
    /* It was freed (which the lock would have prevented), or is damaged. */
    gd_entry gone[] = {{.state = GD_ENTRY_FREED}, entry};
    gone[1].state = GD_ENTRY_DAMAGED;
    for (int i = 0; i < 2; i++) {
        CHECK_INT(gd_group_write_entries(group, p.addresses[0].slot, 1,
                                         &gone[i], NULL),
                  GD_OK);
        CHECK_INT(add_blocks(transaction, &p, 0, 1), GD_INVALID);
    }
    CHECK_INT(gd_group_write_entries(group, p.addresses[0].slot, 1, &entry,
                                     NULL),
              GD_OK);
    gd_group_close(group);
    /* Nothing was appended meanwhile, and it goes on. */
    CHECK_INT(add_blocks(transaction, &p, 0, 2), GD_OK);
    gd_recipe_header header;
    commit(transaction, &header);
    CHECK_INT(header.size, 4 * PULL_BLOCK);
    teardown();
}

/* I6 */
static void
test_find_holds_the_lock(void)
{
    static uint8_t data[10 * PULL_BLOCK];
    static pulled p;
    const uint64_t byte = (UINT64_C(1) << 32) + 1;
    setup_pull(false);
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data, sizeof data, NULL);
    int fd = openat(x.root, "locks/groups", O_RDWR);
    REQUIRE(fd >= 0);
    const gd_env *real = gd_env_posix();
    gd_transaction *transaction = begin("b");
    CHECK_INT(real->lock(real, fd, byte, F_WRLCK), 0);
    describe(&p, data, sizeof data);
    find_blocks(transaction, &p); /* refused: not found */
    CHECK_INT(count_addresses(&p), 0);
    CHECK_INT(real->lock(real, fd, byte, F_UNLCK), 0);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 10);
    CHECK_INT(real->lock(real, fd, byte, F_WRLCK), -EAGAIN);
    CHECK_INT(add_blocks(transaction, &p, 0, 10), GD_OK);
    CHECK_INT(real->lock(real, fd, byte, F_WRLCK), -EAGAIN);
    gd_transaction_end(transaction);
    CHECK_INT(real->lock(real, fd, byte, F_WRLCK), 0);
    close(fd);
    teardown();
}

static void
test_add_within_a_block(void)
{
    static uint8_t data[4 * PULL_BLOCK], want[8 * PULL_BLOCK];
    static pulled p;
    setup_pull(false);
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin("b");
    describe(&p, data, sizeof data);
    write_all(transaction, data, 600);
    find_blocks(transaction, &p); /* may be asked at any time */
    CHECK_INT(count_addresses(&p), 4);
    CHECK_INT(add_blocks(transaction, &p, 0, 1), GD_INVALID);
    CHECK_CONTAINS(x.err.text, "within a block");
    CHECK_INT(gd_transaction_add_zeros(transaction, 512, &x.err), GD_INVALID);
    CHECK_INT(gd_transaction_keep(transaction, &x.err), GD_OK);
    write_all(transaction, data + 600, 1024 - 600);
    CHECK_INT(gd_transaction_add_zeros(transaction, 512, &x.err), GD_OK);
    CHECK_INT(add_blocks(transaction, &p, 0, 4), GD_OK);
    CHECK_INT(gd_transaction_add_zeros(transaction, 100, &x.err), GD_OK);
    CHECK_INT(gd_transaction_add_zeros(transaction, INT64_MAX - 100, &x.err),
              GD_INVALID);
    CHECK_INT(gd_transaction_add_zeros(transaction, UINT64_MAX, &x.err),
              GD_INVALID);
    CHECK_INT(gd_transaction_add_zeros(transaction, 0, &x.err), GD_OK);
    commit(transaction, &(gd_recipe_header){0});
    memcpy(want, data, 1024);
    memcpy(want + 1536, data, sizeof data);
    check_image("b", want, 1536 + sizeof data + 100);
    teardown();
}

/* I5: nobody has bytes to compare. */
static void
test_find_by_value(void)
{
    static uint8_t data[10 * PULL_BLOCK];
    static pulled p;
    setup_pull(true);
    fill_random(data, sizeof data, 1);
    put("a", data, sizeof data, sizeof data, NULL);
    gd_transaction *transaction = begin("b");
    describe(&p, data, sizeof data);
    write_all(transaction, data, sizeof data);
    memset(p.addresses, 0xff, sizeof p.addresses);
    find_blocks(transaction, &p);
    CHECK_INT(count_addresses(&p), 0);
    for (uint32_t i = 0; i < 10; i++) {
        p.addresses[i] = (gd_address){1, i};
    }
    CHECK_INT(add_blocks(transaction, &p, 0, 10), GD_INVALID);
    commit(transaction, &(gd_recipe_header){0});
    check_image("b", data, sizeof data);
    teardown();
}

/* What was kept is found by the next; what was not kept is cut off. */
static void
test_keep(void)
{
    static uint8_t data[100 * PULL_BLOCK];
    static pulled p;
    setup_pull(false);
    fill_random(data, sizeof data, 1);
    gd_transaction *transaction = begin("a");
    CHECK_INT(gd_transaction_keep(transaction, &x.err), GD_OK);
    write_all(transaction, data, 30 * PULL_BLOCK + 10);
    CHECK_INT(gd_transaction_keep(transaction, &x.err), GD_OK);
    write_all(transaction, data + 30 * PULL_BLOCK + 10, 5 * PULL_BLOCK);
    gd_transaction_end(transaction);
    for (int handle = 0; handle < 2; handle++) {
        transaction = begin("a");
        describe(&p, data, sizeof data);
        find_blocks(transaction, &p);
        CHECK_INT(count_addresses(&p), 30);
        gd_transaction_end(transaction);
        another_handle();
    }
    transaction = begin("a");
    find_blocks(transaction, &p);
    CHECK_INT(add_blocks(transaction, &p, 0, 30), GD_OK);
    write_all(transaction, data + 30 * PULL_BLOCK, 70 * PULL_BLOCK);
    gd_recipe_header header;
    commit(transaction, &header);
    CHECK_INT(header.new_bytes, 70 * PULL_BLOCK);
    check_image("a", data, sizeof data);
    teardown();
}

static gd_status
pull_once(const uint8_t *data, pulled *p)
{
    bool linked = false;
    gd_recipe_header header;
    gd_transaction *transaction;
    gd_status s =
        gd_transaction_begin(repo, "b", "project", &gd_global_scope,
                             &transaction, &x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_transaction_write(transaction, data, 20 * PULL_BLOCK, &x.err);
    if (s == GD_OK) {
        s = gd_transaction_find(transaction, p->fps, p->lengths, p->count,
                                p->addresses, &x.err);
    }
    for (size_t i = 20; s == GD_OK && i < p->count; i++) {
        if (p->addresses[i].group != 0) {
            s = add_blocks(transaction, p, i, 1);
            if (s == GD_INVALID) {
                /* What cannot be asked cannot be confirmed. */
                s = gd_fail(&x.err, GD_IO, "%s", "a group cannot be read");
            }
        } else {
            s = gd_transaction_write(transaction, data + i * PULL_BLOCK,
                                     p->lengths[i], &x.err);
        }
    }
    if (s == GD_OK) {
        s = gd_transaction_keep(transaction, &x.err);
    }
    if (s == GD_OK) {
        s = gd_transaction_commit(transaction, &header, &linked, &x.err);
    }
    gd_transaction_end(transaction);
    return s;
}

static void
test_failures_while_pulling(void)
{
    static const int errors[] = {EIO, ENOMEM};
    static uint8_t data[100 * PULL_BLOCK];
    static pulled p;
    fill_random(data, sizeof data, 1);
    for (int kind = 0; kind < 2; kind++) {
        bool struck = true;
        unsigned failed = 0;
        for (uint64_t n = 1; struck; n += SWEEP_STRIDE) {
            setup_pull(false);
            put("a", data + 30 * PULL_BLOCK, 70 * PULL_BLOCK, 4096, NULL);
            another_handle();
            describe(&p, data, sizeof data);
            uint64_t faults = fault_env_faults(&x.f);
            fault_env_fail(&x.f, kind == 0 ? FAULT_ANY : FAULT_ALLOC, n,
                           errors[kind], false);
            gd_status s = pull_once(data, &p);
            struck = fault_env_faults(&x.f) > faults;
            fault_env_heal(&x.f);
            failed += s != GD_OK;
            if (s != GD_OK && !CHECK(struck)) {
                fprintf(stderr, "%s\n", x.err.text);
            }
            if (!scratch_exists(&x, "images/b")) {
                CHECK(s != GD_OK);
                CHECK_INT(pull_once(data, &p), GD_OK);
            }
            check_image("b", data, sizeof data);
            teardown();
        }
        CHECK(failed > 15 / SWEEP_STRIDE);
    }
}

int
main(int argc, char **argv)
{
    BEGIN(argc, argv);
    RUN(test_random_images);
    RUN(test_sizes);
    RUN(test_zeros);
    RUN(test_duplicates_are_stored_once);
    RUN(test_interleaved);
    RUN(test_one_id_twice);
    RUN(test_what_is_refused);
    RUN(test_large_writes);
    RUN(test_changed_in_memory);
    RUN(test_abort);
    RUN(test_abort_after_sync_points);
    RUN(test_failed_sync_at_the_commit);
    RUN(test_failure_after_the_link);
    RUN(test_killed_writers);
    RUN(test_find_and_add);
    RUN(test_find_what_is_not_there);
    RUN(test_find_own_blocks);
    RUN(test_add_takes_nothing_on_trust);
    RUN(test_find_holds_the_lock);
    RUN(test_add_within_a_block);
    RUN(test_find_by_value);
    RUN(test_keep);
    RUN(test_failures_while_pulling);
    return REPORT();
}
