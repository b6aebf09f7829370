/* SPDX-License-Identifier: Apache-2.0 */
/*
 * filter_fixture.c - see filter_fixture.h.
 */
#include "tests/c/support/filter_fixture.h"

#include "engine/base/coding.h"
#include "tests/c/support/check.h"

const uint8_t FILTER_REPOSITORY[16] = "repository no 1";

gd_status
filter_open(filter_fixture *x, uint64_t budget)
{
    return gd_filter_open(x->env, x->path, FILTER_REPOSITORY, budget,
                          &x->filter, &x->err);
}

void
filter_close(filter_fixture *x)
{
    gd_filter_close(x->env, x->filter);
    x->filter = NULL;
}

void
filter_setup(filter_fixture *x, uint64_t budget)
{
    memset(x, 0, sizeof *x);
    fault_env_init(&x->f);
    x->env = &x->f.env;
    x->dir = check_mkdir_shm();
    snprintf(x->path, sizeof x->path, "%s/filter", x->dir);
    if (!CHECK_INT(filter_open(x, budget), GD_OK)) {
        fprintf(stderr, "%s\n", x->err.text);
        exit(1);
    }
}

void
filter_teardown(filter_fixture *x)
{
    filter_close(x);
    CHECK_INT(fault_env_leaks(&x->f), 0);
    fault_env_destroy(&x->f);
    check_rmdir(x->dir);
}

gd_fingerprint
filter_fingerprint(uint64_t n)
{
    gd_fingerprint fp;
    for (unsigned i = 0; i < GD_FINGERPRINT_SIZE; i += 8) {
        gd_put64(fp.bytes + i, gd_checksum(&n, sizeof n, i));
    }
    return fp;
}

gd_address
filter_address(uint64_t n)
{
    return (gd_address){.group = 1 + (uint32_t)(n / GD_MAX_SLOTS),
                        .slot = (uint32_t)(n % GD_MAX_SLOTS)};
}

void
filter_save(gd_filter *filter, uint32_t newest, bool complete)
{
    gd_position position = {.newest = newest, .complete = complete};
    gd_filter_save(filter, &position, &(gd_look){0});
}

void
filter_insert(gd_filter *filter, uint64_t n)
{
    gd_fingerprint fp = filter_fingerprint(n);
    gd_filter_insert(filter, &fp, filter_address(n));
}

bool
filter_leads_to(const gd_filter *filter, uint64_t n, gd_address a)
{
    gd_fingerprint fp = filter_fingerprint(n);
    gd_address found[GD_FILTER_CANDIDATES];
    size_t count = gd_filter_lookup(filter, &fp, found);
    CHECK(count <= GD_FILTER_CANDIDATES);
    for (size_t i = 0; i < count; i++) {
        if (found[i].group == a.group && found[i].slot == a.slot) {
            return true;
        }
    }
    return false;
}

bool
filter_finds(const gd_filter *filter, uint64_t n)
{
    return filter_leads_to(filter, n, filter_address(n));
}

uint64_t
filter_count_found(const gd_filter *filter, uint64_t from, uint64_t to)
{
    uint64_t found = 0;
    for (uint64_t n = from; n < to; n++) {
        found += filter_finds(filter, n);
    }
    return found;
}

gd_filter_stats
filter_stats_of(const gd_filter *filter)
{
    gd_filter_stats stats;
    gd_filter_get_stats(filter, &stats);
    return stats;
}
