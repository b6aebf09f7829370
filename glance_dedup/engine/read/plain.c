/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plain.c - see plain.h.
 */
#include "engine/read/plain.h"

#include <string.h>

#include "engine/read/fetch.h"

enum { WINDOW = 4 << 20 }; /* bytes planned at once */

/* The destination of a window's bytes. */
typedef struct window {
    uint8_t *out;
    uint64_t offset; /* of out[0], in the image */
} window;

static void
take_zeros(void *arg, uint64_t offset, uint64_t length)
{
    const window *w = arg;
    memset(w->out + (offset - w->offset), 0, length);
}

/* A segment whose blocks follow each other in the image, too, is decoded to its
 * place there.  If it proves damaged, all of the window is read again. */
static uint8_t *
place_segment(void *arg, const gd_want *wants, size_t count,
              uint32_t plain_length)
{
    const window *w = arg;
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        if (wants[i].entry.plain_offset != end || wants[i].from != 0 ||
            wants[i].length != wants[i].entry.plain_length ||
            wants[i].offset != wants->offset + end) {
            return NULL;
        }
        end += wants[i].length;
    }
    return end == plain_length ? w->out + (wants->offset - w->offset) : NULL;
}

static gd_status
take_block(void *arg, const gd_want *want, const uint8_t *block,
           GD_UNUSED gd_error *err)
{
    const window *w = arg;
    uint8_t *out = w->out + (want->offset - w->offset);
    if (out != block + want->from) {
        memcpy(out, block + want->from, want->length);
    }
    return GD_OK;
}

static gd_status
take_segment(void *arg, const gd_want *wants, size_t count,
             GD_UNUSED const gd_segment_header *header,
             GD_UNUSED const uint8_t *stored, const uint8_t *plain,
             gd_error *err)
{
    for (size_t i = 0; i < count; i++) {
        (void)take_block(arg, &wants[i], plain + wants[i].entry.plain_offset,
                         err);
    }
    return GD_OK;
}

gd_status
gd_plain_read(const gd_plain *plain, uint8_t *out, gd_range range, bool fresh,
              gd_error *err)
{
    window w;
    gd_fetch fetch;
    const gd_taker taker = {.arg = &w,
                            .zeros = take_zeros,
                            .parallel = true,
                            .place = place_segment,
                            .segment = take_segment,
                            .block = take_block};
    gd_status s = GD_OK;
    gd_fetch_open(&fetch, plain->repo, plain->recipe, &taker);
    fetch.cached = true;
    fetch.fresh = fresh;
    for (uint64_t done = 0; s == GD_OK && done < range.length;) {
        uint64_t rest = range.length - done;
        uint64_t here = rest < WINDOW ? rest : WINDOW;
        w = (window){out + done, range.offset + done};
        gd_readahead_read(plain->ahead, w.offset, here, &fetch.plan.asked,
                          &fetch.plan.passing);
        s = gd_fetch_ranges(&fetch, &(gd_range){w.offset, here}, 1, err);
        done += here;
    }
    gd_fetch_close(&fetch);
    return s;
}
