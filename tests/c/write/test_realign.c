/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_realign.c - images whose blocks are stored already, at another phase:
 * they are found there, and the blocks that are cut again have the same bytes,
 * for any contents and any writes.
 */
#include "engine/write/realign.h"

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum {
    MIB = 1 << 20,
    SECTOR = 512,
    MAX_SIZE = 13 * MIB, /* of an image */
};

static scratch x;
static gd_repo *repo;
static uint8_t one[MAX_SIZE], two[MAX_SIZE];

static void
setup(uint32_t block_size)
{
    scratch_init(&x);
    x.params.block_size = block_size;
    x.params.group_slots = 32768;
    repo = scratch_repo_filter(&x);
}

static void
teardown(void)
{
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

/* Stores an image and reads it back. */
static void
put(const char *id, const uint8_t *data, size_t length, size_t piece,
    gd_recipe_header *header)
{
    bool equal = false;
    gd_status s = put_image(repo, id, data, length, piece, header, &x.err);
    if (s == GD_OK) {
        s = get_image(repo, id, data, length, &equal, &x.err);
    }
    if (!CHECK_INT(s, GD_OK) || !CHECK(equal)) {
        fprintf(stderr, "%s: %s\n", id, s == GD_OK ? "" : x.err.text);
    }
}

static uint64_t
changes(void)
{
    return atomic_load(&repo->counters.phase_changes);
}

static uint64_t
samples(void)
{
    return atomic_load(&repo->counters.phase_samples);
}

/* Fills in noise, and among it so many runs of zeros, of any number of
 * sectors. */
static void
fill_sectors(uint8_t *out, size_t length, unsigned stretches, uint64_t seed)
{
    fill_random(out, length, seed);
    for (unsigned i = 0; i < stretches; i++) {
        size_t from = next_random(&seed) % (length / SECTOR) * SECTOR;
        size_t most = next_random(&seed) % 200 * SECTOR;
        memset(out + from, 0, most < length - from ? most : length - from);
    }
}

/* ---- twins ---- */

static const size_t pieces[] = {4 * MIB, MAX_SIZE, 777, 70000, MIB, MIB + 513};

/* The images have two batches and a half; fewer with zeros among them. */
static void
try_twins(uint32_t block_size, unsigned threads, uint64_t seed)
{
    enum { LENGTH = 10 * MIB + 3 * SECTOR };
    gd_recipe_header header;
    scratch_init(&x);
    x.params.block_size = block_size;
    x.params.group_slots = 32768;
    x.params.threads = threads;
    repo = scratch_repo_filter(&x);
    fill_sectors(one, LENGTH, 40, seed);
    put("one", one, LENGTH, 4 * MIB, &header);
    CHECK_INT(changes(), 0);
    /* With the largest blocks a short write has too few for a sample. */
    for (size_t i = 0; i < (block_size == 65536 ? 2 : 6); i++) {
        char id[16];
        size_t phases = block_size / SECTOR - 1;
        size_t before = (1 + next_random(&seed) % phases) * SECTOR;
        uint64_t changed = changes();
        snprintf(id, sizeof id, "twin-%zu", i);
        fill_random(two, before, next_random(&seed));
        memcpy(two + before, one, LENGTH);
        put(id, two, before + LENGTH, pieces[i], &header);
        CHECK_INT(changes(), changed + 1);
        /* Only the bytes put in front, and the end, are new. */
        CHECK(header.new_bytes <= 2 * block_size);
        CHECK_INT(header.size, before + LENGTH);
    }
    teardown();
}

TEST(test_twins_at_all_block_sizes)
{
    for (uint32_t block = 1024; block <= 65536; block *= 2) {
        try_twins(block, block == 4096 ? 2 : 0, block);
    }
}

TEST_WITH(test_twins_at_all_phases, setup(4096), teardown())
{
    enum { LENGTH = 300 * 4096 };
    gd_recipe_header header;
    char id[16];
    fill_random(one, LENGTH, 1);
    put("one", one, LENGTH, LENGTH, &header);
    for (unsigned sectors = 1; sectors <= 8; sectors++) {
        size_t before = sectors * SECTOR;
        fill_random(two, before, sectors);
        memcpy(two + before, one, LENGTH);
        snprintf(id, sizeof id, "twin-%u", sectors);
        put(id, two, before + LENGTH, 33333, &header);
        CHECK_INT(header.new_bytes, before);
        CHECK_INT(changes(), sectors < 8 ? sectors : 7);
    }
}

/* A twin of fewer than a batch is found at its commit. */
TEST(test_small_twins)
{
    enum { BLOCK = 4096 };
    static const size_t blocks[] = {15, 16, 17, 100};
    gd_recipe_header header;
    char id[16];
    setup(BLOCK);
    fill_random(one, 200 * BLOCK, 1);
    put("one", one, 200 * BLOCK, 5000, NULL);
    for (size_t i = 0; i < 4; i++) {
        size_t length = blocks[i] * BLOCK - 99, before = (i + 1) * SECTOR;
        size_t found = (length - before) / BLOCK * BLOCK;
        fill_random(two, before, i + 2);
        memcpy(two + before, one, length - before);
        snprintf(id, sizeof id, "part-%zu", i);
        put(id, two, length, 5000, &header);
        CHECK_INT(header.new_bytes, blocks[i] < 16 ? length : length - found);
    }
    CHECK_INT(changes(), 3);
    teardown();
}

/* Returns the blocks until one in 16 has a hint. */
static void
fill_filter(uint64_t seed)
{
    gd_filter_stats stats;
    do {
        gd_fingerprint other;
        fill_random(other.bytes, sizeof other.bytes, next_random(&seed));
        gd_filter_insert(repo->filter, &other, (gd_address){7, 7});
        gd_filter_get_stats(repo->filter, &stats);
    } while (stats.level < 4);
}

TEST_WITH(test_twins_with_few_hints, setup(4096), teardown())
{
    enum { LENGTH = 9 * MIB };
    gd_recipe_header header;
    fill_filter(5);
    fill_random(one, LENGTH, 1);
    put("one", one, LENGTH, 4 * MIB, NULL);
    memcpy(two, one + 5 * SECTOR, LENGTH - 5 * SECTOR);
    put("two", two, LENGTH - 5 * SECTOR, 4 * MIB, &header);
    CHECK_INT(changes(), 1);
    CHECK(header.new_bytes <= 2 * 4096);
}

TEST(test_twins_by_value)
{
    enum { LENGTH = 5 * MIB };
    gd_recipe_header header;
    scratch_init(&x);
    x.params.group_slots = 32768;
    x.params.by_value = true;
    repo = scratch_repo_filter(&x);
    fill_sectors(one, LENGTH, 9, 1);
    put("one", one, LENGTH, 4 * MIB, NULL);
    memcpy(two, one + 3 * SECTOR, LENGTH - 3 * SECTOR);
    put("two", two, LENGTH - 3 * SECTOR, 4 * MIB, &header);
    CHECK_INT(changes(), 1);
    CHECK(header.new_bytes <= 2 * 4096);
    teardown();
}

/* ---- random images ---- */

/* Composes an image of parts of the first one, mostly from any sector; zeros,
 * and new bytes, of any number of sectors, or of any length. */
static size_t
compose(uint8_t *out, size_t most, const uint8_t *from, size_t length,
        uint64_t *seed)
{
    size_t at = 0;
    while (at < most) {
        size_t here = next_random(seed) % (most / 3) / SECTOR * SECTOR;
        here += next_random(seed) % 8 == 0 ? next_random(seed) % SECTOR : 0;
        here = here < most - at ? here : most - at;
        size_t start = next_random(seed) % (length / SECTOR) * SECTOR;
        uint64_t choice = next_random(seed) % 8;
        if (choice == 0) {
            here = here < 90000 ? here : 90000;
            memset(out + at, 0, here);
        } else if (choice == 1) {
            fill_random(out + at, here, next_random(seed));
        } else {
            here = here < length - start ? here : length - start;
            memcpy(out + at, from + start, here);
        }
        at += here;
    }
    return at;
}

TEST(test_all_bytes_stay)
{
    enum { LENGTH = 6 * MIB, IMAGES = 24 };
    gd_recipe_header header;
    uint64_t seed = 9;
    for (uint32_t block = 1024; block <= 16384; block *= 4) {
        setup(block);
        fill_sectors(one, LENGTH, 60, block);
        put("one", one, LENGTH, 4 * MIB, NULL);
        for (size_t i = 0; i < IMAGES; i++) {
            char id[16];
            size_t most = next_random(&seed) % (i % 3 == 0 ? MIB : 9 * MIB);
            size_t length = compose(two, most, one, LENGTH, &seed);
            size_t piece = i % 2 == 0 ? 1 + next_random(&seed) % 50000
                                      : MIB + next_random(&seed) % MAX_SIZE;
            snprintf(id, sizeof id, "image-%zu", i);
            put(id, two, length, piece, &header);
            CHECK_INT(header.size, length);
        }
        CHECK(changes() > (block == 1024 ? 0 : IMAGES / 4));
        teardown();
    }
}

/* Each block, as cut, is counted once, and so is each block of zeros. */
TEST(test_counts)
{
    enum { BLOCK = 4096, LENGTH = 400 * BLOCK };
    gd_recipe_header header;
    setup(BLOCK);
    fill_random(one, LENGTH, 1);
    memset(one + 100 * BLOCK, 0, 50 * BLOCK);
    put("one", one, LENGTH, LENGTH, NULL);
    CHECK_INT(atomic_load(&repo->counters.zero_blocks), 50);
    fill_random(two, SECTOR, 2);
    memcpy(two + SECTOR, one, LENGTH);
    put("two", two, SECTOR + LENGTH, LENGTH, &header);
    CHECK_INT(changes(), 1);
    CHECK_INT(header.zero_bytes, 50 * BLOCK);
    CHECK_INT(header.new_bytes, SECTOR);
    CHECK_INT(atomic_load(&repo->counters.zero_blocks), 100);
    CHECK_INT(atomic_load(&repo->counters.blocks), 350 + 351);
    CHECK_INT(atomic_load(&repo->counters.hits), 350);
    CHECK_INT(atomic_load(&repo->counters.misses), 351);
    teardown();
}

/* After some megabytes, the phase is the first one again. */
TEST_WITH(test_phase_lost_and_found, setup(4096), teardown())
{
    enum { PART = 4 * MIB };
    gd_recipe_header header;
    fill_random(one, 3 * PART, 1);
    put("one", one, 3 * PART, PART, NULL);
    memcpy(two, one + SECTOR, 2 * PART);
    memcpy(two + 2 * PART, one + 2 * PART, PART);
    put("two", two, 3 * PART, PART, &header);
    CHECK_INT(changes(), 2);
    CHECK(header.new_bytes <= 3 * 4096);
}

/* ---- contents that are not found ---- */

/* Filled blocks are equal at all phases, and in all images. */
TEST(test_what_recurs_is_no_find)
{
    enum { BLOCK = 4096, PART = 32 * BLOCK };
    setup(BLOCK);
    fill_random(one, PART, 1);
    memset(one + BLOCK, 0xff, BLOCK);
    put("one", one, PART, PART, NULL);
    fill_random(two, 8 * PART, 2);
    for (size_t i = 0; i < 8; i++) { /* at the places of pairs */
        memset(two + i * PART, 0xff, 2 * BLOCK);
    }
    uint64_t before = samples();
    put("two", two, 8 * PART, 8 * PART, NULL);
    CHECK_INT(samples() - before, 8 * 7);
    CHECK_INT(changes(), 0);
    teardown();
}

/* One find is chance; so are more, if as many are found without. */
TEST(test_few_finds_are_not_followed)
{
    enum { BLOCK = 4096, PART = 32 * BLOCK };
    setup(BLOCK);
    fill_random(one, 8 * PART, 1);
    put("one", one, 8 * PART, PART, NULL);
    fill_random(two, 8 * PART, 2);
    memcpy(two, one + SECTOR, 3 * BLOCK);
    uint64_t before = samples();
    put("two", two, 8 * PART, 8 * PART, NULL);
    CHECK_INT(samples() - before, 8 * 7);
    CHECK_INT(changes(), 0);
    teardown();
}

/* Of 64 pairs, so many are found at a phase; and 16 blocks of 256 at the
 * current one. */
static void
try_finds(unsigned finds, unsigned wanted)
{
    enum { BLOCK = 4096, PART = 4 * BLOCK, LENGTH = 64 * PART };
    setup(BLOCK);
    fill_random(one, LENGTH, 1);
    put("one", one, LENGTH, LENGTH, NULL);
    fill_filter(5);
    fill_random(two, LENGTH, 2);
    for (unsigned i = 0; i < 16; i++) {
        size_t at = i * PART + 3 * BLOCK;
        memcpy(two + at, one + at, BLOCK);
    }
    for (unsigned i = 0; i < finds; i++) {
        memcpy(two + i * PART, one + i * PART + SECTOR, 2 * BLOCK);
    }
    put("two", two, LENGTH, LENGTH, NULL);
    if (wanted == 0) {
        CHECK_INT(atomic_load(&repo->counters.hits), 16);
    }
    CHECK_INT(changes(), wanted);
    teardown();
}

TEST(test_finds_are_worth_it)
{
    try_finds(8, 0);
    try_finds(9, 1);
}

/* Blocks that this very transaction stored count as found. */
TEST(test_own_blocks_are_found)
{
    enum { BLOCK = 4096, HALF = 1024 * BLOCK };
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked;
    setup(BLOCK);
    fill_random(one, HALF, 1);
    REQUIRE(gd_transaction_begin(repo, "one", "project", &gd_global_scope,
                                 &transaction, &x.err) == GD_OK);
    CHECK_INT(gd_transaction_write(transaction, one, HALF, &x.err), GD_OK);
    put("two", one + SECTOR, HALF - SECTOR, HALF, NULL);
    CHECK_INT(gd_transaction_write(transaction, one, HALF, &x.err), GD_OK);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &x.err),
              GD_OK);
    gd_transaction_end(transaction);
    CHECK_INT(header.new_bytes, HALF);
    CHECK_INT(changes(), 0);
    teardown();
}

