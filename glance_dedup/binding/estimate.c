/* SPDX-License-Identifier: Apache-2.0 */
/*
 * estimate.c - the type Estimate: what images would take.
 */
#include "binding/binding.h"

#include "engine/exchange/estimate.h"

typedef struct estimate_object {
    PyObject_HEAD
    gd_estimate *estimate;
    int busy; /* a call is in progress */
} estimate_object;

static void
leave(PyObject *object)
{
    ((estimate_object *)object)->busy = 0;
}

/* Begins a call.  Returns 0 with an exception set if another thread is at
 * work. */
static int
begin(PyObject *object, gd_py_call *call)
{
    estimate_object *self = (estimate_object *)object;
    if (self->busy || self->estimate == NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "an estimate belongs to one thread at a time");
        return 0;
    }
    self->busy = 1;
    gd_py_begin_call(call, object, leave);
    return 1;
}

static PyObject *
estimate_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"block_size",  "cut_minimum", "cut_average",
                            "segment_size", "codec",       "codec_level",
                            "again_codec", "again_level", "table_bytes",
                            NULL};
    Py_ssize_t block, minimum, average, segment, table;
    const char *codec, *again;
    gd_estimate_params params = {0};
    gd_chunker chunker;
    gd_error err;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "$nnnnsisin", names, &block, &minimum, &average,
            &segment, &codec, &params.codec_level, &again,
            &params.again_level, &table)) {
        return NULL;
    }
    estimate_object *self = gd_py_new_object(type);
    if (self == NULL) {
        return NULL;
    }
    params.segment_size = (size_t)segment;
    params.table_bytes = (size_t)table;
    gd_status s = gd_chunker_open(&chunker, (size_t)minimum, (size_t)average,
                                  (size_t)block, &err);
    if (s == GD_OK) {
        s = gd_codec_parse(codec, &params.codec, &err);
    }
    if (s == GD_OK) {
        s = gd_codec_parse(again, &params.again_codec, &err);
    }
    if (s == GD_OK) {
        s = gd_estimate_open(gd_env_posix(), &chunker, &params,
                             &self->estimate, &err);
    }
    if (s != GD_OK) {
        gd_py_raise((PyObject *)self, &err);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *
estimate_take(PyObject *object, PyObject *args)
{
    estimate_object *self = (estimate_object *)object;
    Py_buffer view;
    int last;
    size_t used = 0;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*p", &view, &last)) {
        return NULL;
    }
    if (begin(object, &call)) {
        gd_status s = gd_estimate_take(self->estimate, view.buf,
                                       (size_t)view.len, last != 0, &used,
                                       &call.err);
        result = gd_py_end_number(&call, s, used);
    }
    PyBuffer_Release(&view);
    return result;
}

static PyObject *
estimate_take_zeros(PyObject *object, PyObject *args)
{
    estimate_object *self = (estimate_object *)object;
    unsigned long long length;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "K", &length) || !begin(object, &call)) {
        return NULL;
    }
    gd_estimate_take_zeros(self->estimate, length);
    return gd_py_end_none(&call, GD_OK);
}

static PyObject *
estimate_end(PyObject *object, PyObject *Py_UNUSED(unused))
{
    estimate_object *self = (estimate_object *)object;
    uint64_t zeros, extents;
    gd_py_call call;
    if (!begin(object, &call)) {
        return NULL;
    }
    gd_status s =
        gd_estimate_end(self->estimate, &zeros, &extents, &call.err);
    return gd_py_end_two(&call, s, zeros, extents);
}

static PyObject *
list_of(const gd_estimated *sums, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = Py_BuildValue(
            "(KKKd)", (unsigned long long)sums[i].new_bytes,
            (unsigned long long)sums[i].new_blocks,
            (unsigned long long)sums[i].stored_bytes, sums[i].stored_squares);
        gd_py_set_item(&list, i, item);
    }
    return list;
}

static PyObject *
estimate_sum(PyObject *object, PyObject *Py_UNUSED(unused))
{
    estimate_object *self = (estimate_object *)object;
    gd_estimate_totals totals;
    const gd_env *env = gd_env_posix();
    PyObject *result = NULL;
    gd_py_call call;
    if (!begin(object, &call)) {
        return NULL;
    }
    size_t images = gd_estimate_images(self->estimate);
    gd_estimated *sums = gd_calloc(env, images, sizeof *sums, &call.err);
    gd_status s = sums == NULL ? GD_NOMEM
                               : gd_estimate_sum(self->estimate, sums, &totals,
                                                 &call.err);
    if (gd_py_end(&call, s)) {
        result = Py_BuildValue(
            "(NIKK)", list_of(sums, images), totals.level,
            (unsigned long long)totals.again_plain,
            (unsigned long long)totals.again_stored);
    }
    env->release(env, sums);
    return result;
}

static void
estimate_dealloc(PyObject *object)
{
    estimate_object *self = (estimate_object *)object;
    if (self->estimate != NULL) {
        gd_estimate_close(self->estimate);
    }
    gd_py_free_object(object);
}

static PyMethodDef estimate_methods[] = {
    {"take", estimate_take, METH_VARARGS, NULL},
    {"take_zeros", estimate_take_zeros, METH_VARARGS, NULL},
    {"end", estimate_end, METH_NOARGS, NULL},
    {"sum", estimate_sum, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const gd_py_type gd_py_estimate_type = {
    .name = "glance_dedup._engine.Estimate",
    .size = sizeof(estimate_object),
    .make = estimate_new,
    .dealloc = estimate_dealloc,
    .methods = estimate_methods,
};
