/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repository.c - glance_dedup._engine.Repository: the handle that everything
 * else is opened with.
 *
 * Lifetimes: objects opened with it keep it alive.  close() frees the handle
 * when the last call, transaction, image, volume and maintenance is done.  Threads: any
 * number at once.  In a forked child it refuses, and leaves the handle as it
 * is.
 */
#include "binding/binding.h"

#include <string.h>

#include "engine/files/freespace.h"
#include "engine/files/image_delete.h"
#include "engine/repo/follow.h"
#include "engine/repo/segcache.h"
#include "engine/write/scan.h"

/* Parameters not yet in the engine's form. */
typedef struct raw_params {
    PyObject *path; /* bytes */
    PyObject *slice_dir;    /* bytes; NULL: cold groups cannot be read */
    PyObject *slice_memory; /* bytes; NULL or empty: there is none */
    PyObject *slice_source;
    const char *id, *fingerprint, *codec;
    Py_ssize_t id_length;
    int by_value, allow_weak, adaptive_compression;
    unsigned direct_io;
    unsigned long long reserve;
} raw_params;

static int
parse_params(PyObject *args, PyObject *keywords, raw_params *raw,
             gd_params *params)
{
    static char *names[] = {
        "path",         "repository_id", "block_size",
        "group_slots",  "segment_size",    "fingerprint",   "by_value",
        "codec",        "codec_level",     "threads",
        "lock_timeout_ms",                 "allow_weak",    "reserve",
        "adaptive_compression",            "direct_io",     "cut_minimum",
        "cut_average",  "slice_dir",       "slice_memory",  "slice_source",
        NULL};
    return PyArg_ParseTupleAndKeywords(
        args, keywords, "O&y#IIIspsiII|pKpIIIO&O&O", names, PyUnicode_FSConverter,
        &raw->path, &raw->id, &raw->id_length,
        &params->block_size, &params->group_slots, &params->segment_size, &raw->fingerprint,
        &raw->by_value, &raw->codec, &params->codec_level, &params->threads,
        &params->lock_timeout_ms, &raw->allow_weak, &raw->reserve,
        &raw->adaptive_compression, &raw->direct_io, &params->cut_minimum,
        &params->cut_average, PyUnicode_FSConverter, &raw->slice_dir,
        PyUnicode_FSConverter, &raw->slice_memory, &raw->slice_source);
}

/* Returns 0 with an exception set on error. */
static int
convert_params(const module_state *state, const raw_params *raw,
               gd_params *params)
{
    gd_error err;
    gd_status s;
    params->by_value = raw->by_value != 0;
    params->reserve = raw->reserve;
    params->adaptive_compression = raw->adaptive_compression != 0;
    params->direct_io = (gd_direct_io)raw->direct_io;
    if (!gd_py_copy_id("repository_id", raw->id, raw->id_length,
                       params->repository_id)) {
        return 0;
    }
    if (strlen(raw->fingerprint) >= sizeof params->digest) {
        s = gd_fail(&err, GD_INVALID, "there is no digest '%.40s'",
                    raw->fingerprint);
    } else {
        strcpy(params->digest, raw->fingerprint);
        s = gd_codec_parse(raw->codec, &params->codec, &err);
    }
    if (s != GD_OK) {
        gd_py_raise_in(state, &err);
    }
    return s == GD_OK;
}

static repository_object *
open_repository(PyTypeObject *type, const raw_params *raw, gd_params *params)
{
    const module_state *state = PyType_GetModuleState(type);
    repository_object *self = gd_py_new_object(type);
    gd_error err;
    gd_status s = GD_OK;
    if (self == NULL) {
        return NULL;
    }
    self->owner = gd_env_posix()->getpid(gd_env_posix());
    self->forks = state->forks;
    self->state = state;
    const char *c_path = PyBytes_AsString(raw->path);
    if (raw->slice_dir != NULL && raw->slice_source != NULL) {
        const char *memory = raw->slice_memory == NULL
                                 ? ""
                                 : PyBytes_AsString(raw->slice_memory);
        s = gd_py_open_slices(self, PyBytes_AsString(raw->slice_dir),
                              memory[0] == '\0' ? NULL : memory,
                              raw->slice_source, &err);
        params->slices = self->slices;
    }
    if (s == GD_OK) {
        Py_BEGIN_ALLOW_THREADS
        s = gd_repo_open(gd_env_posix(), c_path, params,
                         raw->allow_weak != 0, &self->repo, &err);
        Py_END_ALLOW_THREADS
    }
    if (s != GD_OK) {
        self->repo = NULL;
        gd_py_close_slices(self);
        gd_py_raise_in(state, &err);
        Py_CLEAR(self);
    }
    return self;
}

