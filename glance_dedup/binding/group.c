/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.c - glance_dedup._engine.Group: a group that the maintainer holds
 * alone, to free, rewrite or unlink.
 *
 * A part (part.c).  Closing it also discards all that is known of the group.
 */
#include "binding/binding.h"

#include "engine/base/coding.h"
#include "engine/maintenance/grouprewrite.h"
#include "engine/maintenance/ownedgroup.h"
#include "engine/maintenance/placeholder.h"

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
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    uint32_t number;
    gd_py_call call;
    if (!gd_py_parse_group(object, args, &number)) {
        return NULL;
    }
    part_object *part = gd_py_begin_part(object, state->group_type, 1, &call);
    if (part == NULL) {
        return NULL;
    }
    gd_status s = gd_owned_group_open(part->maintenance->owner->repo, number,
                                      &((group_object *)part)->owned,
                                      &call.err);
    return gd_py_end_part(part, s, release_group, &call);
}

/* Facts need the group open, since closing it discards all that is known. */
static gd_leased_group *
leased_of(const part_object *part)
{
    return ((const group_object *)part)->owned->leased;
}

static uint64_t
number_of(const part_object *part)
{
    return leased_of(part)->group->number;
}

static uint64_t
slots_of(const part_object *part)
{
    return leased_of(part)->group->bounds.slots;
}

static uint64_t
published_of(const part_object *part)
{
    return leased_of(part)->published.count;
}

static PyObject *
group_states(PyObject *object, PyObject *Py_UNUSED(unused))
{
    group_object *self = (group_object *)object;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    uint64_t slots = slots_of(&self->part);
    uint8_t *out;
    PyObject *result = gd_py_new_bytes(slots, &out);
    for (uint64_t i = 0; result != NULL && i < slots; i++) {
        out[i] = self->owned->leased->entries[i].state;
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
    gd_py_call call;
    PyObject *result = NULL;
    uint32_t *slots = parse_slots(args, &count);
    if (slots != NULL && gd_py_call_part(object, 1, &call)) {
        gd_status s = gd_owned_group_free(self->owned, slots, count, &freed,
                                          &call.err);
        result = gd_py_end_number(&call, s, freed);
    }
    PyMem_Free(slots);
    return result;
}

static PyObject *
group_punch(PyObject *object, PyObject *Py_UNUSED(unused))
{
    group_object *self = (group_object *)object;
    uint64_t bytes = 0;
    gd_py_call call;
    if (!gd_py_call_part(object, 1, &call)) {
        return NULL;
    }
    gd_status s = gd_owned_group_punch(self->owned, &bytes, &call.err);
    return gd_py_end_number(&call, s, bytes);
}

static PyObject *
group_live_bytes(PyObject *object, PyObject *Py_UNUSED(unused))
{
    group_object *self = (group_object *)object;
    uint64_t bytes = 0, kept = 0;
    gd_py_call call;
    if (!gd_py_call_part(object, 0, &call)) {
        return NULL;
    }
    gd_status s =
        gd_owned_group_live_bytes(self->owned, &bytes, &kept, &call.err);
    return gd_py_end_two(&call, s, bytes, kept);
}

static PyObject *
group_rewrite(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"codec", "level", NULL};
    group_object *self = (group_object *)object;
    const char *name = NULL;
    gd_packing packing = {0};
    uint64_t bytes = 0;
    gd_py_call call;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|zi", names, &name,
                                     &packing.level)) {
        return NULL;
    }
    gd_status s = gd_py_parse_codec(name == NULL ? "none" : name,
                                    packing.level, &packing.codec, &call.err);
    if (s != GD_OK) {
        return gd_py_raise(object, &call.err);
    }
    if (!gd_py_call_part(object, 1, &call)) {
        return NULL;
    }
    s = gd_group_rewrite_owned(self->owned, name == NULL ? NULL : &packing,
                               &bytes, &call.err);
    return gd_py_end_number(&call, s, bytes);
}

static PyObject *
group_mark_damaged(PyObject *object, PyObject *args)
{
    group_object *self = (group_object *)object;
    const gd_env *env = gd_env_posix();
    size_t count, name_count = 0;
    gd_quarantine_name *names = NULL;
    gd_py_call call;
    uint32_t *slots = parse_slots(args, &count);
    if (slots == NULL || !gd_py_call_part(object, 1, &call)) {
        PyMem_Free(slots);
        return NULL;
    }
    gd_status s = gd_owned_group_mark_damaged(self->owned, slots, count, &names,
                                              &name_count, &call.err);
    PyObject *list =
        gd_py_end(&call, s) ? PyList_New((Py_ssize_t)name_count) : NULL;
    PyMem_Free(slots);
    for (size_t i = 0; list != NULL && i < name_count; i++) {
        gd_py_set_item(&list, i, PyUnicode_FromString(names[i]));
    }
    env->release(env, names);
    return list;
}

static PyObject *
group_unlink(PyObject *object, PyObject *Py_UNUSED(unused))
{
    group_object *self = (group_object *)object;
    bool removed = false;
    gd_py_call call;
    if (!gd_py_call_part(object, 1, &call)) {
        return NULL;
    }
    gd_status s = gd_owned_group_unlink(self->owned, &removed, &call.err);
    return gd_py_end_bool(&call, s, removed);
}

static PyObject *
group_leave_placeholder(PyObject *object, PyObject *Py_UNUSED(unused))
{
    group_object *self = (group_object *)object;
    uint64_t bytes = 0;
    gd_py_call call;
    if (!gd_py_call_part(object, 1, &call)) {
        return NULL;
    }
    gd_status s =
        gd_placeholder_leave(self->owned, &bytes, &call.err);
    return gd_py_end_number(&call, s, bytes);
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
    {"leave_placeholder", group_leave_placeholder, METH_NOARGS, NULL},
    {"close", gd_py_part_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef group_attributes[] = {
    {"number", gd_py_part_fact, NULL, NULL, &(gd_py_fact){number_of}},
    {"slots", gd_py_part_fact, NULL, NULL, &(gd_py_fact){slots_of}},
    {"published", gd_py_part_fact, NULL, NULL, &(gd_py_fact){published_of}},
    {NULL, NULL, NULL, NULL, NULL},
};

const gd_py_type gd_py_group_type = {
    .name = "glance_dedup._engine.Group",
    .size = sizeof(group_object),
    .dealloc = gd_py_part_dealloc,
    .methods = group_methods,
    .attributes = group_attributes,
};
