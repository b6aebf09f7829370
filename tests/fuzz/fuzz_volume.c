/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_volume.c - a volume's directory of any journals: opening checks them,
 * never reads out of bounds, and an opened volume can be read, written,
 * closed, opened again and deleted.
 *
 * Input: flags (1: two journals, 2: three; 4: heads are unchanged; 8: zeros
 * follow the records), then the journals, and then patches: the journal (1),
 * the place (2), the byte (1). A journal: number (1), needed (1), its head's
 * fields (as in_head reads them), marks, and records.
 */
#include "engine/base/coding.h"
#include "engine/format/volumehead.h"
#include "engine/format/volumerecord.h"
#include "engine/volume/volume.h"
#include "engine/volume/volumenames.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/repository.h"

enum {
    JOURNALS = 3,
    MARKS = 4,
    RECORDS = 12,
    MAX_LENGTH = 1024,        /* bytes of a record */
    MAX_SIZE = 1 << 20,        /* bytes of a volume, in most cases */
    ROOM = 8192 + RECORDS * (GD_RECORD_HEAD + MAX_LENGTH),
};

typedef struct file {
    char path[MEMORY_PATH];
    uint8_t data[ROOM];
    size_t length;
} file;

/* ---- the files ---- */

static void
take_head(const repository *r, input *in, uint8_t flags, gd_volume_head *head)
{
    *head = (gd_volume_head){.journal = take8(in),
                             .needed = take8(in),
                             .before = take16(in),
                             .volume_id = {1, 2, 3},
                             .seed = 7};
    memcpy(head->repository_id, r->params.repository_id, GD_ID_SIZE);
    uint64_t sectors = take16(in), base = take16(in);
    uint8_t part = take8(in), state = take8(in);
    head->before_durable = part / 4 % 4; /* how; see end_head */
    head->size = sectors * GD_VOLUME_SECTOR;
    head->base_size = base;
    head->part_size = UINT64_C(1) << (16 + part % 4);
    head->state = state < 200 ? GD_VOLUME_READY
                              : (gd_volume_state)(state % 5);
    head->marks = take8(in) % MARKS;
    if ((flags & 4) == 0) {
        head->journal = 1 + head->journal % 8;
        head->needed = 1 + head->needed % head->journal;
        head->size = (1 + sectors % (MAX_SIZE / GD_VOLUME_SECTOR)) *
                     GD_VOLUME_SECTOR;
        head->base_size = base % 5 == 0 ? base % head->size : 0;
        head->marks %= 1 + (uint32_t)gd_volume_head_parts(head);
    }
}

/* Chooses what the head says about the journal before, which may be as long as
 * this one. */
static void
end_head(gd_volume_head *head, uint64_t end)
{
    uint64_t how = head->before_durable;
    if (head->before > 60000) {
        head->before = 0;
    } else if (head->before > 30000) {
        head->before = end;
    }
    head->before_durable = how == 0   ? head->before
                           : how == 1 ? head->before > 0
                           : how == 2 ? head->before / 2
                                      : head->before + head->journal % 2;
}

static size_t
take_record(input *in, const gd_volume_head *head, uint64_t sequence,
            uint8_t *out, uint64_t at)
{
    uint8_t kind = take8(in), odd = take8(in);
    uint64_t start = gd_volume_head_records_start(head->marks);
    gd_record record = {.kind = (gd_record_kind)(kind % 6),
                        .sequence = sequence + (odd % 16 == 1),
                        .offset = (uint64_t)take16(in) * 32,
                        .length = take16(in),
                        .durable = odd % 16 == 2   ? take16(in)
                                   : odd % 16 == 4 ? start
                                                   : at};
    if (record.kind == GD_RECORD_BYTES) {
        record.length = 1 + record.length % MAX_LENGTH;
        memset(out + GD_RECORD_HEAD, kind, record.length);
        record.checksum = gd_checksum(out + GD_RECORD_HEAD, record.length, 0);
    } else if (record.kind == GD_RECORD_STORED) {
        record.offset = record.length = 0;
    } else if (record.kind == GD_RECORD_MARK) {
        record.offset %= 8;
    }
    gd_record_encode(&record, head->seed + (odd % 16 == 3), out);
    return gd_record_size(&record);
}

