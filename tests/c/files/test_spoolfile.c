/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_spoolfile.c - spool files and recipes as the maintainer finds them:
 * their kinds, whether they are live or in use, and that only the file that
 * was opened is ever removed.
 */
#include "engine/files/spoolfile.h"

#include "engine/base/coding.h"
#include "engine/files/image_delete.h"
#include "engine/files/locks.h"
#include "engine/files/spool.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { BLOCK = 4096, BLOCKS = 30, LENGTH = BLOCKS * BLOCK };

typedef struct fixture {
    scratch x;
    gd_repo *repo;
    uint8_t *data;
    gd_spool_file entry;
} fixture;

static void
setup(fixture *t)
{
    scratch_init(&t->x);
    t->repo = scratch_repo(&t->x);
    t->data = malloc(LENGTH);
    fill_random(t->data, LENGTH, 1);
}

static void
teardown(fixture *t)
{
    gd_repo_close(t->repo);
    free(t->data);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

static gd_status
put(fixture *t, const char *image_id)
{
    return put_image(t->repo, image_id, t->data, LENGTH, LENGTH, NULL,
                     &t->x.err);
}

static gd_status
delete(fixture *t, const char *image_id)
{
    return gd_image_delete(t->x.env, t->x.root, &t->x.params, image_id, NULL,
                           &t->x.err);
}

/* Opens the only spool file of that kind. */
static gd_status
open_kind(fixture *t, const char *prefix)
{
    char name[GD_NAME_SIZE];
    CHECK_INT(scratch_count(&t->x, "spool", prefix, name), 1);
    return gd_spool_file_open(t->x.env, t->x.root, &t->x.params,
                              strchr(name, '/') + 1, &t->entry, &t->x.err);
}

static gd_status
open_image(fixture *t, const char *image_id)
{
    return gd_spool_file_open_image(t->x.env, t->x.root, &t->x.params,
                                    image_id, &t->entry, &t->x.err);
}

static bool
is_live(fixture *t)
{
    bool live = false;
    CHECK_INT(gd_spool_file_live(&t->entry, &live, &t->x.err), GD_OK);
    return live;
}

static fixture t;

/* ---- listing ---- */

TEST_WITH(test_listing, setup(&t), teardown(&t))
{
    static const char *const names[] = {
        "spool/X-00000000000000000000000000000001",
        "spool/M-00000000000000000000000000000002",
        "spool/D-ffffffffffffffffffffffffffffffff",
        "spool/strange", "spool/.T-0000000000000000000000000000000"};
    gd_spool_base *entries;
    size_t count;
    CHECK_INT(gd_spool_file_list(t.x.env, t.x.root, &entries, &count,
                                 &t.x.err), GD_OK);
    CHECK_INT(count, 0);
    t.x.env->release(t.x.env, entries);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        scratch_write(&t.x, names[i], "x", 1, 0);
    }
    for (unsigned i = 0; i < 200; i++) {
        char name[GD_NAME_SIZE];
        snprintf(name, sizeof name, "spool/O-%032x", i * 7919 % 1000);
        scratch_write(&t.x, name, "x", 1, 0);
    }
    CHECK_INT(gd_spool_file_list(t.x.env, t.x.root, &entries, &count,
                                 &t.x.err), GD_OK);
    REQUIRE(count == 203);
    CHECK(strcmp(entries[0].name, strchr(names[2], '/') + 1) == 0);
    CHECK(strcmp(entries[202].name, strchr(names[0], '/') + 1) == 0);
    for (size_t i = 1; i < count; i++) {
        CHECK(strcmp(entries[i - 1].name, entries[i].name) < 0);
    }
    t.x.env->release(t.x.env, entries);
    fault_env_fail(&t.x.f, FAULT_LIST, 1, EIO, false);
    CHECK_INT(gd_spool_file_list(t.x.env, t.x.root, &entries, &count,
                                 &t.x.err), GD_IO);
    for (uint64_t n = 1; n < 3; n++) {
        fault_env_fail(&t.x.f, FAULT_ALLOC, n, ENOMEM, false);
        CHECK_INT(gd_spool_file_list(t.x.env, t.x.root, &entries, &count,
                                     &t.x.err), GD_NOMEM);
    }
}

