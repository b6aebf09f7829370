/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transaction_fixture.c - see transaction_fixture.h.
 */
#include "tests/c/support/transaction_fixture.h"

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
