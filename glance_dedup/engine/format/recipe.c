/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipe.c - see recipe.h.
 */
#include "engine/format/recipe.h"

#include <stdio.h>

#include "engine/format/fields.h"

#define HEADER_FIELDS(F)                                                      \
    F(BYTES, 16, 16, repository_id)                                           \
    F(BYTES, 32, 16, scope.id)                                                \
    F(BYTES, 48, 16, transaction_id)                                          \
    F(BYTES, 64, 16, upload_id)                                               \
    F(NUMBER, 80, 8, size)                                                    \
    F(NUMBER, 88, 8, zero_bytes)                                              \
    F(NUMBER, 96, 8, new_bytes)                                               \
    F(NUMBER, 104, 8, stored_bytes)                                           \
    F(NUMBER, 112, 8, extents)                                                \
    F(NUMBER, 120, 8, fragments)                                              \
    F(NUMBER, 128, 8, created)                                                \
    F(TEXT, 144, 128, image_id)                                               \
    F(LENGTH, 136, 2, image_id)                                               \
    F(TEXT, 272, 128, project)                                                \
    F(LENGTH, 138, 2, project)
#define HASH_FIELDS(F)                                                        \
    F(TEXT, 404, 32, name)                                                    \
    F(LENGTH, 400, 2, name)                                                   \
    F(NUMBER, 402, 2, length)                                                 \
    F(BYTES, 436, 64, value)
#define EXTENT_FIELDS(F)                                                      \
    F(NUMBER, 0, 8, offset)                                                   \
    F(NUMBER, 8, 8, length)                                                   \
    F(NUMBER, 16, 4, group)                                                   \
    F(NUMBER, 20, 4, slot)                                                    \
    F(NUMBER, 24, 4, blocks)                                                  \
    F(NUMBER, 28, 4, kind)                                                    \
    F(NUMBER, 32, 8, digest)
#define DERIVED_FIELDS(F)                                                     \
    F(NUMBER, 0, 8, offset)                                                   \
    F(NUMBER, 8, 8, length)                                                   \
    F(NUMBER, 16, 8, plain)                                                   \
    F(NUMBER, 24, 4, plain_length)                                            \
    F(NUMBER, 28, 1, kind)                                                    \
    F(NUMBER, 29, 1, encoder)                                                 \
    F(NUMBER, 30, 2, reserved)                                                \
    F(NUMBER, 32, 8, digest)

enum {
    WITH_DISK = 2, /* a major version; without one it is GD_FORMAT_MAJOR */
    EXTENT_SIZE = 40,
    CHECKED = 4088, /* bytes under a page's checksum */
    PAGES_AT_ONCE = 16,
};

static const gd_sealed layout = {
    GD_RECIPE_PAGE, "GDRECIPE", WITH_DISK, "recipe"};

/* ---- writing ---- */

struct gd_recipe_writer {
    const gd_env *env;
    int fd;
    char name[GD_NAME_SIZE];
    uint64_t seed;
    uint64_t extents, fragments, zero_bytes;
    uint64_t length;
    uint64_t derived, derived_bytes; /* of the table */
    uint64_t file; /* bytes of the file that the table describes so far */
    gd_extent open; /* the extent that may still grow; length 0: none */
    gd_address next; /* where a block must lie to continue the last fragment */
    uint64_t pages;  /* extent pages already in the file */
    uint32_t in_buffer; /* extents in the buffer's pages */
    gd_fingerprint fingerprints[GD_EXTENT_BLOCKS]; /* of the open extent */
    uint8_t buffer[PAGES_AT_ONCE * GD_RECIPE_PAGE];
};

gd_status
gd_recipe_writer_open(const gd_env *env, int fd, const char *name,
                      const uint8_t transaction_id[GD_ID_SIZE],
                      gd_recipe_writer **out, gd_error *err)
{
    gd_recipe_writer *writer = gd_calloc(env, 1, sizeof *writer, err);
    if (writer == NULL) {
        return GD_NOMEM;
    }
    writer->env = env;
    writer->fd = fd;
    writer->seed = gd_get64(transaction_id);
    snprintf(writer->name, sizeof writer->name, "%s", name);
    *out = writer;
    return GD_OK;
}

