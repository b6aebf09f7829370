/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.c - glance_dedup._engine.Group: a group that the maintainer holds
 * alone, to free, rewrite or unlink.
 *
 * A part (part.c).  Closing it also discards all that is known of the group.
 */
#include "binding/binding.h"

#include "engine/base/coding.h"
#include "engine/maintain/grouprewrite.h"
#include "engine/maintain/ownedgroup.h"

typedef struct group_object {
    part_object part;
    gd_owned_group *owned;
} group_object;

static void
release_group(part_object *part)
{
    gd_owned_group_close(((group_object *)part)->owned);
}

PyObject *
gd_py_enter_group(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number;
    gd_error err;
    gd_status s;
    if (!gd_py_parse_group(object, args, &number) ||
        !gd_py_enter_maintenance(self, 1)) {
        return NULL;
    }
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    group_object *group =
        (group_object *)gd_py_new_part(self, state->group_type);
    if (group == NULL) {
        gd_py_leave_maintenance(self);
        return NULL;
    }
    gd_repo *repo = self->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = gd_owned_group_open(repo, number, &group->owned, &err);
    Py_END_ALLOW_THREADS
    if (s == GD_OK) {
        gd_py_open_part(&group->part, release_group);
    }
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        Py_DECREF((PyObject *)group);
        return gd_py_raise(object, &err);
    }
    return (PyObject *)group;
}

/* Facts need the group open, since closing it discards all that is known. */
static PyObject *
group_fact(PyObject *object, uint32_t (*fact)(const gd_owned_group *))
{
    group_object *self = (group_object *)object;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    PyObject *result = PyLong_FromUnsignedLong(fact(self->owned));
    gd_py_leave_maintenance(self->part.maintenance);
    return result;
}

static uint32_t
number_of(const gd_owned_group *owned)
{
    return owned->leased->group->number;
}

static uint32_t
slots_of(const gd_owned_group *owned)
{
    return owned->leased->group->bounds.slots;
}

static uint32_t
published_of(const gd_owned_group *owned)
{
    return owned->leased->published.count;
}

static PyObject *
group_number(PyObject *object, void *unused)
{
    (void)unused;
    return group_fact(object, number_of);
}

static PyObject *
group_slots(PyObject *object, void *unused)
{
    (void)unused;
    return group_fact(object, slots_of);
}

static PyObject *
group_published(PyObject *object, void *unused)
{
    (void)unused;
    return group_fact(object, published_of);
}

static PyObject *
group_states(PyObject *object, PyObject *unused)
{
    (void)unused;
    group_object *self = (group_object *)object;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    uint32_t slots = slots_of(self->owned);
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)slots);
    char *out = result == NULL ? NULL : PyBytes_AsString(result);
    for (uint32_t i = 0; out != NULL && i < slots; i++) {
        out[i] = (char)self->owned->leased->entries[i].state;
    }
    gd_py_leave_maintenance(self->part.maintenance);
    return result;
}

/* Copies the slots of an argument, 32 bits each, since the argument's buffer
 * may not be aligned.  Returns NULL with an exception set on error. */
static uint32_t *
parse_slots(PyObject *args, size_t *count)
{
    Py_buffer view;
    uint32_t *slots = NULL;
    if (!PyArg_ParseTuple(args, "y*", &view)) {
        return NULL;
    }
    if (view.len % 4 != 0) {
        PyErr_SetString(PyExc_ValueError, "slots have 32 bits each");
    } else if ((slots = PyMem_Malloc((size_t)view.len + 1)) == NULL) {
        PyErr_NoMemory();
    } else {
        *count = (size_t)view.len / 4;
        for (size_t i = 0; i < *count; i++) {
            slots[i] = gd_get32((const uint8_t *)view.buf + 4 * i);
        }
    }
    PyBuffer_Release(&view);
    return slots;
}

