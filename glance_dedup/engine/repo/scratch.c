/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scratch.c - see scratch.h.
 */
#include "engine/repo/scratch.h"

void
gd_scratch_list_init(gd_scratch_list *list, const gd_env *env, unsigned most)
{
    *list = (gd_scratch_list){.env = env, .most = most};
    pthread_mutex_init(&list->mutex, NULL);
}

static void
destroy(const gd_env *env, gd_scratch *scratch)
{
    gd_coder_close(env, scratch->coder);
    env->release(env, scratch->plain);
    env->release(env, scratch->in);
    env->release(env, scratch);
}

void
gd_scratch_list_free(gd_scratch_list *list)
{
    while (list->free != NULL) {
        gd_scratch *scratch = list->free;
        list->free = scratch->next;
        destroy(list->env, scratch);
    }
    pthread_mutex_destroy(&list->mutex);
}

static gd_status
make(const gd_env *env, gd_scratch **out, gd_error *err)
{
    gd_scratch *scratch = gd_calloc(env, 1, sizeof *scratch, err);
    if (scratch == NULL) {
        return GD_NOMEM;
    }
    scratch->plain = gd_alloc(env, GD_SEGMENT_MAX, err);
    scratch->in =
        gd_alloc(env, GD_READ_ONCE + GD_SEGMENT_HEADER + GD_SEGMENT_MAX, err);
    gd_status s = scratch->plain == NULL || scratch->in == NULL
                      ? GD_NOMEM
                      : gd_coder_open(env, &scratch->coder, err);
    if (s != GD_OK) {
        destroy(env, scratch);
        return s;
    }
    *out = scratch;
    return GD_OK;
}

gd_status
gd_scratch_lend(gd_scratch_list *list, gd_scratch **out, gd_error *err)
{
    pthread_mutex_lock(&list->mutex);
    gd_scratch *scratch = list->free;
    if (scratch != NULL) {
        list->free = scratch->next;
        list->count--;
    }
    pthread_mutex_unlock(&list->mutex);
    *out = scratch;
    return scratch != NULL ? GD_OK : make(list->env, out, err);
}

void
gd_scratch_return(gd_scratch_list *list, gd_scratch *scratch)
{
    if (scratch == NULL) {
        return;
    }
    pthread_mutex_lock(&list->mutex);
    bool keeps = list->count < list->most;
    if (keeps) {
        scratch->next = list->free;
        list->free = scratch;
        list->count++;
    }
    pthread_mutex_unlock(&list->mutex);
    if (!keeps) {
        destroy(list->env, scratch);
    }
}
