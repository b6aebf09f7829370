/* SPDX-License-Identifier: Apache-2.0 */
/*
 * maintainer.pml - start, rebuild, accounting, collection and merging (N1 to
 * N6, N10).
 *
 * There is one maintainer at a time, since all of them take one lock.  If it is
 * killed, or the machine crashes, another one starts.  No other process
 * reads the catalog, so a change of the maintainer's memory alone is no step.
 * Entries are judged one after the other: a round of the code has the same
 * steps in the same order for each of its entries.
 */

bit fresh = 1; /* no maintainer has died yet */

/* ---- the fence (N5.3) ---- */

inline write_fence()
{
    d_step { fence = 1; fence_may = fence_may | 2 };
    d_step {
        if
        :: !IS(FENCE_NOT_SYNCED) -> fence_may = 2
        :: else
        fi;
        fence_known = 1
    }
}

inline renew_fence()
{
    if
    :: !fence_known && !IS(NO_FENCE) -> write_fence()
    :: else
    fi
}

/* ---- counting (N1, N5.2) ---- */

#define LAST(r) (WANT(r, 1) != 0 -> 1 : 0)
#define SLOT_OF(r, b) (address[2 * (r) + (b)] - 1)

/* A block stands for a page of extents, so an image of two takes two steps. */
inline count_step(r)
{
    if
    :: LEDGER(r) == 0 && LAST(r) == 1 ->
        write_batch(catalog + ONE(SLOT_OF(r, 0)) + LEDGER_ONE(r))
    :: LEDGER(r) == 0 && LAST(r) == 0 ->
        write_batch(catalog + ONE(SLOT_OF(r, 0)) + 2 * LEDGER_ONE(r))
    :: LEDGER(r) == 1 ->
        write_batch(catalog + ONE(SLOT_OF(r, 1)) + LEDGER_ONE(r))
    :: else -> /* only by COUNTED_TWICE */
        write_batch(catalog + ONE(SLOT_OF(r, 0)))
    fi
}

inline uncount_block(s, change)
{
    I9_no_count_is_too_low = (COUNT(s) > 0);
    assert(I9_no_count_is_too_low);
    write_batch((catalog & (~JUDGED)) - ONE(s) - (change))
}

inline uncount_step(r)
{
    if
    :: LEDGER(r) == 2 && LAST(r) == 1 ->
        uncount_block(SLOT_OF(r, 1), LEDGER_ONE(r))
    :: LEDGER(r) == 2 && LAST(r) == 0 ->
        uncount_block(SLOT_OF(r, 0), 2 * LEDGER_ONE(r))
    :: LEDGER(r) == 1 -> uncount_block(SLOT_OF(r, 0), LEDGER_ONE(r))
    :: else -> uncount_block(SLOT_OF(r, 0), 0)
    fi
}

#define IS_WHOLE(r) ((IS(OLD_RECIPE_JUDGED) && kept -> old_whole : whole) & \
                     BIT(r))
#define IS_TO_BE_COUNTED(r) (live && IS_WHOLE(r) && LEDGER(r) != 2)
#define IS_TO_BE_UNCOUNTED(r) (!live && LEDGER(r) != 0 && \
    !(LEDGER(r) == 1 && IS(COUNTED_IN_PART_NOT_TAKEN_BACK)))

inline batch_step(r)
{
    if
    :: IS(NOT_COUNTED)
    :: !IS(NOT_COUNTED) && IS_TO_BE_COUNTED(r) -> count_step(r)
    :: !IS(NOT_COUNTED) && IS_TO_BE_UNCOUNTED(r) -> uncount_step(r)
    :: IS(COUNTED_TWICE) && live && LEDGER(r) == 2 -> count_step(r)
    :: IS(COUNTED_TWICE) && !live && (whole & BIT(r)) && LEDGER(r) == 0 ->
        uncount_step(r)
    :: else
    fi
}

/* N2.3: one image of a rebuild, in one step.  A kill between two pages is the
 * same as one between two images: the catalog is not valid. */
