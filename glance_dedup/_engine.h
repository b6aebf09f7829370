/*
 * _engine.h - what the files of the binding to Python share.
 *
 * _enginemodule.c has the module, its errors, and Repository, Transaction and
 * Image; each other _engine*.c adds types or functions of its own to it.
 * _engine.pyi says what all of them offer to Python.  Only files named
 * _engine* know Python.
 */
#ifndef GLANCE_DEDUP_ENGINE_H
#define GLANCE_DEDUP_ENGINE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine/repo.h"

typedef struct module_state {
    PyObject *exceptions; /* the module glance_dedup.exceptions */
    PyTypeObject *repository_type;
    PyTypeObject *transaction_type;
    PyTypeObject *image_type;
    unsigned long forks; /* of this process and its ancestors */
} module_state;

typedef struct repository_object {
    PyObject_HEAD
    gd_repo *repo;
    Py_ssize_t users; /* calls under way, open transactions and images */
    int closed;
    pid_t owner; /* this and the next stay when the handle is gone */
    unsigned long forks;
    const module_state *state;
} repository_object;

/* The exception of err's status; returns NULL. */
PyObject *gd_py_raise_in(const module_state *state, const gd_error *err);
/* The same in a method of an object of one of the module's types. */
PyObject *gd_py_raise(PyObject *self, const gd_error *err);

/* Every use of the handle stands between enter and leave.  Enter returns 0
 * with an exception set when the handle is closed, or of another process. */
int gd_py_enter_repository(repository_object *self);
void gd_py_leave_repository(repository_object *self);

/* Copies an id's GD_ID_SIZE bytes; 0 with an exception set for another
 * length. */
int gd_py_copy_id(const char *what, const char *data, Py_ssize_t length,
                  uint8_t out[GD_ID_SIZE]);
/* Frees an object of a heap type, and its reference to the type. */
void gd_py_free_object(PyObject *self);
/* Makes the type and adds it to the module; a new reference, NULL on error. */
PyTypeObject *gd_py_add_type(PyObject *module, PyType_Spec *spec);

#endif
