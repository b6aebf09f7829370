/*
 * judge.c - see judge.h.
 */
#include "judge.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "coding.h"
#include "locks.h"
#include "spool.h"

/* ---- the spool's listing ---- */

typedef struct spool_list {
    const gd_env *env;
    gd_spool_base *entries;
    size_t count, room;
    bool failed;
} spool_list;

static void
note_entry(void *arg, const char *name)
{
    spool_list *list = arg;
    gd_spool_kind kind;
    uint8_t id[GD_ID_SIZE];
    if (list->failed || !gd_spool_name_parse(name, &kind, id)) {
        return;
    }
    if (list->count == list->room) {
        size_t room = list->room == 0 ? 64 : list->room * 2;
        gd_spool_base *larger =
            gd_calloc(list->env, room, sizeof *larger, NULL);
        if (larger == NULL) {
            list->failed = true;
            return;
        }
        if (list->count > 0) {
            memcpy(larger, list->entries, list->count * sizeof *larger);
        }
        list->env->release(list->env, list->entries);
        list->entries = larger;
        list->room = room;
    }
    strcpy(list->entries[list->count++].name, name); /* its length is known */
}

static int
by_name(const void *a, const void *b)
{
    const gd_spool_base *x = a, *y = b;
    return strcmp(x->name, y->name);
}

gd_status
gd_judged_list(const gd_env *env, int root, gd_spool_base **entries,
               size_t *count, gd_error *err)
{
    spool_list list = {.env = env};
    int rc = env->list(env, root, GD_DIR_SPOOL, note_entry, &list);
    if (rc < 0 || list.failed) {
        env->release(env, list.entries);
        return rc < 0 ? gd_fail_errno(err, -rc, "cannot list %s", GD_DIR_SPOOL)
                      : gd_fail(err, GD_NOMEM,
                                "no memory for the spool's listing");
    }
    if (list.count > 0) {
        qsort(list.entries, list.count, sizeof *list.entries, by_name);
    }
    *entries = list.entries;
    *count = list.count;
    return GD_OK;
}

/* ---- opening ---- */

/* Whether a header page was ever written.  In images/ one was, and so of what a
 * delete or a merge took out of it. */
static gd_status
has_header(const gd_judged *judged, uint64_t size, bool *has, gd_error *err)
{
    static const uint8_t zeros[GD_RECIPE_PAGE];
    uint8_t page[GD_RECIPE_PAGE];
    *has = judged->kind == 0 || judged->kind == GD_SPOOL_DELETED ||
           judged->kind == GD_SPOOL_REPLACED;
    if (*has || judged->kind == GD_SPOOL_GROUP || size < sizeof page) {
        return GD_OK;
    }
    gd_status s = gd_read_full(judged->env, judged->fd, page, sizeof page, 0,
                               judged->name, err);
    *has = s == GD_OK && memcmp(page, zeros, sizeof page) != 0;
    return s == GD_CORRUPT ? GD_OK : s; /* it was cut just now */
}

/* What the name of the file demands of the header. */
static gd_status
check_names(const gd_judged *judged, gd_error *err)
{
    const gd_recipe_header *header = &judged->recipe.header;
    char name[GD_NAME_SIZE];
    bool is_writers = judged->kind == GD_SPOOL_STORE ||
                      judged->kind == GD_SPOOL_MERGED;
    if (gd_image_name(header->image_id, name, NULL) != GD_OK) {
        return gd_fail(err, GD_CORRUPT,
                       "%s: impossible image id in the header page (offset "
                       "144)", judged->name);
    }
    if (is_writers &&
        memcmp(header->transaction_id, judged->id, GD_ID_SIZE) != 0) {
        return gd_fail(err, GD_CORRUPT,
                       "%s is of another transaction than its name says "
                       "(offset 48)", judged->name);
    }
    return GD_OK;
}

