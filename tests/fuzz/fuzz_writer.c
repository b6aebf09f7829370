/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_writer.c - the input is a program: two processes store, abort, delete,
 * read, collect, merge, rewrite and evacuate in one repository, meet errors of
 * the system, and are killed. A model in memory has the expected images.
 *
 * After an operation without a fault its result must be the expected one.
 * After a fault, the operation's image is there or not, which the target
 * reads, but whole, and earlier acknowledged images are unchanged. In the end
 * everything is collected: then the images are still the expected ones, the
 * spool is empty, and every remaining block is good.
 *
 * Input: the parameters (4 bytes), then operations: the kind (1), the process
 * and the image (1), and the parameters of each.
 */
#include <errno.h>

#include "engine/base/coding.h"
#include "engine/exchange/wire.h"
#include "engine/files/group.h"
#include "engine/files/image_delete.h"
#include "engine/read/image.h"
#include "engine/repo/follow.h"
#include "engine/repo/segcache.h"
#include "engine/write/lookup.h"
#include "tests/c/support/simple_maintainer.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/repository.h"

enum {
    IMAGES = 6,
    HANDLES = 2,
    TRANSACTIONS = 3,
    READERS = 3,
    LENGTH_MAX = 24 << 10,
    OPERATIONS = 60,
};

typedef struct content {
    bool present;
    size_t length;
    uint8_t data[LENGTH_MAX];
} content;

typedef struct open_transaction {
    gd_transaction *transaction; /* NULL: none */
    unsigned handle, image;
    content written;
} open_transaction;

typedef struct open_reader {
    gd_image *image;
    unsigned handle;
    content wanted;
} open_reader;

typedef struct world {
    repository r;
    gd_repo *handles[HANDLES];
    content images[IMAGES];
    open_transaction transactions[TRANSACTIONS];
    open_reader readers[READERS];
    bool filter, scopes;
    bool disturbed; /* a fault may strike in this operation */
    uint8_t fault, fault_at;
} world;

static const char *
name_of(unsigned image)
{
    static const char *const names[IMAGES] = {"a", "b", "c", "d", "e", "f"};
    return names[image];
}

/* Returns one scope for all, or one of three. */
static const gd_scope *
scope_of(const world *w, unsigned image)
{
    static const gd_scope scopes[] = {{{0}}, {{1}}, {{2, 2}}};
    return &scopes[w->scopes ? image % 3 : 0];
}

/* ---- faults ---- */

/* Arms the fault that the last operation requested: the next one is
 * disturbed. */
static void
arm(world *w)
{
    static const int errors[] = {0,     EIO,    ENOSPC, EINTR,
                                 EMFILE, ENOMEM, EACCES, EDQUOT};
    w->disturbed = w->fault != 0;
    if (w->fault == 9) {
        memory_env_fail_alloc(&w->r.m, 1 + w->fault_at);
    } else if (w->fault != 0) {
        memory_env_fail(&w->r.m, 1 + w->fault_at, errors[w->fault - 1]);
    }
}

static void
close_handles(world *w)
{
    for (unsigned i = 0; i < TRANSACTIONS; i++) {
        if (w->transactions[i].transaction != NULL) {
            gd_transaction_end(w->transactions[i].transaction);
            w->transactions[i].transaction = NULL;
        }
    }
    for (unsigned i = 0; i < READERS; i++) {
        if (w->readers[i].image != NULL) {
            gd_image_close(w->readers[i].image);
            w->readers[i].image = NULL;
        }
    }
    for (unsigned i = 0; i < HANDLES; i++) {
        if (w->handles[i] != NULL) {
            gd_repo_close(w->handles[i]);
            w->handles[i] = NULL;
        }
    }
}

static gd_repo *
handle(world *w, unsigned i)
{
    gd_error ignored;
    i %= HANDLES;
    if (w->handles[i] == NULL) {
        MUST(gd_repo_open(w->r.env, REPOSITORY_PATH, &w->r.params, true,
                          &w->handles[i], &w->r.err) == GD_OK);
        if (w->filter) {
            (void)gd_repo_attach_filter(w->handles[i], FILTER_PATH,
                                        GD_FILTER_MIN_BYTES, &ignored);
        }
        gd_segcache_set_budget(w->handles[i]->segcache, i == 0 ? 1 << 16 : 0);
    }
    return w->handles[i];
}

/* ---- checks ---- */

