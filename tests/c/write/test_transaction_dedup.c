/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_transaction_dedup.c - the blocks that a transaction looks up
 * (volumes.rst, "Hints"): with any hint, the image is the same.
 */
#include "engine/write/transaction.h"

#include "tests/c/support/check.h"
#include "tests/c/support/transaction_fixture.h"

enum { BLOCK = 4096, BLOCKS = 3000, SIZE = BLOCKS * BLOCK }; /* 3 batches */

static uint8_t one[SIZE], two[SIZE];

static void
setup(bool by_value)
{
    transaction_setup();
    gd_repo_close(the_repo);
    the_scratch.params.group_slots = 32768;
    the_scratch.params.by_value = by_value;
    the_repo = scratch_repo_filter(&the_scratch);
    fill_random(one, SIZE, 1);
    fill_random(two, SIZE, 2);
}

static uint64_t
put(const char *id, const uint8_t *data, gd_dedup dedup)
{
    gd_recipe_header header;
    bool linked;
    gd_transaction *t = begin_image(id);
    gd_transaction_set_lookup_mode(t, dedup);
    write_all(t, data, SIZE);
    CHECK_INT(gd_transaction_commit(t, &header, &linked, &the_scratch.err),
              GD_OK);
    gd_transaction_end(t);
    check_stored_image(id, data, SIZE);
    return header.new_bytes / BLOCK;
}

static uint64_t
skipped(void)
{
    return atomic_load(&the_repo->counters.skipped);
}

static uint64_t
hints(void)
{
    gd_filter_stats stats;
    the_repo->index->get_stats(the_repo->index, &stats);
    return stats.hints;
}

/* No block is looked up, and no later upload finds the blocks (I14). */
TEST_WITH(test_off, setup(false), transaction_teardown())
{
    CHECK_INT(put("first", one, GD_DEDUP_OFF), BLOCKS);
    CHECK_INT(hints(), 0);
    CHECK_INT(put("again", one, GD_DEDUP_OFF), BLOCKS);
    CHECK_INT(skipped(), 2 * BLOCKS);
    CHECK_INT(atomic_load(&the_repo->counters.candidates), 0);
    CHECK_INT(put("looked-for", one, GD_DEDUP_ALL), BLOCKS);
    CHECK(hints() > 0);
    CHECK_INT(put("found", one, GD_DEDUP_ALL), 0);
    CHECK_INT(skipped(), 2 * BLOCKS);
}

/* I14: equal blocks of one upload are stored as often as they come, and no
 * other upload finds them, as neighbours neither. */
static void
check_copies(bool by_value)
{
    setup(by_value);
    memcpy(one + SIZE / 2, one, SIZE / 2);
    CHECK_INT(put("copies", one, GD_DEDUP_OFF), BLOCKS);
    CHECK(gd_features_is_set(the_scratch.env, the_scratch.root,
                             GD_FEATURE_NODEDUP));
    CHECK_INT(put("shared", one, GD_DEDUP_ALL), BLOCKS / 2);
    CHECK_INT(put("copies-again", one, GD_DEDUP_OFF), BLOCKS);
    CHECK_INT(put("shared-again", one, GD_DEDUP_ALL), 0);
    transaction_teardown();
}

TEST(test_copies_stay_apart)
{
    check_copies(false);
    check_copies(true);
}

static uint64_t
unmarked(void)
{
    return atomic_load(&the_repo->counters.unmarked);
}

/* Another program holds the lock, for a moment or until it is closed. */
static gd_locks *
hold_features(void)
{
    gd_locks *other = NULL;
    gd_error *err = &the_scratch.err;
    CHECK_INT(gd_locks_open(the_scratch.env, the_scratch.root, &other, err),
              GD_OK);
    CHECK_INT(gd_locks_lock_features_shared(other, GD_FEATURE_NODEDUP, err),
              GD_OK);
    return other;
}

/* While a program that does not know the mark has the repository open, an
 * upload is not looked up, and its blocks are ordinary ones (N15.2). */
TEST_WITH(test_beside_an_older_program, setup(false), transaction_teardown())
{
    gd_locks *older = hold_features();
    CHECK_INT(put("first", one, GD_DEDUP_OFF), BLOCKS);
    CHECK_INT(unmarked(), BLOCKS);
    CHECK(!gd_features_is_set(the_scratch.env, the_scratch.root,
                              GD_FEATURE_NODEDUP));
    CHECK_INT(put("found", one, GD_DEDUP_ALL), 0);
    gd_locks_close(older);
    CHECK_INT(put("second", one, GD_DEDUP_OFF), BLOCKS);
    CHECK(gd_features_is_set(the_scratch.env, the_scratch.root,
                             GD_FEATURE_NODEDUP));
}

static gd_locks *held; /* until the next sleep */

static void
release_features(GD_UNUSED const gd_env *env, GD_UNUSED unsigned ms)
{
    if (held != NULL) {
        gd_locks_close(held);
        held = NULL;
    }
}