/* Damage is kept, to be told; only what hindered the look is an error. */
static gd_status
read_header(gd_judged *judged, gd_error *err)
{
    const char *image_id =
        judged->kind == 0 ? strchr(judged->name, '/') + 1 : NULL;
    struct stat st;
    judged->complete = false;
    judged->damage.status = GD_OK;
    int rc = judged->env->fstat(judged->env, judged->fd, &st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", judged->name);
    }
    judged->inode = st.st_ino;
    judged->modified = (uint64_t)st.st_mtim.tv_sec * 1000000000u +
                       (uint64_t)st.st_mtim.tv_nsec;
    judged->links = st.st_nlink;
    if (!S_ISREG(st.st_mode)) {
        gd_fail(&judged->damage, GD_CORRUPT, "%s is not a file", judged->name);
        return GD_OK;
    }
    bool has;
    gd_status s = has_header(judged, (uint64_t)st.st_size, &has, err);
    if (s != GD_OK || !has) {
        return s;
    }
    gd_error damage;
    s = gd_recipe_open(judged->env, judged->fd, judged->name, judged->params,
                       image_id, &judged->recipe, &damage);
    if (s == GD_OK) {
        s = check_names(judged, &damage);
    }
    judged->complete = s == GD_OK;
    if (s == GD_CORRUPT || s == GD_VERSION) {
        judged->damage = damage;
        return GD_OK;
    }
    if (s != GD_OK && err != NULL) {
        *err = damage;
    }
    return s;
}

/* For writing, since an exclusive lock needs that. */
static gd_status
open_file(gd_judged *judged, gd_error *err)
{
    gd_status s = gd_open(judged->env, judged->root, judged->name, O_RDWR, 0,
                          &judged->fd, err);
    if (s != GD_OK) {
        return s;
    }
    s = read_header(judged, err);
    if (s != GD_OK) {
        gd_judged_close(judged);
    }
    return s;
}

gd_status
gd_judged_open_entry(const gd_env *env, int root, const gd_params *params,
                     const char *base, gd_judged *judged, gd_error *err)
{
    *judged = (gd_judged){
        .env = env, .root = root, .params = params, .fd = -1};
    if (!gd_spool_name_parse(base, &judged->kind, judged->id)) {
        return gd_fail(err, GD_INVALID, "no spool entry is called '%.40s'",
                       base);
    }
    gd_spool_name(judged->kind, judged->id, judged->name);
    return open_file(judged, err);
}

gd_status
gd_judged_open_image(const gd_env *env, int root, const gd_params *params,
                     const char *image_id, gd_judged *judged, gd_error *err)
{
    *judged = (gd_judged){
        .env = env, .root = root, .params = params, .fd = -1};
    gd_status s = gd_image_name(image_id, judged->name, err);
    return s == GD_OK ? open_file(judged, err) : s;
}

void
gd_judged_close(gd_judged *judged)
{
    if (judged->fd >= 0) {
        judged->env->close(judged->env, judged->fd);
        judged->fd = -1;
    }
}

/* ---- looking and locking ---- */

/* Whether a name leads to the open file.  "Cannot say" is an error: an image
 * taken for deleted would be un-counted. */
static gd_status
leads_here(const gd_judged *judged, const char *name, bool *here,
           gd_error *err)
{
    return gd_find_same(judged->env, judged->fd, judged->root, name, here,
                        err);
}

gd_status
gd_judged_live(gd_judged *judged, bool *live, gd_error *err)
{
    char name[GD_NAME_SIZE];
    *live = false;
    if (!judged->complete) {
        /* Another host may have written it since. */
        (void)judged->env->renew(judged->env, judged->root, judged->name,
                                 judged->fd);
    }
    gd_status s = judged->complete ? GD_OK : read_header(judged, err);
    if (s == GD_OK && judged->complete) {
        s = gd_image_name(judged->recipe.header.image_id, name, err);
        if (s == GD_OK) {
            s = leads_here(judged, name, live, err);
        }
    }
    return s;
}

