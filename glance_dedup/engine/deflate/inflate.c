/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inflate.c - see inflate.h. All decoders of deflate give the same bytes, so
 * this one is zlib's.
 */
#include "engine/deflate/inflate.h"

#include <zlib.h>

gd_status
gd_inflate(bool has_header, const uint8_t *stream, size_t length,
           uint8_t *plain, size_t room, gd_inflate_result *result,
           gd_error *err)
{
    *result = (gd_inflate_result){false, 0, 0};
    if (length > UINT32_MAX || room > UINT32_MAX) {
        return gd_fail(err, GD_INVALID, "%zu bytes of deflate are too many",
                       length > room ? length : room);
    }
    z_stream z = {.next_in = (uint8_t *)(uintptr_t)stream,
                  .avail_in = (uInt)length,
                  .next_out = plain,
                  .avail_out = (uInt)room};
    if (inflateInit2(&z, has_header ? MAX_WBITS : -MAX_WBITS) != Z_OK) {
        return gd_fail(err, GD_NOMEM, "no memory for inflating");
    }
    result->complete = inflate(&z, Z_FINISH) == Z_STREAM_END;
    result->read = length - z.avail_in;
    result->written = room - z.avail_out;
    inflateEnd(&z);
    return GD_OK;
}
