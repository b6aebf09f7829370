/* SPDX-License-Identifier: Apache-2.0 */
/*
 * part.c - the calls of a Maintenance, and its parts: the start of every object
 * that it has open (Recipe, Group, Merge, ...).
 *
 * Lifetimes: a part keeps its Maintenance alive, which keeps the Repository
 * alive; closing a Maintenance closes its parts.  Threads: only one at a time
 * may use a Maintenance and its parts.  A second is refused, since calls
 * release the GIL.  In a forked child every object refuses, and leaves
 * everything as it is.
 */
#include "binding/binding.h"

int
gd_py_enter_maintenance(maintenance_object *self, int locked)
{
    gd_error err;
    if (self->closed) {
        gd_fail(&err, GD_CLOSED, "the maintenance is closed");
    } else if (!gd_py_is_owner(self->owner)) {
        gd_fail(&err, GD_CLOSED,
                "this maintenance was begun by process %ld, before a fork",
                (long)self->owner->owner);
    } else if (self->busy) {
        gd_fail(&err, GD_BUSY, "another thread is using the maintenance");
    } else if (locked && self->lock_fd < 0) {
        gd_fail(&err, GD_INVALID, "only the maintainer may do that: its lock "
                                  "was not taken");
    } else {
        self->busy = 1;
        return 1;
    }
    gd_py_raise((PyObject *)self, &err);
    return 0;
}

void
gd_py_leave_maintenance(maintenance_object *self)
{
    self->busy = 0;
}

static void
leave_call(PyObject *object)
{
    gd_py_leave_maintenance((maintenance_object *)object);
}

int
gd_py_call_maintenance(PyObject *object, int locked, gd_py_call *call)
{
    if (!gd_py_enter_maintenance((maintenance_object *)object, locked)) {
        return 0;
    }
    gd_py_begin_call(call, object, leave_call);
    return 1;
}

part_object *
gd_py_begin_part(PyObject *maintenance, PyTypeObject *type, int locked,
                 gd_py_call *call)
{
    maintenance_object *owner = (maintenance_object *)maintenance;
    if (!gd_py_enter_maintenance(owner, locked)) {
        return NULL;
    }
    part_object *self = gd_py_new_object(type);
    if (self == NULL) {
        gd_py_leave_maintenance(owner);
        return NULL;
    }
    Py_INCREF(maintenance);
    self->maintenance = owner;
    gd_py_begin_call(call, maintenance, leave_call);
    return self;
}

PyObject *
gd_py_end_part(part_object *self, gd_status s, void (*release)(part_object *),
               gd_py_call *call)
{
    maintenance_object *maintenance = self->maintenance;
    if (!gd_py_end(call, s)) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    self->release = release;
    self->next = maintenance->parts;
    self->link = &maintenance->parts;
    if (self->next != NULL) {
        self->next->link = &self->next;
    }
    maintenance->parts = self;
    return (PyObject *)self;
}

int
gd_py_enter_part(part_object *self, int locked)
{
    gd_error err;
    if (self->release == NULL) {
        gd_fail(&err, GD_CLOSED, "this part of the maintenance is closed");
        gd_py_raise((PyObject *)self, &err);
        return 0;
    }
    return gd_py_enter_maintenance(self->maintenance, locked);
}

int
gd_py_call_part(PyObject *object, int locked, gd_py_call *call)
{
    part_object *self = (part_object *)object;
    if (!gd_py_enter_part(self, locked)) {
        return 0;
    }
    gd_py_begin_call(call, (PyObject *)self->maintenance, leave_call);
    return 1;
}

void
gd_py_close_part(part_object *self)
{
    void (*release)(part_object *) = self->release;
    if (release == NULL || !gd_py_is_owner(self->maintenance->owner)) {
        return;
    }
    self->release = NULL;
    *self->link = self->next;
    if (self->next != NULL) {
        self->next->link = self->link;
    }
    Py_BEGIN_ALLOW_THREADS
    release(self);
    Py_END_ALLOW_THREADS
}

PyObject *
gd_py_part_fact(PyObject *object, void *fact)
{
    part_object *self = (part_object *)object;
    if (!gd_py_enter_part(self, 0)) {
        return NULL;
    }
    uint64_t number = ((const gd_py_fact *)fact)->of(self);
    gd_py_leave_maintenance(self->maintenance);
    return PyLong_FromUnsignedLongLong(number);
}

PyObject *
gd_py_part_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    part_object *self = (part_object *)object;
    if (self->release != NULL && gd_py_is_owner(self->maintenance->owner)) {
        if (!gd_py_enter_part(self, 0)) {
            return NULL;
        }
        gd_py_close_part(self);
        gd_py_leave_maintenance(self->maintenance);
    }
    Py_RETURN_NONE;
}

/* Nobody else can be using the part.  But its Maintenance may be in use
 * elsewhere; its list changes only under the GIL. */
void
gd_py_part_dealloc(PyObject *object)
{
    part_object *self = (part_object *)object;
    if (self->maintenance != NULL) {
        gd_py_close_part(self);
        Py_DECREF((PyObject *)self->maintenance);
    }
    gd_py_free_object(object);
}
