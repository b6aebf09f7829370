/*
 * _enginemodule.c - glance_dedup._engine: the module, the repository, and its
 * type for storing.
 *
 * It turns arguments into C, releases the GIL around everything that computes,
 * waits or does I/O, and turns a gd_error into the exception of its class.
 * repository.py documents the API; nothing else imports this module.
 *
 * Lifetimes: a Transaction or Image keeps its Repository object alive; close()
 * of a Repository frees the handle when the last of them is done.  In a forked
 * child every object only refuses (ClosedError) and leaves all as it is.
 */
#include "_engine.h"

#include <string.h>

#include "engine/chunker.h"
#include "engine/coding.h"
#include "engine/fingerprint.h"
#include "engine/runs.h"
#include "engine/segcache.h"
#include "engine/spool.h"
#include "engine/transaction.h"

/* ---- errors ---- */

/* The one table from status to exception; names in glance_dedup.exceptions. */
static const struct {
    gd_status status;
    const char *name;
} error_classes[] = {
    {GD_IO, "StorageError"},         {GD_CORRUPT, "DamagedError"},
    {GD_NOSPACE, "NoSpaceError"},    {GD_NOTFOUND, "ImageNotFound"},
    {GD_EXISTS, "ImageExists"},      {GD_BUSY, "BusyError"},
    {GD_VERSION, "VersionError"},    {GD_INVALID, "InvalidParameter"},
    {GD_DENIED, "AccessDenied"},     {GD_CLOSED, "ClosedError"},
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
    /* File names and image ids are bytes from elsewhere. */
    PyObject *text =
        PyUnicode_DecodeUTF8(err->text, (Py_ssize_t)strlen(err->text), "replace");
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

/* ---- Repository ---- */

gd_status
gd_py_check_process(const repository_object *self, gd_error *err)
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
    return gd_py_check_process(self, NULL) == GD_OK;
}

static void
free_when_unused(repository_object *self)
{
    if (self->closed && self->users == 0 && self->repo != NULL &&
        gd_py_check_process(self, NULL) == GD_OK) {
        gd_repo *repo = self->repo;
        self->repo = NULL;
        Py_BEGIN_ALLOW_THREADS
        gd_repo_close(repo);
        Py_END_ALLOW_THREADS
    }
}

/* Every use of the handle stands between enter and leave. */
int
gd_py_enter_repository(repository_object *self)
{
    gd_error err;
    if (self->closed || self->repo == NULL) {
        gd_fail(&err, GD_CLOSED, "the repository handle is closed");
    } else if (gd_py_check_process(self, &err) == GD_OK) {
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
gd_py_parse_image(PyObject *args, const char **image_id, uint8_t room[GD_ID_SIZE],
            const uint8_t **upload)
{
    const char *given = NULL;
    Py_ssize_t length = 0;
    if (!PyArg_ParseTuple(args, "s|z#", image_id, &given, &length)) {
        return 0;
    }
    *upload = given == NULL ? NULL : room;
    return given == NULL || gd_py_copy_id("upload_id", given, length, room);
}

static PyObject *
repository_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {
        "path",         "repository_id",   "block_size", "group_slots",
        "segment_size", "fingerprint",     "by_value",   "codec",
        "codec_level",  "threads",         "lock_timeout_ms",
        "allow_weak",   NULL};
    PyObject *path = NULL;
    const char *id, *fingerprint, *codec;
    Py_ssize_t id_length;
    int by_value, allow_weak = 0;
    gd_params params;
    memset(&params, 0, sizeof params);
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "O&y#IIIspsiII|p", names, PyUnicode_FSConverter,
            &path, &id, &id_length, &params.block_size, &params.group_slots,
            &params.segment_size, &fingerprint, &by_value, &codec,
            &params.codec_level, &params.threads, &params.lock_timeout_ms,
            &allow_weak)) {
        Py_XDECREF(path);
        return NULL;
    }
    repository_object *self = NULL;
    const module_state *state = PyType_GetModuleState(type);
    gd_error err;
    gd_status s = GD_OK;
    params.by_value = by_value != 0;
    if (!gd_py_copy_id("repository_id", id, id_length, params.repository_id)) {
        goto done;
    }
    if (strlen(fingerprint) >= sizeof params.digest) {
        s = gd_fail(&err, GD_INVALID, "there is no digest '%.40s'",
                    fingerprint);
    } else {
        strcpy(params.digest, fingerprint);
        s = gd_codec_parse(codec, &params.codec, &err);
    }
    if (s != GD_OK) {
        gd_py_raise_in(state, &err);
        goto done;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    self = (repository_object *)allocate(type, 0);
    if (self == NULL) {
        goto done;
    }
    self->owner = gd_env_posix()->getpid(gd_env_posix());
    self->forks = state->forks;
    self->state = state;
    const char *c_path = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    s = gd_repo_open(gd_env_posix(), c_path, &params, allow_weak != 0,
                     &self->repo, &err);
    Py_END_ALLOW_THREADS
    if (s != GD_OK) {
        self->repo = NULL;
        gd_py_raise_in(state, &err);
        Py_CLEAR(self);
    }
done:
    Py_XDECREF(path);
    return (PyObject *)self;
}

