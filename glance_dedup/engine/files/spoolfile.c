/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spoolfile.c - see spoolfile.h.
 */
#include "engine/files/spoolfile.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/array.h"
#include "engine/base/coding.h"
#include "engine/base/listing.h"
#include "engine/files/image_delete.h"
#include "engine/files/locks.h"
#include "engine/files/secondname.h"
#include "engine/files/spool.h"

/* ---- the spool's listing ---- */

static bool
parse_entry(const char *name, void *item)
{
    gd_spool_base *entry = item;
    gd_spool_kind kind;
    uint8_t id[GD_ID_SIZE];
    bool is = gd_names_parse_spool(name, &kind, id);
    if (is) {
        strcpy(entry->name, name); /* its length is known */
    }
    return is;
}

static int
by_name(const void *a, const void *b)
{
    const gd_spool_base *x = a, *y = b;
    return strcmp(x->name, y->name);
}

gd_status
gd_spool_file_list(const gd_env *env, int root, gd_spool_base **entries,
                   size_t *count, gd_error *err)
{
    static const gd_listing listing = {sizeof **entries, "the spool's listing",
                                       parse_entry, by_name};
    void *items;
    gd_status s =
        gd_list(env, root, GD_DIR_SPOOL, &listing, &items, count, err);
    *entries = items;
    return s;
}

/* ---- opening ---- */

/* Finds out whether a header page was ever written.  Every file in images/ has
 * one, and so has every file that a delete or a merge took from there. */
static gd_status
has_header(const gd_spool_file *entry, uint64_t size, bool *has, gd_error *err)
{
    static const uint8_t zeros[GD_RECIPE_PAGE];
    uint8_t page[GD_RECIPE_PAGE];
    *has = entry->kind == 0 || entry->kind == GD_SPOOL_DELETED ||
           entry->kind == GD_SPOOL_REPLACED;
    if (*has || entry->kind == GD_SPOOL_GROUP || size < sizeof page) {
        return GD_OK;
    }
    gd_status s = gd_read_full(entry->env, entry->content, page, sizeof page, 0,
                               entry->name, err);
    *has = s == GD_OK && memcmp(page, zeros, sizeof page) != 0;
    return s == GD_CORRUPT ? GD_OK : s; /* it was truncated just now */
}

/* The file's name decides the fields that the header must have. */
static gd_status
require_names(const gd_spool_file *entry, gd_error *err)
{
    const gd_recipe_header *header = &entry->recipe.header;
    char name[GD_NAME_SIZE];
    bool is_writers = entry->kind == GD_SPOOL_STORE ||
                      entry->kind == GD_SPOOL_MERGED;
    if (gd_names_image(header->image_id, name, NULL) != GD_OK) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: impossible image id in the header page (offset "
                       "144)", entry->name);
    }
    if (is_writers &&
        memcmp(header->transaction_id, entry->id, GD_ID_SIZE) != 0) {
        return gd_fail(err, GD_CORRUPT,
                       "%s is of another transaction than its name says "
                       "(offset 48)", entry->name);
    }
    return GD_OK;
}

static uint64_t
modified_of(const struct stat *st)
{
    return (uint64_t)st->st_mtim.tv_sec * 1000000000u +
           (uint64_t)st->st_mtim.tv_nsec;
}

/* Records damage, so that it can be reported.  Only a failed check is an
 * error. */
static gd_status
read_header(gd_spool_file *entry, gd_error *err)
{
    const char *image_id =
        entry->kind == 0 ? strchr(entry->name, '/') + 1 : NULL;
    struct stat st;
    entry->complete = false;
    entry->damage.status = GD_OK;
    int rc = entry->env->fstat(entry->env, entry->content, &st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", entry->name);
    }
    entry->inode = st.st_ino;
    entry->modified = modified_of(&st);
    entry->links = st.st_nlink;
    if (!S_ISREG(st.st_mode)) {
        gd_fail(&entry->damage, GD_CORRUPT, "%s is not a file", entry->name);
        return GD_OK;
    }
    bool has;
    gd_status s = has_header(entry, (uint64_t)st.st_size, &has, err);
    if (s != GD_OK || !has) {
        return s;
    }
    gd_error damage;
    s = gd_recipe_open(entry->env, entry->content, entry->name, entry->params,
                       image_id, &entry->recipe, &damage);
    if (s == GD_OK) {
        s = require_names(entry, &damage);
    }
    entry->complete = s == GD_OK;
    if (s == GD_CORRUPT || s == GD_VERSION) {
        entry->damage = damage;
        return GD_OK;
    }
    if (s != GD_OK && err != NULL) {
        *err = damage;
    }
    return s;
}

