/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.c - see journal.h.
 */
#include "engine/volume/journal.h"

#include <errno.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/files/file.h"
#include "engine/volume/volumenames.h"

enum {
    SCAN_ROOM = 1 << 20, /* more than the longest record */
    ZEROS = 4096,
    MIN_AHEAD = 64 << 10, /* zeros written ahead: as many bytes as there */
    MAX_AHEAD = 1 << 20,   /* are in the journal, but within these bounds */
};

static const uint8_t zeros[ZEROS];

/* ---- making one ---- */

static gd_status
write_head(const gd_env *env, int fd, const char *name,
           const gd_volume_head *head, const gd_volume_mark *marks,
           gd_error *err)
{
    size_t bytes = (size_t)gd_volume_head_records_start(head->marks);
    uint8_t *page = gd_calloc(env, bytes, 1, err);
    if (page == NULL) {
        return GD_NOMEM;
    }
    gd_volume_marks_encode(marks, head->marks, page + GD_VOLUME_HEAD);
    gd_volume_head_encode(head, page);
    gd_status s = gd_write_full(env, fd, page, bytes, 0, name, err);
    env->release(env, page);
    return s;
}

static gd_status
checksum_marks(const gd_env *env, const gd_volume_head *head,
               const gd_volume_mark *marks, uint64_t *checksum, gd_error *err)
{
    size_t bytes = (size_t)head->marks * GD_VOLUME_MARK;
    uint8_t *raw = gd_alloc(env, bytes + 1, err);
    if (raw == NULL) {
        return GD_NOMEM;
    }
    gd_volume_marks_encode(marks, head->marks, raw);
    *checksum = gd_checksum(raw, bytes, head->seed);
    env->release(env, raw);
    return GD_OK;
}

gd_status
gd_journal_sync(const gd_journal *journal, gd_error *err)
{
    int rc = journal->env->fdatasync(journal->env, journal->fd);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot fdatasync %s",
                                  journal->name)
                  : GD_OK;
}

/* Keeps nobody out: the owner's lock does that.  But with it the file takes no
 * more records when the server has dropped the owner's locks, if the file
 * system reports that (gd_group_hold). */
static gd_status
hold(const gd_journal *journal, gd_error *err)
{
    int rc = journal->env->lock(journal->env, journal->fd, 0, F_RDLCK);
    return rc < 0 ? gd_fail_errno(err, -rc, "cannot lock %s", journal->name)
                  : GD_OK;
}

/* The new file takes its name (V2).  A link does not replace the journal of an
 * owner that came after this one (V1).  Only this owner has made a file of the
 * name that it had before. */
static gd_status
give_name(const char *volume, const gd_journal *journal, bool *named,
          gd_error *err)
{
    const gd_env *env = journal->env;
    char directory[GD_NAME_SIZE];
    bool same = false;
    gd_volume_directory(volume, directory);
    int rc = env->linkat(env, journal->root, journal->new_name, journal->name);
    if (rc < 0) {
        /* A link can succeed and report an error. */
        gd_status s = gd_find_same(env, journal->fd, journal->root,
                                   journal->name, &same, NULL);
        *named = same || s != GD_OK;
    }
    if (rc == -EEXIST && !*named) {
        return gd_fail(err, GD_BUSY, "volume %s was opened by another process: "
                       "this one was cut off, and lost its lock", volume);
    }
    if (rc < 0 && !(rc == -EEXIST && same)) {
        return gd_fail_errno(err, -rc, "cannot link %s", journal->new_name);
    }
    *named = true;
    (void)env->unlinkat(env, journal->root, journal->new_name);
    return gd_sync_dir(env, journal->root, directory, err);
}

/* Opens the file of a new journal: the spare, or a new one.  The spare holds its
 * lock since it was made, and does not take it again: if the server dropped it,
 * no other journal is to be written by this owner either. */
static gd_status
open_new(const char *volume, gd_journal *spare, gd_journal *journal,
         gd_error *err)
{
    const gd_env *env = journal->env;
    if (spare != NULL) {
        journal->fd = spare->fd;
        journal->ahead = spare->ahead;
        memcpy(journal->new_name, spare->new_name, sizeof spare->new_name);
        spare->fd = -1;
        gd_journal_close(spare);
        return GD_OK;
    }
    GD_TRY(gd_volume_draw_new_name(env, volume, journal->new_name, err));
    GD_TRY(gd_file_create(env, journal->root, journal->new_name, O_RDWR,
                          &journal->fd, err));
    return hold(journal, err);
}

