/* SPDX-License-Identifier: Apache-2.0 */
/*
 * common.c - what all files of the binding stand on: errors, objects,
 * arguments, results, and the use of a repository handle.
 *
 * Everything here REQUIRES the GIL, except gd_py_require_process.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/base/coding.h"
#include "engine/format/runs.h"

/* ---- errors ---- */

/* The only table from status to exception; the names are those in
 * glance_dedup.base.exceptions. */
static const struct {
    gd_status status;
    const char *name;
} error_classes[] = {
    {GD_IO, "StorageError"},         {GD_CORRUPT, "DamagedError"},
    {GD_NOSPACE, "NoSpaceError"},    {GD_NOTFOUND, "ImageNotFound"},
    {GD_EXISTS, "ImageExists"},      {GD_BUSY, "BusyError"},
    {GD_VERSION, "VersionError"},    {GD_INVALID, "InvalidParameter"},
    {GD_DENIED, "AccessDenied"},     {GD_CLOSED, "ClosedError"},
    {GD_UNAVAILABLE, "UnavailableError"},
};

enum { ERROR_CLASSES = sizeof error_classes / sizeof error_classes[0] };

PyObject *
gd_py_raise_in(const module_state *state, const gd_error *err)
{
    if (err->status == GD_NOMEM) {
        PyErr_SetString(PyExc_MemoryError, err->text);
        return NULL;
    }
    const char *name = "RepositoryError";
    for (int i = 0; i < ERROR_CLASSES; i++) {
        if (error_classes[i].status == err->status) {
            name = error_classes[i].name;
        }
    }
    PyObject *class = PyObject_GetAttrString(state->exceptions, name);
    /* The message may have file names and image ids, which are bytes from
     * elsewhere. */
    PyObject *text =
        PyUnicode_DecodeUTF8(err->text, (Py_ssize_t)strlen(err->text),
                             "replace");
    PyObject *error = NULL, *number = NULL;
    if (class != NULL && text != NULL) {
        error = PyObject_CallFunctionObjArgs(class, text, NULL);
        number = PyLong_FromLong(err->sys_errno);
    }
    if (error != NULL && number != NULL &&
        PyObject_SetAttrString(error, "errno", number) == 0) {
        PyErr_SetObject(class, error);
    }
    Py_XDECREF(number);
    Py_XDECREF(error);
    Py_XDECREF(text);
    Py_XDECREF(class);
    return NULL;
}

PyObject *
gd_py_raise(PyObject *self, const gd_error *err)
{
    return gd_py_raise_in(PyType_GetModuleState(Py_TYPE(self)), err);
}

/* ---- types and objects ---- */

PyTypeObject *
gd_py_add_type(PyObject *module, const gd_py_type *type)
{
    const PyType_Slot all[] = {
        {Py_tp_new, type->make},
        {Py_tp_dealloc, type->dealloc},
        {Py_tp_methods, type->methods},
        {Py_tp_getset, type->attributes},
        {Py_tp_members, type->members},
    };
    PyType_Slot slots[6] = {{0, NULL}};
    PyType_Spec spec = {.name = type->name,
                        .basicsize = (int)type->size,
                        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                        .slots = slots};
    for (int i = 0, used = 0; i < 5; i++) {
        if (all[i].pfunc != NULL) {
            slots[used++] = all[i];
        }
    }
    if (type->make == NULL) {
        spec.flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
    }
    PyObject *made = PyType_FromModuleAndSpec(module, &spec, NULL);
    if (made != NULL && PyModule_AddType(module, (PyTypeObject *)made) < 0) {
        Py_CLEAR(made);
    }
    return (PyTypeObject *)made;
}

void *
gd_py_new_object(PyTypeObject *type)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return allocate(type, 0);
}

void
gd_py_free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* ---- arguments ---- */

int
gd_py_to_u32(PyObject *object, void *out)
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

int
gd_py_copy_id(const char *what, const char *data, Py_ssize_t length,
              uint8_t out[GD_ID_SIZE])
{
    if (length != GD_ID_SIZE) {
        PyErr_Format(PyExc_ValueError, "%s: %d bytes are needed", what,
                     (int)GD_ID_SIZE);
        return 0;
    }
    memcpy(out, data, GD_ID_SIZE);
    return 1;
}

