/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_directory.c - directories that a crash left of volumes while they were
 * made or deleted (volumes.rst, V9).
 */
#include "engine/volume/volume.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/c/support/check.h"
#include "tests/c/support/sector_model.h"

/* The crash came before the lock had a name, or after the name was removed. */
TEST(test_without_a_lock)
{
    gd_volume_head head;
    model_setup(0);
    CHECK_INT(mkdirat(the_repo->root, "volumes/disk", 0700), 0);
    CHECK_INT(gd_volume_reap(the_repo, "disk", &the_scratch.err), GD_OK);
    CHECK_INT(faccessat(the_repo->root, "volumes/disk", F_OK, 0), -1);
    CHECK_INT(gd_volume_reap(the_repo, "disk", &the_scratch.err),
              GD_NOTFOUND);
    /* A volume can be made in place of such a directory. */
    CHECK_INT(mkdirat(the_repo->root, "volumes/disk", 0700), 0);
    CHECK_INT(model_create(8), GD_OK);
    CHECK_INT(gd_volume_read_head(the_repo, "disk", &head, &the_scratch.err),
              GD_OK);
    model_delete();
    model_teardown();
}

/* Another program put a file there: the directory stays. */
TEST(test_without_a_lock_but_with_something)
{
    model_setup(0);
    CHECK_INT(mkdirat(the_repo->root, "volumes/disk", 0700), 0);
    CHECK_INT(mkdirat(the_repo->root, "volumes/disk/x", 0700), 0);
    CHECK_INT(gd_volume_reap(the_repo, "disk", &the_scratch.err),
              GD_NOTFOUND);
    CHECK_INT(faccessat(the_repo->root, "volumes/disk/x", F_OK, 0), 0);
    model_teardown();
}
