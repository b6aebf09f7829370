/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dtbpage.h - the file of the backend DTB: its header, and its pages, as pure
 * functions.
 *
 * All integers are little-endian.  The file is an array of pages of 4096
 * bytes.  Page 0 is the header:
 *
 *      0  8  "GDKVTABL"
 *      8  4  version: 1
 *     12  4  zeros
 *     16  8  capacity, keys
 *     24  8  seed of the pages' checksums and of the hash
 *     32 24  zeros
 *     56  8  checksum of the bytes before
 *     64     zeros
 *
 * Each other page:
 *
 *      0  8  checksum of the bytes after it, with seed + the page's number
 *      8  2  number of keys
 *     10  2  1: a key that belongs here lies in the next page
 *     12  4  zeros
 *     16     255 keys of 8 bytes, then 255 values of 8 bytes
 *
 * A page is valid if and only if (1) its checksum is right, or all of it is
 * zeros, which is an empty page; and (2) its number of keys is at most 255.
 */
#ifndef GD_KV_DTBPAGE_H
#define GD_KV_DTBPAGE_H

#include "engine/base/coding.h"
#include "engine/kv/kv.h"

enum {
    GD_DTB_PAGE = 4096,
    GD_DTB_KEYS = 255, /* in a page */
};

/* Returns how many pages the store has behind the header. */
uint64_t gd_dtb_pages(uint64_t capacity);

void gd_dtbpage_encode_header(uint8_t page[GD_DTB_PAGE],
                              const gd_kv_options *options, uint64_t seed);
/* False if it is no header of a store with this capacity. */
bool gd_dtbpage_decode_header(const uint8_t page[GD_DTB_PAGE],
                              const gd_kv_options *options, uint64_t *seed);

/* Sets the checksum. */
void gd_dtbpage_seal(uint8_t *page, uint64_t number, uint64_t seed);
bool gd_dtbpage_is_valid(const uint8_t *page, uint64_t number, uint64_t seed);

/* ---- a valid page ---- */

/* The page that a key belongs to, from 1 to pages. */
uint64_t gd_dtbpage_home(uint64_t key, uint64_t seed, uint64_t pages);
unsigned gd_dtbpage_count(const uint8_t *page);
/* Returns whether the next page must be searched, too. */
bool gd_dtbpage_overflows(const uint8_t *page);
void gd_dtbpage_set_overflows(uint8_t *page);
/* The place of the key, or -1. */
int gd_dtbpage_find(const uint8_t *page, uint64_t key);
gd_kv_pair gd_dtbpage_pair(const uint8_t *page, unsigned place);
void gd_dtbpage_set_value(uint8_t *page, unsigned place, uint64_t value);
/* REQUIRES: the count is below GD_DTB_KEYS, and the key is absent. */
void gd_dtbpage_add(uint8_t *page, gd_kv_pair pair);

#endif
