/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_grouprewrite_cold.c - groups whose segments are in an object: they
 * become cold, are read, and are rewritten.
 */
#include "engine/files/slices.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "engine/base/coding.h"
#include "engine/maintenance/grouprewrite.h"
#include "engine/maintenance/placeholder.h"
#include "engine/maintenance/scrub.h"
#include "engine/read/compare.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum {
    BLOCK = 4096,
    SLOTS = 1024, /* 4 MiB: several slices */
    LENGTH = SLOTS * BLOCK,
};

#define GROUP_1 "groups/00000001"

/* An object store of one object, which is in a file. */
typedef struct fixture {
    scratch x;
    gd_repo *repo;
    uint8_t *data;    /* the image: it fills group 1 */
    uint8_t *object;  /* NULL: the store does not answer */
    gd_object facts;  /* of the object */
    char *directory;  /* of slices */
    gd_slices *slices;
    bool loses;       /* slices are evicted at once */
    atomic_uint fetches, expected;
    atomic_uint patient; /* fetches that may take as long as they need */
} fixture;

static void
slice_path(const fixture *t, uint32_t slice, char *path, size_t size)
{
    int n = snprintf(path, size, "%s/", t->directory);
    for (size_t i = 0; i < GD_ID_SIZE; i++) {
        n += snprintf(path + n, size - (size_t)n, "%02x", t->facts.id[i]);
    }
    if (mkdir(path, 0700) < 0 && errno != EEXIST) {
        abort();
    }
    snprintf(path + n, size - (size_t)n, "/%08x", slice);
}

static void
write_slice(const fixture *t, uint32_t slice, const uint8_t *data,
            size_t length)
{
    char path[512], new[520];
    slice_path(t, slice, path, sizeof path);
    snprintf(new, sizeof new, "%s.%d", path, rand());
    FILE *file = fopen(new, "w");
    if (file == NULL || fwrite(data, 1, length, file) != length ||
        fclose(file) != 0 || rename(new, path) != 0) {
        abort();
    }
}

static size_t
slice_length(const fixture *t, uint32_t slice)
{
    uint64_t left = t->facts.length - (uint64_t)slice * GD_SLICE;
    return left < GD_SLICE ? (size_t)left : GD_SLICE;
}

static gd_status
fetch(void *arg, const gd_object *object, uint32_t first, uint32_t count,
      gd_error *err)
{
    fixture *t = arg;
    atomic_fetch_add(&t->fetches, 1);
    atomic_fetch_add(&t->patient, object->patience_ms == 0);
    if (t->object == NULL ||
        memcmp(object->id, t->facts.id, GD_ID_SIZE) != 0 ||
        object->group != 1 || object->length != t->facts.length) {
        return gd_fail(err, GD_UNAVAILABLE, "nobody answers");
    }
    for (uint32_t i = first; !t->loses && i < first + count; i++) {
        write_slice(t, i, t->object + (size_t)i * GD_SLICE,
                    slice_length(t, i));
    }
    return GD_OK;
}

static void
expect(void *arg, const gd_object *object, uint32_t first, uint32_t count)
{
    fixture *t = arg;
    CHECK(((uint64_t)first + count - 1) * GD_SLICE < object->length);
    atomic_fetch_add(&t->expected, count);
}

static void
open_repo(fixture *t)
{
    t->repo = scratch_repo(&t->x);
}

static void
setup(fixture *t)
{
    memset(t, 0, sizeof *t);
    scratch_init(&t->x);
    t->directory = check_mkdir();
    gd_slice_source source = {t, fetch, expect};
    CHECK_INT(gd_slices_open(t->x.env, t->directory, NULL, &source,
                             &t->slices, &t->x.err), GD_OK);
    t->x.params.group_slots = SLOTS;
    t->x.params.slices = t->slices;
    open_repo(t);
    t->data = malloc(LENGTH);
    fill_random(t->data, LENGTH, 7);
    CHECK_INT(put_image(t->repo, "one", t->data, LENGTH, LENGTH, NULL,
                        &t->x.err), GD_OK);
}

