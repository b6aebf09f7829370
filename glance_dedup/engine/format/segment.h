/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment.h - segments: runs of consecutively stored new blocks, compressed
 * together; the unit of data I/O in a group.
 *
 * The header is 32 bytes (offset table in format.rst, "Segments").  A segment
 * is valid if and only if (1) its magic and fields agree with the entries that
 * name it, (2) its checksum, seeded with the group's seed, covers header and
 * stored bytes, (3) the stored bytes decode to exactly the plain length.
 * A reader may skip (2), since it verifies each block that it returns.
 */
#ifndef GD_SEGMENT_H
#define GD_SEGMENT_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

enum {
    GD_SEGMENT_HEADER = 32,
    GD_SEGMENT_MAX = 1 << 20, /* plain bytes */
    GD_SEGMENT_DEFAULT = 65536,
    /* Minimum of a recompressed segment: neighbours are joined.  To read 4 KiB,
     * all of it must be decoded; design.rst, "Recompression", has the
     * measurements. */
    GD_SEGMENT_JOINED = 256 << 10,
};

/* The size of a joined segment in a repository with segments of this size. */
static inline uint32_t
gd_segment_joined(uint32_t segment_size)
{
    return segment_size > GD_SEGMENT_JOINED ? segment_size : GD_SEGMENT_JOINED;
}

typedef enum gd_codec {
    GD_CODEC_NONE = 0,
    GD_CODEC_LZ4 = 1,
    GD_CODEC_ZSTD = 2,
} gd_codec;

typedef struct gd_segment_header {
    gd_codec codec;
    uint32_t blocks;
    uint32_t first_slot;
    uint32_t plain_length;
    uint32_t stored_length;
} gd_segment_header;

/* Fills out[0..GD_SEGMENT_HEADER), including the checksum over stored, which is
 * given in pieces. */
void gd_segment_header_encode(const gd_segment_header *header, uint64_t seed,
                              const struct iovec *stored, int pieces,
                              uint8_t out[GD_SEGMENT_HEADER]);
/* Decodes and checks everything except the checksum.  file and offset are for
 * the error's words. */
gd_status gd_segment_header_decode(const uint8_t in[GD_SEGMENT_HEADER],
                                   gd_segment_header *header, const char *file,
                                   uint64_t offset, gd_error *err);
/* Point (2): in holds the header and, after it, the stored bytes. */
bool gd_segment_intact(const uint8_t *in, const gd_segment_header *header,
                       uint64_t seed);

/* "none", "lz4" or "zstd"; any other name is GD_INVALID, with these names in
 * the error. */
gd_status gd_codec_parse(const char *name, gd_codec *codec, gd_error *err);
/* 0 means the codec's default; zstd takes 1 to 19, the others only 0. */
gd_status gd_codec_check_level(gd_codec codec, int level, gd_error *err);

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
gd_status gd_segment_compress(gd_coder *coder, gd_codec codec, int level,
                              const uint8_t *plain, size_t length,
                              uint8_t *out, size_t *stored, gd_error *err);
/* Decodes to exactly header->plain_length bytes; GD_CORRUPT otherwise. */
gd_status gd_segment_decode(gd_coder *coder, const gd_segment_header *header,
                            const uint8_t *stored, uint8_t *plain,
                            const char *file, uint64_t offset, gd_error *err);

#endif
