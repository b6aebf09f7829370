/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_status.c - statuses, and the sentences that go with them.
 */
#include "engine/base/status.h"

#include <errno.h>

#include "tests/c/support/check.h"

TEST(test_fail_fills_in)
{
    gd_error err = {.sys_errno = 99};
    CHECK_INT(gd_fail(&err, GD_CORRUPT, "%s at %d", "group 7", 4096),
              GD_CORRUPT);
    CHECK_INT(err.status, GD_CORRUPT);
    CHECK_INT(err.sys_errno, 0);
    CHECK(strcmp(err.text, "group 7 at 4096") == 0);
}

TEST(test_error_may_be_null)
{
    CHECK_INT(gd_fail(NULL, GD_BUSY, "nobody reads this"), GD_BUSY);
    CHECK_INT(gd_fail_errno(NULL, ENOSPC, "nor this"), GD_NOSPACE);
}

TEST(test_errno_chooses_status)
{
    static const struct {
        int sys_errno;
        gd_status status;
    } table[] = {
        {ENOSPC, GD_NOSPACE}, {EDQUOT, GD_NOSPACE}, {EFBIG, GD_NOSPACE},
        {EACCES, GD_DENIED},  {EPERM, GD_DENIED},   {EROFS, GD_DENIED},
        {ENOENT, GD_NOTFOUND}, {EEXIST, GD_EXISTS}, {ENOMEM, GD_NOMEM},
        {EIO, GD_IO},         {EMFILE, GD_IO},      {ESTALE, GD_IO},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        gd_error err;
        CHECK_INT(gd_fail_errno(&err, table[i].sys_errno, "cannot"),
                  table[i].status);
        CHECK_INT(err.status, table[i].status);
        CHECK_INT(err.sys_errno, table[i].sys_errno);
    }
}

TEST(test_errno_appends_words)
{
    gd_error err;
    gd_fail_errno(&err, EIO, "cannot read %s at offset %d", "x", 5);
    CHECK(strcmp(err.text, "cannot read x at offset 5: Input/output error") ==
          0);
}

TEST(test_long_text_is_cut)
{
    char name[2 * GD_ERROR_TEXT];
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = '\0';
    gd_error err;
    gd_fail(&err, GD_INVALID, "%s", name);
    CHECK_INT(strlen(err.text), GD_ERROR_TEXT - 1);
    gd_fail_errno(&err, EIO, "%s", name);
    CHECK_INT(strlen(err.text), GD_ERROR_TEXT - 1);
    CHECK_INT(err.status, GD_IO);
}

TEST(test_names_differ)
{
    for (int a = GD_OK; a <= GD_CLOSED; a++) {
        CHECK(strcmp(gd_status_name(a), "unknown") != 0);
        for (int b = GD_OK; b < a; b++) {
            CHECK(strcmp(gd_status_name(a), gd_status_name(b)) != 0);
        }
    }
    CHECK(strcmp(gd_status_name((gd_status)77), "unknown") == 0);
}