/* Opens the file again, since through a file that has been read already a host
 * may see its former content (N13.1).  The first descriptor stays for its
 * locks.  If the name leads to another file now, or to none, nobody will
 * complete this one. */
static gd_status
open_content(gd_spool_file *entry, gd_error *err)
{
    const gd_env *env = entry->env;
    struct stat st;
    int fd;
    (void)env->renew(env, entry->root, entry->name);
    int flags = entry->params->shared ? O_RDONLY | O_DIRECT : O_RDONLY;
    gd_status s = gd_open(env, entry->root, entry->name, flags, 0, &fd, err);
    if (s != GD_OK) {
        return s == GD_NOTFOUND ? GD_OK : s;
    }
    int rc = env->fstat(env, fd, &st);
    if (rc < 0 || st.st_ino != entry->inode) {
        env->close(env, fd);
        return rc < 0 ? gd_fail_errno(err, -rc, "cannot stat %s", entry->name)
                      : GD_OK;
    }
    if (entry->content != entry->fd) {
        env->close(env, entry->content);
    }
    entry->content = fd;
    return GD_OK;
}

/* Opens for writing, since an exclusive lock needs that. */
static gd_status
open_file(gd_spool_file *entry, gd_error *err)
{
    struct stat st;
    gd_status s = gd_open(entry->env, entry->root, entry->name, O_RDWR, 0,
                          &entry->fd, err);
    if (s != GD_OK) {
        return s;
    }
    entry->content = entry->fd;
    int rc = entry->env->fstat(entry->env, entry->fd, &st);
    if (rc < 0) {
        s = gd_fail_errno(err, -rc, "cannot stat %s", entry->name);
    }
    entry->inode = st.st_ino;
    if (s == GD_OK && entry->params->shared && S_ISREG(st.st_mode)) {
        s = open_content(entry, err);
    }
    if (s == GD_OK) {
        s = read_header(entry, err);
    }
    if (s != GD_OK) {
        gd_spool_file_close(entry);
    }
    return s;
}

gd_status
gd_spool_file_open(const gd_env *env, int root, const gd_params *params,
                   const char *base, gd_spool_file *entry, gd_error *err)
{
    *entry = (gd_spool_file){
        .env = env, .root = root, .params = params, .fd = -1};
    if (!gd_names_parse_spool(base, &entry->kind, entry->id)) {
        return gd_fail(err, GD_INVALID, "no spool entry is called '%.40s'",
                       base);
    }
    gd_names_spool(entry->kind, entry->id, entry->name);
    return open_file(entry, err);
}

gd_status
gd_spool_file_open_image(const gd_env *env, int root, const gd_params *params,
                         const char *image_id, gd_spool_file *entry,
                         gd_error *err)
{
    *entry = (gd_spool_file){
        .env = env, .root = root, .params = params, .fd = -1};
    GD_TRY(gd_names_image(image_id, entry->name, err));
    return open_file(entry, err);
}

bool
gd_spool_file_is_same(const gd_env *env, int root, const char *image_id,
                      uint64_t inode, uint64_t modified)
{
    char name[GD_NAME_SIZE];
    struct stat st;
    return gd_names_image(image_id, name, NULL) == GD_OK &&
           env->fstatat(env, root, name, &st) == 0 && st.st_ino == inode &&
           modified_of(&st) == modified;
}

void
gd_spool_file_close(gd_spool_file *entry)
{
    if (entry->fd >= 0) {
        if (entry->content != entry->fd) {
            entry->env->close(entry->env, entry->content);
        }
        entry->env->close(entry->env, entry->fd);
        entry->fd = -1;
    }
}

/* ---- looking and locking ---- */

