/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_merge.c - merging (N10): the image stays the same to the byte, even if
 * it is replaced or deleted meanwhile; only equal, live and published blocks
 * are merged; and a fault anywhere leaves only files that the accounting
 * removes.
 */
#include "engine/maintenance/merge.h"

#include "engine/base/coding.h"
#include "engine/files/group.h"
#include "engine/files/image_delete.h"
#include "engine/format/runs.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { BLOCK = 512, BLOCKS = 90, LENGTH = BLOCKS * BLOCK + 33, PAIR = 16 };

static scratch x;
static gd_repo *repo;
static uint8_t data[LENGTH], other[LENGTH];

/* The addresses of an image's blocks, one after the other. */
typedef struct places {
    size_t count;
    uint64_t numbers[2 * BLOCKS];
} places;

/* Stores two images of the same blocks separately, since there is no filter;
 * in the middle and at the end of them are zeros. */
static void
setup(const char *digest, bool by_value)
{
    scratch_init(&x);
    x.params.block_size = BLOCK;
    x.params.segment_size = 4096;
    x.params.by_value = by_value;
    strcpy(x.params.digest, digest);
    fill_random(data, LENGTH, 1);
    memset(data + 40 * BLOCK, 0, 5 * BLOCK);
    memset(data + LENGTH - 33, 0, 33);
    fill_random(other, LENGTH, 2);
    repo = scratch_repo(&x);
    CHECK_INT(put_image(repo, "old", data, LENGTH, LENGTH, NULL, &x.err),
              GD_OK);
    CHECK_INT(put_image(repo, "new", data, LENGTH, LENGTH, NULL, &x.err),
              GD_OK);
}

static void
teardown(void)
{
    gd_repo_close(repo);
    CHECK_INT(scratch_destroy(&x), 0);
}

static places
places_of(const char *image_id)
{
    places p = {0};
    gd_image *image;
    if (!CHECK_INT(gd_image_open(repo, image_id, NULL, &image, &x.err),
                   GD_OK)) {
        return p;
    }
    for (uint64_t number = 1; number <= gd_image_pages(image); number++) {
        gd_recipe_page page;
        CHECK_INT(gd_image_extents(image, number, &page, &x.err), GD_OK);
        for (uint32_t i = 0; i < page.count; i++) {
            const gd_extent *e = &page.extents[i];
            for (uint32_t k = 0; k < e->blocks; k++) {
                p.numbers[p.count++] =
                    (uint64_t)e->group << GD_SLOT_BITS | (e->slot + k);
            }
        }
    }
    gd_image_close(image);
    return p;
}

static int
by_old(const void *a, const void *b)
{
    uint64_t x = gd_get64(a), y = gd_get64(b);
    return x < y ? -1 : x > y;
}

/* Returns a mapping of every `step`th block that is not there already; pairs
 * has room for all. */
static gd_mapping
mapping(const places *from, const places *to, size_t step, uint8_t *pairs)
{
    size_t count = 0;
    for (size_t i = 0; i < from->count; i += step) {
        if (from->numbers[i] != to->numbers[i]) {
            gd_put64(pairs + PAIR * count, from->numbers[i]);
            gd_put64(pairs + PAIR * count + 8, to->numbers[i]);
            count++;
        }
    }
    qsort(pairs, count, PAIR, by_old);
    return (gd_mapping){pairs, count};
}

static bool
reads(const char *image_id, const uint8_t *wanted)
{
    bool equal;
    return get_image(repo, image_id, wanted, LENGTH, &equal, &x.err) ==
               GD_OK &&
           equal;
}

static unsigned
spooled(const char *prefix)
{
    return scratch_count(&x, "spool", prefix, NULL);
}

static gd_merge *
merge_all(const char *image_id, const char *to)
{
    uint8_t pairs[2 * BLOCKS * PAIR];
    places from = places_of(image_id), into = places_of(to);
    gd_merge *merge = NULL;
    if (!CHECK_INT(gd_merge_open(repo, image_id,
                                 mapping(&from, &into, 1, pairs), &merge,
                                 &x.err),
                   GD_OK)) {
        fprintf(stderr, "%s\n", x.err.text);
        exit(1);
    }
    return merge;
}

static bool
exchange(gd_merge *merge)
{
    bool done = false;
    CHECK_INT(gd_merge_exchange(merge, &done, &x.err), GD_OK);
    return done;
}

