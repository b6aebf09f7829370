/* SPDX-License-Identifier: Apache-2.0 */
/*
 * merge.c - glance_dedup._engine: Merge and Relocation.
 */
#include "binding/binding.h"

#include "engine/format/pairs.h"
#include "engine/maintenance/blockcopy.h"
#include "engine/maintenance/merge.h"

/* ---- Merge ---- */

typedef struct merge_object {
    part_object part;
    gd_merge *merge;
} merge_object;

static void
release_merge(part_object *part)
{
    gd_merge_close(((merge_object *)part)->merge);
}

static PyObject *
open_merge(PyTypeObject *type, PyObject *maintenance, const char *image_id,
           const Py_buffer *mapping)
{
    gd_mapping pairs = {mapping->buf, (size_t)mapping->len / GD_PAIR_SIZE};
    gd_py_call call;
    part_object *part = gd_py_begin_part(maintenance, type, 1, &call);
    if (part == NULL) {
        return NULL;
    }
    gd_status s = gd_merge_open(part->maintenance->owner->repo, image_id, pairs,
                                &((merge_object *)part)->merge, &call.err);
    return gd_py_end_part(part, s, release_merge, &call);
}

static PyObject *
merge_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"maintenance", "image_id", "mapping", NULL};
    const module_state *state = PyType_GetModuleState(type);
    PyObject *maintenance, *self = NULL;
    const char *image_id;
    Py_buffer mapping;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!sy*", names,
                                     state->maintenance_type, &maintenance,
                                     &image_id, &mapping)) {
        return NULL;
    }
    if (mapping.len % GD_PAIR_SIZE != 0) {
        PyErr_SetString(PyExc_ValueError,
                        "the mapping is not a whole number of pairs");
    } else {
        self = open_merge(type, maintenance, image_id, &mapping);
    }
    PyBuffer_Release(&mapping);
    return self;
}

/* Begins a call if there is an M; else returns 0 with an exception set. */
static int
call_merged(merge_object *self, gd_py_call *call)
{
    if (!gd_py_call_part((PyObject *)self, 1, call)) {
        return 0;
    }
    if (gd_merge_recipe(self->merge) == NULL) {
        gd_py_end(call, gd_fail(&call->err, GD_INVALID,
                                "nothing was merged: there is no recipe"));
        return 0;
    }
    return 1;
}

static PyObject *
merge_header(PyObject *object, PyObject *Py_UNUSED(unused))
{
    merge_object *self = (merge_object *)object;
    gd_py_call call;
    if (!call_merged(self, &call)) {
        return NULL;
    }
    gd_recipe_header header = gd_merge_recipe(self->merge)->header;
    return gd_py_end(&call, GD_OK) ? gd_py_whole_header_dict(&header) : NULL;
}

static PyObject *
merge_exchange(PyObject *object, PyObject *Py_UNUSED(unused))
{
    merge_object *self = (merge_object *)object;
    bool done = false;
    gd_py_call call;
    if (!call_merged(self, &call)) {
        return NULL;
    }
    gd_status s = gd_merge_exchange(self->merge, &done, &call.err);
    return gd_py_end_bool(&call, s, done);
}

static const gd_merge_facts *
facts_of(const part_object *part)
{
    return gd_merge_facts_of(((const merge_object *)part)->merge);
}

static uint64_t
replaced_of(const part_object *part)
{
    return facts_of(part)->replaced;
}

static uint64_t
replaced_bytes_of(const part_object *part)
{
    return facts_of(part)->replaced_bytes;
}

static PyObject *
merge_collisions(PyObject *object, void *Py_UNUSED(unused))
{
    merge_object *self = (merge_object *)object;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    const gd_merge_facts *facts = facts_of(&self->part);
    uint8_t *out;
    PyObject *result =
        gd_py_new_bytes(facts->collision_count * GD_ADDRESS_SIZE, &out);
    for (size_t i = 0; result != NULL && i < facts->collision_count; i++) {
        gd_put64(out + i * GD_ADDRESS_SIZE, facts->collisions[i]);
    }
    gd_py_leave_maintenance(self->part.maintenance);
    return result;
}

static PyObject *
merge_name(PyObject *object, void *Py_UNUSED(unused))
{
    merge_object *self = (merge_object *)object;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    const gd_recipe *recipe = gd_merge_recipe(self->merge);
    PyObject *result = PyUnicode_FromString(recipe == NULL ? "" : recipe->name);
    gd_py_leave_maintenance(self->part.maintenance);
    return result;
}