static void
teardown(fixture *t)
{
    gd_repo_close(t->repo);
    gd_slices_close(t->slices);
    check_rmdir(t->directory);
    free(t->object);
    free(t->data);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

/* Sends the object store the bytes of the file. */
static void
send_object(fixture *t, const char *path)
{
    int fd = openat(t->x.root, path, O_RDONLY);
    free(t->object);
    t->object = malloc(t->facts.length);
    CHECK_INT(pread(fd, t->object, t->facts.length, 0), t->facts.length);
    close(fd);
}

static gd_status
run_rewrite(gd_group_rewrite *r, gd_error *err)
{
    gd_status s = GD_OK;
    bool done = false;
    uint64_t cost;
    while (s == GD_OK && !done) {
        s = gd_group_rewrite_step(r, &done, &cost, err);
    }
    return s;
}

/* Steps of becoming cold after which the process may end. */
typedef enum until { WRITTEN, SENT, CUT, EXCHANGED } until;

static gd_status
make_cold_until(fixture *t, const gd_packing *packing, until last)
{
    gd_leased_group *leased;
    gd_owned_group *owned = NULL;
    gd_group_rewrite *r;
    const char *path;
    gd_status s = gd_leased_group_open(t->repo, 1, &leased, &t->x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_group_rewrite_open(leased, packing, true, &r, &t->x.err);
    if (s != GD_OK) {
        gd_leased_group_close(leased);
        return s;
    }
    s = run_rewrite(r, &t->x.err);
    if (s == GD_OK && last >= SENT) {
        s = gd_group_rewrite_object(r, &t->facts, &path, &t->x.err);
        send_object(t, path);
    }
    if (s == GD_OK && last >= CUT) {
        s = gd_group_rewrite_cut(r, &t->x.err);
    }
    if (s == GD_OK && last >= EXCHANGED) {
        s = gd_owned_group_lock(leased, &owned, &t->x.err);
        if (s == GD_OK) {
            s = gd_group_rewrite_exchange(r, owned, &t->x.err);
        }
    }
    gd_group_rewrite_close(r);
    if (owned != NULL) {
        gd_owned_group_close(owned);
    } else {
        gd_leased_group_close(leased);
    }
    return s;
}

static gd_status
make_cold(fixture *t)
{
    return make_cold_until(t, NULL, EXCHANGED);
}

static gd_status
read_image(fixture *t)
{
    bool equal = false;
    gd_status s = get_image(t->repo, "one", t->data, LENGTH, &equal,
                            &t->x.err);
    return s == GD_OK && !equal ? GD_IO : s;
}

static void
read_by_a_new_handle(fixture *t, gd_status wanted)
{
    gd_repo_close(t->repo);
    open_repo(t);
    CHECK_INT(read_image(t), wanted);
}

static gd_group *
open_group(fixture *t)
{
    gd_group *group = NULL;
    if (!CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, 1,
                                 O_RDONLY, &group, &t->x.err), GD_OK)) {
        abort();
    }
    return group;
}

static uint64_t
file_size(fixture *t)
{
    struct stat st;
    gd_group *group = open_group(t);
    CHECK_INT(gd_group_stat(group, &st, &t->x.err), GD_OK);
    gd_group_close(group);
    return (uint64_t)st.st_size;
}

static void
forget_all(const fixture *t)
{
    gd_slices_forget(t->slices, &t->facts, 0, t->facts.length);
}

static fixture t;

/* ---- tests ---- */

TEST_WITH(test_only_the_metadata_stays, setup(&t), teardown(&t))
{
    uint64_t before = file_size(&t);
    CHECK(before > LENGTH);
    CHECK_INT(make_cold(&t), GD_OK);
    CHECK_INT(file_size(&t), gd_fptable_data_start(SLOTS));
    gd_group *group = open_group(&t);
    CHECK(group->is_cold);
    CHECK(memcmp(group->object.id, t.facts.id, GD_ID_SIZE) == 0);
    CHECK_INT(group->object.length, t.facts.length);
    CHECK(group->object.length > LENGTH);
    gd_group_close(group);
    CHECK_INT(read_image(&t), GD_OK);
    CHECK(atomic_load(&t.fetches) > 0);
    CHECK(atomic_load(&t.expected) > 0);
    unsigned fetched = atomic_load(&t.fetches);
    read_by_a_new_handle(&t, GD_OK); /* out of the slices */
    CHECK_INT(atomic_load(&t.fetches), fetched);
}

TEST_WITH(test_packed_anew, setup(&t), teardown(&t))
{
    static const gd_packing similar = {
        .codec = GD_CODEC_ZSTD, .level = 1, .similar = true};
    CHECK_INT(make_cold_until(&t, &similar, EXCHANGED), GD_OK);
    read_by_a_new_handle(&t, GD_OK);
}

