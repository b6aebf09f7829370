/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_slices.c - ranges of an object, out of files that a source makes.
 */
#include "engine/files/slices.h"

#include <stdlib.h>

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum {
    LENGTH = 3 * GD_SLICE + 12345,
};

typedef struct fixture {
    scratch x;
    uint8_t *data; /* the object's */
    gd_object object;
    gd_slices *slices;
    unsigned fetches, fetched; /* calls, and slices that they named */
    uint32_t first, expected;  /* of the last announcement */
    gd_status answer;
    bool disk_is_full;
} fixture;

static void
make_slice(fixture *t, uint32_t slice)
{
    char name[64];
    size_t at = (size_t)snprintf(name, sizeof name, "%s/",
                                 t->disk_is_full ? "memory" : "slices");
    for (size_t i = 0; i < GD_ID_SIZE; i++) {
        at += (size_t)snprintf(name + at, sizeof name - at, "%02x",
                               t->object.id[i]);
    }
    (void)mkdirat(t->x.root, name, 0700);
    snprintf(name + at, sizeof name - at, "/%08x", slice);
    uint64_t start = (uint64_t)slice * GD_SLICE, left = LENGTH - start;
    scratch_write(&t->x, name, t->data + start,
                  left < GD_SLICE ? (size_t)left : GD_SLICE, 0);
}

static gd_status
fetch(void *arg, const gd_object *object, uint32_t first, uint32_t count,
      gd_error *err)
{
    fixture *t = arg;
    CHECK(object == &t->object);
    t->fetches++;
    t->fetched += count;
    for (uint32_t i = first; t->answer == GD_OK && i < first + count; i++) {
        make_slice(t, i);
    }
    return t->answer == GD_OK ? GD_OK : gd_fail(err, t->answer, "refused");
}

static void
expect(void *arg, const gd_object *object, uint32_t first, uint32_t count)
{
    fixture *t = arg;
    CHECK(object == &t->object);
    t->first = first;
    t->expected = count;
}

static void
setup(fixture *t)
{
    char path[512], memory[512];
    memset(t, 0, sizeof *t);
    scratch_init(&t->x);
    CHECK_INT(mkdirat(t->x.root, "slices", 0700), 0);
    CHECK_INT(mkdirat(t->x.root, "memory", 0700), 0);
    snprintf(path, sizeof path, "%s/slices", t->x.dir);
    snprintf(memory, sizeof memory, "%s/memory", t->x.dir);
    t->data = malloc(LENGTH);
    fill_random(t->data, LENGTH, 3);
    t->object = (gd_object){.group = 1, .id = {1, 2, 0xff}, .length = LENGTH};
    gd_slice_source source = {t, fetch, expect};
    CHECK_INT(gd_slices_open(t->x.env, path, memory, &source, &t->slices,
                             &t->x.err), GD_OK);
}

