/* SPDX-License-Identifier: Apache-2.0 */
/*
 * binding.h - what the files of the binding to Python share.
 *
 * Each type, and each group of functions, has a file of its own.  A file uses
 * only files below it.  What each file offers is declared here under its name,
 * lowest file first:
 *
 *     module                           the module: registers all
 *     repository        maintenance    what all begins with
 *     transaction       recipe         what these open
 *     volume            group
 *     image
 *     blockreader       rewriting
 *     index             merge          Merge, Relocation
 *     scrub             spare
 *     fingerprint       runs
 *     duplicates        estimate       what images would take
 *     deflate
 *     batch                            what ranks send each other
 *     opened            part           what these two have open
 *     call                             calls of the engine, without the GIL
 *     common                           what all stand on
 *
 * _engine.pyi describes what all of them offer to Python.  Nothing outside of
 * this folder knows Python.
 */
#ifndef GD_BINDING_H
#define GD_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine/files/slices.h"
#include "engine/format/index.h"
#include "engine/format/recipe.h"
#include "engine/read/image.h"
#include "engine/repo/repo.h"

typedef struct module_state {
    PyObject *exceptions; /* the module glance_dedup.base.exceptions */
    PyTypeObject *repository_type;
    PyTypeObject *transaction_type;
    PyTypeObject *image_type;
    PyTypeObject *volume_type;
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
    Py_ssize_t users; /* calls in progress; open transactions, images,
                       * volumes, maintenances */
    int closed;
    pid_t owner; /* this and the next stay after the handle is gone */
    unsigned long forks;
    const module_state *state;
    gd_slices *slices;      /* NULL: cold groups cannot be read */
    PyObject *slice_source; /* what brings them */
} repository_object;

/* ---- slicesource.c ---- */

/* Has source bring slices into the directory.  On failure nothing is to be
 * closed. */
gd_status gd_py_open_slices(repository_object *self, const char *directory,
                            const char *memory, PyObject *source,
                            gd_error *err);
/* REQUIRES: the repository's handle is closed. */
void gd_py_close_slices(repository_object *self);

/* ---- common.c: errors ---- */

/* Raises the exception for err's status; returns NULL. */
PyObject *gd_py_raise_in(const module_state *state, const gd_error *err);
/* The same, for a method of an object of one of the module's types. */
PyObject *gd_py_raise(PyObject *self, const gd_error *err);

/* ---- common.c: types and objects ---- */

/* A type of the module, as Python sees it. */
typedef struct gd_py_type {
    const char *name;
    size_t size;  /* of an object */
    newfunc make; /* NULL: Python code cannot make objects */
    destructor dealloc;
    PyMethodDef *methods;
    PyGetSetDef *attributes; /* NULL: it has none; likewise: */
    PyMemberDef *members;
} gd_py_type;

/* Makes the type and adds it to the module.  Returns a new reference, NULL on
 * error. */
PyTypeObject *gd_py_add_type(PyObject *module, const gd_py_type *type);
/* Makes an object of a heap type, with zeros behind its head.  Returns NULL
 * with an exception set on error. */
void *gd_py_new_object(PyTypeObject *type);
/* Frees an object of a heap type, and its reference to the type. */
void gd_py_free_object(PyObject *self);

/* ---- common.c: arguments and results ---- */

/* For PyArg_ParseTuple's O&: its format I would take any number modulo 2^32. */
int gd_py_to_u32(PyObject *object, void *out);
/* Copies an id of GD_ID_SIZE bytes.  Returns 0 with an exception set for
 * another length. */
int gd_py_copy_id(const char *what, const char *data, Py_ssize_t length,
                  uint8_t out[GD_ID_SIZE]);
/* Parses (image id[, upload id or None]).  *upload is room, or NULL. */
int gd_py_parse_image(PyObject *args, const char **image_id,
                      uint8_t room[GD_ID_SIZE], const uint8_t **upload);
/* Parses (group number), and checks that a group can have this number. */
int gd_py_parse_group(PyObject *self, PyObject *args, uint32_t *number);
/* The codec of this name, if it has this level. */
gd_status gd_py_parse_codec(const char *name, int level, gd_codec *codec,
                            gd_error *err);

