/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_secondname.c - the second name of a file that is being replaced, and
 * the steps of each process that finds one (N14).
 */
#include "engine/files/secondname.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/files/group.h"
#include "engine/files/image_delete.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { LENGTH = 20 * 4096 };

static scratch x;
static gd_repo *repo;
static uint8_t *data;

static void
setup(bool shared)
{
    scratch_init(&x);
    x.f.shared = shared;
    repo = scratch_repo(&x);
    x.params.shared = shared;
    data = malloc(LENGTH);
    fill_random(data, LENGTH, 1);
}

static void
teardown(void)
{
    gd_repo_close(repo);
    free(data);
    CHECK_INT(scratch_destroy(&x), 0);
}

static gd_status
put(const char *image_id)
{
    return put_image(repo, image_id, data, LENGTH, LENGTH, NULL, &x.err);
}

static gd_status
get(const char *image_id)
{
    bool equal;
    gd_status s = get_image(repo, image_id, data, LENGTH, &equal, &x.err);
    CHECK(s != GD_OK || equal);
    return s;
}

static gd_status
settle(const char *name)
{
    return gd_second_name_finish(x.env, x.root, &x.params, name, &x.err);
}

/* Does as a client that replaces an open file and dies in between. */
static void
lose_name(const char *name)
{
    CHECK_INT(gd_second_name_make(x.env, x.root, &x.params, name, &x.err),
              GD_OK);
    CHECK_INT(unlinkat(x.root, name, 0), 0);
}

TEST_WITH(test_n14_1_a_second_name_is_made_and_removed, setup(true),
          teardown())
{
    CHECK_INT(put("one"), GD_OK);
    for (int twice = 0; twice < 2; twice++) {
        CHECK_INT(gd_second_name_make(x.env, x.root, &x.params, "images/one",
                                      &x.err), GD_OK);
    }
    CHECK(scratch_exists(&x, "images/one~"));
    gd_second_name_remove(x.env, x.root, &x.params, "images/one");
    CHECK(!scratch_exists(&x, "images/one~"));
    CHECK(scratch_exists(&x, "images/one"));
    CHECK_INT(gd_second_name_make(x.env, x.root, &x.params, "images/other",
                                  &x.err), GD_NOTFOUND);
}

TEST_WITH(test_a_local_file_system_has_none, setup(false), teardown())
{
    CHECK_INT(put("one"), GD_OK);
    CHECK_INT(gd_second_name_make(x.env, x.root, &x.params, "images/one",
                                  &x.err), GD_OK);
    CHECK(!scratch_exists(&x, "images/one~"));
    uint64_t looks = fault_env_count(&x.f, FAULT_FSTATAT);
    CHECK_INT(settle("images/one"), GD_OK);
    CHECK_INT(gd_second_name_finish_images(x.env, x.root, &x.params, &x.err),
              GD_OK);
    CHECK_INT(fault_env_count(&x.f, FAULT_FSTATAT), looks);
}

TEST_WITH(test_n14_2_an_image_is_found_by_either_name, setup(true), teardown())
{
    CHECK_INT(put("one"), GD_OK);
    lose_name("images/one");
    CHECK_INT(get("one"), GD_OK);
    CHECK_INT(get("two"), GD_NOTFOUND);
}

TEST_WITH(test_n14_2_groups_are_listed_by_either_name, setup(true), teardown())
{
    uint32_t *numbers;
    size_t count;
    CHECK_INT(put("one"), GD_OK);
    for (int lost = 0; lost < 2; lost++) {
        CHECK_INT(gd_group_numbers(x.env, x.root, &numbers, &count, &x.err),
                  GD_OK);
        CHECK_INT(count, 1);
        CHECK_INT(numbers[0], 1);
        x.env->release(x.env, numbers);
        if (lost == 0) {
            CHECK_INT(gd_second_name_make(x.env, x.root, &x.params,
                                          "groups/00000001", &x.err), GD_OK);
        }
    }
    CHECK_INT(unlinkat(x.root, "groups/00000001", 0), 0);
    CHECK_INT(get("one"), GD_OK);
    /* No other group gets the number. */
    gd_repo_close(repo);
    repo = scratch_repo(&x);
    CHECK_INT(put("two"), GD_OK);
    CHECK_INT(get("one"), GD_OK);
    CHECK_INT(get("two"), GD_OK);
}

