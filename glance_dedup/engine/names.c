/*
 * names.c - see names.h.
 */
#include "names.h"

#include <stdio.h>
#include <string.h>

#include "filter.h"

void
gd_group_name(uint32_t group, char name[GD_NAME_SIZE])
{
    snprintf(name, GD_NAME_SIZE, GD_DIR_GROUPS "/%08x", (unsigned)group);
}

bool
gd_group_name_parse(const char *base, uint32_t *group)
{
    uint32_t value = 0;
    if (strlen(base) != 8) {
        return false;
    }
    for (const char *p = base; *p != '\0'; p++) {
        if (*p >= '0' && *p <= '9') {
            value = value << 4 | (uint32_t)(*p - '0');
        } else if (*p >= 'a' && *p <= 'f') {
            value = value << 4 | (uint32_t)(*p - 'a' + 10);
        } else {
            return false;
        }
    }
    *group = value;
    return value >= 1 && value <= GD_MAX_GROUP;
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