/* ---- merged blocks ---- */

static void
check_step(size_t step)
{
    uint8_t pairs[2 * BLOCKS * PAIR];
    places old = places_of("old"), new = places_of("new");
    gd_recipe_header before, after;
    gd_merge *merge;
    gd_image *image;
    bool done;
    REQUIRE(gd_image_open(repo, "new", NULL, &image, NULL) == GD_OK);
    before = *gd_image_header(image);
    gd_mapping map = mapping(&new, &old, step, pairs);
    REQUIRE(gd_merge_open(repo, "new", map, &merge, &x.err) == GD_OK);
    const gd_merge_facts *facts = gd_merge_facts_of(merge);
    CHECK_INT(facts->replaced, map.count);
    CHECK_INT(facts->replaced_bytes, map.count * BLOCK);
    CHECK_INT(facts->collision_count, 0);
    CHECK(scratch_exists(&x, gd_merge_recipe(merge)->name));
    CHECK_INT(gd_merge_exchange(merge, &done, &x.err), GD_OK);
    CHECK(done);
    after = gd_merge_recipe(merge)->header;
    gd_merge_close(merge);
    /* A reader of the old recipe can read on. */
    size_t read = 0;
    uint8_t out[LENGTH];
    CHECK_INT(gd_image_read(image, out, LENGTH, 0, &read, &x.err), GD_OK);
    CHECK(memcmp(out, data, LENGTH) == 0);
    gd_image_close(image);
    CHECK(reads("new", data));
    CHECK(memcmp(before.upload_id, after.upload_id, GD_ID_SIZE) == 0);
    CHECK(memcmp(before.transaction_id, after.transaction_id, GD_ID_SIZE) !=
          0);
    CHECK_INT(after.size, before.size);
    CHECK_INT(after.zero_bytes, before.zero_bytes);
    CHECK_INT(after.new_bytes, before.new_bytes);
    CHECK_INT(after.stored_bytes, before.stored_bytes);
    CHECK_INT(after.created, before.created);
    CHECK_CONTAINS(after.project, before.project);
    places now = places_of("new");
    REQUIRE(now.count == new.count);
    for (size_t i = 0; i < now.count; i++) {
        CHECK_INT(now.numbers[i],
                  i % step == 0 ? old.numbers[i] : new.numbers[i]);
    }
    /* The accounting removes these two; no other file is left. */
    CHECK_INT(spooled("M-"), 1);
    CHECK_INT(spooled("O-"), 1);
    CHECK_INT(spooled("X-"), 0);
}

TEST(test_merge)
{
    static const size_t steps[] = {1, 2, 7};
    for (size_t i = 0; i < 3; i++) {
        setup("sha256", false);
        check_step(steps[i]);
        teardown();
        setup("xxh3-128", true);
        check_step(steps[i]);
        teardown();
    }
}

/* An extent is split where its blocks are no longer contiguous, and joined
 * where they now are. */
TEST_WITH(test_extents_are_cut_anew, setup("sha256", false), teardown())
{
    uint8_t pairs[2 * BLOCKS * PAIR];
    places old = places_of("old"), new = places_of("new");
    gd_merge *merge;
    REQUIRE(gd_merge_open(repo, "new", mapping(&new, &old, 2, pairs), &merge,
                          &x.err) == GD_OK);
    CHECK_INT(gd_merge_recipe(merge)->header.fragments, 85);
    CHECK(exchange(merge));
    gd_merge_close(merge);
    merge = merge_all("new", "old");
    /* There are two groups of 64 slots. */
    CHECK_INT(gd_merge_recipe(merge)->header.fragments, 2);
    CHECK(exchange(merge));
    gd_merge_close(merge);
    CHECK(reads("new", data));
}

TEST_WITH(test_nothing_to_merge, setup("sha256", false), teardown())
{
    uint8_t pairs[2 * BLOCKS * PAIR];
    places old = places_of("old"), new = places_of("new");
    gd_merge *merge;
    bool done;
    REQUIRE(gd_merge_open(repo, "old", mapping(&new, &old, 1, pairs), &merge,
                          &x.err) == GD_OK);
    CHECK_INT(gd_merge_facts_of(merge)->replaced, 0);
    CHECK(gd_merge_recipe(merge) == NULL);
    CHECK_INT(gd_merge_exchange(merge, &done, &x.err), GD_INVALID);
    CHECK(!done);
    gd_merge_close(merge);
    CHECK_INT(spooled("M-"), 0);
}