/* Packed arrays of blocks, in C's form. */
typedef struct gd_py_blocks {
    size_t count;
    gd_fingerprint *fps;
    uint32_t *lengths;
    gd_address *addresses;
} gd_py_blocks;

/* Copies fingerprints of 32 bytes, lengths of 4 and addresses of 8, the same
 * number of each.  Returns 0 with an exception set on error.  If addresses is
 * NULL, only makes room for them. */
int gd_py_copy_blocks(const Py_buffer *fps, const Py_buffer *lengths,
                      const Py_buffer *addresses, gd_py_blocks *list);
/* The same from the arguments (fingerprints, lengths, addresses). */
int gd_py_parse_blocks(PyObject *args, gd_py_blocks *list);
void gd_py_free_blocks(gd_py_blocks *list);
PyObject *gd_py_pack_addresses(const gd_address *addresses, size_t count);

/* A bytes object for the caller to fill: nobody else has seen it yet.  Returns
 * NULL with an exception set on error, and then sets *out to NULL, too. */
PyObject *gd_py_new_bytes(size_t length, uint8_t **out);
/* Puts an item, whose reference it takes, into a new list.  Clears the list if
 * there is no item. */
void gd_py_set_item(PyObject **list, size_t index, PyObject *item);
/* Returns a dict of the image's fields in a recipe's header. */
PyObject *gd_py_header_dict(const gd_recipe_header *header);
/* The same with the transaction's id, for the maintainer. */
PyObject *gd_py_whole_header_dict(const gd_recipe_header *header);

/* ---- common.c: the use of a repository handle ---- */

/* GD_CLOSED in a forked child.  forks is compared because process ids are
 * reused; the process id is compared because forks by C code are not
 * counted. */
gd_status gd_py_require_process(const repository_object *self, gd_error *err);
/* Returns whether this process may use what the handle has open.  A forked
 * child leaves everything as it is, and does not even close it. */
int gd_py_is_owner(const repository_object *self);
/* Every use of the handle must lie between enter and leave.  Enter returns 0
 * with an exception set if the handle is closed or belongs to another
 * process. */
int gd_py_enter_repository(repository_object *self);
void gd_py_leave_repository(repository_object *self);
/* Refuses further uses.  The last use under way closes the handle.
 * Idempotent. */
void gd_py_close_repository(repository_object *self);

/* ---- call.c ---- */

/* A call of the engine from a method.  The GIL is released from its begin to
 * its end; the object is entered before and left after. */
typedef struct gd_py_call {
    PyObject *object;
    void (*leave)(PyObject *);
    PyThreadState *thread;
    gd_error err; /* for the engine's functions */
} gd_py_call;

/* Releases the GIL.  REQUIRES: the object is entered. */
void gd_py_begin_call(gd_py_call *call, PyObject *object,
                      void (*leave)(PyObject *));
/* Enters a Repository and begins.  Returns 0 with an exception set on error. */
int gd_py_call_repository(PyObject *object, gd_py_call *call);
/* Each of the following takes the GIL again and leaves the object.  Unless s is
 * GD_OK, it sets the exception for the call's error and returns 0 or NULL. */
int gd_py_end(gd_py_call *call, gd_status s);
PyObject *gd_py_end_none(gd_py_call *call, gd_status s);
PyObject *gd_py_end_bool(gd_py_call *call, gd_status s, bool answer);
PyObject *gd_py_end_number(gd_py_call *call, gd_status s, uint64_t number);
PyObject *gd_py_end_bytes(gd_py_call *call, gd_status s, const void *data,
                          size_t length);
/* A pair of numbers. */
PyObject *gd_py_end_two(gd_py_call *call, gd_status s, uint64_t first,
                        uint64_t second);
/* True if it was done, False for GD_BUSY. */
PyObject *gd_py_end_not_busy(gd_py_call *call, gd_status s);

/* ---- opened.c ---- */

typedef struct opened_kind {
    const char *closed_text;     /* for a call after closing */
    void (*close)(void *handle); /* runs without the GIL */
    bool serial;                 /* one thread at a time, and others wait */
} opened_kind;

