/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipedisk.c - see recipedisk.h.
 */
#include "engine/format/recipedisk.h"

#include "engine/format/fields.h"

#define DISK_FIELDS(F)                                                        \
    F(NUMBER, 500, 8, plain_size)                                             \
    F(NUMBER, 508, 8, size)                                                   \
    F(NUMBER, 516, 8, derived)                                                \
    F(NUMBER, 524, 8, derived_bytes)                                          \
    F(NUMBER, 532, 1, format)                                                 \
    F(NUMBER, 533, 1, flags)                                                  \
    F(NUMBER, 534, 2, encoders)
#define ENCODER_FIELDS(F)                                                     \
    F(NUMBER, 0, 1, id)                                                       \
    F(NUMBER, 1, 1, level)                                                    \
    F(NUMBER, 2, 1, window_bits)                                              \
    F(NUMBER, 3, 1, memory_level)                                             \
    F(NUMBER, 4, 1, strategy)                                                 \
    F(NUMBER, 5, 1, header)                                                   \
    F(NUMBER, 6, 2, reserved)

enum {
    ENCODERS_AT = 536,
    ENCODER_SIZE = 8,
    SECTOR = 512,
    FORMATS = 5,
};

static const uint64_t max_disk = (uint64_t)1 << 62;

static void
encode_encoder(const gd_recipe_encoder *value, uint8_t *out)
{
    ENCODER_FIELDS(GD_ENCODE)
}

static void
decode_encoder(const uint8_t *in, gd_recipe_encoder *value)
{
    ENCODER_FIELDS(GD_DECODE)
}

void
gd_recipe_disk_encode(const gd_recipe_disk *value, uint8_t *out)
{
    DISK_FIELDS(GD_ENCODE)
    for (unsigned i = 0; i < GD_RECIPE_ENCODERS; i++) {
        encode_encoder(&value->encoder[i], out + ENCODERS_AT + i * ENCODER_SIZE);
    }
}

void
gd_recipe_disk_decode(const uint8_t *in, gd_recipe_disk *value)
{
    DISK_FIELDS(GD_DECODE)
    for (unsigned i = 0; i < GD_RECIPE_ENCODERS; i++) {
        decode_encoder(in + ENCODERS_AT + i * ENCODER_SIZE,
                       &value->encoder[i]);
    }
}

void
gd_recipe_disk_params(const gd_recipe_disk *disk, unsigned number,
                      gd_deflate_params *params)
{
    const gd_recipe_encoder *encoder = &disk->encoder[number - 1];
    *params = (gd_deflate_params){.level = encoder->level,
                                  .window_bits = encoder->window_bits,
                                  .memory_level = encoder->memory_level,
                                  .strategy = encoder->strategy,
                                  .has_header = encoder->header != 0};
}

static bool
is_encoder(const gd_recipe_disk *disk, unsigned number)
{
    gd_deflate_params params;
    const gd_recipe_encoder *encoder = &disk->encoder[number - 1];
    gd_recipe_disk_params(disk, number, &params);
    return encoder->id == GD_RECIPE_ZLIB && encoder->header <= 1 &&
           encoder->reserved == 0 &&
           gd_deflate_require_params(&params, NULL) == GD_OK;
}

static bool
are_encoders(const gd_recipe_disk *disk)
{
    static const gd_recipe_encoder none;
    unsigned number = 1;
    if (disk->encoders > GD_RECIPE_ENCODERS) {
        return false;
    }
    while (number <= disk->encoders && is_encoder(disk, number)) {
        number++;
    }
    if (number <= disk->encoders) {
        return false;
    }
    while (number <= GD_RECIPE_ENCODERS &&
           memcmp(&disk->encoder[number - 1], &none, sizeof none) == 0) {
        number++;
    }
    return number > GD_RECIPE_ENCODERS;
}

bool
gd_recipe_disk_is_valid(const gd_recipe_disk *disk, uint64_t size)
{
    if (disk->size < SECTOR || disk->size > max_disk ||
        disk->size % SECTOR != 0 || disk->plain_size > INT64_MAX) {
        return false;
    }
    uint64_t rest = (disk->size + GD_RECIPE_REST_ALIGN - 1) /
                    GD_RECIPE_REST_ALIGN * GD_RECIPE_REST_ALIGN;
    return disk->plain_size >= rest && disk->derived >= 1 &&
           disk->derived <= size && disk->derived_bytes <= size &&
           disk->format >= 1 && disk->format <= FORMATS &&
           disk->flags <= GD_RECIPE_PROVEN && are_encoders(disk);
}
