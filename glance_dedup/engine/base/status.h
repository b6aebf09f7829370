/* SPDX-License-Identifier: Apache-2.0 */
/*
 * status.h - what a call of the engine can come to, and the words for it.
 *
 * Every fallible function returns a gd_status.  On failure it also writes one
 * sentence into its gd_error: what happened, to which image or file, and the
 * offset if there is one.  There is no global state: a gd_error belongs to its
 * caller, and to one thread at a time.  A caller that wants no sentence passes
 * NULL, so a function that reads its error takes one of its own then.
 */
#ifndef GD_STATUS_H
#define GD_STATUS_H

#include <stddef.h>

/* The binding's table in binding/common.c maps each of these to an exception.
 * A value is never reused for another meaning. */
typedef enum gd_status {
    GD_OK = 0,
    GD_IO = 1,        /* a system call failed, with errno in the error; without
                       * an errno, memory failed */
    GD_CORRUPT = 2,   /* a file does not match its checksums and ids */
    GD_NOSPACE = 3,   /* ENOSPC, EDQUOT or EFBIG: the disk or quota is full */
    GD_NOTFOUND = 4,  /* no such image, group or file */
    GD_EXISTS = 5,    /* the image id is taken (Duplicate) */
    GD_BUSY = 6,      /* a lock was not granted within its time limit */
    GD_VERSION = 7,   /* a newer major format version */
    GD_INVALID = 8,   /* an argument is out of its bounds */
    GD_NOMEM = 9,     /* an allocation failed */
    GD_DENIED = 10,   /* EACCES, EPERM or EROFS */
    GD_CLOSED = 11,   /* the handle is closed, or was inherited by fork */
    GD_UNAVAILABLE = 12, /* an object store does not give an object now: it is
                          * neither lost nor damaged, as far as is known */
} gd_status;

#define GD_ERROR_TEXT 1024

typedef struct gd_error {
    gd_status status;
    int sys_errno; /* 0 if no system call failed */
    char text[GD_ERROR_TEXT];
} gd_error;

/* Fill *err (which may be NULL) and return status. */
gd_status gd_fail(gd_error *err, gd_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The same for a failed system call.  Chooses the status by errno (ENOSPC,
 * EACCES, ENOENT, ... have their own) and appends the system's message. */
gd_status gd_fail_errno(gd_error *err, int sys_errno, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Ends a function with the status of `call` if that is not GD_OK.  Only for a
 * function that has nothing to release at this point. */
#define GD_TRY(call)                                                          \
    do {                                                                      \
        gd_status gd_try_status = (call);                                     \
        if (gd_try_status != GD_OK) {                                         \
            return gd_try_status;                                             \
        }                                                                     \
    } while (0)

/* A short lower-case name, for logs and tests. */
const char *gd_status_name(gd_status status);

#endif
