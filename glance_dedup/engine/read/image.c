/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image.c - see image.h.
 */
#include "engine/read/image.h"

#include <string.h>

#include "engine/files/spool.h"
#include "engine/read/fetch.h"
#include "engine/repo/metacache.h"

enum { WINDOW = 4 << 20 }; /* bytes planned at once */

/* ---- opening ---- */

gd_status
gd_image_open(gd_repo *repo, const char *image_id, const uint8_t *upload_id,
              gd_image **out, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(repo, err));
    gd_image *image = gd_calloc(repo->env, 1, sizeof *image, err);
    if (image == NULL) {
        return GD_NOMEM;
    }
    gd_fpcache_drop_some_removed(repo->cache);
    gd_status s = gd_spool_open_recipe(repo->env, repo->root, &repo->params,
                                       image_id, upload_id, &image->recipe,
                                       err);
    if (s != GD_OK) {
        repo->env->release(repo->env, image);
        return s;
    }
    image->repo = repo;
    image->recipe.cache = gd_metacache_pages(repo->metacache);
    gd_readahead_open(&image->ahead, repo, &image->recipe);
    *out = image;
    return GD_OK;
}

void
gd_image_close(gd_image *image)
{
    const gd_env *env = image->repo->env;
    gd_readahead_close(&image->ahead);
    env->close(env, image->recipe.fd);
    env->release(env, image);
}

const gd_recipe_header *
gd_image_header(const gd_image *image)
{
    return &image->recipe.header;
}

uint64_t
gd_image_pages(const gd_image *image)
{
    return gd_recipe_pages(image->recipe.header.extents);
}

gd_status
gd_image_extents(gd_image *image, uint64_t number, gd_recipe_page *page,
                 gd_error *err)
{
    GD_TRY(gd_repo_require_owner(image->repo, err));
    return gd_recipe_read_page(&image->recipe, number, page, err);
}

gd_status
gd_image_is_zeros(gd_image *image, gd_range range, bool *zeros, gd_error *err)
{
    gd_extent_cursor cursor;
    gd_status s = gd_repo_require_owner(image->repo, err);
    gd_extent_cursor_open(&cursor, &image->recipe, range.offset, range.length);
    *zeros = true;
    while (s == GD_OK && *zeros && cursor.offset < cursor.end) {
        gd_extent_part part;
        s = gd_extent_cursor_next(&cursor, &part, err);
        *zeros = s == GD_OK && part.extent->kind == GD_EXTENT_ZEROS;
    }
    return s;
}

/* ---- reading ---- */

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

/* Returns how many bytes of a range lie in the image. */
static uint64_t
clip(const gd_image *image, uint64_t offset, uint64_t length)
{
    uint64_t size = image->recipe.header.size;
    uint64_t rest = offset < size ? size - offset : 0;
    return length < rest ? length : rest;
}

gd_status
gd_image_read(gd_image *image, uint8_t *out, size_t length, uint64_t offset,
              size_t *done, gd_error *err)
{
    window w;
    gd_fetch fetch;
    const gd_taker taker = {.arg = &w,
                            .zeros = take_zeros,
                            .parallel = true,
                            .place = place_segment,
                            .segment = take_segment,
                            .block = take_block};
    *done = 0;
    gd_status s = gd_repo_require_owner(image->repo, err);
    length = (size_t)clip(image, offset, length);
    if (s != GD_OK || length == 0) {
        return s;
    }
    /* A process may read for years, and open nothing. */
    gd_fpcache_drop_removed_in_turn(image->repo->cache);
    gd_fetch_open(&fetch, image->repo, &image->recipe, &taker);
    fetch.cached = true;
    while (s == GD_OK && *done < length) {
        size_t here = length - *done < WINDOW ? length - *done : WINDOW;
        w = (window){out + *done, offset + *done};
        gd_readahead_read(&image->ahead, w.offset, here, &fetch.plan.asked,
                          &fetch.plan.passing);
        s = gd_fetch_ranges(&fetch, &(gd_range){w.offset, here}, 1, err);
        *done += here;
    }
    gd_fetch_close(&fetch);
    if (s == GD_OK) {
        atomic_fetch_add(&image->repo->counters.bytes_read, length);
    }
    return s;
}
