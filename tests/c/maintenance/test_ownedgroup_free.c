/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_ownedgroup_free.c - freeing a group's slots: its entries, the order in
 * which changes reach the disk, and the bytes that are punched and above all
 * those that are not.
 */
#include "engine/maintenance/ownedgroup.h"

#include "engine/maintenance/grouprewrite.h"
#include "engine/write/appender.h"
#include "tests/c/support/check.h"
#include "tests/c/support/owned_fixture.h"

#define GROUP_2 "groups/00000002"

static owned_fixture t;

/* ---- freeing ---- */

TEST_WITH(test_free, owned_setup(&t), owned_teardown(&t))
{
    uint32_t freed;
    gd_published record;
    gd_entry entries[SLOTS];
    static const gd_fingerprint zeros;
    gd_published old = record_of(&t);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    require_freed(&t, 10, 20);
    read_group(&t, &record, entries);
    CHECK(record.generation != old.generation);
    CHECK_INT(record.sequence, old.sequence + 1);
    CHECK(record.count == old.count && record.end == old.end &&
          record.flags == old.flags);
    for (uint32_t i = 0; i < SLOTS; i++) {
        CHECK_INT(entries[i].state,
                  i >= 10 && i < 30 ? GD_ENTRY_FREED : GD_ENTRY_LIVE);
    }
    /* It keeps no other field. */
    CHECK(gd_fingerprint_equal(&entries[10].fingerprint, &zeros));
    CHECK(entries[10].segment == 0 && entries[10].checksum == 0 &&
          entries[10].plain_length == 0 && entries[10].stored_length == 0);
    /* A free slot is not freed again, nor is any byte written for it. */
    fault_env_start_trace(&t.x.f);
    CHECK_INT(free_slots(&t, 10, 20, &freed), GD_OK);
    CHECK_INT(freed, 0);
    scratch_check_trace(&t.x, "");
    CHECK_INT(free_slots(&t, 5, 10, &freed), GD_OK);
    CHECK_INT(freed, 5);
    gd_owned_group_close(t.owned);
    CHECK(!is_image(&t, "one", t.one, LENGTH));
    CHECK(is_image(&t, "two", t.two, LENGTH / 2));
    /* The block can be stored again as a whole. */
    CHECK_INT(put_image(t.repo, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.one, LENGTH));
}

TEST_WITH(test_only_published_slots, owned_setup(&t), owned_teardown(&t))
{
    uint32_t freed;
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    CHECK_INT(t.owned->leased->published.count, SLOTS / 2);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(free_slots(&t, 0, SLOTS / 2 + 1, &freed), GD_INVALID);
    CHECK_CONTAINS(t.x.err.text, "slot 32 of groups/00000002");
    static const uint32_t far[] = {0, UINT32_MAX};
    CHECK_INT(gd_owned_group_free(t.owned, far, 2, &freed, &t.x.err),
              GD_INVALID);
    scratch_check_trace(&t.x, "");
    CHECK_INT(free_slots(&t, 0, SLOTS / 2, &freed), GD_OK);
    gd_owned_group_close(t.owned);
}

/* The generation is durable before any entry changes, entries before any hole;
 * see ownedgroup.h for the damage by each wrong order. */
TEST_WITH(test_order, owned_setup(&t), owned_teardown(&t))
{
    uint32_t freed;
    uint64_t bytes;
    gd_published old = record_of(&t);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    fault_env_start_trace(&t.x.f);
    require_freed(&t, 0, 16);
    scratch_check_trace(&t.x, FREE_ORDER);
    (void)owned_punch(&t);
    scratch_check_trace(&t.x, FREE_ORDER " punch");
    gd_owned_group_close(t.owned);
    for (uint64_t n = 1; n <= 5; n++) {
        fault_call call = n % 2 == 1 ? FAULT_FDATASYNC : FAULT_PWRITEV;
        unsigned live = count_state(&t, GD_ENTRY_LIVE);
        uint64_t generation = record_of(&t).generation;
        CHECK_INT(owned_enter(&t, 1), GD_OK);
        fault_env_fail(&t.x.f, call, (n + 1) / 2, EIO, false);
        fault_env_start_trace(&t.x.f);
        CHECK_INT(free_slots(&t, 16 + (uint32_t)n, 1, &freed), GD_IO);
        CHECK_INT(freed, 0);
        CHECK_INT(count_state(&t, GD_ENTRY_LIVE), live - (n == 5));
        CHECK((record_of(&t).generation != generation) == (n > 2));
        /* No block may be punched because of it. */
        CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_CLOSED);
        CHECK_INT(free_slots(&t, 20, 1, &freed), GD_CLOSED);
        gd_owned_group_close(t.owned);
    }
    CHECK_INT(record_of(&t).sequence, old.sequence + 4);
}

