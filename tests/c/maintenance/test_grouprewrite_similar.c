/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_grouprewrite_similar.c - groups whose blocks are packed in the order of
 * similarity: segments with lists of slots.
 */
#include "engine/maintenance/grouprewrite.h"

#include <errno.h>
#include <stdlib.h>

#include "engine/base/coding.h"
#include "engine/maintenance/group_stats.h"
#include "engine/maintenance/scrub.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum {
    BLOCK = 4096,
    SLOTS = 256, /* 1 MiB: four segments */
    LENGTH = SLOTS * BLOCK,
    KINDS = 32, /* so many different contents, with similar ones */
};

#define GROUP_1 "groups/00000001"

typedef struct fixture {
    scratch x;
    gd_repo *repo;
    uint8_t *data; /* the image: it fills group 1 */
    gd_owned_group *owned;
    gd_published record;
    gd_entry entries[SLOTS];
} fixture;

static const gd_packing similar = {
    .codec = GD_CODEC_ZSTD, .level = 1, .similar = true};
static const gd_packing stored = {.codec = GD_CODEC_ZSTD, .level = 1};

/* Makes blocks of which block i resembles block i + KINDS. */
static void
fill_alike(uint8_t *data)
{
    for (uint32_t i = 0; i < SLOTS; i++) {
        fill_random(data + (size_t)i * BLOCK, BLOCK, 1 + i % KINDS);
        fill_random(data + (size_t)i * BLOCK + 100, 20, 1000 + i);
    }
}

static void
setup(fixture *t, void (*fill)(uint8_t *data))
{
    memset(t, 0, sizeof *t);
    scratch_init(&t->x);
    t->x.params.group_slots = SLOTS;
    t->repo = scratch_repo_filter(&t->x);
    t->data = malloc(LENGTH);
    fill(t->data);
    CHECK_INT(put_image(t->repo, "one", t->data, LENGTH, LENGTH, NULL,
                        &t->x.err), GD_OK);
}

static void
teardown(fixture *t)
{
    gd_repo_close(t->repo);
    free(t->data);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

static gd_group *
open_group(fixture *t)
{
    gd_group *group = NULL;
    if (!CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, 1,
                                 O_RDONLY, &group, &t->x.err), GD_OK)) {
        abort(); /* there is no group to check */
    }
    return group;
}

/* Reads record and entries; returns true if the group may have lists. */
static bool
look(fixture *t)
{
    gd_group *group = open_group(t);
    bool has_lists = group->bounds.has_lists;
    CHECK_INT(gd_group_read_published(group, &t->record, &t->x.err), GD_OK);
    CHECK_INT(gd_group_read_entries(group, 0, SLOTS, t->entries, &t->x.err),
              GD_OK);
    gd_group_close(group);
    return has_lists;
}

static gd_status
rewrite(fixture *t, const gd_packing *packing)
{
    uint64_t bytes;
    gd_status s = gd_owned_group_open(t->repo, 1, &t->owned, &t->x.err);
    if (s == GD_OK) {
        s = gd_group_rewrite_owned(t->owned, packing, &bytes, &t->x.err);
        gd_owned_group_close(t->owned);
    }
    return s;
}

static bool
is_image(fixture *t)
{
    bool equal;
    gd_repo *repo = scratch_repo(&t->x); /* without caches */
    gd_status s = get_image(repo, "one", t->data, LENGTH, &equal, &t->x.err);
    gd_repo_close(repo);
    return s == GD_OK && equal;
}

static void
free_slots(fixture *t, uint32_t first, uint32_t count)
{
    uint32_t slots[SLOTS], freed;
    REQUIRE(gd_owned_group_open(t->repo, 1, &t->owned, &t->x.err) == GD_OK);
    for (uint32_t i = 0; i < count; i++) {
        slots[i] = first + i;
    }
    CHECK_INT(gd_owned_group_free(t->owned, slots, count, &freed, &t->x.err),
              GD_OK);
    CHECK_INT(freed, count);
    gd_owned_group_close(t->owned);
}

/* Reads every live block by itself. *listed: segments with lists. */
static unsigned
check_blocks(fixture *t, unsigned *listed)
{
    static uint8_t in[GD_SEGMENT_HEADER + GD_SEGMENT_MAX];
    static uint8_t plain[GD_SEGMENT_MAX];
    gd_group *group = open_group(t);
    gd_coder *coder;
    unsigned live = 0;
    uint32_t before = 0;
    *listed = 0;
    CHECK_INT(gd_coder_open(t->x.env, &coder, &t->x.err), GD_OK);
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        const gd_entry *entry = &t->entries[slot];
        gd_segment_header header;
        if (entry->state != GD_ENTRY_LIVE) {
            continue;
        }
        live++;
        if (!CHECK_INT(gd_group_read_segment(group, entry, slot, coder, in,
                                             plain, &header, &t->x.err),
                       GD_OK)) {
            fprintf(stderr, "%s\n", t->x.err.text);
            continue;
        }
        CHECK(gd_segment_intact(in, &header, group->bounds.seed));
        CHECK(memcmp(plain + entry->plain_offset,
                     t->data + (size_t)slot * BLOCK, BLOCK) == 0);
        *listed += header.slots != NULL && entry->segment > before;
        before = entry->segment > before ? entry->segment : before;
    }
    gd_coder_close(t->x.env, coder);
    gd_group_close(group);
    return live;
}

