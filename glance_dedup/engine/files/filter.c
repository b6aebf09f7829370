/* SPDX-License-Identifier: Apache-2.0 */
/*
 * filter.c - the fingerprint filter in shared memory.  See filter.h for the
 * buckets and the hints.
 *
 * The header page begins with a head that is written once (filterhead.h).
 *
 * A file is used if and only if it begins with exactly these bytes and is as
 * sharedfile.h demands: of this user, of the size that they name, without
 * holes.  So the processes of a host share one filter even if their budgets
 * differ: only the budget of the process that makes the file counts.
 *
 * Counters follow, which change.  Each lies on cache lines of its own, in the
 * byte order of the machine (struct shared).  From byte 1024 on the page has
 * the repository's path, which only filters.py writes and reads.  Behind that
 * page is the position of the groups (struct followed).
 *
 * Nothing read from the mapping is trusted.  A level is capped, a group is
 * checked for 0, and a slot has too few bits to be out of bounds.  The counts
 * of hints only decide when the level rises: wrong counts cost hints, and
 * clearing the filter repairs them.  The position has a checksum, since only
 * one process writes it, and may be killed while it does.
 *
 * Memory order.  A hint is one word, complete in itself, and the block it
 * leads to is verified under a group lock.  Only the order of I1 matters: a
 * thread that sees a hint must see the blocks that were made durable before
 * the hint was published.  Hence stores of hints release, and reads of hints
 * acquire.  Level and counters are only advice: relaxed.
 */
#include "engine/files/filter.h"

#include <assert.h>
#include <errno.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <string.h>

#include "engine/base/coding.h"
#include "engine/base/sharedfile.h"
#include "engine/format/filterhead.h"

enum {
    FOLLOWED_AT = 4096,
    HEADER_SIZE = 16384,
    BUCKET_WORDS = 8,
    BUCKET_SIZE = 64,
    LEVELS = GD_FILTER_MAX_LEVEL + 1,
    TAG_BITS = 20,
    SLOT_BITS = 15,
    GROUP_BITS = 25,
    ADDRESS_BITS = GROUP_BITS + SLOT_BITS,
    ZEROS_SHIFT = ADDRESS_BITS + TAG_BITS,
    REBUILD_LOCK = 0, /* the byte of the file that has this lock */
    /* Byte 1 belongs to sharedfile.c.  Every user of the file holds this one
     * shared: a process that can lock it exclusively may unlink the file
     * (filters.py). */
    USERS_LOCK = 2,
    OPEN_TRIES = 100,
    OPEN_WAIT_MS = 10,
    INSERT_TRIES = 4,
};

/* Bucket numbers are computed from 32 bits of hash. */
#define MAX_BUDGET ((uint64_t)BUCKET_SIZE << 32)

#define REBUILD_COMPLETE ((uint64_t)1 << 32)

typedef _Atomic uint64_t atomic_word;

typedef struct shared {
    uint8_t head[GD_FILTER_HEAD];
    alignas(64) _Atomic uint32_t level;
    /* For processes that do not hold the lock: the newest group in the low 32
     * bits, REBUILD_COMPLETE above; and the last scan (gd_look). */
    alignas(64) atomic_word rebuild;
    _Atomic int64_t ended_ns, listed_ns;
    atomic_word behind;
    alignas(64) atomic_word dropped;
    /* Hints by their zero bits; only those at or above the level count. */
    alignas(64) _Atomic int64_t kept[LEVELS];
} shared;

typedef struct followed {
    atomic_word position[GD_POSITION_WORDS];
    alignas(64) gd_self_published own;
} followed;

static_assert(sizeof(shared) <= 1024, "the path follows at 1024");
static_assert(FOLLOWED_AT + sizeof(followed) <= HEADER_SIZE,
              "the buckets follow");
static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && sizeof(atomic_word) == 8,
              "processes share the words");
static_assert(ZEROS_SHIFT + 4 == 64, "a hint is one word");

struct gd_filter {
    const gd_env *env;
    int fd;
    uint64_t size;
    uint64_t buckets;
    shared *header;     /* the mapping */
    followed *followed; /* in it */
    atomic_word *words; /* likewise */
    /* The OFD lock belongs to fd, and so to all threads at once. */
    atomic_bool rebuilding;
};

/* ---- hints ---- */

/* Place of a fingerprint in a filter. */
typedef struct spot {
    unsigned zeros;
    uint64_t mark; /* zeros and tag, placed as in a hint */
    atomic_word *bucket[2];
} spot;