TEST_WITH(test_committed, setup(&t), teardown(&t))
{
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK_INT(open_kind(&t, "T-"), GD_OK);
    CHECK(t.entry.complete && t.entry.damage.status == GD_OK);
    CHECK_INT(t.entry.kind, GD_SPOOL_STORE);
    CHECK_INT(t.entry.links, 2);
    CHECK(strcmp(t.entry.recipe.header.image_id, "one") == 0);
    CHECK(is_live(&t));
    CHECK_INT(delete(&t, "one"), GD_OK);
    CHECK(!is_live(&t));
    gd_spool_file_close(&t.entry);
    gd_spool_file_close(&t.entry);
    CHECK_INT(open_kind(&t, "D-"), GD_OK);
    CHECK_INT(t.entry.kind, GD_SPOOL_DELETED);
    CHECK(t.entry.complete && !is_live(&t));
    CHECK_INT(t.entry.links, 2);
    uint64_t inode = t.entry.inode;
    /* Another upload of that id is another inode. */
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK(!is_live(&t));
    gd_spool_file_close(&t.entry);
    CHECK_INT(open_image(&t, "one"), GD_OK);
    CHECK(t.entry.kind == 0 && t.entry.inode != inode && is_live(&t));
    struct stat st;
    CHECK_INT(fstatat(t.x.root, "images/one", &st, 0), 0);
    CHECK(t.entry.modified == (uint64_t)st.st_mtim.tv_sec * 1000000000u +
                                   (uint64_t)st.st_mtim.tv_nsec);
    gd_spool_file_close(&t.entry);
    CHECK_INT(open_image(&t, "two"), GD_NOTFOUND);
    CHECK_INT(open_image(&t, "../key"), GD_INVALID);
    CHECK_INT(gd_spool_file_open(t.x.env, t.x.root, &t.x.params,
                                 "../images/one", &t.entry, &t.x.err),
              GD_INVALID);
    CHECK_INT(gd_spool_file_open(
                  t.x.env, t.x.root, &t.x.params,
                  "T-00000000000000000000000000000000", &t.entry, &t.x.err),
              GD_NOTFOUND);
}

/* N4.3: a spool file that was not complete when it was opened is committed
 * before it is checked. If it counted as a dead writer's, its blocks would be
 * freed. */
TEST_WITH(test_completed_between_two_looks, setup(&t), teardown(&t))
{
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked;
    CHECK_INT(gd_transaction_begin(t.repo, "one", "", &gd_global_scope,
                                   &transaction, &t.x.err), GD_OK);
    CHECK_INT(gd_transaction_write(transaction, t.data, LENGTH, &t.x.err),
              GD_OK);
    CHECK_INT(open_kind(&t, "T-"), GD_OK);
    CHECK(!t.entry.complete && t.entry.damage.status == GD_OK);
    CHECK(!is_live(&t));
    CHECK_INT(gd_spool_file_lock(&t.entry, GD_BYTE_WRITER, &t.x.err), GD_BUSY);
    CHECK_INT(gd_transaction_commit(transaction, &header, &linked, &t.x.err),
              GD_OK);
    gd_transaction_end(transaction);
    CHECK_INT(gd_spool_file_lock(&t.entry, GD_BYTE_WRITER, &t.x.err), GD_OK);
    CHECK(is_live(&t) && t.entry.complete);
    gd_spool_file_close(&t.entry);
}

