/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deflate.c - see deflate.h.
 */
#include "engine/deflate/deflate.h"

#include <string.h>

#include "engine/deflate/parse.h"

enum { HEADER = 2, CHECKSUM = 4 };

struct gd_deflate {
    gd_deflate_params params;
    gd_parse parse;
    gd_block block;
    uint32_t *symbols;
    size_t max_symbols;
};

gd_status
gd_deflate_require_params(const gd_deflate_params *params, gd_error *err)
{
    if (params->level < 1 || params->level > 9 || params->window_bits < 9 ||
        params->window_bits > 15 || params->memory_level < 1 ||
        params->memory_level > 9 || params->strategy > GD_DEFLATE_FIXED) {
        return gd_fail(err, GD_INVALID,
                       "deflate has no level %d with window %d, memory level "
                       "%d and strategy %d",
                       params->level, params->window_bits,
                       params->memory_level, params->strategy);
    }
    return GD_OK;
}

void
gd_deflate_close(const gd_env *env, gd_deflate *encoder)
{
    if (encoder != NULL) {
        gd_parse_close(env, &encoder->parse);
        env->release(env, encoder->symbols);
        env->release(env, encoder);
    }
}

static gd_status
open_tables(const gd_env *env, gd_deflate *encoder, gd_error *err)
{
    const gd_deflate_params *params = &encoder->params;
    gd_parse *parse = &encoder->parse;
    GD_TRY(gd_parse_open(env, parse, params->level, params->window_bits,
                         params->memory_level, err));
    parse->short_matches = params->strategy != GD_DEFLATE_FILTERED;
    encoder->block.is_fixed_only = params->strategy == GD_DEFLATE_FIXED;
    /* zlib ends a block one symbol before its buffer is full. */
    encoder->max_symbols = ((size_t)1 << (params->memory_level + 6)) - 1;
    encoder->symbols = gd_calloc(env, encoder->max_symbols,
                                 sizeof *encoder->symbols, err);
    return encoder->symbols == NULL ? GD_NOMEM : GD_OK;
}

gd_status
gd_deflate_open(const gd_env *env, const gd_deflate_params *params,
                gd_deflate **encoder, gd_error *err)
{
    GD_TRY(gd_deflate_require_params(params, err));
    *encoder = gd_calloc(env, 1, sizeof **encoder, err);
    if (*encoder == NULL) {
        return GD_NOMEM;
    }
    (*encoder)->params = *params;
    gd_status status = open_tables(env, *encoder, err);
    if (status != GD_OK) {
        gd_deflate_close(env, *encoder);
    }
    return status;
}

static void
parse_all(gd_deflate *encoder)
{
    gd_parse *parse = &encoder->parse;
    if (encoder->params.strategy == GD_DEFLATE_HUFFMAN) {
        gd_parse_literals(parse);
    } else if (encoder->params.strategy == GD_DEFLATE_RLE) {
        gd_parse_runs(parse);
    } else {
        gd_parse_matches(parse);
    }
}

/* RFC 1950: the method, the window, and how hard the encoder tried. */
static void
put_header(const gd_deflate_params *params, uint8_t *out)
{
    unsigned effort = params->strategy >= GD_DEFLATE_HUFFMAN ||
                              params->level < 2 ? 0
                      : params->level < 6 ? 1 : params->level == 6 ? 2 : 3;
    unsigned header = (8u | (params->window_bits - 8u) << 4) << 8 | effort << 6;
    header += 31 - header % 31;
    out[0] = (uint8_t)(header >> 8);
    out[1] = (uint8_t)header;
}

/* Adler-32, the highest byte first. So many sums fit before they are reduced. */
static void
put_checksum(const uint8_t *plain, size_t length, uint8_t *out)
{
    enum { MODULUS = 65521, UNREDUCED = 5552 };
    uint32_t low = 1, high = 0;
    while (length > 0) {
        size_t n = length < UNREDUCED ? length : UNREDUCED;
        for (size_t i = 0; i < n; i++) {
            low += plain[i];
            high += low;
        }
        low %= MODULUS;
        high %= MODULUS;
        plain += n;
        length -= n;
    }
    uint32_t sum = htobe32(high << 16 | low);
    memcpy(out, &sum, sizeof sum);
}

/* As gd_deflate_encode, but it may end, with 0, if the result will not be
 * `stream`, which has room - GD_DEFLATE_SLACK bytes.  NULL: any. */
static size_t
encode(gd_deflate *encoder, const uint8_t *plain, size_t length, uint8_t *out,
       size_t room, const uint8_t *stream)
{
    size_t header = encoder->params.has_header ? HEADER : 0;
    size_t checksum = encoder->params.has_header ? CHECKSUM : 0;
    gd_block *block = &encoder->block;
    if (room < header + checksum + GD_DEFLATE_SLACK) {
        return 0;
    }
    gd_block_begin(block, encoder->symbols, encoder->max_symbols, out + header,
                   room - header - checksum);
    if (stream != NULL) {
        block->expected = stream + header;
        block->expected_length = room - GD_DEFLATE_SLACK - header - checksum;
    }
    gd_parse_begin(&encoder->parse, plain, length, block);
    parse_all(encoder);
    if (gd_block_has_failed(block)) {
        return 0;
    }
    uint8_t *end = encoder->block.writer.at;
    if (header > 0) {
        put_header(&encoder->params, out);
        put_checksum(plain, length, end);
    }
    return (size_t)(end - out) + checksum;
}

size_t
gd_deflate_encode(gd_deflate *encoder, const uint8_t *plain, size_t length,
                  uint8_t *out, size_t room)
{
    return encode(encoder, plain, length, out, room, NULL);
}

bool
gd_deflate_makes(gd_deflate *encoder, const uint8_t *plain, size_t length,
                 const uint8_t *stream, size_t stream_length, uint8_t *out,
                 size_t *parsed)
{
    size_t made = encode(encoder, plain, length, out,
                         stream_length + GD_DEFLATE_SLACK, stream);
    *parsed = (size_t)encoder->parse.size;
    return made > 0 && made == stream_length &&
           memcmp(out, stream, made) == 0;
}
