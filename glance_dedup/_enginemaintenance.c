/*
 * _enginemaintenance.c - the maintainer's types: Maintenance, Recipe, Group,
 * and the arithmetic on runs.
 *
 * Lifetimes: a Recipe or Group keeps its Maintenance alive, which keeps the
 * Repository alive; closing a Maintenance closes all that it has open.  One
 * thread at a time uses a Maintenance with all its parts; a second is refused,
 * since calls release the GIL.  In a forked child every object refuses and
 * leaves all as it is.
 */
#include "_engine.h"

#include <string.h>

#include "engine/coding.h"
#include "engine/collect.h"
#include "engine/fence.h"
#include "engine/judge.h"
#include "engine/rewrite.h"
#include "engine/runs.h"

/* For PyArg_ParseTuple's O&, whose I would take any number modulo 2^32. */
static int
to_u32(PyObject *object, void *out)
{
    unsigned long value = PyLong_AsUnsignedLong(object);
    if (PyErr_Occurred() != NULL) {
        return 0;
    }
    if (value > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a number of 32 bits is needed");
        return 0;
    }
    *(uint32_t *)out = (uint32_t)value;
    return 1;
}

/* ---- Maintenance and its parts ---- */

static gd_repo *
repo_of(const maintenance_object *self)
{
    return self->owner->repo;
}

static const module_state *
state_of(PyObject *self)
{
    return PyType_GetModuleState(Py_TYPE(self));
}

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

part_object *
gd_py_new_part(maintenance_object *maintenance, PyTypeObject *type)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    part_object *self = (part_object *)allocate(type, 0);
    if (self != NULL) {
        Py_INCREF((PyObject *)maintenance);
        self->maintenance = maintenance;
    }
    return self;
}

void
gd_py_open_part(part_object *self, void (*release)(part_object *))
{
    maintenance_object *maintenance = self->maintenance;
    self->release = release;
    self->next = maintenance->parts;
    self->link = &maintenance->parts;
    if (self->next != NULL) {
        self->next->link = &self->next;
    }
    maintenance->parts = self;
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
gd_py_part_close(PyObject *object, PyObject *unused)
{
    (void)unused;
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

/* Nobody else can be using it; its Maintenance may be in use elsewhere, whose
 * list changes under the GIL only. */
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

static PyObject *
maintenance_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"repository", NULL};
    const module_state *state = PyType_GetModuleState(type);
    PyObject *owner;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!", names,
                                     state->repository_type, &owner) ||
        !gd_py_enter_repository((repository_object *)owner)) {
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    maintenance_object *self = (maintenance_object *)allocate(type, 0);
    if (self == NULL) {
        gd_py_leave_repository((repository_object *)owner);
        return NULL;
    }
    Py_INCREF(owner);
    self->owner = (repository_object *)owner;
    self->lock_fd = -1;
    return (PyObject *)self;
}

/* REQUIRES: not closed, of this process, not busy. */
static void
close_maintenance(maintenance_object *self)
{
    gd_repo *repo = repo_of(self);
    while (self->parts != NULL) {
        /* Its last user may be gone before it is closed. */
        PyObject *part = (PyObject *)self->parts;
        Py_INCREF(part);
        gd_py_close_part(self->parts);
        Py_DECREF(part);
    }
    self->closed = 1;
    if (self->lock_fd >= 0) {
        gd_locks_withdraw_all(repo->locks);
        repo->env->close(repo->env, self->lock_fd); /* last: I4 */
        self->lock_fd = -1;
    }
    gd_py_leave_repository(self->owner);
}

static PyObject *
maintenance_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    maintenance_object *self = (maintenance_object *)object;
    if (!self->closed && gd_py_is_owner(self->owner)) {
        if (!gd_py_enter_maintenance(self, 0)) {
            return NULL;
        }
        close_maintenance(self);
        gd_py_leave_maintenance(self);
    }
    Py_RETURN_NONE;
}

static void
maintenance_dealloc(PyObject *object)
{
    maintenance_object *self = (maintenance_object *)object;
    if (self->owner != NULL) {
        if (!self->closed && gd_py_is_owner(self->owner)) {
            close_maintenance(self);
        }
        Py_DECREF((PyObject *)self->owner);
    }
    gd_py_free_object(object);
}