static void
must_have_words(const world *w, gd_status s)
{
    MUST(s == GD_OK || s == GD_BUSY ||
         (w->r.err.status == s && w->r.err.text[0] != '\0'));
}

static read_result
look(world *w, unsigned who, unsigned image, const content *wanted)
{
    w->r.repo = handle(w, who);
    read_result result = repository_read(&w->r, name_of(image), wanted->data,
                                         wanted->length);
    w->r.repo = NULL;
    return result;
}

static void
check_image(world *w, unsigned who, unsigned image)
{
    read_result result = look(w, who, image, &w->images[image]);
    if (result == READ_FAILED) {
        fprintf(stderr, "image %s: %s\n", name_of(image), w->r.err.text);
    }
    MUST(result == (w->images[image].present ? READ_EQUAL : READ_ABSENT));
}

/* After a disturbance, finds out if `then`, which may exist, does. */
static void
find_out(world *w, unsigned image, const content *then)
{
    read_result result = look(w, 0, image, then);
    if (result == READ_FAILED) {
        fprintf(stderr, "image %s: %s\n", name_of(image), w->r.err.text);
    }
    MUST(result == READ_EQUAL || result == READ_ABSENT);
    if (result == READ_EQUAL) {
        w->images[image] = *then;
    }
    w->images[image].present = result == READ_EQUAL;
}

/* Ends the disturbance; if the process was killed, with all its handles. */
static void
calm(world *w)
{
    if (!w->disturbed) {
        return;
    }
    bool killed = w->fault == 1 && w->r.m.calls >= w->r.m.fail_at;
    if (killed) {
        close_handles(w); /* in memory; no file changes */
        (void)memory_env_heal(&w->r.m);
        memory_env_close_all(&w->r.m);
    }
    (void)memory_env_heal(&w->r.m);
    w->fault = 0;
    w->disturbed = false;
}

/* ---- storing ---- */

static void
make_content(world *w, input *in, content *out)
{
    size_t unit = w->r.params.block_size;
    uint8_t kinds = 1 + take8(in) % 60;
    uint8_t seed = take8(in), blocks = take8(in), rest = take8(in);
    out->present = true;
    out->length = blocks % 41 * unit + (rest > 128 ? rest * 3U : 0);
    out->length = out->length < LENGTH_MAX ? out->length : LENGTH_MAX;
    repository_fill(out->data, out->length, unit, kinds, seed);
}

static void
settle_put(world *w, unsigned image, const content *wanted, gd_status s,
           bool linked)
{
    must_have_words(w, s);
    bool was = w->images[image].present, disturbed = w->disturbed;
    bool full = w->r.m.space == 0;
    calm(w);
    if (s == GD_OK) {
        MUST(!was && linked);
        w->images[image] = *wanted;
    } else if (was) {
        MUST(disturbed || full || s == GD_EXISTS);
        MUST(!linked);
    } else if (linked) {
        MUST(disturbed);
        find_out(w, image, wanted);
    } else {
        MUST(disturbed || (full && s == GD_NOSPACE));
    }
    check_image(w, 1, image);
}

static void
put(world *w, unsigned who, unsigned image, input *in)
{
    static content wanted;
    bool linked;
    make_content(w, in, &wanted);
    size_t piece = 1 + take16(in) % 9000;
    w->r.repo = handle(w, who);
    arm(w);
    gd_status s = repository_put(&w->r, name_of(image), scope_of(w, image),
                                 wanted.data, wanted.length, piece, &linked);
    w->r.repo = NULL;
    settle_put(w, image, &wanted, s, linked);
}

static void
begin(world *w, unsigned who, unsigned which, input *in)
{
    open_transaction *t = &w->transactions[which % TRANSACTIONS];
    if (t->transaction != NULL) {
        return;
    }
    t->handle = who % HANDLES;
    t->image = take8(in) % IMAGES;
    t->written.length = 0;
    gd_repo *repo = handle(w, who);
    arm(w);
    gd_status s = gd_transaction_begin(repo, name_of(t->image), "p",
                                       scope_of(w, t->image),
                                       &t->transaction, &w->r.err);
    must_have_words(w, s);
    MUST(s == GD_OK || w->disturbed ||
         (s == GD_EXISTS && w->images[t->image].present) ||
         (s == GD_NOSPACE && w->r.m.space == 0));
    if (s != GD_OK) {
        t->transaction = NULL;
    }
    calm(w);
}