gd_status
gd_judged_lock(const gd_judged *judged, int byte, gd_error *err)
{
    int rc = judged->env->lock(judged->env, judged->fd, (uint64_t)byte,
                               F_WRLCK);
    if (rc == -EAGAIN) {
        return GD_BUSY;
    }
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot lock byte %d of %s", byte,
                                  judged->name)
                  : GD_OK;
}

/* ---- what it names ---- */

/* The runs found so far.  Room grows with what was read and verified, never by
 * what a header claims. */
typedef struct run_list {
    const gd_env *env;
    gd_run *runs;
    size_t count, room;
} run_list;

static gd_status
add_run(run_list *list, const gd_extent *extent, gd_error *err)
{
    if (list->count == list->room) {
        size_t room = list->room == 0 ? 256 : list->room * 2;
        gd_run *larger = gd_calloc(list->env, room, sizeof *larger, err);
        if (larger == NULL) {
            return GD_NOMEM;
        }
        if (list->count > 0) {
            memcpy(larger, list->runs, list->count * sizeof *larger);
        }
        list->env->release(list->env, list->runs);
        list->runs = larger;
        list->room = room;
    }
    list->runs[list->count++] =
        (gd_run){extent->group, extent->slot, extent->blocks};
    return GD_OK;
}

/* What was met with of a recipe's extents. */
typedef struct met {
    uint64_t end; /* of the last one, in the image, bytes */
    uint64_t zeros, blocks;
} met;

/* list: NULL if only the sums are wanted. */
static gd_status
add_page(run_list *list, const gd_judged *judged, const gd_recipe_page *page,
         met *sums, gd_error *err)
{
    for (uint32_t i = 0; i < page->count; i++) {
        const gd_extent *extent = &page->extents[i];
        if (extent->offset != sums->end ||
            extent->blocks > GD_MAX_SLOTS - extent->slot) {
            return gd_fail(err, GD_CORRUPT,
                           "%s: impossible extent %u of page %llu",
                           judged->name, i, (unsigned long long)page->number);
        }
        sums->end += extent->length;
        if (extent->kind == GD_EXTENT_ZEROS) {
            sums->zeros += extent->length;
            continue;
        }
        sums->blocks += extent->blocks;
        gd_status s = list == NULL ? GD_OK : add_run(list, extent, err);
        if (s != GD_OK) {
            return s;
        }
    }
    return GD_OK;
}

/* Pages are counted from 0 here, and from 1 in the file. */
static gd_status
add_pages(run_list *list, const gd_judged *judged, uint64_t first,
          uint64_t count, met *sums, gd_error *err)
{
    gd_recipe_page page;
    gd_status s = GD_OK;
    for (uint64_t i = 0; s == GD_OK && i < count; i++) {
        s = gd_recipe_read_page(&judged->recipe, first + i + 1, &page, err);
        if (s == GD_OK && i == 0 && first > 0 && page.count > 0) {
            sums->end = page.extents[0].offset; /* what is before is not read */
        }
        if (s == GD_OK) {
            s = add_page(list, judged, &page, sums, err);
        }
    }
    return s;
}

static gd_status
need_complete(const gd_judged *judged, gd_error *err)
{
    return judged->complete
               ? GD_OK
               : gd_fail(err, GD_INVALID, "%s has no valid header page",
                         judged->name);
}

gd_status
gd_judged_runs(const gd_judged *judged, uint64_t first, uint64_t pages,
               gd_run **runs, size_t *count, gd_error *err)
{
    run_list list = {.env = judged->env};
    met sums = {0};
    gd_status s = need_complete(judged, err);
    if (s != GD_OK) {
        return s;
    }
    uint64_t there = gd_recipe_pages(judged->recipe.header.extents);
    if (first > there || pages > there - first) {
        return gd_fail(err, GD_INVALID, "%s has %llu pages of extents, not %llu "
                       "from the %lluth on", judged->name,
                       (unsigned long long)there, (unsigned long long)pages,
                       (unsigned long long)first);
    }
    s = add_pages(&list, judged, first, pages, &sums, err);
    if (s != GD_OK) {
        judged->env->release(judged->env, list.runs);
        return s;
    }
    *runs = list.runs;
    *count = list.count;
    return GD_OK;
}

