/* SPDX-License-Identifier: Apache-2.0 */
/*
 * listing.c - see listing.h.
 */
#include "engine/base/listing.h"

#include <stdlib.h>

#include "engine/base/array.h"

typedef struct collector {
    const gd_env *env;
    const gd_listing *listing;
    uint8_t *items;
    size_t count, room;
    bool failed;
} collector;

static void
note(void *arg, const char *name)
{
    collector *c = arg;
    if (c->failed) {
        return;
    }
    uint8_t *items = gd_array_reserve(c->env, c->items, &c->room, c->count + 1,
                                      c->listing->size, NULL);
    if (items == NULL) {
        c->failed = true;
        return;
    }
    c->items = items;
    c->count += c->listing->parse(name, items + c->count * c->listing->size);
}

gd_status
gd_list(const gd_env *env, int root, const char *directory,
        const gd_listing *listing, void **items, size_t *count, gd_error *err)
{
    collector c = {.env = env, .listing = listing};
    gd_status s = GD_OK;
    int rc = env->list(env, root, directory, note, &c);
    if (rc < 0) {
        s = gd_fail_errno(err, -rc, "cannot list %s", directory);
    } else if (c.failed) {
        s = gd_fail(err, GD_NOMEM, "no memory for %s", listing->what);
    }
    if (s != GD_OK) {
        env->release(env, c.items);
        c = (collector){.count = 0};
    } else if (c.count > 0 && listing->compare != NULL) {
        qsort(c.items, c.count, listing->size, listing->compare);
    }
    *items = c.items;
    *count = c.count;
    return s;
}