/* A process that ends in the middle leaves the old file. */
TEST(test_ended_before_the_exchange)
{
    for (until last = WRITTEN; last < EXCHANGED; last++) {
        fixture t;
        setup(&t);
        uint64_t before = file_size(&t);
        CHECK_INT(make_cold_until(&t, NULL, last), GD_OK);
        CHECK_INT(file_size(&t), before);
        free(t.object);
        t.object = NULL;
        read_by_a_new_handle(&t, GD_OK);
        CHECK_INT(atomic_load(&t.fetches), 0);
        teardown(&t);
    }
}

TEST_WITH(test_not_exchanged_with_its_segments, setup(&t), teardown(&t))
{
    gd_owned_group *owned;
    gd_group_rewrite *r;
    REQUIRE(gd_owned_group_open(t.repo, 1, &owned, &t.x.err) == GD_OK);
    REQUIRE(gd_group_rewrite_open(owned->leased, NULL, true, &r, &t.x.err) ==
            GD_OK);
    CHECK_INT(gd_group_rewrite_cut(r, &t.x.err), GD_INVALID); /* incomplete */
    CHECK_INT(run_rewrite(r, &t.x.err), GD_OK);
    CHECK_INT(gd_group_rewrite_exchange(r, owned, &t.x.err), GD_INVALID);
    CHECK_CONTAINS(t.x.err.text, "still has its segments");
    gd_group_rewrite_close(r);
    gd_owned_group_close(owned);
    CHECK_INT(read_image(&t), GD_OK);
}

/* N15.1: the features are set before the first byte of the new file. */
TEST_WITH(test_the_features, setup(&t), teardown(&t))
{
    CHECK_INT(scratch_count(&t.x, "features", "", NULL), 0);
    CHECK_INT(renameat(t.x.root, "features", t.x.root, "away"), 0);
    CHECK_INT(make_cold(&t), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "features");
    CHECK_INT(scratch_count(&t.x, "spool", "G", NULL), 0);
    CHECK_INT(renameat(t.x.root, "away", t.x.root, "features"), 0);
    CHECK_INT(make_cold(&t), GD_OK);
    CHECK(scratch_exists(&t.x, "features/cold"));
    /* A group that is no longer cold has lists. */
    CHECK(scratch_exists(&t.x, "features/listed-segments"));
    CHECK_INT(scratch_count(&t.x, "features", "", NULL), 2);
    CHECK_INT(read_image(&t), GD_OK);
}

TEST_WITH(test_unavailable_is_no_damage, setup(&t), teardown(&t))
{
    gd_scrub_result found;
    CHECK_INT(make_cold(&t), GD_OK);
    uint8_t *object = t.object;
    t.object = NULL;
    CHECK_INT(read_image(&t), GD_UNAVAILABLE);
    CHECK_CONTAINS(t.x.err.text, "nobody answers");
    /* Nor does a scrub judge blocks that it cannot read. */
    CHECK_INT(gd_scrub(t.repo, 1, 0, SLOTS, true, GD_SCRUB_ALL, &found,
                       &t.x.err),
              GD_UNAVAILABLE);
    t.object = object;
    CHECK_INT(read_image(&t), GD_OK);
    CHECK_INT(gd_scrub(t.repo, 1, 0, SLOTS, true, GD_SCRUB_ALL, &found,
                       &t.x.err), GD_OK);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(found.verdicts[i], GD_VERDICT_GOOD);
    }
    t.x.env->release(t.x.env, found.verdicts);
}

TEST_WITH(test_nothing_to_ask, setup(&t), teardown(&t))
{
    CHECK_INT(make_cold(&t), GD_OK);
    t.x.params.slices = NULL;
    read_by_a_new_handle(&t, GD_UNAVAILABLE);
    CHECK_CONTAINS(t.x.err.text, GROUP_1);
}

TEST_WITH(test_slices_that_are_evicted_at_once, setup(&t), teardown(&t))
{
    CHECK_INT(make_cold(&t), GD_OK);
    t.loses = true;
    CHECK_INT(read_image(&t), GD_UNAVAILABLE);
    CHECK_CONTAINS(t.x.err.text, "too small");
}

/* A slice that is short, long, empty or full of others' bytes is fetched
 * again. */
TEST_WITH(test_wrong_slices, setup(&t), teardown(&t))
{
    CHECK_INT(make_cold(&t), GD_OK);
    CHECK_INT(read_image(&t), GD_OK);
    uint8_t *other = calloc(1, GD_SLICE + 1);
    size_t lengths[] = {0, 1, GD_SLICE - 1, GD_SLICE, GD_SLICE + 1};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        unsigned before = atomic_load(&t.fetches);
        write_slice(&t, 1, other, lengths[i]);
        read_by_a_new_handle(&t, GD_OK);
        CHECK(atomic_load(&t.fetches) > before);
    }
    free(other);
}