/* Hashes the fingerprint, because the bytes of a weak digest are not all
 * random: so it spreads over the buckets as well as it can. */
static spot
find_spot(const gd_filter *filter, const gd_fingerprint *fp)
{
    XXH128_hash_t h = XXH3_128bits(fp->bytes, GD_FINGERPRINT_SIZE);
    uint64_t cap = (uint64_t)1 << GD_FILTER_MAX_LEVEL;
    uint64_t zeros = (uint64_t)__builtin_ctzll(h.low64 | cap);
    uint64_t tag = h.low64 >> (64 - TAG_BITS);
    uint64_t first = ((h.high64 >> 32) * filter->buckets) >> 32;
    uint64_t second =
        ((h.high64 & UINT32_MAX) * (filter->buckets - 1)) >> 32;
    if (second >= first) {
        second++; /* any bucket but the first */
    }
    return (spot){
        .zeros = (unsigned)zeros,
        .mark = zeros << ZEROS_SHIFT | tag << ADDRESS_BITS,
        .bucket = {filter->words + first * BUCKET_WORDS,
                   filter->words + second * BUCKET_WORDS},
    };
}

static uint64_t
make_hint(const spot *s, gd_address address)
{
    return s->mark | (uint64_t)address.group << SLOT_BITS | address.slot;
}

static unsigned
hint_zeros(uint64_t hint)
{
    return (unsigned)(hint >> ZEROS_SHIFT);
}

static gd_address
hint_address(uint64_t hint)
{
    return (gd_address){
        .group = (uint32_t)(hint >> SLOT_BITS) & GD_MAX_GROUP,
        .slot = (uint32_t)hint & (GD_MAX_SLOTS - 1),
    };
}

/* An empty word has group 0 too. */
static bool
is_free(uint64_t word, unsigned level)
{
    return hint_address(word).group == 0 || hint_zeros(word) < level;
}

static bool
is_address(gd_address a)
{
    return a.group >= 1 && a.group <= GD_MAX_GROUP && a.slot < GD_MAX_SLOTS;
}

/* ---- level and counters ---- */

static unsigned
load_level(const gd_filter *filter)
{
    uint32_t level =
        atomic_load_explicit(&filter->header->level, memory_order_relaxed);
    return level < GD_FILTER_MAX_LEVEL ? level : GD_FILTER_MAX_LEVEL;
}

static uint64_t
places(const gd_filter *filter)
{
    return filter->buckets * BUCKET_WORDS;
}

static void
count_kept(gd_filter *filter, unsigned zeros, int change)
{
    atomic_fetch_add_explicit(&filter->header->kept[zeros], change,
                              memory_order_relaxed);
}

/* The counts are wrong if a process dies between storing a hint and counting
 * it, or if something else wrote to them.  This keeps the sum within limits. */
static uint64_t
count_hints(const gd_filter *filter, unsigned level)
{
    uint64_t most = places(filter), sum = 0;
    for (unsigned zeros = level; zeros < LEVELS; zeros++) {
        int64_t kept = atomic_load_explicit(&filter->header->kept[zeros],
                                            memory_order_relaxed);
        if (kept > 0) {
            sum += (uint64_t)kept < most ? (uint64_t)kept : most;
        }
    }
    return sum < most ? sum : most;
}

/* If several threads see the filter full at one level, the compare-and-swap
 * lets one of them raise it. */
static void
raise_if_full(gd_filter *filter)
{
    uint32_t level = load_level(filter);
    uint64_t full = places(filter) - places(filter) / 8;
    if (level < GD_FILTER_MAX_LEVEL && count_hints(filter, level) > full) {
        atomic_compare_exchange_strong_explicit(
            &filter->header->level, &level, level + 1, memory_order_relaxed,
            memory_order_relaxed);
    }
}

/* ---- lookup, insert, remove ---- */

static bool
contains(const gd_address *list, size_t count, gd_address a)
{
    for (size_t i = 0; i < count; i++) {
        if (list[i].group == a.group && list[i].slot == a.slot) {
            return true;
        }
    }
    return false;
}

void
gd_filter_prefetch(const gd_filter *filter, const gd_fingerprint *fp)
{
    spot s = find_spot(filter, fp);
    if (s.zeros >= load_level(filter)) {
        __builtin_prefetch(s.bucket[0]);
        __builtin_prefetch(s.bucket[1]);
    }
}

