/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blockreader.c - glance_dedup._engine.BlockReader: reads back, by their
 * addresses, blocks of an image that is being stored.
 *
 * Lifetimes: a BlockReader keeps its Repository alive, and the handle open
 * until it is closed.  Threads: several may use one; its lock admits one at a
 * time.  In a forked child it refuses, and leaves the parent's reader alone.
 */
#include "binding/binding.h"

#include "engine/read/blockreader.h"

typedef struct block_reader_object {
    PyObject_HEAD
    repository_object *owner; /* entered while reader is set */
    gd_block_reader *reader;
    PyThread_type_lock lock; /* one thread in the reader at a time */
} block_reader_object;

PyObject *
gd_py_open_block_reader(PyObject *object, PyObject *unused)
{
    (void)unused;
    repository_object *self = (repository_object *)object;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_repository(self)) {
        return NULL;
    }
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    block_reader_object *result = gd_py_new_object(state->block_reader_type);
    if (result == NULL) {
        gd_py_leave_repository(self);
        return NULL;
    }
    Py_INCREF(object);
    result->owner = self;
    result->lock = PyThread_allocate_lock();
    s = result->lock == NULL
            ? gd_fail(&err, GD_NOMEM, "no memory for a lock")
            : gd_block_reader_open(self->repo, &result->reader, &err);
    if (s != GD_OK) {
        result->reader = NULL;
        gd_py_leave_repository(self);
        gd_py_raise(object, &err);
        Py_DECREF(result);
        return NULL;
    }
    return (PyObject *)result;
}

/* Every use of the reader must lie between enter and leave.  Enter may wait, so
 * it REQUIRES the GIL released.  A forked child does not take the lock: another
 * thread may have held it at the time of the fork. */
static gd_status
enter_reader(block_reader_object *self, gd_error *err)
{
    gd_status s = gd_py_check_process(self->owner, err);
    if (s != GD_OK) {
        return s;
    }
    PyThread_acquire_lock(self->lock, WAIT_LOCK);
    if (self->reader == NULL) {
        PyThread_release_lock(self->lock);
        return gd_fail(err, GD_CLOSED, "the block reader is closed");
    }
    return GD_OK;
}

static void
leave_reader(block_reader_object *self)
{
    PyThread_release_lock(self->lock);
}

/* REQUIRES: the GIL, and the lock or the last reference. */
static void
close_reader(block_reader_object *self)
{
    if (self->reader != NULL &&
        gd_py_check_process(self->owner, NULL) == GD_OK) {
        gd_block_reader_close(self->reader);
        self->reader = NULL;
        gd_py_leave_repository(self->owner);
    }
}

/* Sums up the blocks' lengths.  Returns 0 with an exception set if one is
 * longer than any block can be. */
static int
sum_lengths(const gd_py_blocks *list, Py_ssize_t *sum)
{
    *sum = 0;
    for (size_t i = 0; i < list->count; i++) {
        if (list->lengths[i] > GD_SEGMENT_MAX) {
            PyErr_SetString(PyExc_ValueError, "no block is so long");
            return 0;
        }
        *sum += (Py_ssize_t)list->lengths[i];
    }
    return 1;
}

/* read(fingerprints, lengths, addresses) -> bytes */
static PyObject *
block_reader_read(PyObject *object, PyObject *args)
{
    block_reader_object *self = (block_reader_object *)object;
    Py_buffer fps, lengths, addresses;
    gd_py_blocks list;
    Py_ssize_t length;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y*y*y*", &fps, &lengths, &addresses)) {
        return NULL;
    }
    int copied = gd_py_copy_blocks(&fps, &lengths, &addresses, &list);
    PyBuffer_Release(&fps);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&addresses);
    if (!copied) {
        return NULL;
    }
    PyObject *result = sum_lengths(&list, &length)
                           ? PyBytes_FromStringAndSize(NULL, length)
                           : NULL;
    if (result == NULL) {
        gd_py_free_blocks(&list);
        return NULL;
    }
    /* Nobody else has seen the bytes object yet. */
    uint8_t *out = (uint8_t *)PyBytes_AsString(result);
    Py_BEGIN_ALLOW_THREADS
    s = enter_reader(self, &err);
    if (s == GD_OK) {
        s = gd_block_reader_copy(self->reader, list.addresses, list.fps,
                                 list.lengths, list.count, out, &err);
        leave_reader(self);
    }
    Py_END_ALLOW_THREADS
    gd_py_free_blocks(&list);
    if (s != GD_OK) {
        Py_DECREF(result);
        return gd_py_raise(object, &err);
    }
    return result;
}

static PyObject *
block_reader_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    block_reader_object *self = (block_reader_object *)object;
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    s = enter_reader(self, NULL);
    Py_END_ALLOW_THREADS
    if (s == GD_OK) {
        close_reader(self);
        leave_reader(self);
    }
    Py_RETURN_NONE;
}

static void
block_reader_dealloc(PyObject *object)
{
    block_reader_object *self = (block_reader_object *)object;
    if (self->owner != NULL) {
        close_reader(self);
    }
    if (self->lock != NULL) {
        PyThread_free_lock(self->lock);
    }
    Py_XDECREF((PyObject *)self->owner);
    gd_py_free_object(object);
}

static PyMethodDef block_reader_methods[] = {
    {"read", block_reader_read, METH_VARARGS, NULL},
    {"close", block_reader_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot block_reader_slots[] = {
    {Py_tp_dealloc, block_reader_dealloc},
    {Py_tp_methods, block_reader_methods},
    {0, NULL},
};

PyType_Spec gd_py_block_reader_spec = {
    .name = "glance_dedup._engine.BlockReader",
    .basicsize = sizeof(block_reader_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = block_reader_slots,
};
