/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_indexjoin.c - many look-ups in one pass find the same as single ones,
 * however dense the requests are, and whatever happens to the files.
 */
#include "engine/files/indexjoin.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/files/duplicate_search.h"
#include "engine/format/address.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { R = GD_INDEX_RECORD, RECORDS = 60000, REQUESTS = 20000 };

static const uint8_t CATALOG[GD_ID_SIZE] = "a catalog's id";
static scratch x;
static gd_shards *shards;
static gd_item known[RECORDS], requests[REQUESTS], room[RECORDS];
static uint64_t addresses[REQUESTS];

/* Evenly spread keys, of which every second one is in the index. */
static uint64_t
key_of(uint64_t i)
{
    return i * (UINT64_MAX / (2 * RECORDS));
}

static void
add_run(size_t first, size_t step)
{
    static uint8_t records[RECORDS * R];
    size_t count = 0;
    for (size_t i = first; i < RECORDS; i += step) {
        known[i] = (gd_item){key_of(2 * i + 1),
                             UINT64_C(1) << GD_SLOT_BITS | (i & 0x7fff)};
        gd_index_put_record(records + count++ * R, known[i].key,
                            known[i].address);
    }
    CHECK_INT(gd_shards_lock(shards, &x.err), GD_OK);
    CHECK_INT(gd_shards_add(shards, GD_INDEX_RUN, records, count, &x.err),
              GD_OK);
    gd_shards_unlock(shards);
}

static void
merge(uint32_t bits, uint32_t shard, uint64_t split)
{
    gd_duplicate_search *under_way;
    gd_search_result result;
    bool more = true;
    uint64_t bytes;
    CHECK_INT(gd_duplicate_search_begin(shards, bits, shard,
                                        (gd_split_limits){UINT64_MAX, split},
                                        &under_way, &x.err), GD_OK);
    while (under_way != NULL && more) {
        REQUIRE(gd_duplicate_search_step(under_way, 1000, &more, &bytes,
                                         &x.err) == GD_OK);
    }
    if (under_way != NULL) {
        CHECK_INT(gd_duplicate_search_finish(under_way, &result, &x.err),
                  GD_OK);
        gd_duplicate_search_end(under_way);
    }
}

/* There are two shards, and a third of the records is still in runs. */
static void
begin(void)
{
    char name[GD_NAME_SIZE];
    scratch_init(&x);
    gd_names_group(1, name);
    scratch_write(&x, name, "", 0, 0);
    CHECK_INT(gd_shards_open(x.env, x.root, 0, CATALOG, &shards, &x.err),
              GD_OK);
    CHECK_INT(gd_shards_lock(shards, &x.err), GD_OK);
    CHECK_INT(gd_shards_fill(shards, &x.err), GD_OK);
    gd_shards_unlock(shards);
    add_run(0, 3);
    merge(0, 0, 1); /* the next merge splits it */
    add_run(1, 3);
    merge(0, 0, UINT64_MAX);
    add_run(2, 3);
}

static void
end(void)
{
    gd_shards_close(shards);
    CHECK_INT(scratch_destroy(&x), 0);
}

static void
ask(size_t count, gd_status status, uint32_t files)
{
    uint32_t unread = 99;
    const gd_item *sorted = gd_index_sort_items(requests, room, count);
    CHECK_INT(gd_indexjoin_shards(shards, sorted, count, addresses, &unread,
                                  &x.err), status);
    CHECK_INT(unread, files);
    for (size_t i = 0; files == 0 && i < count; i++) {
        uint64_t number = sorted[i].key / key_of(1);
        uint64_t expected = number % 2 == 1 ? known[number / 2].address : 0;
        if (!CHECK_INT(addresses[i], expected)) {
            return;
        }
    }
}

static void
request(size_t i, uint64_t number)
{
    requests[i] = (gd_item){key_of(number), i};
}

TEST(test_requests)
{
    static const size_t counts[] = {0, 1, 2, 50, 3000, REQUESTS};
    uint64_t seed = 5;
    begin();
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        for (size_t i = 0; i < counts[c]; i++) {
            request(i, next_random(&seed) % (2 * RECORDS));
        }
        ask(counts[c], GD_OK, 0);
    }
    /* The requests are for the first, the last, one of them often, and a dense
     * part. */
    request(0, 0);
    request(1, 1);
    request(2, 2 * RECORDS - 1);
    request(3, 2 * RECORDS - 1);
    ask(4, GD_OK, 0);
    for (size_t i = 0; i < 5000; i++) {
        request(i, 30000 + i);
    }
    ask(5000, GD_OK, 0);
    end();
}

/* Frames between few requests are not read. */
TEST(test_few_requests_read_little)
{
    begin();
    uint64_t before = fault_env_count(&x.f, FAULT_PREAD);
    request(0, 1001);
    ask(1, GD_OK, 0);
    uint64_t few = fault_env_count(&x.f, FAULT_PREAD) - before;
    for (size_t i = 0; i < REQUESTS; i++) {
        request(i, i * 6 % (2 * RECORDS));
    }
    ask(REQUESTS, GD_OK, 0);
    uint64_t many = fault_env_count(&x.f, FAULT_PREAD) - before - few;
    CHECK(few < many);
    end();
}

/* A damaged file only loses hints. */
TEST(test_damaged_file)
{
    char name[GD_NAME_SIZE];
    begin();
    REQUIRE(scratch_count(&x, GD_DIR_INDEX, "run-", name) > 0);
    int fd = openat(x.root, name, O_RDWR);
    REQUIRE(fd >= 0);
    CHECK_INT(pwrite(fd, "damage", 6, 700), 6);
    CHECK_INT(close(fd), 0);
    for (size_t i = 0; i < REQUESTS; i++) {
        request(i, i * 6 % (2 * RECORDS));
    }
    uint32_t unread = 0;
    CHECK_INT(gd_indexjoin_shards(shards,
                                  gd_index_sort_items(requests, room,
                                                      REQUESTS),
                                  REQUESTS, addresses, &unread, &x.err),
              GD_OK);
    CHECK_INT(unread, 1);
    end();
}

/* Whatever fails, the answers have no wrong addresses. */
TEST(test_faults)
{
    bool failed = true;
    for (uint64_t n = 1; failed; n += SWEEP_STRIDE) {
        begin();
        for (size_t i = 0; i < 40; i++) {
            request(i, 1 + i * 2801);
        }
        const gd_item *sorted = gd_index_sort_items(requests, room, 40);
        uint32_t unread = 0;
        uint64_t before = fault_env_faults(&x.f);
        fault_env_fail(&x.f, FAULT_ANY, n, EIO, false);
        gd_status s = gd_indexjoin_shards(shards, sorted, 40, addresses,
                                          &unread,
                                          &x.err);
        failed = fault_env_faults(&x.f) > before;
        fault_env_heal(&x.f);
        CHECK(s == GD_OK || failed);
        for (size_t i = 0; s == GD_OK && i < 40; i++) {
            uint64_t number = sorted[i].key / key_of(1);
            CHECK(addresses[i] == 0 ||
                  (number % 2 == 1 &&
                   addresses[i] == known[number / 2].address));
        }
        end();
    }
}
