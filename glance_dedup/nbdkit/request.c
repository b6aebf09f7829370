/* SPDX-License-Identifier: Apache-2.0 */
/*
 * request.c - see request.h.
 */
#include "nbdkit/request.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Adds a line.  Control characters in it become question marks, so that no
 * value ends its line.  The longest answer fits: an error's text is
 * GD_ERROR_TEXT bytes at most, the other values are bounded by the format. */
static void __attribute__((format(printf, 2, 3)))
add_line(gd_nbdkit_answer *answer, const char *format, ...)
{
    size_t room = sizeof answer->text - answer->length;
    char *line = answer->text + answer->length;
    va_list args;
    va_start(args, format);
    int written = vsnprintf(line, room, format, args);
    va_end(args);
    size_t length = written < 0 ? 0 : (size_t)written;
    if (length > room - 2) {
        length = room - 2;
    }
    for (size_t i = 0; i < length; i++) {
        if ((unsigned char)line[i] < ' ' || line[i] == 0x7f) {
            line[i] = '?';
        }
    }
    line[length] = '\n';
    answer->length += length + 1;
}

static void
add_number(gd_nbdkit_answer *answer, const char *key, uint64_t value)
{
    add_line(answer, "%s %" PRIu64, key, value);
}

static void
add_id(gd_nbdkit_answer *answer, const char *key,
       const uint8_t id[GD_ID_SIZE])
{
    char digits[2 * GD_ID_SIZE + 1];
    for (unsigned i = 0; i < GD_ID_SIZE; i++) {
        snprintf(digits + 2 * i, 3, "%02x", id[i]);
    }
    add_line(answer, "%s %s", key, digits);
}

static void
add_error(gd_nbdkit_answer *answer, const gd_error *err)
{
    add_line(answer, "error %s %s", gd_status_name(err->status), err->text);
}

/* The index that finds duplicates.  The checkpoint thread may not have opened
 * it yet. */
static void
add_index(gd_nbdkit_answer *answer, const gd_nbdkit_served *served)
{
    const gd_nbdkit_settings *settings = served->settings;
    gd_hintindex *index = served->repo->index;
    gd_filter_stats stats = {0};
    if (index != NULL) {
        index->get_stats(index, &stats);
    }
    add_line(answer, "index %s",
             settings->index_path == NULL         ? "none"
             : settings->index == GD_KV_BACKENDS ? "filter"
                                 : gd_kv_backend_name(settings->index));
    add_number(answer, "index_complete", stats.complete);
    add_number(answer, "index_bytes", stats.bytes);
    add_number(answer, "index_dropped", stats.dropped);
}

/* The sum in nanoseconds, and the counts of the buckets. */
static void
add_latency(gd_nbdkit_answer *answer, const char *key,
            gd_nbdkit_latency *latency)
{
    char text[(1 + GD_NBDKIT_LATENCY_BUCKETS) * 21 + 1];
    int length = snprintf(text, sizeof text, "%" PRIuFAST64,
                          atomic_load(&latency->sum_ns));
    for (unsigned i = 0; i < GD_NBDKIT_LATENCY_BUCKETS; i++) {
        length += snprintf(text + length, sizeof text - (size_t)length,
                           " %" PRIuFAST64, atomic_load(&latency->counts[i]));
    }
    add_line(answer, "%s %s", key, text);
}

static gd_status
run_status(const gd_nbdkit_served *served, char *words,
           gd_nbdkit_answer *answer, gd_error *err)
{
    if (words != NULL) {
        return gd_fail(err, GD_INVALID, "status takes no words");
    }
    gd_volume_info info;
    gd_volume_get_info(served->volume, &info);
    const gd_volume_head *head = &info.head;
    const gd_volume_counters *counters = &head->counters;
    add_line(answer, "ok");
    add_number(answer, "pid", (uint64_t)getpid());
    add_id(answer, "volume_id", head->volume_id);
    add_number(answer, "size", head->size);
    add_number(answer, "created", head->created);
    add_line(answer, "project %s", head->project);
    add_id(answer, "scope", head->scope.id);
    add_line(answer, "source %s", head->source);
    add_number(answer, "journal_bytes", info.journal_bytes);
    add_number(answer, "journal_records", info.journal_records);
    add_number(answer, "read", counters->read);
    add_number(answer, "written", counters->written);
    add_number(answer, "zeroed", counters->zeroed);
    add_number(answer, "flushes", counters->flushes);
    add_number(answer, "checkpoints", counters->checkpoints);
    add_number(answer, "unique", counters->unique);
    add_number(answer, "duplicate", counters->duplicate);
    add_number(answer, "zero", counters->zero);
    add_number(answer, "overwritten", counters->overwritten);
    add_number(answer, "skipped", counters->skipped);
    add_number(answer, "prefetches", counters->prefetches);
    add_number(answer, "prefetched", counters->prefetched);
    add_latency(answer, "read_latency", &served->latencies->reads);
    add_latency(answer, "write_latency", &served->latencies->writes);
    add_latency(answer, "flush_latency", &served->latencies->flushes);
    add_index(answer, served);
    add_line(answer, "broken %s", info.broken);
    return GD_OK;
}