static void
teardown(fixture *t)
{
    gd_slices_close(t->slices);
    free(t->data);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

static gd_status
read_range(fixture *t, uint64_t offset, size_t length)
{
    uint8_t *out = malloc(length + 1);
    gd_status s = gd_slices_read(t->slices, &t->object, out, length, offset,
                                 "groups/00000001", &t->x.err);
    if (s == GD_OK) {
        CHECK(memcmp(out, t->data + offset, length) == 0);
    }
    free(out);
    return s;
}

static fixture t;

TEST_WITH(test_ranges, setup(&t), teardown(&t))
{
    const struct {
        uint64_t offset;
        size_t length;
        unsigned slices; /* that were missing */
    } ranges[] = {
        {GD_SLICE, 1, 1},           {0, GD_SLICE, 1},
        {GD_SLICE - 1, 2, 0},       {LENGTH - 1, 1, 1},
        {0, LENGTH, 2},             {LENGTH, 0, 0},
        {2 * GD_SLICE, 0, 0},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        unsigned before = t.fetched;
        CHECK_INT(read_range(&t, ranges[i].offset, ranges[i].length), GD_OK);
        CHECK_INT(t.fetched - before, ranges[i].slices);
    }
    CHECK_INT(t.fetches, 4); /* slices behind one another by one call */
}

TEST_WITH(test_behind_the_end, setup(&t), teardown(&t))
{
    CHECK_INT(read_range(&t, LENGTH, 1), GD_CORRUPT);
    CHECK_INT(read_range(&t, LENGTH - 1, 2), GD_CORRUPT);
    CHECK_INT(read_range(&t, UINT64_MAX, 2), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "groups/00000001");
    CHECK_INT(t.fetches, 0);
}

TEST_WITH(test_the_source_fails, setup(&t), teardown(&t))
{
    t.answer = GD_UNAVAILABLE;
    CHECK_INT(read_range(&t, 0, 1), GD_UNAVAILABLE);
    CHECK_CONTAINS(t.x.err.text, "refused");
    t.answer = GD_NOSPACE;
    CHECK_INT(read_range(&t, 0, 1), GD_NOSPACE);
    t.answer = GD_OK;
    CHECK_INT(read_range(&t, 0, 1), GD_OK);
}

TEST_WITH(test_forgotten_slices_are_fetched_again, setup(&t), teardown(&t))
{
    CHECK_INT(read_range(&t, 0, LENGTH), GD_OK);
    CHECK_INT(t.fetched, 4);
    gd_slices_forget(t.slices, &t.object, GD_SLICE - 1, 2);
    gd_slices_forget(t.slices, &t.object, 0, 0);
    CHECK_INT(read_range(&t, 2 * GD_SLICE, GD_SLICE), GD_OK);
    CHECK_INT(t.fetched, 4);
    CHECK_INT(read_range(&t, 0, 2 * GD_SLICE), GD_OK);
    CHECK_INT(t.fetched, 6);
}

TEST_WITH(test_announcements, setup(&t), teardown(&t))
{
    gd_slices_expect(t.slices, &t.object, GD_SLICE, 1);
    CHECK_INT(t.first, 1);
    CHECK_INT(t.expected, 1);
    gd_slices_expect(t.slices, &t.object, GD_SLICE - 1, 2);
    CHECK_INT(t.first, 0);
    CHECK_INT(t.expected, 2);
    gd_slices_expect(t.slices, &t.object, 1, 1 << 30); /* to its end */
    CHECK_INT(t.expected, 4);
    /* The source gets no request for slices that are there. */
    make_slice(&t, 1);
    t.expected = 0;
    gd_slices_expect(t.slices, &t.object, GD_SLICE, GD_SLICE);
    CHECK_INT(t.expected, 0);
    gd_slices_expect(t.slices, &t.object, 0, 4 * GD_SLICE);
    CHECK_INT(t.first, 2);
    CHECK_INT(t.expected, 2);
    gd_slices_expect(t.slices, &t.object, 0, 2 * GD_SLICE);
    CHECK_INT(t.first, 0);
    CHECK_INT(t.expected, 1);
    t.expected = 0;
    gd_slices_expect(t.slices, &t.object, UINT64_MAX, UINT64_MAX);
    gd_slices_expect(t.slices, &t.object, LENGTH, 1);
    gd_slices_expect(t.slices, &t.object, 0, 0);
    CHECK_INT(t.expected, 0);
}

TEST_WITH(test_counts, setup(&t), teardown(&t))
{
    CHECK_INT(read_range(&t, GD_SLICE - 1, 2), GD_OK);
    gd_slice_counts counts = gd_slices_get_counts(t.slices);
    CHECK_INT(counts.reads, 2);
    CHECK_INT(counts.misses, 1); /* both slices were fetched together */
    CHECK_INT(read_range(&t, 0, 1), GD_OK);
    counts = gd_slices_get_counts(t.slices);
    CHECK_INT(counts.reads, 3);
    CHECK_INT(counts.misses, 1);
}

/* Each call fails once: the result is an error, or the right bytes. */
static bool
fail_one(fault_call call, uint64_t n)
{
    fixture t;
    setup(&t);
    fault_env_fail(&t.x.f, call, n, EIO, false);
    gd_status s = read_range(&t, 0, GD_SLICE + 1);
    bool was_there = t.x.f.faults > 0;
    fault_env_heal(&t.x.f);
    CHECK(s == GD_OK || s == GD_IO);
    CHECK_INT(read_range(&t, 0, GD_SLICE + 1), GD_OK);
    teardown(&t);
    return was_there;
}

/* The source puts slices there while the disk is full. */
TEST_WITH(test_slices_in_memory, setup(&t), teardown(&t))
{
    CHECK_INT(read_range(&t, 0, 100), GD_OK);
    t.disk_is_full = true;
    CHECK_INT(read_range(&t, GD_SLICE - 10, GD_SLICE), GD_OK);
    CHECK_INT(t.fetched, 2);
    CHECK_INT(read_range(&t, GD_SLICE, 100), GD_OK);
    CHECK_INT(t.fetched, 2);
    gd_slices_expect(t.slices, &t.object, 0, LENGTH);
    CHECK(t.first == 2 && t.expected == 2);
    gd_slices_forget(t.slices, &t.object, 0, 2 * GD_SLICE);
    CHECK_INT(read_range(&t, 0, 2 * GD_SLICE), GD_OK);
    CHECK_INT(t.fetched, 4);
}

TEST(test_each_call_fails)
{
    sweep_faults(fail_one, 1);
}

TEST_WITH(test_no_directory, setup(&t), teardown(&t))
{
    gd_slices *none;
    gd_slice_source source = {&t, fetch, expect};
    CHECK_INT(gd_slices_open(t.x.env, "/nonexistent/slices", NULL, &source,
                             &none, &t.x.err), GD_NOTFOUND);
    CHECK_CONTAINS(t.x.err.text, "/nonexistent");
    CHECK_INT(gd_slices_open(t.x.env, t.x.dir, "/nonexistent/slices", &source,
                             &none, &t.x.err), GD_NOTFOUND);
    CHECK_INT(gd_slices_open(t.x.env, "/nonexistent/", NULL, &source, &none,
                             &t.x.err), GD_INVALID);
}