static PyObject *
maintenance_lock(PyObject *object, PyObject *unused)
{
    (void)unused;
    maintenance_object *self = (maintenance_object *)object;
    gd_error err;
    gd_status s = GD_OK;
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = repo_of(self);
    if (self->lock_fd < 0) {
        Py_BEGIN_ALLOW_THREADS
        s = gd_maintainer_lock(repo->env, repo->root, &self->lock_fd, &err);
        Py_END_ALLOW_THREADS
    }
    gd_py_leave_maintenance(self);
    if (s != GD_OK && s != GD_BUSY) {
        return gd_py_raise(object, &err);
    }
    return PyBool_FromLong(s == GD_OK);
}

/* ---- the fence, and directories ---- */

enum { FENCE_SIZE = GD_ID_SIZE + 8 };

static PyObject *
maintenance_read_fence(PyObject *object, PyObject *unused)
{
    (void)unused;
    maintenance_object *self = (maintenance_object *)object;
    gd_fence fence;
    bool found;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    s = gd_fence_read(repo->env, repo->root, &fence, &found, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    if (!found) {
        Py_RETURN_NONE;
    }
    uint8_t payload[FENCE_SIZE];
    memcpy(payload, fence.catalog_id, GD_ID_SIZE);
    gd_put64(payload + GD_ID_SIZE, fence.sequence);
    return PyBytes_FromStringAndSize((const char *)payload, FENCE_SIZE);
}

static PyObject *
maintenance_write_fence(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    const char *payload;
    Py_ssize_t length;
    gd_fence fence;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y#", &payload, &length)) {
        return NULL;
    }
    if (length != FENCE_SIZE) {
        return PyErr_Format(PyExc_ValueError,
                            "the fence's record: %d bytes are needed",
                            (int)FENCE_SIZE);
    }
    if (!gd_py_enter_maintenance(self, 1)) {
        return NULL;
    }
    memcpy(fence.catalog_id, payload, GD_ID_SIZE);
    fence.sequence = gd_get64((const uint8_t *)payload + GD_ID_SIZE);
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    s = gd_fence_write(repo->env, repo->root, &fence, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    Py_RETURN_NONE;
}

static PyObject *
maintenance_sync(PyObject *object, PyObject *args)
{
    static const char *const directories[] = {
        GD_DIR_IMAGES, GD_DIR_SPOOL, GD_DIR_GROUPS, GD_DIR_QUARANTINE};
    maintenance_object *self = (maintenance_object *)object;
    const char *name, *directory = NULL;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "s", &name)) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof directories / sizeof directories[0]; i++) {
        if (strcmp(name, directories[i]) == 0) {
            directory = directories[i];
        }
    }
    if (directory == NULL) {
        gd_fail(&err, GD_INVALID, "no directory of a repository is called "
                                  "'%.40s'", name);
        return gd_py_raise(object, &err);
    }
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    s = gd_sync_dir(repo->env, repo->root, directory, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    Py_RETURN_NONE;
}

/* ---- the listings ---- */

static PyObject *
maintenance_spool(PyObject *object, PyObject *unused)
{
    (void)unused;
    maintenance_object *self = (maintenance_object *)object;
    gd_spool_base *entries = NULL;
    size_t count = 0;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    s = gd_judged_list(repo->env, repo->root, &entries, &count, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = PyUnicode_FromString(entries[i].name);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) {
            Py_CLEAR(list);
        }
    }
    repo->env->release(repo->env, entries);
    return list;
}

static PyObject *
maintenance_groups(PyObject *object, PyObject *unused)
{
    (void)unused;
    maintenance_object *self = (maintenance_object *)object;
    uint32_t *numbers = NULL;
    size_t count = 0;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    s = gd_repo_list_groups(repo, &numbers, &count, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *item = PyLong_FromUnsignedLong(numbers[i]);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) {
            Py_CLEAR(list);
        }
    }
    repo->env->release(repo->env, numbers);
    return list;
}

static gd_status
read_facts(gd_repo *repo, uint32_t number, uint32_t *slots,
           gd_published *record, struct stat *st, gd_error *err)
{
    gd_group *group;
    gd_status s = gd_group_open(repo->env, repo->root, &repo->params, number,
                                O_RDONLY, &group, err);
    if (s != GD_OK) {
        return s;
    }
    *slots = group->bounds.slots;
    s = gd_group_read_published(group, record, err);
    if (s == GD_OK) {
        int rc = repo->env->fstat(repo->env, group->fd, st);
        s = rc < 0 ? gd_fail_errno(err, -rc, "cannot stat %s", group->name)
                   : GD_OK;
    }
    gd_group_close(group);
    return s;
}