static gd_status
fill_new(gd_volume_head *head, const gd_volume_mark *marks,
         const gd_journal *journal, gd_error *err)
{
    const gd_env *env = journal->env;
    GD_TRY(gd_random(env, &head->seed, sizeof head->seed, err));
    GD_TRY(checksum_marks(env, head, marks, &head->marks_checksum, err));
    return write_head(env, journal->fd, journal->new_name, head, marks, err);
}

void
gd_journal_forget(gd_journal *journal)
{
    journal->durable = journal->reached = journal->end = journal->start;
    journal->sequence = journal->records = 0;
}

static void
begin_fields(gd_journal *journal, const gd_volume_head *head)
{
    journal->seed = head->seed;
    journal->size = head->size;
    journal->start = gd_volume_head_records_start(head->marks);
    gd_journal_forget(journal);
}

static gd_journal *
allocate(const gd_env *env, int root, const char *volume, uint32_t number,
         gd_error *err)
{
    gd_journal *journal = gd_calloc(env, 1, sizeof *journal, err);
    if (journal != NULL) {
        journal->env = env;
        journal->root = root;
        journal->fd = -1;
        journal->number = number;
        journal->users = 1;
        gd_volume_journal_name(volume, number, journal->name);
    }
    return journal;
}

gd_status
gd_journal_begin(const gd_env *env, int root, const char *volume,
                 gd_volume_head *head, const gd_volume_mark *marks,
                 gd_journal *spare, gd_journal **out, gd_error *err)
{
    gd_journal *journal = NULL;
    gd_status s = head->journal > 0
                      ? GD_OK
                      : gd_fail(err, GD_INVALID, "volume %s has had all the "
                                "journals that it can have: clone a snapshot "
                                "of it", volume);
    if (s == GD_OK) {
        journal = allocate(env, root, volume, head->journal, err);
        s = journal == NULL ? GD_NOMEM : GD_OK;
    }
    if (s != GD_OK) {
        if (spare != NULL) {
            gd_journal_abandon(spare);
        }
        return s;
    }
    s = open_new(volume, spare, journal, err);
    if (s == GD_OK) {
        s = fill_new(head, marks, journal, err);
    }
    if (s != GD_OK) {
        gd_journal_abandon(journal);
        return s;
    }
    begin_fields(journal, head);
    journal->made = true;
    *out = journal;
    return GD_OK;
}

gd_status
gd_journal_publish(gd_journal *journal, const char *volume, bool *named,
                   gd_error *err)
{
    uint64_t end = journal->end;
    *named = false;
    gd_status s = gd_journal_sync(journal, err);
    if (s == GD_OK) {
        s = give_name(volume, journal, named, err);
    }
    if (s == GD_OK) {
        journal->durable = end;
    } else if (*named) {
        gd_journal_close(journal);
    } else {
        gd_journal_abandon(journal);
    }
    return s;
}

static void
remove_file(gd_journal *journal, const char *name)
{
    const gd_env *env = journal->env;
    if (journal->fd >= 0) {
        /* XFS frees the blocks of an unlinked file only later. */
        (void)env->ftruncate(env, journal->fd, 0);
    }
    (void)env->unlinkat(env, journal->root, name);
    gd_journal_close(journal);
}

void
gd_journal_abandon(gd_journal *journal)
{
    remove_file(journal, journal->new_name);
}

void
gd_journal_remove(gd_journal *journal)
{
    remove_file(journal, journal->name);
}

gd_status
gd_journal_create(const gd_env *env, int root, const char *volume,
                  gd_volume_head *head, const gd_volume_mark *marks,
                  gd_journal *spare, gd_journal **out, bool *named,
                  gd_error *err)
{
    gd_journal *journal;
    *named = false;
    GD_TRY(gd_journal_begin(env, root, volume, head, marks, spare, &journal,
                            err));
    GD_TRY(gd_journal_publish(journal, volume, named, err));
    *out = journal;
    return GD_OK;
}

/* ---- recycling ---- */

/* Has the file end at `length` at the latest. */
static bool
cut(gd_journal *journal, uint64_t length)
{
    if (journal->ahead <= length) {
        return true;
    }
    if (journal->env->ftruncate(journal->env, journal->fd, length) < 0) {
        return false;
    }
    journal->ahead = length;
    return true;
}

bool
gd_journal_retire(gd_journal *journal, const char *volume)
{
    const gd_env *env = journal->env;
    if (journal->ahead < journal->reached) {
        journal->ahead = journal->reached;
    }
    /* No name that a file has: a rename to another name of the same file would
     * do nothing and report success. */
    if (!cut(journal, GD_JOURNAL_MAX_SPARE) ||
        gd_volume_draw_new_name(env, volume, journal->new_name, NULL) !=
            GD_OK) {
        return false;
    }
    if (env->renameat(env, journal->root, journal->name,
                      journal->new_name) < 0) {
        /* A rename can succeed and report an error. */
        (void)env->unlinkat(env, journal->root, journal->new_name);
        return false;
    }
    return true;
}

