/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scratch_repository.c - see scratch_repository.h.
 */
#include "tests/c/support/scratch_repository.h"

#include <dirent.h>

#include "engine/read/image.h"
#include "tests/c/support/check.h"

static void
give_up(const char *what)
{
    perror(what);
    exit(2);
}

static int
open_scratch_file(const scratch *x, const char *name, int flags)
{
    int fd = openat(x->root, name, flags | O_CLOEXEC, 0600);
    if (fd < 0) {
        give_up(name);
    }
    return fd;
}

void
sweep_faults(failing_call fail_one, uint64_t stride)
{
    static const fault_call calls[] = {FAULT_ANY, FAULT_ALLOC};
    for (int kind = 0; kind < 2; kind++) {
        for (uint64_t n = 1; fail_one(calls[kind], n);) {
            n += stride;
        }
    }
}

void
scratch_init(scratch *x)
{
    static const char *const directories[] = {"groups", "images", "spool",
                                              "locks", "quarantine",
                                              "volumes", "features"};
    static const char *const files[] = {GD_FILE_GROUP_LOCKS,
                                        GD_FILE_IMAGE_LOCKS};
    memset(x, 0, sizeof *x);
    fault_env_init(&x->f);
    x->env = &x->f.env;
    x->dir = check_mkdir_shm();
    x->root = open(x->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (x->root < 0) {
        give_up(x->dir);
    }
    for (size_t i = 0; i < sizeof directories / sizeof directories[0]; i++) {
        if (mkdirat(x->root, directories[i], 0700) != 0) {
            give_up(directories[i]);
        }
    }
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        close(open_scratch_file(x, files[i], O_RDWR | O_CREAT));
    }
    x->params = (gd_params){
        .block_size = 4096,
        .group_slots = 64,
        .segment_size = 65536,
        .digest = "sha256",
        .codec = GD_CODEC_LZ4,
        .lock_timeout_ms = 50,
    };
    for (int i = 0; i < GD_ID_SIZE; i++) {
        x->params.repository_id[i] = (uint8_t)(i + 1);
    }
}

uint64_t
scratch_destroy(scratch *x)
{
    uint64_t leaks = fault_env_leaks(&x->f);
    close(x->root);
    fault_env_destroy(&x->f);
    check_rmdir(x->dir);
    return leaks;
}

gd_status
scratch_try_repo(scratch *x, bool filter, gd_repo **repo)
{
    char path[256];
    gd_error ignored; /* it works without a filter */
    snprintf(path, sizeof path, "%s/filter", x->dir);
    gd_status s =
        gd_repo_open(x->env, x->dir, &x->params, true, repo, &x->err);
    if (s == GD_OK && filter) {
        (void)gd_repo_attach_filter(*repo, path, GD_FILTER_MIN_BYTES,
                                    &ignored);
    }
    return s;
}

static gd_repo *
require_repo(scratch *x, bool filter)
{
    gd_repo *repo;
    if (scratch_try_repo(x, filter, &repo) != GD_OK) {
        fprintf(stderr, "%s\n", x->err.text);
        exit(2);
    }
    return repo;
}

gd_repo *
scratch_repo(scratch *x)
{
    return require_repo(x, false);
}

gd_repo *
scratch_repo_filter(scratch *x)
{
    return require_repo(x, true);
}

/* ---- files ---- */

int64_t
scratch_size(const scratch *x, const char *name)
{
    struct stat st;
    return fstatat(x->root, name, &st, AT_SYMLINK_NOFOLLOW) == 0 ? st.st_size
                                                                 : -1;
}

bool
scratch_exists(const scratch *x, const char *name)
{
    return scratch_size(x, name) >= 0;
}

void
scratch_write(const scratch *x, const char *name, const void *data,
              size_t length, uint64_t offset)
{
    int fd = open_scratch_file(x, name, O_RDWR | O_CREAT);
    if (pwrite(fd, data, length, (off_t)offset) != (ssize_t)length) {
        give_up(name);
    }
    close(fd);
}

void
scratch_read(const scratch *x, const char *name, void *data, size_t length,
             uint64_t offset)
{
    int fd = open_scratch_file(x, name, O_RDONLY);
    if (pread(fd, data, length, (off_t)offset) != (ssize_t)length) {
        give_up(name);
    }
    close(fd);
}

void
scratch_truncate(const scratch *x, const char *name, uint64_t length)
{
    int fd = open_scratch_file(x, name, O_RDWR);
    if (ftruncate(fd, (off_t)length) != 0) {
        give_up(name);
    }
    close(fd);
}

void
scratch_drop_locks(void)
{
    enum { MAX_COUNT = 256 };
    for (int fd = 0; fd < MAX_COUNT; fd++) {
        struct flock all = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
        (void)fcntl(fd, F_OFD_SETLK, &all);
    }
}

void
scratch_flip(const scratch *x, const char *name, uint64_t offset, uint8_t with)
{
    uint8_t byte;
    scratch_read(x, name, &byte, 1, offset);
    byte ^= with;
    scratch_write(x, name, &byte, 1, offset);
}