static void
end(open_transaction *t)
{
    gd_transaction_end(t->transaction);
    t->transaction = NULL;
}

static void
write_more(world *w, unsigned which, input *in)
{
    static content more;
    open_transaction *t = &w->transactions[which % TRANSACTIONS];
    if (t->transaction == NULL) {
        return;
    }
    make_content(w, in, &more);
    size_t room = LENGTH_MAX - t->written.length;
    size_t length = more.length < room ? more.length : room;
    arm(w);
    gd_status s = gd_transaction_write(t->transaction, more.data, length,
                                       &w->r.err);
    must_have_words(w, s);
    MUST(s == GD_OK || w->disturbed || w->r.m.space == 0);
    memcpy(t->written.data + t->written.length, more.data, length);
    t->written.length += length;
    if (s != GD_OK) {
        end(t);
    }
    calm(w);
}

static void
commit(world *w, unsigned which)
{
    static content wanted;
    gd_recipe_header header;
    bool linked;
    open_transaction *t = &w->transactions[which % TRANSACTIONS];
    if (t->transaction == NULL) {
        return;
    }
    unsigned image = t->image;
    wanted = t->written;
    wanted.present = true;
    arm(w);
    gd_status s =
        gd_transaction_commit(t->transaction, &header, &linked, &w->r.err);
    end(t);
    settle_put(w, image, &wanted, s, linked);
}

/* ---- by fingerprints ---- */

/* Copies one page of another image's blocks: found blocks are added by
 * address, the rest by its bytes. */
static gd_status
copy_page(world *w, gd_transaction *transaction, const uint8_t *page,
          size_t length, const content *from)
{
    static uint32_t lengths[LENGTH_MAX];
    static gd_fingerprint fps[LENGTH_MAX];
    static gd_address addresses[LENGTH_MAX];
    gd_status s = GD_OK;
    for (size_t at = 0; s == GD_OK && at < length;) {
        uint64_t offset = gd_get64(page + at);
        uint64_t bytes = gd_get64(page + at + 8);
        uint32_t blocks = gd_get32(page + at + 16);
        at += 24;
        if (blocks == 0) {
            s = gd_transaction_add_zeros(transaction, bytes, &w->r.err);
            continue;
        }
        for (uint32_t i = 0; i < blocks; i++, at += 36) {
            memcpy(&fps[i], page + at, GD_FINGERPRINT_SIZE);
            lengths[i] = gd_get32(page + at + 32);
        }
        s = gd_transaction_find(transaction, fps, lengths, blocks, addresses,
                                &w->r.err);
        for (uint32_t i = 0; s == GD_OK && i < blocks; i++) {
            s = addresses[i].group != 0
                    ? gd_transaction_add(transaction, &fps[i], &lengths[i],
                                         &addresses[i], 1, &w->r.err)
                    : gd_transaction_write(transaction, from->data + offset,
                                           lengths[i], &w->r.err);
            offset += lengths[i];
        }
    }
    return s;
}

static gd_status
copy_pages(world *w, gd_image *source, gd_transaction *transaction,
           const content *from)
{
    gd_status s = GD_OK;
    for (uint64_t i = 1; s == GD_OK && i <= gd_image_pages(source); i++) {
        uint8_t *page;
        size_t length;
        s = gd_wire_describe(source, i, &page, &length, &w->r.err);
        if (s == GD_OK) {
            s = copy_page(w, transaction, page, length, from);
            w->r.env->release(w->r.env, page);
        }
    }
    return s;
}

static void
copy_image(world *w, unsigned who, unsigned image, input *in)
{
    gd_image *source;
    gd_transaction *transaction;
    gd_recipe_header header;
    bool linked = false, keep = take8(in) % 4 == 0;
    unsigned from = take8(in) % IMAGES;
    if (!w->images[from].present) {
        return;
    }
    gd_repo *repo = handle(w, who);
    MUST(gd_image_open(repo, name_of(from), NULL, &source, &w->r.err) ==
         GD_OK);
    arm(w);
    gd_status s = gd_transaction_begin(repo, name_of(image), "p",
                                       scope_of(w, image), &transaction,
                                       &w->r.err);
    if (s == GD_OK) {
        s = copy_pages(w, source, transaction, &w->images[from]);
        if (s == GD_OK && keep) {
            s = gd_transaction_sync(transaction, &w->r.err);
        }
        if (s == GD_OK) {
            s = gd_transaction_commit(transaction, &header, &linked,
                                      &w->r.err);
        }
        gd_transaction_end(transaction);
    }
    gd_image_close(source);
    settle_put(w, image, &w->images[from], s, linked);
}

