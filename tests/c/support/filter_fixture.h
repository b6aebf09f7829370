/* SPDX-License-Identifier: Apache-2.0 */
/*
 * filter_fixture.h - a filter in shared memory, and the hints of blocks that
 * tests number.
 */
#ifndef FILTER_FIXTURE_H
#define FILTER_FIXTURE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/files/filter.h"
#include "tests/c/support/fault_env.h"

enum {
    FILTER_SMALL = GD_FILTER_MIN_BYTES,
    FILTER_HEADER = 16384,
    FILTER_PLACES = (FILTER_SMALL - FILTER_HEADER) / 8,
};

extern const uint8_t FILTER_REPOSITORY[16];

typedef struct filter_fixture {
    fault_env f;
    const gd_env *env; /* its table */
    char *dir;
    char path[256];
    gd_filter *filter;
    gd_error err;
} filter_fixture;

/* Makes a filter of so many bytes; on an error the program ends. */
void filter_setup(filter_fixture *x, uint64_t budget);
void filter_teardown(filter_fixture *x);
gd_status filter_open(filter_fixture *x, uint64_t budget);
void filter_close(filter_fixture *x);

/* The fingerprint and the address of the nth block of the tests. */
gd_fingerprint filter_fingerprint(uint64_t n);
gd_address filter_address(uint64_t n);
void filter_insert(gd_filter *filter, uint64_t n);
/* Returns true if block n's hint leads to address a. */
bool filter_leads_to(const gd_filter *filter, uint64_t n, gd_address a);
bool filter_finds(const gd_filter *filter, uint64_t n);
/* Returns the number of the blocks, up to `to`, that it finds. */
uint64_t filter_count_found(const gd_filter *filter, uint64_t from,
                            uint64_t to);

void filter_save(gd_filter *filter, uint32_t newest, bool complete);
gd_filter_stats filter_stats_of(const gd_filter *filter);

#endif
