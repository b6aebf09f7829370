/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_filter.c - the filter over a file of any content: its answers are
 * within bounds, whatever others write into the mapping meanwhile; and a new
 * one returns inserted hints.
 *
 * Input: flags (1: the header's checksum is corrected; 2: start with no file;
 * 4: it is longer than its content), 200 bytes of header, then operations of 4
 * bytes, some of which change the file behind the filter's back.
 */
#include "engine/files/filter.h"

#include <string.h>

#include "engine/base/coding.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/memory_env.h"
#include "tests/fuzz/remake.h"

enum { BYTES = GD_FILTER_MIN_BYTES, FINGERPRINTS = 4096, BEHIND = 64 };

#define PATH "/filter"

static const uint8_t repository_id[16] = {1, 2, 3};

static gd_fingerprint
fingerprint(uint32_t number)
{
    gd_fingerprint fp = {{0}};
    gd_put32(fp.bytes, number % FINGERPRINTS);
    return fp;
}

static void
look_up(const gd_filter *filter, uint32_t number)
{
    gd_address found[GD_FILTER_CANDIDATES];
    gd_fingerprint fp = fingerprint(number);
    size_t count = gd_filter_lookup(filter, &fp, found);
    MUST(count <= GD_FILTER_CANDIDATES);
    for (size_t i = 0; i < count; i++) {
        MUST(found[i].group >= 1 && found[i].group <= GD_MAX_GROUP &&
             found[i].slot < GD_MAX_SLOTS);
    }
}

/* With level 0 and nothing dropped, an insertion is found. */
static void
insert(gd_filter *filter, uint32_t number, uint32_t place)
{
    gd_address found[GD_FILTER_CANDIDATES];
    gd_address address = {place, place % 40000};
    gd_fingerprint fp = fingerprint(number);
    gd_filter_stats before, after;
    gd_filter_get_stats(filter, &before);
    gd_filter_insert(filter, &fp, address);
    gd_filter_get_stats(filter, &after);
    bool legal = address.group >= 1 && address.slot < GD_MAX_SLOTS;
    if (!legal || after.level > 0 || after.dropped != before.dropped) {
        return;
    }
    size_t count = gd_filter_lookup(filter, &fp, found);
    bool there = false;
    for (size_t i = 0; i < count; i++) {
        there = there || (found[i].group == address.group &&
                          found[i].slot == address.slot);
    }
    MUST(there);
    if (number % 3 == 0) {
        gd_filter_remove(filter, &fp, address);
        count = gd_filter_lookup(filter, &fp, found);
        for (size_t i = 0; i < count; i++) {
            MUST(found[i].group != address.group ||
                 found[i].slot != address.slot);
        }
    }
}

static void
check_stats(const gd_filter *filter, size_t length)
{
    gd_filter_stats stats;
    gd_filter_get_stats(filter, &stats);
    MUST(stats.bytes == length && stats.places <= length / 8);
    MUST(stats.hints <= stats.places && stats.level <= GD_FILTER_MAX_LEVEL);
    MUST(stats.rebuilt <= GD_MAX_GROUP);
}

static void
note_own(gd_filter *filter, uint32_t number, uint32_t place)
{
    gd_self_published *own = gd_filter_own(filter);
    uint32_t first, end, group = 1 + number % 600;
    gd_self_published_add(own, gd_self_published_epoch(own), group, place,
                          place + number % 9);
    gd_self_published_find(own, group, &first, &end);
    MUST(first <= end && end <= GD_MAX_SLOTS);
}

/* For any file, the loaded position follows position.h; and a saved one is
 * loaded again. */
static void
move(gd_filter *filter, uint32_t number, uint8_t place)
{
    static gd_position p, again;
    gd_filter_load(filter, &p);
    MUST(p.sealed <= p.turn && p.turn <= p.lost && p.lost <= p.newest);
    MUST(p.newest <= GD_MAX_GROUP && p.count <= GD_OPEN_GROUPS);
    for (uint32_t i = 0; i < p.count; i++) {
        uint32_t before = i == 0 ? p.lost : p.open[i - 1].group;
        MUST(p.open[i].group > before && p.open[i].group <= p.newest);
        MUST(p.open[i].published <= GD_MAX_SLOTS);
    }
    for (uint32_t i = 0; i < number % 300 && p.newest < GD_MAX_GROUP; i++) {
        gd_position_append(&p, (gd_open_group){++p.newest, number % 9, place});
    }
    if (place % 4 == 0) {
        gd_position_cut(&p, number * place);
    }
    p.complete = (place & 1) != 0;
    gd_filter_save(filter, &p, &(gd_look){number, place, number});
    gd_filter_load(filter, &again);
    MUST(p.count == again.count && p.newest == again.newest);
    MUST(p.lost == again.lost && p.complete == again.complete);
    MUST(memcmp(p.open, again.open, p.count * sizeof *p.open) == 0);
    note_own(filter, number, place);
}

/* Changes the file as another program. */
static void
spoil(uint8_t *file, size_t length, uint32_t where, uint8_t what)
{
    size_t at = (where & 1) != 0 ? 64 + where % 12288 : where * 613;
    file[64 + at % (length - 64)] = what;
}

static void
operate(memory_env *m, gd_filter *filter, input *in)
{
    size_t length;
    uint8_t *file = memory_get(m, PATH, &length);
    unsigned clears = 0;
    while (in->left > 0) {
        uint8_t what = take8(in);
        uint32_t number = take16(in), place = take8(in);
        switch (what % 8) {
        case 0:
        case 1:
        case 2:
            insert(filter, number, place);
            break;
        case 3:
            look_up(filter, number);
            break;
        case 4:
            if (gd_filter_rebuild_lock(filter)) {
                move(filter, number, place);
                if (place > 250 && clears++ < 2) {
                    gd_filter_clear(filter);
                }
                MUST(!gd_filter_rebuild_lock(filter));
                gd_filter_rebuild_unlock(filter);
            }
            break;
        case 5: /* many, so that the level rises */
            for (uint32_t i = 0; i < place; i++) {
                insert(filter, number * 31 + i, 1 + number + i);
            }
            break;
        case 6:
            spoil(file, length, number, (uint8_t)place);
            break;
        default: {
            gd_fingerprint fp = fingerprint(number);
            gd_filter_remove(filter, &fp, (gd_address){place, number});
        }
        }
        check_stats(filter, length);
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t file[2 * BYTES + BEHIND];
    memory_env m;
    gd_filter *filter;
    gd_error err;
    input in = {data, size};
    uint8_t flags = take8(&in);
    memory_env_init(&m);
    if ((flags & 2) == 0) {
        memset(file, 0, sizeof file);
        take_bytes(&in, file, 200);
        uint64_t said = gd_get64(file + 32);
        size_t length = said <= 2 * BYTES ? (size_t)said : BYTES;
        if ((flags & 1) != 0) {
            remake_filter(file, length);
        }
        memory_put(&m, PATH, file, length + ((flags & 4) != 0 ? BEHIND : 0));
    }
    gd_status s = gd_filter_open(&m.env, PATH, repository_id, BYTES, &filter,
                                 &err);
    MUST(s == GD_OK);
    operate(&m, filter, &in);
    gd_filter_close(&m.env, filter);
    MUST(memory_env_leaks(&m) == 0);
    memory_env_destroy(&m);
    return 0;
}