void
gd_journal_trim(gd_journal *journal)
{
    /* Records of a failed append are cut off by the next one, which must know
     * that they are there. */
    if (journal->reached <= journal->end) {
        (void)cut(journal, journal->end);
    }
}

/* ---- opening one ---- */

static gd_status
read_marks(const gd_env *env, const gd_journal *journal,
           const gd_volume_head *head, gd_volume_mark **marks, gd_error *err)
{
    size_t bytes = (size_t)head->marks * GD_VOLUME_MARK;
    uint8_t *raw = gd_alloc(env, bytes + 1, err);
    *marks = gd_calloc(env, head->marks + (size_t)1, sizeof **marks, err);
    gd_status s = raw == NULL || *marks == NULL
                      ? GD_NOMEM
                      : gd_read_full(env, journal->fd, raw, bytes,
                                     GD_VOLUME_HEAD, journal->name, err);
    if (s == GD_OK) {
        s = gd_volume_marks_decode(raw, head, journal->name, *marks, err);
    }
    env->release(env, raw);
    if (s != GD_OK) {
        env->release(env, *marks);
        *marks = NULL;
    }
    return s;
}

static gd_status
read_head(const gd_env *env, gd_journal *journal,
          const uint8_t repository_id[GD_ID_SIZE], gd_volume_head *head,
          gd_volume_mark **marks, gd_error *err)
{
    uint8_t raw[GD_VOLUME_HEAD];
    struct stat st;
    GD_TRY(gd_read_full(env, journal->fd, raw, sizeof raw, 0,
                        journal->name, err));
    GD_TRY(gd_volume_head_decode(raw, journal->name, head, err));
    if (memcmp(head->repository_id, repository_id,
               GD_ID_SIZE) != 0) {
        return gd_fail(err, GD_CORRUPT, "%s is of another repository",
                       journal->name);
    }
    if (head->journal != journal->number) {
        return gd_fail(err, GD_CORRUPT, "%s says that it is journal %u",
                       journal->name, (unsigned)head->journal);
    }
    int rc = env->fstat(env, journal->fd, &st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", journal->name);
    }
    if ((uint64_t)st.st_size < gd_volume_head_records_start(head->marks)) {
        return gd_fail(err, GD_CORRUPT, "%s ends within its head",
                       journal->name);
    }
    return read_marks(env, journal, head, marks, err);
}

gd_status
gd_journal_open(const gd_env *env, int root, const char *volume,
                uint32_t number, const uint8_t repository_id[GD_ID_SIZE],
                gd_journal **out, gd_volume_head *head,
                gd_volume_mark **marks, gd_error *err)
{
    *marks = NULL;
    gd_journal *journal = allocate(env, root, volume, number, err);
    if (journal == NULL) {
        return GD_NOMEM;
    }
    gd_status s =
        gd_file_open_fresh(env, root, journal->name, &journal->fd, err);
    if (s == GD_OK) {
        s = read_head(env, journal, repository_id, head, marks, err);
    }
    if (s != GD_OK) {
        gd_journal_close(journal);
        return s;
    }
    begin_fields(journal, head);
    *out = journal;
    return GD_OK;
}

void
gd_journal_close(gd_journal *journal)
{
    const gd_env *env = journal->env;
    if (journal->fd >= 0) {
        env->close(env, journal->fd);
    }
    env->release(env, journal);
}

/* ---- appending ---- */

/* Removes what appends have left that were not accepted. */
static gd_status
cut_rest(gd_journal *journal, gd_error *err)
{
    const gd_env *env = journal->env;
    if (journal->reached > journal->end) {
        int rc = env->ftruncate(env, journal->fd, journal->end);
        if (rc < 0) {
            return gd_fail_errno(err, -rc, "cannot truncate %s",
                                 journal->name);
        }
        journal->reached = journal->ahead = journal->end;
    }
    return GD_OK;
}