/* ---- deleting and reading ---- */

static void
delete(world *w, unsigned who, unsigned image)
{
    gd_repo *repo = handle(w, who);
    arm(w);
    gd_status s = gd_image_delete(w->r.env, repo->root, &repo->params,
                                  name_of(image), NULL, &w->r.err);
    must_have_words(w, s);
    bool disturbed = w->disturbed;
    calm(w);
    if (s == GD_OK) {
        MUST(w->images[image].present);
        w->images[image].present = false;
    } else if (disturbed && w->images[image].present) {
        find_out(w, image, &w->images[image]);
    } else {
        MUST(!w->images[image].present && (disturbed || s == GD_NOTFOUND));
    }
    check_image(w, who + 1, image);
}

static void
read_range(world *w, gd_image *image, const content *wanted, input *in)
{
    static uint8_t out[LENGTH_MAX + 1];
    size_t done;
    uint64_t offset = take16(in) % (wanted->length + 2);
    size_t length = take16(in) % sizeof out;
    arm(w);
    gd_status s = gd_image_read(image, out, length, offset, &done, &w->r.err);
    must_have_words(w, s);
    MUST(s == GD_OK || w->disturbed);
    if (s == GD_OK) {
        uint64_t left = offset < wanted->length ? wanted->length - offset : 0;
        MUST(done == (length < left ? length : left));
        MUST(done == 0 || memcmp(out, wanted->data + offset, done) == 0);
    }
}

static void
open_image(world *w, unsigned who, unsigned which, input *in)
{
    open_reader *reader = &w->readers[which % READERS];
    unsigned image = take8(in) % IMAGES;
    if (reader->image != NULL) {
        gd_image_close(reader->image);
        reader->image = NULL;
        return;
    }
    gd_status s = gd_image_open(handle(w, who), name_of(image), NULL,
                                &reader->image, &w->r.err);
    MUST(s == (w->images[image].present ? GD_OK : GD_NOTFOUND));
    if (s != GD_OK) {
        reader->image = NULL;
    }
    reader->wanted = w->images[image];
}

static void
read_open(world *w, unsigned which, input *in)
{
    open_reader *reader = &w->readers[which % READERS];
    if (reader->image != NULL) {
        read_range(w, reader->image, &reader->wanted, in);
        calm(w);
    }
}

/* ---- maintaining ---- */

static void
maintain(world *w, uint8_t what, unsigned who, uint8_t on, input *in)
{
    size_t spooled;
    gd_repo *repo = handle(w, who);
    uint32_t group = 1 + on % 8U;
    gd_status s = GD_OK;
    arm(w);
    switch (what % 5) {
    case 0:
        s = maintainer_collect(repo, on, (gd_codec)(take8(in) % 3), &spooled,
                               &w->r.err);
        break;
    case 1:
        s = maintainer_merge(repo, name_of(on % IMAGES), &w->r.err);
        s = s == GD_NOTFOUND || s == GD_BUSY ? GD_OK : s;
        break;
    case 2:
        s = maintainer_evacuate(repo, group, &w->r.err);
        break;
    case 3:
        s = maintainer_spare(repo, group, take8(in), &w->r.err);
        s = s == GD_INVALID && !gd_digest_is_cryptographic(repo->digest)
                ? GD_OK
                : s;
        break;
    default:
        calm(w); /* a fault would look like damage */
        s = maintainer_scrub(repo, &w->r.err);
    }
    must_have_words(w, s);
    if (s != GD_OK && !w->disturbed && w->r.m.space != 0) {
        fprintf(stderr, "maintenance: %s\n", w->r.err.text);
    }
    MUST(s == GD_OK || w->disturbed ||
         (s == GD_NOSPACE && w->r.m.space == 0));
    calm(w);
    for (unsigned i = 0; i < IMAGES; i++) {
        check_image(w, i, i);
    }
}

static void
change_filter(world *w, unsigned who, uint8_t how)
{
    gd_followed followed;
    gd_repo *repo = handle(w, who);
    switch (how % 4) {
    case 0:
        (void)memory_remove(&w->r.m, FILTER_PATH);
        break;
    case 1:
        if (repo->filter != NULL && gd_filter_rebuild_lock(repo->filter)) {
            gd_filter_clear(repo->filter);
            gd_filter_rebuild_unlock(repo->filter);
        }
        break;
    case 2:
        if (repo->filter != NULL) {
            MUST(gd_follow(repo, 3, &followed, &w->r.err) == GD_OK);
        }
        break;
    default:
        close_handles(w);
        w->filter = !w->filter;
    }
}