static uint64_t
end_of_file(fixture *t)
{
    (void)look(t);
    return t->record.end - gd_fptable_data_start(SLOTS);
}

/* ---- the new file ---- */

TEST(test_similar_blocks_lie_together)
{
    fixture t;
    unsigned listed;
    setup(&t, fill_alike);
    CHECK_INT(rewrite(&t, &stored), GD_OK);
    uint64_t before = end_of_file(&t);
    CHECK(!look(&t) && !t.record.similar);
    uint32_t sequence = (uint32_t)t.record.sequence;
    CHECK_INT(rewrite(&t, &similar), GD_OK);
    CHECK(look(&t) && t.record.similar);
    CHECK(t.record.codec == GD_CODEC_ZSTD && t.record.level == 1);
    CHECK(t.record.sequence > sequence && t.record.count == SLOTS);
    CHECK_INT(check_blocks(&t, &listed), SLOTS);
    CHECK_INT(listed, 4);
    CHECK(end_of_file(&t) < before);
    /* All blocks of a kind are in one segment. */
    for (uint32_t slot = KINDS; slot < SLOTS; slot++) {
        CHECK_INT(t.entries[slot].segment,
                  t.entries[slot % KINDS].segment);
    }
    CHECK(is_image(&t));
    /* The group is rewritten without similarity, and once more with it: the
     * file stays one that may have lists. */
    CHECK_INT(rewrite(&t, &stored), GD_OK);
    CHECK(look(&t) && !t.record.similar);
    CHECK_INT(check_blocks(&t, &listed), SLOTS);
    CHECK_INT(listed, 0);
    CHECK(is_image(&t));
    teardown(&t);
}

static fixture t;

TEST_WITH(test_the_order_is_the_same_again, setup(&t, fill_alike),
          teardown(&t))
{
    CHECK_INT(rewrite(&t, &similar), GD_OK);
    uint64_t before = end_of_file(&t);
    CHECK_INT(rewrite(&t, &similar), GD_OK);
    CHECK_INT(end_of_file(&t), before);
    CHECK(is_image(&t));
}

static void
fill_noise(uint8_t *data)
{
    fill_random(data, LENGTH, 1);
}

/* Makes blocks of one byte everywhere but for the block's number. */
static void
fill_flat(uint8_t *data)
{
    memset(data, 'x', LENGTH);
    for (uint32_t i = 0; i < SLOTS; i++) {
        gd_put32(data + (size_t)i * BLOCK, i + 1);
    }
}

/* No block resembles another, or all do. */
TEST(test_degenerate_blocks)
{
    void (*const fills[])(uint8_t *) = {fill_noise, fill_flat};
    for (int i = 0; i < 2; i++) {
        fixture t;
        unsigned listed;
        setup(&t, fills[i]);
        CHECK_INT(rewrite(&t, &similar), GD_OK);
        CHECK(look(&t));
        CHECK_INT(check_blocks(&t, &listed), SLOTS);
        CHECK_INT(t.entries[0].codec, i == 0 ? GD_CODEC_NONE : GD_CODEC_ZSTD);
        CHECK(is_image(&t));
        teardown(&t);
    }
}

/* The blocks have one byte, and all lengths up to a few. */
TEST(test_short_blocks)
{
    enum { IMAGES = 256 };
    fixture t;
    uint8_t bytes[8];
    unsigned same = 0;
    memset(&t, 0, sizeof t);
    scratch_init(&t.x);
    t.x.params.group_slots = IMAGES;
    t.repo = scratch_repo_filter(&t.x);
    for (uint32_t i = 0; i < IMAGES; i++) {
        char name[16];
        snprintf(name, sizeof name, "i%u", i);
        fill_random(bytes, sizeof bytes, 7 + i);
        bytes[0] |= 1; /* not all zeros */
        CHECK_INT(put_image(t.repo, name, bytes, 1 + i % 8, 8, NULL,
                            &t.x.err), GD_OK);
    }
    gd_status s = gd_owned_group_open(t.repo, 1, &t.owned, &t.x.err);
    REQUIRE(s == GD_OK);
    uint64_t given_back;
    s = gd_group_rewrite_owned(t.owned, &similar, &given_back, &t.x.err);
    CHECK_INT(s, GD_OK);
    gd_owned_group_close(t.owned);
    for (uint32_t i = 0; i < IMAGES; i++) {
        char name[16];
        bool equal;
        snprintf(name, sizeof name, "i%u", i);
        fill_random(bytes, sizeof bytes, 7 + i);
        bytes[0] |= 1;
        CHECK_INT(get_image(t.repo, name, bytes, 1 + i % 8, &equal,
                            &t.x.err), GD_OK);
        same += equal;
    }
    CHECK_INT(same, IMAGES);
    gd_repo_close(t.repo);
    CHECK_INT(scratch_destroy(&t.x), 0);
}