TEST_WITH(test_bad_mappings, setup("sha256", false), teardown())
{
    uint8_t pairs[2 * PAIR] = {0};
    gd_merge *merge;
    gd_mapping two = {pairs, 2};
    static const uint64_t bad[][4] = {
        {32768, 32768, 40000, 40001},           /* to itself */
        {1, 40000, 40001, 40002},               /* group 0 */
        {40000, UINT64_C(1) << 40, 40001, 50000},
        {40001, 50000, 40000, 50001},           /* not sorted */
        {40001, 50000, 40001, 50001},           /* twice */
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        for (int k = 0; k < 4; k++) {
            gd_put64(pairs + 8 * k, bad[i][k]);
        }
        CHECK_INT(gd_merge_open(repo, "new", two, &merge, &x.err),
                  GD_INVALID);
    }
    CHECK_INT(gd_merge_open(repo, "none", (gd_mapping){NULL, 0}, &merge,
                            &x.err),
              GD_NOTFOUND);
}

/* ---- blocks that are not merged ---- */

static void
expect(uint64_t from, uint64_t to, gd_status wanted, const char *words)
{
    uint8_t pair[PAIR];
    gd_merge *merge;
    gd_put64(pair, from);
    gd_put64(pair + 8, to);
    gd_status s = gd_merge_open(repo, "new", (gd_mapping){pair, 1}, &merge,
                                &x.err);
    CHECK_INT(s, wanted);
    if (s == GD_OK) {
        gd_merge_close(merge);
    } else {
        CHECK_CONTAINS(x.err.text, words);
        CHECK_INT(spooled("M-"), 0);
    }
}

static void
set_state(uint64_t number, uint8_t state)
{
    gd_group *group;
    gd_entry entry;
    uint32_t slot = (uint32_t)number & (GD_MAX_SLOTS - 1);
    CHECK_INT(gd_group_open(x.env, x.root, &x.params,
                            (uint32_t)(number >> GD_SLOT_BITS), O_RDWR, &group,
                            &x.err),
              GD_OK);
    CHECK_INT(gd_group_read_entries(group, slot, 1, &entry, &x.err), GD_OK);
    entry.state = state;
    CHECK_INT(gd_group_write_entries(group, slot, 1, &entry, &x.err), GD_OK);
    gd_group_close(group);
}

TEST_WITH(test_unequal_blocks, setup("sha256", false), teardown())
{
    places old = places_of("old"), new = places_of("new");
    expect(new.numbers[3], old.numbers[4], GD_CORRUPT, "is not equal");
    expect(new.numbers[3], old.numbers[3], GD_OK, "");
    CHECK(reads("new", data));
}

TEST(test_target_that_is_not_live)
{
    static const uint8_t states[] = {GD_ENTRY_FREED, GD_ENTRY_DAMAGED,
                                     GD_ENTRY_VOID};
    for (size_t i = 0; i < sizeof states; i++) {
        setup("sha256", false);
        places old = places_of("old"), new = places_of("new");
        set_state(old.numbers[3], states[i]);
        expect(new.numbers[3], old.numbers[3], GD_CORRUPT, "no live block");
        expect(new.numbers[4], old.numbers[4], GD_OK, "");
        teardown();
    }
}

TEST_WITH(test_target_that_is_not_published, setup("sha256", false),
          teardown())
{
    places old = places_of("old"), new = places_of("new");
    gd_group *group;
    gd_published record;
    REQUIRE(gd_group_open(x.env, x.root, &x.params, 1, O_RDWR, &group,
                          &x.err) == GD_OK);
    CHECK_INT(gd_group_read_published(group, &record, &x.err), GD_OK);
    record.sequence++;
    record.count = 3;
    CHECK_INT(gd_group_write_published(group, &record, &x.err), GD_OK);
    gd_group_close(group);
    expect(new.numbers[3], old.numbers[3], GD_CORRUPT, "no live block");
    expect(new.numbers[2], old.numbers[2], GD_OK, "");
}

/* Fingerprints of unequal blocks are equal: the block keeps its address, and
 * the others are merged. */