/* An object that a Repository has open, of any kind. */
typedef struct opened_object {
    PyObject_HEAD
    repository_object *owner; /* entered while handle is set */
    const opened_kind *kind;
    void *handle;            /* the engine's; NULL: closed */
    PyThread_type_lock lock; /* of a serial kind; else NULL */
    Py_ssize_t users;        /* calls in progress, unless serial */
    int closed;
} opened_object;

/* Enters the Repository, makes the object, and begins the call that opens it.
 * Returns NULL with an exception set on error. */
opened_object *gd_py_begin_opening(PyObject *repository, PyTypeObject *type,
                                   const opened_kind *kind, gd_py_call *call);
/* Ends the call.  Returns the object, or drops it and returns NULL unless s is
 * GD_OK. */
PyObject *gd_py_end_opening(opened_object *self, gd_status s, void *handle,
                            gd_py_call *call);
/* Every use of the handle must lie between enter and leave.  Enter may wait for
 * another thread.  It returns 0 with an exception set if the object is closed,
 * or belongs to another process. */
int gd_py_enter_opened(opened_object *self);
void gd_py_leave_opened(opened_object *self);
/* Enters, and begins a call (call.c).  Returns 0 with an exception set on
 * error. */
int gd_py_call_opened(PyObject *object, gd_py_call *call);
/* Idempotent; does nothing in a forked child.  REQUIRES: nobody else is using
 * the object. */
void gd_py_close_opened(opened_object *self);
/* The method close, and the destructor. */
PyObject *gd_py_opened_close(PyObject *object, PyObject *unused);
void gd_py_opened_dealloc(PyObject *object);

/* ---- batch.c ---- */

/* Decodes and sorts records.  Returns NULL with an exception set on error.
 * *room is for the caller to free. */
gd_item *gd_py_sorted_items(const Py_buffer *records, size_t *count,
                            gd_item **room);

/* The answers to sorted requests, and the requests that wait; behind them how
 * many files were not read, unless NULL. */
PyObject *gd_py_answers(const gd_item *requests, const uint64_t *addresses,
                        size_t count, const uint32_t *unread);

/* ---- part.c ---- */

typedef struct part_object part_object;

typedef struct maintenance_object {
    PyObject_HEAD
    repository_object *owner; /* entered until closed */
    int lock_fd;              /* the maintainer lock; -1: not held */
    int image_lock_fd;        /* an image's lock; -1: none is held */
    int closed;
    int busy; /* a call is under way */
    part_object *parts;
} maintenance_object;

/* The start of every object that a Maintenance has open (Recipe, Group, ...).
 * It keeps the Maintenance alive, and is closed with it. */
struct part_object {
    PyObject_HEAD
    maintenance_object *maintenance;
    part_object *next;
    part_object **link;              /* the pointer that points to this one */
    void (*release)(part_object *);  /* releases everything; NULL: closed */
};

/* Every call must lie between enter and leave; the GIL may be released between
 * them.  Enter returns 0 with an exception set if the object is closed, belongs
 * to another process, is in use by another thread or, with locked, does not
 * hold the maintainer lock. */
int gd_py_enter_maintenance(maintenance_object *self, int locked);
void gd_py_leave_maintenance(maintenance_object *self);
/* Enters, and begins a call (call.c).  Returns 0 with an exception set on
 * error. */
int gd_py_call_maintenance(PyObject *object, int locked, gd_py_call *call);

/* Enters the Maintenance, makes a part of a type whose struct begins with a
 * part_object (the rest is zeros), and begins the call that opens it.  Returns
 * NULL with an exception set on error. */
part_object *gd_py_begin_part(PyObject *maintenance, PyTypeObject *type,
                              int locked, gd_py_call *call);
/* Ends the call.  Returns the part, or drops it and returns NULL unless s is
 * GD_OK.  release runs without the GIL. */
PyObject *gd_py_end_part(part_object *self, gd_status s,
                         void (*release)(part_object *), gd_py_call *call);
/* Like gd_py_enter_maintenance; end with
 * gd_py_leave_maintenance(self->maintenance). */
int gd_py_enter_part(part_object *self, int locked);
/* Like gd_py_call_maintenance. */
int gd_py_call_part(PyObject *object, int locked, gd_py_call *call);
/* Idempotent. */
void gd_py_close_part(part_object *self);
/* A number that a part knows while it is open, and the getter for it: its
 * closure is a gd_py_fact. */
