/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names.c - see names.h.
 */
#include "engine/format/names.h"

#include <stdio.h>
#include <string.h>

#include "engine/format/address.h"

void
gd_group_name(uint32_t group, char name[GD_NAME_SIZE])
{
    snprintf(name, GD_NAME_SIZE, GD_DIR_GROUPS "/%08x", (unsigned)group);
}

void
gd_spares_name(uint32_t group, char name[GD_NAME_SIZE])
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
gd_hex_parse(const char *digits, uint32_t *value)
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
gd_group_name_parse(const char *base, uint32_t *group)
{
    return gd_hex_parse(base, group) && *group >= 1 && *group <= GD_MAX_GROUP;
}

static bool
is_id_character(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c >= '0' && c <= '9') || c == '_' || c == '-';
}

gd_status
gd_image_name(const char *image_id, char name[GD_NAME_SIZE], gd_error *err)
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
gd_spool_name(gd_spool_kind kind, const uint8_t id[GD_ID_SIZE],
              char name[GD_NAME_SIZE])
{
    int n = snprintf(name, GD_NAME_SIZE, GD_DIR_SPOOL "/%c-", (char)kind);
    for (int i = 0; i < GD_ID_SIZE; i++) {
        n += snprintf(name + n, GD_NAME_SIZE - (size_t)n, "%02x", id[i]);
    }
}

bool
gd_spool_name_parse(const char *base, gd_spool_kind *kind,
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

void
gd_reserve_name(unsigned i, char name[GD_NAME_SIZE])
{
    if (i == 0) {
        snprintf(name, GD_NAME_SIZE, "catalog-reserve");
    } else {
        snprintf(name, GD_NAME_SIZE, "catalog-reserve-%u", i);
    }
}