TEST(test_names_of_groups)
{
    uint32_t number = 0;
    CHECK(gd_names_parse_any_group("0000002a", &number) && number == 42);
    number = 0;
    CHECK(gd_names_parse_any_group("0000002a~", &number) && number == 42);
    static const char *const others[] = {"", "~", "0000002~", "0000002a~~",
                                         "0000002a-", "00000000~",
                                         "0000002A~", "0000002a0"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        CHECK(!gd_names_parse_any_group(others[i], &number));
    }
}

TEST_WITH(test_n14_3_names_are_settled, setup(true), teardown())
{
    CHECK_INT(put("one"), GD_OK);
    CHECK_INT(settle("images/one"), GD_OK);
    CHECK_INT(settle("images/none"), GD_OK);
    lose_name("images/one");
    CHECK_INT(settle("images/one"), GD_OK);
    CHECK(scratch_exists(&x, "images/one"));
    CHECK(!scratch_exists(&x, "images/one~"));
    CHECK_INT(gd_second_name_make(x.env, x.root, &x.params, "images/one",
                                  &x.err), GD_OK);
    CHECK_INT(settle("images/one"), GD_OK);
    CHECK(scratch_exists(&x, "images/one"));
    CHECK(!scratch_exists(&x, "images/one~"));
    CHECK_INT(get("one"), GD_OK);
}

TEST(test_n14_3_a_deleted_image_does_not_come_back)
{
    for (int lost = 0; lost < 2; lost++) {
        setup(true);
        CHECK_INT(put("one"), GD_OK);
        CHECK_INT(gd_second_name_make(x.env, x.root, &x.params, "images/one",
                                      &x.err), GD_OK);
        if (lost) {
            CHECK_INT(unlinkat(x.root, "images/one", 0), 0);
        }
        CHECK_INT(gd_image_delete(x.env, x.root, &x.params, "one", NULL,
                                  &x.err), GD_OK);
        CHECK_INT(scratch_count(&x, "images", "", NULL), 0);
        CHECK_INT(scratch_count(&x, "spool", "D-", NULL), 1);
        CHECK_INT(gd_second_name_finish_images(x.env, x.root, &x.params,
                                               &x.err), GD_OK);
        CHECK_INT(get("one"), GD_NOTFOUND);
        teardown();
    }
}

TEST(test_n14_3_a_maintainer_settles_all_images)
{
    char id[GD_IMAGE_ID_MAX + 1], name[GD_NAME_SIZE];
    memset(id, 'a', GD_IMAGE_ID_MAX);
    id[GD_IMAGE_ID_MAX] = '\0';
    setup(true);
    CHECK_INT(put("one"), GD_OK);
    CHECK_INT(put("two"), GD_OK);
    CHECK_INT(put(id), GD_OK);
    lose_name("images/one");
    snprintf(name, sizeof name, "images/%s", id);
    lose_name(name);
    scratch_write(&x, "images/.nfs~", "x", 1, 0);
    CHECK_INT(gd_second_name_finish_images(x.env, x.root, &x.params, &x.err),
              GD_OK);
    CHECK(scratch_exists(&x, "images/one"));
    CHECK(scratch_exists(&x, name));
    CHECK_INT(scratch_count(&x, "images", "", NULL), 3);
    CHECK_INT(get("one"), GD_OK);
    CHECK_INT(get(id), GD_OK);
    teardown();
}

TEST_WITH(test_n14_4_a_second_upload_is_refused_in_the_gap, setup(true),
          teardown())
{
    CHECK_INT(put("one"), GD_OK);
    lose_name("images/one");
    CHECK_INT(put("one"), GD_EXISTS);
    CHECK_INT(get("one"), GD_OK);
    CHECK(!scratch_exists(&x, "images/one~"));
}

static bool
fail_one(fault_call call, uint64_t n)
{
    setup(true);
    CHECK_INT(put("one"), GD_OK);
    lose_name("images/one");
    fault_env_fail(&x.f, call, n, EIO, false);
    (void)gd_second_name_finish_images(x.env, x.root, &x.params, &x.err);
    bool failed = fault_env_faults(&x.f) > 0;
    fault_env_heal(&x.f);
    CHECK_INT(get("one"), GD_OK);
    CHECK_INT(gd_second_name_finish_images(x.env, x.root, &x.params, &x.err),
              GD_OK);
    CHECK(scratch_exists(&x, "images/one"));
    CHECK(!scratch_exists(&x, "images/one~"));
    teardown();
    return failed;
}

TEST(test_errors_lose_nothing)
{
    sweep_faults(fail_one, 1);
}