gd_status
gd_journal_append(gd_journal *journal, gd_append *appends, size_t count,
                  gd_error *err)
{
    uint8_t heads[GD_JOURNAL_BATCH][GD_RECORD_HEAD];
    struct iovec iov[3 * GD_JOURNAL_BATCH];
    uint64_t at = journal->end;
    int pieces = 0;
    GD_TRY(cut_rest(journal, err));
    for (size_t i = 0; i < count; i++) {
        gd_append *append = &appends[i];
        gd_record *record = &append->record;
        record->sequence = journal->sequence + i + 1;
        record->durable = journal->durable;
        gd_record_encode(record, journal->seed, heads[i]);
        append->at = at;
        at += gd_record_size(record);
        iov[pieces++] = (struct iovec){heads[i], GD_RECORD_HEAD};
        if (record->kind == GD_RECORD_BYTES) {
            iov[pieces++] = (struct iovec){(void *)append->data,
                                           (size_t)record->length};
            size_t rest = (size_t)(gd_record_size(record) - GD_RECORD_HEAD -
                                   record->length);
            if (rest > 0) {
                iov[pieces++] = (struct iovec){(void *)zeros, rest};
            }
        }
    }
    journal->reached = at;
    return gd_writev_full(journal->env, journal->fd, iov, pieces,
                          journal->end, journal->name, err);
}

void
gd_journal_accept(gd_journal *journal, const gd_append *append)
{
    journal->end = append->at + gd_record_size(&append->record);
    journal->sequence = append->record.sequence;
    journal->records += append->record.kind == GD_RECORD_BYTES ||
                        append->record.kind == GD_RECORD_ZEROS;
}

uint64_t
gd_journal_wants_ahead(const gd_journal *journal)
{
    uint64_t bytes = journal->end;
    if (journal->end < journal->ahead || journal->reached > journal->end) {
        return 0;
    }
    bytes = bytes < MIN_AHEAD ? MIN_AHEAD : bytes;
    bytes = bytes > MAX_AHEAD ? MAX_AHEAD : bytes / ZEROS * ZEROS;
    return journal->end - journal->durable <= bytes ? bytes : 0;
}

void
gd_journal_write_ahead(gd_journal *journal)
{
    struct iovec iov[MAX_AHEAD / ZEROS];
    uint64_t bytes = gd_journal_wants_ahead(journal);
    int pieces = (int)(bytes / ZEROS);
    for (int i = 0; i < pieces; i++) {
        iov[i] = (struct iovec){(void *)zeros, ZEROS};
    }
    if (pieces > 0 && gd_writev_full(journal->env, journal->fd, iov, pieces,
                                     journal->end, journal->name,
                                     NULL) == GD_OK) {
        journal->ahead = journal->end + bytes;
    }
}

/* ---- reading ---- */

gd_piece
gd_journal_piece(gd_journal *journal, const gd_record *record, uint64_t at)
{
    bool data = record->kind == GD_RECORD_BYTES;
    return (gd_piece){.offset = record->offset,
                      .length = record->length,
                      .journal = data ? journal : NULL,
                      .record = at,
                      .record_length = data ? (uint32_t)record->length : 0};
}

gd_status
gd_journal_read(const gd_piece *piece, uint64_t offset, size_t length,
                uint8_t *out, uint8_t *room, gd_error *err)
{
    const gd_journal *journal = piece->journal;
    gd_record record;
    GD_TRY(gd_read_full(journal->env, journal->fd, room,
                        GD_RECORD_HEAD + (size_t)piece->record_length,
                        piece->record, journal->name, err));
    if (!gd_record_decode(room, journal->seed, journal->size, &record) ||
        record.kind != GD_RECORD_BYTES ||
        record.length != piece->record_length ||
        gd_checksum(room + GD_RECORD_HEAD, piece->record_length, 0) !=
            record.checksum) {
        return gd_fail(err, GD_CORRUPT, "%s: the record at offset %llu has "
                       "changed since it was written", journal->name,
                       (unsigned long long)piece->record);
    }
    memcpy(out, room + GD_RECORD_HEAD + piece->from +
                    (size_t)(offset - piece->offset), length);
    return GD_OK;
}

/* A scan: a window of the file in memory. */
typedef struct scanner {
    gd_journal *journal;
    uint8_t *window;
    uint64_t start; /* of the window, in the file */
    size_t length;  /* bytes in it */
    uint64_t limit; /* the file's length */
} scanner;

/* Has the window begin at `at`, with `bytes` bytes or up to the file's end. */
static gd_status
load(scanner *scan, uint64_t at, size_t bytes, gd_error *err)
{
    const gd_journal *journal = scan->journal;
    if (at >= scan->start && at + bytes <= scan->start + scan->length) {
        return GD_OK;
    }
    uint64_t rest = at < scan->limit ? scan->limit - at : 0;
    scan->start = at;
    scan->length = rest < SCAN_ROOM ? (size_t)rest : SCAN_ROOM;
    return gd_read_full(journal->env, journal->fd, scan->window, scan->length,
                        at, journal->name, err);
}

