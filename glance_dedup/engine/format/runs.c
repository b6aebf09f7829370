/* SPDX-License-Identifier: Apache-2.0 */
/*
 * runs.c - see runs.h.
 */
#include "engine/format/runs.h"

#include <stdlib.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/format/address.h"

/* ---- counting ---- */

/* The part of a run within [first, first + GD_COUNTERS). */
static void
clip(const uint8_t *run, uint64_t first, uint64_t *from, uint64_t *to)
{
    uint64_t start = gd_get32(run + 4);
    uint64_t end = start + gd_get32(run + 8);
    uint64_t last = first + GD_COUNTERS;
    *from = start > first ? start - first : 0;
    *to = end < first ? 0 : (end < last ? end : last) - first;
}

bool
gd_runs_add(uint8_t counters[GD_COUNTERS_SIZE], uint32_t group, uint32_t chunk,
            const uint8_t *runs, size_t count, int delta)
{
    uint8_t result[GD_COUNTERS_SIZE];
    memcpy(result, counters, sizeof result);
    for (size_t i = 0; i < count; i++) {
        const uint8_t *run = runs + i * GD_RUN_SIZE;
        uint64_t from, to;
        if (gd_get32(run) != group) {
            continue;
        }
        clip(run, (uint64_t)chunk * GD_COUNTERS, &from, &to);
        for (uint64_t at = from; at < to; at++) {
            uint32_t value = gd_get32(result + 4 * at);
            if (delta < 0 && value == 0) {
                return false;
            }
            if (value != UINT32_MAX) {
                gd_put32(result + 4 * at, delta < 0 ? value - 1 : value + 1);
            }
        }
    }
    memcpy(counters, result, sizeof result);
    return true;
}

/* ---- what two recipes share ---- */

typedef struct span {
    uint64_t from, to;
} span;

static int
by_start(const void *a, const void *b)
{
    const span *x = a, *y = b;
    return x->from < y->from ? -1 : x->from > y->from;
}

static span
span_of(const uint8_t *run)
{
    uint64_t from =
        ((uint64_t)gd_get32(run) << GD_SLOT_BITS) + gd_get32(run + 4);
    return (span){from, from + gd_get32(run + 8)};
}

/* The addresses in the runs, as spans in order that do not touch.  Returns the
 * number of spans. */
static size_t
unite(const uint8_t *runs, size_t count, span *spans)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        spans[i] = span_of(runs + i * GD_RUN_SIZE);
    }
    if (count > 0) {
        qsort(spans, count, sizeof *spans, by_start);
    }
    for (size_t i = 0; i < count; i++) {
        if (used > 0 && spans[i].from <= spans[used - 1].to) {
            if (spans[i].to > spans[used - 1].to) {
                spans[used - 1].to = spans[i].to;
            }
        } else {
            spans[used++] = spans[i];
        }
    }
    return used;
}

static uint64_t
overlap(const span *a, size_t a_count, const span *b, size_t b_count)
{
    uint64_t total = 0;
    for (size_t i = 0, k = 0; i < a_count && k < b_count;) {
        uint64_t from = a[i].from > b[k].from ? a[i].from : b[k].from;
        uint64_t to = a[i].to < b[k].to ? a[i].to : b[k].to;
        total += to > from ? to - from : 0;
        if (a[i].to < b[k].to) {
            i++;
        } else {
            k++;
        }
    }
    return total;
}

gd_status
gd_runs_shared(const gd_env *env, const uint8_t *a, size_t a_count,
               const uint8_t *b, size_t b_count, uint64_t *shared,
               gd_error *err)
{
    span *x = gd_calloc(env, a_count, sizeof *x, err);
    span *y = gd_calloc(env, b_count, sizeof *y, err);
    gd_status s = x == NULL || y == NULL ? GD_NOMEM : GD_OK;
    if (s == GD_OK) {
        *shared = overlap(x, unite(a, a_count, x), y, unite(b, b_count, y));
    }
    env->release(env, x);
    env->release(env, y);
    return s;
}

/* ---- whether a recipe names any of them ---- */

bool
gd_runs_name_any(const uint8_t *runs, size_t run_count,
                 const uint8_t *addresses, size_t count)
{
    for (size_t i = 0; i < run_count; i++) {
        span run = span_of(runs + i * GD_RUN_SIZE);
        size_t at =
            gd_lower_bound(addresses, GD_ADDRESS_SIZE, count, run.from);
        if (at < count &&
            gd_get64(addresses + at * GD_ADDRESS_SIZE) < run.to) {
            return true;
        }
    }
    return false;
}