/* A slice's name that is not a file is replaced, and a FIFO does not block. */
TEST_WITH(test_slices_that_are_no_files, setup(&t), teardown(&t))
{
    char path[512];
    CHECK_INT(make_cold(&t), GD_OK);
    CHECK_INT(read_image(&t), GD_OK);
    slice_path(&t, 1, path, sizeof path);
    for (int kind = 0; kind < 2; kind++) {
        unsigned before = atomic_load(&t.fetches);
        CHECK_INT(unlink(path), 0);
        CHECK_INT(kind == 0 ? symlink("00000002", path)
                            : mkfifo(path, 0600), 0);
        read_by_a_new_handle(&t, GD_OK);
        CHECK(atomic_load(&t.fetches) > before);
    }
}

static void
spoil_slice(const fixture *t, uint32_t slice)
{
    uint8_t *zeros = calloc(1, GD_SLICE);
    write_slice(t, slice, zeros, GD_SLICE);
    free(zeros);
}

/* A scrub does not judge by slices that only this host has. */
TEST_WITH(test_a_scrub_past_wrong_slices, setup(&t), teardown(&t))
{
    gd_scrub_result found;
    CHECK_INT(make_cold(&t), GD_OK);
    CHECK_INT(read_image(&t), GD_OK);
    spoil_slice(&t, 1);
    CHECK_INT(gd_scrub(t.repo, 1, 0, SLOTS, true, GD_SCRUB_ALL, &found,
                       &t.x.err), GD_OK);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(found.verdicts[i], GD_VERDICT_GOOD);
    }
    t.x.env->release(t.x.env, found.verdicts);
    /* Nor does a rewriting fail because of it. */
    spoil_slice(&t, 1);
    CHECK_INT(make_cold(&t), GD_OK);
}

static void
spoil_entry(const fixture *t, uint32_t slot)
{
    uint8_t byte = 0xa5;
    int fd = openat(t->x.root, GROUP_1, O_RDWR);
    CHECK_INT(pwrite(fd, &byte, 1, (off_t)gd_entry_offset(slot) + 3), 1);
    close(fd);
}

/* Only the requested blocks are judged. */
TEST_WITH(test_a_scrub_of_a_part, setup(&t), teardown(&t))
{
    gd_scrub_result found;
    CHECK_INT(make_cold(&t), GD_OK);
    uint8_t *object = t.object;
    t.object = NULL;
    spoil_entry(&t, 7);
    CHECK_INT(gd_scrub(t.repo, 1, 0, SLOTS, true, (gd_scrub_extent){0, 0},
                       &found, &t.x.err), GD_OK);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(found.verdicts[i],
                  i == 7 ? GD_VERDICT_INVALID : GD_VERDICT_NONE);
    }
    CHECK_INT(found.bytes, 0);
    CHECK_INT(atomic_load(&t.fetches), 0);
    t.x.env->release(t.x.env, found.verdicts);
    t.object = object;
    CHECK_INT(gd_scrub(t.repo, 1, 0, SLOTS, true,
                       (gd_scrub_extent){GD_SLICE, 2 * GD_SLICE}, &found,
                       &t.x.err), GD_OK);
    unsigned good = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
        good += found.verdicts[i] == GD_VERDICT_GOOD;
    }
    CHECK(good >= GD_SLICE / BLOCK - 16 && good <= GD_SLICE / BLOCK + 16);
    t.x.env->release(t.x.env, found.verdicts);
}

