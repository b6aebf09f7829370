/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_similar.c - of any blocks, and of any features, the order by similarity
 * is a permutation in which clusters are in the order of their first blocks.
 *
 * Input: the kind (0: blocks, each with its length; 1: features, each of one
 * byte; 2: those of so many blocks, made of repeated bytes), and the bytes.
 */
#include "engine/format/similar.h"
#include "tests/fuzz/fuzz.h"

enum { MAX_COUNT = 2000 };

static void
check_order(const gd_similar_features *features, uint32_t count)
{
    uint32_t *order = malloc((count + 1) * sizeof *order);
    bool *listed = calloc(count + 1, sizeof *listed);
    uint32_t smallest = 0; /* of the unlisted ones */
    gd_error err;
    MUST(order != NULL && listed != NULL);
    MUST(gd_similar_order(gd_env_posix(), features, count, order, &err) ==
         GD_OK);
    for (uint32_t i = 0; i < count; i++) {
        MUST(order[i] < count && !listed[order[i]]);
        MUST(order[i] == smallest || (i > 0 && order[i] > order[i - 1]));
        listed[order[i]] = true;
        while (listed[smallest]) {
            smallest++;
        }
    }
    free(order);
    free(listed);
}

static uint32_t
take_blocks(input *in, gd_similar_features *features)
{
    uint32_t count = 0;
    while (in->left > 0 && count < MAX_COUNT) {
        size_t length = 16 * (size_t)take8(in);
        length = length < in->left ? length : in->left;
        gd_similar_features again;
        gd_similar_features_of(in->at, length, &features[count]);
        gd_similar_features_of(in->at, length, &again);
        MUST(memcmp(&again, &features[count], sizeof again) == 0);
        in->at += length;
        in->left -= length;
        count++;
    }
    return count;
}

static uint32_t
take_features(input *in, gd_similar_features *features)
{
    uint32_t count = 0;
    for (; in->left > 0 && count < MAX_COUNT; count++) {
        for (int f = 0; f < GD_SIMILAR_FEATURES; f++) {
            features[count].feature[f] = take8(in);
        }
    }
    return count;
}

/* Their low bits are alike, so that they collide in the tables. */
static uint32_t
repeat_features(input *in, gd_similar_features *features)
{
    uint32_t count = take16(in) % MAX_COUNT, at = 0;
    for (uint32_t i = 0; i < count && in->left > 0; i++) {
        for (int f = 0; f < GD_SIMILAR_FEATURES; f++, at++) {
            features[i].feature[f] =
                in->at[at % in->left] * (1 + at / 97) * UINT32_C(244002641);
        }
    }
    return count;
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static gd_similar_features features[MAX_COUNT];
    input in = {data, size};
    memset(features, 0, sizeof features);
    uint32_t (*const ways[])(input *, gd_similar_features *) = {
        take_blocks, take_features, repeat_features};
    uint8_t way = take8(&in) % 3;
    check_order(features, ways[way](&in, features));
    return 0;
}
