/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault_tasks.c - see fault_tasks.h.
 */
#include "tests/c/support/fault_tasks.h"

#include <dirent.h>

#include "engine/files/image_delete.h"
#include "engine/format/runs.h"
#include "engine/read/image.h"
#include "tests/c/support/check.h"

/* ---- images ---- */

const char *
image_id_of(image_name which)
{
    static const char *const ids[IMAGES] = {"kept", "old", "new", "twin",
                                            "next"};
    return ids[which];
}

const uint8_t *
image_data(image_name which)
{
    static uint8_t data[IMAGES][FAULT_LENGTH];
    static bool filled;
    if (!filled) {
        filled = true;
        for (unsigned i = 0; i < IMAGES; i++) {
            fill_image(data[i], FAULT_LENGTH, FAULT_BLOCK, 1000, i + 1);
        }
        memcpy(data[NEW], data[KEPT], FAULT_LENGTH / 3);
        memcpy(data[NEW] + 60 * FAULT_BLOCK, data[OLD], 30 * FAULT_BLOCK);
        memcpy(data[TWIN], data[KEPT], FAULT_LENGTH);
    }
    return data[which];
}

gd_status
store_image(world *w, image_name which)
{
    gd_status s = put_image(w->repo, image_id_of(which), image_data(which),
                            FAULT_LENGTH, 3333, NULL, &w->x.err);
    if (s == GD_OK) {
        w->states[which] = IMAGE_PRESENT;
    } else if (w->states[which] == IMAGE_ABSENT) {
        w->states[which] = IMAGE_MAYBE;
    }
    return s;
}

gd_status
delete_image(world *w, image_name which)
{
    gd_status s = gd_image_delete(w->x.env, w->x.root, &w->x.params,
                                  image_id_of(which), NULL, &w->x.err);
    if (s == GD_OK) {
        w->states[which] = IMAGE_ABSENT;
    } else if (w->states[which] == IMAGE_PRESENT) {
        w->states[which] = IMAGE_MAYBE;
    }
    return s;
}

gd_status
fetch_image(world *w, image_name which)
{
    bool equal;
    gd_status s = get_image(w->repo, image_id_of(which), image_data(which),
                            FAULT_LENGTH, &equal, &w->x.err);
    return s == GD_OK && !equal
               ? gd_fail(&w->x.err, GD_CORRUPT, "image %s: wrong bytes",
                         image_id_of(which))
               : s;
}

size_t
image_blocks(world *w, image_name which, uint64_t numbers[FAULT_BLOCKS + 1])
{
    gd_image *image;
    gd_recipe_page page;
    size_t count = 0;
    require_ok(w, gd_image_open(w->repo, image_id_of(which), NULL, &image,
                                &w->x.err), "open an image");
    for (uint64_t n = 1; n <= gd_image_pages(image); n++) {
        require_ok(w, gd_image_extents(image, n, &page, &w->x.err), "read it");
        for (uint32_t i = 0; i < page.count; i++) {
            const gd_extent *e = &page.extents[i];
            for (uint32_t k = 0; k < e->blocks; k++) {
                numbers[count++] =
                    (uint64_t)e->group << GD_SLOT_BITS | (e->slot + k);
            }
        }
    }
    gd_image_close(image);
    return count;
}

void
require_ok(world *w, gd_status s, const char *what)
{
    if (s != GD_OK) {
        fprintf(stderr, "cannot %s: %s\n", what, w->x.err.text);
        exit(2);
    }
}

/* ---- cases ---- */

typedef struct fault_case {
    const fault_task *task;
    fault_call call;
    uint64_t nth;
    int sys_errno;
    bool forever;
    bool crash_at_once;
} fault_case;

typedef struct errno_name {
    const char *name;
    int sys_errno;
} errno_name;