gd_status
gd_spool_file_live(gd_spool_file *entry, bool *live, gd_error *err)
{
    char name[GD_NAME_SIZE];
    gd_status s = GD_OK;
    *live = false;
    if (!entry->complete) {
        s = open_content(entry, err);
        s = s == GD_OK ? read_header(entry, err) : s;
    }
    if (s == GD_OK && entry->complete) {
        s = gd_names_image(entry->recipe.header.image_id, name, err);
        /* "Cannot say" is an error: an image wrongly taken for deleted would be
         * un-counted. */
        if (s == GD_OK) {
            s = gd_find_same(entry->env, entry->fd, entry->root, name, live,
                             err);
        }
    }
    return s;
}

gd_status
gd_spool_file_lock(const gd_spool_file *entry, int byte, gd_error *err)
{
    int rc = entry->env->lock(entry->env, entry->fd, (uint64_t)byte,
                              F_WRLCK);
    if (rc == -EAGAIN) {
        return GD_BUSY;
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot lock byte %d of %s", byte,
                                  entry->name)
                  : GD_OK;
}

/* ---- what it names ---- */

/* The runs found so far.  Its room grows with the runs that were read and
 * verified, never by a header's claim. */
typedef struct run_list {
    const gd_env *env;
    gd_run *runs;
    size_t count, room;
} run_list;

static gd_status
add_run(run_list *list, const gd_extent *extent, gd_error *err)
{
    gd_run *larger = gd_array_reserve(list->env, list->runs, &list->room,
                                      list->count + 1, sizeof *larger, err);
    if (larger == NULL) {
        return GD_NOMEM;
    }
    list->runs = larger;
    list->runs[list->count++] =
        (gd_run){extent->group, extent->slot, extent->blocks};
    return GD_OK;
}

/* Totals over a recipe's extents so far. */
typedef struct met {
    uint64_t end; /* of the last extent, in the image, bytes */
    uint64_t zeros, blocks;
} met;

/* list is NULL if only the totals are wanted. */
static gd_status
add_page(run_list *list, const gd_spool_file *entry,
         const gd_recipe_page *page, met *sums, gd_error *err)
{
    for (uint32_t i = 0; i < page->count; i++) {
        const gd_extent *extent = &page->extents[i];
        if (extent->offset != sums->end ||
            extent->blocks > GD_MAX_SLOTS - extent->slot) {
            return gd_fail(err, GD_CORRUPT,
                           "%s: impossible extent %u of page %llu",
                           entry->name, i, (unsigned long long)page->number);
        }
        sums->end += extent->length;
        if (extent->kind == GD_EXTENT_ZEROS) {
            sums->zeros += extent->length;
            continue;
        }
        sums->blocks += extent->blocks;
        if (list != NULL) {
            GD_TRY(add_run(list, extent, err));
        }
    }
    return GD_OK;
}

/* Pages count from 0 here, and from 1 in the file. */
static gd_status
add_pages(run_list *list, const gd_spool_file *entry, uint64_t first,
          uint64_t count, met *sums, gd_error *err)
{
    gd_recipe_page page;
    for (uint64_t i = 0; i < count; i++) {
        GD_TRY(gd_recipe_read_page(&entry->recipe, first + i + 1, &page, err));
        if (i == 0 && first > 0 && page.count > 0) {
            sums->end = page.extents[0].offset; /* the extents before it are not
                                                 * read */
        }
        GD_TRY(add_page(list, entry, &page, sums, err));
    }
    return GD_OK;
}

static gd_status
require_complete(const gd_spool_file *entry, gd_error *err)
{
    return entry->complete
               ? GD_OK
               : gd_fail(err, GD_INVALID, "%s has no valid header page",
                         entry->name);
}

gd_status
gd_spool_file_runs(const gd_spool_file *entry, uint64_t first, uint64_t pages,
                   gd_run **runs, size_t *count, gd_error *err)
{
    run_list list = {.env = entry->env};
    met sums = {0};
    GD_TRY(require_complete(entry, err));
    uint64_t there = gd_recipe_pages(entry->recipe.header.extents);
    if (first > there || pages > there - first) {
        return gd_fail(err, GD_INVALID, "%s has %llu pages of extents, not %llu "
                       "from the %lluth on", entry->name,
                       (unsigned long long)there, (unsigned long long)pages,
                       (unsigned long long)first);
    }
    gd_status s = add_pages(&list, entry, first, pages, &sums, err);
    if (s != GD_OK) {
        entry->env->release(entry->env, list.runs);
        return s;
    }
    *runs = list.runs;
    *count = list.count;
    return GD_OK;
}

