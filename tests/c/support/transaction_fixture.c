/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transaction_fixture.c - see transaction_fixture.h.
 */
#include "tests/c/support/transaction_fixture.h"

#include "engine/read/image.h"
#include "tests/c/support/check.h"

scratch the_scratch;
gd_repo *the_repo;

void
transaction_setup(void)
{
    scratch_init(&the_scratch);
    the_repo = scratch_repo_filter(&the_scratch);
}

void
transaction_teardown(void)
{
    gd_repo_close(the_repo);
    CHECK_INT(scratch_destroy(&the_scratch), 0);
}

void
transaction_other_handle(void)
{
    gd_repo_close(the_repo);
    the_repo = scratch_repo_filter(&the_scratch);
}

gd_transaction *
begin_image(const char *image_id)
{
    gd_transaction *transaction = NULL;
    if (!CHECK_INT(gd_transaction_begin(the_repo, image_id, "project",
                                        &gd_global_scope, &transaction,
                                        &the_scratch.err), GD_OK)) {
        fprintf(stderr, "%s\n", the_scratch.err.text);
        exit(1);
    }
    return transaction;
}

void
write_all(gd_transaction *transaction, const uint8_t *data, size_t length)
{
    CHECK_INT(gd_transaction_write(transaction, data, length,
                                   &the_scratch.err), GD_OK);
}

void
store_in_one(const char *image_id, const uint8_t *data, size_t length,
             size_t piece, gd_recipe_header *header)
{
    if (!CHECK_INT(put_image(the_repo, image_id, data, length, piece, header,
                             &the_scratch.err),
                   GD_OK)) {
        fprintf(stderr, "%s: %s\n", image_id, the_scratch.err.text);
    }
}

void
check_stored_image(const char *image_id, const uint8_t *data, size_t length)
{
    bool equal;
    gd_status s = get_image(the_repo, image_id, data, length, &equal,
                            &the_scratch.err);
    if (!CHECK_INT(s, GD_OK) || !CHECK(equal)) {
        fprintf(stderr, "%s: %s\n", image_id, s == GD_OK ? ""
                : the_scratch.err.text);
    }
}

size_t
minimum(size_t a, size_t b)
{
    return a < b ? a : b;
}

size_t
list_marks(const char *id, bool *marks)
{
    gd_image *image = require_image(the_repo, id);
    gd_recipe_page page;
    gd_entry entries[GD_EXTENT_BLOCKS];
    size_t n = 0;
    for (uint64_t p = 1; p <= gd_image_pages(image); p++) {
        CHECK_INT(gd_image_extents(image, p, &page, &the_scratch.err), GD_OK);
        for (uint32_t i = 0; i < page.count; i++) {
            const gd_extent *e = &page.extents[i];
            gd_group *group;
            if (e->kind == GD_EXTENT_ZEROS ||
                !CHECK_INT(gd_fpcache_group(the_repo->cache, e->group, true,
                                            &group, &the_scratch.err),
                           GD_OK)) {
                continue;
            }
            CHECK_INT(gd_group_read_entries(group, e->slot, e->blocks,
                                            entries, &the_scratch.err), GD_OK);
            gd_fpcache_return_group(the_repo->cache, group);
            for (uint32_t k = 0; k < e->blocks; k++) {
                marks[n++] = entries[k].nodedup;
            }
        }
    }
    gd_image_close(image);
    return n;
}