/* attach_filter(path, bytes): REQUIRES as gd_repo_attach_filter, which
 * repository.py sees to. */
static PyObject *
repository_attach_filter(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    PyObject *path = NULL;
    unsigned long long budget;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "O&K", PyUnicode_FSConverter, &path,
                          &budget)) {
        return NULL;
    }
    if (!gd_py_enter_repository(self)) {
        Py_DECREF(path);
        return NULL;
    }
    const char *c_path = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    s = gd_repo_attach_filter(self->repo, c_path, budget, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_repository(self);
    Py_DECREF(path);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    Py_RETURN_NONE;
}

static PyObject *
repository_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    repository_object *self = (repository_object *)object;
    self->closed = 1;
    free_when_unused(self);
    Py_RETURN_NONE;
}

void
gd_py_free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void
repository_dealloc(PyObject *object)
{
    repository_object *self = (repository_object *)object;
    self->closed = 1;
    free_when_unused(self);
    gd_py_free_object(object);
}

static PyObject *
repository_delete(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const char *image_id;
    const uint8_t *upload;
    uint8_t upload_id[GD_ID_SIZE];
    gd_error err;
    gd_status s;
    if (!gd_py_parse_image(args, &image_id, upload_id, &upload) ||
        !gd_py_enter_repository(self)) {
        return NULL;
    }
    gd_repo *repo = self->repo;
    Py_BEGIN_ALLOW_THREADS
    s = gd_spool_delete(repo->env, repo->root, &repo->params, image_id,
                        upload, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_repository(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    Py_RETURN_NONE;
}

static PyObject *
repository_rebuild_filter(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    unsigned groups;
    int clear = 0;
    gd_error err;
    if (!PyArg_ParseTuple(args, "I|p", &groups, &clear) ||
        !gd_py_enter_repository(self)) {
        return NULL;
    }
    gd_repo *repo = self->repo;
    bool more = false;
    uint32_t done = 0, total = 0;
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    if (clear && repo->filter != NULL &&
        gd_filter_rebuild_lock(repo->filter)) {
        gd_filter_clear(repo->filter);
        gd_filter_rebuild_unlock(repo->filter);
    }
    s = gd_repo_rebuild_filter(repo, groups, &more, &done, &total, &err);
    Py_END_ALLOW_THREADS
    gd_py_leave_repository(self);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    return Py_BuildValue("(NII)", PyBool_FromLong(more), done, total);
}

static PyObject *
repository_statistics(PyObject *object, PyObject *unused)
{
    (void)unused;
    repository_object *self = (repository_object *)object;
    if (!gd_py_enter_repository(self)) {
        return NULL;
    }
    gd_counters *c = &self->repo->counters;
    gd_filter_stats f;
    gd_segcache_stats s;
    gd_segcache_get_stats(self->repo->segcache, &s);
    memset(&f, 0, sizeof f);
    if (self->repo->filter != NULL) {
        gd_filter_get_stats(self->repo->filter, &f);
    }
    PyObject *result = Py_BuildValue(
        "{sKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsIsIsN}",
        "blocks", atomic_load(&c->blocks),
        "zero_blocks", atomic_load(&c->zero_blocks),
        "hits", atomic_load(&c->hits),
        "misses", atomic_load(&c->misses),
        "candidates", atomic_load(&c->candidates),
        "false_candidates", atomic_load(&c->false_candidates),
        "cold_loads", atomic_load(&c->cold_loads),
        "capped_loads", atomic_load(&c->capped_loads),
        "compares", atomic_load(&c->compares),
        "lock_refusals", atomic_load(&c->lock_refusals),
        "sync_points", atomic_load(&c->sync_points),
        "bytes_read", atomic_load(&c->bytes_read),
        "spare_reads", atomic_load(&c->spare_reads),
        "cache_bytes", (unsigned long long)s.bytes,
        "cache_hits", (unsigned long long)s.hits,
        "cache_misses", (unsigned long long)s.misses,
        "filter_bytes", (unsigned long long)f.bytes,
        "filter_places", (unsigned long long)f.places,
        "filter_hints", (unsigned long long)f.hints,
        "filter_dropped", (unsigned long long)f.dropped,
        "filter_level", f.level,
        "filter_rebuilt", f.rebuilt,
        "filter_complete", PyBool_FromLong(f.complete));
    gd_py_leave_repository(self);
    return result;
}

PyObject *
gd_py_header_dict(const gd_recipe_header *h)
{
    return Py_BuildValue(
        "{sssssy#sKsKsKsKsKsKsK}", "image_id", h->image_id, "project",
        h->project, "upload_id", h->upload_id, (Py_ssize_t)GD_ID_SIZE, "size",
        (unsigned long long)h->size, "zero_bytes",
        (unsigned long long)h->zero_bytes, "new_bytes",
        (unsigned long long)h->new_bytes, "stored_bytes",
        (unsigned long long)h->stored_bytes, "extents",
        (unsigned long long)h->extents, "fragments",
        (unsigned long long)h->fragments, "created",
        (unsigned long long)h->created);
}

/* set_segment_cache(budget in bytes) */
static PyObject *
repository_set_segment_cache(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    unsigned long long budget;
    if (!PyArg_ParseTuple(args, "K", &budget) ||
        !gd_py_enter_repository(self)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    gd_segcache_set_budget(self->repo->segcache, budget);
    Py_END_ALLOW_THREADS
    gd_py_leave_repository(self);
    Py_RETURN_NONE;
}

/* ---- Transaction ---- */

typedef struct transaction_object {
    PyObject_HEAD
    repository_object *owner; /* entered for as long as transaction is set */
    gd_transaction *transaction;
    PyThread_type_lock lock; /* one thread in the transaction at a time */
} transaction_object;

static PyObject *
repository_begin(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const char *image_id, *project;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "ss", &image_id, &project) ||
        !gd_py_enter_repository(self)) {
        return NULL;
    }
    const module_state *state = PyType_GetModuleState(Py_TYPE(object));
    PyTypeObject *type = state->transaction_type;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    transaction_object *result = (transaction_object *)allocate(type, 0);
    if (result == NULL) {
        gd_py_leave_repository(self);
        return NULL;
    }
    Py_INCREF(object);
    result->owner = self;
    result->lock = PyThread_allocate_lock();
    if (result->lock == NULL) {
        s = gd_fail(&err, GD_NOMEM, "no memory for a lock");
    } else {
        Py_BEGIN_ALLOW_THREADS
        s = gd_transaction_begin(self->repo, image_id, project,
                                 &result->transaction, &err);
        Py_END_ALLOW_THREADS
    }
    if (s != GD_OK) {
        result->transaction = NULL;
        gd_py_leave_repository(self);
        gd_py_raise(object, &err);
        Py_DECREF(result);
        return NULL;
    }
    return (PyObject *)result;
}

/* Takes the lock, unless the transaction is a forked child's parent's: there
 * another thread may have had it at the time of the fork. */
static gd_status
lock_transaction(transaction_object *self, gd_error *err)
{
    gd_status s = gd_py_check_process(self->owner, err);
    if (s == GD_OK) {
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
    }
    return s;
}

/* REQUIRES: the lock. */
static gd_status
check_open(const transaction_object *self, gd_error *err)
{
    return self->transaction != NULL
               ? GD_OK
               : gd_fail(err, GD_CLOSED, "the transaction has ended");
}

/* REQUIRES: the GIL, and the lock or the last reference. */
static void
end_transaction(transaction_object *self)
{
    gd_transaction *transaction = self->transaction;
    if (transaction == NULL ||
        gd_py_check_process(self->owner, NULL) != GD_OK) {
        return; /* a forked child leaves the parent's alone */
    }
    self->transaction = NULL;
    Py_BEGIN_ALLOW_THREADS
    gd_transaction_end(transaction);
    Py_END_ALLOW_THREADS
    gd_py_leave_repository(self->owner);
}

static PyObject *
transaction_write(PyObject *object, PyObject *data)
{
    transaction_object *self = (transaction_object *)object;
    Py_buffer view;
    gd_error err;
    gd_status s;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = lock_transaction(self, &err);
    if (s == GD_OK) {
        s = check_open(self, &err);
        if (s == GD_OK) {
            s = gd_transaction_write(self->transaction, view.buf,
                                     (size_t)view.len, &err);
        }
        PyThread_release_lock(self->lock);
    }
    Py_END_ALLOW_THREADS
    Py_ssize_t length = view.len;
    PyBuffer_Release(&view);
    return s == GD_OK ? PyLong_FromSsize_t(length) : gd_py_raise(object, &err);
}

static PyObject *
transaction_commit(PyObject *object, PyObject *unused)
{
    (void)unused;
    transaction_object *self = (transaction_object *)object;
    gd_recipe_header header;
    gd_error err;
    gd_status s;
    bool linked = false, locked;
    Py_BEGIN_ALLOW_THREADS
    s = lock_transaction(self, &err);
    locked = s == GD_OK;
    if (locked) {
        s = check_open(self, &err);
    }
    if (s == GD_OK) {
        s = gd_transaction_commit(self->transaction, &header, &linked, &err);
    }
    Py_END_ALLOW_THREADS
    if (linked) {
        end_transaction(self);
    }
    if (locked) {
        PyThread_release_lock(self->lock);
    }
    return s == GD_OK ? gd_py_header_dict(&header) : gd_py_raise(object, &err);
}

static PyObject *
transaction_abort(PyObject *object, PyObject *unused)
{
    (void)unused;
    transaction_object *self = (transaction_object *)object;
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    s = lock_transaction(self, NULL);
    Py_END_ALLOW_THREADS
    if (s == GD_OK) {
        end_transaction(self);
        PyThread_release_lock(self->lock);
    }
    Py_RETURN_NONE;
}

/* ---- blocks by their fingerprints ---- */

/* Packed arrays of blocks, as C has them. */
typedef struct block_list {
    size_t count;
    gd_fingerprint *fps;
    uint32_t *lengths;
    gd_address *addresses;
} block_list;

static void
free_blocks(block_list *list)
{
    PyMem_Free(list->fps);
    PyMem_Free(list->lengths);
    PyMem_Free(list->addresses);
}

/* addresses may be NULL: then there is only room for them. */
static int
copy_blocks(const Py_buffer *fps, const Py_buffer *lengths,
            const Py_buffer *addresses, block_list *list)
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
        free_blocks(list);
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
            /* One that is too large is none that was ever found. */
            list->addresses[i] = (gd_address){
                group > GD_MAX_GROUP ? 0 : (uint32_t)group,
                (uint32_t)(packed & (GD_MAX_SLOTS - 1))};
        }
    }
    return 1;
}

