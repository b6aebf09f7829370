/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rewriting.c - glance_dedup._engine.Rewriting: compresses a group again, or
 * makes it cold, under its lease until the exchange; note_codec, and
 * codec_mark.
 *
 * A part (part.c).  After `step` fails, only `close` may be called.
 */
#include "binding/binding.h"

#include "engine/maintenance/grouprewrite.h"

typedef struct rewriting_object {
    part_object part;
    gd_leased_group *leased;
    gd_owned_group *owned; /* NULL until the exchange is tried */
    gd_group_rewrite *rewriting;
    gd_packing packing;
    int cools; /* the group becomes cold, and keeps its segments */
    int complete;
} rewriting_object;

static void
release_rewriting(part_object *part)
{
    rewriting_object *self = (rewriting_object *)part;
    gd_group_rewrite_close(self->rewriting);
    if (self->owned != NULL) {
        gd_owned_group_close(self->owned);
    } else {
        gd_leased_group_close(self->leased);
    }
}

/* If a transaction names blocks of the group now, it may do so for long.  Then
 * the compression would be in vain. */
static gd_status
look_for_users(gd_repo *repo, uint32_t number, gd_error *err)
{
    gd_status s = gd_locks_lock_exclusive(repo->locks, number, err);
    if (s == GD_BUSY) {
        return gd_fail(err, s, "a transaction names blocks of group %08x",
                       (unsigned)number);
    }
    if (s == GD_OK) {
        gd_locks_unlock_exclusive(repo->locks, number);
    }
    return s;
}

/* A helper may change no file in place, as the partial opening does (I4). */
static gd_status
begin(const maintenance_object *maintenance, uint32_t number,
      rewriting_object *self, gd_error *err)
{
    gd_repo *repo = maintenance->owner->repo;
    gd_status s = maintenance->lock_fd >= 0
                      ? gd_leased_group_open_partial(repo, number,
                                                     &self->leased, err)
                      : gd_leased_group_open(repo, number, &self->leased, err);
    if (s != GD_OK) {
        return s;
    }
    s = look_for_users(repo, number, err);
    if (s == GD_OK) {
        s = gd_group_rewrite_open(self->leased,
                                  self->cools ? NULL : &self->packing,
                                  self->cools != 0,
                                  &self->rewriting, err);
    }
    if (s != GD_OK) {
        gd_leased_group_close(self->leased);
    }
    return s;
}

/* Parses a group's number, a codec, a level, and whether blocks are ordered by
 * similarity. */
static int
parse_recompression(PyObject *object, PyObject *args, uint32_t *number,
                    gd_packing *packing)
{
    const char *name;
    int similar = 0;
    gd_error err;
    if (!PyArg_ParseTuple(args, "O&si|p", gd_py_to_u32, number, &name,
                          &packing->level, &similar)) {
        return 0;
    }
    packing->similar = similar != 0;
    gd_status s = gd_py_parse_codec(name, packing->level, &packing->codec,
                                    &err);
    if (s == GD_OK && (*number == 0 || *number > GD_MAX_GROUP)) {
        s = gd_fail(&err, GD_INVALID, "no group has the number %u", *number);
    }
    if (s != GD_OK) {
        gd_py_raise(object, &err);
    }
    return s == GD_OK;
}

/* packing is NULL if the group becomes cold. */
static PyObject *
begin_part(PyObject *object, uint32_t number, const gd_packing *packing)
{
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    gd_py_call call;
    part_object *part =
        gd_py_begin_part(object, state->rewriting_type, 0, &call);
    if (part == NULL) {
        return NULL;
    }
    rewriting_object *self = (rewriting_object *)part;
    self->cools = packing == NULL;
    if (packing != NULL) {
        self->packing = *packing;
    }
    gd_status s = begin(part->maintenance, number, self, &call.err);
    return gd_py_end_part(part, s, release_rewriting, &call);
}