TEST_WITH(test_collisions, setup("weak-8", true), teardown())
{
    gd_fingerprint fps[BLOCKS];
    gd_hasher *hasher;
    places old = places_of("old"), new = places_of("new");
    REQUIRE(gd_hasher_open(x.env, repo->digest, &hasher, &x.err) == GD_OK);
    size_t a = 0, b = 0;
    for (size_t i = 0; i < 40; i++) {
        gd_hasher_compute(hasher, &gd_global_scope, data + i * BLOCK, BLOCK,
                          &fps[i], NULL);
        for (size_t k = 0; k < i && b == 0; k++) {
            if (gd_fingerprint_equal(&fps[i], &fps[k])) {
                a = k;
                b = i;
            }
        }
    }
    gd_hasher_close(x.env, hasher);
    REQUIRE(b > 0);
    uint8_t pairs[2 * PAIR];
    gd_merge *merge;
    /* Block a is mapped to its copy, block b to the one it collides with. */
    gd_put64(pairs, new.numbers[a]);
    gd_put64(pairs + 8, old.numbers[a]);
    gd_put64(pairs + 16, new.numbers[b]);
    gd_put64(pairs + 24, old.numbers[a]);
    REQUIRE(gd_merge_open(repo, "new", (gd_mapping){pairs, 2}, &merge,
                          &x.err) == GD_OK);
    const gd_merge_facts *facts = gd_merge_facts_of(merge);
    CHECK_INT(facts->replaced, 1);
    REQUIRE(facts->collision_count == 1);
    CHECK_INT(facts->collisions[0], new.numbers[b]);
    CHECK(exchange(merge));
    gd_merge_close(merge);
    CHECK(reads("new", data));
    /* There is only a collision: there is no M. */
    REQUIRE(gd_merge_open(repo, "new", (gd_mapping){pairs + PAIR, 1}, &merge,
                          &x.err) == GD_OK);
    CHECK_INT(gd_merge_facts_of(merge)->replaced, 0);
    CHECK(gd_merge_recipe(merge) == NULL);
    gd_merge_close(merge);
    CHECK_INT(spooled("M-"), 1);
}

static void
fingerprint(const uint8_t *block, gd_fingerprint *out)
{
    gd_hasher *hasher;
    REQUIRE(gd_hasher_open(x.env, repo->digest, &hasher, &x.err) == GD_OK);
    REQUIRE(gd_hasher_compute(hasher, &gd_global_scope, block, BLOCK, out,
                              &x.err) == GD_OK);
    gd_hasher_close(x.env, hasher);
}

/* There are more of them than the list has room for at first: all are kept,
 * and no memory leaks. */
TEST(test_many_collisions)
{
    static uint8_t twins[LENGTH];
    static const uint8_t zeros[BLOCK];
    uint64_t seed = 1000;
    setup("weak-8", true);
    memcpy(twins, data, LENGTH);
    for (size_t at = 0; at + BLOCK <= LENGTH; at += BLOCK) {
        gd_fingerprint wanted, found;
        if (memcmp(data + at, zeros, BLOCK) == 0) {
            continue;
        }
        fingerprint(data + at, &wanted);
        do {
            fill_random(twins + at, BLOCK, seed++);
            fingerprint(twins + at, &found);
        } while (!gd_fingerprint_equal(&found, &wanted));
    }
    CHECK_INT(put_image(repo, "twins", twins, LENGTH, LENGTH, NULL, &x.err),
              GD_OK);
    places new = places_of("new");
    REQUIRE(new.count > 64);
    gd_merge *merge = merge_all("new", "twins");
    const gd_merge_facts *facts = gd_merge_facts_of(merge);
    CHECK_INT(facts->replaced, 0);
    REQUIRE(facts->collision_count == new.count);
    for (size_t i = 0; i < new.count; i++) {
        CHECK_INT(facts->collisions[i], new.numbers[i]);
    }
    gd_merge_close(merge);
    CHECK(reads("new", data));
    CHECK(reads("twins", twins));
    teardown();
}

/* A damaged block is healed by the copy that its entry describes. */
static void
check_healing(const char *digest, bool by_value)
{
    setup(digest, by_value);
    places old = places_of("old"), new = places_of("new");
    set_state(new.numbers[3], GD_ENTRY_DAMAGED);
    CHECK(reads("new", data)); /* a marked block may be good after all */
    expect(new.numbers[3], old.numbers[4], GD_CORRUPT, "is not equal");
    /* It does not prevent any other block's merging. */
    expect(new.numbers[2], old.numbers[2], GD_OK, "");
    gd_merge *merge = merge_all("new", "old");
    CHECK(exchange(merge));
    gd_merge_close(merge);
    CHECK(reads("new", data));
    teardown();
}