static gd_status
run_snapshot(const gd_nbdkit_served *served, char *words,
             gd_nbdkit_answer *answer, gd_error *err)
{
    gd_recipe_header header;
    char *image_id = words;
    char *project = words == NULL ? NULL : strchr(words, ' ');
    if (project != NULL) {
        *project++ = '\0';
    }
    if (image_id == NULL || image_id[0] == '\0') {
        return gd_fail(err, GD_INVALID, "snapshot: the image's id is missing");
    }
    GD_TRY(gd_volume_snapshot(served->volume, image_id,
                              project == NULL ? "" : project, &header,
                              err));
    add_line(answer, "ok");
    add_line(answer, "image_id %s", header.image_id);
    add_id(answer, "upload_id", header.upload_id);
    add_number(answer, "size", header.size);
    add_number(answer, "zero_bytes", header.zero_bytes);
    add_number(answer, "new_bytes", header.new_bytes);
    add_number(answer, "stored_bytes", header.stored_bytes);
    add_number(answer, "extents", header.extents);
    add_number(answer, "fragments", header.fragments);
    add_number(answer, "created", header.created);
    return GD_OK;
}

static gd_status
run_resize(const gd_nbdkit_served *served, char *words,
           gd_nbdkit_answer *answer, gd_error *err)
{
    size_t digits = words == NULL ? 0 : strspn(words, "0123456789");
    errno = 0;
    uint64_t size = digits == 0 ? 0 : strtoull(words, NULL, 10);
    if (digits == 0 || words[digits] != '\0' || errno != 0) {
        return gd_fail(err, GD_INVALID,
                       "resize: the size is not a number of bytes");
    }
    GD_TRY(gd_nbdkit_clients_resize(served->clients,
                                    served->volume, size, err));
    add_line(answer, "ok");
    add_number(answer, "size", size);
    return GD_OK;
}

static gd_status
run_checkpoint(const gd_nbdkit_served *served, char *words,
               gd_nbdkit_answer *answer, gd_error *err)
{
    if (words != NULL) {
        return gd_fail(err, GD_INVALID, "checkpoint takes no words");
    }
    GD_TRY(gd_volume_checkpoint(served->volume, err));
    add_line(answer, "ok");
    return GD_OK;
}

static gd_status
run_disconnect(const gd_nbdkit_served *served, char *words,
               gd_nbdkit_answer *answer, gd_error *err)
{
    uint64_t count;
    if (words != NULL) {
        return gd_fail(err, GD_INVALID, "disconnect takes no words");
    }
    GD_TRY(served->disconnect(&count, err));
    add_line(answer, "ok");
    add_number(answer, "clients", count);
    return GD_OK;
}

static const struct {
    const char *name;
    /* Adds lines only if it succeeds.  words: the text behind the name, or
     * NULL. */
    gd_status (*run)(const gd_nbdkit_served *served, char *words,
                     gd_nbdkit_answer *answer, gd_error *err);
} requests[] = {
    {"status", run_status},
    {"snapshot", run_snapshot},
    {"resize", run_resize},
    {"checkpoint", run_checkpoint},
    {"disconnect", run_disconnect},
};

static void
run_words(const gd_nbdkit_served *served, char *name,
          gd_nbdkit_answer *answer)
{
    gd_error err;
    char *words = strchr(name, ' ');
    if (words != NULL) {
        *words++ = '\0';
    }
    for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
        if (strcmp(name, requests[i].name) == 0) {
            if (requests[i].run(served, words, answer, &err) != GD_OK) {
                add_error(answer, &err);
            }
            add_line(answer, "%s", "");
            return;
        }
    }
    gd_nbdkit_request_refuse("there is no such request", answer);
}

void
gd_nbdkit_request_run(const gd_nbdkit_served *served, const char *line,
                      size_t length, gd_nbdkit_answer *answer)
{
    char text[GD_NBDKIT_LINE];
    answer->length = 0;
    if (length >= sizeof text) {
        gd_nbdkit_request_refuse("the request is too long", answer);
        return;
    }
    for (size_t i = 0; i < length; i++) {
        if ((unsigned char)line[i] < ' ' || line[i] == 0x7f) {
            gd_nbdkit_request_refuse("the request holds a control character",
                                     answer);
            return;
        }
    }
    memcpy(text, line, length);
    text[length] = '\0';
    run_words(served, text, answer);
}

void
gd_nbdkit_request_refuse(const char *why, gd_nbdkit_answer *answer)
{
    gd_error err;
    answer->length = 0;
    gd_fail(&err, GD_INVALID, "%s", why);
    add_error(answer, &err);
    add_line(answer, "%s", "");
}