/* A failed check is an error and never "not live". */
TEST_WITH(test_a_look_that_fails, setup(&t), teardown(&t))
{
    bool live;
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK_INT(open_kind(&t, "T-"), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FSTATAT, 1, EIO, false);
    CHECK_INT(gd_spool_file_live(&t.entry, &live, &t.x.err), GD_IO);
    CHECK_CONTAINS(t.x.err.text, "images/one");
    fault_env_fail(&t.x.f, FAULT_FSTATAT, 1, EACCES, false);
    CHECK_INT(gd_spool_file_live(&t.entry, &live, &t.x.err), GD_DENIED);
    fault_env_fail(&t.x.f, FAULT_FSTAT, 1, EIO, false);
    CHECK_INT(gd_spool_file_live(&t.entry, &live, &t.x.err), GD_IO);
    CHECK(is_live(&t));
    gd_spool_file_close(&t.entry);
    for (uint64_t n = 1; n < 3; n++) { /* either reading of the header */
        fault_env_fail(&t.x.f, FAULT_PREAD, n, EIO, false);
        CHECK_INT(open_kind(&t, "T-"), GD_IO);
    }
    CHECK_INT(t.entry.fd, -1);
}

/* N3: the two bytes are separate; they show use by others, and no more. */
TEST_WITH(test_locks, setup(&t), teardown(&t))
{
    gd_image *image;
    int other;
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK_INT(gd_image_open(t.repo, "one", NULL, &image, &t.x.err), GD_OK);
    CHECK_INT(open_kind(&t, "T-"), GD_OK);
    CHECK_INT(gd_spool_file_lock(&t.entry, GD_BYTE_WRITER, &t.x.err), GD_OK);
    CHECK_INT(gd_spool_file_lock(&t.entry, GD_BYTE_USERS, &t.x.err), GD_BUSY);
    gd_image_close(image);
    CHECK_INT(gd_spool_file_lock(&t.entry, GD_BYTE_USERS, &t.x.err), GD_OK);
    other = openat(t.x.root, "images/one", O_RDWR | O_CLOEXEC);
    const gd_env *env = gd_env_posix();
    CHECK_INT(env->lock(env, other, GD_BYTE_WRITER, F_RDLCK), -EAGAIN);
    CHECK_INT(env->lock(env, other, GD_BYTE_USERS, F_RDLCK), -EAGAIN);
    gd_spool_file_close(&t.entry);
    CHECK_INT(env->lock(env, other, GD_BYTE_WRITER, F_WRLCK), 0);
    CHECK_INT(env->lock(env, other, GD_BYTE_USERS, F_WRLCK), 0);
    close(other);
    CHECK_INT(open_kind(&t, "T-"), GD_OK);
    fault_env_fail(&t.x.f, FAULT_LOCK, 1, ENOLCK, false);
    CHECK_INT(gd_spool_file_lock(&t.entry, GD_BYTE_USERS, &t.x.err), GD_IO);
    gd_spool_file_close(&t.entry);
}

/* ---- damage ---- */

static void
check_damage(fixture *t, const char *words)
{
    REQUIRE(open_kind(t, "T-") == GD_OK);
    CHECK(!t->entry.complete && !is_live(t));
    CHECK_CONTAINS(t->entry.damage.text, words);
    gd_run *runs;
    size_t count;
    uint64_t blocks;
    CHECK_INT(gd_spool_file_runs(&t->entry, 0, 1, &runs, &count, &t->x.err),
              GD_INVALID);
    CHECK_INT(gd_spool_file_measure(&t->entry, &blocks, &t->x.err),
              GD_INVALID);
    gd_spool_file_close(&t->entry);
}

/* Corrects the header page's checksum. */
static void
seal_header(const scratch *x, const char *name)
{
    uint8_t page[GD_RECIPE_PAGE];
    scratch_read(x, name, page, sizeof page, 0);
    gd_put64(page + 4088, gd_checksum(page, 4088, 0));
    scratch_write(x, name, page, sizeof page, 0);
}