static PyObject *
group_free(PyObject *object, PyObject *args)
{
    group_object *self = (group_object *)object;
    size_t count;
    uint32_t freed = 0;
    gd_error err;
    gd_status s;
    uint32_t *slots = parse_slots(args, &count);
    if (slots == NULL) {
        return NULL;
    }
    if (!gd_py_enter_part(&self->part, 1)) {
        PyMem_Free(slots);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_owned_group_free(self->owned, slots, count, &freed, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    PyMem_Free(slots);
    return s == GD_OK ? PyLong_FromUnsignedLong(freed)
                      : gd_py_raise(object, &err);
}

static PyObject *
group_punch(PyObject *object, PyObject *unused)
{
    (void)unused;
    group_object *self = (group_object *)object;
    uint64_t bytes = 0;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_part(&self->part, 1)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_owned_group_punch(self->owned, &bytes, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return s == GD_OK ? PyLong_FromUnsignedLongLong(bytes)
                      : gd_py_raise(object, &err);
}

static PyObject *
group_live_bytes(PyObject *object, PyObject *unused)
{
    (void)unused;
    group_object *self = (group_object *)object;
    uint64_t bytes = 0, kept = 0;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_owned_group_live_bytes(self->owned, &bytes, &kept, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    return Py_BuildValue("(KK)", (unsigned long long)bytes,
                         (unsigned long long)kept);
}

static PyObject *
group_rewrite(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"codec", "level", NULL};
    group_object *self = (group_object *)object;
    const char *name = NULL;
    int level = 0;
    gd_codec codec = GD_CODEC_NONE;
    uint64_t bytes = 0;
    gd_error err;
    gd_status s = GD_OK;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|zi", names, &name,
                                     &level)) {
        return NULL;
    }
    if (name != NULL) {
        s = gd_codec_parse(name, &codec, &err);
    }
    if (s == GD_OK) {
        s = gd_codec_check_level(codec, level, &err);
    }
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    if (!gd_py_enter_part(&self->part, 1)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_owned_group_rewrite(self->owned, name == NULL ? NULL : &codec, level,
                               &bytes, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return s == GD_OK ? PyLong_FromUnsignedLongLong(bytes)
                      : gd_py_raise(object, &err);
}

static PyObject *
group_mark_damaged(PyObject *object, PyObject *args)
{
    group_object *self = (group_object *)object;
    size_t count, name_count = 0;
    gd_quarantine_name *names = NULL;
    gd_error err;
    gd_status s;
    uint32_t *slots = parse_slots(args, &count);
    if (slots == NULL) {
        return NULL;
    }
    if (!gd_py_enter_part(&self->part, 1)) {
        PyMem_Free(slots);
        return NULL;
    }
    const gd_env *env = self->part.maintenance->owner->repo->env;
    Py_BEGIN_ALLOW_THREADS
    s = gd_owned_group_mark_damaged(self->owned, slots, count, &names,
                                    &name_count, &err);
    Py_END_ALLOW_THREADS
    PyMem_Free(slots);
    PyObject *list = s == GD_OK ? PyList_New((Py_ssize_t)name_count)
                                : gd_py_raise(object, &err);
    for (size_t i = 0; list != NULL && i < name_count; i++) {
        PyObject *item = PyUnicode_FromString(names[i]);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) {
            Py_CLEAR(list);
        }
    }
    env->release(env, names);
    gd_py_leave_maintenance(self->part.maintenance);
    return list;
}

static PyObject *
group_unlink(PyObject *object, PyObject *unused)
{
    (void)unused;
    group_object *self = (group_object *)object;
    bool removed = false;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_part(&self->part, 1)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_owned_group_unlink(self->owned, &removed, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return s == GD_OK ? PyBool_FromLong(removed) : gd_py_raise(object, &err);
}

static PyMethodDef group_methods[] = {
    {"states", group_states, METH_NOARGS, NULL},
    {"free", group_free, METH_VARARGS, NULL},
    {"punch", group_punch, METH_NOARGS, NULL},
    {"live_bytes", group_live_bytes, METH_NOARGS, NULL},
    {"rewrite", (PyCFunction)(void (*)(void))group_rewrite,
     METH_VARARGS | METH_KEYWORDS, NULL},
    {"mark_damaged", group_mark_damaged, METH_VARARGS, NULL},
    {"unlink", group_unlink, METH_NOARGS, NULL},
    {"close", gd_py_part_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef group_attributes[] = {
    {"number", group_number, NULL, NULL, NULL},
    {"slots", group_slots, NULL, NULL, NULL},
    {"published", group_published, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot group_type_slots[] = {
    {Py_tp_dealloc, gd_py_part_dealloc},
    {Py_tp_methods, group_methods},
    {Py_tp_getset, group_attributes},
    {0, NULL},
};

PyType_Spec gd_py_group_spec = {
    .name = "glance_dedup._engine.Group",
    .basicsize = sizeof(group_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = group_type_slots,
};