TEST_WITH(test_unique_data_is_hardly_sampled, setup(4096), teardown())
{
    enum { BLOCKS = MAX_SIZE / 1024 };
    fill_random(one, MAX_SIZE, 1);
    for (uint64_t i = 0; i < 3; i++) {
        char id[16];
        snprintf(id, sizeof id, "image-%d", (int)i);
        put(id, one, MAX_SIZE, MAX_SIZE, NULL);
        fill_random(one, MAX_SIZE, i + 2);
    }
    CHECK_INT(changes(), 0);
    CHECK(samples() > 0);
    CHECK(samples() <= 3 * (56 * 4));
}

/* The long-term limit is one block in 16. */
TEST_WITH(test_samples_are_paid_for, setup(4096), teardown())
{
    enum { BLOCKS = 64, BATCHES = 4000 };
    static gd_block blocks[BLOCKS];
    static uint8_t data[BLOCKS * 4096];
    gd_hashing *hashing;
    gd_lookup *lookup;
    gd_realign *phase;
    REQUIRE(gd_hashing_open(repo, &gd_global_scope, &hashing, &x.err) ==
            GD_OK);
    REQUIRE(gd_lookup_open(repo, &gd_global_scope, &lookup, &x.err) == GD_OK);
    REQUIRE(gd_realign_open(repo, hashing, lookup, &phase, &x.err) == GD_OK);
    fill_random(data, sizeof data, 1);
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = (gd_block){.data = data + i * 4096, .length = 4096};
    }
    for (size_t i = 0; i < BATCHES; i++) {
        CHECK_INT(gd_realign_choose(phase, blocks, BLOCKS, 0), 0);
        gd_realign_note(phase, BLOCKS, 0);
    }
    CHECK(samples() <= 2 * 448 + BLOCKS * BATCHES / 16);
    CHECK(samples() >= BLOCKS * BATCHES / 16);
    /* Finds pay for more; and a sample that finds a block does not count. */
    uint64_t before = samples();
    gd_realign_note(phase, 4 * 56, 4 * 56);
    CHECK_INT(gd_realign_choose(phase, blocks, BLOCKS, BLOCKS / 16 + 1), 0);
    CHECK_INT(samples(), before);
    CHECK_INT(gd_realign_choose(phase, blocks, BLOCKS, BLOCKS / 16), 0);
    CHECK_INT(gd_realign_choose(phase, blocks, BLOCKS, 0), 0);
    CHECK_INT(samples(), before + 2 * 56);
    gd_realign_close(x.env, phase);
    gd_lookup_close(lookup);
    gd_hashing_close(hashing);
}

