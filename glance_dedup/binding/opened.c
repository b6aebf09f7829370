/* SPDX-License-Identifier: Apache-2.0 */
/*
 * opened.c - the objects that a Repository has open: Transaction, Image, Volume,
 * BlockReader and Index.
 *
 * Lifetimes: each keeps its Repository alive, and the handle open until it is
 * closed.  Threads: one kind takes any number at once, and close takes effect
 * when the last call is done; the other has a lock, which admits one at a time.
 * In a forked child each refuses, and leaves the open objects to the parent.
 */
#include "binding/binding.h"

/* The Repository stays entered for the object that was opened. */
static void
stay_entered(PyObject *Py_UNUSED(repository))
{
}

opened_object *
gd_py_begin_opening(PyObject *repository, PyTypeObject *type,
                    const opened_kind *kind, gd_py_call *call)
{
    repository_object *owner = (repository_object *)repository;
    if (!gd_py_enter_repository(owner)) {
        return NULL;
    }
    opened_object *self = gd_py_new_object(type);
    if (self != NULL && kind->serial) {
        self->lock = PyThread_allocate_lock();
        if (self->lock == NULL) {
            PyErr_SetString(PyExc_MemoryError, "no memory for a lock");
            Py_CLEAR(self);
        }
    }
    if (self == NULL) {
        gd_py_leave_repository(owner);
        return NULL;
    }
    Py_INCREF(repository);
    self->owner = owner;
    self->kind = kind;
    gd_py_begin_call(call, repository, stay_entered);
    return self;
}

PyObject *
gd_py_end_opening(opened_object *self, gd_status s, void *handle,
                  gd_py_call *call)
{
    if (!gd_py_end(call, s)) {
        gd_py_leave_repository(self->owner);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    self->handle = handle;
    return (PyObject *)self;
}

static void
take_lock(opened_object *self)
{
    if (!PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) {
        Py_BEGIN_ALLOW_THREADS
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
}

/* A forked child does not take the lock: another thread may have held it at the
 * time of the fork. */
static gd_status
enter_serial(opened_object *self, gd_error *err)
{
    gd_status s = gd_py_require_process(self->owner, err);
    if (s != GD_OK) {
        return s;
    }
    take_lock(self);
    if (self->handle == NULL) {
        PyThread_release_lock(self->lock);
        return gd_fail(err, GD_CLOSED, "%s", self->kind->closed_text);
    }
    return GD_OK;
}

static gd_status
enter_shared(opened_object *self, gd_error *err)
{
    if (self->closed || self->handle == NULL) {
        return gd_fail(err, GD_CLOSED, "%s", self->kind->closed_text);
    }
    gd_status s = gd_py_require_process(self->owner, err);
    self->users += s == GD_OK;
    return s;
}

int
gd_py_enter_opened(opened_object *self)
{
    gd_error err;
    gd_status s = self->kind->serial ? enter_serial(self, &err)
                                     : enter_shared(self, &err);
    if (s != GD_OK) {
        gd_py_raise((PyObject *)self, &err);
    }
    return s == GD_OK;
}

void
gd_py_leave_opened(opened_object *self)
{
    if (self->kind->serial) {
        PyThread_release_lock(self->lock);
    } else if (--self->users == 0 && self->closed) {
        gd_py_close_opened(self);
    }
}

static void
leave_call(PyObject *object)
{
    gd_py_leave_opened((opened_object *)object);
}

int
gd_py_call_opened(PyObject *object, gd_py_call *call)
{
    if (!gd_py_enter_opened((opened_object *)object)) {
        return 0;
    }
    gd_py_begin_call(call, object, leave_call);
    return 1;
}

void
gd_py_close_opened(opened_object *self)
{
    void *handle = self->handle;
    if (handle == NULL || !gd_py_is_owner(self->owner)) {
        return;
    }
    self->handle = NULL;
    Py_BEGIN_ALLOW_THREADS
    self->kind->close(handle);
    Py_END_ALLOW_THREADS
    gd_py_leave_repository(self->owner);
}

PyObject *
gd_py_opened_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    opened_object *self = (opened_object *)object;
    self->closed = 1;
    if (!self->kind->serial && self->users == 0) {
        gd_py_close_opened(self);
    } else if (self->kind->serial && gd_py_is_owner(self->owner)) {
        take_lock(self);
        gd_py_close_opened(self);
        PyThread_release_lock(self->lock);
    }
    Py_RETURN_NONE;
}

void
gd_py_opened_dealloc(PyObject *object)
{
    opened_object *self = (opened_object *)object;
    if (self->owner != NULL) {
        gd_py_close_opened(self);
        Py_DECREF((PyObject *)self->owner);
    }
    if (self->lock != NULL) {
        PyThread_free_lock(self->lock);
    }
    gd_py_free_object(object);
}
