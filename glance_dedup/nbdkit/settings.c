/* SPDX-License-Identifier: Apache-2.0 */
/*
 * settings.c - see settings.h.
 */
#include "nbdkit/settings.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/coding.h"

#define PARAMETERS_FILE "repository.json"

enum { MAX_PARAMETERS = 65536 }; /* bytes that are looked at */

/* A key whose value is a whole number. */
typedef struct number_key {
    const char *key;
    size_t at; /* in gd_nbdkit_settings */
    size_t size; /* 4 or 8 bytes */
    uint64_t low, high;
} number_key;

#define NUMBER(key, field, low, high) \
    {key, offsetof(gd_nbdkit_settings, field), \
     sizeof((gd_nbdkit_settings *)0)->field, low, high}

static const number_key numbers[] = {
    NUMBER("block-size", params.block_size, 512, 65536),
    NUMBER("cut-minimum", params.cut_minimum, 0, 65536),
    NUMBER("cut-average", params.cut_average, 0, 65536),
    NUMBER("group-slots", params.group_slots, GD_SLOTS_MIN, 32768),
    NUMBER("segment-size", params.segment_size, 512, 1 << 20),
    NUMBER("codec-level", params.codec_level, 0, 19),
    NUMBER("threads", params.threads, 0, 64),
    NUMBER("lock-timeout-ms", params.lock_timeout_ms, 0, 3600000),
    NUMBER("reserve", params.reserve, 0, UINT64_C(1) << 50),
    NUMBER("segment-cache", segment_cache, 0, UINT64_C(1) << 50),
    NUMBER("index-bytes", index_bytes, 0, UINT64_C(1) << 50),
    NUMBER("index-keys", index_keys, 1, GD_KV_MAX_CAPACITY),
};

void
gd_nbdkit_settings_init(gd_nbdkit_settings *settings)
{
    memset(settings, 0, sizeof *settings);
    settings->index = GD_KV_BACKENDS;
    settings->index_bytes = UINT64_C(64) << 20;
    settings->index_keys = UINT64_C(1) << 20;
    settings->segment_cache = UINT64_C(64) << 20;
    settings->params.codec = GD_CODEC_LZ4;
    settings->params.threads = 2;
    settings->params.lock_timeout_ms = 30000;
    settings->params.reserve = UINT64_C(64) << 20;
}

void
gd_nbdkit_settings_release(gd_nbdkit_settings *settings)
{
    free(settings->repository);
    free(settings->volume);
    free(settings->dedupd_socket);
    free(settings->slice_memory);
    free(settings->index_path);
    memset(settings, 0, sizeof *settings);
}

static gd_status
set_number(gd_nbdkit_settings *settings, const number_key *found,
           const char *value, gd_error *err)
{
    char *end;
    errno = 0;
    unsigned long long number = strtoull(value, &end, 10);
    if (!isdigit((unsigned char)value[0]) || *end != '\0' || errno != 0 ||
        number < found->low || number > found->high) {
        return gd_fail(err, GD_INVALID,
                       "%s: '%.40s' is not a number from %llu to %llu",
                       found->key, value, (unsigned long long)found->low,
                       (unsigned long long)found->high);
    }
    char *at = (char *)settings + found->at;
    if (found->size == sizeof(uint32_t)) {
        uint32_t small = (uint32_t)number;
        memcpy(at, &small, sizeof small);
    } else {
        uint64_t large = number;
        memcpy(at, &large, sizeof large);
    }
    return GD_OK;
}

static gd_status
set_text(char **text, const char *value, gd_error *err)
{
    char *copy = strdup(value);
    if (copy == NULL) {
        return gd_fail(err, GD_NOMEM, "no memory for the settings");
    }
    free(*text);
    *text = copy;
    return GD_OK;
}

/* A value that is one of two words; *second: whether it is the second. */
static gd_status
set_choice(bool *second, const char *key, const char *value,
           const char *words[2], gd_error *err)
{
    *second = strcmp(value, words[1]) == 0;
    if (!*second && strcmp(value, words[0]) != 0) {
        return gd_fail(err, GD_INVALID, "%s: '%.40s' is neither %s nor %s",
                       key, value, words[0], words[1]);
    }
    return GD_OK;
}

/* Bytes in hexadecimal digits. */
static gd_status
set_bytes(uint8_t *bytes, unsigned count, const char *key, const char *value,
          gd_error *err)
{
    size_t length = strlen(value);
    if (length != 2 * count || strspn(value, "0123456789abcdef") != length) {
        return gd_fail(err, GD_INVALID, "%s has not %u hexadecimal digits",
                       key, 2 * count);
    }
    for (unsigned i = 0; i < count; i++) {
        char digits[3] = {value[2 * i], value[2 * i + 1], '\0'};
        bytes[i] = (uint8_t)strtoul(digits, NULL, 16);
    }
    return GD_OK;
}

static gd_status
set_checksum(gd_nbdkit_settings *settings, const char *key, const char *value,
             gd_error *err)
{
    uint8_t bytes[sizeof settings->checksum];
    GD_TRY(set_bytes(bytes, sizeof bytes, key, value, err));
    for (unsigned i = 0; i < sizeof bytes; i++) {
        settings->checksum = settings->checksum << 8 | bytes[i];
    }
    settings->has_checksum = true;
    return GD_OK;
}