static PyObject *
pack_addresses(const block_list *list)
{
    PyObject *result =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(list->count * 8));
    if (result != NULL) {
        uint8_t *out = (uint8_t *)PyBytes_AsString(result);
        for (size_t i = 0; i < list->count; i++) {
            gd_put64(out + i * 8,
                     (uint64_t)list->addresses[i].group << GD_SLOT_BITS |
                         list->addresses[i].slot);
        }
    }
    return result;
}

/* find(fingerprints, lengths) -> addresses */
static PyObject *
transaction_find(PyObject *object, PyObject *args)
{
    transaction_object *self = (transaction_object *)object;
    Py_buffer fps, lengths;
    block_list list;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y*y*", &fps, &lengths)) {
        return NULL;
    }
    int copied = copy_blocks(&fps, &lengths, NULL, &list);
    PyBuffer_Release(&fps);
    PyBuffer_Release(&lengths);
    if (!copied) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = lock_transaction(self, &err);
    if (s == GD_OK) {
        s = check_open(self, &err);
        if (s == GD_OK) {
            s = gd_transaction_find(self->transaction, list.fps, list.lengths,
                                    list.count, list.addresses, &err);
        }
        PyThread_release_lock(self->lock);
    }
    Py_END_ALLOW_THREADS
    PyObject *result =
        s == GD_OK ? pack_addresses(&list) : gd_py_raise(object, &err);
    free_blocks(&list);
    return result;
}

