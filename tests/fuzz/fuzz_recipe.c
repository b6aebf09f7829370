/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_recipe.c - recipes: one of any content is read page by page, sought in,
 * and counted, or refused; and a written one reads back the same.
 *
 * Input: flags (1: checksums are corrected; 2: to write one; 4: the length is
 * that of the header; 8: there is a table); to read: the first 400 bytes of the
 * header page, with a table also those from 500 to 655, then extents of 40 bytes,
 * and those of the table behind them.
 */
#include "engine/base/coding.h"
#include "engine/files/spoolfile.h"
#include "engine/format/recipe.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/memory_env.h"
#include "tests/fuzz/remake.h"

enum {
    PAGES_MAX = 14,
    FILE_MAX = (1 + PAGES_MAX) * GD_RECIPE_PAGE,
    EXTENT = 40,
    DISK = 500, /* the fields of version 2 */
    DISK_SIZE = 156,
};

static const gd_params params = {
    .repository_id = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
    .block_size = 512,
    .group_slots = 64,
    .segment_size = 65536,
    .digest = "sha256",
};

/* ---- reading ---- */

static size_t
lay_out(uint8_t flags, input *in, uint8_t *file)
{
    memset(file, 0, FILE_MAX);
    take_bytes(in, file, 400);
    if ((flags & 8) != 0) {
        take_bytes(in, file + DISK, DISK_SIZE);
    }
    uint64_t extents = gd_get64(file + 112), at = 0;
    uint64_t before = gd_recipe_pages(extents); /* pages before the table */
    while (in->left > 0 && at < PAGES_MAX * GD_EXTENTS_PER_PAGE) {
        if (at == extents && at < before * GD_EXTENTS_PER_PAGE &&
            (flags & 8) != 0) {
            at = before * GD_EXTENTS_PER_PAGE;
            continue;
        }
        uint64_t page = 1 + at / GD_EXTENTS_PER_PAGE;
        take_bytes(in, file + page * GD_RECIPE_PAGE + 8 +
                           at % GD_EXTENTS_PER_PAGE * EXTENT, EXTENT);
        at++;
    }
    uint64_t derived = gd_get64(file + DISK + 16);
    uint64_t pages = before + gd_recipe_pages(derived);
    if ((flags & 4) == 0 || pages > PAGES_MAX) {
        pages = gd_recipe_pages(at);
    }
    for (uint64_t i = 0; i < pages && (flags & 1) != 0; i++) {
        uint64_t left = i < before
                            ? extents - i * GD_EXTENTS_PER_PAGE
                            : derived - (i - before) * GD_EXTENTS_PER_PAGE;
        gd_put32(file + (1 + i) * GD_RECIPE_PAGE + 4,
                 left < GD_EXTENTS_PER_PAGE ? (uint32_t)left
                                            : GD_EXTENTS_PER_PAGE);
    }
    size_t length = (size_t)(1 + pages) * GD_RECIPE_PAGE;
    if ((flags & 1) != 0) {
        remake_recipe(file, length);
    }
    return length;
}

static void
check_page(const gd_recipe *recipe, const gd_recipe_page *page)
{
    MUST(page->count >= 1 && page->count <= GD_EXTENTS_PER_PAGE);
    for (uint32_t i = 0; i < page->count; i++) {
        const gd_extent *e = &page->extents[i];
        uint64_t size = e->kind == GD_EXTENT_DERIVED
                            ? recipe->header.size
                            : recipe->header.disk.plain_size;
        MUST(e->length >= 1 && e->offset <= size &&
             e->length <= size - e->offset);
        if (e->kind == GD_EXTENT_DERIVED) {
            MUST(page->number > gd_recipe_pages(recipe->header.extents));
            MUST(gd_recipe_is_derived(&recipe->header, e));
            continue;
        }
        MUST(e->kind == GD_EXTENT_ZEROS
                 ? e->blocks == 0
                 : e->blocks >= 1 && e->blocks <= GD_EXTENT_BLOCKS &&
                       e->slot < GD_MAX_SLOTS && e->group >= 1);
    }
}

