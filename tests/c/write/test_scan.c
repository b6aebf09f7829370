/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_scan.c - a scan of bytes gives the same result as storing them.
 */
#include "engine/write/scan.h"

#include "engine/base/zero.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"
#include "tests/c/support/transaction_fixture.h"

enum { LENGTH = 300000 };

static uint8_t data[LENGTH];

static void
setup(unsigned threads, uint32_t minimum_cut, uint32_t average)
{
    scratch_init(&the_scratch);
    the_scratch.params.threads = threads;
    the_scratch.params.cut_minimum = minimum_cut;
    the_scratch.params.cut_average = average;
    the_repo = scratch_repo_filter(&the_scratch);
    fill_random(data, sizeof data, 3);
    memset(data + 100000, 0, 40960);
}

/* Blocks that a scan finds are those that were stored: looked up, they are all
 * there, and together they are all bytes. */
static void
require_stored(const gd_scope *scope)
{
    uint8_t *scanned;
    size_t count;
    gd_transaction *transaction;
    CHECK_INT(gd_scan(the_repo, scope, data, LENGTH, &scanned, &count,
                      &the_scratch.err), GD_OK);
    CHECK_INT(gd_transaction_begin(the_repo, "found", "", scope, &transaction,
                                   &the_scratch.err), GD_OK);
    uint64_t at = 0;
    size_t zeros = 0;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *one = scanned + i * GD_SCANNED_SIZE;
        gd_fingerprint fp;
        gd_address address = {0, 0};
        uint32_t length = gd_get32(one + GD_FINGERPRINT_SIZE);
        memcpy(fp.bytes, one, GD_FINGERPRINT_SIZE);
        bool is_zeros = gd_is_zero(one, GD_FINGERPRINT_SIZE);
        CHECK_INT(is_zeros, gd_is_zero(data + at, length));
        zeros += is_zeros;
        if (!is_zeros) {
            CHECK_INT(gd_transaction_find(transaction, &fp, &length, 1,
                                          &address, &the_scratch.err), GD_OK);
            CHECK(address.group != 0);
        }
        at += length;
    }
    CHECK_INT(at, LENGTH);
    CHECK(zeros > 0);
    gd_transaction_end(transaction);
    the_repo->env->release(the_repo->env, scanned);
}

TEST(test_scan)
{
    static const uint32_t cuts[][2] = {{0, 0}, {1024, 2048}};
    for (unsigned i = 0; i < 2; i++) {
        for (unsigned threads = 0; threads <= 2; threads += 2) {
            setup(threads, cuts[i][0], cuts[i][1]);
            store_in_one("a", data, LENGTH, LENGTH, NULL);
            require_stored(&gd_global_scope);
            transaction_teardown();
        }
    }
}

TEST(test_refusals)
{
    uint8_t *scanned;
    size_t count;
    setup(0, 0, 0);
    CHECK_INT(gd_scan(the_repo, &gd_global_scope, data, 0, &scanned, &count,
                      &the_scratch.err), GD_OK);
    CHECK_INT(count, 0);
    the_repo->env->release(the_repo->env, scanned);
    for (uint64_t n = 1; n <= 2; n++) {
        fault_env_fail(&the_scratch.f, FAULT_ALLOC, n, ENOMEM, false);
        CHECK_INT(gd_scan(the_repo, &gd_global_scope, data, LENGTH, &scanned,
                          &count, &the_scratch.err), GD_NOMEM);
        CHECK(scanned == NULL);
    }
    fault_env_heal(&the_scratch.f);
    transaction_teardown();
    scratch_init(&the_scratch);
    the_scratch.params.by_value = true;
    the_repo = scratch_repo_filter(&the_scratch);
    CHECK_INT(gd_scan(the_repo, &gd_global_scope, data, LENGTH, &scanned,
                      &count, &the_scratch.err), GD_INVALID);
    transaction_teardown();
}