size_t
gd_filter_lookup(const gd_filter *filter, const gd_fingerprint *fp,
                 gd_address out[GD_FILTER_CANDIDATES])
{
    spot s = find_spot(filter, fp);
    if (s.zeros < load_level(filter)) {
        return 0;
    }
    size_t count = 0;
    for (unsigned i = 0; i < GD_FILTER_CANDIDATES; i++) {
        uint64_t word =
            atomic_load_explicit(&s.bucket[i / BUCKET_WORDS][i % BUCKET_WORDS],
                                 memory_order_acquire);
        if (word >> ADDRESS_BITS != s.mark >> ADDRESS_BITS) {
            continue;
        }
        /* Two processes that insert the same hint at once may store it
         * twice. */
        gd_address a = hint_address(word);
        if (a.group != 0 && !contains(out, count, a)) {
            out[count++] = a;
        }
    }
    return count;
}

typedef struct vacancy {
    atomic_word *place; /* NULL if there is none */
    uint64_t word;      /* its present value */
} vacancy;

/* Picks a free place in the emptier bucket, so that neither bucket fills up
 * early.  False if the hint is there already. */
static bool
find_vacancy(const spot *s, unsigned level, uint64_t hint, vacancy *found)
{
    vacancy first[2] = {{NULL, 0}, {NULL, 0}};
    unsigned free_places[2] = {0, 0};
    for (unsigned b = 0; b < 2; b++) {
        for (unsigned i = 0; i < BUCKET_WORDS; i++) {
            atomic_word *place = &s->bucket[b][i];
            uint64_t word = atomic_load_explicit(place, memory_order_relaxed);
            if (word == hint) {
                return false;
            }
            if (is_free(word, level)) {
                free_places[b]++;
                first[b] = (vacancy){place, word};
            }
        }
    }
    *found = first[free_places[1] > free_places[0] ? 1 : 0];
    return true;
}

static bool
store_hint(gd_filter *filter, vacancy v, uint64_t hint)
{
    if (!atomic_compare_exchange_strong_explicit(v.place, &v.word, hint,
                                                 memory_order_release,
                                                 memory_order_relaxed)) {
        return false;
    }
    /* The word replaced is below the level, and those are not counted. */
    count_kept(filter, hint_zeros(hint), 1);
    return true;
}

void
gd_filter_insert(gd_filter *filter, const gd_fingerprint *fp,
                 gd_address address)
{
    spot s = find_spot(filter, fp);
    unsigned level = load_level(filter);
    if (s.zeros < level || !is_address(address)) {
        return;
    }
    uint64_t hint = make_hint(&s, address);
    for (unsigned i = 0; i < INSERT_TRIES; i++) {
        vacancy v;
        if (!find_vacancy(&s, level, hint, &v)) {
            return;
        }
        if (v.place == NULL) {
            break;
        }
        if (store_hint(filter, v, hint)) {
            raise_if_full(filter);
            return;
        }
    }
    atomic_fetch_add_explicit(&filter->header->dropped, 1,
                              memory_order_relaxed);
    raise_if_full(filter);
}

void
gd_filter_remove(gd_filter *filter, const gd_fingerprint *fp,
                 gd_address address)
{
    if (!is_address(address)) {
        return;
    }
    spot s = find_spot(filter, fp);
    uint64_t hint = make_hint(&s, address);
    for (unsigned i = 0; i < GD_FILTER_CANDIDATES; i++) {
        uint64_t expected = hint;
        if (atomic_compare_exchange_strong_explicit(
                &s.bucket[i / BUCKET_WORDS][i % BUCKET_WORDS], &expected, 0,
                memory_order_relaxed, memory_order_relaxed)) {
            count_kept(filter, s.zeros, -1);
        }
    }
}

/* ---- following the groups ---- */

bool
gd_filter_rebuild_lock(gd_filter *filter)
{
    if (atomic_exchange(&filter->rebuilding, true)) {
        return false; /* another thread has it */
    }
    if (filter->env->lock(filter->env, filter->fd, REBUILD_LOCK, F_WRLCK) !=
        0) {
        atomic_store(&filter->rebuilding, false);
        return false;
    }
    return true;
}

void
gd_filter_rebuild_unlock(gd_filter *filter)
{
    filter->env->lock(filter->env, filter->fd, REBUILD_LOCK, F_UNLCK);
    atomic_store(&filter->rebuilding, false);
}

void
gd_filter_load(gd_filter *filter, gd_position *position)
{
    uint64_t words[GD_POSITION_WORDS];
    for (size_t i = 0; i < GD_POSITION_WORDS; i++) {
        words[i] = atomic_load_explicit(&filter->followed->position[i],
                                        memory_order_relaxed);
    }
    (void)gd_position_decode(words, position);
    /* in a new filter */
    gd_self_published_begin_epoch(&filter->followed->own);
}