static PyObject *
maintenance_group_facts(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number;
    uint32_t slots = 0;
    gd_published record;
    struct stat st;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "O&", to_u32, &number) ||
        !gd_py_enter_maintenance(self, 0)) {
        return NULL;
    }
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    s = read_facts(repo, number, &slots, &record, &st, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    return Py_BuildValue(
        "{sIsIsKsIsKsKsKsK}", "slots", slots, "published", record.count,
        "generation", (unsigned long long)record.generation, "flags",
        record.flags, "sequence", (unsigned long long)record.sequence, "end",
        (unsigned long long)record.end, "size",
        (unsigned long long)st.st_size, "allocated",
        (unsigned long long)st.st_blocks * 512);
}

enum { ENTRY_SIZE = 48 }; /* of what `entries` returns for a slot */

static void
pack_entry(const gd_entry *entry, uint8_t out[ENTRY_SIZE])
{
    memcpy(out, entry->fingerprint.bytes, GD_FINGERPRINT_SIZE);
    gd_put32(out + 32, entry->segment);
    gd_put32(out + 36, entry->plain_length);
    gd_put32(out + 40, entry->stored_length);
    gd_put32(out + 44, entry->state);
}

static gd_status
read_entries(gd_repo *repo, uint32_t number, uint32_t first, uint32_t count,
             gd_entry *entries, gd_error *err)
{
    gd_group *group;
    gd_status s = gd_group_open(repo->env, repo->root, &repo->params, number,
                                O_RDONLY, &group, err);
    if (s != GD_OK) {
        return s;
    }
    if (first > group->bounds.slots || count > group->bounds.slots - first) {
        s = gd_fail(err, GD_INVALID,
                    "%s has %u slots; %u from slot %u on were asked for",
                    group->name, group->bounds.slots, count, first);
    } else {
        s = gd_group_read_entries(group, first, count, entries, err);
    }
    gd_group_close(group);
    return s;
}

static PyObject *
maintenance_entries(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number, first, count;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "O&O&O&", to_u32, &number, to_u32, &first,
                          to_u32, &count)) {
        return NULL;
    }
    if (count > GD_MAX_SLOTS) {
        gd_fail(&err, GD_INVALID, "no group has %u slots", count);
        return gd_py_raise(object, &err);
    }
    PyObject *result =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * ENTRY_SIZE);
    if (result == NULL || !gd_py_enter_maintenance(self, 0)) {
        Py_XDECREF(result);
        return NULL;
    }
    /* Nobody else has seen the bytes object yet. */
    uint8_t *out = (uint8_t *)PyBytes_AsString(result);
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    gd_entry *entries = gd_calloc(repo->env, count, sizeof *entries, &err);
    s = entries == NULL
            ? GD_NOMEM
            : read_entries(repo, number, first, count, entries, &err);
    for (uint32_t i = 0; s == GD_OK && i < count; i++) {
        pack_entry(&entries[i], out + (size_t)i * ENTRY_SIZE);
    }
    repo->env->release(repo->env, entries);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK) {
        Py_DECREF(result);
        return gd_py_raise(object, &err);
    }
    return result;
}

/* ---- intents ---- */

static int
check_group_number(PyObject *self, uint32_t number)
{
    gd_error err;
    if (number >= 1 && number <= GD_MAX_GROUP) {
        return 1;
    }
    gd_fail(&err, GD_INVALID, "no group has the number %u", number);
    gd_py_raise(self, &err);
    return 0;
}

static PyObject *
maintenance_announce(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "O&", to_u32, &number) ||
        !check_group_number(object, number) ||
        !gd_py_enter_maintenance(self, 1)) {
        return NULL;
    }
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    s = gd_locks_announce(repo->locks, number, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    if (s != GD_OK && s != GD_BUSY) {
        return gd_py_raise(object, &err);
    }
    return PyBool_FromLong(s == GD_OK);
}

static PyObject *
maintenance_withdraw(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number;
    if (!PyArg_ParseTuple(args, "O&", to_u32, &number) ||
        !gd_py_enter_maintenance(self, 1)) {
        return NULL;
    }
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    gd_locks_withdraw(repo->locks, number);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self);
    Py_RETURN_NONE;
}

/* ---- Recipe ---- */

typedef struct recipe_object {
    part_object part;
    gd_judged judged;
} recipe_object;