TEST(test_healing)
{
    check_healing("sha256", false);
    check_healing("xxh3-128", true);
}

/* Changes a byte of the block on the disk; its entry stays unchanged. */
static void
damage(uint64_t number)
{
    gd_group *group;
    gd_entry entry;
    uint32_t slot = (uint32_t)number & (GD_MAX_SLOTS - 1);
    REQUIRE(gd_group_open(x.env, x.root, &x.params,
                          (uint32_t)(number >> GD_SLOT_BITS), O_RDWR, &group,
                          &x.err) == GD_OK);
    if (CHECK_INT(gd_group_read_entries(group, slot, 1, &entry, &x.err),
                  GD_OK)) {
        scratch_flip(&x, group->name, entry.segment + GD_SEGMENT_HEADER +
                     entry.plain_offset, 1);
    }
    gd_group_close(group);
}

/* A block that is marked, and cannot be read, is replaced by its fingerprint
 * only if that is cryptographic (I5). Otherwise it keeps its address, and does
 * not prevent the merging of others. */
static void
check_lost(const char *digest, bool by_value, bool healed)
{
    setup(digest, by_value);
    places old = places_of("old"), new = places_of("new");
    damage(new.numbers[3]);
    set_state(new.numbers[3], GD_ENTRY_DAMAGED);
    gd_merge *merge = merge_all("new", "old");
    const gd_merge_facts *facts = gd_merge_facts_of(merge);
    CHECK_INT(facts->replaced, healed ? new.count : new.count - 1);
    REQUIRE(facts->collision_count == (healed ? 0 : 1));
    CHECK(healed || facts->collisions[0] == new.numbers[3]);
    CHECK(exchange(merge));
    gd_merge_close(merge);
    CHECK_INT(places_of("new").numbers[3],
              healed ? old.numbers[3] : new.numbers[3]);
    CHECK(reads("new", data) == healed);
    teardown();
}

TEST(test_lost_block)
{
    check_lost("sha256", false, true);
    check_lost("sha256", true, true);
    check_lost("sha1", true, false);
    check_lost("xxh3-128", true, false);
}

/* An unmarked block may be readable the next time: no scrub has judged it. */
TEST_WITH(test_unmarked_damage, setup("sha256", true), teardown())
{
    places old = places_of("old"), new = places_of("new");
    damage(new.numbers[3]);
    expect(new.numbers[3], old.numbers[3], GD_CORRUPT, "checksum");
}

static gd_status lock_at_rename;

static int
rename_and_look(const gd_env *env, int dir, const char *from, const char *to)
{
    int lock;
    lock_at_rename = gd_locks_lock_image(x.env, x.root, "new", 0, &lock, NULL);
    if (lock_at_rename == GD_OK) {
        gd_locks_unlock_image(x.env, lock);
    }
    return fault_table.renameat(env, dir, from, to);
}

/* The entry has another block's fingerprint, and is valid (I7). */
TEST_WITH(test_exchanged_entry, setup("sha256", false), teardown())
{
    places old = places_of("old"), new = places_of("new");
    gd_group *group;
    gd_entry entries[2];
    uint32_t slot = (uint32_t)new.numbers[0] & (GD_MAX_SLOTS - 1);
    REQUIRE(gd_group_open(x.env, x.root, &x.params,
                          (uint32_t)(new.numbers[0] >> GD_SLOT_BITS), O_RDWR,
                          &group, &x.err) == GD_OK);
    CHECK_INT(gd_group_read_entries(group, slot, 2, entries, &x.err), GD_OK);
    entries[1] = entries[0];
    CHECK_INT(gd_group_write_entries(group, slot, 2, entries, &x.err), GD_OK);
    gd_group_close(group);
    expect(new.numbers[0], old.numbers[0], GD_CORRUPT, "committed with");
}

/* ---- other processes at work ---- */

