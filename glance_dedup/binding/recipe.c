/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipe.c - glance_dedup._engine.Recipe: a recipe as the accounting judges it,
 * from the spool or of an image.
 *
 * A part (part.c).  What was found of the recipe stays readable after closing.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/files/spoolentry.h"
#include "engine/format/runs.h"

typedef struct recipe_object {
    part_object part;
    gd_spool_entry entry;
} recipe_object;

static void
release_recipe(part_object *part)
{
    gd_spool_entry_close(&((recipe_object *)part)->entry);
}

typedef gd_status opener(const gd_env *env, int root, const gd_params *params,
                         const char *name, gd_spool_entry *entry,
                         gd_error *err);

static PyObject *
open_recipe(PyObject *object, PyObject *args, opener *open)
{
    maintenance_object *self = (maintenance_object *)object;
    const char *name;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "s", &name) ||
        !gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    recipe_object *recipe =
        (recipe_object *)gd_py_new_part(self, state->recipe_type);
    if (recipe == NULL) {
        gd_py_leave_maintenance(self);
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = open(repo->env, repo->root, &repo->params, name, &recipe->entry,
             &err);
    Py_END_ALLOW_THREADS
    if (s == GD_OK) {
        gd_py_open_part(&recipe->part, release_recipe);
    }
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        Py_DECREF((PyObject *)recipe);
        return gd_py_raise(object, &err);
    }
    return (PyObject *)recipe;
}

PyObject *
gd_py_open_entry(PyObject *object, PyObject *args)
{
    return open_recipe(object, args, gd_spool_entry_open);
}

PyObject *
gd_py_open_recipe(PyObject *object, PyObject *args)
{
    return open_recipe(object, args, gd_spool_entry_open_image);
}

/* What the opening or the last look found stays readable for ever. */
static const gd_spool_entry *
entry_of(PyObject *object)
{
    return &((recipe_object *)object)->entry;
}

static PyObject *
recipe_name(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(entry_of(object)->name);
}

static PyObject *
recipe_kind(PyObject *object, void *unused)
{
    (void)unused;
    char kind = (char)entry_of(object)->kind;
    return PyUnicode_FromStringAndSize(&kind, kind == 0 ? 0 : 1);
}

static PyObject *
recipe_complete(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(entry_of(object)->complete);
}

static PyObject *
recipe_error(PyObject *object, void *unused)
{
    (void)unused;
    const gd_error *damage = &entry_of(object)->damage;
    if (damage->status == GD_OK) {
        Py_RETURN_NONE;
    }
    return PyUnicode_DecodeUTF8(damage->text, (Py_ssize_t)strlen(damage->text),
                                "replace");
}

static PyObject *
recipe_links(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(entry_of(object)->links);
}

static PyObject *
recipe_inode(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(entry_of(object)->inode);
}

static PyObject *
recipe_modified(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(entry_of(object)->modified);
}

static PyObject *
recipe_header(PyObject *object, PyObject *unused)
{
    (void)unused;
    const gd_spool_entry *entry = entry_of(object);
    gd_error err;
    if (!entry->complete) {
        gd_fail(&err, GD_INVALID, "%s has no valid header page",
                entry->name);
        return gd_py_raise(object, &err);
    }
    return gd_py_whole_header_dict(&entry->recipe.header);
}

static PyObject *
recipe_live(PyObject *object, PyObject *unused)
{
    (void)unused;
    recipe_object *self = (recipe_object *)object;
    bool live;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_spool_entry_live(&self->entry, &live, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return s == GD_OK ? PyBool_FromLong(live) : gd_py_raise(object, &err);
}

static PyObject *
recipe_try_lock(PyObject *object, PyObject *args)
{
    recipe_object *self = (recipe_object *)object;
    int byte;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "i", &byte)) {
        return NULL;
    }
    if (byte != GD_BYTE_WRITER && byte != GD_BYTE_USERS) {
        gd_fail(&err, GD_INVALID, "a recipe's lock bytes are 0 and 1, not %d",
                byte);
        return gd_py_raise(object, &err);
    }
    if (!gd_py_enter_part(&self->part, 1)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_spool_entry_lock(&self->entry, byte, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return gd_py_not_busy(object, s, &err);
}

static PyObject *
recipe_pages(PyObject *object, void *unused)
{
    (void)unused;
    const gd_spool_entry *entry = entry_of(object);
    return PyLong_FromUnsignedLongLong(
        entry->complete ? gd_recipe_pages(entry->recipe.header.extents) : 0);
}

static PyObject *
recipe_measure(PyObject *object, PyObject *unused)
{
    (void)unused;
    recipe_object *self = (recipe_object *)object;
    uint64_t blocks;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_spool_entry_measure(&self->entry, &blocks, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return s == GD_OK ? PyLong_FromUnsignedLongLong(blocks)
                      : gd_py_raise(object, &err);
}

static PyObject *
pack_runs(const gd_run *runs, size_t count)
{
    PyObject *result =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * GD_RUN_SIZE));
    uint8_t *out = result == NULL ? NULL : (uint8_t *)PyBytes_AsString(result);
    for (size_t i = 0; out != NULL && i < count; i++, out += GD_RUN_SIZE) {
        gd_put32(out, runs[i].group);
        gd_put32(out + 4, runs[i].slot);
        gd_put32(out + 8, runs[i].blocks);
    }
    return result;
}