void
gd_filter_save(gd_filter *filter, const gd_position *position,
               const gd_look *look)
{
    uint64_t words[GD_POSITION_WORDS];
    size_t length = gd_position_encode(position, words);
    for (size_t i = 0; i < length; i++) {
        atomic_store_explicit(&filter->followed->position[i], words[i],
                              memory_order_relaxed);
    }
    shared *header = filter->header;
    uint64_t state =
        position->newest | (position->complete ? REBUILD_COMPLETE : 0);
    atomic_store_explicit(&header->behind, look->behind, memory_order_relaxed);
    atomic_store_explicit(&header->listed_ns, look->listed_ns,
                          memory_order_relaxed);
    atomic_store_explicit(&header->ended_ns, look->ended_ns,
                          memory_order_relaxed);
    atomic_store_explicit(&header->rebuild, state, memory_order_release);
}

gd_self_published *
gd_filter_own(gd_filter *filter)
{
    return &filter->followed->own;
}

/* In a large filter almost every bucket lies in another small page, and finding
 * a page's place takes longer than reading the bucket.  So this requests large
 * pages.  They belong to the file: other processes have them, too. */
void
gd_filter_settle(gd_filter *filter)
{
    filter->env->use_large_pages(filter->env, filter->header, filter->size);
}

/* The counts are set, not counted down, which repairs wrong ones.  Hints that
 * others insert meanwhile may not be counted.  The level falls last: if it fell
 * earlier, old hints below it would come back.  The position goes first: a
 * process that is killed here leaves a filter that has to be filled. */
void
gd_filter_clear(gd_filter *filter)
{
    static const gd_position nothing;
    gd_self_published_end_epoch(&filter->followed->own);
    gd_filter_save(filter, &nothing, &(gd_look){0});
    for (uint64_t i = 0; i < places(filter); i++) {
        atomic_store_explicit(&filter->words[i], 0, memory_order_relaxed);
    }
    for (unsigned zeros = 0; zeros < LEVELS; zeros++) {
        atomic_store_explicit(&filter->header->kept[zeros], 0,
                              memory_order_relaxed);
    }
    atomic_store_explicit(&filter->header->dropped, 0, memory_order_relaxed);
    atomic_store_explicit(&filter->header->level, 0, memory_order_release);
    gd_self_published_begin_epoch(&filter->followed->own);
}

static gd_look
load_look(const shared *header)
{
    return (gd_look){
        .ended_ns = atomic_load_explicit(&header->ended_ns,
                                         memory_order_relaxed),
        .listed_ns = atomic_load_explicit(&header->listed_ns,
                                          memory_order_relaxed),
        .behind = (uint32_t)atomic_load_explicit(&header->behind,
                                                 memory_order_relaxed),
    };
}

void
gd_filter_get_stats(const gd_filter *filter, gd_filter_stats *stats)
{
    uint64_t rebuild = atomic_load_explicit(&filter->header->rebuild,
                                            memory_order_acquire);
    bool sane = rebuild <= (REBUILD_COMPLETE | GD_MAX_GROUP) &&
                (uint32_t)rebuild <= GD_MAX_GROUP;
    unsigned level = load_level(filter);
    *stats = (gd_filter_stats){
        .bytes = filter->size,
        .places = places(filter),
        .hints = count_hints(filter, level),
        .dropped = atomic_load_explicit(&filter->header->dropped,
                                        memory_order_relaxed),
        .level = level,
        .rebuilt = sane ? (uint32_t)rebuild : 0,
        .complete = sane && (rebuild & REBUILD_COMPLETE) != 0,
        .look = load_look(filter->header),
    };
}

/* ---- opening ---- */

/* The size with which an existing filter of the repository was made, from its
 * header; 0 if there is none.  Whether it may be used is decided later. */
