/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_zero.c - the test for zeros, against its reference.
 */
#include "engine/base/zero.h"

#include "tests/c/support/check.h"

/* The bytes have a block of malloc to themselves, so that the address
 * sanitizer sees a read beyond them, and have non-zero neighbours. */
static void
check_zeros(size_t offset, size_t len, size_t step)
{
    uint8_t *memory = malloc(offset + len + 1);
    if (!CHECK(memory != NULL)) {
        return;
    }
    uint8_t *data = memory + offset;
    memset(memory, 0xff, offset + len + 1);
    memset(data, 0, len);
    CHECK(gd_is_zero(data, len));
    CHECK(gd_is_zero_scalar(data, len));
    for (size_t i = 0; i < len; i += step) {
        data[i] = (uint8_t)(1 << i % 8);
        bool fast = gd_is_zero(data, len);
        if (fast || fast != gd_is_zero_scalar(data, len)) {
            fprintf(stderr, "offset %zu, length %zu, byte %zu\n", offset, len,
                    i);
            CHECK(!fast);
        }
        data[i] = 0;
    }
    free(memory);
}

static void
check_zeros_exact(size_t len)
{
    uint8_t *data = calloc(1, len == 0 ? 1 : len);
    if (CHECK(data != NULL)) {
        CHECK(gd_is_zero(data, len));
        if (len > 0) {
            data[len - 1] = 0x80;
            CHECK(!gd_is_zero(data, len));
        }
    }
    free(data);
}

TEST(test_zeros)
{
    for (size_t offset = 0; offset <= 17; offset++) {
        for (size_t len = 0; len <= 350; len++) {
            check_zeros(offset, len, 1);
        }
        for (size_t len = 500; len <= 530; len++) {
            check_zeros(offset, len, 1);
        }
        check_zeros(offset, 4095, 13);
        check_zeros(offset, 4096, 13);
        check_zeros(offset, 4097, 13);
    }
    for (size_t len = 0; len <= 1100; len++) {
        check_zeros_exact(len);
    }
}
