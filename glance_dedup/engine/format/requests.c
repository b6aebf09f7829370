/* SPDX-License-Identifier: Apache-2.0 */
/*
 * requests.c - see requests.h.
 */
#include "engine/format/requests.h"

#include <string.h>

#include "engine/base/zero.h"
#include "engine/format/fingerprint.h"

size_t
gd_requests_make(const uint8_t *scanned, size_t count, uint64_t requester,
                 uint8_t *out)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *fp = scanned + i * GD_SCANNED_SIZE;
        if (!gd_is_zero(fp, GD_FINGERPRINT_SIZE)) {
            gd_index_put_record(out + used++ * GD_INDEX_RECORD,
                                gd_index_key(fp), requester + i);
        }
    }
    return used;
}

bool
gd_requests_split(const uint8_t *records, size_t count, uint64_t parts,
                  uint64_t first, size_t ways, size_t *counts, uint8_t *out)
{
    memset(counts, 0, ways * sizeof *counts);
    for (size_t i = 0; i < count; i++) {
        uint64_t part =
            gd_requests_part_of_key(gd_index_key(
                records + i * GD_INDEX_RECORD), parts);
        if (part < first || part - first >= ways) {
            return false;
        }
        counts[part - first]++;
    }
    size_t before = 0;
    for (size_t way = 0; way < ways; way++) {
        before += counts[way];
        counts[way] = before;
    }
    /* From the last on, each goes in front of those of its part. */
    for (size_t i = count; i-- > 0;) {
        const uint8_t *record = records + i * GD_INDEX_RECORD;
        uint64_t part =
            gd_requests_part_of_key(gd_index_key(record), parts) - first;
        memcpy(out + --counts[part] * GD_INDEX_RECORD, record,
               GD_INDEX_RECORD);
    }
    for (size_t way = 0; way + 1 < ways; way++) {
        counts[way] = counts[way + 1] - counts[way];
    }
    counts[ways - 1] = count - counts[ways - 1];
    return true;
}

static void
put_answer(uint8_t *answers, size_t at, uint64_t requester, uint64_t address)
{
    gd_index_put_record(answers + at * GD_INDEX_RECORD,
                        requester << GD_REQUESTER_SHIFT, address);
}

size_t
gd_requests_answer(const gd_item *requests, const uint64_t *addresses,
                   size_t count, uint8_t *answers, uint8_t *waiting)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t address = addresses[i];
        if (address == 0 && i > 0 && requests[i].key == requests[i - 1].key) {
            address = GD_ANSWER_WAIT;
            gd_index_put_record(waiting + used++ * GD_INDEX_RECORD,
                                requests[i].key, requests[i].address);
        }
        put_answer(answers, i, requests[i].address, address);
    }
    return used;
}

size_t
gd_requests_resolve(const gd_item *requests, size_t count,
                    const gd_item *references, size_t reference_count,
                    uint8_t *answers, uint8_t *left)
{
    size_t at = 0, used = 0;
    for (size_t i = 0; i < count; i++) {
        while (at < reference_count && references[at].key < requests[i].key) {
            at++;
        }
        if (at < reference_count && references[at].key == requests[i].key) {
            put_answer(answers, used++, requests[i].address,
                       references[at].address);
        } else {
            gd_index_put_record(left + (i - used) * GD_INDEX_RECORD,
                                requests[i].key, requests[i].address);
        }
    }
    return used;
}

bool
gd_requests_fill_answers(const uint8_t *answers, size_t count, uint64_t first,
                         uint8_t *places, size_t place_count)
{
    const uint64_t numbers = (UINT64_C(1) << GD_NUMBER_BITS) - 1;
    for (size_t i = 0; i < count; i++) {
        const uint8_t *answer = answers + i * GD_INDEX_RECORD;
        uint64_t number =
            gd_index_key(answer) >> GD_REQUESTER_SHIFT & numbers;
        if (number < first || number - first >= place_count) {
            return false;
        }
        gd_put64(places + (number - first) * 8, gd_index_address(answer));
    }
    return true;
}
