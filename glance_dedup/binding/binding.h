/* SPDX-License-Identifier: Apache-2.0 */
/*
 * binding.h - what the files of the binding to Python share.
 *
 * Each type, and each group of functions, has a file of its own.  Arrows only
 * downwards; what a file offers stands here under its name, lowest first:
 *
 *     module                           the module: registers all
 *     repository        maintenance    what all begins with
 *     transaction       recipe         what these open
 *     image             group
 *     blockreader       rewriting
 *                       merge          Merge, Relocation, the index functions
 *     scrub             spare
 *     fingerprint       runs
 *     duplicates        estimate       what images would take
 *                       part           calls of the maintainer
 *     common                           what all stand on
 *
 * _engine.pyi says what all of them offer to Python.  Nothing outside of this
 * folder knows Python.
 */
#ifndef GD_BINDING_H
#define GD_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine/format/recipe.h"
#include "engine/handle/repo.h"

typedef struct module_state {
    PyObject *exceptions; /* the module glance_dedup.base.exceptions */
    PyTypeObject *repository_type;
    PyTypeObject *transaction_type;
    PyTypeObject *image_type;
    PyTypeObject *block_reader_type;
    PyTypeObject *maintenance_type;
    PyTypeObject *recipe_type;
    PyTypeObject *group_type;
    PyTypeObject *rewriting_type;
    unsigned long forks; /* of this process and its ancestors */
} module_state;

typedef struct repository_object {
    PyObject_HEAD
    gd_repo *repo;
    Py_ssize_t users; /* calls under way; transactions, images, maintenances */
    int closed;
    pid_t owner; /* this and the next stay when the handle is gone */
    unsigned long forks;
    const module_state *state;
} repository_object;

/* ---- common.c: errors ---- */

/* The exception of err's status; returns NULL. */
PyObject *gd_py_raise_in(const module_state *state, const gd_error *err);
/* The same in a method of an object of one of the module's types. */
PyObject *gd_py_raise(PyObject *self, const gd_error *err);
/* What a method returns that only succeeds or fails: None, or the exception
 * of err. */
PyObject *gd_py_none(PyObject *self, gd_status s, const gd_error *err);
/* Whether it was done: False for GD_BUSY, an exception for other failures. */
PyObject *gd_py_not_busy(PyObject *self, gd_status s, const gd_error *err);

/* ---- common.c: types and objects ---- */

/* Makes the type and adds it to the module; a new reference, NULL on error. */
PyTypeObject *gd_py_add_type(PyObject *module, PyType_Spec *spec);
/* A new object of a heap type, zeros behind its head; NULL with an exception
 * set. */
void *gd_py_new_object(PyTypeObject *type);
/* Frees an object of a heap type, and its reference to the type. */
void gd_py_free_object(PyObject *self);

/* ---- common.c: arguments and results ---- */

/* For PyArg_ParseTuple's O&, whose I would take any number modulo 2^32. */
int gd_py_to_u32(PyObject *object, void *out);
/* Copies an id's GD_ID_SIZE bytes; 0 with an exception set for another
 * length. */
int gd_py_copy_id(const char *what, const char *data, Py_ssize_t length,
                  uint8_t out[GD_ID_SIZE]);
/* (image id[, upload id or None]): *upload is room, or NULL. */
int gd_py_parse_image(PyObject *args, const char **image_id,
                      uint8_t room[GD_ID_SIZE], const uint8_t **upload);
/* (a group's number), which is one that a group can have. */
int gd_py_parse_group(PyObject *self, PyObject *args, uint32_t *number);

/* Packed arrays of blocks, as C has them. */
typedef struct gd_py_blocks {
    size_t count;
    gd_fingerprint *fps;
    uint32_t *lengths;
    gd_address *addresses;
} gd_py_blocks;

/* From fingerprints of 32 bytes, lengths of 4, addresses of 8, as many of each;
 * 0 with an exception set.  addresses may be NULL: then there is only room for
 * them. */
int gd_py_copy_blocks(const Py_buffer *fps, const Py_buffer *lengths,
                      const Py_buffer *addresses, gd_py_blocks *list);
void gd_py_free_blocks(gd_py_blocks *list);
PyObject *gd_py_pack_addresses(const gd_address *addresses, size_t count);

/* What a recipe's header says of the image, as a dict. */
PyObject *gd_py_header_dict(const gd_recipe_header *header);
/* The same with the transaction's id, for the maintainer. */
PyObject *gd_py_whole_header_dict(const gd_recipe_header *header);

/* ---- common.c: the use of a repository handle ---- */

