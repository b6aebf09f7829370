/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_overlay.c - the overlay against a byte-wise model.
 */
#include "engine/volume/overlay.h"

#include "tests/c/support/check.h"
#include "tests/c/support/scratch_repository.h"

enum { SIZE = 2000, ROUNDS = 4000 };

/* The put that wrote a byte, and the byte's index in it. */
typedef struct cell {
    uint32_t put; /* 0: none */
    uint32_t from;
} cell;

static cell model[SIZE];
static struct gd_journal *const some = (struct gd_journal *)&model;

static void
compare(const gd_overlay *overlay)
{
    uint64_t at = 0, count = 0;
    const gd_piece *piece = gd_overlay_find(overlay, 0);
    for (; piece != NULL; piece = gd_overlay_next(piece)) {
        count++;
        REQUIRE(piece->length > 0);
        REQUIRE(piece->offset >= at);
        for (; at < piece->offset; at++) {
            REQUIRE(model[at].put == 0);
        }
        for (; at < gd_piece_end(piece); at++) {
            REQUIRE(model[at].put == piece->record);
            if (piece->journal != NULL) {
                REQUIRE(model[at].from ==
                        piece->from + (at - piece->offset));
            }
        }
    }
    for (; at < SIZE; at++) {
        REQUIRE(model[at].put == 0);
    }
    CHECK_INT(count, overlay->count);
}

static void
find_everywhere(const gd_overlay *overlay)
{
    for (uint64_t at = 0; at < SIZE; at++) {
        const gd_piece *piece = gd_overlay_find(overlay, at);
        uint64_t next = at;
        while (next < SIZE && model[next].put == 0) {
            next++;
        }
        if (next == SIZE) {
            REQUIRE(piece == NULL);
        } else {
            REQUIRE(piece != NULL && piece->record == model[next].put);
            REQUIRE(piece->offset <= next && next < gd_piece_end(piece));
        }
    }
}

static uint64_t
put_model(const gd_piece *piece)
{
    uint64_t replaced = 0;
    for (uint64_t i = 0; i < piece->length; i++) {
        cell *c = &model[piece->offset + i];
        replaced += c->put != 0 && c->put % 5 != 0;
        *c = (cell){(uint32_t)piece->record, (uint32_t)i};
    }
    return replaced;
}

static void
run_random(uint64_t seed, uint64_t longest)
{
    fault_env f;
    gd_overlay overlay;
    gd_error err;
    fault_env_init(&f);
    gd_overlay_init(&overlay, &f.env);
    memset(model, 0, sizeof model);
    for (uint32_t n = 1; n <= ROUNDS / SWEEP_STRIDE; n++) {
        uint64_t offset = next_random(&seed) % SIZE;
        uint64_t length = 1 + next_random(&seed) % longest;
        uint64_t replaced = 0;
        length = length < SIZE - offset ? length : SIZE - offset;
        /* Every fifth one is zeros. */
        const gd_piece piece = {.offset = offset,
                                .length = length,
                                .journal = n % 5 == 0 ? NULL : some,
                                .record = n,
                                .record_length = (uint32_t)length};
        CHECK_INT(gd_overlay_put(&overlay, &piece, &replaced, &err), GD_OK);
        CHECK_INT(replaced, put_model(&piece));
        if (n % 16 == 0) {
            compare(&overlay);
        }
    }
    find_everywhere(&overlay);
    gd_overlay_clear(&overlay);
    CHECK(gd_overlay_find(&overlay, 0) == NULL);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}

TEST(test_random)
{
    static const uint64_t longest[] = {1, 3, 40, SIZE};
    for (uint64_t seed = 1; seed <= 8; seed++) {
        run_random(seed, longest[seed % 4]);
    }
}

/* Without memory, the overlay does not change. */
TEST(test_no_memory)
{
    fault_env f;
    gd_overlay overlay;
    gd_error err;
    uint64_t replaced = 0;
    fault_env_init(&f);
    gd_overlay_init(&overlay, &f.env);
    memset(model, 0, sizeof model);
    gd_piece piece = {
        .offset = 10, .length = 100, .journal = some, .record = 1};
    CHECK_INT(gd_overlay_put(&overlay, &piece, &replaced, &err), GD_OK);
    put_model(&piece);
    gd_piece inner = {
        .offset = 50, .length = 5, .journal = some, .record = 2};
    for (uint64_t nth = 1; nth <= 2; nth++) {
        fault_env_fail(&f, FAULT_ALLOC, nth, ENOMEM, false);
        CHECK_INT(gd_overlay_put(&overlay, &inner, &replaced, &err),
                  GD_NOMEM);
        compare(&overlay);
    }
    fault_env_heal(&f);
    CHECK_INT(gd_overlay_put(&overlay, &inner, &replaced, &err), GD_OK);
    put_model(&inner);
    compare(&overlay);
    gd_overlay_clear(&overlay);
    CHECK_INT(fault_env_leaks(&f), 0);
    fault_env_destroy(&f);
}
