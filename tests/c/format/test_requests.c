/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_requests.c - records of batch backups against the simplest possible
 * implementation.
 */
#include "engine/format/requests.h"

#include <stdlib.h>
#include <string.h>

#include "engine/format/fingerprint.h"
#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { R = GD_INDEX_RECORD, MAX_COUNT = 500 };

static uint8_t records[MAX_COUNT * R], out[MAX_COUNT * R], more[MAX_COUNT * R];
static gd_item items[MAX_COUNT], sorted_room[MAX_COUNT], others[MAX_COUNT];

TEST(test_make)
{
    uint8_t scanned[3 * GD_SCANNED_SIZE] = {0};
    memset(scanned, 0xa1, GD_FINGERPRINT_SIZE);
    /* The second block is zeros, which is not requested. */
    memset(scanned + 2 * GD_SCANNED_SIZE, 0xb2, GD_FINGERPRINT_SIZE);
    CHECK_INT(gd_requests_make(scanned, 3, (UINT64_C(7) << 28) + 5, out), 2);
    CHECK_INT(gd_index_key(out), UINT64_C(0xa1a1a1a1a1a1a1a1));
    CHECK_INT(gd_index_address(out), (UINT64_C(7) << 28) + 5);
    CHECK_INT(gd_index_key(out + R), UINT64_C(0xb2b2b2b2b2b2b2b2));
    CHECK_INT(gd_index_address(out + R), (UINT64_C(7) << 28) + 7);
    CHECK_INT(gd_requests_make(scanned, 0, 0, out), 0);
}

TEST(test_split)
{
    uint64_t seed = 1;
    size_t counts[10];
    for (uint64_t parts = 1; parts <= 10; parts++) {
        for (size_t i = 0; i < MAX_COUNT; i++) {
            gd_index_put_record(records + i * R, next_random(&seed), i);
        }
        CHECK(gd_requests_split(records, MAX_COUNT, parts, 0, parts, counts,
                                out));
        size_t at = 0;
        for (uint64_t part = 0; part < parts; part++) {
            uint64_t last = 0;
            for (size_t i = 0; i < counts[part]; i++, at++) {
                const uint8_t *record = out + at * R;
                CHECK_INT(gd_requests_part_of_key(gd_index_key(record), parts),
                          part);
                /* The sort is stable: equal records stay in their order. */
                CHECK(i == 0 || gd_index_address(record) > last);
                last = gd_index_address(record);
            }
        }
        CHECK_INT(at, MAX_COUNT);
    }
    CHECK(!gd_requests_split(records, MAX_COUNT, 10, 1, 9, counts, out));
    CHECK(!gd_requests_split(records, MAX_COUNT, 10, 0, 9, counts, out));
}

/* There are few keys, so that many are requested several times. */
static const gd_item *
some_requests(size_t count, uint64_t seed)
{
    for (size_t i = 0; i < count; i++) {
        items[i] = (gd_item){next_random(&seed) % 60, 1000 + i};
    }
    return gd_index_sort_items(items, sorted_room, count);
}

TEST(test_answer)
{
    static uint64_t addresses[MAX_COUNT];
    const gd_item *requests = some_requests(MAX_COUNT, 3);
    for (size_t i = 0; i < MAX_COUNT; i++) {
        addresses[i] = requests[i].key % 3 == 0 ? 900 + requests[i].key : 0;
    }
    size_t waiting =
        gd_requests_answer(requests, addresses, MAX_COUNT, out, more),
        seen = 0;
    for (size_t i = 0; i < MAX_COUNT; i++) {
        const uint8_t *answer = out + i * R;
        bool again = i > 0 && requests[i].key == requests[i - 1].key;
        CHECK_INT(gd_index_key(answer),
                  requests[i].address << GD_REQUESTER_SHIFT);
        CHECK_INT(gd_index_address(answer),
                  addresses[i] != 0 ? addresses[i]
                  : again           ? GD_ANSWER_WAIT
                                    : 0);
        if (gd_index_address(answer) == GD_ANSWER_WAIT) {
            CHECK_INT(gd_index_key(more + seen * R), requests[i].key);
            CHECK_INT(gd_index_address(more + seen * R), requests[i].address);
            seen++;
        }
    }
    CHECK_INT(seen, waiting);
    CHECK(waiting > 0);
}

TEST(test_resolve)
{
    const gd_item *requests = some_requests(MAX_COUNT, 4);
    size_t count = 0, at = 0;
    for (uint64_t key = 0; key < 60; key += 2) {
        others[count++] = (gd_item){key, 5000 + key};
    }
    size_t answered =
        gd_requests_resolve(requests, MAX_COUNT, others, count, out, more);
    for (size_t i = 0; i < MAX_COUNT; i++) {
        if (requests[i].key % 2 == 0) {
            CHECK_INT(gd_index_key(out + at * R),
                      requests[i].address << GD_REQUESTER_SHIFT);
            CHECK_INT(gd_index_address(out + at++ * R),
                      5000 + requests[i].key);
        } else {
            CHECK_INT(gd_index_key(more + (i - at) * R), requests[i].key);
            CHECK_INT(gd_index_address(more + (i - at) * R),
                      requests[i].address);
        }
    }
    CHECK_INT(at, answered);
    CHECK_INT(
        gd_requests_resolve(requests, MAX_COUNT, others, 0, out, more), 0);
    CHECK_INT(gd_index_address(more + (MAX_COUNT - 1) * R),
              requests[MAX_COUNT - 1].address);
}

TEST(test_fill)
{
    uint8_t places[8 * 8] = {0};
    const uint64_t rank = UINT64_C(9) << GD_NUMBER_BITS;
    gd_index_put_record(records, (rank | 100) << GD_REQUESTER_SHIFT, 77);
    gd_index_put_record(records + R, (rank | 107) << GD_REQUESTER_SHIFT,
                        GD_ANSWER_WAIT);
    CHECK(gd_requests_fill_answers(records, 2, 100, places, 8));
    CHECK_INT(gd_get64(places), 77);
    CHECK_INT(gd_get64(places + 7 * 8), GD_ANSWER_WAIT);
    CHECK(!gd_requests_fill_answers(records, 2, 100, places, 7));
    CHECK(!gd_requests_fill_answers(records, 2, 101, places, 8));
}
