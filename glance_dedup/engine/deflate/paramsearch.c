/* SPDX-License-Identifier: Apache-2.0 */
/*
 * paramsearch.c - see paramsearch.h.
 *
 * The search begins with the usual parameters: QEMU's for qcow2, those of zlib's
 * compress, and both with other levels. Then come all the others, the default
 * strategy first.
 */
#include "engine/deflate/paramsearch.h"

enum { MAX_PARSED = 32 << 20 };

typedef struct search {
    const gd_env *env;
    const gd_paramsearch_sample *samples;
    size_t count;
    uint8_t *out; /* room for the longest stream */
    size_t left;  /* plain bytes that may still be parsed */
    gd_deflate_params *params;
    bool *found;
} search;

static bool
makes(gd_deflate *encoder, search *s, const gd_paramsearch_sample *sample)
{
    size_t parsed;
    bool same = gd_deflate_makes(encoder, sample->plain, sample->plain_length,
                                 sample->stream, sample->stream_length, s->out,
                                 &parsed);
    s->left -= parsed < s->left ? parsed : s->left;
    return same;
}

static bool
is_over(const search *s)
{
    return *s->found || s->left == 0;
}

/* Sets *found if these parameters give all samples. */
static gd_status
try_params(search *s, gd_error *err)
{
    gd_deflate *encoder;
    GD_TRY(gd_deflate_open(s->env, s->params, &encoder, err));
    size_t same = 0;
    while (same < s->count && makes(encoder, s, &s->samples[same])) {
        same++;
    }
    gd_deflate_close(s->env, encoder);
    *s->found = same == s->count;
    return GD_OK;
}

static gd_status
try_windows(search *s, gd_error *err)
{
    static const uint8_t window_bits[] = {12, 15, 14, 13, 11, 10, 9};
    static const uint8_t memory_levels[] = {9, 8, 7, 6, 5, 4, 3, 2, 1};
    for (size_t w = 0; w < sizeof window_bits && !is_over(s); w++) {
        for (size_t m = 0; m < sizeof memory_levels && !is_over(s); m++) {
            s->params->window_bits = window_bits[w];
            s->params->memory_level = memory_levels[m];
            GD_TRY(try_params(s, err));
        }
    }
    return GD_OK;
}

static gd_status
try_usual(search *s, gd_error *err)
{
    static const uint8_t levels[] = {6, 9, 1, 5, 4, 3, 7, 8, 2};
    static const uint8_t windows[][2] = {{12, 9}, {15, 8}, {15, 9}};
    s->params->strategy = GD_DEFLATE_DEFAULT;
    for (size_t i = 0; i < sizeof levels && !is_over(s); i++) {
        for (size_t w = 0; w < 3 && !is_over(s); w++) {
            s->params->level = levels[i];
            s->params->window_bits = windows[w][0];
            s->params->memory_level = windows[w][1];
            GD_TRY(try_params(s, err));
        }
    }
    return GD_OK;
}

static gd_status
try_all(search *s, gd_error *err)
{
    static const uint8_t strategies[] = {
        GD_DEFLATE_DEFAULT, GD_DEFLATE_HUFFMAN, GD_DEFLATE_RLE,
        GD_DEFLATE_FIXED, GD_DEFLATE_FILTERED};
    GD_TRY(try_usual(s, err));
    for (size_t i = 0; i < sizeof strategies && !is_over(s); i++) {
        s->params->strategy = strategies[i];
        for (uint8_t level = 9; level >= 1 && !is_over(s); level--) {
            s->params->level = level;
            GD_TRY(try_windows(s, err));
        }
    }
    return GD_OK;
}

gd_status
gd_paramsearch_run(const gd_env *env, const gd_paramsearch_sample *samples,
                   size_t count, bool has_header, gd_deflate_params *params,
                   bool *found, gd_error *err)
{
    search s = {env, samples, count, NULL, MAX_PARSED, params, found};
    size_t longest = 0;
    for (size_t i = 0; i < count; i++) {
        size_t length = samples[i].stream_length;
        longest = length > longest ? length : longest;
    }
    *found = false;
    params->has_header = has_header;
    s.out = gd_alloc(env, longest + GD_DEFLATE_SLACK, err);
    if (s.out == NULL) {
        return GD_NOMEM;
    }
    gd_status status = try_all(&s, err);
    env->release(env, s.out);
    return status;
}
