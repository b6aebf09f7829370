/* SPDX-License-Identifier: Apache-2.0 */
/*
 * index.c - glance_dedup._engine.Index: the files of the exact index.
 *
 * A serial kind (opened.c).  In Python a file is (kind, bits, shard, number).
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/files/duplicate_search.h"
#include "engine/files/indexjoin.h"
#include "engine/format/pairs.h"

typedef struct index_handle {
    gd_shards *shards;
    gd_duplicate_search *search; /* NULL: none is under way */
} index_handle;

static void
close_index(void *handle)
{
    index_handle *index = handle;
    gd_duplicate_search_end(index->search);
    gd_shards_close(index->shards);
    gd_env_posix()->release(gd_env_posix(), index);
}

static const opened_kind index_kind = {"the index is closed", close_index,
                                       true};

/* Index(repository, catalog_id or None) */
static PyObject *
index_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"repository", "catalog_id", NULL};
    const module_state *state = PyType_GetModuleState(type);
    PyObject *repository;
    const char *data;
    Py_ssize_t length;
    uint8_t id[GD_ID_SIZE];
    gd_py_call call;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!z#", names,
                                     state->repository_type, &repository,
                                     &data, &length) ||
        (data != NULL && !gd_py_copy_id("a catalog id", data, length, id))) {
        return NULL;
    }
    opened_object *self =
        gd_py_begin_opening(repository, type, &index_kind, &call);
    if (self == NULL) {
        return NULL;
    }
    const gd_repo *repo = self->owner->repo;
    index_handle *index =
        gd_calloc(gd_env_posix(), 1, sizeof *index, &call.err);
    gd_status s = index == NULL
                      ? GD_NOMEM
                      : gd_shards_open(repo->env, repo->root,
                                       repo->params.reserve,
                                       data == NULL ? NULL : id,
                                       &index->shards, &call.err);
    if (s != GD_OK) {
        gd_env_posix()->release(gd_env_posix(), index);
    }
    return gd_py_end_opening(self, s, index, &call);
}

static index_handle *
handle_of(PyObject *object)
{
    return ((opened_object *)object)->handle;
}

static gd_shards *
shards_of(PyObject *object)
{
    return handle_of(object)->shards;
}

/* ---- files ---- */

/* For PyArg_ParseTuple's O&. */
static int
to_file(PyObject *object, void *out)
{
    gd_index_id *id = out;
    const char *kind;
    uint32_t bits, shard;
    unsigned long long number;
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a file of the index is a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(object, "sO&O&K", &kind, gd_py_to_u32, &bits,
                          gd_py_to_u32, &shard, &number)) {
        return 0;
    }
    *id = (gd_index_id){GD_INDEX_SHARD, bits, shard, number};
    for (unsigned k = GD_INDEX_SHARD; k <= GD_INDEX_NEW; k++) {
        if (strcmp(kind, gd_index_kind_name(k)) == 0) {
            id->kind = (gd_index_kind)k;
            if (bits <= GD_SHARD_BITS_MAX && shard < UINT32_C(1) << bits) {
                return 1;
            }
        }
    }
    PyErr_SetString(PyExc_ValueError, "the index has no such file");
    return 0;
}

static PyObject *
list_of(const gd_index_id *ids, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        gd_py_set_item(&list, i,
                       Py_BuildValue("(sIIK)",
                                     gd_index_kind_name(ids[i].kind),
                                     ids[i].bits, ids[i].shard,
                                     (unsigned long long)ids[i].number));
    }
    return list;
}

static PyObject *
index_files(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_index_list list = {NULL, 0};
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    const gd_env *env = gd_shards_env(shards_of(object));
    gd_status s = gd_shards_list(shards_of(object), &list, &call.err);
    PyObject *result =
        gd_py_end(&call, s) ? list_of(list.files, list.count) : NULL;
    env->release(env, list.files);
    return result;
}

