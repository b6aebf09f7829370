/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.c - see codec.h.  LZ4 blocks and Zstandard frames come from their own
 * libraries, whose safe decoders bound every access.
 */
#include "engine/format/codec.h"

#include <lz4.h>
#include <string.h>
#include <zstd.h>

struct gd_coder {
    ZSTD_CCtx *compress;
    ZSTD_DCtx *decode;
};

gd_status
gd_codec_parse(const char *name, gd_codec *codec, gd_error *err)
{
    static const char *const names[] = {"none", "lz4", "zstd"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i]) == 0) {
            *codec = (gd_codec)i;
            return GD_OK;
        }
    }
    return gd_fail(err, GD_INVALID,
                   "there is no codec '%s': choose none, lz4 or zstd", name);
}

gd_status
gd_codec_require_level(gd_codec codec, int level, gd_error *err)
{
    int highest = codec == GD_CODEC_ZSTD ? 19 : 0;
    if (level < 0 || level > highest) {
        return gd_fail(err, GD_INVALID,
                       "codec level %d: zstd takes 1 to 19, and 0 is every "
                       "codec's default",
                       level);
    }
    return GD_OK;
}

int
gd_codec_real_level(gd_codec codec, int level)
{
    return codec == GD_CODEC_ZSTD && level == 0 ? ZSTD_CLEVEL_DEFAULT : level;
}

int
gd_codec_quick_level(int level)
{
    return level > ZSTD_CLEVEL_DEFAULT ? 0 : level;
}

gd_status
gd_coder_open(const gd_env *env, gd_coder **coder, gd_error *err)
{
    *coder = gd_calloc(env, 1, sizeof **coder, err);
    return *coder == NULL ? GD_NOMEM : GD_OK;
}

void
gd_coder_close(const gd_env *env, gd_coder *coder)
{
    if (coder != NULL) {
        ZSTD_freeCCtx(coder->compress);
        ZSTD_freeDCtx(coder->decode);
        env->release(env, coder);
    }
}

static gd_status
compress_zstd(gd_coder *coder, int level, const uint8_t *plain, size_t length,
              uint8_t *out, size_t room, size_t *used, gd_error *err)
{
    if (coder->compress == NULL) {
        coder->compress = ZSTD_createCCtx();
        if (coder->compress == NULL) {
            return gd_fail(err, GD_NOMEM, "no memory for a zstd context");
        }
    }
    size_t n = ZSTD_compressCCtx(coder->compress, out, room, plain, length,
                                 gd_codec_real_level(GD_CODEC_ZSTD, level));
    /* Any error here means "no room": then compression does not pay. */
    *used = ZSTD_isError(n) ? 0 : n;
    return GD_OK;
}

gd_status
gd_codec_compress(gd_coder *coder, gd_codec codec, int level,
                  const uint8_t *plain, size_t length, uint8_t *out,
                  size_t *stored, gd_error *err)
{
    size_t room = length - length / 16;
    *stored = 0;
    if (codec == GD_CODEC_LZ4) {
        int n = LZ4_compress_default((const char *)plain, (char *)out,
                                     (int)length, (int)room);
        *stored = n > 0 ? (size_t)n : 0;
    } else if (codec == GD_CODEC_ZSTD) {
        GD_TRY(compress_zstd(coder, level, plain, length, out, room,
                             stored, err));
    }
    if (*stored >= room) {
        *stored = 0;
    }
    return GD_OK;
}

gd_status
gd_codec_decompress(gd_coder *coder, gd_codec codec, const uint8_t *stored,
                    size_t length, uint8_t *plain, size_t plain_length,
                    bool *complete, gd_error *err)
{
    size_t decoded = 0;
    if (codec == GD_CODEC_NONE) {
        memcpy(plain, stored, plain_length);
        decoded = plain_length;
    } else if (codec == GD_CODEC_LZ4) {
        int n = LZ4_decompress_safe((const char *)stored, (char *)plain,
                                    (int)length, (int)plain_length);
        decoded = n < 0 ? 0 : (size_t)n;
    } else {
        if (coder->decode == NULL) {
            coder->decode = ZSTD_createDCtx();
            if (coder->decode == NULL) {
                return gd_fail(err, GD_NOMEM, "no memory for a zstd context");
            }
        }
        size_t n = ZSTD_decompressDCtx(coder->decode, plain, plain_length,
                                       stored, length);
        decoded = ZSTD_isError(n) ? 0 : n;
    }
    *complete = decoded == plain_length;
    return GD_OK;
}