static PyMethodDef merge_methods[] = {
    {"header", merge_header, METH_NOARGS, NULL},
    {"exchange", merge_exchange, METH_NOARGS, NULL},
    {"close", gd_py_part_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef merge_attributes[] = {
    {"replaced", gd_py_part_fact, NULL, NULL, &(gd_py_fact){replaced_of}},
    {"replaced_bytes", gd_py_part_fact, NULL, NULL,
     &(gd_py_fact){replaced_bytes_of}},
    {"collisions", merge_collisions, NULL, NULL, NULL},
    {"name", merge_name, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

const gd_py_type gd_py_merge_type = {
    .name = "glance_dedup._engine.Merge",
    .size = sizeof(merge_object),
    .make = merge_new,
    .dealloc = gd_py_part_dealloc,
    .methods = merge_methods,
    .attributes = merge_attributes,
};

/* ---- Relocation ---- */

typedef struct relocation_object {
    part_object part;
    gd_block_copy *relocation;
} relocation_object;

static void
release_relocation(part_object *part)
{
    gd_block_copy_close(((relocation_object *)part)->relocation);
}

static PyObject *
relocation_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"maintenance", "repository", NULL};
    const module_state *state = PyType_GetModuleState(type);
    PyObject *maintenance, *repository;
    gd_py_call call;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!", names,
                                     state->maintenance_type, &maintenance,
                                     state->repository_type, &repository)) {
        return NULL;
    }
    if (repository !=
        (PyObject *)((maintenance_object *)maintenance)->owner) {
        PyErr_SetString(PyExc_ValueError,
                        "the maintenance is of another repository handle");
        return NULL;
    }
    part_object *part = gd_py_begin_part(maintenance, type, 1, &call);
    if (part == NULL) {
        return NULL;
    }
    gd_status s =
        gd_block_copy_open(part->maintenance->owner->repo,
                           &((relocation_object *)part)->relocation, &call.err);
    return gd_py_end_part(part, s, release_relocation, &call);
}

static PyObject *
relocation_add(PyObject *object, PyObject *args)
{
    relocation_object *self = (relocation_object *)object;
    Py_buffer view;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*", &view)) {
        return NULL;
    }
    if (view.len % GD_ADDRESS_SIZE != 0) {
        PyErr_SetString(PyExc_ValueError, "an address has 8 bytes");
    } else if (gd_py_call_part(object, 1, &call)) {
        gd_status s = gd_block_copy_add(self->relocation, view.buf,
                                        (size_t)view.len / GD_ADDRESS_SIZE,
                                        &call.err);
        result = gd_py_end_none(&call, s);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyObject *
relocation_add_equal(PyObject *object, PyObject *args)
{
    relocation_object *self = (relocation_object *)object;
    unsigned long long old, from;
    int nodedup;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "KKp", &old, &from, &nodedup) ||
        !gd_py_call_part(object, 1, &call)) {
        return NULL;
    }
    gd_status s = gd_block_copy_add_equal(self->relocation, old, from,
                                          nodedup != 0, &call.err);
    return gd_py_end_none(&call, s);
}

static PyObject *
relocation_finish(PyObject *object, PyObject *Py_UNUSED(unused))
{
    relocation_object *self = (relocation_object *)object;
    const uint8_t *pairs = NULL;
    size_t count = 0;
    gd_py_call call;
    if (!gd_py_call_part(object, 1, &call)) {
        return NULL;
    }
    gd_status s =
        gd_block_copy_finish(self->relocation, &pairs, &count, &call.err);
    /* No other thread can close the relocation before these are copied. */
    return gd_py_end_bytes(&call, s, pairs, count * GD_PAIR_SIZE);
}

static PyMethodDef relocation_methods[] = {
    {"add", relocation_add, METH_VARARGS, NULL},
    {"add_equal", relocation_add_equal, METH_VARARGS, NULL},
    {"finish", relocation_finish, METH_NOARGS, NULL},
    {"close", gd_py_part_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const gd_py_type gd_py_relocation_type = {
    .name = "glance_dedup._engine.Relocation",
    .size = sizeof(relocation_object),
    .make = relocation_new,
    .dealloc = gd_py_part_dealloc,
    .methods = relocation_methods,
};