/* add(fingerprints, lengths, addresses) */
static PyObject *
transaction_add(PyObject *object, PyObject *args)
{
    transaction_object *self = (transaction_object *)object;
    Py_buffer fps, lengths, addresses;
    block_list list;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "y*y*y*", &fps, &lengths, &addresses)) {
        return NULL;
    }
    int copied = copy_blocks(&fps, &lengths, &addresses, &list);
    PyBuffer_Release(&fps);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&addresses);
    if (!copied) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = lock_transaction(self, &err);
    if (s == GD_OK) {
        s = check_open(self, &err);
        if (s == GD_OK) {
            s = gd_transaction_add(self->transaction, list.fps, list.lengths,
                                   list.addresses, list.count, &err);
        }
        PyThread_release_lock(self->lock);
    }
    Py_END_ALLOW_THREADS
    free_blocks(&list);
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    Py_RETURN_NONE;
}

static PyObject *
transaction_add_zeros(PyObject *object, PyObject *args)
{
    transaction_object *self = (transaction_object *)object;
    unsigned long long length;
    gd_error err;
    gd_status s;
    if (!PyArg_ParseTuple(args, "K", &length)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    s = lock_transaction(self, &err);
    if (s == GD_OK) {
        s = check_open(self, &err);
        if (s == GD_OK) {
            s = gd_transaction_add_zeros(self->transaction, length, &err);
        }
        PyThread_release_lock(self->lock);
    }
    Py_END_ALLOW_THREADS
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    Py_RETURN_NONE;
}

static PyObject *
transaction_keep(PyObject *object, PyObject *unused)
{
    (void)unused;
    transaction_object *self = (transaction_object *)object;
    gd_error err;
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    s = lock_transaction(self, &err);
    if (s == GD_OK) {
        s = check_open(self, &err);
        if (s == GD_OK) {
            s = gd_transaction_keep(self->transaction, &err);
        }
        PyThread_release_lock(self->lock);
    }
    Py_END_ALLOW_THREADS
    if (s != GD_OK) {
        return gd_py_raise(object, &err);
    }
    Py_RETURN_NONE;
}

static PyObject *
transaction_upload_id(PyObject *object, void *unused)
{
    (void)unused;
    transaction_object *self = (transaction_object *)object;
    gd_error err;
    if (check_open(self, &err) != GD_OK) {
        return gd_py_raise(object, &err);
    }
    return PyBytes_FromStringAndSize(
        (const char *)gd_transaction_upload_id(self->transaction), GD_ID_SIZE);
}

static void
transaction_dealloc(PyObject *object)
{
    transaction_object *self = (transaction_object *)object;
    if (self->owner != NULL) {
        end_transaction(self);
    }
    if (self->lock != NULL) {
        PyThread_free_lock(self->lock);
    }
    Py_XDECREF((PyObject *)self->owner);
    gd_py_free_object(object);
}

/* ---- functions ---- */

/* fingerprint(name, data): what the engine would compute, for tests and
 * benchmarks. */
static PyObject *
engine_fingerprint(PyObject *module, PyObject *args)
{
    const char *name;
    Py_buffer view;
    gd_error err;
    gd_digest *digest = NULL;
    gd_hasher *hasher = NULL;
    gd_fingerprint fp;
    const gd_env *env = gd_env_posix();
    if (!PyArg_ParseTuple(args, "sy*", &name, &view)) {
        return NULL;
    }
    gd_status s;
    Py_BEGIN_ALLOW_THREADS
    s = gd_digest_open(env, name, true, &digest, &err);
    if (s == GD_OK) {
        s = gd_hasher_open(env, digest, &hasher, &err);
    }
    if (s == GD_OK) {
        s = gd_hasher_compute(hasher, view.buf, (size_t)view.len, &fp, &err);
        gd_hasher_close(env, hasher);
    }
    if (digest != NULL) {
        gd_digest_close(env, digest);
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    if (s != GD_OK) {
        return gd_py_raise_in(PyModule_GetState(module), &err);
    }
    return PyBytes_FromStringAndSize((const char *)fp.bytes,
                                     GD_FINGERPRINT_SIZE);
}

/* is_cryptographic(name): whether comparison by hash may rely on it; raises
 * InvalidParameter for a digest that cannot be had. */
static PyObject *
engine_is_cryptographic(PyObject *module, PyObject *args)
{
    const char *name;
    gd_error err;
    gd_digest *digest;
    if (!PyArg_ParseTuple(args, "s", &name)) {
        return NULL;
    }
    if (gd_digest_open(gd_env_posix(), name, false, &digest, &err) != GD_OK) {
        return gd_py_raise_in(PyModule_GetState(module), &err);
    }
    int answer = gd_digest_is_cryptographic(digest);
    gd_digest_close(gd_env_posix(), digest);
    return PyBool_FromLong(answer);
}

static PyMethodDef repository_methods[] = {
    {"begin", repository_begin, METH_VARARGS, NULL},
    {"open_image", gd_py_open_image, METH_VARARGS, NULL},
    {"delete", repository_delete, METH_VARARGS, NULL},
    {"attach_filter", repository_attach_filter, METH_VARARGS, NULL},
    {"rebuild_filter", repository_rebuild_filter, METH_VARARGS, NULL},
    {"set_segment_cache", repository_set_segment_cache, METH_VARARGS, NULL},
    {"statistics", repository_statistics, METH_NOARGS, NULL},
    {"close", repository_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot repository_slots[] = {
    {Py_tp_new, repository_new},
    {Py_tp_dealloc, repository_dealloc},
    {Py_tp_methods, repository_methods},
    {0, NULL},
};

static PyType_Spec repository_spec = {
    .name = "glance_dedup._engine.Repository",
    .basicsize = sizeof(repository_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = repository_slots,
};

static PyMethodDef transaction_methods[] = {
    {"write", transaction_write, METH_O, NULL},
    {"find", transaction_find, METH_VARARGS, NULL},
    {"add", transaction_add, METH_VARARGS, NULL},
    {"add_zeros", transaction_add_zeros, METH_VARARGS, NULL},
    {"keep", transaction_keep, METH_NOARGS, NULL},
    {"commit", transaction_commit, METH_NOARGS, NULL},
    {"abort", transaction_abort, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef transaction_attributes[] = {
    {"upload_id", transaction_upload_id, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot transaction_slots[] = {
    {Py_tp_dealloc, transaction_dealloc},
    {Py_tp_methods, transaction_methods},
    {Py_tp_getset, transaction_attributes},
    {0, NULL},
};

static PyType_Spec transaction_spec = {
    .name = "glance_dedup._engine.Transaction",
    .basicsize = sizeof(transaction_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = transaction_slots,
};

PyTypeObject *
gd_py_add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0) {
        Py_CLEAR(type);
    }
    return (PyTypeObject *)type;
}

static int
module_exec(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    state->exceptions = PyImport_ImportModule("glance_dedup.exceptions");
    if (state->exceptions == NULL) {
        return -1;
    }
    state->repository_type = gd_py_add_type(module, &repository_spec);
    state->transaction_type = gd_py_add_type(module, &transaction_spec);
    state->image_type = gd_py_add_type(module, &gd_py_image_spec);
    return state->repository_type == NULL || state->transaction_type == NULL ||
                   state->image_type == NULL ||
                   gd_py_add_maintenance(module, state) < 0 ||
                   gd_py_add_merging(module) < 0 ||
                   gd_py_add_scrubbing(module) < 0 ||
                   gd_py_add_spares(module) < 0
               ? -1
               : 0;
}

static int
module_clear(PyObject *module)
{
    module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->exceptions);
    Py_CLEAR(state->repository_type);
    Py_CLEAR(state->transaction_type);
    Py_CLEAR(state->image_type);
    Py_CLEAR(state->maintenance_type);
    Py_CLEAR(state->recipe_type);
    Py_CLEAR(state->group_type);
    return 0;
}

/* after_fork(): in the child, disowns all that was opened before. */
static PyObject *
engine_after_fork(PyObject *module, PyObject *unused)
{
    (void)unused;
    module_state *state = PyModule_GetState(module);
    state->forks++;
    Py_RETURN_NONE;
}

static PyMethodDef module_functions[] = {
    {"after_fork", engine_after_fork, METH_NOARGS, NULL},
    {"fingerprint", engine_fingerprint, METH_VARARGS, NULL},
    {"is_cryptographic", engine_is_cryptographic, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "glance_dedup._engine",
    .m_size = sizeof(module_state),
    .m_methods = module_functions,
    .m_slots = module_slots,
    .m_clear = module_clear,
};

PyMODINIT_FUNC
PyInit__engine(void)
{
    return PyModuleDef_Init(&module_definition);
}
