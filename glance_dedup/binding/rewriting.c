/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rewriting.c - glance_dedup._engine.Rewriting: compresses a sealed group
 * again, under its lease until the exchange; and codec_mark.
 *
 * A part (part.c).  After `step` fails, only `close` may be called.
 */
#include "binding/binding.h"

#include "engine/maintain/grouprewrite.h"

typedef struct rewriting_object {
    part_object part;
    gd_leased_group *leased;
    gd_owned_group *owned; /* NULL until the exchange is tried */
    gd_group_rewrite *rewriting;
    gd_codec codec;
    int level;
    int complete;
} rewriting_object;

static void
release_rewriting(part_object *part)
{
    rewriting_object *self = (rewriting_object *)part;
    gd_group_rewrite_close(self->rewriting);
    if (self->owned != NULL) {
        gd_owned_group_close(self->owned);
    } else {
        gd_leased_group_close(self->leased);
    }
}

static gd_status
parse_codec(const char *name, int level, gd_codec *codec, gd_error *err)
{
    gd_status s = gd_codec_parse(name, codec, err);
    return s == GD_OK ? gd_codec_check_level(*codec, level, err) : s;
}

static gd_status
begin(gd_repo *repo, uint32_t number, rewriting_object *self, gd_error *err)
{
    gd_status s = gd_leased_group_open(repo, number, &self->leased, err);
    if (s != GD_OK) {
        return s;
    }
    s = gd_group_rewrite_open(self->leased, &self->codec, self->level,
                              &self->rewriting, err);
    if (s != GD_OK) {
        gd_leased_group_close(self->leased);
    }
    return s;
}

PyObject *
gd_py_begin_rewriting(PyObject *object, PyObject *args)
{
    maintenance_object *maintenance = (maintenance_object *)object;
    uint32_t number;
    const char *name;
    int level;
    gd_codec codec = GD_CODEC_NONE;
    gd_error err;
    if (!PyArg_ParseTuple(args, "O&si", gd_py_to_u32, &number, &name,
                          &level)) {
        return NULL;
    }
    gd_status s = parse_codec(name, level, &codec, &err);
    if (s == GD_OK && (number == 0 || number > GD_MAX_GROUP)) {
        s = gd_fail(&err, GD_INVALID, "no group has the number %u", number);
    }
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    if (!gd_py_enter_maintenance(maintenance, 1)) {
        return NULL;
    }
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    rewriting_object *self = (rewriting_object *)gd_py_new_part(
        maintenance, state->rewriting_type);
    if (self == NULL) {
        gd_py_leave_maintenance(maintenance);
        return NULL;
    }
    self->codec = codec;
    self->level = level;
    gd_repo *repo = maintenance->owner->repo;
    Py_BEGIN_ALLOW_THREADS
    s = begin(repo, number, self, &err);
    Py_END_ALLOW_THREADS
    if (s == GD_OK) {
        gd_py_open_part(&self->part, release_rewriting);
    }
    gd_py_leave_maintenance(maintenance);
    if (s != GD_OK) {
        Py_DECREF((PyObject *)self);
        return gd_py_raise(object, &err);
    }
    return (PyObject *)self;
}

static PyObject *
rewriting_step(PyObject *object, PyObject *unused)
{
    (void)unused;
    rewriting_object *self = (rewriting_object *)object;
    bool done = false;
    uint64_t cost = 0;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_part(&self->part, 1)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_group_rewrite_step(self->rewriting, &done, &cost, &err);
    Py_END_ALLOW_THREADS
    self->complete = done;
    gd_py_leave_maintenance(self->part.maintenance);
    return s == GD_OK ? Py_BuildValue("(NK)", PyBool_FromLong(done),
                                      (unsigned long long)cost)
                      : gd_py_raise(object, &err);
}

/* Enters if the new file is complete; else returns 0 with an exception set. */
static int
enter_complete(rewriting_object *self)
{
    gd_error err;
    if (!gd_py_enter_part(&self->part, 1)) {
        return 0;
    }
    if (self->complete) {
        return 1;
    }
    gd_py_leave_maintenance(self->part.maintenance);
    gd_fail(&err, GD_INVALID, "the new file is not complete");
    gd_py_raise((PyObject *)self, &err);
    return 0;
}