TEST_WITH(test_damaged_headers, setup(&t), teardown(&t))
{
    char name[GD_NAME_SIZE];
    uint8_t page[GD_RECIPE_PAGE];
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK_INT(scratch_count(&t.x, "spool", "T-", name), 1);
    scratch_read(&t.x, name, page, sizeof page, 0);
    scratch_flip(&t.x, name, 100, 1);
    check_damage(&t, "checksum is wrong");
    CHECK_INT(open_image(&t, "one"), GD_OK); /* it opens, and reports that */
    CHECK_CONTAINS(t.entry.damage.text, "images/one");
    gd_spool_file_close(&t.entry);
    scratch_flip(&t.x, name, 100, 1);
    scratch_flip(&t.x, name, 9, 1);
    check_damage(&t, "format version");
    scratch_flip(&t.x, name, 9, 1);
    scratch_flip(&t.x, name, 0, 1);
    check_damage(&t, "no magic");
    scratch_flip(&t.x, name, 0, 1);
    scratch_flip(&t.x, name, 48, 1);
    seal_header(&t.x, name);
    check_damage(&t, "another transaction");
    scratch_write(&t.x, name, page, sizeof page, 0);
    scratch_write(&t.x, name, "/..", 3, 144); /* an id that is a path */
    seal_header(&t.x, name);
    check_damage(&t, "image id");
    scratch_write(&t.x, name, page, sizeof page, 0);
    scratch_truncate(&t.x, name, GD_RECIPE_PAGE);
    check_damage(&t, "pages");
}

/* A page that was never written is no damage, unless the recipe was
 * committed. */
TEST(test_incomplete)
{
    static const uint8_t zeros[2 * GD_RECIPE_PAGE];
    static const size_t lengths[] = {0, 1, GD_RECIPE_PAGE - 1, GD_RECIPE_PAGE,
                                     2 * GD_RECIPE_PAGE};
    fixture t;
    const char *name = "spool/T-000000000000000000000000000000aa";
    setup(&t);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        scratch_write(&t.x, name, zeros, lengths[i], 0);
        scratch_truncate(&t.x, name, lengths[i]);
        CHECK_INT(open_kind(&t, "T-"), GD_OK);
        CHECK(!t.entry.complete && t.entry.damage.status == GD_OK);
        CHECK(!is_live(&t));
        gd_spool_file_close(&t.entry);
        scratch_write(&t.x, "images/one", zeros, lengths[i], 0);
        scratch_truncate(&t.x, "images/one", lengths[i]);
        CHECK_INT(open_image(&t, "one"), GD_OK);
        CHECK(!t.entry.complete && t.entry.damage.status == GD_CORRUPT);
        gd_spool_file_close(&t.entry);
    }
    /* A group's file is no recipe, whatever its content. */
    scratch_write(&t.x, "spool/G-000000000000000000000000000000aa", "GD", 2,
                  0);
    CHECK_INT(open_kind(&t, "G-"), GD_OK);
    CHECK(!t.entry.complete && t.entry.damage.status == GD_OK);
    CHECK(!is_live(&t));
    gd_spool_file_close(&t.entry);
    teardown(&t);
}

TEST(test_strange_files)
{
    fixture t;
    const char *name = "spool/T-000000000000000000000000000000aa";
    setup(&t);
    CHECK_INT(symlinkat("../images/one", t.x.root, name), 0);
    CHECK_INT(open_kind(&t, "T-"), GD_IO);
    CHECK_INT(unlinkat(t.x.root, name, 0), 0);
    CHECK_INT(mknodat(t.x.root, name, S_IFIFO | 0600, 0), 0);
    CHECK_INT(open_kind(&t, "T-"), GD_OK); /* opening does not wait, either */
    CHECK_CONTAINS(t.entry.damage.text, "is not a file");
    gd_spool_file_close(&t.entry);
    teardown(&t);
}

/* ---- runs ---- */

