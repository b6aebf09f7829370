/* SPDX-License-Identifier: Apache-2.0 */
/*
 * status.c - see status.h.
 */
#include "engine/base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* The text may be completed by the caller. */
static void
set(gd_error *err, gd_status status, int sys_errno, const char *format,
    va_list args)
{
    if (err != NULL) {
        vsnprintf(err->text, sizeof err->text, format, args);
        err->status = status;
        err->sys_errno = sys_errno;
    }
}

gd_status
gd_fail(gd_error *err, gd_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    set(err, status, 0, format, args);
    va_end(args);
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
    va_list args;
    va_start(args, format);
    set(err, status, sys_errno, format, args);
    va_end(args);
    if (err != NULL) {
        size_t used = strlen(err->text);
        char words[128];
        /* The GNU variant: thread-safe; may return a static string. */
        const char *why = strerror_r(sys_errno, words, sizeof words);
        snprintf(err->text + used, sizeof err->text - used, ": %s", why);
    }
    return status;
}

const char *
gd_status_name(gd_status status)
{
    static const char *const names[] = {
        [GD_OK] = "ok",
        [GD_IO] = "io",
        [GD_CORRUPT] = "corrupt",
        [GD_NOSPACE] = "nospace",
        [GD_NOTFOUND] = "notfound",
        [GD_EXISTS] = "exists",
        [GD_BUSY] = "busy",
        [GD_VERSION] = "version",
        [GD_INVALID] = "invalid",
        [GD_NOMEM] = "nomem",
        [GD_DENIED] = "denied",
        [GD_CLOSED] = "closed",
        [GD_UNAVAILABLE] = "unavailable",
    };
    return (size_t)status < sizeof names / sizeof *names ? names[status]
                                                         : "unknown";
}