static PyObject *
index_shards(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_index_id *current = NULL;
    size_t count = 0;
    bool complete = false;
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    const gd_env *env = gd_shards_env(shards_of(object));
    gd_status s = gd_shards_rescan(shards_of(object), &current, &count,
                                   &complete, &call.err);
    PyObject *result =
        gd_py_end(&call, s)
            ? Py_BuildValue("(NN)", list_of(current, count),
                            PyBool_FromLong(complete))
            : NULL;
    env->release(env, current);
    return result;
}

/* A method with the argument (file) that returns None. */
typedef gd_status (*file_function)(gd_shards *shards, const gd_index_id *id,
                                   gd_error *err);

static PyObject *
call_with_file(PyObject *object, PyObject *args, file_function function)
{
    gd_index_id id;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O&", to_file, &id) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(&call,
                          function(shards_of(object), &id, &call.err));
}

static PyObject *
index_remove(PyObject *object, PyObject *args)
{
    return call_with_file(object, args, gd_shards_remove);
}

static PyObject *
index_set_aside(PyObject *object, PyObject *args)
{
    return call_with_file(object, args, gd_shards_set_aside);
}

static PyObject *
index_verify(PyObject *object, PyObject *args)
{
    return call_with_file(object, args, gd_shards_verify);
}

static PyObject *
index_count(PyObject *object, PyObject *args)
{
    gd_index_id id;
    gd_index_reader *reader;
    uint64_t items = 0;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O&", to_file, &id) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_status s = gd_shards_read(shards_of(object), &id, &reader, &call.err);
    if (s == GD_OK) {
        items = gd_index_reader_head(reader)->items;
        gd_index_reader_close(reader);
    }
    return gd_py_end_number(&call, s, items);
}

/* The items of frame `frame`, copied; none behind the end. */
static gd_status
copy_frame(gd_shards *shards, const gd_index_id *id, uint64_t frame,
           uint8_t out[GD_FRAME_MAX], size_t *length, gd_error *err)
{
    gd_index_reader *reader;
    const uint8_t *items;
    size_t count;
    *length = 0;
    gd_status s = gd_shards_read(shards, id, &reader, err);
    if (s != GD_OK) {
        return s;
    }
    if (frame < gd_index_head_frames(gd_index_reader_head(reader))) {
        s = gd_index_reader_frame(reader, frame, &items, &count, err);
        if (s == GD_OK) {
            *length = count * gd_index_head_item_size(id->kind);
            memcpy(out, items, *length);
        }
    }
    gd_index_reader_close(reader);
    return s;
}

static PyObject *
index_read(PyObject *object, PyObject *args)
{
    gd_index_id id;
    unsigned long long frame;
    uint8_t out[GD_FRAME_MAX];
    size_t length = 0;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O&K", to_file, &id, &frame) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_status s = copy_frame(shards_of(object), &id, frame, out, &length,
                             &call.err);
    return gd_py_end_bytes(&call, s, out, length);
}

/* Returns whether these are whole items, and if records, sorted, each once. */
static int
good_items(gd_index_kind kind, const Py_buffer *items)
{
    size_t size = gd_index_head_item_size(kind);
    const uint8_t *at = items->buf;
    int good = (size_t)items->len % size == 0;
    for (size_t i = 1; good && size == GD_INDEX_RECORD &&
                       i < (size_t)items->len / size;
         i++) {
        const uint8_t *a = at + (i - 1) * size, *b = a + size;
        good = gd_index_key(a) < gd_index_key(b) ||
               (gd_index_key(a) == gd_index_key(b) &&
                gd_index_address(a) < gd_index_address(b));
    }
    if (!good) {
        PyErr_SetString(PyExc_ValueError,
                        "these are no items of such a file");
    }
    return good;
}

