/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.h - compresses and decompresses the bytes of segments.
 */
#ifndef GD_CODEC_H
#define GD_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

typedef enum gd_codec {
    GD_CODEC_NONE = 0,
    GD_CODEC_LZ4 = 1,
    GD_CODEC_ZSTD = 2,
} gd_codec;

/* "none", "lz4" or "zstd"; any other name is GD_INVALID, with these names in
 * the error. */
gd_status gd_codec_parse(const char *name, gd_codec *codec, gd_error *err);
/* 0 means the codec's default; zstd takes 1 to 19, the others only 0. */
gd_status gd_codec_require_level(gd_codec codec, int level, gd_error *err);

/* The level that 0 stands for, so that equal levels are equal numbers. */
int gd_codec_real_level(gd_codec codec, int level);

/* The level that finds out cheaply whether compressing at this level would
 * pay. */
int gd_codec_quick_level(int level);

/* A thread's contexts for compressing and decoding, created at first use. */
typedef struct gd_coder gd_coder;
gd_status gd_coder_open(const gd_env *env, gd_coder **coder, gd_error *err);
void gd_coder_close(const gd_env *env, gd_coder *coder);

/* Compresses plain into out, which has room for length bytes.  *stored is the
 * length used, or 0 if compression does not pay: it saves less than a
 * sixteenth, or the codec is none. */
gd_status gd_codec_compress(gd_coder *coder, gd_codec codec, int level,
                            const uint8_t *plain, size_t length, uint8_t *out,
                            size_t *stored, gd_error *err);
/* Decompresses into plain, which has room for plain_length bytes.  *complete:
 * these were all of them, no less and no more.  Damaged bytes are no error.
 * REQUIRES: if the codec is none, length is plain_length. */
gd_status gd_codec_decompress(gd_coder *coder, gd_codec codec,
                              const uint8_t *stored, size_t length,
                              uint8_t *plain, size_t plain_length,
                              bool *complete, gd_error *err);

#endif
