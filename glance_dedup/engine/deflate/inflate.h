/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inflate.h - inflates a buffer of any encoder, within a bound.
 */
#ifndef GD_INFLATE_H
#define GD_INFLATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

typedef struct gd_inflate_result {
    bool complete;  /* the stream ended, and its checksum fits if it has one */
    size_t read;    /* bytes of the stream; others may be behind its end */
    size_t written; /* plain bytes */
} gd_inflate_result;

/* Writes at most `room` bytes. A stream that is damaged or has more plain bytes
 * is not complete, and no error: only memory can fail. */
gd_status gd_inflate(bool has_header, const uint8_t *stream, size_t length,
                     uint8_t *plain, size_t room, gd_inflate_result *result,
                     gd_error *err);

#endif
