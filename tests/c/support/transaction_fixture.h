/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transaction_fixture.h - one repository, and images that are stored in it.
 */
#ifndef TRANSACTION_FIXTURE_H
#define TRANSACTION_FIXTURE_H

#include "engine/write/transaction.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

extern scratch the_scratch;
extern gd_repo *the_repo;

#define FAULTS (&the_scratch.f)

#define CHECK_OK(call)                                                        \
    do {                                                                      \
        if (!CHECK_INT((call), GD_OK)) {                                      \
            fprintf(stderr, "%s\n", the_scratch.err.text);                    \
        }                                                                     \
    } while (0)

void transaction_setup(void);

void transaction_teardown(void);

void transaction_other_handle(void);

gd_transaction *begin_image(const char *image_id);

void write_all(gd_transaction *transaction, const uint8_t *data,
               size_t length);

void store_in_one(const char *image_id, const uint8_t *data, size_t length,
                  size_t piece, gd_recipe_header *header);

void check_stored_image(const char *image_id, const uint8_t *data,
                        size_t length);

/* Fills in whether each block of an image has the mark nodedup, and returns
 * the number of blocks. */
size_t list_marks(const char *image_id, bool *marks);

size_t minimum(size_t a, size_t b);

#endif
