/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_golden.c - this build's encoder makes the bytes that it must (F3).
 */
#include "engine/deflate/golden.h"

#include "tests/c/support/check.h"

TEST(test_known_bytes)
{
    gd_error err;
    CHECK_INT(gd_golden_compare(gd_env_posix(), &err), GD_OK);
}