void
gd_recipe_writer_close(gd_recipe_writer *writer)
{
    if (writer != NULL) {
        writer->env->release(writer->env, writer);
    }
}

uint64_t
gd_recipe_length(const gd_recipe_writer *writer)
{
    return writer->length;
}

uint64_t
gd_recipe_block_bytes(const gd_recipe_writer *writer)
{
    return writer->length - writer->zero_bytes;
}

static void
encode_extent(const gd_extent *value, uint8_t out[EXTENT_SIZE])
{
    EXTENT_FIELDS(GD_ENCODE)
}

/* Writes the buffer's pages; the last one may be partly filled. */
static gd_status
write_pages(gd_recipe_writer *writer, gd_error *err)
{
    uint32_t pages = (writer->in_buffer + GD_EXTENTS_PER_PAGE - 1) /
                     GD_EXTENTS_PER_PAGE;
    uint32_t left = writer->in_buffer;
    if (pages == 0) {
        return GD_OK;
    }
    for (uint32_t i = 0; i < pages; i++) {
        uint8_t *page = writer->buffer + i * GD_RECIPE_PAGE;
        uint32_t here = left < GD_EXTENTS_PER_PAGE ? left : GD_EXTENTS_PER_PAGE;
        gd_put32(page, (uint32_t)(writer->pages + i + 1));
        gd_put32(page + 4, here);
        gd_put64(page + CHECKED, gd_checksum(page, CHECKED, writer->seed));
        left -= here;
    }
    gd_status s = gd_write_full(writer->env, writer->fd, writer->buffer,
                                (size_t)pages * GD_RECIPE_PAGE,
                                (writer->pages + 1) * GD_RECIPE_PAGE,
                                writer->name, err);
    writer->pages += pages;
    writer->in_buffer = 0;
    memset(writer->buffer, 0, sizeof writer->buffer);
    return s;
}

/* The place of the next extent in the buffer. */
static uint8_t *
place(gd_recipe_writer *writer)
{
    uint32_t at = writer->in_buffer;
    return writer->buffer + at / GD_EXTENTS_PER_PAGE * GD_RECIPE_PAGE + 8 +
           at % GD_EXTENTS_PER_PAGE * EXTENT_SIZE;
}

/* Notes that there is an extent in that place. */
static gd_status
end_put(gd_recipe_writer *writer, gd_error *err)
{
    writer->in_buffer++;
    if (writer->in_buffer == PAGES_AT_ONCE * GD_EXTENTS_PER_PAGE) {
        return write_pages(writer, err);
    }
    return GD_OK;
}

/* Puts a finished extent into the buffer. */
static gd_status
put_extent(gd_recipe_writer *writer, const gd_extent *extent, gd_error *err)
{
    encode_extent(extent, place(writer));
    writer->extents++;
    return end_put(writer, err);
}

/* Moves the open extent into the buffer. */
static gd_status
close_extent(gd_recipe_writer *writer, gd_error *err)
{
    gd_extent extent = writer->open;
    if (extent.length == 0) {
        return GD_OK;
    }
    if (extent.kind == GD_EXTENT_BLOCKS_KIND) {
        extent.digest = gd_checksum(writer->fingerprints,
                                    extent.blocks * sizeof(gd_fingerprint), 0);
    }
    writer->open.length = 0;
    return put_extent(writer, &extent, err);
}

gd_status
gd_recipe_add_zeros(gd_recipe_writer *writer, uint64_t length, gd_error *err)
{
    gd_extent *extent = &writer->open;
    if (length == 0) {
        return GD_OK;
    }
    if (extent->length == 0 || extent->kind != GD_EXTENT_ZEROS) {
        GD_TRY(close_extent(writer, err));
        *extent = (gd_extent){.offset = writer->length};
    }
    extent->length += length;
    writer->length += length;
    writer->zero_bytes += length;
    return GD_OK;
}