static void
release_recipe(part_object *part)
{
    gd_judged_close(&((recipe_object *)part)->judged);
}

typedef gd_status opener(const gd_env *env, int root, const gd_params *params,
                         const char *name, gd_judged *judged, gd_error *err);

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
    recipe_object *recipe = (recipe_object *)gd_py_new_part(
        self, state_of(object)->recipe_type);
    if (recipe == NULL) {
        gd_py_leave_maintenance(self);
        return NULL;
    }
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    s = open(repo->env, repo->root, &repo->params, name, &recipe->judged,
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

static PyObject *
maintenance_open_entry(PyObject *object, PyObject *args)
{
    return open_recipe(object, args, gd_judged_open_entry);
}

static PyObject *
maintenance_open_recipe(PyObject *object, PyObject *args)
{
    return open_recipe(object, args, gd_judged_open_image);
}

/* What was found at the opening, or at the last look, may be read for ever. */
static const gd_judged *
judged_of(PyObject *object)
{
    return &((recipe_object *)object)->judged;
}

static PyObject *
recipe_name(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(judged_of(object)->name);
}

static PyObject *
recipe_kind(PyObject *object, void *unused)
{
    (void)unused;
    char kind = (char)judged_of(object)->kind;
    return PyUnicode_FromStringAndSize(&kind, kind == 0 ? 0 : 1);
}

static PyObject *
recipe_complete(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(judged_of(object)->complete);
}

static PyObject *
recipe_error(PyObject *object, void *unused)
{
    (void)unused;
    const gd_error *damage = &judged_of(object)->damage;
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
    return PyLong_FromUnsignedLongLong(judged_of(object)->links);
}

static PyObject *
recipe_inode(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(judged_of(object)->inode);
}

static PyObject *
recipe_header(PyObject *object, PyObject *unused)
{
    (void)unused;
    const gd_judged *judged = judged_of(object);
    gd_error err;
    if (!judged->complete) {
        gd_fail(&err, GD_INVALID, "%s has no valid header page",
                judged->name);
        return gd_py_raise(object, &err);
    }
    const gd_recipe_header *header = &judged->recipe.header;
    PyObject *result = gd_py_header_dict(header);
    PyObject *id = PyBytes_FromStringAndSize(
        (const char *)header->transaction_id, GD_ID_SIZE);
    if (result == NULL || id == NULL ||
        PyDict_SetItemString(result, "transaction_id", id) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF(id);
    return result;
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
    s = gd_judged_live(&self->judged, &live, &err);
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
    s = gd_judged_lock(&self->judged, byte, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    if (s != GD_OK && s != GD_BUSY) {
        return gd_py_raise(object, &err);
    }
    return PyBool_FromLong(s == GD_OK);
}

static PyObject *
recipe_runs(PyObject *object, PyObject *unused)
{
    (void)unused;
    recipe_object *self = (recipe_object *)object;
    gd_run *runs = NULL;
    size_t count = 0;
    gd_error err;
    gd_status s;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = gd_judged_runs(&self->judged, &runs, &count, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    PyObject *result =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * GD_RUN_SIZE));
    uint8_t *out = result == NULL ? NULL : (uint8_t *)PyBytes_AsString(result);
    for (size_t i = 0; out != NULL && i < count; i++, out += GD_RUN_SIZE) {
        gd_put32(out, runs[i].group);
        gd_put32(out + 4, runs[i].slot);
        gd_put32(out + 8, runs[i].blocks);
    }
    self->judged.env->release(self->judged.env, runs);
    return result;
}

typedef gd_status settler(const gd_judged *judged, gd_error *err);

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
    s = settle(&self->judged, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    Py_RETURN_NONE;
}

static PyObject *
recipe_unlink(PyObject *object, PyObject *unused)
{
    (void)unused;
    return settle_recipe(object, gd_judged_unlink);
}

static PyObject *
recipe_delete(PyObject *object, PyObject *unused)
{
    (void)unused;
    return settle_recipe(object, gd_judged_delete);
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
    s = gd_judged_set_aside(&self->judged, name, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return s == GD_OK ? PyUnicode_FromString(name) : gd_py_raise(object, &err);
}

/* ---- Group ---- */

typedef struct group_object {
    part_object part;
    gd_held *held;
} group_object;

static void
release_group(part_object *part)
{
    gd_held_close(((group_object *)part)->held);
}

static PyObject *
maintenance_enter_group(PyObject *object, PyObject *args)
{
    maintenance_object *self = (maintenance_object *)object;
    uint32_t number;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "O&", to_u32, &number) ||
        !check_group_number(object, number) ||
        !gd_py_enter_maintenance(self, 1)) {
        return NULL;
    }
    group_object *group = (group_object *)gd_py_new_part(
        self, state_of(object)->group_type);
    if (group == NULL) {
        gd_py_leave_maintenance(self);
        return NULL;
    }
    gd_repo *repo = repo_of(self);
    Py_BEGIN_ALLOW_THREADS
    s = gd_held_open(repo, number, &group->held, &err);
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

/* Facts need the group open: it is closed with all that is known of it. */
static PyObject *
group_fact(PyObject *object, uint32_t (*fact)(const gd_held *))
{
    group_object *self = (group_object *)object;
    if (!gd_py_enter_part(&self->part, 0)) {
        return NULL;
    }
    PyObject *result = PyLong_FromUnsignedLong(fact(self->held));
    gd_py_leave_maintenance(self->part.maintenance);
    return result;
}

static uint32_t
number_of(const gd_held *held)
{
    return held->group->number;
}

static uint32_t
slots_of(const gd_held *held)
{
    return held->group->bounds.slots;
}

static uint32_t
published_of(const gd_held *held)
{
    return held->published.count;
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
    uint32_t slots = slots_of(self->held);
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)slots);
    char *out = result == NULL ? NULL : PyBytes_AsString(result);
    for (uint32_t i = 0; out != NULL && i < slots; i++) {
        out[i] = (char)self->held->entries[i].state;
    }
    gd_py_leave_maintenance(self->part.maintenance);
    return result;
}