unsigned
scratch_count(const scratch *x, const char *directory, const char *prefix,
              char first[GD_NAME_SIZE])
{
    unsigned count = 0;
    const struct dirent *entry;
    DIR *stream =
        fdopendir(open_scratch_file(x, directory, O_RDONLY | O_DIRECTORY));
    if (stream == NULL) {
        give_up(directory);
    }
    while ((entry = readdir(stream)) != NULL) {
        if (entry->d_name[0] == '.' ||
            strncmp(entry->d_name, prefix, strlen(prefix)) != 0) {
            continue;
        }
        if (first != NULL && count == 0) {
            snprintf(first, GD_NAME_SIZE, "%s/%.128s", directory,
                     entry->d_name);
        }
        count++;
    }
    closedir(stream);
    return count;
}

void
scratch_check_trace(scratch *x, const char *wanted)
{
    char trace[512];
    fault_env_trace(&x->f, trace, sizeof trace);
    if (!CHECK(strcmp(trace, wanted) == 0)) {
        fprintf(stderr, "it was: %s\n", trace);
    }
}

/* ---- bytes ---- */

bool
golden_matches(const uint8_t *bytes, size_t length, const golden *pieces,
               size_t count)
{
    size_t at = 0;
    for (size_t i = 0; i <= count; i++) {
        size_t start = i == count ? length : pieces[i].offset;
        for (; at < start; at++) {
            if (bytes[at] != 0) {
                fprintf(stderr, "byte %zu is %02x, not 00\n", at, bytes[at]);
                return false;
            }
        }
        for (size_t k = 0; i < count && pieces[i].hex[k] != '\0'; k += 2) {
            unsigned byte;
            if (sscanf(pieces[i].hex + k, "%2x", &byte) != 1 ||
                at >= length || bytes[at] != byte) {
                fprintf(stderr, "byte %zu is %02x, not %.2s\n", at, bytes[at],
                        pieces[i].hex + k);
                return false;
            }
            at++;
        }
    }
    return true;
}

/* splitmix64 */
uint64_t
next_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void
fill_random(uint8_t *out, size_t length, uint64_t seed)
{
    for (size_t i = 0; i < length; i += 8) {
        uint64_t word = next_random(&seed);
        memcpy(out + i, &word, length - i < 8 ? length - i : 8);
    }
}

/* Fills in compressible bytes, different for each seed. */
static void
fill_text(uint8_t *out, size_t length, uint64_t seed)
{
    for (size_t i = 0; i < length; i += 32) {
        char line[33];
        snprintf(line, sizeof line, "the same line yet again %08x",
                 (unsigned)(seed & 0xffffffff));
        memcpy(out + i, line, length - i < 32 ? length - i : 32);
    }
}

void
fill_image(uint8_t *out, size_t length, size_t block, unsigned kinds,
           uint64_t seed)
{
    for (size_t at = 0; at < length; at += block) {
        size_t here = length - at < block ? length - at : block;
        uint64_t choice = next_random(&seed) % 8;
        uint64_t kind = next_random(&seed) % kinds;
        if (choice == 0) {
            memset(out + at, 0, here);
        } else if (choice < 4) {
            fill_text(out + at, here, kind);
        } else if (choice < 7) {
            fill_random(out + at, here, kind);
        } else {
            fill_random(out + at, here, next_random(&seed));
        }
    }
}

/* ---- images ---- */

gd_status
put_image(gd_repo *repo, const char *image_id, const uint8_t *data,
          size_t length, size_t piece, gd_recipe_header *header, gd_error *err)
{
    gd_transaction *transaction;
    gd_recipe_header own;
    bool linked;
    gd_status s =
        gd_transaction_begin(repo, image_id, "project", &gd_global_scope,
                             &transaction, err);
    if (s != GD_OK) {
        return s;
    }
    for (size_t at = 0; s == GD_OK && at < length; at += piece) {
        size_t here = length - at < piece ? length - at : piece;
        s = gd_transaction_write(transaction, data + at, here, err);
    }
    if (s == GD_OK) {
        s = gd_transaction_commit(transaction, header == NULL ? &own : header,
                                  &linked, err);
    }
    gd_transaction_end(transaction);
    return s;
}

gd_image *
require_image(gd_repo *repo, const char *image_id)
{
    gd_image *image = NULL;
    gd_error err;
    if (!CHECK_INT(gd_image_open(repo, image_id, NULL, &image, &err), GD_OK)) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    return image;
}

gd_status
get_image(gd_repo *repo, const char *image_id, const uint8_t *data,
          size_t length, bool *equal, gd_error *err)
{
    gd_image *image;
    size_t done = 0;
    *equal = false;
    gd_status s = gd_image_open(repo, image_id, NULL, &image, err);
    if (s != GD_OK) {
        return s;
    }
    uint8_t *out = calloc(1, length + 1);
    s = gd_image_read(image, out, length + 1, 0, &done, err);
    *equal = s == GD_OK && gd_image_header(image)->size == length &&
             done == length && (length == 0 || memcmp(out, data, length) == 0);
    free(out);
    gd_image_close(image);
    return s;
}