typedef struct gd_py_fact {
    uint64_t (*of)(const part_object *);
} gd_py_fact;
PyObject *gd_py_part_fact(PyObject *object, void *fact);
/* The method close, and the destructor, of any part. */
PyObject *gd_py_part_close(PyObject *object, PyObject *unused);
void gd_py_part_dealloc(PyObject *object);

/* ---- functions of the module ---- */

extern PyMethodDef gd_py_fingerprint_functions[]; /* fingerprint.c */
extern PyMethodDef gd_py_run_functions[];         /* runs.c */
extern PyMethodDef gd_py_duplicates_functions[];  /* duplicates.c */
extern PyMethodDef gd_py_batch_functions[];       /* batch.c */
extern PyMethodDef gd_py_deflate_functions[];     /* deflate.c */
extern PyMethodDef gd_py_scrub_functions[];       /* scrub.c */
extern PyMethodDef gd_py_spare_functions[];       /* spare.c */
extern PyMethodDef gd_py_rewriting_functions[];   /* rewriting.c */
extern PyMethodDef gd_py_repository_functions[];  /* repository.c */

/* ---- types, and the methods of a higher type that open them ---- */

extern const gd_py_type gd_py_transaction_type; /* transaction.c */
PyObject *gd_py_begin(PyObject *repository, PyObject *args);
PyObject *gd_py_begin_conversion(PyObject *repository, PyObject *args);
/* Methods of Transaction (conversion.c). */
PyObject *gd_py_begin_table(PyObject *transaction, PyObject *args);
PyObject *gd_py_add_derived(PyObject *transaction, PyObject *args);
PyObject *gd_py_copy_table(PyObject *transaction, PyObject *args);
PyObject *gd_py_finish_conversion(PyObject *transaction, PyObject *unused);
/* image.c */
PyObject *gd_py_open_finished(PyObject *transaction, PyObject *unused);
PyObject *gd_py_exchange_conversion(PyObject *transaction, PyObject *unused);

extern const gd_py_type gd_py_image_type; /* image.c */
PyObject *gd_py_open_image(PyObject *repository, PyObject *args);

extern const gd_py_type gd_py_volume_type; /* volume.c */
PyObject *gd_py_create_volume(PyObject *repository, PyObject *args);
PyObject *gd_py_open_volume(PyObject *repository, PyObject *args);
PyObject *gd_py_look_at_volume(PyObject *repository, PyObject *args);
PyObject *gd_py_delete_volume(PyObject *repository, PyObject *args);
PyObject *gd_py_discard_volume(PyObject *repository, PyObject *args);
PyObject *gd_py_rename_volume(PyObject *repository, PyObject *args);
PyObject *gd_py_roll_back_volume(PyObject *repository, PyObject *args);
PyObject *gd_py_finish_volume(PyObject *repository, PyObject *args);

extern const gd_py_type gd_py_block_reader_type; /* blockreader.c */
PyObject *gd_py_open_block_reader(PyObject *repository, PyObject *unused);

extern const gd_py_type gd_py_recipe_type; /* recipe.c */
PyObject *gd_py_open_entry(PyObject *maintenance, PyObject *args);
PyObject *gd_py_open_recipe(PyObject *maintenance, PyObject *args);

extern const gd_py_type gd_py_group_type; /* group.c */
PyObject *gd_py_enter_group(PyObject *maintenance, PyObject *args);

extern const gd_py_type gd_py_rewriting_type; /* rewriting.c */
PyObject *gd_py_begin_rewriting(PyObject *maintenance, PyObject *args);
PyObject *gd_py_begin_cooling(PyObject *maintenance, PyObject *args);
PyObject *gd_py_note_codec(PyObject *maintenance, PyObject *args);

extern const gd_py_type gd_py_merge_type; /* merge.c */
extern const gd_py_type gd_py_relocation_type;

extern const gd_py_type gd_py_repository_type; /* repository.c */

extern const gd_py_type gd_py_maintenance_type; /* maintenance.c */

extern const gd_py_type gd_py_estimate_type; /* estimate.c */

extern const gd_py_type gd_py_index_type; /* index.c */

#endif