static void
make_journal(const repository *r, input *in, uint8_t flags, file *f)
{
    gd_volume_head head;
    gd_volume_mark marks[MARKS];
    char name[GD_NAME_SIZE];
    take_head(r, in, flags, &head);
    for (uint32_t i = 0; i < head.marks; i++) {
        uint8_t mark = take8(in);
        marks[i] = (gd_volume_mark){i + mark % 16 / 15, 1 + mark / 16};
    }
    gd_volume_marks_encode(marks, head.marks, f->data + GD_VOLUME_HEAD);
    head.marks_checksum =
        gd_checksum(f->data + GD_VOLUME_HEAD,
                    (size_t)head.marks * GD_VOLUME_MARK, head.seed);
    uint8_t records = take8(in) % RECORDS;
    size_t at = (size_t)gd_volume_head_records_start(head.marks);
    for (uint64_t i = 0; i < records; i++) {
        at += take_record(in, &head, i + 1, f->data + at, at);
    }
    size_t cut = take8(in) % 64;
    f->length = (flags & 8) != 0 ? ROOM : at - cut;
    end_head(&head, at);
    gd_volume_head_encode(&head, f->data);
    /* Journal 0 has an unknown name, and keeps the directory. */
    gd_volume_journal_name("disk", head.journal == 0 ? 1 : head.journal, name);
    snprintf(f->path, sizeof f->path, REPOSITORY_PATH "/%s", name);
}

static void
make_files(repository *r, input *in)
{
    static file files[JOURNALS];
    uint8_t flags = take8(in);
    size_t count = 1 + flags % 4 % JOURNALS;
    memset(files, 0, sizeof files);
    for (size_t i = 0; i < count; i++) {
        make_journal(r, in, flags, &files[i]);
    }
    while (in->left >= 4) {
        file *f = &files[take8(in) % count];
        f->data[take16(in) % f->length] ^= take8(in);
    }
    memory_mkdir(&r->m, REPOSITORY_PATH "/volumes/disk");
    memory_put(&r->m, REPOSITORY_PATH "/volumes/disk/lock", "", 0);
    for (size_t i = 0; i < count; i++) {
        memory_put(&r->m, files[i].path, files[i].data, files[i].length);
    }
}

/* ---- judging ---- */

static void
must_say(const repository *r, gd_status s)
{
    MUST(s == GD_OK || r->err.text[0] != '\0');
    MUST(s == GD_OK || s == GD_CORRUPT || s == GD_NOTFOUND ||
         s == GD_VERSION || s == GD_INVALID);
}

static bool
note_extent(void *arg, uint64_t offset, uint64_t length, bool zeros)
{
    uint64_t *at = arg;
    (void)zeros;
    MUST(offset == *at && length > 0);
    *at += length;
    return true;
}

static gd_status
open_volume(repository *r, gd_volume **volume)
{
    gd_status s = gd_volume_open(r->repo, "disk", true, volume, &r->err);
    must_say(r, s);
    return s;
}

/* A written sector reads back, even by the next owner. */
static void
use(repository *r, gd_volume *volume)
{
    static uint8_t all[MAX_SIZE];
    static const uint8_t sector[512] = {1, 2, 3};
    uint8_t got[512];
    gd_volume_info info;
    uint64_t at = 0;
    gd_volume_get_info(volume, &info);
    MUST(info.broken[0] == '\0' && info.head.size >= sizeof sector);
    size_t length = info.head.size < MAX_SIZE ? (size_t)info.head.size
                                              : MAX_SIZE;
    must_say(r, gd_volume_read(volume, all, length, 0, &r->err));
    gd_status s = gd_volume_extents(volume, length, 0, note_extent, &at,
                                    &r->err);
    must_say(r, s);
    MUST(s != GD_OK || at == length);
    uint64_t last = info.head.size - sizeof sector;
    MUST(gd_volume_write(volume, sector, sizeof sector, last, &r->err) ==
         GD_OK);
    must_say(r, gd_volume_flush(volume, &r->err));
    must_say(r, gd_volume_checkpoint(volume, &r->err));
    gd_volume_close(volume);
    MUST(open_volume(r, &volume) == GD_OK);
    MUST(gd_volume_read(volume, got, sizeof got, last, &r->err) == GD_OK);
    MUST(memcmp(got, sector, sizeof got) == 0);
    gd_volume_close(volume);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    repository r;
    input in = {data, size};
    gd_volume *volume;
    gd_volume_head head;
    repository_init(&r);
    MUST(repository_open(&r, false) == GD_OK);
    make_files(&r, &in);
    gd_status s = gd_volume_read_head(r.repo, "disk", &head, &r.err);
    must_say(&r, s);
    if (s == GD_OK && open_volume(&r, &volume) == GD_OK) {
        use(&r, volume);
    }
    s = gd_volume_delete(r.repo, "disk", &r.err);
    must_say(&r, s);
    MUST(s != GD_OK || memory_count(&r.m, REPOSITORY_PATH "/volumes/disk", "",
                                    NULL) == 0);
    repository_destroy(&r);
    return 0;
}