PyObject *
gd_py_begin_rewriting(PyObject *object, PyObject *args)
{
    uint32_t number;
    gd_packing packing = {0};
    return parse_recompression(object, args, &number, &packing)
               ? begin_part(object, number, &packing)
               : NULL;
}

/* begin_cooling(number) */
PyObject *
gd_py_begin_cooling(PyObject *object, PyObject *args)
{
    uint32_t number;
    return PyArg_ParseTuple(args, "O&", gd_py_to_u32, &number)
               ? begin_part(object, number, NULL)
               : NULL;
}

static PyObject *
rewriting_check(PyObject *object, PyObject *Py_UNUSED(unused))
{
    rewriting_object *self = (rewriting_object *)object;
    gd_py_call call;
    if (!gd_py_call_part(object, 0, &call)) {
        return NULL;
    }
    return gd_py_end_none(
        &call, gd_group_rewrite_require_room(self->rewriting, &call.err));
}

static PyObject *
rewriting_step(PyObject *object, PyObject *Py_UNUSED(unused))
{
    rewriting_object *self = (rewriting_object *)object;
    bool done = false;
    uint64_t cost = 0;
    gd_py_call call;
    if (!gd_py_call_part(object, 0, &call)) {
        return NULL;
    }
    gd_status s =
        gd_group_rewrite_step(self->rewriting, &done, &cost, &call.err);
    self->complete = done;
    return gd_py_end(&call, s)
               ? Py_BuildValue("(NK)", PyBool_FromLong(done),
                               (unsigned long long)cost)
               : NULL;
}

/* Begins a call if the new file is complete; else returns 0 with an exception
 * set. */
static int
call_complete(rewriting_object *self, int locked, gd_py_call *call)
{
    if (!gd_py_call_part((PyObject *)self, locked, call)) {
        return 0;
    }
    if (!self->complete) {
        gd_py_end(call, gd_fail(&call->err, GD_INVALID,
                                "the new file is not complete"));
        return 0;
    }
    return 1;
}

static PyObject *
rewriting_sizes(PyObject *object, PyObject *Py_UNUSED(unused))
{
    rewriting_object *self = (rewriting_object *)object;
    uint64_t before = 0, after = 0;
    gd_py_call call;
    if (!call_complete(self, 0, &call)) {
        return NULL;
    }
    gd_status s =
        gd_group_rewrite_sizes(self->rewriting, &before, &after, &call.err);
    return gd_py_end_two(&call, s, before, after);
}

static PyObject *
rewriting_get_object(PyObject *object, PyObject *Py_UNUSED(unused))
{
    rewriting_object *self = (rewriting_object *)object;
    gd_object found;
    const char *path = NULL;
    gd_py_call call;
    if (!call_complete(self, 0, &call)) {
        return NULL;
    }
    gd_status s = gd_group_rewrite_object(self->rewriting, &found, &path,
                                          &call.err);
    return gd_py_end(&call, s)
               ? Py_BuildValue("(y#Ks)", (const char *)found.id,
                               (Py_ssize_t)sizeof found.id,
                               (unsigned long long)found.length, path)
               : NULL;
}

static PyObject *
rewriting_cut(PyObject *object, PyObject *Py_UNUSED(unused))
{
    rewriting_object *self = (rewriting_object *)object;
    gd_py_call call;
    if (!call_complete(self, 0, &call)) {
        return NULL;
    }
    return gd_py_end_none(&call,
                          gd_group_rewrite_cut(self->rewriting, &call.err));
}

/* GD_BUSY means that it may be tried again. */
static gd_status
exchange(rewriting_object *self, gd_error *err)
{
    gd_status s = self->owned != NULL
                      ? GD_OK
                      : gd_owned_group_lock(self->leased, &self->owned,
                                            err);
    return s == GD_OK ? gd_group_rewrite_exchange(self->rewriting, self->owned,
                                                  err)
                      : s;
}