/* ---- the program ---- */

static void
operate(world *w, uint8_t what, uint8_t on, input *in)
{
    unsigned who = on >> 7, which = on & 127;
    switch (what % 16) {
    case 0:
    case 1:
        put(w, who, which % IMAGES, in);
        break;
    case 2:
        begin(w, who, which, in);
        break;
    case 3:
        write_more(w, which, in);
        break;
    case 4:
        commit(w, which);
        break;
    case 5:
        if (w->transactions[which % TRANSACTIONS].transaction != NULL) {
            arm(w);
            end(&w->transactions[which % TRANSACTIONS]);
            calm(w);
        }
        break;
    case 6:
        delete(w, who, which % IMAGES);
        break;
    case 7:
        open_image(w, who, which, in);
        break;
    case 8:
        read_open(w, which, in);
        break;
    case 9:
    case 10:
        maintain(w, what / 16, who, (uint8_t)which, in);
        break;
    case 11:
        copy_image(w, who, which % IMAGES, in);
        break;
    case 12:
        change_filter(w, who, (uint8_t)which);
        break;
    case 13:
        close_handles(w);
        break;
    case 14:
        w->r.m.space = (which & 1) != 0 ? 0 : UINT64_C(1) << 39;
        break;
    default:
        w->fault = 1 + which % 9;
        w->fault_at = take8(in);
    }
}

/* The spool is empty, and all blocks left in groups verify. */
static void
finish(world *w)
{
    size_t spooled;
    static content last;
    bool linked;
    w->fault = 0;
    w->r.m.space = UINT64_C(1) << 39;
    close_handles(w);
    w->r.repo = handle(w, 0);
    /* This recovers the tails of dead writers. */
    last.length = LENGTH_MAX;
    repository_fill(last.data, last.length, 8, 1000, 99);
    MUST(repository_put(&w->r, "last", &gd_global_scope, last.data,
                        last.length, 5000, &linked) == GD_OK);
    w->r.repo = NULL;
    for (int i = 0; i < 2; i++) {
        gd_status s = maintainer_collect(handle(w, 0),
                                         i * MAINTAINER_UNLINK,
                                         GD_CODEC_NONE, &spooled, &w->r.err);
        if (s != GD_OK) {
            fprintf(stderr, "collecting: %s\n", w->r.err.text);
        }
        MUST(s == GD_OK && spooled == 0);
    }
    MUST(memory_count(&w->r.m, REPOSITORY_PATH "/spool", "", NULL) == 0);
    MUST(maintainer_scrub(handle(w, 1), &w->r.err) == GD_OK);
    for (unsigned i = 0; i < IMAGES; i++) {
        check_image(w, i, i);
    }
    close_handles(w);
}

static void
choose_parameters(world *w, input *in)
{
    static const char *const digests[] = {"sha256", "sha256", "weak-8",
                                          "xxh3-128"};
    uint8_t how = take8(in), sizes = take8(in);
    gd_params *p = &w->r.params;
    snprintf(p->digest, sizeof p->digest, "%s", digests[how % 4]);
    p->by_value = how % 4 > 1 || (how & 4) != 0;
    p->codec = (gd_codec)((how >> 3) % 3);
    p->block_size = (sizes & 1) != 0 ? 1024 : 512;
    p->segment_size = p->block_size << (sizes >> 1) % 6;
    p->group_slots = 64 + (sizes >> 5) * 5;
    p->reserve = 1 << 20;
    w->filter = (how & 64) == 0;
    w->scopes = (how & 128) != 0;
    uint16_t cuts = take16(in);
    if (cuts % 3 == 1) {
        p->cut_minimum = 64 + cuts % 64;
        p->cut_average = 128 << cuts % 2;
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static world w;
    input in = {data, size};
    memset(&w, 0, sizeof w);
    repository_init(&w.r);
    choose_parameters(&w, &in);
    for (unsigned i = 0; i < OPERATIONS && in.left > 0; i++) {
        uint8_t what = take8(&in), on = take8(&in);
        operate(&w, what, on, &in);
    }
    finish(&w);
    repository_destroy(&w.r);
    return 0;
}