/* The handle of another process has a fingerprint table cached. However the
 * collector fails while it frees, that table is not used as soon as an entry
 * is free (N7.2). */
TEST(test_cached_stores)
{
    for (uint64_t n = 1; n <= 6; n++) {
        owned_fixture t;
        gd_fptable *store;
        bool cold;
        uint32_t freed;
        owned_setup(&t);
        gd_repo *other = scratch_repo_filter(&t.x);
        CHECK_INT(gd_fpcache_store(other->cache, 1, &store, &cold, &t.x.err),
                  GD_OK);
        gd_fpcache_return_store(other->cache, store);
        CHECK_INT(gd_fpcache_store(t.repo->cache, 1, &store, &cold, &t.x.err),
                  GD_OK);
        gd_fpcache_return_store(t.repo->cache, store);
        CHECK_INT(owned_enter(&t, 1), GD_OK);
        fault_env_fail(&t.x.f, n % 2 == 1 ? FAULT_FDATASYNC : FAULT_PWRITEV,
                       (n + 1) / 2, EIO, false);
        CHECK_INT(free_slots(&t, 0, 16, &freed), n == 6 ? GD_OK : GD_IO);
        fault_env_heal(&t.x.f);
        gd_owned_group_close(t.owned);
        bool changed = count_state(&t, GD_ENTRY_FREED) > 0;
        gd_repo *handles[] = {other, t.repo};
        for (int i = 0; i < 2; i++) {
            CHECK_INT(gd_fpcache_store(handles[i]->cache, 1, &store, &cold,
                                       &t.x.err), GD_OK);
            CHECK(cold || !changed);
            gd_fpcache_return_store(handles[i]->cache, store);
        }
        CHECK_INT(put_image(other, "again", t.one, LENGTH, LENGTH, NULL,
                            &t.x.err), GD_OK);
        CHECK(is_image(&t, "again", t.one, LENGTH));
        gd_repo_close(other);
        owned_teardown(&t);
    }
}

/* A generation that another host saw, and that a crash, or the failed
 * fdatasync itself, then undid, is not used for later freed entries. */
TEST_WITH(test_generation_that_is_lost, owned_setup(&t), owned_teardown(&t))
{
    enum { RECORDS = 1024 };
    gd_fptable *store;
    bool cold;
    uint32_t freed;
    uint8_t records[RECORDS];
    gd_repo *other = scratch_repo_filter(&t.x);
    scratch_read(&t.x, GROUP_1, records, RECORDS, 512);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 2, EIO, false);
    CHECK_INT(free_slots(&t, 0, 16, &freed), GD_IO);
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_fpcache_store(other->cache, 1, &store, &cold, &t.x.err),
              GD_OK);
    gd_fpcache_return_store(other->cache, store);
    scratch_write(&t.x, GROUP_1, records, RECORDS, 512);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    require_freed(&t, 0, 16);
    gd_owned_group_close(t.owned);
    CHECK_INT(gd_fpcache_store(other->cache, 1, &store, &cold, &t.x.err),
              GD_OK);
    CHECK(cold);
    gd_fpcache_return_store(other->cache, store);
    CHECK_INT(put_image(other, "again", t.one, LENGTH, LENGTH, NULL,
                        &t.x.err), GD_OK);
    CHECK(is_image(&t, "again", t.one, LENGTH));
    gd_repo_close(other);
}

/* A sync that failed leaves entries that no upload reuses, since the group is
 * poisoned: the collector frees them (I8). */
