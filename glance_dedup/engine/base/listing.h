/* SPDX-License-Identifier: Apache-2.0 */
/*
 * listing.h - items made of the names in a directory, as a sorted array.
 */
#ifndef GD_LISTING_H
#define GD_LISTING_H

#include <stddef.h>

#include "engine/base/env.h"
#include "engine/base/status.h"

typedef struct gd_listing {
    size_t size;      /* bytes of an item */
    const char *what; /* in the message if memory runs out */
    /* Makes the item, which is zeros, of a name; false leaves the name out. */
    bool (*parse)(const char *name, void *item);
    int (*compare)(const void *a, const void *b); /* the order; NULL: none */
} gd_listing;

/* Lists a directory.  The caller releases the items; there are none after an
 * error. */
gd_status gd_list(const gd_env *env, int root, const char *directory,
                  const gd_listing *listing, void **items, size_t *count,
                  gd_error *err);

#endif
