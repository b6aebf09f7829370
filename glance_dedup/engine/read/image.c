/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image.c - see image.h.
 */
#include "engine/read/image.h"

#include <fcntl.h>
#include <string.h>

#include "engine/files/spool.h"
#include "engine/repo/metacache.h"

/* ---- opening ---- */

static gd_plain
plain_of(gd_image *image)
{
    return (gd_plain){image->repo, &image->recipe, &image->ahead};
}

static gd_status
allocate(gd_repo *repo, gd_image **out, gd_error *err)
{
    GD_TRY(gd_repo_require_owner(repo, err));
    *out = gd_calloc(repo->env, 1, sizeof **out, err);
    if (*out == NULL) {
        return GD_NOMEM;
    }
    gd_fpcache_drop_some_removed(repo->cache);
    (*out)->repo = repo;
    return GD_OK;
}

/* Frees the image if its recipe could not be opened. */
static gd_status
begin(gd_image *image, gd_status s, gd_image **out)
{
    gd_repo *repo = image->repo;
    if (s != GD_OK) {
        repo->env->release(repo->env, image);
        return s;
    }
    image->recipe.cache = gd_metacache_pages(repo->metacache);
    gd_readahead_open(&image->ahead, repo, &image->recipe);
    gd_derivers_init(&image->derivers, plain_of(image));
    *out = image;
    return GD_OK;
}

gd_status
gd_image_open(gd_repo *repo, const char *image_id, const uint8_t *upload_id,
              gd_image **out, gd_error *err)
{
    gd_image *image;
    GD_TRY(allocate(repo, &image, err));
    return begin(image, gd_spool_open_recipe(
                            repo->env, repo->root, &repo->params, image_id,
                            upload_id, &image->recipe, err), out);
}

gd_status
gd_image_open_spooled(gd_repo *repo, const char *name, gd_image **out,
                      gd_error *err)
{
    const gd_env *env = repo->env;
    gd_image *image;
    GD_TRY(allocate(repo, &image, err));
    int fd = env->openat(env, repo->root, name,
                         O_RDONLY | O_NOFOLLOW | O_CLOEXEC, 0);
    if (fd < 0) {
        return begin(image, gd_fail_errno(err, -fd, "cannot open %s", name),
                     out);
    }
    gd_status s = gd_recipe_open(env, fd, name, &repo->params, NULL,
                                 &image->recipe, err);
    if (s != GD_OK) {
        env->close(env, fd);
    }
    return begin(image, s, out);
}

void
gd_image_close(gd_image *image)
{
    const gd_env *env = image->repo->env;
    gd_readahead_close(&image->ahead);
    gd_derivers_free(&image->derivers);
    env->close(env, image->recipe.fd);
    env->release(env, image);
}

const gd_recipe_header *
gd_image_header(const gd_image *image)
{
    return &image->recipe.header;
}

gd_status
gd_image_require_no_disk(const gd_image *image, gd_error *err)
{
    const gd_recipe_header *header = &image->recipe.header;
    return gd_recipe_has_disk(header)
               ? gd_fail(err, GD_INVALID, "image %s is kept as its disk, which "
                         "cannot be used for this yet", header->image_id)
               : GD_OK;
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
    *zeros = !gd_recipe_has_disk(&image->recipe.header);
    gd_extent_cursor_open(&cursor, &image->recipe, range.offset, range.length);
    while (s == GD_OK && *zeros && cursor.offset < cursor.end) {
        gd_extent_part part;
        s = gd_extent_cursor_next(&cursor, &part, err);
        *zeros = s == GD_OK && part.extent->kind == GD_EXTENT_ZEROS;
    }
    return s;
}

/* ---- reading ---- */

gd_status
gd_image_read_plain(gd_image *image, uint8_t *out, gd_range range,
                    gd_error *err)
{
    const gd_plain plain = plain_of(image);
    return gd_plain_read(&plain, out, range, false, err);
}

/* Makes a range of the file from the extents of the table that it touches. */
static gd_status
read_derived(gd_image *image, uint8_t *out, gd_range range, bool fresh,
             gd_error *err)
{
    gd_extent_cursor cursor;
    const gd_plain plain = plain_of(image);
    gd_extent_cursor_open(&cursor, &image->recipe, range.offset, range.length);
    cursor.derived = true;
    cursor.fresh = fresh;
    while (cursor.offset < cursor.end) {
        gd_extent_part part;
        GD_TRY(gd_extent_cursor_next(&cursor, &part, err));
        const gd_extent *extent = part.extent;
        GD_TRY(extent->encoder == 0
                   ? gd_plain_read(
                         &plain, out,
                         (gd_range){extent->plain + part.from, part.length},
                         fresh, err)
                   : gd_derive_extent(&image->derivers, extent,
                                      (gd_range){part.from, part.length},
                                      fresh, out, err));
        out += part.length;
    }
    return GD_OK;
}

static gd_status
read_file(gd_image *image, uint8_t *out, gd_range range, gd_error *err)
{
    if (!gd_recipe_has_disk(&image->recipe.header)) {
        return gd_image_read_plain(image, out, range, err);
    }
    gd_status s = read_derived(image, out, range, false, err);
    return s == GD_CORRUPT || s == GD_IO
               ? read_derived(image, out, range, true, err)
               : s;
}

/* Reads as much of a range as lies in a view of this size. */
static gd_status
read_view(gd_image *image, uint8_t *out, gd_range range, uint64_t size,
          gd_status (*read)(gd_image *, uint8_t *, gd_range, gd_error *),
          size_t *done, gd_error *err)
{
    uint64_t rest = range.offset < size ? size - range.offset : 0;
    range.length = range.length < rest ? range.length : rest;
    *done = 0;
    GD_TRY(gd_repo_require_owner(image->repo, err));
    if (range.length == 0) {
        return GD_OK;
    }
    /* A process may read for years, and open nothing. */
    gd_fpcache_drop_removed_in_turn(image->repo->cache);
    GD_TRY(read(image, out, range, err));
    *done = (size_t)range.length;
    atomic_fetch_add(&image->repo->counters.bytes_read, range.length);
    return GD_OK;
}

gd_status
gd_image_read(gd_image *image, uint8_t *out, size_t length, uint64_t offset,
              size_t *done, gd_error *err)
{
    return read_view(image, out, (gd_range){offset, length},
                     image->recipe.header.size, read_file, done, err);
}

gd_status
gd_image_read_disk(gd_image *image, uint8_t *out, size_t length,
                   uint64_t offset, size_t *done, gd_error *err)
{
    const gd_recipe_disk *disk = &image->recipe.header.disk;
    *done = 0;
    if ((disk->flags & GD_RECIPE_PROVEN) == 0) { /* F5 */
        return gd_fail(err, GD_INVALID, "image %s has no disk that is proven",
                       image->recipe.header.image_id);
    }
    return read_view(image, out, (gd_range){offset, length}, disk->size,
                     gd_image_read_plain, done, err);
}