/* Walks over the table from some offsets of the file. */
static void
walk(const gd_recipe *recipe)
{
    uint64_t size = recipe->header.size;
    for (uint64_t i = 0; size > 0 && i < 8; i++) {
        gd_extent_cursor cursor;
        gd_extent_part part;
        gd_error err;
        uint64_t at = size / 8 * i;
        gd_extent_cursor_open(&cursor, recipe, at, size - at);
        cursor.derived = true;
        while (cursor.offset < cursor.end &&
               gd_extent_cursor_next(&cursor, &part, &err) == GD_OK) {
            MUST(part.extent->kind == GD_EXTENT_DERIVED);
            MUST(part.extent->offset + part.from == at);
            at += part.length;
            MUST(at == cursor.offset);
        }
    }
}

static void
read_pages(const gd_recipe *recipe)
{
    gd_recipe_page page;
    gd_error err;
    uint32_t index;
    uint64_t pages = gd_recipe_all_pages(&recipe->header);
    if (gd_recipe_has_disk(&recipe->header)) {
        walk(recipe);
    }
    for (uint64_t i = 1; i <= pages; i++) {
        gd_status s = gd_recipe_read_page(recipe, i, &page, &err);
        MUST(s == GD_OK || s == GD_CORRUPT);
        MUST(page.number == (s == GD_OK ? i : 0));
        if (s == GD_OK) {
            check_page(recipe, &page);
        }
    }
    uint64_t size = recipe->header.disk.plain_size;
    for (uint64_t i = 0; size > 0 && i < 16; i++) {
        uint64_t offset = i < 8 ? size / 8 * i : size - 1 - size / 99 * (i - 8);
        gd_status s = gd_recipe_seek(recipe, offset, &page, &index, &err);
        MUST(s == GD_OK || s == GD_CORRUPT);
        if (s == GD_OK) {
            MUST(index < page.count &&
                 offset >= page.extents[index].offset &&
                 offset - page.extents[index].offset <
                     page.extents[index].length);
        }
    }
}

static void
count_runs(const gd_spool_file *entry)
{
    gd_run *runs;
    size_t count;
    gd_error err;
    uint64_t blocks, named = 0;
    uint64_t pages = gd_recipe_pages(entry->recipe.header.extents);
    if (!entry->complete) {
        return;
    }
    gd_status measured = gd_spool_file_measure(entry, &blocks, &err);
    MUST(measured == GD_OK || measured == GD_CORRUPT);
    MUST(gd_spool_file_runs(entry, pages, 1, &runs, &count, &err) ==
         GD_INVALID);
    gd_status s = gd_spool_file_runs(entry, 0, pages, &runs, &count, &err);
    MUST(s == GD_OK || s == GD_CORRUPT);
    if (s == GD_OK) {
        for (size_t i = 0; i < count; i++) {
            MUST(runs[i].slot + runs[i].blocks <= GD_MAX_SLOTS);
            named += runs[i].blocks;
        }
        MUST(measured != GD_OK || named == blocks);
        entry->env->release(entry->env, runs);
    }
}

static void
read_one(uint8_t flags, input *in)
{
    static uint8_t file[FILE_MAX];
    memory_env m;
    gd_recipe recipe;
    gd_spool_file entry;
    gd_error err = {.text = ""};
    int fd;
    size_t length = lay_out(flags, in, file);
    memory_env_init(&m);
    memory_mkdir(&m, "/images");
    memory_put(&m, "/images/a", file, length);
    MUST(gd_open(&m.env, AT_FDCWD, "images/a", O_RDONLY, 0, &fd, &err) ==
         GD_OK);
    gd_status s = gd_recipe_open(&m.env, fd, "images/a", &params, NULL,
                                 &recipe, &err);
    MUST(s == GD_OK || s == GD_CORRUPT || s == GD_VERSION);
    if (s == GD_OK) {
        read_pages(&recipe);
    } else {
        MUST(strstr(err.text, "images/a") != NULL);
    }
    m.env.close(&m.env, fd);
    if (gd_spool_file_open_image(&m.env, AT_FDCWD, &params, "a", &entry,
                                 &err) == GD_OK) {
       count_runs(&entry);
       gd_spool_file_close(&entry);
   }
    MUST(memory_env_leaks(&m) == 0);
    memory_env_destroy(&m);
}

/* ---- writing ---- */

/* The added extents, to be compared. */
typedef struct piece {
    uint64_t offset;
    gd_address address; /* group 0: zeros */
    uint64_t length;
} piece;

enum { MAX_PIECES = 4096 };