/* With another phase at each block, few are found, and the image takes no more
 * than twice as long. */
TEST(test_another_phase_at_each_block)
{
    enum { BLOCK = 4096, STEP = BLOCK + SECTOR, BLOCKS = MAX_SIZE / STEP };
    gd_recipe_header header;
    setup(BLOCK);
    fill_random(one, BLOCKS * BLOCK, 1);
    put("one", one, BLOCKS * BLOCK, 4 * MIB, NULL);
    for (size_t i = 0; i < BLOCKS; i++) {
        memcpy(two + i * STEP, one + i * BLOCK, BLOCK);
        fill_random(two + i * STEP + BLOCK, SECTOR, i);
    }
    uint64_t before = samples();
    put("two", two, BLOCKS * STEP, 4 * MIB, &header);
    CHECK(header.new_bytes <= BLOCKS * STEP);
    CHECK(samples() - before <= 1024 + BLOCKS / 4);
    CHECK(changes() <= 4);
    teardown();
}

/* ---- images that are not cut again ---- */

static void
try_without(uint32_t block_size, uint32_t minimum, uint32_t average,
            bool filter)
{
    enum { LENGTH = 5 * MIB };
    scratch_init(&x);
    x.params.block_size = block_size;
    x.params.cut_minimum = minimum;
    x.params.cut_average = average;
    x.params.group_slots = 32768;
    repo = filter ? scratch_repo_filter(&x) : scratch_repo(&x);
    fill_random(one, LENGTH, 1);
    put("one", one, LENGTH, MIB, NULL);
    put("two", one + SECTOR, LENGTH - SECTOR, MIB, NULL);
    CHECK_INT(samples(), 0);
    CHECK_INT(changes(), 0);
    teardown();
}

