/* SPDX-License-Identifier: Apache-2.0 */
/*
 * owned_fixture.c - see owned_fixture.h.
 */
#include "tests/c/support/owned_fixture.h"

#include "engine/base/coding.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"

static void
read_file(owned_fixture *t, uint8_t **out, size_t *size)
{
    *size = (size_t)scratch_size(&t->x, GROUP_1);
    *out = malloc(*size);
    scratch_read(&t->x, GROUP_1, *out, *size, 0);
}

void
owned_setup(owned_fixture *t)
{
    scratch_init(&t->x);
    t->repo = scratch_repo_filter(&t->x);
    t->one = malloc(LENGTH);
    t->two = malloc(LENGTH);
    t->owned = NULL;
    fill_random(t->one, LENGTH, 1);
    fill_random(t->two, LENGTH, 2);
    CHECK_INT(put_image(t->repo, "one", t->one, LENGTH, LENGTH, NULL,
                        &t->x.err), GD_OK);
    CHECK_INT(put_image(t->repo, "two", t->two, LENGTH / 2, LENGTH, NULL,
                        &t->x.err), GD_OK);
    read_file(t, &t->before, &t->size);
}

void
owned_teardown(owned_fixture *t)
{
    gd_repo_close(t->repo);
    free(t->one);
    free(t->two);
    free(t->before);
    CHECK_INT(scratch_destroy(&t->x), 0);
}

gd_status
owned_enter(owned_fixture *t, uint32_t number)
{
    return gd_owned_group_open(t->repo, number, &t->owned, &t->x.err);
}

gd_status
free_slots(owned_fixture *t, uint32_t first, uint32_t count,
           uint32_t *freed)
{
    uint32_t slots[SLOTS];
    for (uint32_t i = 0; i < count; i++) {
        slots[i] = first + i;
    }
    return gd_owned_group_free(t->owned, slots, count, freed, &t->x.err);
}

void
require_freed(owned_fixture *t, uint32_t first, uint32_t count)
{
    uint32_t freed;
    CHECK_INT(free_slots(t, first, count, &freed), GD_OK);
    CHECK_INT(freed, count);
}

uint64_t
owned_punch(owned_fixture *t)
{
    uint64_t bytes = 0;
    CHECK_INT(gd_owned_group_punch(t->owned, &bytes, &t->x.err), GD_OK);
    return bytes;
}

void
read_group(owned_fixture *t, gd_published *record, gd_entry *entries)
{
    gd_group *group;
    CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, 1, O_RDONLY,
                            &group, &t->x.err), GD_OK);
    CHECK_INT(gd_group_read_published(group, record, &t->x.err), GD_OK);
    CHECK_INT(gd_group_read_entries(group, 0, SLOTS, entries, &t->x.err),
              GD_OK);
    gd_group_close(group);
}

gd_published
record_of(owned_fixture *t)
{
    gd_published record;
    gd_entry entries[SLOTS];
    read_group(t, &record, entries);
    return record;
}

unsigned
count_state(owned_fixture *t, gd_entry_state state)
{
    gd_published record;
    gd_entry entries[SLOTS];
    unsigned count = 0;
    read_group(t, &record, entries);
    for (int i = 0; i < SLOTS; i++) {
        count += entries[i].state == state;
    }
    return count;
}

uint64_t
segment_offset(uint32_t number)
{
    return gd_fptable_data_start(SLOTS) + (uint64_t)number * WHOLE;
}

bool
is_untouched(owned_fixture *t, uint64_t from, uint64_t to)
{
    uint8_t *now;
    size_t size;
    read_file(t, &now, &size);
    bool same = size >= to && t->size >= to &&
                memcmp(now + from, t->before + from, to - from) == 0;
    free(now);
    return same;
}

bool
is_image(owned_fixture *t, const char *image_id, const uint8_t *data,
         size_t length)
{
    bool equal;
    return get_image(t->repo, image_id, data, length, &equal, &t->x.err) ==
               GD_OK &&
           equal;
}

void
set_record(owned_fixture *t, uint32_t count, uint64_t end)
{
    gd_group *group;
    CHECK_INT(gd_group_open(t->x.env, t->x.root, &t->x.params, 1, O_RDWR,
                            &group, &t->x.err), GD_OK);
    gd_published record = {.sequence = 9, .count = count, .end = end};
    CHECK_INT(gd_group_write_published(group, &record, &t->x.err), GD_OK);
    gd_group_close(group);
}