inline rebuild_count(i)
{
    if
    :: images[i] != 0 && (whole & BIT(images[i])) &&
       LEDGER(images[i]) == 0 ->
        catalog = catalog + ONE(SLOT_OF(images[i], 0)) +
            (LAST(images[i]) == 1 -> ONE(SLOT_OF(images[i], 1)) : 0) +
            2 * LEDGER_ONE(images[i])
    :: else
    fi
}

/* ---- collecting ---- */

#define NAMES(r, s) (address[2 * (r)] == (s) + 1 || \
                     address[2 * (r) + 1] == (s) + 1)
#define PINNED(s) (((pinned & 2) && NAMES(1, s)) || \
                   ((pinned & 4) && NAMES(2, s)) || \
                   ((pinned & 8) && NAMES(3, s)) || \
                   ((pinned & 16) && NAMES(4, s)))
#define USES(i, s) (images[i] != 0 && NAMES(images[i], s))
#define TRUTH(s) ((USES(0, s) -> 1 : 0) + (USES(1, s) -> 1 : 0))
#define BEGUN(r) (LEDGER(r) == 1 && !(pinned & BIT(r)))

/* First step of a process that holds the locks (I4, N12.6, N7.3). */
inline enter_group()
{
    own = 1;
    lease = ME(MAINTAINER);
    owner = ME(MAINTAINER);
    group = (IS(OPENED_BEFORE_THE_LOCKS) -> group : file);
    if
    :: file == 1 && unsettled && !IS(NEXT_HOLDER_DOES_NOT_SETTLE) ->
        file_may = BIT(file);
        unsettled = 0
    :: else
    fi;
    n = published[group];
    do
    :: n < SLOTS ->
        if
        :: state[AT(group, n)] != EMPTY ->
            state[AT(group, n)] =
                (LIVE(state[AT(group, n)]) &&
                 state[AT(group, n)] != data[AT(group, n)] -> DAMAGED :
                 state[AT(group, n)]);
            dirty = dirty | BIT(AT(group, n));
            published[group] = n + 1;
            catalog = catalog & (~JUDGED)
        :: else
        fi;
        n++
    :: else -> break
    od;
    skip
}

/* Finds slots that may be freed, and freed ones that have bytes (N6.4). */
inline look_for_unused()
{
    unused = 0;
    n = 0;
    do
    :: n < SLOTS ->
        I9_no_count_is_too_low = (COUNT(n) >= TRUTH(n) || PINNED(n));
        assert(I9_no_count_is_too_low);
        if
        :: (!READS_OLD(OLD_ENTRIES_COLLECTED) || (n < old_published &&
            LIVE(old_state[n]))) &&
           n < published[group] && COUNT(n) == 0 && !PINNED(n) &&
           (LIVE(state[AT(group, n)]) || state[AT(group, n)] == DAMAGED) ->
            unused = unused | BIT(n)
        :: state[AT(group, n)] == FREED && data[AT(group, n)] != 0 ->
            unused = unused | BIT(n)
        :: else
        fi;
        n++
    :: else -> break
    od;
    if
    :: !IS(BEGUN_NOT_PINNED) && (BEGUN(1) || BEGUN(2) || BEGUN(3) ||
                                 BEGUN(4)) -> unused = 0; refused = 1
    :: else -> refused = 0
    fi
}

inline free_entries()
{
    n = 0;
    do
    :: n < SLOTS ->
        if
        :: unused & BIT(n) ->
            state[AT(group, n)] = FREED;
            dirty = dirty | BIT(AT(group, n))
        :: else
        fi;
        n++
    :: else -> break
    od;
    check()
}

inline punch()
{
    n = 0;
    do
    :: n < SLOTS ->
        if
        :: state[AT(group, n)] == FREED -> data[AT(group, n)] = 0
        :: else
        fi;
        n++
    :: else -> break
    od;
    check()
}