/* ---- freeing and keeping ---- */

TEST(test_whole_segments_are_kept)
{
    fixture t;
    unsigned listed;
    setup(&t, fill_alike);
    CHECK_INT(rewrite(&t, &similar), GD_OK);
    uint64_t before = end_of_file(&t);
    CHECK_INT(rewrite(&t, NULL), GD_OK);
    CHECK_INT(end_of_file(&t), before);
    CHECK(t.record.similar);
    CHECK_INT(check_blocks(&t, &listed), SLOTS);
    CHECK_INT(listed, 4);
    CHECK(is_image(&t));
    teardown(&t);
}

TEST(test_what_lives_is_packed_again)
{
    fixture t;
    unsigned listed;
    uint64_t bytes, kept;
    setup(&t, fill_alike);
    CHECK_INT(rewrite(&t, &similar), GD_OK);
    uint64_t before = end_of_file(&t);
    free_slots(&t, 10, 100);
    REQUIRE(gd_owned_group_open(t.repo, 1, &t.owned, &t.x.err) == GD_OK);
    CHECK_INT(gd_owned_group_live_bytes(t.owned, &bytes, &kept, &t.x.err),
              GD_OK);
    gd_owned_group_close(t.owned);
    /* Each segment counts once, with about as much as is live. */
    CHECK_INT(bytes, before);
    CHECK(kept > bytes * 55 / 100 && kept < bytes * 66 / 100);
    CHECK_INT(rewrite(&t, NULL), GD_OK);
    CHECK(end_of_file(&t) < before);
    CHECK_INT(check_blocks(&t, &listed), SLOTS - 100);
    CHECK_INT(listed, 4);
    teardown(&t);
}

TEST(test_usage_counts_each_segment_once)
{
    fixture t;
    gd_usage used = {0};
    setup(&t, fill_alike);
    CHECK_INT(rewrite(&t, &similar), GD_OK);
    gd_group *group = open_group(&t);
    CHECK_INT(gd_group_stats_add_usage(group, &used, &t.x.err), GD_OK);
    gd_group_close(group);
    CHECK_INT(used.segments, 4);
    CHECK_INT(used.plain[GD_CODEC_ZSTD], LENGTH);
    CHECK_INT(used.stored[GD_CODEC_ZSTD] + 4 * GD_SEGMENT_HEADER,
              end_of_file(&t));
    teardown(&t);
}

/* ---- scrubbing, and damage ---- */

TEST_WITH(test_scrub_reads_each_segment_once, setup(&t, fill_alike),
          teardown(&t))
{
    gd_scrub_result found;
    CHECK_INT(rewrite(&t, &similar), GD_OK);
    REQUIRE(gd_scrub(t.repo, 1, 0, SLOTS, true, GD_SCRUB_ALL, &found,
                     &t.x.err) == GD_OK);
    CHECK_INT(found.bytes, end_of_file(&t));
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(found.verdicts[i], GD_VERDICT_GOOD);
    }
    t.x.env->release(t.x.env, found.verdicts);
}

