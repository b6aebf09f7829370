/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fields.c - see fields.h.
 */
#include "engine/format/fields.h"

#include "engine/base/zero.h"

enum {
    MAGIC = 8, /* bytes; the major version follows */
    CHECKSUM = 8,
};

void
gd_fields_begin(const gd_sealed *sealed, uint8_t *out)
{
    memset(out, 0, sealed->size);
    memcpy(out, sealed->magic, MAGIC);
    gd_put16(out + MAGIC, sealed->major);
}

uint64_t
gd_fields_seal(const gd_sealed *sealed, uint64_t seed, uint8_t *out)
{
    size_t checked = sealed->size - CHECKSUM;
    uint64_t checksum = gd_checksum(out, checked, seed);
    gd_put64(out + checked, checksum);
    return checksum;
}

bool
gd_fields_verify(const gd_sealed *sealed, uint64_t seed,
                 const uint8_t *in)
{
    size_t checked = sealed->size - CHECKSUM;
    return (sealed->magic == NULL ||
            memcmp(in, sealed->magic, MAGIC) == 0) &&
           gd_get64(in + checked) == gd_checksum(in, checked, seed);
}

gd_status
gd_fields_check(const gd_sealed *sealed, const uint8_t *in,
                const char *name, gd_error *err)
{
    if (memcmp(in, sealed->magic, MAGIC) != 0) {
        return gd_fail(err, GD_CORRUPT, "%s is not a %s: no magic at offset 0",
                       name, sealed->name);
    }
    if (gd_get16(in + MAGIC) > sealed->major) {
        return gd_fail(err, GD_VERSION,
                       "%s has format version %u; this program knows up to %u",
                       name, gd_get16(in + MAGIC), sealed->major);
    }
    return gd_fields_verify(sealed, 0, in)
               ? GD_OK
               : gd_fail(err, GD_CORRUPT,
                         "%s: the header's checksum is wrong (offset 0)", name);
}

bool
gd_fields_get_text(const uint8_t *in, size_t size, char *out)
{
    memcpy(out, in, size);
    out[size] = '\0';
    size_t length = strlen(out);
    return gd_is_zero(in + length, size - length);
}
