/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check.c - see check.h.
 */
#include "tests/c/support/check.h"

check_state check_all;