static PyObject *
rewriting_exchange(PyObject *object, PyObject *Py_UNUSED(unused))
{
    rewriting_object *self = (rewriting_object *)object;
    gd_py_call call;
    if (!call_complete(self, 0, &call)) {
        return NULL;
    }
    gd_status s = exchange(self, &call.err);
    self->complete = s == GD_BUSY; /* else it cannot be used again */
    return gd_py_end_none(&call, s);
}

static PyObject *
rewriting_keep_old(PyObject *object, PyObject *Py_UNUSED(unused))
{
    rewriting_object *self = (rewriting_object *)object;
    gd_py_call call;
    if (!call_complete(self, 1, &call)) {
        return NULL;
    }
    gd_status s = gd_leased_group_note_codec(self->leased, &self->packing,
                                             &call.err);
    self->complete = 0;
    return gd_py_end_none(&call, s);
}

static gd_status
note_codec(gd_repo *repo, uint32_t number, const gd_packing *packing,
           gd_error *err)
{
    gd_leased_group *leased;
    gd_status s = gd_leased_group_open(repo, number, &leased, err);
    if (s == GD_OK) {
        s = gd_leased_group_note_codec(leased, packing, err);
        gd_leased_group_close(leased);
    }
    return s;
}

PyObject *
gd_py_note_codec(PyObject *object, PyObject *args)
{
    uint32_t number;
    gd_packing packing = {0};
    gd_py_call call;
    if (!parse_recompression(object, args, &number, &packing) ||
        !gd_py_call_maintenance(object, 1, &call)) {
        return NULL;
    }
    gd_repo *repo = ((maintenance_object *)object)->owner->repo;
    return gd_py_end_none(&call,
                          note_codec(repo, number, &packing, &call.err));
}

static uint64_t
number_of(const part_object *part)
{
    return ((const rewriting_object *)part)->leased->group->number;
}

static uint64_t
slots_of(const part_object *part)
{
    return ((const rewriting_object *)part)->leased->group->bounds.slots;
}

static uint64_t
done_of(const part_object *part)
{
    return gd_group_rewrite_slots(((const rewriting_object *)part)->rewriting);
}

static PyObject *
engine_codec_mark(PyObject *module, PyObject *args)
{
    const char *name;
    int level, similar = 0;
    gd_codec codec;
    gd_error err;
    if (!PyArg_ParseTuple(args, "si|p", &name, &level, &similar)) {
        return NULL;
    }
    if (gd_py_parse_codec(name, level, &codec, &err) != GD_OK) {
        return gd_py_raise_in(PyModule_GetState(module), &err);
    }
    return Py_BuildValue("(iiN)", (int)codec,
                         gd_codec_real_level(codec, level),
                         PyBool_FromLong(similar));
}

PyMethodDef gd_py_rewriting_functions[] = {
    {"codec_mark", engine_codec_mark, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef rewriting_methods[] = {
    {"check", rewriting_check, METH_NOARGS, NULL},
    {"step", rewriting_step, METH_NOARGS, NULL},
    {"sizes", rewriting_sizes, METH_NOARGS, NULL},
    {"object", rewriting_get_object, METH_NOARGS, NULL},
    {"cut", rewriting_cut, METH_NOARGS, NULL},
    {"exchange", rewriting_exchange, METH_NOARGS, NULL},
    {"keep_old", rewriting_keep_old, METH_NOARGS, NULL},
    {"close", gd_py_part_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef rewriting_attributes[] = {
    {"number", gd_py_part_fact, NULL, NULL, &(gd_py_fact){number_of}},
    {"slots", gd_py_part_fact, NULL, NULL, &(gd_py_fact){slots_of}},
    {"done", gd_py_part_fact, NULL, NULL, &(gd_py_fact){done_of}},
    {NULL, NULL, NULL, NULL, NULL},
};

const gd_py_type gd_py_rewriting_type = {
    .name = "glance_dedup._engine.Rewriting",
    .size = sizeof(rewriting_object),
    .dealloc = gd_py_part_dealloc,
    .methods = rewriting_methods,
    .attributes = rewriting_attributes,
};