TEST_WITH(test_tail_of_a_poisoned_group, owned_setup(&t), owned_teardown(&t))
{
    uint8_t *three = malloc(LENGTH);
    fill_random(three, LENGTH, 3);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    CHECK_INT(put_image(t.repo, "three", three, LENGTH / 4, LENGTH, NULL,
                        &t.x.err), GD_IO);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    /* They are written again, and synced separately, before they are
     * published. */
    scratch_check_trace(&t.x, "pwritev fdatasync pwritev");
    CHECK_INT(t.owned->leased->published.count, SLOTS / 2 + SLOTS / 4);
    CHECK_INT(t.owned->leased->published.flags, GD_GROUP_POISONED);
    require_freed(&t, SLOTS / 2, SLOTS / 4);
    CHECK(owned_punch(&t) > 0);
    gd_owned_group_close(t.owned);
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    uint64_t bytes;
    CHECK_INT(gd_group_rewrite_owned(t.owned, NULL, &bytes, &t.x.err),
              GD_OK);
    gd_owned_group_close(t.owned);
    CHECK(is_image(&t, "two", t.two, LENGTH / 2));
    free(three);
}

/* The mark was lost, too, so a writer may use the group some day. The
 * collector is first. */
TEST_WITH(test_tail_of_a_group_whose_poison_is_lost, owned_setup(&t),
          owned_teardown(&t))
{
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    /* The writes are of data, of entries, and then of the mark. */
    fault_env_fail(&t.x.f, FAULT_PWRITEV, 3, EIO, false);
    uint8_t *three = malloc(LENGTH);
    fill_random(three, LENGTH, 3);
    CHECK_INT(put_image(t.repo, "three", three, LENGTH / 4, LENGTH, NULL,
                        &t.x.err), GD_IO);
    fault_env_heal(&t.x.f);
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    CHECK_INT(t.owned->leased->published.flags, 0);
    CHECK_INT(t.owned->leased->published.count, SLOTS / 2 + SLOTS / 4);
    require_freed(&t, SLOTS / 2, SLOTS / 4);
    CHECK(owned_punch(&t) > 0);
    gd_owned_group_close(t.owned);
    CHECK(is_image(&t, "two", t.two, LENGTH / 2));
    free(three);
}

/* The bytes are of a writer that was killed before its sync point. */
TEST_WITH(test_bytes_that_no_entry_names, owned_setup(&t), owned_teardown(&t))
{
    enum { MORE = 100000 };
    uint8_t *more = calloc(1, MORE);
    int64_t size = scratch_size(&t.x, GROUP_2);
    scratch_write(&t.x, GROUP_2, more, MORE, (uint64_t)size);
    CHECK_INT(scratch_size(&t.x, GROUP_2), size + MORE);
    uint64_t bytes;
    CHECK_INT(owned_enter(&t, 2), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FTRUNCATE, 1, EIO, false);
    CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_IO);
    CHECK_CONTAINS(t.x.err.text, GROUP_2);
    CHECK(owned_punch(&t) > 0);
    CHECK_INT(scratch_size(&t.x, GROUP_2), size);
    gd_owned_group_close(t.owned);
    CHECK(is_image(&t, "two", t.two, LENGTH / 2));
    free(more);
}

/* Entries that an earlier collector freed may not be on the disk, if its
 * fdatasync failed: they are written again before any block is punched. */
TEST_WITH(test_freed_by_another, owned_setup(&t), owned_teardown(&t))
{
    uint32_t freed;
    uint64_t bytes;
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 3, EIO, false);
    CHECK_INT(free_slots(&t, 0, 20, &freed), GD_IO);
    gd_owned_group_close(t.owned);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    fault_env_start_trace(&t.x.f);
    CHECK(owned_punch(&t) > 0);
    scratch_check_trace(&t.x, "pwritev fdatasync punch");
    (void)owned_punch(&t);
    scratch_check_trace(&t.x, "pwritev fdatasync punch");
    gd_owned_group_close(t.owned);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    fault_env_fail(&t.x.f, FAULT_FDATASYNC, 1, EIO, false);
    fault_env_start_trace(&t.x.f);
    CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_IO);
    scratch_check_trace(&t.x, "pwritev");
    CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_CLOSED);
    gd_owned_group_close(t.owned);
}

/* ---- punching ---- */