TEST_WITH(test_group_locks, setup("sha256", false), teardown())
{
    gd_repo *collector = scratch_repo(&x);
    places old = places_of("old"), new = places_of("new");
    uint32_t last = (uint32_t)(old.numbers[0] >> GD_SLOT_BITS);
    CHECK_INT(gd_locks_lock_exclusive(collector->locks, last, NULL), GD_OK);
    expect(new.numbers[0], old.numbers[0], GD_BUSY, "the collector is at work");
    gd_locks_unlock_exclusive(collector->locks, last);
    gd_merge *merge = merge_all("new", "old");
    CHECK_INT(gd_locks_lock_exclusive(collector->locks, last, NULL), GD_BUSY);
    CHECK(exchange(merge));
    CHECK_INT(gd_locks_lock_exclusive(collector->locks, last, NULL), GD_BUSY);
    gd_merge_close(merge);
    CHECK_INT(gd_locks_lock_exclusive(collector->locks, last, NULL), GD_OK);
    gd_locks_unlock_exclusive(collector->locks, last);
    gd_repo_close(collector);
}

/* The groups of blocks that stay are locked, too: once the old recipe is
 * deleted, only M keeps them. */
TEST_WITH(test_groups_that_stay_are_locked, setup("sha256", false), teardown())
{
    gd_repo *collector = scratch_repo(&x);
    places old = places_of("old"), new = places_of("new");
    uint32_t last = (uint32_t)(new.numbers[84] >> GD_SLOT_BITS);
    uint8_t pair[PAIR];
    gd_merge *merge;
    gd_put64(pair, new.numbers[0]);
    gd_put64(pair + 8, old.numbers[0]);
    CHECK(last != new.numbers[0] >> GD_SLOT_BITS);
    REQUIRE(gd_merge_open(repo, "new", (gd_mapping){pair, 1}, &merge,
                          &x.err) == GD_OK);
    CHECK_INT(gd_locks_lock_exclusive(collector->locks, last, NULL), GD_BUSY);
    gd_merge_close(merge);
    CHECK_INT(gd_locks_lock_exclusive(collector->locks, last, NULL), GD_OK);
    gd_locks_unlock_exclusive(collector->locks, last);
    gd_repo_close(collector);
}

TEST_WITH(test_image_is_deleted, setup("sha256", false), teardown())
{
    gd_merge *merge = merge_all("new", "old");
    CHECK_INT(gd_image_delete(x.env, x.root, &x.params, "new", NULL, &x.err),
              GD_OK);
    CHECK(!exchange(merge));
    gd_merge_close(merge);
    CHECK(!scratch_exists(&x, "images/new"));
    CHECK_INT(spooled("O-"), 0);
}

/* N10.4: the same id, but another upload. */
TEST_WITH(test_image_is_replaced, setup("sha256", false), teardown())
{
    gd_merge *merge = merge_all("new", "old");
    CHECK_INT(gd_image_delete(x.env, x.root, &x.params, "new", NULL, &x.err),
              GD_OK);
    CHECK_INT(put_image(repo, "new", other, LENGTH, LENGTH, NULL, &x.err),
              GD_OK);
    CHECK(!exchange(merge));
    gd_merge_close(merge);
    CHECK(reads("new", other));
    CHECK_INT(spooled("O-"), 0);
    CHECK_INT(spooled("X-"), 0);
}

/* A delete holds the image lock before it reads the image: an exchange
 * meanwhile could put back the name that is about to be unlinked. */
TEST_WITH(test_image_lock_is_held, setup("sha256", false), teardown())
{
    int lock;
    gd_merge *merge = merge_all("new", "old");
    CHECK_INT(gd_locks_lock_image(x.env, x.root, "new", 0, &lock, &x.err),
              GD_OK);
    CHECK(!exchange(merge));
    CHECK_INT(spooled("O-"), 0);
    gd_locks_unlock_image(x.env, lock);
    x.f.env.renameat = rename_and_look;
    CHECK(exchange(merge));
    CHECK_INT(lock_at_rename, GD_BUSY);
    x.f.env.renameat = fault_table.renameat;
    /* The lock was released. */
    CHECK_INT(gd_locks_lock_image(x.env, x.root, "new", 0, &lock, &x.err),
              GD_OK);
    gd_locks_unlock_image(x.env, lock);
    CHECK(!exchange(merge));
    gd_merge_close(merge);
}