static size_t
write_pieces(gd_recipe_writer *writer, input *in, piece *pieces,
             uint64_t *length, uint64_t *zeros)
{
    size_t count = 0;
    gd_error err;
    gd_address next = {1, 0};
    *length = *zeros = 0;
    while (in->left > 0 && count < MAX_PIECES) {
        uint8_t what = take8(in);
        uint32_t times = 1;
        piece p = {.offset = *length};
        if (what % 4 == 0) {
            p.length = 1 + take16(in);
            *zeros += p.length;
        } else {
            p.length = 1 + what % 7 * 100;
            if (what % 4 == 1) { /* somewhere else */
                next.group = 1 + take16(in);
                next.slot = take16(in) % GD_MAX_SLOTS;
            }
            times = what % 4 == 3 ? 1 + take16(in) % 1500 : 1;
        }
        for (uint32_t i = 0; i < times && count < MAX_PIECES; i++) {
            gd_fingerprint fp = {{(uint8_t)count, 1}};
            next.slot %= GD_MAX_SLOTS;
            p.offset = *length;
            p.address = what % 4 == 0 ? (gd_address){0, 0} : next;
            gd_status s =
                what % 4 == 0
                    ? gd_recipe_add_zeros(writer, p.length, &err)
                    : gd_recipe_add_block(writer, next, &fp,
                                          (uint32_t)p.length, &err);
            MUST(s == GD_OK);
            *length += p.length;
            next.slot += what % 4 != 0;
            pieces[count++] = p;
        }
    }
    return count;
}

static void
compare(const gd_recipe *recipe, const piece *pieces, size_t count)
{
    gd_recipe_page page;
    gd_error err;
    size_t at = 0;
    uint64_t offset = 0, extents = 0;
    uint64_t pages = (recipe->header.extents + GD_EXTENTS_PER_PAGE - 1) /
                     GD_EXTENTS_PER_PAGE;
    for (uint64_t i = 1; i <= pages; i++) {
        MUST(gd_recipe_read_page(recipe, i, &page, &err) == GD_OK);
        check_page(recipe, &page);
        for (uint32_t k = 0; k < page.count; k++, extents++) {
            const gd_extent *e = &page.extents[k];
            MUST(e->offset == offset);
            uint64_t end = offset + e->length;
            for (uint32_t b = 0; offset < end; b++) {
                MUST(at < count && pieces[at].offset == offset);
                bool zeros = pieces[at].address.group == 0;
                MUST(zeros == (e->kind == GD_EXTENT_ZEROS));
                MUST(zeros || (pieces[at].address.group == e->group &&
                               pieces[at].address.slot == e->slot + b));
                offset += pieces[at++].length;
            }
            MUST(offset == end);
        }
    }
    MUST(at == count && extents == recipe->header.extents);
}

static void
write_one(input *in)
{
    static piece pieces[MAX_PIECES];
    memory_env m;
    gd_recipe_writer *writer;
    gd_recipe recipe;
    gd_error err;
    int fd;
    uint64_t length, zeros;
    gd_recipe_header header = {.transaction_id = {9, 8, 7},
                               .image_id = "a",
                               .project = "p"};
    memory_env_init(&m);
    MUST(gd_open(&m.env, AT_FDCWD, "a", O_RDWR | O_CREAT, 0600, &fd, &err) ==
         GD_OK);
    MUST(gd_recipe_writer_open(&m.env, fd, "a", header.transaction_id,
                               &writer, &err) == GD_OK);
    size_t count = write_pieces(writer, in, pieces, &length, &zeros);
    MUST(gd_recipe_length(writer) == length);
    MUST(gd_recipe_finish(writer, &params, &header, &err) == GD_OK);
    gd_recipe_writer_close(writer);
    MUST(gd_recipe_open(&m.env, fd, "a", &params, "a", &recipe, &err) ==
         GD_OK);
    MUST(recipe.header.size == length && recipe.header.zero_bytes == zeros);
    compare(&recipe, pieces, count);
    m.env.close(&m.env, fd);
    MUST(memory_env_leaks(&m) == 0);
    memory_env_destroy(&m);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, size};
    uint8_t flags = take8(&in);
    if ((flags & 2) != 0) {
        write_one(&in);
    } else {
        read_one(flags, &in);
    }
    return 0;
}
