/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_spool.c - a spool and an images/ directory of any names and contents:
 * the maintainer's checks, locks and steps classify them, unlink only names
 * that must go, and never an image.
 *
 * Input: flags (1: checksums are corrected; 2: transaction ids are not), then
 * files: the directory (1), the kind (1), its name (up to 40 bytes; in the
 * spool mostly a proper one), and the first 400 bytes of a recipe, or none.
 * Names are also parsed separately.
 */
#include "engine/base/coding.h"
#include "engine/files/image_delete.h"
#include "engine/files/locks.h"
#include "engine/files/spool.h"
#include "engine/files/spoolfile.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/remake.h"
#include "tests/fuzz/repository.h"

enum { FILES = 8, HEADER = 400, PAGE = GD_RECIPE_PAGE };

/* ---- names ---- */

static void
check_names(const char *name)
{
    char again[GD_NAME_SIZE];
    uint32_t group;
    gd_spool_kind kind;
    uint8_t id[GD_ID_SIZE];
    gd_error err;
    if (gd_names_parse_group(name, &group)) {
        MUST(group >= 1 && group <= GD_MAX_GROUP);
        gd_names_group(group, again);
        MUST(strcmp(strchr(again, '/') + 1, name) == 0);
    }
    if (gd_names_parse_spool(name, &kind, id)) {
        gd_names_spool(kind, id, again);
        MUST(strcmp(strchr(again, '/') + 1, name) == 0);
    }
    if (gd_names_image(name, again, &err) == GD_OK) {
        size_t length = strlen(name);
        MUST(length >= 1 && length <= GD_IMAGE_ID_MAX);
        MUST(strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY"
                          "Z0123456789_-") == length);
        MUST(strcmp(again + strlen(GD_DIR_IMAGES "/"), name) == 0);
    } else {
        MUST(err.status == GD_INVALID && err.text[0] != '\0');
    }
}

/* ---- files ---- */

static void
make_file(repository *r, input *in, uint8_t flags)
{
    static uint8_t content[3 * PAGE];
    char name[41], path[MEMORY_PATH];
    gd_spool_kind kind;
    uint8_t where = take8(in), what = take8(in);
    size_t length = take_bytes(in, name, where / 4 % 41);
    name[length] = '\0';
    check_names(name);
    if (where % 4 < 2) {
        snprintf(path, sizeof path, REPOSITORY_PATH "/spool/%c-%016x%016x",
                 "TDGMOXT?"[what % 8], what / 8, where / 4);
    } else if (length > 0 && strchr(name, '/') == NULL) {
        snprintf(path, sizeof path, REPOSITORY_PATH "/%s/%s",
                 where % 4 == 2 ? "images" : "spool", name);
    } else {
        return;
    }
    if ((what & 32) != 0) {
        memory_symlink(&r->m, path);
        return;
    }
    memset(content, 0, sizeof content);
    size_t had = take_bytes(in, content, HEADER);
    uint64_t pages = (gd_get64(content + 112) + GD_EXTENTS_PER_PAGE - 1) /
                     GD_EXTENTS_PER_PAGE;
    size_t file = had == 0 ? what % 5 * 1024U
                           : (1 + (size_t)(pages < 3 ? pages : 2)) * PAGE;
    if ((flags & 1) != 0 && had > 0) {
        memcpy(content, "GDRECIPE", 8);
        gd_put16(content + 8, 1);
        memcpy(content + 16, r->params.repository_id, GD_ID_SIZE);
        if ((flags & 2) == 0) {
            (void)gd_names_parse_spool(strrchr(path, '/') + 1, &kind,
                                       content + 48);
        }
        remake_recipe(content, file);
    }
    memory_put(&r->m, path, content, file);
}

/* Makes an image as a transaction does, whose recipe is whole and
 * committed. */
static void
make_image(repository *r)
{
    static const uint8_t data[700] = {1, 2, 3};
    MUST(repository_put(r, "good", &gd_global_scope, data, sizeof data, 512,
                        NULL) == GD_OK);
}

/* ---- judging ---- */

static void
look_at_runs(repository *r, const gd_spool_file *entry)
{
    gd_run *runs;
    size_t count;
    if (!entry->complete) {
        return;
    }
    gd_status s = gd_spool_file_runs(
        entry, 0, gd_recipe_pages(entry->recipe.header.extents), &runs,
        &count, &r->err);
    MUST(s == GD_OK || s == GD_CORRUPT);
    if (s == GD_OK) {
        r->env->release(r->env, runs);
    }
}