static uint64_t
existing_size(const gd_env *env, const char *path,
              const uint8_t repository_id[16])
{
    uint8_t found[GD_FILTER_HEAD], wanted[GD_FILTER_HEAD];
    gd_filter_head head;
    int fd;
    if (gd_open(env, AT_FDCWD, path, O_RDONLY, 0, &fd, NULL) != GD_OK) {
        return 0;
    }
    struct stat st;
    bool read = env->fstat(env, fd, &st) == 0 &&
                gd_read_full(env, fd, found, sizeof found, 0, path, NULL) ==
                    GD_OK;
    env->close(env, fd);
    if (!read) {
        return 0;
    }
    gd_filter_head_decode(found, &head);
    gd_filter_head_encode(&head, wanted);
    bool sane = memcmp(found, wanted, sizeof found) == 0 &&
                memcmp(head.repository_id, repository_id, GD_ID_SIZE) == 0 &&
                head.size == (uint64_t)st.st_size &&
                head.size >= GD_FILTER_MIN_BYTES - BUCKET_SIZE &&
                head.size <= MAX_BUDGET &&
                head.size == HEADER_SIZE + head.buckets * BUCKET_SIZE;
    return sane ? head.size : 0;
}

/* Opens the file, or creates it, and makes sure that it stays.  Where locks
 * fail, or another lock is in the way for long, the file may be unlinked while
 * we use it: then others make another one, and duplicates are missed. */
static gd_status
open_to_use(gd_filter *filter, const char *path,
            const uint8_t head[GD_FILTER_HEAD], gd_error *err)
{
    const gd_env *env = filter->env;
    for (unsigned i = 1;; i++) {
        GD_TRY(gd_sharedfile_open(env, path, head, GD_FILTER_HEAD,
                                  filter->size, &filter->fd, err));
        int rc = env->lock(env, filter->fd, USERS_LOCK, F_RDLCK);
        bool stays = rc != -EAGAIN && rc != -EACCES &&
                     gd_same_file(env, filter->fd, AT_FDCWD, path);
        if (stays || i == OPEN_TRIES) {
            return GD_OK;
        }
        env->close(env, filter->fd);
        env->sleep_ms(env, OPEN_WAIT_MS);
    }
}

bool
gd_filter_take_unused(const gd_env *env, int fd, bool unfinished)
{
    return env->lock(env, fd, unfinished ? GD_SHAREDFILE_CREATION_LOCK
                                         : USERS_LOCK, F_WRLCK) >= 0;
}

/* Opens and maps the file.  After a failure the caller releases what filter
 * has. */
static gd_status
open_and_map(gd_filter *filter, const char *path,
             const uint8_t head[GD_FILTER_HEAD], gd_error *err)
{
    const gd_env *env = filter->env;
    GD_TRY(open_to_use(filter, path, head, err));
    filter->header = env->mmap_shared(env, filter->fd, filter->size);
    if (filter->header == NULL) {
        env->close(env, filter->fd);
        return gd_fail(err, GD_NOMEM, "cannot map the %llu bytes of %s",
                       (unsigned long long)filter->size, path);
    }
    filter->followed =
        (followed *)((uint8_t *)filter->header + FOLLOWED_AT);
    filter->words =
        (atomic_word *)((uint8_t *)filter->header + HEADER_SIZE);
    return GD_OK;
}

gd_status
gd_filter_open(const gd_env *env, const char *path,
               const uint8_t repository_id[16], uint64_t budget,
               gd_filter **filter, gd_error *err)
{
    *filter = NULL;
    if (budget < GD_FILTER_MIN_BYTES || budget > MAX_BUDGET) {
        return gd_fail(err, GD_INVALID,
                       "the filter's budget is %llu bytes; it must be from "
                       "%d to %llu",
                       (unsigned long long)budget, GD_FILTER_MIN_BYTES,
                       (unsigned long long)MAX_BUDGET);
    }
    gd_filter *f = gd_calloc(env, 1, sizeof *f, err);
    if (f == NULL) {
        return GD_NOMEM;
    }
    uint8_t raw[GD_FILTER_HEAD];
    f->env = env;
    uint64_t size = existing_size(env, path, repository_id);
    if (size == 0) {
        size = budget;
    }
    f->buckets = (size - HEADER_SIZE) / BUCKET_SIZE;
    f->size = HEADER_SIZE + f->buckets * BUCKET_SIZE;
    atomic_init(&f->rebuilding, false);
    gd_filter_head head = {.size = f->size, .buckets = f->buckets};
    memcpy(head.repository_id, repository_id, GD_ID_SIZE);
    gd_filter_head_encode(&head, raw);
    gd_status s = open_and_map(f, path, raw, err);
    if (s != GD_OK) {
        env->release(env, f);
        return s;
    }
    *filter = f;
    return GD_OK;
}

void
gd_filter_close(const gd_env *env, gd_filter *filter)
{
    if (filter != NULL) {
        env->munmap(env, filter->header, filter->size);
        env->close(env, filter->fd);
        env->release(env, filter);
    }
}
