/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipe.h - recipes: an image's ordered extents (format.rst, "Recipes").
 *
 * A recipe is written once, page by page, so the memory for writing or reading
 * one does not grow with the image.  The header page is written last: a file
 * without a valid header page is an image not yet complete.
 */
#ifndef GD_RECIPE_H
#define GD_RECIPE_H

#include <stdint.h>

#include "engine/base/env.h"
#include "engine/base/status.h"
#include "engine/format/address.h"
#include "engine/format/fingerprint.h"
#include "engine/format/names.h"
#include "engine/format/params.h"
#include "engine/format/recipedisk.h"

enum {
    GD_RECIPE_PAGE = 4096,
    GD_EXTENTS_PER_PAGE = 102,
    GD_EXTENT_BLOCKS = 1024, /* at most, in one extent */
};

typedef enum gd_extent_kind {
    GD_EXTENT_ZEROS = 0,
    GD_EXTENT_BLOCKS_KIND = 1,
    GD_EXTENT_DERIVED = 2, /* one of the table */
} gd_extent_kind;

/* An extent is a range of the plain bytes.  Those of the table are ranges of the
 * file, which an encoder makes of a range of the plain bytes. */
typedef struct gd_extent {
    uint64_t offset; /* in the plain bytes, or in the file */
    uint64_t length; /* bytes */
    union {
        struct {
            uint32_t group;
            uint32_t slot;
        };
        uint64_t plain; /* of the table: the offset in the plain bytes */
    };
    union {
        uint32_t blocks;
        uint32_t plain_length; /* of the table; 0 if the encoder copies */
    };
    gd_extent_kind kind;
    uint32_t encoder; /* of the table: its number in the header; 0 copies */
    uint32_t reserved;
    /* Over the blocks' fingerprints (I7); of the table, over the bytes that the
     * encoder makes (F1). */
    uint64_t digest;
} gd_extent;

enum {
    GD_HASH_NAME_MAX = 32,
    GD_HASH_MAX = 64,
};

/* The hash of the whole image, computed over the bytes by the process that
 * stored it.  It lets a hash from elsewhere be compared with the image here.
 * Recipes older than this field have none, nor have recipes that an older
 * program merged. */
typedef struct gd_content_hash {
    char name[GD_HASH_NAME_MAX + 1]; /* hashlib's name; "": none */
    uint32_t length;
    uint8_t value[GD_HASH_MAX];
} gd_content_hash;

typedef struct gd_recipe_header {
    uint8_t repository_id[GD_ID_SIZE];
    gd_scope scope; /* of all groups that the recipe names */
    uint8_t transaction_id[GD_ID_SIZE];
    uint8_t upload_id[GD_ID_SIZE];
    uint64_t size; /* of the file */
    uint64_t zero_bytes; /* of the plain bytes */
    uint64_t new_bytes;    /* plain bytes this image was the first to store */
    uint64_t stored_bytes; /* bytes written for them */
    uint64_t extents;
    uint64_t fragments;
    uint64_t created;
    char image_id[GD_IMAGE_ID_MAX + 1];
    char project[GD_PROJECT_MAX + 1];
    gd_content_hash hash;
    gd_recipe_disk disk; /* without a disk, plain_size is size */
} gd_recipe_header;

/* ---- writing ---- */

typedef struct gd_recipe_writer gd_recipe_writer;

/* Writes into fd; errors call the file name.  The caller keeps fd.
 * transaction_id seeds the pages' checksums. */
gd_status gd_recipe_writer_open(const gd_env *env, int fd, const char *name,
                                const uint8_t transaction_id[GD_ID_SIZE],
                                gd_recipe_writer **writer, gd_error *err);
void gd_recipe_writer_close(gd_recipe_writer *writer);

gd_status gd_recipe_add_zeros(gd_recipe_writer *writer, uint64_t length,
                              gd_error *err);
gd_status gd_recipe_add_block(gd_recipe_writer *writer, gd_address address,
                              const gd_fingerprint *fp, uint32_t length,
                              gd_error *err);
/* Adds the blocks of another recipe's extent, with its digest.
 * REQUIRES: the extent is one of blocks. */
gd_status gd_recipe_add_extent(gd_recipe_writer *writer,
                               const gd_extent *extent, gd_error *err);
/* Adds an extent of the table, behind all bytes; its offset is where the one
 * before it ends.  Nothing but extents of the table may follow.
 * REQUIRES: gd_recipe_is_derived. */
gd_status gd_recipe_add_derived(gd_recipe_writer *writer,
                                const gd_extent *extent, gd_error *err);
/* Plain bytes added so far. */
uint64_t gd_recipe_length(const gd_recipe_writer *writer);
/* Those of them that are not zeros. */
uint64_t gd_recipe_block_bytes(const gd_recipe_writer *writer);

/* Completes the file: last page, then the header page.  Fills in
 * repository_id, size, zero_bytes, extents and fragments, and the numbers of the
 * table; the caller fills in the rest.  With a disk, the caller fills in its
 * size, format, flags and encoders.  Does not sync. */
