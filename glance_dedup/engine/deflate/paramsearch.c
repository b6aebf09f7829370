/* SPDX-License-Identifier: Apache-2.0 */
/*
 * paramsearch.c - see paramsearch.h.
 *
 * What is usual is tried first: QEMU's parameters for qcow2, those of zlib's
 * compress, and both with other levels. Then come all the others, the default
 * strategy first.
 */
#include "engine/deflate/paramsearch.h"

#include <string.h>

typedef struct search {
    const gd_env *env;
    const gd_paramsearch_sample *samples;
    size_t count;
    uint8_t *out; /* room for the longest stream */
    size_t room;
    gd_deflate_params *params;
    bool *found;
} search;

static bool
makes(gd_deflate *encoder, const search *s, const gd_paramsearch_sample *sample)
{
    size_t length = gd_deflate_encode(encoder, sample->plain,
                                      sample->plain_length, s->out, s->room);
    return length == sample->stream_length &&
           memcmp(s->out, sample->stream, length) == 0;
}

/* Sets *found if these parameters give all samples. */
static gd_status
try_params(const search *s, gd_error *err)
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
try_windows(const search *s, gd_error *err)
{
    static const uint8_t window_bits[] = {12, 15, 14, 13, 11, 10, 9};
    static const uint8_t memory_levels[] = {9, 8, 7, 6, 5, 4, 3, 2, 1};
    for (size_t w = 0; w < sizeof window_bits && !*s->found; w++) {
        for (size_t m = 0; m < sizeof memory_levels && !*s->found; m++) {
            s->params->window_bits = window_bits[w];
            s->params->memory_level = memory_levels[m];
            GD_TRY(try_params(s, err));
        }
    }
    return GD_OK;
}

static gd_status
try_usual(const search *s, gd_error *err)
{
    static const uint8_t levels[] = {6, 9, 1, 5, 4, 3, 7, 8, 2};
    static const uint8_t windows[][2] = {{12, 9}, {15, 8}, {15, 9}};
    s->params->strategy = GD_DEFLATE_DEFAULT;
    for (size_t i = 0; i < sizeof levels && !*s->found; i++) {
        for (size_t w = 0; w < 3 && !*s->found; w++) {
            s->params->level = levels[i];
            s->params->window_bits = windows[w][0];
            s->params->memory_level = windows[w][1];
            GD_TRY(try_params(s, err));
        }
    }
    return GD_OK;
}

static gd_status
try_all(const search *s, gd_error *err)
{
    static const uint8_t strategies[] = {
        GD_DEFLATE_DEFAULT, GD_DEFLATE_HUFFMAN, GD_DEFLATE_RLE,
        GD_DEFLATE_FIXED, GD_DEFLATE_FILTERED};
    GD_TRY(try_usual(s, err));
    for (size_t i = 0; i < sizeof strategies && !*s->found; i++) {
        s->params->strategy = strategies[i];
        for (uint8_t level = 9; level >= 1 && !*s->found; level--) {
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
    search s = {env, samples, count, NULL, GD_DEFLATE_SLACK, params, found};
    for (size_t i = 0; i < count; i++) {
        size_t room = samples[i].stream_length + GD_DEFLATE_SLACK;
        s.room = room > s.room ? room : s.room;
    }
    *found = false;
    params->has_header = has_header;
    s.out = gd_alloc(env, s.room, err);
    if (s.out == NULL) {
        return GD_NOMEM;
    }
    gd_status status = try_all(&s, err);
    env->release(env, s.out);
    return status;
}