int
gd_py_parse_image(PyObject *args, const char **image_id,
                  uint8_t room[GD_ID_SIZE], const uint8_t **upload)
{
    const char *given = NULL;
    Py_ssize_t length = 0;
    if (!PyArg_ParseTuple(args, "s|z#", image_id, &given, &length)) {
        return 0;
    }
    *upload = given == NULL ? NULL : room;
    return given == NULL || gd_py_copy_id("upload_id", given, length, room);
}

int
gd_py_parse_group(PyObject *self, PyObject *args, uint32_t *number)
{
    gd_error err;
    if (!PyArg_ParseTuple(args, "O&", gd_py_to_u32, number)) {
        return 0;
    }
    if (*number >= 1 && *number <= GD_MAX_GROUP) {
        return 1;
    }
    gd_fail(&err, GD_INVALID, "no group has the number %u", *number);
    gd_py_raise(self, &err);
    return 0;
}

gd_status
gd_py_parse_codec(const char *name, int level, gd_codec *codec,
                  gd_error *err)
{
    gd_status s = gd_codec_parse(name, codec, err);
    return s == GD_OK ? gd_codec_require_level(*codec, level, err) : s;
}

/* ---- packed arrays of blocks ---- */

void
gd_py_free_blocks(gd_py_blocks *list)
{
    PyMem_Free(list->fps);
    PyMem_Free(list->lengths);
    PyMem_Free(list->addresses);
}

int
gd_py_copy_blocks(const Py_buffer *fps, const Py_buffer *lengths,
                  const Py_buffer *addresses, gd_py_blocks *list)
{
    size_t count = (size_t)lengths->len / 4;
    memset(list, 0, sizeof *list);
    if ((size_t)fps->len != count * GD_FINGERPRINT_SIZE ||
        (size_t)lengths->len != count * 4 ||
        (addresses != NULL && (size_t)addresses->len != count * 8)) {
        PyErr_SetString(PyExc_ValueError,
                        "fingerprints of 32 bytes, lengths of 4 and addresses "
                        "of 8 are needed, as many of each");
        return 0;
    }
    list->count = count;
    list->fps = PyMem_Calloc(count + 1, sizeof *list->fps);
    list->lengths = PyMem_Calloc(count + 1, sizeof *list->lengths);
    list->addresses = PyMem_Calloc(count + 1, sizeof *list->addresses);
    if (list->fps == NULL || list->lengths == NULL ||
        list->addresses == NULL) {
        gd_py_free_blocks(list);
        PyErr_NoMemory();
        return 0;
    }
    memcpy(list->fps, fps->buf, (size_t)fps->len);
    for (size_t i = 0; i < count; i++) {
        list->lengths[i] = gd_get32((const uint8_t *)lengths->buf + i * 4);
        if (addresses != NULL) {
            uint64_t packed =
                gd_get64((const uint8_t *)addresses->buf + i * 8);
            uint64_t group = packed >> GD_SLOT_BITS;
            /* An address that is too large was never found. */
            list->addresses[i] = (gd_address){
                group > GD_MAX_GROUP ? 0 : (uint32_t)group,
                (uint32_t)(packed & (GD_MAX_SLOTS - 1))};
        }
    }
    return 1;
}

int
gd_py_parse_blocks(PyObject *args, gd_py_blocks *list)
{
    Py_buffer fps, lengths, addresses;
    if (!PyArg_ParseTuple(args, "y*y*y*", &fps, &lengths, &addresses)) {
        return 0;
    }
    int copied = gd_py_copy_blocks(&fps, &lengths, &addresses, list);
    PyBuffer_Release(&fps);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&addresses);
    return copied;
}

PyObject *
gd_py_pack_addresses(const gd_address *addresses, size_t count)
{
    uint8_t *out;
    PyObject *result = gd_py_new_bytes(count * GD_ADDRESS_SIZE, &out);
    for (size_t i = 0; result != NULL && i < count; i++) {
        gd_put64(out + i * GD_ADDRESS_SIZE, gd_address_number(addresses[i]));
    }
    return result;
}