/* The slots of an argument: 32 bits each, in a buffer of their own, since the
 * argument's may not be aligned.  NULL with an exception set. */
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
    s = gd_held_free(self->held, slots, count, &freed, &err);
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
    s = gd_held_punch(self->held, &bytes, &err);
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
    s = gd_held_live_bytes(self->held, &bytes, &kept, &err);
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
    s = gd_held_rewrite(self->held, name == NULL ? NULL : &codec, level,
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
    const gd_env *env = repo_of(self->part.maintenance)->env;
    Py_BEGIN_ALLOW_THREADS
    s = gd_held_mark_damaged(self->held, slots, count, &names, &name_count,
                             &err);
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
    s = gd_held_unlink(self->held, &removed, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_maintenance(self->part.maintenance);
    return s == GD_OK ? PyBool_FromLong(removed) : gd_py_raise(object, &err);
}

/* ---- functions of runs ---- */

/* How many runs the buffer holds; -1 with an exception set. */
static Py_ssize_t
count_runs(const Py_buffer *view)
{
    if (view->len % GD_RUN_SIZE != 0) {
        PyErr_Format(PyExc_ValueError, "runs have %d bytes each",
                     (int)GD_RUN_SIZE);
        return -1;
    }
    return view->len / GD_RUN_SIZE;
}

static PyObject *
engine_add_runs(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer counts, runs;
    uint32_t group, chunk;
    int delta;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "w*O&O&y*i", &counts, to_u32, &group, to_u32,
                          &chunk, &runs, &delta)) {
        return NULL;
    }
    Py_ssize_t count = count_runs(&runs);
    if (count >= 0 && counts.len != GD_COUNTERS_SIZE) {
        PyErr_Format(PyExc_ValueError, "counts: %d bytes are needed",
                     (int)GD_COUNTERS_SIZE);
    } else if (count >= 0 && delta != 1 && delta != -1) {
        PyErr_Format(PyExc_ValueError, "delta is 1 or -1, not %d", delta);
    } else if (count >= 0 &&
               !gd_runs_add(counts.buf, group, chunk, runs.buf, (size_t)count,
                            delta)) {
        PyErr_Format(PyExc_ValueError,
                     "a count of group %u would go below zero", group);
    } else if (count >= 0) {
        result = Py_None;
        Py_INCREF(result);
    }
    PyBuffer_Release(&counts);
    PyBuffer_Release(&runs);
    return result;
}