gd_status
gd_judged_measure(const gd_judged *judged, uint64_t *blocks, gd_error *err)
{
    const gd_recipe_header *header = &judged->recipe.header;
    met sums = {0};
    gd_status s = need_complete(judged, err);
    if (s == GD_OK) {
        s = add_pages(NULL, judged, 0, gd_recipe_pages(header->extents), &sums,
                      err);
    }
    if (s == GD_OK &&
        (sums.end != header->size || sums.zeros != header->zero_bytes)) {
        s = gd_fail(err, GD_CORRUPT, "%s: its extents do not make up the "
                    "image that its header describes", judged->name);
    }
    *blocks = sums.blocks;
    return s;
}

/* ---- settling ---- */

static gd_status
need_own_name(const gd_judged *judged, gd_error *err)
{
    bool here;
    gd_status s = leads_here(judged, judged->name, &here, err);
    if (s == GD_OK && !here) {
        s = gd_fail(err, GD_NOTFOUND, "%s is not the file any more that was "
                    "opened", judged->name);
    }
    return s;
}

gd_status
gd_judged_unlink(const gd_judged *judged, gd_error *err)
{
    gd_status s = need_own_name(judged, err);
    if (s != GD_OK) {
        return s;
    }
    int rc = judged->env->unlinkat(judged->env, judged->root, judged->name);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot unlink %s", judged->name)
                  : GD_OK;
}

/* A name in quarantine/ that says where the file was. */
static gd_status
quarantine_name(const gd_judged *judged, char name[GD_NAME_SIZE],
                gd_error *err)
{
    uint8_t digits[8];
    int rc = judged->env->random(judged->env, digits, sizeof digits);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "no random bytes");
    }
    int n = snprintf(name, GD_NAME_SIZE,
                     GD_DIR_QUARANTINE "/%.*s-%016llx", GD_IMAGE_ID_MAX,
                     strchr(judged->name, '/') + 1,
                     (unsigned long long)gd_get64(digits));
    return n < GD_NAME_SIZE
               ? GD_OK
               : gd_fail(err, GD_INVALID, "%s: its name is too long",
                         judged->name);
}

gd_status
gd_judged_set_aside(const gd_judged *judged, char name[GD_NAME_SIZE],
                    gd_error *err)
{
    const gd_env *env = judged->env;
    bool here;
    gd_status s = need_own_name(judged, err);
    if (s == GD_OK) {
        s = quarantine_name(judged, name, err);
    }
    if (s != GD_OK) {
        return s;
    }
    int rc = env->linkat(env, judged->root, judged->name, name);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot set %s aside as %s",
                             judged->name, name);
    }
    /* An image may have been replaced between the look and the link. */
    s = leads_here(judged, name, &here, err);
    if (s == GD_OK && !here) {
        (void)env->unlinkat(env, judged->root, name);
        s = gd_fail(err, GD_BUSY, "%s was replaced just now", judged->name);
    }
    return s == GD_OK ? gd_sync_dir(env, judged->root, GD_DIR_QUARANTINE, err)
                      : s;
}

gd_status
gd_judged_delete(const gd_judged *judged, gd_error *err)
{
    const char *image_id = strchr(judged->name, '/') + 1;
    int lock;
    if (judged->kind != 0) {
        return gd_fail(err, GD_INVALID, "%s is not an image's",
                       judged->name);
    }
    /* N9.1; N9.2 keeps the maintainer out, which is ourselves. */
    gd_status s = gd_image_lock(judged->env, judged->root, image_id,
                                judged->params->lock_timeout_ms, &lock, err);
    if (s != GD_OK) {
        return s;
    }
    /* Under the image lock a name stays what it is, as long as it is there. */
    s = need_own_name(judged, err);
    if (s == GD_OK) {
        s = gd_spool_move_image(judged->env, judged->root, image_id, err);
    }
    gd_image_unlock(judged->env, lock);
    return s;
}