gd_status gd_recipe_finish(gd_recipe_writer *writer, const gd_params *params,
                           gd_recipe_header *header, gd_error *err);

/* ---- reading ---- */

typedef struct gd_page_cache gd_page_cache;

/* An open recipe; immutable, so threads may share it. */
typedef struct gd_recipe {
    const gd_env *env;
    int fd;
    uint64_t inode;
    char name[GD_NAME_SIZE];
    gd_recipe_header header;
    /* Has pages of committed recipes for their next use.  NULL: all pages are
     * read from the file. */
    gd_page_cache *cache;
} gd_recipe;

/* The number of pages of extents after the header page. */
static inline uint64_t
gd_recipe_pages(uint64_t extents)
{
    return extents / GD_EXTENTS_PER_PAGE + (extents % GD_EXTENTS_PER_PAGE != 0);
}

/* The size of a recipe's file in bytes. */
static inline uint64_t
gd_recipe_bytes(uint64_t extents)
{
    return (2 + extents / GD_EXTENTS_PER_PAGE) * GD_RECIPE_PAGE;
}

/* The number of pages of extents and of the table. */
static inline uint64_t
gd_recipe_all_pages(const gd_recipe_header *header)
{
    return gd_recipe_pages(header->extents) +
           gd_recipe_pages(header->disk.derived);
}

static inline bool
gd_recipe_has_disk(const gd_recipe_header *header)
{
    return header->disk.size != 0;
}

/* Returns whether the extent may be in the table of this recipe. */
bool gd_recipe_is_derived(const gd_recipe_header *header,
                          const gd_extent *extent);

/* One page of extents, or of the table. */
typedef struct gd_recipe_page {
    uint64_t number; /* from 1; 0: no page is loaded */
    uint32_t count;
    gd_extent extents[GD_EXTENTS_PER_PAGE];
} gd_recipe_page;

/* A cache of verified pages (metacache.h).  Thread-safe. */
struct gd_page_cache {
    /* Copies a page; returns false if the cache does not have it. */
    bool (*get)(gd_page_cache *cache, const gd_recipe *recipe, uint64_t number,
                gd_recipe_page *page);
    void (*keep)(gd_page_cache *cache, const gd_recipe *recipe,
                 const gd_recipe_page *page);
    void (*drop)(gd_page_cache *cache, const gd_recipe *recipe,
                 uint64_t number);
};

/* Verifies header page and length of the open file fd.  The recipe must be that
 * of image_id; NULL: of any image. */
gd_status gd_recipe_open(const gd_env *env, int fd, const char *name,
                         const gd_params *params, const char *image_id,
                         gd_recipe *recipe, gd_error *err);
/* GD_CORRUPT, naming both, unless the group called group_name has blocks of the
 * recipe's scope. */
gd_status gd_recipe_require_scope(const gd_recipe *recipe,
                                  const gd_scope *scope,
                                  const char *group_name,
                                  gd_error *err);
/* Reads from the file, whatever the cache has.  The pages of the table are
 * behind those of the extents. */
gd_status gd_recipe_read_page(const gd_recipe *recipe, uint64_t number,
                              gd_recipe_page *page, gd_error *err);
/* Loads the page behind this one, which must begin with the byte at offset: of
 * the plain bytes, or, for a page of the table, of the file.
 * REQUIRES: there is a page. */
gd_status gd_recipe_next_page(const gd_recipe *recipe, uint64_t offset,
                              gd_recipe_page *page, gd_error *err);
/* Loads the page that holds the plain byte at offset, and finds the extent in it.
 * REQUIRES: offset < plain_size. */
gd_status gd_recipe_seek(const gd_recipe *recipe, uint64_t offset,
                         gd_recipe_page *page, uint32_t *index, gd_error *err);

/* Walks over the extents of a range, in order. */
typedef struct gd_extent_cursor {
    const gd_recipe *recipe;
    bool fresh; /* pages are read from the file, and the cache drops them */
    bool derived; /* walk over the table, by offsets in the file */
    uint64_t offset, end; /* the rest of the range */
    gd_recipe_page page;
    uint32_t at; /* the next extent in the page */
} gd_extent_cursor;

/* The part of an extent that is in the range. */
typedef struct gd_extent_part {
    const gd_extent *extent; /* valid until the next step */
    uint64_t from; /* in the extent */
    uint64_t length;
} gd_extent_part;

/* Neither fresh nor derived; the caller may change that before the first step.
 * REQUIRES: the range lies within the plain bytes, or within the file. */
void gd_extent_cursor_open(gd_extent_cursor *cursor, const gd_recipe *recipe,
                           uint64_t offset, uint64_t length);
/* REQUIRES: cursor->offset < cursor->end. */
gd_status gd_extent_cursor_next(gd_extent_cursor *cursor, gd_extent_part *part,
                                gd_error *err);

#endif
