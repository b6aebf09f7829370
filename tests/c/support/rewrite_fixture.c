/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rewrite_fixture.c - see rewrite_fixture.h.
 */
#include "tests/c/support/rewrite_fixture.h"

#include "engine/base/coding.h"
#include "engine/files/spool.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"

gd_status
rewrite_put(rewrite_fixture *t, const char *image_id, const uint8_t *data,
            size_t length)
{
    return put_image(t->repo, image_id, data, length, length, NULL,
                     &t->x.err);
}

bool
rewrite_is_image(rewrite_fixture *t, const char *image_id, const uint8_t *data,
                 size_t length)
{
    bool equal;
    gd_status s =
        get_image(t->repo, image_id, data, length, &equal, &t->x.err);
    if (s != GD_OK) {
        fprintf(stderr, "%s\n", t->x.err.text);
    }
    return s == GD_OK && equal;
}

void
rewrite_setup(rewrite_fixture *t, bool texts)
{
    scratch_init(&t->x);
    t->repo = scratch_repo_filter(&t->x);
    t->one = malloc(LENGTH);
    t->two = malloc(LENGTH);
    t->owned = NULL;
    fill_random(t->one, LENGTH, 1);
    fill_random(t->two, LENGTH, 2);
    for (size_t at = 0; texts && at < LENGTH; at++) {
        t->one[at] = at % BLOCK < 600 ? t->one[at] : (uint8_t)('a' + at % 7);
    }
    CHECK_INT(rewrite_put(t, "one", t->one, LENGTH), GD_OK);
    CHECK_INT(rewrite_put(t, "two", t->two, LENGTH / 2), GD_OK);
}

void
rewrite_teardown(rewrite_fixture *t)
{
    gd_repo_close(t->repo);
    free(t->one);
    free(t->two);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

void
own_group(rewrite_fixture *t, uint32_t number)
{
    CHECK_INT(gd_owned_group_open(t->repo, number, &t->owned, &t->x.err),
              GD_OK);
}

void
free_group_slots(rewrite_fixture *t, uint32_t first, uint32_t count)
{
    uint32_t slots[SLOTS], freed;
    for (uint32_t i = 0; i < count; i++) {
        slots[i] = first + i;
    }
    CHECK_INT(gd_owned_group_free(t->owned, slots, count, &freed, &t->x.err),
              GD_OK);
    CHECK_INT(freed, count);
}

gd_status
rewrite_group(rewrite_fixture *t, uint64_t *bytes)
{
    return gd_group_rewrite_owned(t->owned, NULL, bytes, &t->x.err);
}

void
require_rewritten(rewrite_fixture *t)
{
    uint64_t bytes;
    if (!CHECK_INT(rewrite_group(t, &bytes), GD_OK)) {
        fprintf(stderr, "%s\n", t->x.err.text);
    }
}

unsigned
check_group_file(rewrite_fixture *t, uint32_t number, gd_published *record,
                 gd_entry entries[SLOTS])
{
    gd_group *group;
    gd_coder *coder;
    unsigned live = 0;
    uint8_t *in = malloc(GD_SEGMENT_HEADER + GD_SEGMENT_MAX);
    uint8_t *plain = malloc(GD_SEGMENT_MAX);
    CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, number,
                            O_RDONLY, &group, &t->x.err), GD_OK);
    CHECK_INT(gd_coder_open(t->x.env, &coder, &t->x.err), GD_OK);
    CHECK_INT(gd_group_read_published(group, record, &t->x.err), GD_OK);
    CHECK_INT(gd_group_read_entries(group, 0, SLOTS, entries, &t->x.err),
              GD_OK);
    for (uint32_t i = 0; i < SLOTS; i++) {
        const gd_entry *e = &entries[i];
        gd_segment_header header;
        if (e->state != GD_ENTRY_LIVE) {
            continue;
        }
        live++;
        CHECK_INT(gd_group_read_segment(group, e, i, coder, in, plain,
                                        &header, &t->x.err), GD_OK);
        CHECK(gd_segment_intact(in, &header, group->bounds.seed));
        CHECK(gd_checksum(plain + e->plain_offset, e->plain_length, 0) ==
              e->checksum);
        CHECK((uint64_t)e->segment + GD_SEGMENT_HEADER +
                  header.stored_length <= record->end);
        /* Each of its blocks is live, and is this segment's. */
        for (uint32_t k = 0; k < SLOTS; k++) {
            CHECK(!gd_segment_has_slot(&header, k) ||
                  entries[k].segment == e->segment ||
                  entries[k].state != GD_ENTRY_LIVE);
        }
    }
    gd_coder_close(t->x.env, coder);
    gd_group_close(group);
    free(in);
    free(plain);
    return live;
}

bool
is_spool_clean(rewrite_fixture *t)
{
    return scratch_count(&t->x, "spool", "G-", NULL) == 0;
}