static PyObject *
index_write(PyObject *object, PyObject *args)
{
    gd_index_id id;
    Py_buffer items;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "O&y*", to_file, &id, &items)) {
        return NULL;
    }
    if (good_items(id.kind, &items) && gd_py_call_opened(object, &call)) {
        size_t count = (size_t)items.len / gd_index_head_item_size(id.kind);
        result = gd_py_end_none(&call,
                                gd_shards_write(shards_of(object), &id,
                                                items.buf, count, &call.err));
    }
    PyBuffer_Release(&items);
    return result;
}

static PyObject *
index_add(PyObject *object, PyObject *args)
{
    int gone;
    Py_buffer records;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*p", &records, &gone)) {
        return NULL;
    }
    gd_index_kind kind = gone ? GD_INDEX_GONE : GD_INDEX_RUN;
    if (good_items(kind, &records) && gd_py_call_opened(object, &call)) {
        size_t count = (size_t)records.len / GD_INDEX_RECORD;
        result = gd_py_end_none(&call,
                                gd_shards_add(shards_of(object), kind,
                                              records.buf, count, &call.err));
    }
    PyBuffer_Release(&records);
    return result;
}

static PyObject *
index_find(PyObject *object, PyObject *args)
{
    const char *fingerprint;
    Py_ssize_t length;
    uint64_t address;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "y#", &fingerprint, &length)) {
        return NULL;
    }
    if (length < 8) {
        PyErr_SetString(PyExc_ValueError, "a fingerprint has 32 bytes");
        return NULL;
    }
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_status s =
        gd_shards_find(shards_of(object),
                       gd_index_key((const uint8_t *)fingerprint), &address,
                       &call.err);
    return gd_py_end_number(&call, s, address);
}

/* The answers to requests, sorted already. */
static PyObject *
answer(PyObject *object, const gd_item *requests, size_t count)
{
    uint32_t unread = 0;
    gd_py_call call;
    PyObject *result = NULL;
    uint64_t *addresses = PyMem_Calloc(count + 1, sizeof *addresses);
    if (addresses == NULL) {
        return PyErr_NoMemory();
    }
    if (gd_py_call_opened(object, &call)) {
        gd_status s = gd_indexjoin_shards(shards_of(object), requests, count,
                                          addresses, &unread, &call.err);
        if (gd_py_end(&call, s)) {
            result = gd_py_answers(requests, addresses, count, &unread);
        }
    }
    PyMem_Free(addresses);
    return result;
}

/* answer(requests) -> answers, waiting requests, files that were not read */
static PyObject *
index_answer(PyObject *object, PyObject *requests)
{
    Py_buffer view;
    gd_item *room;
    size_t count;
    PyObject *result = NULL;
    if (PyObject_GetBuffer(requests, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const gd_item *items = gd_py_sorted_items(&view, &count, &room);
    PyBuffer_Release(&view);
    if (items != NULL) {
        result = answer(object, items, count);
    }
    PyMem_Free(room);
    return result;
}

/* ---- the lock, and what its holder does ---- */

static PyObject *
index_lock(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    return gd_py_end_not_busy(&call,
                              gd_shards_lock(shards_of(object), &call.err));
}

static PyObject *
index_unlock(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    gd_shards_unlock(shards_of(object));
    return gd_py_end_none(&call, GD_OK);
}

typedef gd_status (*index_function)(gd_shards *shards, gd_error *err);

static PyObject *
call_index(PyObject *object, index_function function)
{
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(&call, function(shards_of(object), &call.err));
}

static PyObject *
index_fill(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return call_index(object, gd_shards_fill);
}

static PyObject *
index_tidy(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return call_index(object, gd_shards_tidy);
}

static PyObject *
index_sync(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return call_index(object, gd_shards_sync);
}

/* ---- merging ---- */

static PyObject *
index_begin_merge(PyObject *object, PyObject *args)
{
    uint32_t bits, shard;
    unsigned long long ns, records;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O&O&KK", gd_py_to_u32, &bits, gd_py_to_u32,
                          &shard, &ns, &records) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    index_handle *index = handle_of(object);
    gd_duplicate_search_end(index->search);
    index->search = NULL;
    gd_status s = gd_duplicate_search_begin(index->shards, bits, shard,
                                            (gd_split_limits){ns, records},
                                            &index->search, &call.err);
    bool begun = index->search != NULL;
    return gd_py_end_bool(&call,
                          s == GD_BUSY || s == GD_NOTFOUND ? GD_OK : s, begun);
}

static gd_status
require_merge(const index_handle *index, gd_error *err)
{
    return index->search != NULL
               ? GD_OK
               : gd_fail(err, GD_INVALID, "no merge is under way");
}

static PyObject *
index_step(PyObject *object, PyObject *args)
{
    uint32_t records;
    bool more = false;
    uint64_t bytes = 0;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O&", gd_py_to_u32, &records) ||
        !gd_py_call_opened(object, &call)) {
        return NULL;
    }
    index_handle *index = handle_of(object);
    gd_status s = require_merge(index, &call.err);
    if (s == GD_OK) {
        s = gd_duplicate_search_step(index->search, records, &more, &bytes,
                                     &call.err);
    }
    return gd_py_end_two(&call, s, more, bytes);
}