gd_status
gd_spool_file_measure(const gd_spool_file *entry, uint64_t *blocks,
                      gd_error *err)
{
    const gd_recipe_header *header = &entry->recipe.header;
    met sums = {0};
    gd_status s = require_complete(entry, err);
    if (s == GD_OK) {
        s = add_pages(NULL, entry, 0, gd_recipe_pages(header->extents), &sums,
                      err);
    }
    if (s == GD_OK &&
        (sums.end != header->disk.plain_size ||
         sums.zeros != header->zero_bytes)) {
        s = gd_fail(err, GD_CORRUPT, "%s: its extents do not make up the "
                    "image that its header describes", entry->name);
    }
    *blocks = sums.blocks;
    return s;
}

/* ---- settling ---- */

static gd_status
require_own_name(const gd_spool_file *entry, gd_error *err)
{
    bool here;
    GD_TRY(gd_find_same(entry->env, entry->fd, entry->root, entry->name,
                        &here, err));
    if (!here) {
        return gd_fail(err, GD_NOTFOUND,
                       "%s is not the file any more that was opened",
                       entry->name);
    }
    return GD_OK;
}

gd_status
gd_spool_file_unlink(const gd_spool_file *entry, gd_error *err)
{
    GD_TRY(require_own_name(entry, err));
    int rc = entry->env->unlinkat(entry->env, entry->root, entry->name);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot unlink %s", entry->name)
                  : GD_OK;
}

/* A name in quarantine/ that records the place of the file. */
static gd_status
quarantine_name(const gd_spool_file *entry, char name[GD_NAME_SIZE],
                gd_error *err)
{
    uint8_t digits[8];
    GD_TRY(gd_random(entry->env, digits, sizeof digits, err));
    int n = snprintf(name, GD_NAME_SIZE,
                     GD_DIR_QUARANTINE "/%.*s-%016llx", GD_IMAGE_ID_MAX,
                     strchr(entry->name, '/') + 1,
                     (unsigned long long)gd_get64(digits));
    return n < GD_NAME_SIZE
               ? GD_OK
               : gd_fail(err, GD_INVALID, "%s: its name is too long",
                         entry->name);
}

gd_status
gd_spool_file_set_aside(const gd_spool_file *entry, char name[GD_NAME_SIZE],
                        gd_error *err)
{
    const gd_env *env = entry->env;
    bool here;
    GD_TRY(require_own_name(entry, err));
    GD_TRY(quarantine_name(entry, name, err));
    int rc = env->linkat(env, entry->root, entry->name, name);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot set %s aside as %s",
                             entry->name, name);
    }
    /* The image may have been replaced between the check and the link. */
    GD_TRY(gd_find_same(env, entry->fd, entry->root, name, &here, err));
    if (!here) {
        (void)env->unlinkat(env, entry->root, name);
        return gd_fail(err, GD_BUSY, "%s was replaced just now", entry->name);
    }
    return gd_sync_dir(env, entry->root, GD_DIR_QUARANTINE, err);
}

gd_status
gd_spool_file_delete(const gd_spool_file *entry, gd_error *err)
{
    const char *image_id = strchr(entry->name, '/') + 1;
    int lock;
    if (entry->kind != 0) {
        return gd_fail(err, GD_INVALID, "%s is not an image's",
                       entry->name);
    }
    /* N9.1.  N9.2 keeps out the maintainer, which is this process. */
    GD_TRY(gd_locks_lock_image(entry->env, entry->root, image_id,
                               entry->params->lock_timeout_ms, &lock, err));
    gd_status s = gd_second_name_finish(entry->env, entry->root, entry->params,
                                        entry->name, err); /* N14.3 */
    /* Under the image lock a name keeps its file while the name exists. */
    if (s == GD_OK) {
        s = require_own_name(entry, err);
    }
    if (s == GD_OK) {
        s = gd_image_delete_move(entry->env, entry->root, image_id, err);
    }
    gd_locks_unlock_image(entry->env, lock);
    return s;
}
