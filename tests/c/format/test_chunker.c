/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_chunker.c - cuts into fixed blocks.
 */
#include "engine/format/chunker.h"

#include "tests/c/support/check.h"

TEST(test_block_sizes)
{
    gd_chunker c;
    gd_error err;
    for (size_t size = GD_BLOCK_MIN; size <= GD_BLOCK_MAX; size *= 2) {
        CHECK_INT(gd_chunker_fixed(&c, size, &err), GD_OK);
        CHECK_INT(c.max_length, size);
    }
    static const size_t bad[] = {0,    1,    256,    511,    513,     3000,
                                 4095, 4097, 131072, 65537, SIZE_MAX,
                                 SIZE_MAX / 2 + 1};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_INT(gd_chunker_fixed(&c, bad[i], &err), GD_INVALID);
    }
    gd_chunker_fixed(&c, 3000, &err);
    CHECK_CONTAINS(err.text, "3000");
    CHECK_CONTAINS(err.text, "512 to 65536");
}

TEST(test_one_cut)
{
    gd_chunker c;
    gd_error err;
    uint8_t data[1024] = {0};
    REQUIRE(gd_chunker_fixed(&c, 512, &err) == GD_OK);
    CHECK_INT(c.next(&c, data, 0, 0, false), 0);
    CHECK_INT(c.next(&c, data, 0, 0, true), 0);
    CHECK_INT(c.next(&c, data, 1, 0, false), 0);
    CHECK_INT(c.next(&c, data, 1, 0, true), 1);
    CHECK_INT(c.next(&c, data, 511, 0, false), 0);
    CHECK_INT(c.next(&c, data, 511, 0, true), 511);
    CHECK_INT(c.next(&c, data, 512, 0, false), 512);
    CHECK_INT(c.next(&c, data, 512, 0, true), 512);
    CHECK_INT(c.next(&c, data, 1024, 0, true), 512);
}

/* Streams of every length around a few blocks come in all kinds of portions:
 * all blocks are whole but the last. */
TEST(test_streams)
{
    enum { SIZE = 512, MAX_COUNT = 4 * SIZE + 2 };
    static uint8_t data[MAX_COUNT];
    gd_chunker c;
    gd_error err;
    REQUIRE(gd_chunker_fixed(&c, SIZE, &err) == GD_OK);
    for (size_t len = 0; len <= MAX_COUNT; len++) {
        for (size_t portion = 1; portion <= MAX_COUNT;
             portion = portion * 3 + 1) {
            size_t start = 0, blocks = 0;
            for (size_t have = 0; start < len;) {
                have = have + portion < len ? have + portion : len;
                size_t n;
                while ((n = c.next(&c, data + start, have - start, 0,
                                   have == len)) != 0) {
                    start += n;
                    blocks++;
                    CHECK(n == SIZE || start == len);
                }
            }
            CHECK_INT(start, len);
            CHECK_INT(blocks, (len + SIZE - 1) / SIZE);
        }
    }
}