static PyObject *
index_finish_merge(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_search_result result = {.records = 0};
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    index_handle *index = handle_of(object);
    gd_status s = require_merge(index, &call.err);
    if (s == GD_OK) {
        s = gd_duplicate_search_finish(index->search, &result, &call.err);
        gd_duplicate_search_end(index->search);
        index->search = NULL;
    }
    if (!gd_py_end(&call, s)) {
        return NULL;
    }
    return Py_BuildValue("(KKKNN)", (unsigned long long)result.records,
                         (unsigned long long)result.pairs,
                         (unsigned long long)result.bytes,
                         PyBool_FromLong(result.split),
                         PyBool_FromLong(result.more));
}

static PyObject *
index_cancel_merge(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_py_call call;
    if (!gd_py_call_opened(object, &call)) {
        return NULL;
    }
    index_handle *index = handle_of(object);
    gd_duplicate_search_end(index->search);
    index->search = NULL;
    return gd_py_end_none(&call, GD_OK);
}

static PyMethodDef index_methods[] = {
    {"lock", index_lock, METH_NOARGS, NULL},
    {"unlock", index_unlock, METH_NOARGS, NULL},
    {"files", index_files, METH_NOARGS, NULL},
    {"shards", index_shards, METH_NOARGS, NULL},
    {"count", index_count, METH_VARARGS, NULL},
    {"read", index_read, METH_VARARGS, NULL},
    {"write", index_write, METH_VARARGS, NULL},
    {"add", index_add, METH_VARARGS, NULL},
    {"fill", index_fill, METH_NOARGS, NULL},
    {"tidy", index_tidy, METH_NOARGS, NULL},
    {"sync", index_sync, METH_NOARGS, NULL},
    {"remove", index_remove, METH_VARARGS, NULL},
    {"set_aside", index_set_aside, METH_VARARGS, NULL},
    {"verify", index_verify, METH_VARARGS, NULL},
    {"find", index_find, METH_VARARGS, NULL},
    {"answer", index_answer, METH_O, NULL},
    {"begin_merge", index_begin_merge, METH_VARARGS, NULL},
    {"step", index_step, METH_VARARGS, NULL},
    {"finish_merge", index_finish_merge, METH_NOARGS, NULL},
    {"cancel_merge", index_cancel_merge, METH_NOARGS, NULL},
    {"close", gd_py_opened_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const gd_py_type gd_py_index_type = {
    .name = "glance_dedup._engine.Index",
    .size = sizeof(opened_object),
    .make = index_new,
    .dealloc = gd_py_opened_dealloc,
    .methods = index_methods,
};