/* Two slots of a list are swapped, and each checksum is right or not. */
TEST(test_swapped_slots_are_an_error)
{
    for (int mended = 0; mended < 2; mended++) {
        fixture t;
        static uint8_t raw[LENGTH];
        bool equal;
        setup(&t, fill_alike);
        CHECK_INT(rewrite(&t, &similar), GD_OK);
        (void)look(&t);
        uint64_t at = t.entries[0].segment;
        size_t length = GD_SEGMENT_HEADER + t.entries[0].stored_length;
        scratch_read(&t.x, GROUP_1, raw, length, at);
        uint8_t *list = raw + GD_SEGMENT_HEADER;
        uint16_t first = gd_get16(list), second = gd_get16(list + 2);
        gd_put16(list, second);
        gd_put16(list + 2, first);
        if (mended) {
            gd_group *group = open_group(&t);
            gd_segment_header header = {
                .codec = GD_CODEC_ZSTD,
                .blocks = gd_get16(raw + 6),
                .first_slot = second,
                .plain_length = gd_get32(raw + 12),
                .stored_length = t.entries[0].stored_length,
                .slots = list};
            struct iovec behind = {list, header.stored_length};
            gd_segment_header_encode(&header, group->bounds.seed, &behind, 1,
                                     raw);
            gd_group_close(group);
        }
        scratch_write(&t.x, GROUP_1, raw, length, at);
        gd_repo *repo = scratch_repo(&t.x);
        CHECK_INT(get_image(repo, "one", t.data, LENGTH, &equal, &t.x.err),
                  GD_CORRUPT);
        CHECK_CONTAINS(t.x.err.text, "list of slots that is not right");
        gd_repo_close(repo);
        CHECK_INT(rewrite(&t, &stored), GD_CORRUPT);
        gd_scrub_result found;
        REQUIRE(gd_scrub(t.repo, 1, 0, SLOTS, true, GD_SCRUB_ALL, &found,
                         &t.x.err) == GD_OK);
        for (uint32_t i = 0; i < SLOTS; i++) {
            bool hit = t.entries[i].segment == at;
            CHECK_INT(found.verdicts[i],
                      hit ? GD_VERDICT_DAMAGED : GD_VERDICT_GOOD);
        }
        t.x.env->release(t.x.env, found.verdicts);
        teardown(&t);
    }
}

/* ---- versions ---- */

/* N15.1: the feature is set before the first byte of the new file, and only
 * for lists. */
TEST_WITH(test_the_feature, setup(&t, fill_alike), teardown(&t))
{
    CHECK_INT(rewrite(&t, &stored), GD_OK);
    CHECK(!look(&t));
    CHECK_INT(scratch_count(&t.x, "features", "", NULL), 0);
    CHECK_INT(renameat(t.x.root, "features", t.x.root, "away"), 0);
    CHECK_INT(rewrite(&t, &similar), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "features");
    CHECK_INT(scratch_count(&t.x, "spool", "G", NULL), 0);
    CHECK(!look(&t));
    CHECK_INT(renameat(t.x.root, "away", t.x.root, "features"), 0);
    CHECK_INT(rewrite(&t, &similar), GD_OK);
    CHECK(look(&t));
    CHECK(scratch_exists(&t.x, "features/listed-segments"));
    CHECK_INT(scratch_count(&t.x, "features", "", NULL), 1);
}

/* A reader obeys the version in the group's header. */
TEST_WITH(test_the_header_has_another_version, setup(&t, fill_alike),
          teardown(&t))
{
    uint8_t before[512], after[512];
    scratch_read(&t.x, GROUP_1, before, sizeof before, 0);
    CHECK_INT(rewrite(&t, &similar), GD_OK);
    scratch_read(&t.x, GROUP_1, after, sizeof after, 0);
    CHECK_INT(gd_get16(before + 8), 1);
    CHECK_INT(gd_get16(after + 8), 2);
    CHECK_INT(gd_get16(after + 10), 0);
    CHECK(gd_get64(before + 504) != gd_get64(after + 504)); /* the seed */
    CHECK(memcmp(before + 12, after + 12, 504 - 12) == 0);
    gd_put16(after + 8, 4);
    gd_put64(after + 504, gd_checksum(after, 504, 0));
    scratch_write(&t.x, GROUP_1, after, sizeof after, 0);
    gd_group *group;
    CHECK_INT(gd_group_open(t.x.env, t.x.root, &t.x.params, 1, O_RDONLY,
                            &group, &t.x.err), GD_VERSION);
    CHECK_CONTAINS(t.x.err.text,
                   GROUP_1 " has format version 4; this program knows up to 3");
}

/* ---- faults ---- */

static bool
fail_one(fault_call call, uint64_t n)
{
    fixture t;
    unsigned listed;
    setup(&t, fill_alike);
    uint64_t faults = fault_env_faults(&t.x.f);
    fault_env_fail(&t.x.f, call, n, EIO, false);
    uint64_t bytes;
    gd_status s = gd_owned_group_open(t.repo, 1, &t.owned, &t.x.err);
    if (s == GD_OK) {
        s = gd_group_rewrite_owned(t.owned, &similar, &bytes,
                                   &t.x.err);
        gd_owned_group_close(t.owned);
    }
    bool hit = fault_env_faults(&t.x.f) > faults;
    fault_env_heal(&t.x.f);
    CHECK(hit || s == GD_OK);
    (void)look(&t);
    CHECK_INT(check_blocks(&t, &listed), SLOTS);
    CHECK(is_image(&t));
    teardown(&t);
    return hit;
}

TEST(test_faults)
{
    sweep_faults(fail_one, SWEEP_STRIDE);
}
