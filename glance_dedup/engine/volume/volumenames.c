/* SPDX-License-Identifier: Apache-2.0 */
/*
 * volumenames.c - see volumenames.h.
 */
#include "engine/volume/volumenames.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define JOURNAL_PREFIX "journal-"

gd_status
gd_volume_require_name(const char *volume, gd_error *err)
{
    char name[GD_NAME_SIZE];
    if (strnlen(volume, GD_VOLUME_NAME_MAX + 1) > GD_VOLUME_NAME_MAX ||
        gd_names_image(volume, name, NULL) != GD_OK) {
        return gd_fail(err, GD_INVALID,
                       "a volume's name has 1 to %d characters, and only A-Z, "
                       "a-z, 0-9, _ and -", GD_VOLUME_NAME_MAX);
    }
    return GD_OK;
}

void
gd_volume_directory(const char *volume, char name[GD_NAME_SIZE])
{
    snprintf(name, GD_NAME_SIZE, GD_DIR_VOLUMES "/%s", volume);
}

void
gd_volume_file_name(const char *volume, const char *file,
                    char name[GD_NAME_SIZE])
{
    snprintf(name, GD_NAME_SIZE, GD_DIR_VOLUMES "/%s/%s", volume, file);
}

void
gd_volume_journal_name(const char *volume, uint32_t number,
                       char name[GD_NAME_SIZE])
{
    char base[32];
    snprintf(base, sizeof base, JOURNAL_PREFIX "%08" PRIx32, number);
    gd_volume_file_name(volume, base, name);
}

gd_status
gd_volume_draw_new_name(const gd_env *env, const char *volume,
                        char name[GD_NAME_SIZE], gd_error *err)
{
    uint64_t number;
    char base[32];
    GD_TRY(gd_random(env, &number, sizeof number, err));
    snprintf(base, sizeof base, GD_VOLUME_NEW ".%016" PRIx64, number);
    gd_volume_file_name(volume, base, name);
    return GD_OK;
}

bool
gd_volume_journal_parse(const char *base, uint32_t *number)
{
    size_t prefix = strlen(JOURNAL_PREFIX);
    return strncmp(base, JOURNAL_PREFIX, prefix) == 0 &&
           gd_names_parse_hex(base + prefix, number) && *number >= 1;
}

void
gd_volume_id_prefix(const uint8_t volume_id[GD_ID_SIZE],
                    char id[GD_IMAGE_ID_MAX + 1])
{
    int n = snprintf(id, GD_IMAGE_ID_MAX + 1, "v_");
    for (int i = 0; i < GD_ID_SIZE; i++) {
        n += snprintf(id + n, GD_IMAGE_ID_MAX + 1 - (size_t)n, "%02x",
                      volume_id[i]);
    }
    snprintf(id + n, GD_IMAGE_ID_MAX + 1 - (size_t)n, "_");
}

void
gd_volume_edition_id(const uint8_t volume_id[GD_ID_SIZE], uint64_t part,
                     uint64_t edition, char id[GD_IMAGE_ID_MAX + 1])
{
    gd_volume_id_prefix(volume_id, id);
    size_t n = strlen(id);
    snprintf(id + n, GD_IMAGE_ID_MAX + 1 - n, "%" PRIu64 "_%" PRIu64, part,
             edition);
}

void
gd_volume_base_id(const uint8_t volume_id[GD_ID_SIZE],
                  char id[GD_IMAGE_ID_MAX + 1])
{
    gd_volume_id_prefix(volume_id, id);
    size_t n = strlen(id);
    snprintf(id + n, GD_IMAGE_ID_MAX + 1 - n, "base_0");
}

bool
gd_volume_is_recipe(const char *image_id)
{
    return strncmp(image_id, "v_", 2) == 0 &&
           strspn(image_id + 2, "0123456789abcdef") == 2 * GD_ID_SIZE &&
           image_id[2 + 2 * GD_ID_SIZE] == '_';
}
