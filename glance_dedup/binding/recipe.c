/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipe.c - glance_dedup._engine.Recipe: a recipe as the accounting judges it,
 * from the spool or of an image.
 *
 * A part (part.c).  What was found of the recipe stays readable after closing.
 */
#include "binding/binding.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "engine/base/coding.h"
#include "engine/files/spoolfile.h"
#include "engine/format/runs.h"

typedef struct recipe_object {
    part_object part;
    gd_spool_file entry;
} recipe_object;

static void
release_recipe(part_object *part)
{
    gd_spool_file_close(&((recipe_object *)part)->entry);
}

typedef gd_status opener(const gd_env *env, int root, const gd_params *params,
                         const char *name, gd_spool_file *entry,
                         gd_error *err);

static PyObject *
open_recipe(PyObject *object, PyObject *args, opener *open)
{
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    const char *name;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "s", &name)) {
        return NULL;
    }
    part_object *part = gd_py_begin_part(object, state->recipe_type, 0, &call);
    if (part == NULL) {
        return NULL;
    }
    const gd_repo *repo = part->maintenance->owner->repo;
    gd_status s = open(repo->env, repo->root, &repo->params, name,
                       &((recipe_object *)part)->entry, &call.err);
    return gd_py_end_part(part, s, release_recipe, &call);
}

PyObject *
gd_py_open_entry(PyObject *object, PyObject *args)
{
    return open_recipe(object, args, gd_spool_file_open);
}

PyObject *
gd_py_open_recipe(PyObject *object, PyObject *args)
{
    return open_recipe(object, args, gd_spool_file_open_image);
}

/* The recipe that the opening or the last refresh found stays readable for
 * ever. */
static gd_spool_file *
entry_of(PyObject *object)
{
    return &((recipe_object *)object)->entry;
}

static PyObject *
recipe_kind(PyObject *object, void *Py_UNUSED(unused))
{
    char kind = (char)entry_of(object)->kind;
    return PyUnicode_FromStringAndSize(&kind, kind == 0 ? 0 : 1);
}

static PyObject *
recipe_error(PyObject *object, void *Py_UNUSED(unused))
{
    const gd_error *damage = &entry_of(object)->damage;
    if (damage->status == GD_OK) {
        Py_RETURN_NONE;
    }
    return PyUnicode_DecodeUTF8(damage->text, (Py_ssize_t)strlen(damage->text),
                                "replace");
}

static PyObject *
recipe_header(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const gd_spool_file *entry = entry_of(object);
    gd_error err;
    if (!entry->complete) {
        gd_fail(&err, GD_INVALID, "%s has no valid header page",
                entry->name);
        return gd_py_raise(object, &err);
    }
    return gd_py_whole_header_dict(&entry->recipe.header);
}

static PyObject *
recipe_live(PyObject *object, PyObject *Py_UNUSED(unused))
{
    bool live = false;
    gd_py_call call;
    if (!gd_py_call_part(object, 0, &call)) {
        return NULL;
    }
    gd_status s = gd_spool_file_live(entry_of(object), &live, &call.err);
    return gd_py_end_bool(&call, s, live);
}

static PyObject *
recipe_try_lock(PyObject *object, PyObject *args)
{
    int byte;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "i", &byte)) {
        return NULL;
    }
    if (byte != GD_BYTE_WRITER && byte != GD_BYTE_USERS) {
        gd_fail(&call.err, GD_INVALID,
                "a recipe's lock bytes are 0 and 1, not %d", byte);
        return gd_py_raise(object, &call.err);
    }
    if (!gd_py_call_part(object, 1, &call)) {
        return NULL;
    }
    return gd_py_end_not_busy(
        &call, gd_spool_file_lock(entry_of(object), byte, &call.err));
}

static uint64_t
pages_of(const gd_spool_file *entry)
{
    return entry->complete ? gd_recipe_pages(entry->recipe.header.extents) : 0;
}

static PyObject *
recipe_pages(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLongLong(pages_of(entry_of(object)));
}

static PyObject *
recipe_measure(PyObject *object, PyObject *Py_UNUSED(unused))
{
    uint64_t blocks = 0;
    gd_py_call call;
    if (!gd_py_call_part(object, 0, &call)) {
        return NULL;
    }
    gd_status s = gd_spool_file_measure(entry_of(object), &blocks, &call.err);
    return gd_py_end_number(&call, s, blocks);
}

static PyObject *
pack_runs(const gd_run *runs, size_t count)
{
    uint8_t *out;
    PyObject *result = gd_py_new_bytes(count * GD_RUN_SIZE, &out);
    for (size_t i = 0; result != NULL && i < count; i++, out += GD_RUN_SIZE) {
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
    gd_spool_file *entry = entry_of(object);
    unsigned long long first = 0, pages = pages_of(entry);
    gd_run *runs = NULL;
    size_t count = 0;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "|KK", &first, &pages) ||
        !gd_py_call_part(object, 0, &call)) {
        return NULL;
    }
    gd_status s = gd_spool_file_runs(entry, first, pages, &runs, &count,
                                     &call.err);
    if (!gd_py_end(&call, s)) {
        return NULL;
    }
    PyObject *result = pack_runs(runs, count);
    entry->env->release(entry->env, runs);
    return result;
}

typedef gd_status settler(const gd_spool_file *entry, gd_error *err);

static PyObject *
settle_recipe(PyObject *object, settler *settle)
{
    gd_py_call call;
    if (!gd_py_call_part(object, 1, &call)) {
        return NULL;
    }
    return gd_py_end_none(&call, settle(entry_of(object), &call.err));
}

static PyObject *
recipe_unlink(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return settle_recipe(object, gd_spool_file_unlink);
}

static PyObject *
recipe_delete(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return settle_recipe(object, gd_spool_file_delete);
}

static PyObject *
recipe_set_aside(PyObject *object, PyObject *Py_UNUSED(unused))
{
    char name[GD_NAME_SIZE];
    gd_py_call call;
    if (!gd_py_call_part(object, 1, &call)) {
        return NULL;
    }
    gd_status s = gd_spool_file_set_aside(entry_of(object), name, &call.err);
    return gd_py_end(&call, s) ? PyUnicode_FromString(name) : NULL;
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

static PyMemberDef recipe_members[] = {
    {"name", T_STRING_INPLACE, offsetof(recipe_object, entry.name), READONLY,
     NULL},
    {"complete", T_BOOL, offsetof(recipe_object, entry.complete), READONLY,
     NULL},
    {"links", T_ULONGLONG, offsetof(recipe_object, entry.links), READONLY,
     NULL},
    {"inode", T_ULONGLONG, offsetof(recipe_object, entry.inode), READONLY,
     NULL},
    {"modified", T_ULONGLONG, offsetof(recipe_object, entry.modified), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef recipe_attributes[] = {
    {"kind", recipe_kind, NULL, NULL, NULL},
    {"error", recipe_error, NULL, NULL, NULL},
    {"pages", recipe_pages, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

const gd_py_type gd_py_recipe_type = {
    .name = "glance_dedup._engine.Recipe",
    .size = sizeof(recipe_object),
    .dealloc = gd_py_part_dealloc,
    .methods = recipe_methods,
    .attributes = recipe_attributes,
    .members = recipe_members,
};