static const errno_name ERRNOS[] = {
    {"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT},
    {"EINTR", EINTR},   {"EAGAIN", EAGAIN}, {"ENOMEM", ENOMEM},
    {"EMFILE", EMFILE},
};

enum { ERRNO_COUNT = sizeof ERRNOS / sizeof ERRNOS[0] };

static const char *
errno_text(int sys_errno)
{
    size_t i = 0;
    while (i < ERRNO_COUNT - 1 && ERRNOS[i].sys_errno != sys_errno) {
        i++;
    }
    return ERRNOS[i].name;
}

static void
print_case(const fault_case *c, char out[200])
{
    snprintf(out, 200, "%s:%s:%u:%s:%s:%s", c->task->name,
             fault_call_name(c->call), (unsigned)c->nth,
             errno_text(c->sys_errno), c->forever ? "ever" : "once",
             c->crash_at_once ? "now" : "later");
}

static gd_status
status_for(int sys_errno)
{
    switch (sys_errno) {
    case ENOSPC:
    case EDQUOT:
        return GD_NOSPACE;
    case ENOMEM:
        return GD_NOMEM;
    default:
        return GD_IO;
    }
}

/* ---- requirements ---- */

static void
check_status(world *w, const fault_case *c, gd_status s)
{
    static const char *const subjects[] = {
        "groups", "images", "image ", "spool",  "locks",  "fence",
        "memory", "random", "spares", "filter", "quarantine", "features",
        "recipe", "repository", "group", "glance-dedup-"};
    /* A lock that is refused, or a group that cannot be entered, is busy. */
    bool right = s == GD_OK || s == status_for(c->sys_errno) ||
                 s == c->task->also ||
                 (s == GD_BUSY && (c->forever || c->sys_errno == EAGAIN));
    if (!CHECK(right)) {
        fprintf(stderr, "%s: %s\n", gd_status_name(s), w->x.err.text);
    }
    if (s == GD_OK) {
        return;
    }
    bool named = false;
    for (size_t i = 0; i < sizeof subjects / sizeof subjects[0]; i++) {
        named = named || strstr(w->x.err.text, subjects[i]) != NULL;
    }
    CHECK_INT(w->x.err.status, s);
    if (!CHECK(named && strlen(w->x.err.text) > 10)) {
        fprintf(stderr, "words: '%s'\n", w->x.err.text);
    }
}

/* Queries as another process would, for all bytes of each file; but an open
 * handle shares a version byte, the last ones of locks/groups. */
static void
check_unlocked(world *w, const char *directory)
{
    const struct dirent *entry;
    int fd = openat(w->x.root, directory, O_RDONLY | O_DIRECTORY);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    while (stream != NULL && (entry = readdir(stream)) != NULL) {
        struct flock lock = {
            .l_type = F_WRLCK,
            .l_whence = SEEK_SET,
            .l_len = strcmp(entry->d_name, "groups") == 0 ? INT64_C(1) << 35
                                                          : 0,
        };
        int file = openat(fd, entry->d_name, O_RDWR | O_NOFOLLOW);
        if (file < 0) {
            continue; /* "." and ".." */
        }
        CHECK_INT(fcntl(file, F_OFD_GETLK, &lock), 0);
        if (!CHECK_INT(lock.l_type, F_UNLCK)) {
            fprintf(stderr, "byte %lld of %s/%s is locked\n",
                    (long long)lock.l_start, directory, entry->d_name);
        }
        close(file);
    }
    if (stream != NULL) {
        closedir(stream);
    }
}

static void
check_all_unlocked(world *w)
{
    check_unlocked(w, "locks");
    check_unlocked(w, "images");
    check_unlocked(w, "spool");
}

static void
check_images(world *w)
{
    for (unsigned i = 0; i < IMAGES; i++) {
        if (w->states[i] == IMAGE_LOST) {
            continue;
        }
        gd_status s = fetch_image(w, i);
        bool present = s == GD_OK && w->states[i] != IMAGE_ABSENT;
        bool absent = s == GD_NOTFOUND && w->states[i] != IMAGE_PRESENT;
        if (!CHECK(present || absent)) {
            fprintf(stderr, "image %s: %s: %s\n", image_id_of(i),
                    gd_status_name(s), w->x.err.text);
        }
    }
}

/* Without faults, the failed task succeeds, and a new one, too. */
static void
check_usable(world *w, const fault_case *c)
{
    gd_status s = c->task->work(w);
    if (!CHECK(s == GD_OK || s == c->task->again)) {
        fprintf(stderr, "second attempt: %s\n", w->x.err.text);
    }
    if (!CHECK_INT(store_image(w, NEXT), GD_OK)) {
        fprintf(stderr, "another image: %s\n", w->x.err.text);
    }
    check_images(w);
    check_all_unlocked(w);
}

/* ---- running ---- */

/* A wait that will fail need not take long. */
static void
skip_sleep(const gd_env *env, unsigned ms)
{
    (void)env;
    (void)ms;
}

/* Every reading of the clock is in another second, so work that waits for the
 * next second is done. */
static int64_t
next_second(const gd_env *env)
{
    static int64_t now = 1700000000;
    (void)env;
    return now++;
}

static void
open_world(world *w, const fault_task *task)
{
    memset(w, 0, sizeof *w);
    scratch_init(&w->x);
    w->x.f.env.sleep_ms = skip_sleep;
    w->x.f.env.now = next_second;
    w->x.params.block_size = FAULT_BLOCK;
    w->x.params.segment_size = 4096;
    w->x.params.by_value = task->by_value;
    w->x.params.direct_io = task->direct_io;
    w->x.params.cut_minimum = task->gear ? 64 : 0;
    w->x.params.cut_average = task->gear ? 256 : 0;
    w->x.params.codec = task->by_value ? GD_CODEC_ZSTD : GD_CODEC_LZ4;
    w->repo = scratch_repo_filter(&w->x);
    require_ok(w, store_image(w, KEPT), "store");
    require_ok(w, store_image(w, OLD), "store");
    if (task->setup != NULL) {
        task->setup(w);
    }
    fault_env_start_shadow(&w->x.f);
}

static void
crash(world *w)
{
    gd_repo_close(w->repo);
    fault_env_crash(&w->x.f);
    w->repo = scratch_repo_filter(&w->x);
    check_images(w);
}

/* Returns true if a call failed at all. */
static bool
run_case(const fault_case *c)
{
    world w;
    unsigned before = check_failures;
    open_world(&w, c->task);
    uint64_t faults = fault_env_faults(&w.x.f);
    fault_env_fail(&w.x.f, c->call, c->nth, c->sys_errno, c->forever);
    w.x.err = (gd_error){0};
    gd_status s = c->task->work(&w);
    bool struck = fault_env_faults(&w.x.f) > faults;
    fault_env_heal(&w.x.f);
    check_status(&w, c, s);
    CHECK(struck || s == GD_OK);
    check_all_unlocked(&w);
    if (w.repo == NULL) {
        w.repo = scratch_repo_filter(&w.x);
    }
    if (c->crash_at_once) {
        crash(&w);
    } else {
        check_images(&w);
    }
    check_usable(&w, c);
    crash(&w);
    gd_repo_close(w.repo);
    if (check_failures > before) {
        char text[200];
        print_case(c, text);
        fprintf(stderr, "GLANCE_DEDUP_FAULTS=%s%s%s\n", text,
                w.x.f.failed_sync[0] != '\0' ? "  failed to sync " : "",
                w.x.f.failed_sync);
    }
    CHECK_INT(scratch_destroy(&w.x), 0);
    return struck;
}

/* Each call is short, or interrupted first: none fails. */
static void
run_unharmed(const fault_task *task)
{
    static const size_t most[] = {0, 1000, 111, 7};
    for (unsigned i = 0; i < sizeof most / sizeof most[0]; i++) {
        const fault_case none = {.task = task, .call = FAULT_ANY};
        world w;
        open_world(&w, task);
        fault_env_shorten(&w.x.f, most[i]);
        fault_env_interrupt(&w.x.f, 2 + i % 2);
        if (!CHECK_INT(task->work(&w), GD_OK)) {
            fprintf(stderr, "%s, calls of %zu bytes: %s\n", task->name,
                    most[i], w.x.err.text);
        }
        fault_env_heal(&w.x.f);
        check_images(&w);
        check_usable(&w, &none);
        crash(&w);
        gd_repo_close(w.repo);
        CHECK_INT(scratch_destroy(&w.x), 0);
    }
}

typedef struct plan {
    bool all;
    uint64_t seed;
    uint64_t tried;
    uint64_t counts[FAULT_CALLS]; /* of the task, without faults */
} plan;

static void
count_calls(plan *p, const fault_task *task)
{
    world w;
    open_world(&w, task);
    for (fault_call call = 0; call < FAULT_CALLS; call++) {
        p->counts[call] = fault_env_count(&w.x.f, call);
    }
    CHECK_INT(task->work(&w), GD_OK);
    for (fault_call call = 0; call < FAULT_CALLS; call++) {
        p->counts[call] = fault_env_count(&w.x.f, call) - p->counts[call];
    }
    gd_repo_close(w.repo);
    CHECK_INT(scratch_destroy(&w.x), 0);
}

/* A sync is followed by a crash at once, or by one later. */
static bool
try_case(plan *p, fault_case c)
{
    bool sync = c.call == FAULT_FSYNC || c.call == FAULT_FDATASYNC;
    bool struck = false;
    for (int k = 0; k < 1 + sync; k++) {
        c.crash_at_once = sync ? k == 1 : next_random(&p->seed) % 2 == 0;
        struck = run_case(&c);
        p->tried++;
    }
    return struck;
}

/* Fails the nth call, for every n, or for `samples` of them. */
static void
sweep(plan *p, fault_case c, unsigned samples)
{
    unsigned before = check_failures;
    uint64_t count = p->counts[c.call];
    if (count == 0) {
        return;
    }
    if (!p->all && count > samples) {
        while (samples-- > 0) {
            c.nth = 1 + next_random(&p->seed) % count;
            (void)try_case(p, c);
        }
        return;
    }
    c.nth = 1;
    while (check_failures == before && try_case(p, c)) {
        c.nth++; /* a fault may add calls */
    }
}

/* Calls that a signal interrupts are repeated each time: so not for ever. */
static bool
makes_sense(fault_call call, int sys_errno)
{
    return sys_errno != EINTR ||
           (call != FAULT_ANY && call != FAULT_OPENAT && call != FAULT_PREAD &&
            call != FAULT_PWRITEV && call != FAULT_FALLOCATE &&
            call != FAULT_FTRUNCATE && call != FAULT_PUNCH);
}

/* Returns true for one of so many by default; for fewer if a case takes
 * long. */
static bool
is_chosen(plan *p, unsigned of)
{
    return p->all || next_random(&p->seed) % (of * SWEEP_STRIDE) == 0;
}

static void
run_task(plan *p, const fault_task *task)
{
    enum { SYNCS = 8 };
    fault_case c = {.task = task, .sys_errno = ENOMEM, .call = FAULT_ALLOC};
    count_calls(p, task);
    run_unharmed(task);
    sweep(p, c, 3);
    c.forever = true;
    sweep(p, c, 1);
    for (size_t i = 0; i < ERRNO_COUNT; i++) {
        c.sys_errno = ERRNOS[i].sys_errno;
        for (c.call = 0; c.call <= FAULT_ANY; c.call++) {
            c.forever = false;
            if (c.call == FAULT_ANY && is_chosen(p, 1)) {
                sweep(p, c, 2);
            }
            c.forever = true;
            if (c.call != FAULT_ALLOC && makes_sense(c.call, c.sys_errno) &&
                is_chosen(p, ERRNO_COUNT)) {
                sweep(p, c, 1);
            }
        }
    }
    c.forever = false;
    c.sys_errno = EIO;
    c.call = FAULT_FSYNC;
    sweep(p, c, SYNCS / SWEEP_STRIDE);
    c.call = FAULT_FDATASYNC;
    sweep(p, c, SYNCS / SWEEP_STRIDE);
}

/* Runs one case, as print_case writes it. */
static void
run_named(const char *text, const fault_task *tasks, size_t count)
{
    char name[64], call[32], error[16], often[8], when[8];
    unsigned nth;
    fault_case c = {0};
    if (sscanf(text, "%63[^:]:%31[^:]:%u:%15[^:]:%7[^:]:%7s", name, call, &nth,
               error, often, when) != 6) {
        fprintf(stderr, "no case is called so: %s\n", text);
        exit(2);
    }
    c.nth = nth;
    c.call = fault_call_by_name(call);
    c.forever = strcmp(often, "ever") == 0;
    c.crash_at_once = strcmp(when, "now") == 0;
    for (size_t i = 0; i < ERRNO_COUNT; i++) {
        if (strcmp(ERRNOS[i].name, error) == 0) {
            c.sys_errno = ERRNOS[i].sys_errno;
        }
    }
    for (size_t i = 0; i < count; i++) {
        if (strcmp(tasks[i].name, name) == 0) {
            c.task = &tasks[i];
            (void)run_case(&c);
        }
    }
}

unsigned
run_fault_tasks(const fault_task *tasks, size_t count)
{
    const char *which = getenv("GLANCE_DEDUP_FAULTS");
    const char *seed = getenv("GLANCE_DEDUP_SEED");
    plan p = {.all = which != NULL && strncmp(which, "all", 3) == 0,
              .seed = seed != NULL ? strtoull(seed, NULL, 10) : 1};
    check_failures = 0;
    if (which != NULL && which[0] != '\0' && !p.all) {
        run_named(which, tasks, count);
        return check_failures;
    }
    for (size_t i = 0; i < count; i++) {
        if (!p.all || which[3] != ':' || strcmp(which + 4, tasks[i].name) == 0) {
            run_task(&p, &tasks[i]);
        }
    }
    printf("%llu cases\n", (unsigned long long)p.tried);
    return check_failures;
}