TEST_WITH(test_runs, setup(&t), teardown(&t))
{
    gd_run *runs;
    size_t count;
    uint64_t blocks;
    memset(t.data + 5 * BLOCK, 0, 3 * BLOCK);
    memcpy(t.data + 20 * BLOCK, t.data, 4 * BLOCK);
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK_INT(open_kind(&t, "T-"), GD_OK);
    CHECK_INT(gd_spool_file_measure(&t.entry, &blocks, &t.x.err), GD_OK);
    CHECK_INT(blocks, 27);
    CHECK_INT(gd_spool_file_runs(&t.entry, 0, 1, &runs, &count, &t.x.err),
              GD_OK);
    REQUIRE(count == 4);
    static const gd_run wanted[] = {
        {1, 0, 5}, {1, 5, 12}, {1, 0, 4}, {1, 17, 6}};
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(runs[i].group, wanted[i].group);
        CHECK_INT(runs[i].slot, wanted[i].slot);
        CHECK_INT(runs[i].blocks, wanted[i].blocks);
    }
    t.x.env->release(t.x.env, runs);
    for (uint64_t n = 1; n < 2; n++) {
        fault_env_fail(&t.x.f, FAULT_ALLOC, n, ENOMEM, false);
        CHECK_INT(gd_spool_file_runs(&t.entry, 0, 1, &runs, &count, &t.x.err),
                  GD_NOMEM);
    }
    fault_env_fail(&t.x.f, FAULT_PREAD, 1, EIO, false);
    CHECK_INT(gd_spool_file_runs(&t.entry, 0, 1, &runs, &count, &t.x.err),
              GD_IO);
    fault_env_fail(&t.x.f, FAULT_PREAD, 1, EIO, false);
    CHECK_INT(gd_spool_file_measure(&t.entry, &blocks, &t.x.err), GD_IO);
    static const uint64_t beyond[][2] = {
        {0, 2}, {1, 1}, {2, 0}, {UINT64_MAX, 2}, {1, UINT64_MAX}};
    for (size_t i = 0; i < sizeof beyond / sizeof *beyond; i++) {
        CHECK_INT(gd_spool_file_runs(&t.entry, beyond[i][0], beyond[i][1],
                                     &runs, &count, &t.x.err), GD_INVALID);
    }
    gd_spool_file_close(&t.entry);
}

/* Makes a recipe of the extents given, in images/ and with right checksums. */
static gd_status
runs_of(fixture *t, const gd_extent *extents, uint32_t count, uint64_t size)
{
    uint8_t pages[4 * GD_RECIPE_PAGE] = {0};
    uint64_t seed = 77;
    memcpy(pages, "GDRECIPE", 8);
    gd_put16(pages + 8, 1);
    memcpy(pages + 16, t->x.params.repository_id, GD_ID_SIZE);
    gd_put64(pages + 48, seed);
    gd_put64(pages + 80, size);
    gd_put64(pages + 112, count);
    gd_put16(pages + 136, 3);
    memcpy(pages + 144, "odd", 3);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *page = pages + (1 + i / 102) * GD_RECIPE_PAGE;
        uint8_t *out = page + 8 + i % 102 * 40;
        gd_put32(page, 1 + i / 102);
        gd_put32(page + 4, i % 102 + 1);
        gd_put64(out, extents[i].offset);
        gd_put64(out + 8, extents[i].length);
        gd_put32(out + 16, extents[i].group);
        gd_put32(out + 20, extents[i].slot);
        gd_put32(out + 24, extents[i].blocks);
        gd_put32(out + 28, extents[i].kind);
    }
    uint32_t used = 1 + (count + 101) / 102;
    for (uint32_t i = 0; i < used; i++) {
        uint8_t *page = pages + i * GD_RECIPE_PAGE;
        gd_put64(page + 4088, gd_checksum(page, 4088, i == 0 ? 0 : seed));
    }
    scratch_write(&t->x, "images/odd", pages, used * GD_RECIPE_PAGE, 0);
    scratch_truncate(&t->x, "images/odd", used * GD_RECIPE_PAGE);
    gd_run *runs = NULL;
    size_t found;
    CHECK_INT(open_image(t, "odd"), GD_OK);
    CHECK(t->entry.complete);
    uint64_t blocks;
    gd_status s = gd_spool_file_measure(&t->entry, &blocks, &t->x.err);
    for (uint64_t page = 0; s == GD_OK && page < used - 1; page++) {
        s = gd_spool_file_runs(&t->entry, page, 1, &runs, &found, &t->x.err);
        CHECK_INT(s, GD_OK);
        CHECK_INT(found, page + 2 < used ? 102 : (count - 1) % 102 + 1);
        t->x.env->release(t->x.env, runs);
    }
    gd_spool_file_close(&t->entry);
    return s;
}

