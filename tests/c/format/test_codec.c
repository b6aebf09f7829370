/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_codec.c - the names and the levels of codecs.  test_segment.c compresses
 * and decompresses.
 */
#include "engine/format/codec.h"

#include "tests/c/support/check.h"

TEST(test_names_and_levels)
{
    gd_codec codec;
    gd_error err;
    CHECK_INT(gd_codec_parse("none", &codec, &err), GD_OK);
    CHECK_INT(codec, 0);
    CHECK_INT(gd_codec_parse("lz4", &codec, &err), GD_OK);
    CHECK_INT(codec, 1);
    CHECK_INT(gd_codec_parse("zstd", &codec, &err), GD_OK);
    CHECK_INT(codec, 2);
    CHECK_INT(gd_codec_parse("ZSTD", &codec, &err), GD_INVALID);
    CHECK_INT(gd_codec_parse("", &codec, &err), GD_INVALID);
    CHECK_INT(gd_codec_parse("gzip", &codec, &err), GD_INVALID);
    CHECK_CONTAINS(err.text, "gzip");
    for (int level = -1; level <= 20; level++) {
        gd_status zstd = level >= 0 && level <= 19 ? GD_OK : GD_INVALID;
        gd_status other = level == 0 ? GD_OK : GD_INVALID;
        CHECK_INT(gd_codec_require_level(GD_CODEC_ZSTD, level, &err), zstd);
        CHECK_INT(gd_codec_require_level(GD_CODEC_LZ4, level, &err), other);
        CHECK_INT(gd_codec_require_level(GD_CODEC_NONE, level, &err), other);
    }
}