static gd_status
set_index(gd_nbdkit_settings *settings, const char *value, gd_error *err)
{
    if (!gd_kv_backend_parse(value, &settings->index) &&
        strcmp(value, "filter") != 0) {
        return gd_fail(err, GD_INVALID, "there is no index '%.40s'", value);
    }
    return GD_OK;
}

static gd_status
set_digest(gd_params *params, const char *value, gd_error *err)
{
    if (strlen(value) >= sizeof params->digest) {
        return gd_fail(err, GD_INVALID, "there is no digest '%.40s'", value);
    }
    strcpy(params->digest, value);
    return GD_OK;
}

static gd_status
set_direct_io(gd_params *params, const char *key, const char *value,
              gd_error *err)
{
    static const char *yes[2] = {"no", "yes"};
    bool on;
    gd_status s = set_choice(&on, key, value, yes, err);
    params->direct_io = on ? GD_DIRECT_ON : GD_DIRECT_OFF;
    return s;
}

gd_status
gd_nbdkit_settings_set(gd_nbdkit_settings *settings, const char *key,
                       const char *value, gd_error *err)
{
    static const char *verify[2] = {"fingerprint", "bytes"};
    static const char *yes[2] = {"no", "yes"};
    static const char *no[2] = {"yes", "no"};
    gd_params *params = &settings->params;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        if (strcmp(key, numbers[i].key) == 0) {
            return set_number(settings, &numbers[i], value, err);
        }
    }
    if (strcmp(key, "repository") == 0) {
        return set_text(&settings->repository, value, err);
    } else if (strcmp(key, "volume") == 0) {
        return set_text(&settings->volume, value, err);
    } else if (strcmp(key, "dedupd-socket") == 0) {
        return set_text(&settings->dedupd_socket, value, err);
    } else if (strcmp(key, "slice-memory") == 0) {
        return set_text(&settings->slice_memory, value, err);
    } else if (strcmp(key, "index") == 0) {
        return set_index(settings, value, err);
    } else if (strcmp(key, "index-path") == 0) {
        return set_text(&settings->index_path, value, err);
    } else if (strcmp(key, "repository-id") == 0) {
        settings->has_id = true;
        return set_bytes(params->repository_id, GD_ID_SIZE, key, value, err);
    } else if (strcmp(key, "parameters") == 0) {
        return set_checksum(settings, key, value, err);
    } else if (strcmp(key, "fingerprint") == 0) {
        return set_digest(params, value, err);
    } else if (strcmp(key, "codec") == 0) {
        return gd_codec_parse(value, &params->codec, err);
    } else if (strcmp(key, "verify") == 0) {
        return set_choice(&params->by_value, key, value, verify, err);
    } else if (strcmp(key, "codec-yields") == 0) {
        return set_choice(&params->adaptive_compression, key, value, yes, err);
    } else if (strcmp(key, "dedup") == 0) {
        return set_choice(&settings->no_dedup, key, value, no, err);
    } else if (strcmp(key, "direct-io") == 0) {
        return set_direct_io(params, key, value, err);
    }
    return gd_fail(err, GD_INVALID, "there is no key '%.40s'", key);
}

gd_status
gd_nbdkit_settings_check(const gd_nbdkit_settings *settings, gd_error *err)
{
    const gd_params *params = &settings->params;
    const char *missing =
        settings->repository == NULL ? "repository"
        : settings->volume == NULL   ? "volume"
        : !settings->has_id          ? "repository-id"
        : !settings->has_checksum    ? "parameters"
        : params->block_size == 0    ? "block-size"
        : params->group_slots == 0   ? "group-slots"
        : params->segment_size == 0  ? "segment-size"
        : params->digest[0] == '\0'  ? "fingerprint"
                                     : NULL;
    if (missing != NULL) {
        return gd_fail(err, GD_INVALID,
                       "the key %s is missing: start this plugin with "
                       "'glance-dedup volume serve'",
                       missing);
    }
    /* The server sends it to clients as the preferred size. */
    if ((params->block_size & (params->block_size - 1)) != 0) {
        return gd_fail(err, GD_INVALID,
                       "block-size: %u is not a power of two",
                       params->block_size);
    }
    return GD_OK;
}

gd_status
gd_nbdkit_settings_compare(const gd_nbdkit_settings *settings,
                           const gd_repo *repo, gd_error *err)
{
    const gd_env *env = repo->env;
    uint8_t *content = malloc(MAX_PARAMETERS);
    if (content == NULL) {
        return gd_fail(err, GD_NOMEM, "no memory for " PARAMETERS_FILE);
    }
    int fd = env->openat(env, repo->root, PARAMETERS_FILE,
                         O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0);
    ssize_t length =
        fd < 0 ? fd : env->pread(env, fd, content, MAX_PARAMETERS, 0);
    gd_status s = GD_OK;
    if (length < 0) {
        s = gd_fail_errno(err, (int)-length, "cannot read " PARAMETERS_FILE);
    } else if (gd_checksum(content, (size_t)length, 0) != settings->checksum) {
        s = gd_fail(err, GD_BUSY,
                    PARAMETERS_FILE " has changed just now: start the "
                                    "server again");
    }
    if (fd >= 0) {
        env->close(env, fd);
    }
    free(content);
    return s;
}