gd_status
gd_recipe_add_block(gd_recipe_writer *writer, gd_address address,
                    const gd_fingerprint *fp, uint32_t length, gd_error *err)
{
    gd_extent *extent = &writer->open;
    bool continues = address.group == writer->next.group &&
                     address.slot == writer->next.slot;
    if (extent->length == 0 || extent->kind != GD_EXTENT_BLOCKS_KIND ||
        !continues || extent->blocks == GD_EXTENT_BLOCKS) {
        GD_TRY(close_extent(writer, err));
        *extent = (gd_extent){.kind = GD_EXTENT_BLOCKS_KIND,
                              .offset = writer->length,
                              .group = address.group,
                              .slot = address.slot};
        writer->fragments += !continues;
    }
    writer->fingerprints[extent->blocks++] = *fp;
    extent->length += length;
    writer->length += length;
    writer->next = (gd_address){address.group, address.slot + 1};
    return GD_OK;
}

gd_status
gd_recipe_add_extent(gd_recipe_writer *writer, const gd_extent *extent,
                     gd_error *err)
{
    GD_TRY(close_extent(writer, err));
    writer->fragments += extent->group != writer->next.group ||
                         extent->slot != writer->next.slot;
    uint64_t offset = writer->length;
    writer->length += extent->length;
    writer->next =
        (gd_address){extent->group, extent->slot + extent->blocks};
    return put_extent(writer, &(gd_extent){.offset = offset,
                                           .length = extent->length,
                                           .group = extent->group,
                                           .slot = extent->slot,
                                           .blocks = extent->blocks,
                                           .kind = extent->kind,
                                           .digest = extent->digest}, err);
}

static void
encode_derived(const gd_extent *value, uint8_t out[EXTENT_SIZE])
{
    DERIVED_FIELDS(GD_ENCODE)
}

gd_status
gd_recipe_add_derived(gd_recipe_writer *writer, const gd_extent *extent,
                      gd_error *err)
{
    if (writer->derived == 0) { /* the table begins with a page */
        GD_TRY(close_extent(writer, err));
        GD_TRY(write_pages(writer, err));
    }
    gd_extent derived = *extent;
    derived.offset = writer->file;
    derived.kind = GD_EXTENT_DERIVED;
    encode_derived(&derived, place(writer));
    writer->derived++;
    writer->file += derived.length;
    writer->derived_bytes += derived.encoder != 0 ? derived.length : 0;
    return end_put(writer, err);
}

static void
encode_hash(const gd_content_hash *value, uint8_t out[GD_RECIPE_PAGE])
{
    HASH_FIELDS(GD_ENCODE)
}

static void
encode_header(const gd_recipe_header *value, uint8_t out[GD_RECIPE_PAGE])
{
    gd_fields_begin(&layout, out);
    gd_put16(out + 8, GD_FORMAT_MAJOR);
    HEADER_FIELDS(GD_ENCODE)
    encode_hash(&value->hash, out);
    if (gd_recipe_has_disk(value)) {
        gd_put16(out + 8, WITH_DISK);
        gd_recipe_disk_encode(&value->disk, out);
    }
    gd_fields_seal(&layout, 0, out);
}

gd_status
gd_recipe_finish(gd_recipe_writer *writer, const gd_params *params,
                 gd_recipe_header *header, gd_error *err)
{
    GD_TRY(close_extent(writer, err));
    GD_TRY(write_pages(writer, err));
    memcpy(header->repository_id, params->repository_id, GD_ID_SIZE);
    header->size = gd_recipe_has_disk(header) ? writer->file : writer->length;
    header->disk.plain_size = writer->length;
    header->disk.derived = writer->derived;
    header->disk.derived_bytes = writer->derived_bytes;
    header->zero_bytes = writer->zero_bytes;
    header->extents = writer->extents;
    header->fragments = writer->fragments;
    uint8_t page[GD_RECIPE_PAGE];
    encode_header(header, page);
    return gd_write_full(writer->env, writer->fd, page, sizeof page, 0,
                         writer->name, err);
}

