/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names.c - see names.h.
 */
#include "engine/format/names.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine/format/address.h"

void
gd_names_group(uint32_t group, char name[GD_NAME_SIZE])
{
    snprintf(name, GD_NAME_SIZE, GD_DIR_GROUPS "/%08x", (unsigned)group);
}

void
gd_names_spares(uint32_t group, char name[GD_NAME_SIZE])
{
    snprintf(name, GD_NAME_SIZE, GD_DIR_SPARES "/%08x", (unsigned)group);
}

/* The value of a lower-case hexadecimal digit; -1 for anything else. */
static int
hex_digit(char c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool
gd_names_parse_hex(const char *digits, uint32_t *value)
{
    *value = 0;
    if (strlen(digits) != 8) {
        return false;
    }
    for (const char *p = digits; *p != '\0'; p++) {
        int digit = hex_digit(*p);
        if (digit < 0) {
            return false;
        }
        *value = *value << 4 | (uint32_t)digit;
    }
    return true;
}

bool
gd_names_parse_group(const char *base, uint32_t *group)
{
    return gd_names_parse_hex(base, group) && *group >= 1 &&
           *group <= GD_MAX_GROUP;
}

void
gd_names_second(const char *name, char second[GD_NAME_SIZE])
{
    snprintf(second, GD_NAME_SIZE, "%s~", name);
}

bool
gd_names_parse_any_group(const char *base, uint32_t *group)
{
    char digits[9];
    size_t length = strnlen(base, 10);
    if (length != 9 || base[8] != '~') {
        return gd_names_parse_group(base, group);
    }
    memcpy(digits, base, 8);
    digits[8] = '\0';
    return gd_names_parse_group(digits, group);
}

static bool
is_id_character(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c >= '0' && c <= '9') || c == '_' || c == '-';
}

gd_status
gd_names_image(const char *image_id, char name[GD_NAME_SIZE], gd_error *err)
{
    size_t length = strnlen(image_id, GD_IMAGE_ID_MAX + 1);
    if (length == 0 || length > GD_IMAGE_ID_MAX) {
        return gd_fail(err, GD_INVALID,
                       "an image id has 1 to %d characters; this one has %s",
                       GD_IMAGE_ID_MAX, length == 0 ? "none" : "more");
    }
    for (size_t i = 0; i < length; i++) {
        if (!is_id_character(image_id[i])) {
            return gd_fail(err, GD_INVALID,
                           "an image id has only the characters A-Z, a-z, "
                           "0-9, _ and -; this one has the byte 0x%02x at "
                           "position %zu",
                           (unsigned)(uint8_t)image_id[i], i);
        }
    }
    snprintf(name, GD_NAME_SIZE, GD_DIR_IMAGES "/%s", image_id);
    return GD_OK;
}

void
gd_names_spool(gd_spool_kind kind, const uint8_t id[GD_ID_SIZE],
               char name[GD_NAME_SIZE])
{
    int n = snprintf(name, GD_NAME_SIZE, GD_DIR_SPOOL "/%c-", (char)kind);
    for (int i = 0; i < GD_ID_SIZE; i++) {
        n += snprintf(name + n, GD_NAME_SIZE - (size_t)n, "%02x", id[i]);
    }
}

bool
gd_names_parse_spool(const char *base, gd_spool_kind *kind,
                     uint8_t id[GD_ID_SIZE])
{
    static const char kinds[] = {
        GD_SPOOL_STORE,  GD_SPOOL_DELETED,  GD_SPOOL_GROUP,
        GD_SPOOL_MERGED, GD_SPOOL_REPLACED, GD_SPOOL_EXCHANGE};
    if (strlen(base) != 2 + 2 * GD_ID_SIZE || base[1] != '-' ||
        memchr(kinds, base[0], sizeof kinds) == NULL) {
        return false;
    }
    for (int i = 0; i < GD_ID_SIZE; i++) {
        int high = hex_digit(base[2 + 2 * i]);
        int low = hex_digit(base[3 + 2 * i]);
        if (high < 0 || low < 0) {
            return false;
        }
        id[i] = (uint8_t)(high << 4 | low);
    }
    *kind = (gd_spool_kind)base[0];
    return true;
}

const char *
gd_index_kind_name(unsigned kind)
{
    static const char *const names[] = {
        [GD_INDEX_SHARD] = "shard", [GD_INDEX_RUN] = "run",
        [GD_INDEX_GONE] = "gone",   [GD_INDEX_PAIRS] = "pairs",
        [GD_INDEX_CURSORS] = "cursors", [GD_INDEX_NEW] = "new"};
    return kind < sizeof names / sizeof names[0] ? names[kind] : NULL;
}

void
gd_names_index(const gd_index_id *id, char name[GD_NAME_SIZE])
{
    snprintf(name, GD_NAME_SIZE, GD_DIR_INDEX "/%s-%02x-%04x.%016" PRIx64,
             gd_index_kind_name(id->kind), (unsigned)id->bits,
             (unsigned)id->shard, id->number);
}

bool
gd_names_parse_index(const char *base, gd_index_id *id)
{
    enum { DIGITS = 24 }; /* -bb-ssss.nnnnnnnnnnnnnnnn */
    const char *digits = strchr(base, '-');
    uint64_t number = 0;
    if (digits == NULL || strlen(digits) != DIGITS + 1 || digits[3] != '-' ||
        digits[8] != '.') {
        return false;
    }
    *id = (gd_index_id){.kind = GD_INDEX_SHARD};
    for (int i = 1; i <= DIGITS; i++) {
        int digit = i == 3 || i == 8 ? 0 : hex_digit(digits[i]);
        if (digit < 0) {
            return false;
        } else if (i < 3) {
            id->bits = id->bits << 4 | (uint32_t)digit;
        } else if (i > 3 && i < 8) {
            id->shard = id->shard << 4 | (uint32_t)digit;
        } else if (i > 8) {
            number = number << 4 | (uint64_t)digit;
        }
    }
    id->number = number;
    size_t length = (size_t)(digits - base);
    for (unsigned k = GD_INDEX_SHARD; k <= GD_INDEX_NEW; k++) {
        const char *kind = gd_index_kind_name(k);
        if (strlen(kind) == length && memcmp(kind, base, length) == 0) {
            id->kind = (gd_index_kind)k;
            return id->bits <= GD_SHARD_BITS_MAX &&
                   id->shard < UINT32_C(1) << id->bits;
        }
    }
    return false;
}

void
gd_names_reserve(unsigned i, char name[GD_NAME_SIZE])
{
    if (i == 0) {
        snprintf(name, GD_NAME_SIZE, "catalog-reserve");
    } else {
        snprintf(name, GD_NAME_SIZE, "catalog-reserve-%u", i);
    }
}