/* GD_CLOSED in a forked child.  The count is there because a process id is
 * used again; the id, because a fork by C code is not counted. */
gd_status gd_py_check_process(const repository_object *self, gd_error *err);
/* Whether this process may touch what the handle has open.  In a forked child
 * everything is left as it is, not even closed. */
int gd_py_is_owner(const repository_object *self);
/* Every use of the handle stands between enter and leave.  Enter returns 0
 * with an exception set when the handle is closed, or of another process. */
int gd_py_enter_repository(repository_object *self);
void gd_py_leave_repository(repository_object *self);
/* Refuses further uses; the handle goes with the last.  Idempotent. */
void gd_py_close_repository(repository_object *self);

/* ---- part.c ---- */

typedef struct part_object part_object;

typedef struct maintenance_object {
    PyObject_HEAD
    repository_object *owner; /* entered until closed */
    int lock_fd;              /* the maintainer lock; -1: not had */
    int image_lock_fd;        /* an image's lock; -1: none is had */
    int closed;
    int busy; /* a call is under way */
    part_object *parts;
} maintenance_object;

/* The start of every object that a Maintenance has open (Recipe, Group, ...):
 * it keeps the Maintenance alive, and is closed with it. */
struct part_object {
    PyObject_HEAD
    maintenance_object *maintenance;
    part_object *next;
    part_object **link;              /* what points to this one */
    void (*release)(part_object *);  /* lets go of all; NULL: closed */
};

/* A call stands between enter and leave; the GIL may be released between them.
 * Enter returns 0 with an exception set: closed, of another process, in use by
 * another thread, or, with locked, without the maintainer lock. */
int gd_py_enter_maintenance(maintenance_object *self, int locked);
void gd_py_leave_maintenance(maintenance_object *self);

/* A new part of a type whose struct begins with a part_object, all else zeros,
 * which is closed until its opener calls gd_py_open_part.  release runs
 * without the GIL. */
part_object *gd_py_new_part(maintenance_object *maintenance,
                            PyTypeObject *type);
void gd_py_open_part(part_object *self, void (*release)(part_object *));
/* As gd_py_enter_maintenance; what is to be called at the end is
 * gd_py_leave_maintenance(self->maintenance). */
int gd_py_enter_part(part_object *self, int locked);
/* Idempotent. */
void gd_py_close_part(part_object *self);
/* The method close, and the destructor, of any part. */
PyObject *gd_py_part_close(PyObject *object, PyObject *unused);
void gd_py_part_dealloc(PyObject *object);

/* ---- functions of the module ---- */

extern PyMethodDef gd_py_fingerprint_functions[]; /* fingerprint.c */
extern PyMethodDef gd_py_run_functions[];         /* runs.c */
extern PyMethodDef gd_py_index_functions[];       /* merge.c */
extern PyMethodDef gd_py_duplicates_functions[];  /* duplicates.c */
extern PyMethodDef gd_py_scrub_functions[];       /* scrub.c */
extern PyMethodDef gd_py_spare_functions[];       /* spare.c */
extern PyMethodDef gd_py_rewriting_functions[];   /* rewriting.c */
extern PyMethodDef gd_py_repository_functions[];  /* repository.c */

/* ---- types, and the methods of a higher type that open them ---- */

extern PyType_Spec gd_py_transaction_spec; /* transaction.c */
PyObject *gd_py_begin(PyObject *repository, PyObject *args);

extern PyType_Spec gd_py_image_spec; /* image.c */
PyObject *gd_py_open_image(PyObject *repository, PyObject *args);

extern PyType_Spec gd_py_block_reader_spec; /* blockreader.c */
PyObject *gd_py_open_block_reader(PyObject *repository, PyObject *unused);

extern PyType_Spec gd_py_recipe_spec; /* recipe.c */
PyObject *gd_py_open_entry(PyObject *maintenance, PyObject *args);
PyObject *gd_py_open_recipe(PyObject *maintenance, PyObject *args);

extern PyType_Spec gd_py_group_spec; /* group.c */
PyObject *gd_py_enter_group(PyObject *maintenance, PyObject *args);

extern PyType_Spec gd_py_rewriting_spec; /* rewriting.c */
PyObject *gd_py_begin_rewriting(PyObject *maintenance, PyObject *args);

extern PyType_Spec gd_py_merge_spec; /* merge.c */
extern PyType_Spec gd_py_relocation_spec;

extern PyType_Spec gd_py_repository_spec; /* repository.c */

extern PyType_Spec gd_py_maintenance_spec; /* maintenance.c */

extern PyType_Spec gd_py_estimate_spec; /* estimate.c */

#endif
