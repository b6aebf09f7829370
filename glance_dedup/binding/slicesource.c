/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slicesource.c - lets an object of Python bring the slices of cold groups.
 *
 * Threads of the engine call it, with or without a thread state of Python; each
 * takes the GIL for the call.
 */
#include "binding/binding.h"

#include <string.h>

/* The exceptions that the source may raise on purpose.  All others mean that
 * the slice is not there now, too: nothing is known to be lost. */
static const struct {
    const char *name;
    gd_status status;
} known[] = {
    {"NoSpaceError", GD_NOSPACE},
    {"AccessDenied", GD_DENIED},
};

static gd_status
status_of(const module_state *state, PyObject *type)
{
    gd_status s = GD_UNAVAILABLE;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        PyObject *class = PyObject_GetAttrString(state->exceptions,
                                                 known[i].name);
        if (class != NULL && PyErr_GivenExceptionMatches(type, class)) {
            s = known[i].status;
        }
        Py_XDECREF(class);
    }
    PyErr_Clear();
    return s;
}

/* Takes the exception that is set. */
static gd_status
take_exception(const module_state *state, gd_error *err)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    gd_status s = status_of(state, type);
    PyObject *text = value == NULL ? NULL : PyObject_Str(value);
    PyObject *bytes = text == NULL ? NULL
                                   : PyUnicode_AsEncodedString(
                                         text, "utf-8", "backslashreplace");
    const char *words = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    PyErr_Clear();
    gd_fail(err, s, "%s", words != NULL && words[0] != '\0'
                              ? words
                              : "the slice cannot be fetched");
    Py_XDECREF(bytes);
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return s;
}

static gd_status
finish(const repository_object *self, PyObject *result, gd_error *err)
{
    gd_status s = GD_OK;
    if (result == NULL) {
        s = take_exception(self->state, err);
    }
    Py_XDECREF(result);
    return s;
}

static gd_status
fetch(void *arg, const gd_object *object, uint32_t first, uint32_t count,
      gd_error *err)
{
    const repository_object *self = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    gd_status s = finish(
        self,
        PyObject_CallMethod(
            self->slice_source, "fetch", "Iy#KIId", (unsigned)object->group,
            (const char *)object->id, (Py_ssize_t)sizeof object->id,
            (unsigned long long)object->length, (unsigned)first,
            (unsigned)count, object->patience_ms / 1000.0),
        err);
    PyGILState_Release(gil);
    return s;
}

static void
expect(void *arg, const gd_object *object, uint32_t first, uint32_t count)
{
    const repository_object *self = arg;
    PyGILState_STATE gil = PyGILState_Ensure();
    (void)finish(self,
                 PyObject_CallMethod(
                     self->slice_source, "expect", "Iy#KII",
                     (unsigned)object->group, (const char *)object->id,
                     (Py_ssize_t)sizeof object->id,
                     (unsigned long long)object->length, (unsigned)first,
                     (unsigned)count),
                 NULL);
    PyGILState_Release(gil);
}

gd_status
gd_py_open_slices(repository_object *self, const char *directory,
                  const char *memory, PyObject *source, gd_error *err)
{
    gd_slice_source callbacks = {self, fetch, expect};
    gd_status s = gd_slices_open(gd_env_posix(), directory, memory,
                                 &callbacks, &self->slices, err);
    if (s == GD_OK) {
        Py_INCREF(source);
        self->slice_source = source;
    }
    return s;
}

void
gd_py_close_slices(repository_object *self)
{
    gd_slices_close(self->slices);
    self->slices = NULL;
    Py_CLEAR(self->slice_source);
}