/* *valid: whether a record of the journal lies at `at`, with its data. */
static gd_status
look(scanner *scan, uint64_t at, gd_record *record, bool *valid,
     gd_error *err)
{
    const gd_journal *journal = scan->journal;
    *valid = false;
    gd_status s = load(scan, at, GD_RECORD_HEAD, err);
    if (s != GD_OK || scan->start + scan->length < at + GD_RECORD_HEAD ||
        !gd_record_decode(scan->window + (at - scan->start), journal->seed,
                          journal->size, record)) {
        return s;
    }
    size_t size = (size_t)gd_record_size(record);
    s = load(scan, at, size, err);
    if (s != GD_OK || scan->start + scan->length < at + size) {
        return s;
    }
    const uint8_t *raw = scan->window + (at - scan->start);
    *valid = record->durable <= at &&
             (record->kind != GD_RECORD_BYTES ||
              gd_checksum(raw + GD_RECORD_HEAD, (size_t)record->length, 0) ==
                  record->checksum);
    return GD_OK;
}

gd_status
gd_journal_lost(const gd_journal *journal, gd_error *err)
{
    return gd_fail(err, GD_CORRUPT,
                   "%s: the record at offset %llu is damaged; what was "
                   "written from there on is lost, though it was acknowledged",
                   journal->name, (unsigned long long)journal->end);
}

/* Returns GD_CORRUPT if a record behind the end proves that the bytes there were
 * durable (V5). */
static gd_status
look_behind(scanner *scan, gd_error *err)
{
    gd_record record;
    uint64_t end = scan->journal->end;
    for (uint64_t at = end + GD_RECORD_ALIGN;
         at + GD_RECORD_HEAD <= scan->limit; at += GD_RECORD_ALIGN) {
        GD_TRY(load(scan, at, GD_RECORD_HEAD, err));
        if (gd_record_decode(scan->window + (at - scan->start),
                             scan->journal->seed, scan->journal->size,
                             &record) &&
            record.durable > end && record.durable <= at) {
            return gd_journal_lost(scan->journal, err);
        }
    }
    return GD_OK;
}

/* A program proves durable only places where a record begins.  If this one is
 * another, nothing counts as proven. */
static gd_status
require_record_at_proven(scanner *scan, gd_error *err)
{
    gd_journal *journal = scan->journal;
    gd_record record;
    bool valid;
    if (journal->durable > journal->start && journal->durable < journal->end) {
        GD_TRY(look(scan, journal->durable, &record, &valid, err));
        journal->durable = valid ? journal->durable : journal->start;
    }
    return GD_OK;
}

static gd_status
scan_records(scanner *scan, uint64_t before, uint64_t durable,
             gd_journal_visitor *visit, void *arg, gd_error *err)
{
    gd_journal *journal = scan->journal;
    gd_record record;
    bool valid = true;
    gd_status s = GD_OK;
    while (s == GD_OK && (before == 0 || journal->end < before)) {
        uint64_t at = journal->end;
        s = look(scan, at, &record, &valid, err);
        if (s != GD_OK || !valid || record.sequence != journal->sequence + 1) {
            break;
        }
        s = visit(arg, &record, at, err);
        if (s == GD_OK) {
            gd_journal_accept(journal, &(gd_append){record, NULL, at});
            journal->durable = record.durable > journal->durable
                                   ? record.durable
                                   : journal->durable;
        }
    }
    if (s == GD_OK) {
        s = require_record_at_proven(scan, err);
    }
    if (s != GD_OK || journal->end == before) {
        return s;
    }
    /* `before` is a place where a record ends. */
    return journal->end < durable || (before != 0 && journal->end > before)
               ? gd_journal_lost(journal, err)
               : look_behind(scan, err);
}

gd_status
gd_journal_scan(gd_journal *journal, uint64_t before, uint64_t durable,
                gd_journal_visitor *visit, void *arg, gd_error *err)
{
    const gd_env *env = journal->env;
    struct stat st;
    int rc = env->fstat(env, journal->fd, &st);
    if (rc < 0) {
        return gd_fail_errno(err, -rc, "cannot stat %s", journal->name);
    }
    scanner scan = {.journal = journal,
                    .window = gd_alloc(env, SCAN_ROOM, err),
                    .limit = (uint64_t)st.st_size};
    gd_status s = scan.window == NULL
                      ? GD_NOMEM
                      : scan_records(&scan, before, durable, visit, arg, err);
    env->release(env, scan.window);
    return s;
}