/* With these extents the accounting would count missing blocks, or leave some
 * out. */
TEST_WITH(test_hostile_extents, setup(&t), teardown(&t))
{
    static gd_extent extents[200];
    for (uint32_t i = 0; i < 200; i++) {
        extents[i] = (gd_extent){.offset = (uint64_t)i * BLOCK,
                                 .length = BLOCK,
                                 .group = 1,
                                 .slot = 2 * i,
                                 .blocks = 1,
                                 .kind = GD_EXTENT_BLOCKS_KIND};
    }
    CHECK_INT(runs_of(&t, extents, 200, 200 * BLOCK), GD_OK);
    CHECK_INT(runs_of(&t, extents, 200, 201 * BLOCK), GD_CORRUPT);
    CHECK_INT(runs_of(&t, extents + 1, 199, 200 * BLOCK), GD_CORRUPT);
    extents[102].offset += 1; /* a gap between two pages */
    extents[102].length -= 1;
    CHECK_INT(runs_of(&t, extents, 200, 200 * BLOCK), GD_CORRUPT);
    CHECK_CONTAINS(t.x.err.text, "page 2");
    extents[102].offset -= 1;
    extents[102].length += 1;
    extents[7].slot = 32767;
    CHECK_INT(runs_of(&t, extents, 200, 200 * BLOCK), GD_OK);
    extents[7].blocks = 2; /* beyond every group's end */
    CHECK_INT(runs_of(&t, extents, 200, 200 * BLOCK), GD_CORRUPT);
}

/* ---- completing operations ---- */

TEST_WITH(test_unlink, setup(&t), teardown(&t))
{
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK_INT(open_kind(&t, "T-"), GD_OK);
    CHECK_INT(gd_spool_file_unlink(&t.entry, &t.x.err), GD_OK);
    CHECK_INT(scratch_count(&t.x, "spool", "T-", NULL), 0);
    CHECK(scratch_exists(&t.x, "images/one") && is_live(&t));
    CHECK_INT(gd_spool_file_unlink(&t.entry, &t.x.err), GD_NOTFOUND);
    /* Another file of that name must not be removed. */
    scratch_write(&t.x, t.entry.name, "x", 1, 0);
    CHECK_INT(gd_spool_file_unlink(&t.entry, &t.x.err), GD_NOTFOUND);
    CHECK(scratch_exists(&t.x, t.entry.name));
    gd_spool_file_close(&t.entry);
}

