/* SPDX-License-Identifier: Apache-2.0 */
/*
 * status.c - see status.h.
 */
#include "engine/base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void
format_text(gd_error *err, const char *format, va_list args)
{
    vsnprintf(err->text, sizeof err->text, format, args);
}

gd_status
gd_fail(gd_error *err, gd_status status, const char *format, ...)
{
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        format_text(err, format, args);
        va_end(args);
        err->status = status;
        err->sys_errno = 0;
    }
    return status;
}

static gd_status
status_of_errno(int sys_errno)
{
    switch (sys_errno) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return GD_NOSPACE;
    case EACCES:
    case EPERM:
    case EROFS:
        return GD_DENIED;
    case ENOENT:
        return GD_NOTFOUND;
    case EEXIST:
        return GD_EXISTS;
    case ENOMEM:
        return GD_NOMEM;
    default:
        return GD_IO;
    }
}

gd_status
gd_fail_errno(gd_error *err, int sys_errno, const char *format, ...)
{
    gd_status status = status_of_errno(sys_errno);
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        format_text(err, format, args);
        va_end(args);
        size_t used = strlen(err->text);
        char words[128];
        /* The GNU variant: thread-safe; may return a static string. */
        const char *why = strerror_r(sys_errno, words, sizeof words);
        snprintf(err->text + used, sizeof err->text - used, ": %s", why);
        err->status = status;
        err->sys_errno = sys_errno;
    }
    return status;
}

const char *
gd_status_name(gd_status status)
{
    switch (status) {
    case GD_OK:
        return "ok";
    case GD_IO:
        return "io";
    case GD_CORRUPT:
        return "corrupt";
    case GD_NOSPACE:
        return "nospace";
    case GD_NOTFOUND:
        return "notfound";
    case GD_EXISTS:
        return "exists";
    case GD_BUSY:
        return "busy";
    case GD_VERSION:
        return "version";
    case GD_INVALID:
        return "invalid";
    case GD_NOMEM:
        return "nomem";
    case GD_DENIED:
        return "denied";
    case GD_CLOSED:
        return "closed";
    }
    return "unknown";
}