static PyObject *
repository_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    repository_object *self = NULL;
    raw_params raw;
    gd_params params;
    memset(&raw, 0, sizeof raw);
    memset(&params, 0, sizeof params);
    if (parse_params(args, keywords, &raw, &params) &&
        convert_params(PyType_GetModuleState(type), &raw, &params)) {
        self = open_repository(type, &raw, &params);
    }
    Py_XDECREF(raw.path);
    Py_XDECREF(raw.slice_dir);
    Py_XDECREF(raw.slice_memory);
    return (PyObject *)self;
}

static PyObject *
repository_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_py_close_repository((repository_object *)object);
    Py_RETURN_NONE;
}

static void
repository_dealloc(PyObject *object)
{
    gd_py_close_repository((repository_object *)object);
    gd_py_free_object(object);
}

static PyObject *
repository_delete(PyObject *object, PyObject *args)
{
    gd_repo *repo = ((repository_object *)object)->repo;
    const char *image_id;
    const uint8_t *upload;
    uint8_t upload_id[GD_ID_SIZE];
    gd_py_call call;
    if (!gd_py_parse_image(args, &image_id, upload_id, &upload) ||
        !gd_py_call_repository(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(
        &call, gd_image_delete(repo->env, repo->root, &repo->params, image_id,
                               upload, &call.err));
}

/* attach_filter(path, bytes): REQUIRES the same as gd_repo_attach_filter;
 * hostfilter.py ensures it. */
static PyObject *
repository_attach_filter(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    PyObject *path = NULL, *result = NULL;
    unsigned long long budget;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O&K", PyUnicode_FSConverter, &path,
                          &budget)) {
        return NULL;
    }
    const char *c_path = PyBytes_AsString(path);
    if (gd_py_call_repository(object, &call)) {
        gd_status s =
            gd_repo_attach_filter(self->repo, c_path, budget, &call.err);
        result = gd_py_end_none(&call, s);
    }
    Py_DECREF(path);
    return result;
}

/* attach_store(backend, path, capacity in keys, cache in bytes): REQUIRES the
 * same as gd_repo_attach_store. */
static PyObject *
repository_attach_store(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const char *name;
    PyObject *path = NULL, *result = NULL;
    unsigned long long capacity, cache;
    gd_kv_backend backend;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "sO&KK", &name, PyUnicode_FSConverter, &path,
                          &capacity, &cache)) {
        return NULL;
    }
    const char *c_path = PyBytes_AsString(path);
    gd_kv_options options = {capacity, cache};
    if (!gd_kv_backend_parse(name, &backend)) {
        PyErr_Format(PyExc_ValueError, "there is no metadata backend '%s'",
                     name);
    } else if (gd_py_call_repository(object, &call)) {
        gd_status s = gd_repo_attach_store(self->repo, backend, c_path,
                                           &options, &call.err);
        result = gd_py_end_none(&call, s);
    }
    Py_DECREF(path);
    return result;
}

/* clear_index() -> whether it was emptied: nobody else is at work on it */
static PyObject *
repository_clear_index(PyObject *object, PyObject *Py_UNUSED(unused))
{
    gd_hintindex *index = ((repository_object *)object)->repo->index;
    gd_py_call call;
    if (!gd_py_call_repository(object, &call)) {
        return NULL;
    }
    bool cleared = index == NULL || index->rebuild_lock(index);
    if (index != NULL && cleared) {
        index->clear(index);
        index->rebuild_unlock(index);
    }
    return gd_py_end(&call, GD_OK) ? PyBool_FromLong(cleared) : NULL;
}

/* follow(groups, after_ms) -> (more, groups done, groups in all) */
static PyObject *
repository_follow(PyObject *object, PyObject *args)
{
    gd_repo *repo = ((repository_object *)object)->repo;
    uint32_t groups, after = 0;
    gd_followed followed = {.more = false};
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "O&|O&", gd_py_to_u32, &groups, gd_py_to_u32,
                          &after) ||
        !gd_py_call_repository(object, &call)) {
        return NULL;
    }
    gd_status s = after == 0 || gd_follow_is_due(repo, after)
                      ? gd_follow(repo, groups, &followed, &call.err)
                      : GD_OK;
    return gd_py_end(&call, s)
               ? Py_BuildValue("(NII)", PyBool_FromLong(followed.more),
                               followed.done, followed.total)
               : NULL;
}