/* ---- reading ---- */

/* An invalid hash counts as none: the image can be read without one, and a
 * missing hash gives nobody access. */
static void
decode_hash(const uint8_t in[GD_RECIPE_PAGE], gd_content_hash *value)
{
    bool good = true;
    HASH_FIELDS(GD_DECODE)
    if (!good || value->length == 0 || value->length > GD_HASH_MAX ||
        value->name[0] == '\0') {
        memset(value, 0, sizeof *value);
    }
}

static gd_status
decode_header(const uint8_t in[GD_RECIPE_PAGE], const gd_params *params,
              const char *name, gd_recipe_header *value, gd_error *err)
{
    GD_TRY(gd_fields_check(&layout, in, name, err));
    bool good = true;
    HEADER_FIELDS(GD_DECODE)
    decode_hash(in, &value->hash);
    value->disk = (gd_recipe_disk){.plain_size = value->size};
    if (gd_get16(in + 8) == WITH_DISK) {
        gd_recipe_disk_decode(in, &value->disk);
        good = good && gd_recipe_disk_is_valid(&value->disk, value->size);
    }
    if (memcmp(value->repository_id, params->repository_id, GD_ID_SIZE) != 0) {
        return gd_fail(err, GD_CORRUPT,
                       "%s belongs to another repository (offset 16)", name);
    }
    if (!good || value->size > INT64_MAX ||
        value->zero_bytes > value->disk.plain_size ||
        value->extents > value->disk.plain_size ||
        gd_scope_equal(&value->scope, &gd_spares_scope)) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: impossible figures in the header page", name);
    }
    return GD_OK;
}

gd_status
gd_recipe_open(const gd_env *env, int fd, const char *name,
               const gd_params *params, const char *image_id,
               gd_recipe *recipe, gd_error *err)
{
    uint8_t page[GD_RECIPE_PAGE];
    *recipe = (gd_recipe){.env = env, .fd = fd};
    snprintf(recipe->name, sizeof recipe->name, "%s", name);
    GD_TRY(gd_read_full(env, fd, page, sizeof page, 0, name, err));
    GD_TRY(decode_header(page, params, name, &recipe->header, err));
    if (image_id != NULL && strcmp(recipe->header.image_id, image_id) != 0) {
        return gd_fail(err, GD_CORRUPT,
                       "%s holds the recipe of image %s (offset 144): it was "
                       "put under another's name", name,
                       recipe->header.image_id);
    }
    struct stat st;
    int rc = env->fstat(env, fd, &st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", name);
    }
    recipe->inode = st.st_ino;
    uint64_t pages = 1 + gd_recipe_all_pages(&recipe->header);
    if (pages > UINT32_MAX ||
        (uint64_t)st.st_size != pages * GD_RECIPE_PAGE) {
        return gd_fail(err, GD_CORRUPT,
                       "%s has %llu bytes; its header says %llu pages", name,
                       (unsigned long long)st.st_size,
                       (unsigned long long)pages);
    }
    return GD_OK;
}

gd_status
gd_recipe_require_scope(const gd_recipe *recipe, const gd_scope *scope,
                        const char *group_name, gd_error *err)
{
    return gd_scope_equal(scope, &recipe->header.scope)
               ? GD_OK
               : gd_fail(err, GD_CORRUPT,
                         "%s names %s, which has blocks of another scope "
                         "(offset 32 of both)", recipe->name, group_name);
}

static bool
decode_extent(const uint8_t in[EXTENT_SIZE], uint64_t size, gd_extent *value)
{
    EXTENT_FIELDS(GD_DECODE)
    value->encoder = value->reserved = 0;
    if (value->length == 0 || value->offset > size ||
        value->length > size - value->offset) {
        return false;
    }
    if (value->kind == GD_EXTENT_ZEROS) {
        return value->group == 0 && value->slot == 0 && value->blocks == 0;
    }
    return value->kind == GD_EXTENT_BLOCKS_KIND && value->group >= 1 &&
           value->group <= GD_MAX_GROUP && value->blocks >= 1 &&
           value->blocks <= GD_EXTENT_BLOCKS && value->slot < GD_MAX_SLOTS &&
           value->length >= value->blocks;
}