TEST(test_where_there_is_no_other_phase)
{
    try_without(512, 0, 0, true);
    try_without(16384, 1024, 4096, true);
    try_without(4096, 0, 0, false);
}

/* A caller that finds blocks by fingerprint, and adds them, has cut
 * already. */
TEST(test_told_blocks_are_not_cut_anew)
{
    enum { BLOCK = 4096, BLOCKS = 1500, LENGTH = BLOCKS * BLOCK };
    gd_transaction *transaction;
    gd_recipe_header header;
    gd_address address;
    const gd_fingerprint nobodys = {{7}};
    const uint32_t length = BLOCK;
    bool linked;
    setup(BLOCK);
    fill_random(one, LENGTH, 1);
    put("one", one, LENGTH, LENGTH, NULL);
    uint64_t before = samples();
    REQUIRE(gd_transaction_begin(repo, "two", "project", &gd_global_scope,
                                 &transaction, &x.err) == GD_OK);
    CHECK_INT(gd_transaction_find(transaction, &nobodys, &length, 1, &address,
                                  &x.err), GD_OK);
    CHECK_INT(address.group, 0);
    CHECK_INT(gd_transaction_write(transaction, one + SECTOR, LENGTH - BLOCK,
                                   &x.err), GD_OK);
    CHECK_INT(gd_transaction_add_zeros(transaction, 77, &x.err), GD_OK);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &x.err),
              GD_OK);
    gd_transaction_end(transaction);
    CHECK_INT(header.new_bytes, LENGTH - BLOCK);
    CHECK_INT(samples(), before);
    teardown();
}

