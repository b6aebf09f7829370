/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dtbpage.c - see dtbpage.h.
 */
#include "engine/kv/dtbpage.h"

#include "engine/base/zero.h"

enum {
    VERSION = 1,
    COUNT = 8, /* offsets in a page */
    OVERFLOWS = 10,
    KEYS = 16,
    VALUES = KEYS + 8 * GD_DTB_KEYS,
    HEADER_SUM = 56,
};

/* A tenth of the places stays free, as in Dmdedup. */
uint64_t
gd_dtb_pages(uint64_t capacity)
{
    uint64_t places = capacity + capacity / 9 + 1;
    return (places + GD_DTB_KEYS - 1) / GD_DTB_KEYS;
}

void
gd_dtbpage_encode_header(uint8_t page[GD_DTB_PAGE],
                         const gd_kv_options *options,
                         uint64_t seed)
{
    memset(page, 0, GD_DTB_PAGE);
    memcpy(page, "GDKVTABL", 8);
    gd_put32(page + 8, VERSION);
    gd_put64(page + 16, options->capacity);
    gd_put64(page + 24, seed);
    gd_put64(page + HEADER_SUM, gd_checksum(page, HEADER_SUM, 0));
}

bool
gd_dtbpage_decode_header(const uint8_t page[GD_DTB_PAGE],
                         const gd_kv_options *options, uint64_t *seed)
{
    uint8_t wanted[GD_DTB_PAGE];
    *seed = gd_get64(page + 24);
    gd_dtbpage_encode_header(wanted, options, *seed);
    return memcmp(page, wanted, GD_DTB_PAGE) == 0;
}

static uint64_t
checksum(const uint8_t *page, uint64_t number, uint64_t seed)
{
    return gd_checksum(page + 8, GD_DTB_PAGE - 8, seed + number);
}

void
gd_dtbpage_seal(uint8_t *page, uint64_t number, uint64_t seed)
{
    gd_put64(page, checksum(page, number, seed));
}

bool
gd_dtbpage_is_valid(const uint8_t *page, uint64_t number, uint64_t seed)
{
    if (gd_get64(page) == 0 && gd_is_zero(page, GD_DTB_PAGE)) {
        return true;
    }
    return gd_get64(page) == checksum(page, number, seed) &&
           gd_dtbpage_count(page) <= GD_DTB_KEYS;
}

uint64_t
gd_dtbpage_home(uint64_t key, uint64_t seed, uint64_t pages)
{
    uint64_t hash = gd_checksum(&key, sizeof key, seed);
    return 1 + (uint64_t)(((unsigned __int128)hash * pages) >> 64);
}

unsigned
gd_dtbpage_count(const uint8_t *page)
{
    return gd_get16(page + COUNT);
}

bool
gd_dtbpage_overflows(const uint8_t *page)
{
    return gd_get16(page + OVERFLOWS) != 0;
}

void
gd_dtbpage_set_overflows(uint8_t *page)
{
    gd_put16(page + OVERFLOWS, 1);
}

int
gd_dtbpage_find(const uint8_t *page, uint64_t key)
{
    unsigned count = gd_dtbpage_count(page);
    for (unsigned i = 0; i < count; i++) {
        if (gd_get64(page + KEYS + 8 * i) == key) {
            return (int)i;
        }
    }
    return -1;
}

gd_kv_pair
gd_dtbpage_pair(const uint8_t *page, unsigned place)
{
    return (gd_kv_pair){gd_get64(page + KEYS + 8 * place),
                        gd_get64(page + VALUES + 8 * place)};
}

void
gd_dtbpage_set_value(uint8_t *page, unsigned place, uint64_t value)
{
    gd_put64(page + VALUES + 8 * place, value);
}

static void
set_pair(uint8_t *page, unsigned place, gd_kv_pair pair)
{
    gd_put64(page + KEYS + 8 * place, pair.key);
    gd_dtbpage_set_value(page, place, pair.value);
}

void
gd_dtbpage_add(uint8_t *page, gd_kv_pair pair)
{
    unsigned count = gd_dtbpage_count(page);
    set_pair(page, count, pair);
    gd_put16(page + COUNT, (uint16_t)(count + 1));
}