/* Everything is quiet, and one more run was made. */
inline check_quiet()
{
    n = 0;
    do
    :: n < SLOTS ->
        I8_nothing_leaks = (may_happen & STAYS) ||
            (COUNT(n) == TRUTH(n) && (n >= published[file] ||
             (state[AT(file, n)] != DAMAGED && !LIVE(state[AT(file, n)])) ||
             TRUTH(n) > 0));
        assert(I8_nothing_leaks);
        I8_nothing_leaks = images[n] == 0 || LEDGER(images[n]) == 2;
        assert(I8_nothing_leaks);
        n++
    :: else -> break
    od;
    I8_nothing_leaks = (may_happen & STAYS) ||
        (spool == 0 && entry[0] == 0 && entry[1] == 0);
    assert(I8_nothing_leaks)
}

/* ---- the process ---- */

#define P MAINTAINER
#define LOOK (images[ID(r)] == r)

/* N4.2, N4.4: an entry is left as it is (N6.3). */
inline leave()
{
    if
    :: (whole & BIT(r)) && LEDGER(r) != 2 && !IS(NO_PINS) &&
       !(LEDGER(r) == 1 && IS(BEGUN_NOT_PINNED)) -> pinned = pinned | BIT(r)
    :: else
    fi;
    judging = 0;
    settling = 0;
    e++
}

/* Entries 0 and 1 are those of deletes and merges.  Entry r + 1 is the own name
 * of recipe r.  This opens and checks the next one of the listing (N4.1): an
 * open file that is not locked makes no difference to others. */
inline open_next()
{
    do
    :: e < 6 ->
        r = (e < 2 -> entry[e] : e - 1);
        if
        :: !(todo & BIT(e)) || r == 0 ||
           (e >= 2 && !(spool & BIT(r))) -> e++
        :: else -> break
        fi
    :: else -> break
    od;
    if
    :: e < 6 -> live = LOOK
    :: else -> r = 0; live = 0; todo = 0
    fi
}

inline unlink_entry()
{
    if
    :: e < 2 -> set_entry(e, 0)
    :: else -> unlink_own(r)
    fi
}

inline leave_group()
{
    lease = (lease == ME(P) -> NOBODY : lease);
    owner = (owner == ME(P) -> NOBODY : owner);
    own = 0;
    unused = 0;
    group = 0;
    pinned = 0
}

inline end_merge()
{
    writing = writing & (255 - BIT(MERGED));
    sharing = sharing & (255 - BIT(P));
    using[r] = using[r] & (255 - BIT(P));
    image_lock[i] = (image_lock[i] == ME(P) -> NOBODY : image_lock[i]);
    r = 0; i = 0; k = 0; live = 0
}

#define CAN_ENTER (lease == NOBODY && owner == NOBODY && sharing == 0)
#define CAN_MERGE(j) ((may_happen & MERGES) && merged_from == 0 && \
    running != 0 && images[j] != 0 && owner == NOBODY)
/* The index names blocks as they once were.  Without the verification any slot
 * might come from it. */
#define IS_EQUAL(s) (s != SLOT_OF(images[i], 0) && \
    (FINDS(s, WANT(images[i], 0)) || \
     (IS(REPLACEMENT_NOT_VERIFIED) && s < published[file])))

inline begin_merge(s)
{
    r = images[i];
    using[r] = using[r] | BIT(P);
    merged_from = r;
    address[2 * MERGED] = s + 1;
    address[2 * MERGED + 1] = address[2 * r + 1];
    link_own(MERGED);
    writing = writing | BIT(MERGED);
    sharing = sharing | BIT(P)
}

/* N14.3: each name under its image lock, for which it waits. */
#define CAN_SETTLE (!(may_happen & GAPS) || \
                    (image_lock[0] == NOBODY && image_lock[1] == NOBODY))

inline settle_names()
{
    if
    :: !IS(NAMES_NOT_SETTLED) -> settle_name(0); settle_name(1)
    :: else
    fi
}