/* ---- results ---- */

PyObject *
gd_py_new_bytes(size_t length, uint8_t **out)
{
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    *out = bytes == NULL ? NULL : (uint8_t *)PyBytes_AsString(bytes);
    return bytes;
}

void
gd_py_set_item(PyObject **list, size_t index, PyObject *item)
{
    if (item == NULL || PyList_SetItem(*list, (Py_ssize_t)index, item) < 0) {
        Py_CLEAR(*list);
    }
}

/* Of an image with a disk, the zeros are those that its file is longer than the
 * plain bytes that are none.  So sums of sizes and of zeros agree. */
static uint64_t
zero_bytes(const gd_recipe_header *h)
{
    uint64_t others = h->disk.plain_size - h->zero_bytes;
    return others < h->size ? h->size - others : 0;
}

/* None: the image has no disk. */
static PyObject *
derived_bytes(const gd_recipe_header *h)
{
    if (!gd_recipe_has_disk(h)) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLongLong(h->disk.derived_bytes);
}

PyObject *
gd_py_header_dict(const gd_recipe_header *h)
{
    /* The project's name is whatever the file has, and may not be UTF-8. */
    PyObject *project = PyUnicode_DecodeUTF8(
        h->project, (Py_ssize_t)strlen(h->project), "replace");
    PyObject *hash_name = PyUnicode_DecodeUTF8(
        h->hash.name, (Py_ssize_t)strlen(h->hash.name), "replace");
    return Py_BuildValue(
        "{sssNsNsy#sy#sy#sKsKsKsKsKsKsKsN}", "image_id", h->image_id, "project",
        project, "hash_name", hash_name, "hash_value", h->hash.value,
        (Py_ssize_t)h->hash.length, "scope", h->scope.id, (Py_ssize_t)GD_SCOPE_SIZE,
        "upload_id", h->upload_id, (Py_ssize_t)GD_ID_SIZE, "size",
        (unsigned long long)h->size, "zero_bytes",
        (unsigned long long)zero_bytes(h), "new_bytes",
        (unsigned long long)h->new_bytes, "stored_bytes",
        (unsigned long long)h->stored_bytes, "extents",
        (unsigned long long)h->extents, "fragments",
        (unsigned long long)h->fragments, "created",
        (unsigned long long)h->created, "derived_bytes", derived_bytes(h));
}

PyObject *
gd_py_whole_header_dict(const gd_recipe_header *header)
{
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

/* ---- the use of a repository handle ---- */

gd_status
gd_py_require_process(const repository_object *self, gd_error *err)
{
    const gd_env *env = gd_env_posix();
    if (env->getpid(env) != self->owner || self->state->forks != self->forks) {
        return gd_fail(err, GD_CLOSED,
                       "this handle was opened by process %ld, before a fork",
                       (long)self->owner);
    }
    return GD_OK;
}

int
gd_py_is_owner(const repository_object *self)
{
    return gd_py_require_process(self, NULL) == GD_OK;
}

static void
free_when_unused(repository_object *self)
{
    if (self->closed && self->users == 0 && self->repo != NULL &&
        gd_py_require_process(self, NULL) == GD_OK) {
        gd_repo *repo = self->repo;
        self->repo = NULL;
        Py_BEGIN_ALLOW_THREADS
        gd_repo_close(repo);
        Py_END_ALLOW_THREADS
        gd_py_close_slices(self);
    }
}

int
gd_py_enter_repository(repository_object *self)
{
    gd_error err;
    if (self->closed || self->repo == NULL) {
        gd_fail(&err, GD_CLOSED, "the repository handle is closed");
    } else if (gd_py_require_process(self, &err) == GD_OK) {
        self->users++;
        return 1;
    }
    gd_py_raise((PyObject *)self, &err);
    return 0;
}

void
gd_py_leave_repository(repository_object *self)
{
    self->users--;
    free_when_unused(self);
}

void
gd_py_close_repository(repository_object *self)
{
    self->closed = 1;
    free_when_unused(self);
}
