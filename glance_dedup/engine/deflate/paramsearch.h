/* SPDX-License-Identifier: Apache-2.0 */
/*
 * paramsearch.h - finds with which parameters zlib made a stream.
 */
#ifndef GD_PARAMSEARCH_H
#define GD_PARAMSEARCH_H

#include "engine/deflate/deflate.h"

/* A stream, without the bytes behind its end, and its plain bytes. */
typedef struct gd_paramsearch_sample {
    const uint8_t *plain, *stream;
    size_t plain_length, stream_length;
} gd_paramsearch_sample;

/* Finds parameters that give all samples. Of several it takes the most usual
 * ones, so a few samples of the usual size are better than a small one.
 * `has_header` says which kind the streams are. Without a result *found is
 * false; that is so, too, after 32 MiB were deflated in vain. Parameters are
 * given up at the first block that differs.
 * REQUIRES: count is at least 1. */
gd_status gd_paramsearch_run(const gd_env *env,
                             const gd_paramsearch_sample *samples,
                             size_t count, bool has_header,
                             gd_deflate_params *params, bool *found,
                             gd_error *err);

#endif