static PyObject *
engine_shared_blocks(PyObject *module, PyObject *args)
{
    Py_buffer a, b;
    uint64_t shared = 0;
    PyObject *result = NULL;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y*y*", &a, &b)) {
        return NULL;
    }
    Py_ssize_t a_count = count_runs(&a);
    Py_ssize_t b_count = a_count < 0 ? -1 : count_runs(&b);
    if (b_count >= 0) {
        Py_BEGIN_ALLOW_THREADS /* it sorts */
        s = gd_runs_shared(gd_env_posix(), a.buf, (size_t)a_count, b.buf,
                           (size_t)b_count, &shared, &err);
        Py_END_ALLOW_THREADS
        result = s == GD_OK
                     ? PyLong_FromUnsignedLongLong(shared)
                     : gd_py_raise_in(PyModule_GetState(module), &err);
    }
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    return result;
}

static PyObject *
engine_names_any(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer runs, addresses;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*y*", &runs, &addresses)) {
        return NULL;
    }
    Py_ssize_t count = count_runs(&runs);
    if (count >= 0 && addresses.len % GD_ADDRESS_SIZE != 0) {
        PyErr_Format(PyExc_ValueError, "addresses have %d bytes each",
                     (int)GD_ADDRESS_SIZE);
    } else if (count >= 0) {
        result = PyBool_FromLong(gd_runs_name_any(
            runs.buf, (size_t)count, addresses.buf,
            (size_t)addresses.len / GD_ADDRESS_SIZE));
    }
    PyBuffer_Release(&runs);
    PyBuffer_Release(&addresses);
    return result;
}

/* ---- the types ---- */

static PyMethodDef maintenance_methods[] = {
    {"lock", maintenance_lock, METH_NOARGS, NULL},
    {"close", maintenance_close, METH_NOARGS, NULL},
    {"read_fence", maintenance_read_fence, METH_NOARGS, NULL},
    {"write_fence", maintenance_write_fence, METH_VARARGS, NULL},
    {"sync", maintenance_sync, METH_VARARGS, NULL},
    {"spool", maintenance_spool, METH_NOARGS, NULL},
    {"open_entry", maintenance_open_entry, METH_VARARGS, NULL},
    {"open_recipe", maintenance_open_recipe, METH_VARARGS, NULL},
    {"groups", maintenance_groups, METH_NOARGS, NULL},
    {"group_facts", maintenance_group_facts, METH_VARARGS, NULL},
    {"entries", maintenance_entries, METH_VARARGS, NULL},
    {"announce", maintenance_announce, METH_VARARGS, NULL},
    {"withdraw", maintenance_withdraw, METH_VARARGS, NULL},
    {"enter_group", maintenance_enter_group, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot maintenance_slots[] = {
    {Py_tp_new, maintenance_new},
    {Py_tp_dealloc, maintenance_dealloc},
    {Py_tp_methods, maintenance_methods},
    {0, NULL},
};

static PyType_Spec maintenance_spec = {
    .name = "glance_dedup._engine.Maintenance",
    .basicsize = sizeof(maintenance_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = maintenance_slots,
};

static PyMethodDef recipe_methods[] = {
    {"header", recipe_header, METH_NOARGS, NULL},
    {"live", recipe_live, METH_NOARGS, NULL},
    {"try_lock", recipe_try_lock, METH_VARARGS, NULL},
    {"runs", recipe_runs, METH_NOARGS, NULL},
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
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot recipe_slots[] = {
    {Py_tp_dealloc, gd_py_part_dealloc},
    {Py_tp_methods, recipe_methods},
    {Py_tp_getset, recipe_attributes},
    {0, NULL},
};

static PyType_Spec recipe_spec = {
    .name = "glance_dedup._engine.Recipe",
    .basicsize = sizeof(recipe_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = recipe_slots,
};

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

static PyType_Spec group_spec = {
    .name = "glance_dedup._engine.Group",
    .basicsize = sizeof(group_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = group_type_slots,
};

static PyMethodDef run_functions[] = {
    {"add_runs", engine_add_runs, METH_VARARGS, NULL},
    {"shared_blocks", engine_shared_blocks, METH_VARARGS, NULL},
    {"names_any", engine_names_any, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int
gd_py_add_maintenance(PyObject *module, module_state *state)
{
    state->maintenance_type = gd_py_add_type(module, &maintenance_spec);
    state->recipe_type = gd_py_add_type(module, &recipe_spec);
    state->group_type = gd_py_add_type(module, &group_spec);
    if (state->maintenance_type == NULL || state->recipe_type == NULL ||
        state->group_type == NULL) {
        return -1;
    }
    return PyModule_AddFunctions(module, run_functions);
}
