/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_listing.c - a listing has the items of the names that have one, sorted.
 */
#include "engine/base/listing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/c/support/check.h"
#include "tests/c/support/fault_env.h"

enum { FILES = 40 };

static bool
parse(const char *name, void *item)
{
    return sscanf(name, "n%d", (int *)item) == 1;
}

static int
compare(const void *a, const void *b)
{
    return *(const int *)a - *(const int *)b;
}

static const gd_listing numbers = {sizeof(int), "the numbers", parse, compare};

typedef struct fixture {
    fault_env f;
    char *directory;
    int root;
    void *items;
    size_t count;
    gd_error err;
} fixture;

static void
file_name(int i, char name[16])
{
    snprintf(name, 16, i < FILES ? "d/n%d" : "d/other%d", i);
}

static void
begin(fixture *x)
{
    x->directory = check_mkdir();
    fault_env_init(&x->f);
    x->root = open(x->directory, O_RDONLY | O_DIRECTORY);
    REQUIRE(x->root >= 0 && mkdirat(x->root, "d", 0700) == 0);
    for (int i = 0; i < FILES + 2; i++) {
        char name[16];
        file_name(i, name);
        int fd = openat(x->root, name, O_CREAT | O_WRONLY, 0600);
        REQUIRE(fd >= 0);
        close(fd);
    }
}

static void
end(fixture *x)
{
    close(x->root);
    check_rmdir(x->directory);
    CHECK_INT(fault_env_leaks(&x->f), 0);
    fault_env_destroy(&x->f);
}

static gd_status
list(fixture *x, const char *directory)
{
    return gd_list(&x->f.env, x->root, directory, &numbers, &x->items,
                   &x->count, &x->err);
}

TEST(test_sorted)
{
    fixture x;
    begin(&x);
    REQUIRE(list(&x, "d") == GD_OK);
    CHECK_INT(x.count, FILES);
    for (int i = 0; i < FILES; i++) {
        CHECK_INT(((int *)x.items)[i], i);
    }
    x.f.env.release(&x.f.env, x.items);
    end(&x);
}

TEST(test_no_directory)
{
    fixture x;
    begin(&x);
    CHECK_INT(list(&x, "absent"), GD_NOTFOUND);
    CHECK(x.items == NULL && x.count == 0);
    CHECK(strstr(x.err.text, "cannot list absent") != NULL);
    end(&x);
}

TEST(test_no_memory)
{
    fixture x;
    begin(&x);
    /* First the memory for the first items is missing, then that for more. */
    for (int at = 1; at <= 2; at++) {
        fault_env_fail(&x.f, FAULT_ALLOC, at, ENOMEM, false);
        CHECK_INT(list(&x, "d"), GD_NOMEM);
        CHECK(x.items == NULL && x.count == 0);
        CHECK(strcmp(x.err.text, "no memory for the numbers") == 0);
    }
    end(&x);
}