/* runs(first, pages): without arguments, of all pages. */
static PyObject *
recipe_runs(PyObject *object, PyObject *args)
{
    recipe_object *self = (recipe_object *)object;
    const gd_recipe_header *header = &self->entry.recipe.header;
    unsigned long long first = 0, pages;
    gd_run *runs = NULL;
    size_t count = 0;
    gd_error err;
    gd_status s;
    pages = self->entry.complete ? gd_recipe_pages(header->extents) : 0;
    if (!PyArg_ParseTuple(args, "|KK", &first, &pages) ||
        !gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_spool_entry_runs(&self->entry, first, pages, &runs, &count, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    PyObject *result = pack_runs(runs, count);
    self->entry.env->release(self->entry.env, runs);
    return result;
}

typedef gd_status settler(const gd_spool_entry *entry, gd_error *err);

static PyObject *
settle_recipe(PyObject *object, settler *settle)
{
    recipe_object *self = (recipe_object *)object;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_part(&self->part, 1)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = settle(&self->entry, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return gd_py_none(object, s, &err);
}

static PyObject *
recipe_unlink(PyObject *object, PyObject *unused)
{
    (void)unused;
    return settle_recipe(object, gd_spool_entry_unlink);
}

static PyObject *
recipe_delete(PyObject *object, PyObject *unused)
{
    (void)unused;
    return settle_recipe(object, gd_spool_entry_delete);
}

static PyObject *
recipe_set_aside(PyObject *object, PyObject *unused)
{
    (void)unused;
    recipe_object *self = (recipe_object *)object;
    char name[GD_NAME_SIZE];
    gd_error err;
    gd_status s;
    if (!gd_py_enter_part(&self->part, 1)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_spool_entry_set_aside(&self->entry, name, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return s == GD_OK ? PyUnicode_FromString(name) : gd_py_raise(object, &err);
}

static PyMethodDef recipe_methods[] = {
    {"header", recipe_header, METH_NOARGS, NULL},
    {"live", recipe_live, METH_NOARGS, NULL},
    {"try_lock", recipe_try_lock, METH_VARARGS, NULL},
    {"measure", recipe_measure, METH_NOARGS, NULL},
    {"runs", recipe_runs, METH_VARARGS, NULL},
    {"unlink", recipe_unlink, METH_NOARGS, NULL},
    {"set_aside", recipe_set_aside, METH_NOARGS, NULL},
    {"delete", recipe_delete, METH_NOARGS, NULL},
    {"close", gd_py_part_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef recipe_attributes[] = {
    {"name", recipe_name, NULL, NULL, NULL},
    {"kind", recipe_kind, NULL, NULL, NULL},
    {"complete", recipe_complete, NULL, NULL, NULL},
    {"error", recipe_error, NULL, NULL, NULL},
    {"links", recipe_links, NULL, NULL, NULL},
    {"inode", recipe_inode, NULL, NULL, NULL},
    {"modified", recipe_modified, NULL, NULL, NULL},
    {"pages", recipe_pages, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot recipe_slots[] = {
    {Py_tp_dealloc, gd_py_part_dealloc},
    {Py_tp_methods, recipe_methods},
    {Py_tp_getset, recipe_attributes},
    {0, NULL},
};

PyType_Spec gd_py_recipe_spec = {
    .name = "glance_dedup._engine.Recipe",
    .basicsize = sizeof(recipe_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = recipe_slots,
};