bool
gd_recipe_is_derived(const gd_recipe_header *header, const gd_extent *extent)
{
    uint64_t plain_size = header->disk.plain_size, length = extent->length;
    if (extent->kind != GD_EXTENT_DERIVED || extent->reserved != 0 ||
        length == 0 || extent->plain > plain_size) {
        return false;
    }
    uint64_t rest = plain_size - extent->plain;
    if (extent->encoder == 0) {
        return length <= rest && extent->plain_length == 0 &&
               extent->digest == 0;
    }
    return extent->encoder <= header->disk.encoders &&
           extent->plain_length >= 1 &&
           extent->plain_length <= GD_DEFLATE_MAX_PLAIN &&
           extent->plain_length <= rest && length <= GD_DERIVED_MAX;
}

static bool
decode_derived(const uint8_t in[EXTENT_SIZE], const gd_recipe_header *header,
               gd_extent *value)
{
    DERIVED_FIELDS(GD_DECODE)
    return gd_recipe_is_derived(header, value) &&
           value->offset <= header->size &&
           value->length <= header->size - value->offset;
}

gd_status
gd_recipe_read_page(const gd_recipe *recipe, uint64_t number,
                    gd_recipe_page *page, gd_error *err)
{
    const gd_recipe_header *header = &recipe->header;
    uint64_t offset = number * GD_RECIPE_PAGE;
    uint64_t pages = gd_recipe_pages(header->extents);
    bool derived = number > pages;
    uint8_t raw[GD_RECIPE_PAGE];
    page->number = 0;
    GD_TRY(gd_read_full(recipe->env, recipe->fd, raw, sizeof raw, offset,
                        recipe->name, err));
    uint64_t before = (number - 1 - (derived ? pages : 0)) *
                      GD_EXTENTS_PER_PAGE;
    uint64_t count =
        (derived ? header->disk.derived : header->extents) - before;
    if (count > GD_EXTENTS_PER_PAGE) {
        count = GD_EXTENTS_PER_PAGE;
    }
    uint64_t seed = gd_get64(header->transaction_id);
    if (gd_get64(raw + CHECKED) != gd_checksum(raw, CHECKED, seed) ||
        gd_get32(raw) != number || gd_get32(raw + 4) != count) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: the page at offset %llu is not what its checksum "
                       "says", recipe->name, (unsigned long long)offset);
    }
    for (uint32_t i = 0; i < count; i++) {
        gd_extent *extent = &page->extents[i];
        const uint8_t *in = raw + 8 + i * EXTENT_SIZE;
        bool follows =
            (derived ? decode_derived(in, header, extent)
                     : decode_extent(in, header->disk.plain_size, extent)) &&
            (i == 0 || extent->offset == extent[-1].offset + extent[-1].length);
        if (!follows) {
            return gd_fail(err, GD_CORRUPT,
                           "%s: impossible extent at offset %llu", recipe->name,
                           (unsigned long long)offset + 8 + i * EXTENT_SIZE);
        }
    }
    page->count = (uint32_t)count;
    page->number = number;
    return GD_OK;
}

/* Loads a page from the cache or the file. */
static gd_status
load_page(const gd_recipe *recipe, uint64_t number, bool fresh,
          gd_recipe_page *page, gd_error *err)
{
    gd_page_cache *cache = recipe->cache;
    if (cache == NULL || fresh) {
        if (cache != NULL) {
            cache->drop(cache, recipe, number);
        }
        return gd_recipe_read_page(recipe, number, page, err);
    }
    if (cache->get(cache, recipe, number, page)) {
        return GD_OK;
    }
    GD_TRY(gd_recipe_read_page(recipe, number, page, err));
    cache->keep(cache, recipe, page);
    return GD_OK;
}