proctype Maintain()
{
    byte e;      /* the entry that is judged */
    byte todo;   /* bits: the entries that were listed */
    byte r;      /* its recipe */
    byte i;      /* the image that is merged */
    byte k;      /* the entry of its old recipe */
    byte pinned; /* bits: recipes that entries in use pin (N6.3) */
    byte unused; /* bits: slots to be freed */
    byte group;  /* the file that was opened */
    bit live;
    bit own;     /* it holds the group */
    bit last;    /* everything is quiet */
    bit refused;
    byte n;

    do
    :: over -> break
    :: atomic { !over -> skip }; {
    if
    :: d_step { fresh -> fresh = 0; busy = busy | BIT(P) } -> goto another
    :: d_step { !fresh && (!valid || (behind && !IS(FENCE_NOT_COMPARED))) &&
        CAN_SETTLE ->
        /* N2.1, N2.3, N2.4 */
        busy = busy | BIT(P);
        settle_names();
        catalog = (IS(REBUILD_GOES_ON) && !valid -> catalog : 0);
        older_catalog = 0;
        older_valid = 0;
        valid = IS(REBUILD_VALID_TOO_EARLY);
        behind = 0;
        fence_known = 0 }
    :: d_step { !fresh && valid && (!behind || IS(FENCE_NOT_COMPARED)) &&
        CAN_SETTLE ->
        busy = busy | BIT(P);
        settle_names();
        behind = 0;
        fence_known = (IS(FENCE_NOT_WRITTEN_AT_START) && fence) } ->
        /* N2.2 */
        renew_fence();
        goto another
    fi;
    d_step { rebuild_count(0) };
    d_step { rebuild_count(1) };
    d_step {
        if
        :: !IS(REBUILD_WITHOUT_SYNC) -> fsync_images(); fsync_spool()
        :: else
        fi };
    d_step { write_batch(catalog); valid = 1; older_valid = 0 };
    renew_fence();
another:
    atomic {
    skip;
    d_step { last = (running == 0) };
    if
    /* N6.1.  A lock that is refused, and one that is given back at once, are
     * the same to others: both tries are one step. */
    :: d_step { !IS(OPENED_BEFORE_THE_LOCKS) && !IS(JUDGED_BEFORE_THE_LOCK) &&
        (CAN_ENTER || IS(NO_EXCLUSIVE_LOCK)) -> enter_group() }
    :: IS(OPENED_BEFORE_THE_LOCKS) -> group = file; goto lock_late
    /* Accounting alone. */
    :: (!last || IS(JUDGED_BEFORE_THE_LOCK)) -> skip
    :: d_step { CAN_MERGE(0) -> i = 0 } -> goto merge
    :: d_step { CAN_MERGE(1) -> i = 1 } -> goto merge
    fi;
list:
    /* N6.2.  An entry that comes between the lock and the listing names no
     * block of the group, so these are one step. */
    skip;
    d_step {
        pinned = 0;
        e = 0;
        todo = (entry[0] != 0 -> 1 : 0) | (entry[1] != 0 -> 2 : 0) |
               ((spool & 30) << 1) }
    };
next:
    atomic {
        skip;
        d_step { open_next() };
        if
        :: e == 6 -> goto accounted
        :: e < 6 && e >= 2 && live && !IS(LOCKS_BEFORE_THE_LOOK) -> goto settle
        :: else
        fi
    };
    /* N4.2 */
    if
    :: d_step { ((writing & BIT(r)) || (IS(ONE_BYTE) && using[r])) &&
        !IS(WRITER_NOT_ASKED) -> leave() } -> goto next
    :: d_step { IS(WRITER_NOT_ASKED) ||
        !((writing & BIT(r)) || (IS(ONE_BYTE) && using[r])) ->
        judging = (!IS(WRITERS_LOCK_NOT_HELD) && !IS(WRITER_NOT_ASKED) ->
                   judging | BIT(r) : judging) }
    fi;
    /* An entry that is not live under byte 0 stays so.  So the checks and tries
     * up to the last one can be one step: only the last one counts. */
    atomic {
        if
        :: d_step { IS(LOCKS_BEFORE_THE_LOOK) && live && using[r] -> leave() };
            goto next
        :: d_step { !(IS(LOCKS_BEFORE_THE_LOOK) && live && using[r]) ->
            /* N4.3 */
            live = (IS(NO_SECOND_LOOK) -> live : LOOK) }
        fi;
        /* N4.6: the second check is made under the image lock, for which others
         * wait. */
        if
        :: d_step { live && e < 2 && !IS(UNFINISHED_DELETE_DONE) &&
            image_lock[ID(r)] != NOBODY && !IS(DELETE_UNDER_WAY_SETTLED) ->
            leave() };
            goto next
        :: live && e < 2 && IS(UNFINISHED_DELETE_DONE) -> live = 0
        :: else
        fi;
        /* N4.4 */
        if
        :: d_step { !live && using[r] && !IS(READER_NOT_ASKED) -> leave() };
            goto next
        :: d_step { !live && (!using[r] || IS(READER_NOT_ASKED)) ->
            settling = (!IS(READERS_LOCK_NOT_HELD) && !IS(READER_NOT_ASKED) ->
                        settling | BIT(r) : settling) }
        :: live
        fi
    };

settle:
    /* N5.1.  Only the maintainer reads the catalog.  So the first batch, N5.2,
     * comes with the fsync: a crash in between is one before both that took no
     * name. */
    atomic {
        if
        :: IS(UNLINKED_BEFORE_THE_BATCH) -> d_step { unlink_entry() }
        :: else
        fi;
        d_step {
            if
            :: !IS(NO_SYNC_AFTER_THE_LOOK) -> fsync_images()
            :: else
            fi };
        goto batch
    };
more:
    atomic {
        if
        :: (IS_TO_BE_COUNTED(r) || IS_TO_BE_UNCOUNTED(r)) &&
           !IS(NOT_COUNTED) -> skip
        :: else -> goto settled
        fi;
batch:
        skip;
        d_step { batch_step(r) }
    };
    renew_fence(); /* N5.3 */
    goto more;
settled:
    /* N5.4 */
    atomic {
        skip;
        d_step {
            if
            :: !IS(UNLINKED_BEFORE_THE_BATCH) -> unlink_entry()
            :: else
            fi;
            judging = 0;
            settling = 0;
            e++ };
    };
    goto next;

lock_late:
    if
    :: d_step { CAN_ENTER -> enter_group() } -> goto list
    :: d_step { !CAN_ENTER && !last -> group = 0 } -> goto another
    fi;

accounted:
    atomic {
        if
        :: d_step { IS(JUDGED_BEFORE_THE_LOCK) && CAN_ENTER -> enter_group() }
        :: else
        fi;
        if
        :: d_step { own && !(catalog & JUDGED) -> look_for_unused() }
        :: d_step { own && (catalog & JUDGED) -> unused = 0; refused = 0 }
        :: d_step { !own -> e = 0; pinned = 0 }; goto another
        fi;
        if
        :: unused == 0 -> goto collected
        :: unused && IS(ENTRIES_BEFORE_THE_GENERATION) -> goto too_early
        :: else
        fi
    };
    /* N6.4 */
renew:
    atomic { skip; d_step { new_generation(group) } };
    d_step {
        if
        :: !IS(GENERATION_NOT_SYNCED) -> fdatasync(group)
        :: else
        fi };
    d_step { free_entries() };
    if
    :: d_step { IS(HOLES_BEFORE_THE_ENTRIES) -> skip }
    /* The entries reach the disk, and the record, another sector, does not. */
    :: d_step { IS(GENERATION_NOT_SYNCED) ->
        durable_state[AT(group, 0)] = state[AT(group, 0)];
        durable_state[AT(group, 1)] = state[AT(group, 1)] }
    :: d_step { !IS(HOLES_BEFORE_THE_ENTRIES) && !IS(GENERATION_NOT_SYNCED) ->
        fdatasync(group) }
    fi;
    d_step { punch() };
collected:
    /* N6.5 */
    atomic {
        skip;
        d_step {
            catalog = (!refused && !pinned -> catalog | JUDGED : catalog);
            leave_group();
            e = 0 };
        if
        :: d_step { last -> check_quiet(); over = 1;
            busy = busy & (255 - BIT(P)) }
        :: d_step { !last -> skip }; goto another
        fi
    };
    goto ended;
too_early:
    atomic { skip; d_step { free_entries() } };
    d_step { fdatasync(group) };
    goto renew;

merge:
    /* N10.1.  M is opened, locked and begun in one step: while it is not
     * complete, its end leaves an entry that is unlinked. */
    if
    :: d_step { images[i] != 0 && CAN_SHARE && IS_EQUAL(0) -> begin_merge(0) }
    :: d_step { images[i] != 0 && CAN_SHARE && IS_EQUAL(1) -> begin_merge(1) }
    :: else -> i = 0; goto another
    fi;
    /* N10.2 */
    d_step {
        whole = whole | BIT(MERGED);
        torn = (IS(MERGED_RECIPE_NOT_SYNCED) -> torn | BIT(MERGED) : torn);
        if
        :: !IS(MERGE_SPOOL_NOT_SYNCED) -> fsync_spool()
        :: else
        fi };
    /* N10.3 */
    do
    :: d_step { LEDGER(MERGED) != 2 && !IS(EXCHANGED_BEFORE_THE_COUNTS) ->
        count_step(MERGED) };
        renew_fence()
    :: else -> break
    od;
    /* N10.4 */
    if
    :: d_step { image_lock[i] == NOBODY && !IS(MERGE_WITHOUT_IMAGE_LOCK) ->
        image_lock[i] = ME(P) }
    :: d_step { IS(MERGE_WITHOUT_IMAGE_LOCK) -> skip }
    :: d_step { image_lock[i] != NOBODY && !IS(MERGE_WITHOUT_IMAGE_LOCK) ->
        end_merge() } -> goto another
    fi;
    if
    :: d_step { images[i] == r || (IS(OLD_RECIPE_NOT_COMPARED) &&
        images[i] != 0) -> skip }
    :: d_step { images[i] != r && !(IS(OLD_RECIPE_NOT_COMPARED) &&
        images[i] != 0) -> end_merge() } -> goto another
    fi;
    /* N10.5 */
    if
    :: d_step { IS(NO_ENTRY_FOR_THE_OLD) -> skip }
    :: d_step { !IS(NO_ENTRY_FOR_THE_OLD) && images[i] != 0 &&
        ENTRY_IS_FREE(0) -> set_entry(0, images[i]) }
    :: d_step { !IS(NO_ENTRY_FOR_THE_OLD) && images[i] != 0 &&
        !ENTRY_IS_FREE(0) && ENTRY_IS_FREE(1) -> set_entry(1, images[i]) }
    :: d_step { !IS(NO_ENTRY_FOR_THE_OLD) && (images[i] == 0 ||
        !(ENTRY_IS_FREE(0) || ENTRY_IS_FREE(1))) -> end_merge() } -> goto another
    fi;
    d_step {
        if
        :: !IS(MERGE_ENTRY_NOT_SYNCED) -> fsync_spool()
        :: else
        fi };
    /* N10.6 */
    if
    :: d_step { !(may_happen & GAPS) -> set_image(i, MERGED); check() }
    :: d_step { (may_happen & GAPS) -> /* N14.1 */
        second_name[i] = (IS(NO_SECOND_NAME) -> 0 : images[i]) };
        d_step { set_image(i, 0); check() };
        d_step { set_image(i, MERGED); check() };
        d_step { second_name[i] = 0 }
    fi;
    /* N10.7 */
    d_step {
        if
        :: !IS(EXCHANGE_NOT_SYNCED) -> fsync_images()
        :: else
        fi };
    d_step { end_merge() };
    goto another
    } unless { d_step { dead & BIT(P) ->
        dead = dead & (255 - BIT(P));
        e = 0; todo = 0; r = 0; i = 0; k = 0; pinned = 0; unused = 0;
        group = 0; live = 0; own = 0; last = 0; refused = 0; n = 0 } };
ended:
    skip
    od
}