static PyObject *
rewriting_sizes(PyObject *object, PyObject *unused)
{
    (void)unused;
    rewriting_object *self = (rewriting_object *)object;
    uint64_t before = 0, after = 0;
    gd_error err;
    gd_status s;
    if (!enter_complete(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_group_rewrite_sizes(self->rewriting, &before, &after, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return s == GD_OK ? Py_BuildValue("(KK)", (unsigned long long)before,
                                      (unsigned long long)after)
                      : gd_py_raise(object, &err);
}

/* GD_BUSY means that it may be tried again. */
static gd_status
exchange(rewriting_object *self, gd_error *err)
{
    gd_status s = self->owned != NULL
                      ? GD_OK
                      : gd_leased_group_exclude(self->leased, &self->owned,
                                                err);
    return s == GD_OK ? gd_group_rewrite_exchange(self->rewriting, self->owned,
                                                  err)
                      : s;
}

static PyObject *
rewriting_exchange(PyObject *object, PyObject *unused)
{
    (void)unused;
    rewriting_object *self = (rewriting_object *)object;
    gd_error err;
    gd_status s;
    if (!enter_complete(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = exchange(self, &err);
    Py_END_ALLOW_THREADS
    self->complete = s == GD_BUSY; /* else it cannot be used again */
    gd_py_leave_maintenance(self->part.maintenance);
    return gd_py_none(object, s, &err);
}

static PyObject *
rewriting_keep_old(PyObject *object, PyObject *unused)
{
    (void)unused;
    rewriting_object *self = (rewriting_object *)object;
    gd_error err;
    gd_status s;
    if (!enter_complete(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_leased_group_note_codec(self->leased, self->codec, self->level,
                                   &err);
    Py_END_ALLOW_THREADS
    self->complete = 0;
    gd_py_leave_maintenance(self->part.maintenance);
    return gd_py_none(object, s, &err);
}

static PyObject *
rewriting_fact(PyObject *object, uint32_t (*fact)(const rewriting_object *))
{
    rewriting_object *self = (rewriting_object *)object;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    PyObject *result = PyLong_FromUnsignedLong(fact(self));
    gd_py_leave_maintenance(self->part.maintenance);
    return result;
}

static uint32_t
number_of(const rewriting_object *self)
{
    return self->leased->group->number;
}

static uint32_t
slots_of(const rewriting_object *self)
{
    return self->leased->group->bounds.slots;
}

static uint32_t
done_of(const rewriting_object *self)
{
    return gd_group_rewrite_slots(self->rewriting);
}

static PyObject *
rewriting_number(PyObject *object, void *unused)
{
    (void)unused;
    return rewriting_fact(object, number_of);
}

static PyObject *
rewriting_slots(PyObject *object, void *unused)
{
    (void)unused;
    return rewriting_fact(object, slots_of);
}

static PyObject *
rewriting_done(PyObject *object, void *unused)
{
    (void)unused;
    return rewriting_fact(object, done_of);
}

static PyObject *
engine_codec_mark(PyObject *module, PyObject *args)
{
    const char *name;
    int level;
    gd_codec codec;
    gd_error err;
    if (!PyArg_ParseTuple(args, "si", &name, &level)) {
        return NULL;
    }
    if (parse_codec(name, level, &codec, &err) != GD_OK) {
        return gd_py_raise_in(PyModule_GetState(module), &err);
    }
    return Py_BuildValue("(ii)", (int)codec,
                         gd_codec_real_level(codec, level));
}

PyMethodDef gd_py_rewriting_functions[] = {
    {"codec_mark", engine_codec_mark, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef rewriting_methods[] = {
    {"step", rewriting_step, METH_NOARGS, NULL},
    {"sizes", rewriting_sizes, METH_NOARGS, NULL},
    {"exchange", rewriting_exchange, METH_NOARGS, NULL},
    {"keep_old", rewriting_keep_old, METH_NOARGS, NULL},
    {"close", gd_py_part_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef rewriting_attributes[] = {
    {"number", rewriting_number, NULL, NULL, NULL},
    {"slots", rewriting_slots, NULL, NULL, NULL},
    {"done", rewriting_done, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot rewriting_type_slots[] = {
    {Py_tp_dealloc, gd_py_part_dealloc},
    {Py_tp_methods, rewriting_methods},
    {Py_tp_getset, rewriting_attributes},
    {0, NULL},
};

PyType_Spec gd_py_rewriting_spec = {
    .name = "glance_dedup._engine.Rewriting",
    .basicsize = sizeof(rewriting_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = rewriting_type_slots,
};