static gd_status
load_next(const gd_recipe *recipe, uint64_t offset, bool fresh,
          gd_recipe_page *page, gd_error *err)
{
    GD_TRY(load_page(recipe, page->number + 1, fresh, page, err));
    if (page->extents[0].offset != offset) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: the page at offset %llu does not continue the one "
                       "before it", recipe->name,
                       (unsigned long long)page->number * GD_RECIPE_PAGE);
    }
    return GD_OK;
}

gd_status
gd_recipe_next_page(const gd_recipe *recipe, uint64_t offset,
                    gd_recipe_page *page, gd_error *err)
{
    return load_next(recipe, offset, false, page, err);
}

/* Seeks among the pages low to high, which describe `end` bytes. */
static gd_status
seek(const gd_recipe *recipe, uint64_t offset, bool fresh, uint64_t low,
     uint64_t high, uint64_t end, gd_recipe_page *page, uint32_t *index,
     gd_error *err)
{
    uint64_t start = 0;
    for (unsigned tries = 1; low <= high; tries++) {
        /* Mostly the pages have about as many bytes each.  Every fourth time, the
         * middle one keeps the search short if they do not. */
        uint64_t pages = high - low + 1;
        uint64_t number =
            low + (tries % 4 == 0 ? pages / 2
                                  : (offset - start) /
                                        ((end - start) / pages + 1));
        GD_TRY(load_page(recipe, number, fresh, page, err));
        const gd_extent *last = &page->extents[page->count - 1];
        if (offset < page->extents[0].offset) {
            high = number - 1;
            end = page->extents[0].offset;
        } else if (offset >= last->offset + last->length) {
            low = number + 1;
            start = last->offset + last->length;
        } else {
            uint32_t at = 0;
            while (offset - page->extents[at].offset >=
                   page->extents[at].length) {
                at++;
            }
            *index = at;
            return GD_OK;
        }
    }
    return gd_fail(err, GD_CORRUPT, "%s has no extent for offset %llu",
                   recipe->name, (unsigned long long)offset);
}

gd_status
gd_recipe_seek(const gd_recipe *recipe, uint64_t offset, gd_recipe_page *page,
               uint32_t *index, gd_error *err)
{
    const gd_recipe_header *header = &recipe->header;
    return seek(recipe, offset, false, 1, gd_recipe_pages(header->extents),
                header->disk.plain_size, page, index, err);
}

void
gd_extent_cursor_open(gd_extent_cursor *cursor, const gd_recipe *recipe,
                      uint64_t offset, uint64_t length)
{
    cursor->recipe = recipe;
    cursor->fresh = cursor->derived = false;
    cursor->offset = offset;
    cursor->end = offset + length;
    cursor->page.number = 0;
}

gd_status
gd_extent_cursor_next(gd_extent_cursor *cursor, gd_extent_part *part,
                      gd_error *err)
{
    gd_status s = GD_OK;
    const gd_recipe_header *header = &cursor->recipe->header;
    if (cursor->page.number == 0) {
        uint64_t pages = gd_recipe_pages(header->extents);
        bool derived = cursor->derived;
        s = seek(cursor->recipe, cursor->offset, cursor->fresh,
                 derived ? pages + 1 : 1,
                 derived ? gd_recipe_all_pages(header) : pages,
                 derived ? header->size : header->disk.plain_size,
                 &cursor->page, &cursor->at, err);
    } else if (cursor->at == cursor->page.count) {
        s = load_next(cursor->recipe, cursor->offset, cursor->fresh,
                      &cursor->page, err);
        cursor->at = 0;
    }
    if (s != GD_OK) {
        return s;
    }
    const gd_extent *extent = &cursor->page.extents[cursor->at++];
    uint64_t from = cursor->offset - extent->offset;
    uint64_t rest = cursor->end - cursor->offset;
    uint64_t length = extent->length - from;
    length = length < rest ? length : rest;
    *part = (gd_extent_part){extent, from, length};
    cursor->offset += length;
    return GD_OK;
}