static gd_status
mark(fixture *t, uint32_t slot, gd_quarantine_name name)
{
    gd_owned_group *owned;
    gd_quarantine_name *names = NULL;
    size_t count = 0;
    gd_status s = gd_owned_group_open(t->repo, 1, &owned, &t->x.err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_owned_group_mark_damaged(owned, &slot, 1, &names, &count,
                                    &t->x.err);
    if (s == GD_OK) {
        CHECK_INT(count, 1);
        memcpy(name, names[0], sizeof names[0]);
    } else {
        CHECK_INT(count, 0);
    }
    t->x.env->release(t->x.env, names);
    gd_owned_group_close(owned);
    return s;
}

static gd_entry
entry_of(fixture *t, uint32_t slot)
{
    gd_entry entry;
    gd_group *group = open_group(t);
    CHECK_INT(gd_group_read_entries(group, slot, 1, &entry, &t->x.err),
              GD_OK);
    gd_group_close(group);
    return entry;
}

TEST_WITH(test_damage_is_marked_and_kept, setup(&t), teardown(&t))
{
    gd_scrub_result found;
    gd_quarantine_name name;
    CHECK_INT(make_cold(&t), GD_OK);
    gd_entry entry = entry_of(&t, 500);
    t.object[entry.segment + GD_SEGMENT_HEADER + entry.plain_offset] ^= 1;
    CHECK_INT(gd_scrub(t.repo, 1, 0, SLOTS, true, GD_SCRUB_ALL, &found,
                       &t.x.err), GD_OK);
    CHECK_INT(found.verdicts[500], GD_VERDICT_DAMAGED);
    t.x.env->release(t.x.env, found.verdicts);
    CHECK_INT(mark(&t, 500, name), GD_OK);
    /* The object's bytes are in the quarantine, and the group is unchanged. */
    size_t length = GD_SEGMENT_HEADER + (size_t)entry.stored_length;
    uint8_t *kept = malloc(length);
    int fd = openat(t.x.root, name, O_RDONLY);
    CHECK_INT(pread(fd, kept, length, 0), length);
    CHECK(memcmp(kept, t.object + entry.segment, length) == 0);
    close(fd);
    free(kept);
    CHECK_INT(entry_of(&t, 500).state, GD_ENTRY_DAMAGED);
    CHECK_INT(entry_of(&t, 501).state, GD_ENTRY_LIVE);
    CHECK_INT(file_size(&t), gd_fptable_data_start(SLOTS));
    read_by_a_new_handle(&t, GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "quarantine");
}

TEST_WITH(test_nothing_is_marked_without_the_object, setup(&t), teardown(&t))
{
    gd_quarantine_name name;
    CHECK_INT(make_cold(&t), GD_OK);
    uint8_t *object = t.object;
    t.object = NULL;
    CHECK_INT(mark(&t, 500, name), GD_UNAVAILABLE);
    CHECK_INT(entry_of(&t, 500).state, GD_ENTRY_LIVE);
    t.object = object;
    read_by_a_new_handle(&t, GD_OK);
}

/* An upload continues without a hit, and requests the slice once. */
TEST_WITH(test_comparing_asks_once_in_vain, setup(&t), teardown(&t))
{
    gd_compare *compare;
    CHECK_INT(make_cold(&t), GD_OK);
    uint8_t *object = t.object;
    t.object = NULL;
    for (int there = 0; there < 2; there++) {
        unsigned before = atomic_load(&t.fetches);
        REQUIRE(gd_compare_open(t.repo, &compare, &t.x.err) == GD_OK);
        for (uint32_t slot = 0; slot < SLOTS; slot += 100) {
            gd_entry entry = entry_of(&t, slot);
            gd_address address = {1, slot};
            CHECK_INT(gd_compare_block(compare, address, &entry.fingerprint,
                                       t.data + (size_t)slot * BLOCK, BLOCK),
                      there);
        }
        CHECK(atomic_load(&t.patient) == 0);
        CHECK(there ? atomic_load(&t.fetches) > before + 1
                    : atomic_load(&t.fetches) == before + 1);
        gd_compare_close(compare);
        t.object = object;
    }
}

TEST_WITH(test_a_damaged_object, setup(&t), teardown(&t))
{
    CHECK_INT(make_cold(&t), GD_OK);
    t.object[LENGTH / 2] ^= 1;
    CHECK_INT(read_image(&t), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, GROUP_1);
    t.object[LENGTH / 2] ^= 1;
    CHECK_INT(read_image(&t), GD_OK); /* wrong bytes were not cached */
}

/* The bytes that old readers have open stay readable, even after the
 * exchange. */
TEST_WITH(test_who_has_the_old_file_reads_on, setup(&t), teardown(&t))
{
    gd_group *group = open_group(&t);
    uint8_t *before = malloc(LENGTH), *after = malloc(LENGTH);
    uint64_t start = gd_fptable_data_start(SLOTS);
    CHECK_INT(gd_group_read_data(group, before, LENGTH, start, &t.x.err),
              GD_OK);
    CHECK_INT(make_cold(&t), GD_OK);
    CHECK_INT(gd_group_read_data(group, after, LENGTH, start, &t.x.err),
              GD_OK);
    CHECK(memcmp(before, after, LENGTH) == 0);
    CHECK_INT(atomic_load(&t.fetches), 0);
    free(before);
    free(after);
    gd_group_close(group);
}

TEST_WITH(test_blocks_are_freed_without_the_object, setup(&t), teardown(&t))
{
    gd_owned_group *owned;
    uint32_t slots[SLOTS], freed;
    uint64_t bytes;
    CHECK_INT(make_cold(&t), GD_OK);
    free(t.object);
    t.object = NULL;
    for (uint32_t i = 0; i < SLOTS; i++) {
        slots[i] = i;
    }
    REQUIRE(gd_owned_group_open(t.repo, 1, &owned, &t.x.err) == GD_OK);
    CHECK_INT(gd_owned_group_free(owned, slots, SLOTS, &freed, &t.x.err),
              GD_OK);
    CHECK_INT(freed, SLOTS);
    CHECK_INT(gd_owned_group_punch(owned, &bytes, &t.x.err), GD_OK);
    CHECK_INT(bytes, 0);
    CHECK_INT(file_size(&t), gd_fptable_data_start(SLOTS));
    /* The placeholder that keeps the number is on the disk. */
    CHECK_INT(gd_placeholder_leave(owned, &bytes, &t.x.err),
              GD_OK);
    gd_owned_group_close(owned);
    gd_group *group = open_group(&t);
    CHECK(!group->is_cold);
    gd_group_close(group);
}

/* Half of the blocks are freed: the others become a smaller object, or go back
 * to the disk. */
TEST(test_rewritten)
{
    for (int cold = 0; cold < 2; cold++) {
        fixture t;
        gd_owned_group *owned;
        uint32_t slots[SLOTS], freed;
        uint64_t bytes;
        setup(&t);
        CHECK_INT(put_image(t.repo, "half", t.data, LENGTH / 2, LENGTH / 2,
                            NULL, &t.x.err), GD_OK);
        CHECK_INT(make_cold(&t), GD_OK);
        gd_object before = t.facts;
        for (uint32_t i = 0; i < SLOTS / 2; i++) {
            slots[i] = SLOTS / 2 + i;
        }
        REQUIRE(gd_owned_group_open(t.repo, 1, &owned, &t.x.err) == GD_OK);
        CHECK_INT(gd_owned_group_free(owned, slots, SLOTS / 2, &freed,
                                      &t.x.err), GD_OK);
        if (!cold) {
            CHECK_INT(gd_group_rewrite_owned(owned, NULL, &bytes, &t.x.err),
                      GD_OK);
        }
        gd_owned_group_close(owned);
        if (cold) {
            CHECK_INT(make_cold(&t), GD_OK);
            CHECK(memcmp(before.id, t.facts.id, GD_ID_SIZE) != 0);
            CHECK(t.facts.length < before.length / 2 + GD_SLICE);
        } else {
            CHECK(file_size(&t) > LENGTH / 2);
            free(t.object);
            t.object = NULL;
            forget_all(&t);
        }
        bool equal;
        gd_repo_close(t.repo);
        open_repo(&t);
        CHECK_INT(get_image(t.repo, "half", t.data, LENGTH / 2, &equal,
                            &t.x.err), GD_OK);
        CHECK(equal);
        teardown(&t);
    }
}

TEST_WITH(test_headers_that_are_wrong, setup(&t), teardown(&t))
{
    CHECK_INT(make_cold(&t), GD_OK);
    uint8_t header[512];
    int fd = openat(t.x.root, GROUP_1, O_RDWR);
    CHECK_INT(pread(fd, header, sizeof header, 0), sizeof header);
    gd_group *group;
    /* The header names no object. */
    memset(header + 88, 0, GD_ID_SIZE);
    uint64_t sum = gd_checksum(header, 504, 0);
    memcpy(header + 504, &sum, 8);
    CHECK_INT(pwrite(fd, header, sizeof header, 0), sizeof header);
    CHECK_INT(gd_group_open(t.x.env, t.x.root, &t.x.params, 1, O_RDONLY,
                            &group, &t.x.err), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "names no object");
    /* The header has another version. */
    header[8] = GD_GROUP_COLD + 1;
    CHECK_INT(pwrite(fd, header, sizeof header, 0), sizeof header);
    CHECK_INT(gd_group_open(t.x.env, t.x.root, &t.x.params, 1, O_RDONLY,
                            &group, &t.x.err), GD_VERSION);
    close(fd);
}