/* Two programs that set a feature at once are not in each other's way. */
TEST_WITH(test_a_short_wait, setup(false), transaction_teardown())
{
    the_scratch.f.env.sleep_ms = release_features;
    held = hold_features();
    CHECK_INT(put("first", one, GD_DEDUP_OFF), BLOCKS);
    CHECK(held == NULL);
    CHECK_INT(unmarked(), 0);
    CHECK_INT(put("later", one, GD_DEDUP_ALL), BLOCKS);
}

/* Once the older program is closed, the rest of an upload gets the mark.  The
 * upload waits for it once only. */
static unsigned sleeps;

static void
count_sleep(GD_UNUSED const gd_env *env, GD_UNUSED unsigned ms)
{
    sleeps++;
}

TEST_WITH(test_the_older_program_is_closed, setup(false),
          transaction_teardown())
{
    gd_recipe_header header;
    bool linked;
    sleeps = 0;
    the_scratch.f.env.sleep_ms = count_sleep;
    held = hold_features();
    gd_transaction *t = begin_image("first");
    gd_transaction_set_lookup_mode(t, GD_DEDUP_OFF);
    write_all(t, one, SIZE / 2);
    CHECK(sleeps > 0 && sleeps < 50);
    CHECK(unmarked() > 0);
    gd_locks_close(held);
    held = NULL;
    write_all(t, one + SIZE / 2, SIZE / 2);
    CHECK_INT(gd_transaction_commit(t, &header, &linked, &the_scratch.err),
              GD_OK);
    gd_transaction_end(t);
    CHECK(unmarked() > 0 && unmarked() < BLOCKS);
    CHECK_INT(put("later", one, GD_DEDUP_ALL), BLOCKS - unmarked());
}

/* A second copy of a whole file is found, and of one with another end all
 * batches that have a sampled block in common. */
static void
check_probe(bool by_value)
{
    setup(by_value);
    CHECK_INT(put("first", one, GD_DEDUP_PROBE), BLOCKS);
    CHECK_INT(skipped(), BLOCKS);
    CHECK_INT(put("again", one, GD_DEDUP_PROBE), 0);
    CHECK_INT(put("other", two, GD_DEDUP_PROBE), BLOCKS);
    CHECK_INT(skipped(), 2 * BLOCKS);
    fill_random(two, SIZE, 3);
    memcpy(two, one, SIZE / 2);
    CHECK_INT(put("half", two, GD_DEDUP_PROBE), BLOCKS / 2);
    transaction_teardown();
}

TEST(test_probe)
{
    check_probe(false);
    check_probe(true);
}

/* With few hints a sample is larger, without an index it finds nothing. */
TEST_WITH(test_probe_without_index, setup(false), transaction_teardown())
{
    gd_repo_close(the_repo);
    the_repo = scratch_repo(&the_scratch);
    CHECK_INT(put("first", one, GD_DEDUP_PROBE), BLOCKS);
    CHECK_INT(put("again", one, GD_DEDUP_PROBE), BLOCKS);
}

/* Blocks at another phase are found, unless a hint requests to skip them. */
TEST_WITH(test_no_phases, setup(false), transaction_teardown())
{
    put("first", one, GD_DEDUP_ALL);
    uint64_t samples = atomic_load(&the_repo->counters.phase_samples);
    memset(two, 0xee, 512);
    memcpy(two + 512, one, SIZE - 512);
    CHECK_INT(put("skipped", two, GD_DEDUP_OFF), BLOCKS);
    CHECK_INT(put("probed", two, GD_DEDUP_PROBE), BLOCKS);
    CHECK_INT(atomic_load(&the_repo->counters.phase_samples), samples);
    memset(two, 0xdd, 512);
    fill_random(two + SIZE / 2, SIZE / 2, 4);
    CHECK(put("looked-for", two, GD_DEDUP_ALL) < BLOCKS);
}

/* Prefetched tables answer without any index; a group of another scope, and
 * one that does not exist, are left out. */
TEST_WITH(test_expect, setup(false), transaction_teardown())
{
    gd_recipe_header header;
    bool linked;
    put("first", one, GD_DEDUP_ALL);
    gd_repo_close(the_repo);
    the_repo = scratch_repo(&the_scratch);
    for (int project = 0; project < 2; project++) {
        gd_scope scope = {{(uint8_t)project}};
        gd_transaction *t;
        const uint32_t groups[] = {77, 1, 1};
        char id[2] = {(char)('a' + project), '\0'};
        REQUIRE(gd_transaction_begin(the_repo, id, "", &scope, &t,
                                     &the_scratch.err) == GD_OK);
        gd_transaction_prefetch_groups(t, groups, 3);
        write_all(t, one, SIZE);
        CHECK_INT(gd_transaction_prefetched_groups(t),
                  project == 0 ? SIZE : 0);
        CHECK_INT(gd_transaction_commit(t, &header, &linked,
                                        &the_scratch.err), GD_OK);
        CHECK_INT(header.new_bytes, project == 0 ? 0 : SIZE);
        gd_transaction_end(t);
    }
}