TEST_WITH(test_punch, owned_setup(&t), owned_teardown(&t))
{
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    CHECK_INT(owned_punch(&t), 0);
    require_freed(&t, 16, 16); /* the second segment, and */
    require_freed(&t, 40, 1);  /* one of the third */
    CHECK_INT(owned_punch(&t), STORED - BLOCK); /* whole blocks within */
    CHECK_INT(owned_punch(&t), 0);
    CHECK(is_untouched(&t, segment_offset(0), segment_offset(1)));
    CHECK(is_untouched(&t, segment_offset(2), segment_offset(4)));
    CHECK(!is_untouched(&t, segment_offset(1), segment_offset(2)));
    CHECK_INT(scratch_size(&t.x, GROUP_1), t.size);
    require_freed(&t, 0, 16);
    require_freed(&t, 32, 8);
    require_freed(&t, 41, 7);
    /* Neighbours join, with the rest between them. */
    CHECK_INT(owned_punch(&t), 2 * STORED + BLOCK);
    CHECK(is_untouched(&t, segment_offset(3), segment_offset(4)));
    require_freed(&t, 48, 16);
    CHECK(owned_punch(&t) > 0);
    gd_owned_group_close(t.owned);
    CHECK_INT(record_of(&t).count, SLOTS);
    CHECK_INT(count_state(&t, GD_ENTRY_FREED), SLOTS);
}

/* A committed recipe may name entries beyond the published count (N7.3). */
TEST(test_tail_is_recovered)
{
    for (int below = 0; below < 2; below++) {
        owned_fixture t;
        owned_setup(&t);
        set_record(&t, 48, segment_offset(below ? 4 : 3));
        CHECK_INT(owned_enter(&t, 1), GD_OK);
        require_freed(&t, 0, 48);
        CHECK(owned_punch(&t) > 0);
        CHECK(is_untouched(&t, segment_offset(3), segment_offset(4)));
        gd_owned_group_close(t.owned);
        CHECK_INT(count_state(&t, GD_ENTRY_LIVE), 16);
        owned_teardown(&t);
    }
    /* No entry names the bytes behind the end. */
    owned_fixture t;
    owned_setup(&t);
    set_record(&t, 64, segment_offset(2));
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    require_freed(&t, 0, 32);
    CHECK(owned_punch(&t) > 0);
    CHECK(is_untouched(&t, segment_offset(2), segment_offset(4)));
    require_freed(&t, 32, 32);
    CHECK(owned_punch(&t) > 0);
    CHECK_INT(scratch_size(&t.x, GROUP_1), segment_offset(2));
    gd_owned_group_close(t.owned);
    /* Neither record is valid: all slots are a tail. */
    scratch_flip(&t.x, GROUP_1, 512, 1);
    scratch_flip(&t.x, GROUP_1, 1024, 1);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    CHECK_INT(t.owned->leased->published.count, SLOTS);
    uint32_t freed;
    CHECK_INT(free_slots(&t, 0, 1, &freed), GD_OK);
    CHECK_INT(freed, 0);
    CHECK_INT(owned_punch(&t), 0);
    gd_owned_group_close(t.owned);
    owned_teardown(&t);
}

TEST_WITH(test_invalid_entries, owned_setup(&t), owned_teardown(&t))
{
    scratch_flip(&t.x, GROUP_1, gd_entry_offset(17) + 3, 1);
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    require_freed(&t, 0, 16);
    /* The bytes that it names are unknown: so none is given back. */
    fault_env_start_trace(&t.x.f);
    CHECK_INT(owned_punch(&t), 0);
    scratch_check_trace(&t.x, "");
    CHECK(is_untouched(&t, segment_offset(0), segment_offset(4)));
    CHECK_INT(count_state(&t, GD_ENTRY_INVALID), 1); /* it is unchanged */
    require_freed(&t, 17, 1); /* no recipe names it */
    CHECK(owned_punch(&t) > 0);
    CHECK(is_untouched(&t, segment_offset(1), segment_offset(4)));
    gd_owned_group_close(t.owned);
}

TEST_WITH(test_punch_fails, owned_setup(&t), owned_teardown(&t))
{
    uint64_t bytes;
    CHECK_INT(owned_enter(&t, 1), GD_OK);
    require_freed(&t, 0, 16);
    fault_env_fail(&t.x.f, FAULT_PUNCH, 1, EOPNOTSUPP, false);
    CHECK_INT(owned_punch(&t), 0); /* rewriting gives it back */
    fault_env_fail(&t.x.f, FAULT_PUNCH, 1, EIO, false);
    CHECK_INT(gd_owned_group_punch(t.owned, &bytes, &t.x.err), GD_IO);
    CHECK_CONTAINS(t.x.err.text, GROUP_1);
    fault_env_fail(&t.x.f, FAULT_PUNCH, 1, EINTR, false);
    CHECK(owned_punch(&t) > 0);
    gd_owned_group_close(t.owned);
}
