/* SPDX-License-Identifier: Apache-2.0 */
/*
 * io_mode.c - see io_mode.h.
 */
#include "engine/write/io_mode.h"

enum {
    WEIGHT = 4, /* a new cost counts a fourth, those before it the rest */
    MIB = 1 << 20,
};
#define NEVER UINT64_MAX

static gd_io_mode
choose(gd_ways *ways, bool *trial)
{
    const uint64_t *cost = ways->cost;
    gd_io_mode best = cost[GD_IO_MODE_BESIDE] != 0 &&
                          cost[GD_IO_MODE_BESIDE] < cost[GD_IO_MODE_THROUGH]
                      ? GD_IO_MODE_BESIDE
                      : GD_IO_MODE_THROUGH;
    gd_io_mode other = best == GD_IO_MODE_BESIDE ? GD_IO_MODE_THROUGH
                                                 : GD_IO_MODE_BESIDE;
    uint64_t pause = cost[other] == 0 ? GD_IO_MODE_TRIAL : GD_IO_MODE_AGAIN;
    *trial = true;
    if (cost[best] != 0 && ways->since >= pause) {
        ways->since = 0;
        return other;
    }
    *trial = cost[best] == 0;
    return best;
}

void
gd_io_mode_next(gd_repo *repo, gd_stretch *stretch)
{
    bool trial;
    pthread_mutex_lock(&repo->mutex);
    gd_io_mode way = choose(&repo->ways, &trial);
    pthread_mutex_unlock(&repo->mutex);
    *stretch = (gd_stretch){.way = way,
                            .most = trial ? GD_IO_MODE_TRIAL
                                          : GD_IO_MODE_LONG};
}

/* In ns for a MiB. */
static uint64_t
cost_of(const gd_stretch *stretch, uint64_t bytes)
{
    bool slow = stretch->fast == 0 ||
                stretch->fast < stretch->writes / GD_IO_MODE_FEW;
    return stretch->way == GD_IO_MODE_BESIDE && slow
               ? NEVER
               : (uint64_t)stretch->worked / (bytes / MIB) + 1;
}

void
gd_io_mode_note(gd_repo *repo, const gd_stretch *stretch, uint64_t bytes)
{
    gd_ways *ways = &repo->ways;
    pthread_mutex_lock(&repo->mutex);
    ways->since += bytes;
    if (bytes >= GD_IO_MODE_MIN) {
        uint64_t now = cost_of(stretch, bytes);
        uint64_t before = ways->cost[stretch->way];
        bool alone = before == 0 || before == NEVER || now == NEVER;
        ways->cost[stretch->way] =
            alone ? now : before - before / WEIGHT + now / WEIGHT;
    }
    pthread_mutex_unlock(&repo->mutex);
}

void
gd_io_mode_refuse(gd_repo *repo)
{
    pthread_mutex_lock(&repo->mutex);
    repo->ways.cost[GD_IO_MODE_BESIDE] = NEVER;
    pthread_mutex_unlock(&repo->mutex);
}