TEST_WITH(test_set_aside, setup(&t), teardown(&t))
{
    char name[GD_NAME_SIZE], second[GD_NAME_SIZE], trace[256];
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK_INT(open_image(&t, "one"), GD_OK);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(gd_spool_file_set_aside(&t.entry, name, &t.x.err), GD_OK);
    fault_env_trace(&t.x.f, trace, sizeof trace);
    CHECK(strcmp(trace, "linkat fsync") == 0);
    CHECK_INT(strncmp(name, "quarantine/one-", 15), 0);
    CHECK(gd_same_file(t.x.env, t.entry.fd, t.x.root, name));
    CHECK(is_live(&t)); /* the first name stays */
    CHECK_INT(gd_spool_file_set_aside(&t.entry, second, &t.x.err), GD_OK);
    CHECK(strcmp(name, second) != 0);
    fault_env_fail(&t.x.f, FAULT_FSYNC, 1, EIO, false);
    CHECK_INT(gd_spool_file_set_aside(&t.entry, second, &t.x.err), GD_IO);
    fault_env_fail(&t.x.f, FAULT_LINKAT, 1, ENOSPC, false);
    CHECK_INT(gd_spool_file_set_aside(&t.entry, second, &t.x.err), GD_NOSPACE);
    CHECK_INT(delete(&t, "one"), GD_OK);
    CHECK_INT(put(&t, "one"), GD_OK);
    unsigned before = scratch_count(&t.x, "quarantine", "", NULL);
    CHECK_INT(gd_spool_file_set_aside(&t.entry, second, &t.x.err),
              GD_NOTFOUND);
    CHECK_INT(scratch_count(&t.x, "quarantine", "", NULL), before);
    gd_spool_file_close(&t.entry);
    /* The longest id has room. */
    char id[GD_IMAGE_ID_MAX + 1];
    memset(id, 'i', sizeof id - 1);
    id[sizeof id - 1] = '\0';
    CHECK_INT(put(&t, id), GD_OK);
    CHECK_INT(open_image(&t, id), GD_OK);
    CHECK_INT(gd_spool_file_set_aside(&t.entry, name, &t.x.err), GD_OK);
    CHECK(scratch_exists(&t.x, name));
    gd_spool_file_close(&t.entry);
}

TEST_WITH(test_delete, setup(&t), teardown(&t))
{
    char trace[256];
    int lock;
    CHECK_INT(put(&t, "one"), GD_OK);
    scratch_flip(&t.x, "images/one", 100, 1);
    CHECK_INT(open_image(&t, "one"), GD_OK);
    CHECK(!t.entry.complete);
    /* N9.1 */
    CHECK_INT(gd_locks_lock_image(t.x.env, t.x.root, "one", 0, &lock,
                                  &t.x.err),
              GD_OK);
    CHECK_INT(gd_spool_file_delete(&t.entry, &t.x.err), GD_BUSY);
    gd_locks_unlock_image(t.x.env, lock);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(gd_spool_file_delete(&t.entry, &t.x.err), GD_OK);
    fault_env_trace(&t.x.f, trace, sizeof trace);
    CHECK(strcmp(trace, "linkat fsync unlinkat fsync") == 0);
    CHECK(!scratch_exists(&t.x, "images/one"));
    CHECK_INT(scratch_count(&t.x, "spool", "D-", NULL), 1);
    /* A new upload of the id is another file than the open one. */
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK_INT(gd_spool_file_delete(&t.entry, &t.x.err), GD_NOTFOUND);
    CHECK(scratch_exists(&t.x, "images/one"));
    gd_spool_file_close(&t.entry);
    CHECK_INT(open_kind(&t, "D-"), GD_OK);
    CHECK_INT(gd_spool_file_delete(&t.entry, &t.x.err), GD_INVALID);
    gd_spool_file_close(&t.entry);
}

static bool
is_same(fixture *t, const char *image_id)
{
    return gd_spool_file_is_same(t->x.env, t->x.root, image_id,
                                 t->entry.inode, t->entry.modified);
}

TEST_WITH(test_the_same_file, setup(&t), teardown(&t))
{
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK_INT(put(&t, "two"), GD_OK);
    CHECK_INT(open_image(&t, "one"), GD_OK);
    CHECK(is_same(&t, "one"));
    CHECK(!is_same(&t, "two") && !is_same(&t, "none") && !is_same(&t, "../x"));
    t.entry.modified++;
    CHECK(!is_same(&t, "one"));
    t.entry.modified--;
    /* If the check fails, the file is read again. */
    fault_env_fail(&t.x.f, FAULT_FSTATAT, 1, EIO, false);
    CHECK(!is_same(&t, "one"));
    CHECK(is_same(&t, "one"));
    /* The open file keeps its inode from being used again. */
    CHECK_INT(delete(&t, "one"), GD_OK);
    CHECK_INT(put(&t, "one"), GD_OK);
    CHECK(!is_same(&t, "one"));
    gd_spool_file_close(&t.entry);
}