/* Does the accounting's work with a spool file. */
static void
settle(repository *r, gd_spool_file *entry, uint8_t how)
{
    char name[GD_NAME_SIZE];
    bool live;
    gd_status s = gd_spool_file_live(entry, &live, &r->err);
    MUST(s == GD_OK);
    MUST(!live || entry->complete);
    if (entry->complete) {
        const gd_recipe_header *header = &entry->recipe.header;
        bool own = entry->kind == GD_SPOOL_STORE ||
                   entry->kind == GD_SPOOL_MERGED;
        MUST(entry->damage.status == GD_OK);
        MUST(gd_names_image(header->image_id, name, NULL) == GD_OK);
        MUST(!own || memcmp(header->transaction_id, entry->id,
                            GD_ID_SIZE) == 0);
    }
    s = gd_spool_file_lock(entry, GD_BYTE_WRITER, &r->err);
    MUST(s == GD_OK || s == GD_BUSY);
    look_at_runs(r, entry);
    if (how % 3 == 0) {
        s = gd_spool_file_set_aside(entry, name, &r->err);
        MUST(s == GD_OK || s == GD_NOTFOUND);
    }
    if (how % 2 == 0) {
        s = gd_spool_file_unlink(entry, &r->err);
        MUST(s == GD_OK || s == GD_NOTFOUND);
    }
}

static void
settle_all(repository *r, uint8_t how)
{
    gd_spool_base *entries;
    gd_spool_file entry;
    size_t count;
    int root = r->repo->root;
    MUST(gd_spool_file_list(r->env, root, &entries, &count, &r->err) == GD_OK);
    for (size_t i = 0; i < count; i++) {
        MUST(i == 0 || strcmp(entries[i - 1].name, entries[i].name) < 0);
        gd_status s = gd_spool_file_open(r->env, root, &r->params,
                                         entries[i].name, &entry, &r->err);
        MUST(s == GD_OK || (s != GD_BUSY && r->err.text[0] != '\0'));
        if (s == GD_OK) {
            settle(r, &entry, (uint8_t)(how + i));
            gd_spool_file_close(&entry);
        }
    }
    r->env->release(r->env, entries);
    MUST(gd_spool_file_open(r->env, root, &r->params, "../images/good",
                            &entry, &r->err) == GD_INVALID);
}

static void
note_name(void *arg, const char *name)
{
    char (*names)[MEMORY_PATH] = arg;
    for (size_t i = 0; i < FILES; i++) {
        if (names[i][0] == '\0') {
            snprintf(names[i], MEMORY_PATH, "%s", name);
            return;
        }
    }
}

static void
judge_images(repository *r)
{
    char names[FILES][MEMORY_PATH] = {{0}};
    gd_spool_file entry;
    MUST(r->env->list(r->env, r->repo->root, GD_DIR_IMAGES, note_name,
                      names) == 0);
    for (size_t i = 0; i < FILES && names[i][0] != '\0'; i++) {
        gd_status s = gd_spool_file_open_image(r->env, r->repo->root,
                                               &r->params, names[i], &entry,
                                               &r->err);
        MUST(s == GD_OK || r->err.text[0] != '\0');
        if (s == GD_OK) {
            look_at_runs(r, &entry);
            gd_spool_file_close(&entry);
        }
        s = gd_image_delete(r->env, r->repo->root, &r->params, names[i],
                            i % 2 == 0 ? r->params.repository_id : NULL,
                            &r->err);
        MUST(s != GD_OK || strcmp(names[i], "good") != 0 || i % 2 == 1);
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t wanted[700] = {1, 2, 3};
    repository r;
    input in = {data, size};
    uint8_t flags = take8(&in);
    repository_init(&r);
    MUST(repository_open(&r, false) == GD_OK);
    make_image(&r);
    for (int i = 0; i < FILES - 1 && in.left > 0; i++) {
        make_file(&r, &in, flags);
    }
    settle_all(&r, flags);
    if (memory_count(&r.m, REPOSITORY_PATH "/images", "good", NULL) == 1) {
        read_result result =
            repository_read(&r, "good", wanted, sizeof wanted);
        MUST(result == READ_EQUAL || result == READ_FAILED);
    }
    judge_images(&r);
    repository_destroy(&r);
    return 0;
}