/* A sync point in the middle has no influence on the phase. */
TEST_WITH(test_keeping, setup(4096), teardown())
{
    enum { LENGTH = 5 * MIB };
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked, equal;
    fill_random(one, LENGTH, 1);
    put("one", one, LENGTH, LENGTH, NULL);
    memcpy(two, one + SECTOR, LENGTH - SECTOR);
    REQUIRE(gd_transaction_begin(repo, "two", "project", &gd_global_scope,
                                 &transaction, &x.err) == GD_OK);
    for (size_t at = 0; at < LENGTH - SECTOR;) {
        size_t here = LENGTH - SECTOR - at < 99999 ? LENGTH - SECTOR - at
                                                   : 99999;
        CHECK_INT(gd_transaction_write(transaction, two + at, here, &x.err),
                  GD_OK);
        at += here;
        if (at % 3 == 0) {
            CHECK_INT(gd_transaction_sync(transaction, &x.err), GD_OK);
        }
    }
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &x.err),
              GD_OK);
    gd_transaction_end(transaction);
    CHECK_INT(get_image(repo, "two", two, LENGTH - SECTOR, &equal, &x.err),
              GD_OK);
    CHECK(equal);
}

/* ---- under faults ---- */

/* Stores a twin, after the nth fault from its beginning: the image is there,
 * or not. *struck: there was a fault. */