/* set_segment_cache(budget in bytes, lists_only=False) */
static PyObject *
repository_set_segment_cache(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    unsigned long long budget;
    int lists_only = 0;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "K|p", &budget, &lists_only) ||
        !gd_py_call_repository(object, &call)) {
        return NULL;
    }
    gd_segcache_set_lists_only(self->repo->segcache, lists_only != 0);
    gd_segcache_set_budget(self->repo->segcache, budget);
    return gd_py_end_none(&call, GD_OK);
}

/* room() -> (free bytes, bytes that storing leaves free) */
static PyObject *
repository_room(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const gd_repo *repo = ((repository_object *)object)->repo;
    gd_space space = {0};
    gd_py_call call;
    if (!gd_py_call_repository(object, &call)) {
        return NULL;
    }
    int rc = repo->env->free_space(repo->env, repo->root, &space);
    gd_status s = rc < 0 ? gd_fail_errno(&call.err, -rc,
                                         "cannot ask for the room on the disk")
                         : GD_OK;
    uint64_t kept = gd_freespace_kept(gd_repo_keeps(repo), space.total);
    return gd_py_end_two(&call, s, space.free, kept);
}

/* check_room(bytes) */
static PyObject *
repository_check_room(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    unsigned long long bytes;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "K", &bytes) ||
        !gd_py_call_repository(object, &call)) {
        return NULL;
    }
    return gd_py_end_none(&call,
                          gd_repo_require_room(self->repo, bytes, &call.err));
}

/* None: never since the host was started. */
static PyObject *
seconds_since(const gd_repo *repo, int64_t moment)
{
    int64_t now = repo->env->monotonic_ns(repo->env);
    if (moment == 0 || moment > now) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble((double)(now - moment) / 1e9);
}

static PyObject *
repository_statistics(PyObject *object, PyObject *Py_UNUSED(unused))
{
    repository_object *self = (repository_object *)object;
    if (!gd_py_enter_repository(self)) {
        return NULL;
    }
    gd_counters *c = &self->repo->counters;
    gd_filter_stats f;
    gd_segcache_stats s;
    gd_slice_counts slices = {0, 0};
    if (self->slices != NULL) {
        slices = gd_slices_get_counts(self->slices);
    }
    gd_segcache_get_stats(self->repo->segcache, &s);
    memset(&f, 0, sizeof f);
    gd_hintindex *index = self->repo->index;
    if (index != NULL) {
        index->get_stats(index, &f);
    }
    PyObject *result = Py_BuildValue(
        "{sKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsKsIsIsNsIsN}",
        "blocks", atomic_load(&c->blocks),
        "zero_blocks", atomic_load(&c->zero_blocks),
        "hits", atomic_load(&c->hits),
        "misses", atomic_load(&c->misses),
        "skipped", atomic_load(&c->skipped),
        "unmarked", atomic_load(&c->unmarked),
        "candidates", atomic_load(&c->candidates),
        "false_candidates", atomic_load(&c->false_candidates),
        "cold_loads", atomic_load(&c->cold_loads),
        "capped_loads", atomic_load(&c->capped_loads),
        "compares", atomic_load(&c->compares),
        "lock_refusals", atomic_load(&c->lock_refusals),
        "sync_points", atomic_load(&c->sync_points),
        "bytes_read", atomic_load(&c->bytes_read),
        "spare_reads", atomic_load(&c->spare_reads),
        "slice_reads", (unsigned long long)slices.reads,
        "slice_misses", (unsigned long long)slices.misses,
        "yielded_segments", atomic_load(&c->yielded_segments),
        "phase_samples", atomic_load(&c->phase_samples),
        "phase_changes", atomic_load(&c->phase_changes),
        "store_reads", atomic_load(&c->store.reads),
        "store_seeks", atomic_load(&c->store.seeks),
        "store_bytes", atomic_load(&c->store.bytes),
        "image_reads", atomic_load(&c->image.reads),
        "image_seeks", atomic_load(&c->image.seeks),
        "image_bytes", atomic_load(&c->image.bytes),
        "cache_bytes", (unsigned long long)s.bytes,
        "cache_hits", (unsigned long long)s.hits,
        "cache_misses", (unsigned long long)s.misses,
        "filter_bytes", (unsigned long long)f.bytes,
        "filter_places", (unsigned long long)f.places,
        "filter_hints", (unsigned long long)f.hints,
        "filter_dropped", (unsigned long long)f.dropped,
        "filter_level", f.level,
        "filter_rebuilt", f.rebuilt,
        "filter_complete", PyBool_FromLong(f.complete),
        "filter_behind", f.look.behind,
        "filter_refresh_age_seconds",
        seconds_since(self->repo, f.look.ended_ns));
    gd_py_leave_repository(self);
    return result;
}