/* While the merge is open no process may judge M to be dead. */
TEST_WITH(test_writers_lock, setup("sha256", false), teardown())
{
    gd_merge *merge = merge_all("new", "old");
    int fd;
    REQUIRE(gd_open(x.env, x.root, gd_merge_recipe(merge)->name, O_RDWR, 0,
                    &fd, &x.err) == GD_OK);
    CHECK_INT(x.env->lock(x.env, fd, GD_BYTE_WRITER, F_WRLCK), -EAGAIN);
    gd_merge_close(merge);
    CHECK(x.env->lock(x.env, fd, GD_BYTE_WRITER, F_WRLCK) >= 0);
    x.env->close(x.env, fd);
}

/* ---- faults ---- */

/* Each step's sync fails in turn, with these files left (N10.2, 5, 7). */
TEST(test_syncs)
{
    static const struct {
        unsigned nth;
        bool opened, done;
    } cases[] = {
        {1, false, false}, /* M */
        {2, false, false}, /* spool/ with M in it */
        {3, true, false},  /* spool/ with O in it: before the rename */
        {4, true, true},   /* images/: after it */
    };
    for (size_t i = 0; i < 4; i++) {
        setup("sha256", false);
        uint8_t pairs[2 * BLOCKS * PAIR];
        places old = places_of("old"), new = places_of("new");
        gd_mapping map = mapping(&new, &old, 1, pairs);
        gd_merge *merge;
        bool done = false;
        struct stat before, after;
        CHECK(fstatat(x.root, "images/new", &before, 0) == 0);
        fault_env_fail(&x.f, FAULT_FSYNC, cases[i].nth, EIO, false);
        gd_status s = gd_merge_open(repo, "new", map, &merge, &x.err);
        CHECK_INT(s == GD_OK, cases[i].opened);
        if (s == GD_OK) {
            CHECK_INT(gd_merge_exchange(merge, &done, &x.err), GD_IO);
            CHECK_INT(done, cases[i].done);
            gd_merge_close(merge);
        }
        CHECK(fstatat(x.root, "images/new", &after, 0) == 0);
        CHECK_INT(before.st_ino != after.st_ino, cases[i].done);
        CHECK_INT(spooled("M-"), cases[i].opened);
        CHECK_INT(fault_env_faults(&x.f), 1);
        CHECK(reads("new", data));
        teardown();
    }
}

/* Merges with one fault; returns true if the fault did not happen any more. */
static bool
merge_with_fault(fault_call call, uint64_t nth, int sys_errno)
{
    uint8_t pairs[2 * BLOCKS * PAIR];
    places old = places_of("old"), new = places_of("new");
    gd_mapping map = mapping(&new, &old, 1, pairs);
    gd_merge *merge;
    bool done = false;
    uint64_t before = fault_env_faults(&x.f);
    fault_env_fail(&x.f, call, nth, sys_errno, false);
    gd_status s = gd_merge_open(repo, "new", map, &merge, &x.err);
    bool opened = s == GD_OK;
    if (opened) {
        s = gd_merge_exchange(merge, &done, &x.err);
        gd_merge_close(merge);
    }
    bool fault = fault_env_faults(&x.f) > before;
    fault_env_heal(&x.f);
    CHECK(s == GD_OK || fault);
    CHECK(reads("new", data));
    places now = places_of("new");
    CHECK_INT(now.numbers[0], done ? old.numbers[0] : new.numbers[0]);
    /* If this cannot be found out, it counts as "no longer this image". */
    CHECK(done || s != GD_OK || fault);
    CHECK(opened || call == FAULT_ANY || spooled("M-") == 0);
    return !fault;
}

static void
sweep(fault_call call, int sys_errno, bool by_value)
{
    bool finished = false;
    for (uint64_t nth = 1; !finished && nth < 20000; nth += SWEEP_STRIDE) {
        setup(by_value ? "xxh3-128" : "sha256", by_value);
        finished = merge_with_fault(call, nth, sys_errno);
        teardown();
    }
    CHECK(finished);
}

TEST(test_faults)
{
    sweep(FAULT_ANY, EIO, false);
    sweep(FAULT_ANY, ENOSPC, true);
    sweep(FAULT_ALLOC, ENOMEM, true);
    sweep(FAULT_LOCK, EAGAIN, false);
}

TEST_WITH(test_rename_that_lies, setup("sha256", false), teardown())
{
    gd_merge *merge = merge_all("new", "old");
    x.f.env.renameat = fault_lying_renameat;
    CHECK(exchange(merge));
    gd_merge_close(merge);
    CHECK_INT(spooled("X-"), 0);
    CHECK(reads("new", data));
}