static gd_status
put_under_fault(fault_call call, uint64_t n, int sys_errno, bool *struck)
{
    enum { LENGTH = 100 * 1024 };
    bool equal = false;
    setup(1024);
    fill_sectors(one, LENGTH, 2, 1);
    put("one", one, LENGTH, LENGTH, NULL);
    fill_random(two, SECTOR, 2);
    memcpy(two + SECTOR, one, LENGTH);
    fault_env_fail(&x.f, call, n, sys_errno, false);
    gd_status s = put_image(repo, "two", two, SECTOR + LENGTH, 33333, NULL,
                            &x.err);
    *struck = fault_env_faults(&x.f) > 0;
    fault_env_heal(&x.f);
    gd_error err;
    gd_status got =
        get_image(repo, "two", two, SECTOR + LENGTH, &equal, &err);
    if (!CHECK(got == GD_OK ? equal : got == GD_NOTFOUND && s != GD_OK)) {
        fprintf(stderr, "%s %d: %s\n", fault_call_name(call), (int)n,
                err.text);
    }
    return s;
}

TEST(test_faults_while_cutting_anew)
{
    static const struct {
        fault_call call;
        int sys_errno;
    } kinds[] = {{FAULT_ANY, EIO}, {FAULT_ALLOC, ENOMEM}};
    for (size_t k = 0; k < 2; k++) {
        unsigned failed = 0, plain = 0;
        bool struck = true;
        for (uint64_t n = 1; struck; n++) {
            gd_status s = put_under_fault(kinds[k].call, n,
                                          kinds[k].sys_errno, &struck);
            failed += s != GD_OK;
            plain += s == GD_OK && changes() == 0;
            teardown();
        }
        CHECK(failed > 5);
        /* A look-up that fails finds no block; and without memory to cut it
         * into, the batch stays unchanged. */
        CHECK(plain >= (k == 0 ? 1 : 3));
    }
}