/* use_feature(name): gd_repo_use_feature */
static PyObject *
repository_use_feature(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const char *name;
    gd_feature feature;
    gd_py_call call;
    if (!PyArg_ParseTuple(args, "s", &name) ||
        !gd_py_call_repository(object, &call)) {
        return NULL;
    }
    gd_status s = gd_features_parse(name, &feature, &call.err);
    if (s == GD_OK) {
        s = gd_repo_use_feature(self->repo, feature, &call.err);
    }
    return gd_py_end_none(&call, s);
}

/* is_shared() */
static PyObject *
repository_is_shared(PyObject *object, PyObject *Py_UNUSED(unused))
{
    repository_object *self = (repository_object *)object;
    if (!gd_py_enter_repository(self)) {
        return NULL;
    }
    bool shared = self->repo->params.shared;
    gd_py_leave_repository(self);
    return PyBool_FromLong(shared);
}

/* scan(data, scope = global) -> scanned blocks */
static PyObject *
repository_scan(PyObject *object, PyObject *args)
{
    repository_object *self = (repository_object *)object;
    const char *id = (const char *)gd_global_scope.id;
    Py_ssize_t id_length = GD_SCOPE_SIZE;
    gd_scope scope;
    Py_buffer data;
    uint8_t *scanned = NULL;
    size_t count = 0;
    gd_py_call call;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*|y#", &data, &id, &id_length)) {
        return NULL;
    }
    if (gd_py_copy_id("scope", id, id_length, scope.id) &&
        gd_py_call_repository(object, &call)) {
        gd_status s = gd_scan(self->repo, &scope, data.buf, (size_t)data.len,
                              &scanned, &count, &call.err);
        result = gd_py_end_bytes(&call, s, scanned, count * GD_SCANNED_SIZE);
    }
    gd_env_posix()->release(gd_env_posix(), scanned);
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef repository_methods[] = {
    {"begin", gd_py_begin, METH_VARARGS, NULL},
    {"begin_conversion", gd_py_begin_conversion, METH_VARARGS, NULL},
    {"use_feature", repository_use_feature, METH_VARARGS, NULL},
    {"is_shared", repository_is_shared, METH_NOARGS, NULL},
    {"block_reader", gd_py_open_block_reader, METH_NOARGS, NULL},
    {"scan", repository_scan, METH_VARARGS, NULL},
    {"open_image", gd_py_open_image, METH_VARARGS, NULL},
    {"delete", repository_delete, METH_VARARGS, NULL},
    {"create_volume", gd_py_create_volume, METH_VARARGS, NULL},
    {"open_volume", gd_py_open_volume, METH_VARARGS, NULL},
    {"look_at_volume", gd_py_look_at_volume, METH_VARARGS, NULL},
    {"delete_volume", gd_py_delete_volume, METH_VARARGS, NULL},
    {"discard_volume", gd_py_discard_volume, METH_VARARGS, NULL},
    {"rename_volume", gd_py_rename_volume, METH_VARARGS, NULL},
    {"roll_back_volume", gd_py_roll_back_volume, METH_VARARGS, NULL},
    {"finish_volume", gd_py_finish_volume, METH_VARARGS, NULL},
    {"attach_filter", repository_attach_filter, METH_VARARGS, NULL},
    {"attach_store", repository_attach_store, METH_VARARGS, NULL},
    {"clear_index", repository_clear_index, METH_NOARGS, NULL},
    {"follow", repository_follow, METH_VARARGS, NULL},
    {"set_segment_cache", repository_set_segment_cache, METH_VARARGS, NULL},
    {"room", repository_room, METH_NOARGS, NULL},
    {"check_room", repository_check_room, METH_VARARGS, NULL},
    {"statistics", repository_statistics, METH_NOARGS, NULL},
    {"close", repository_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* take_unused_filter(fd, unfinished) */
static PyObject *
engine_take_unused_filter(PyObject *Py_UNUSED(module), PyObject *args)
{
    int fd, unfinished;
    if (!PyArg_ParseTuple(args, "ip", &fd, &unfinished)) {
        return NULL;
    }
    return PyBool_FromLong(
        gd_filter_take_unused(gd_env_posix(), fd, unfinished));
}

PyMethodDef gd_py_repository_functions[] = {
    {"take_unused_filter", engine_take_unused_filter, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

const gd_py_type gd_py_repository_type = {
    .name = "glance_dedup._engine.Repository",
    .size = sizeof(repository_object),
    .make = repository_new,
    .dealloc = repository_dealloc,
    .methods = repository_methods,
};
