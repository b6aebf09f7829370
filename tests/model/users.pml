/* SPDX-License-Identifier: Apache-2.0 */
/*
 * users.pml - transactions, deletes and readers (N7, N8, N9, N11).
 *
 * A step is one system call, or several, if no process can observe the states
 * between them; then a comment says why.  Every process may be killed between
 * two steps.  Its locks then fall (Death), and it ends.
 */

/* The escape of a process that was killed. */
#define UNLESS_KILLED(p) unless { d_step { dead & BIT(p) -> \
    dead = dead & (255 - BIT(p)) } }

/* ---- a transaction ---- */

#define CAN_SHARE (owner == NOBODY)
/* A store is loaded under the group's shared lock (N7.2), which is then given
 * back. */
#define CAN_CACHE ((may_happen & CACHES) && \
                   (CAN_SHARE || IS(LOADED_WITHOUT_THE_LOCK)))
#define FINDS(s, c) (s < published[file] && state[AT(file, s)] == (c))
#define FINDS_NOW(s, c) (READS_OLD(OLD_ENTRIES_FOUND) -> \
    (s) < old_published && old_state[s] == (c) : FINDS(s, c))
#define LAST_PUBLISHED (READS_OLD(OLD_RECORD_APPENDED_TO) -> \
    old_published : published[file])
#define LAST_ENTRY (READS_OLD(OLD_RECORD_APPENDED_TO) -> \
    old_state[1] : state[AT(file, 1)])
#define HAS_ROOM (!(LAST_PUBLISHED == SLOTS || LAST_ENTRY != EMPTY))

/* N7.3: slots behind the published count that have entries.  The last slot is
 * not followed by room, so only slot 0 can be a tail. */
inline settle_tail()
{
    if
    :: file == 1 && unsettled && !IS(NEXT_HOLDER_DOES_NOT_SETTLE) ->
        file_may = BIT(file); /* N12.6 */
        unsettled = 0
    :: else
    fi;
    if
    :: published[file] == 0 && state[AT(file, 0)] != EMPTY &&
       !IS(TAIL_OVERWRITTEN) ->
        if
        :: state[AT(file, 0)] != data[AT(file, 0)] && !IS(TAIL_NOT_VERIFIED) ->
            state[AT(file, 0)] = DAMAGED
        :: else
        fi;
        if
        :: !IS(TAIL_NOT_WRITTEN_AGAIN) -> dirty = dirty | BIT(AT(file, 0))
        :: else
        fi;
        top = 1
    :: else -> top = LAST_PUBLISHED
    fi
}

/* Writes entry and block.  Only the lessee reads behind the published count,
 * so the two writes, and the settling before them, are one step: a
 * crash leaves any part of them all the same. */
inline append(r)
{
    state[AT(file, top)] = WANT(r, b);
    data[AT(file, top)] = WANT(r, b);
    dirty = dirty | BIT(AT(file, top));
    address[2 * (r) + b] = top + 1;
    top++;
    b++;
    check()
}

/* N8.1, N7.4: the sync point's fdatasync. */
inline sync_blocks()
{
    if
    :: !IS(GROUP_NOT_SYNCED) -> fdatasync(file)
    :: else
    fi
}

inline publish()
{
    published[file] = top;
    catalog = catalog & (~JUDGED);
    older_catalog = older_catalog & (~JUDGED)
}

inline release_all(p, r)
{
    writing = writing & (255 - BIT(r));
    sharing = sharing & (255 - BIT(p));
    if
    :: IS(LOCKS_NOT_COUNTED) -> sharing = sharing & (255 - 3)
    :: else
    fi;
    lease = (lease == ME(p) -> NOBODY : lease);
    busy = busy & (255 - BIT(p))
}

#define LOCKS_NAMES ((may_happen & GAPS) && !IS(COMMIT_WITHOUT_IMAGE_LOCK))
#define CAN_NAME(i) (!LOCKS_NAMES || image_lock[i] == NOBODY)
#define IS_ABSENT(i) (images[i] == 0 && \
                      (!LOCKS_NAMES || second_name[i] == 0))

/* The writer p makes recipe p + 1. */
proctype Writer(byte p)
{
    byte b;    /* the block to be stored next */
    byte top;  /* slots of the group with this transaction's */
    byte s;
    bit owns;  /* the lease */
    #define R (p + 1)
    #define NEXT WANT(R, b)
    {
    /* An earlier transaction of the process left a store in memory. */
    if
    :: d_step { CAN_CACHE && FINDS(0, first[R]) -> cached_slot[p] = 1;
        cached_generation[p] = generation[file]; cached_file[p] = file }
    :: d_step { CAN_CACHE && FINDS(1, first[R]) -> cached_slot[p] = 2;
        cached_generation[p] = generation[file]; cached_file[p] = file }
    :: d_step { !(may_happen & CACHES) || !(FINDS(0, first[R]) ||
        FINDS(1, first[R])) -> skip }
    fi;
    /* N7.1 */
    d_step { busy = busy | BIT(p); link_own(R) };
    if
    :: d_step { !(judging & BIT(R)) && (spool & BIT(R)) &&
        !IS(SPOOL_FILE_NOT_TAKEN) -> writing = writing | BIT(R) }
    :: d_step { IS(SPOOL_FILE_NOT_TAKEN) ||
        (IS(NAME_NOT_CHECKED) && !(judging & BIT(R)) && !(spool & BIT(R))) ->
        writing = writing | BIT(R) }
    :: d_step { !IS(SPOOL_FILE_NOT_TAKEN) && ((judging & BIT(R)) ||
        (!(spool & BIT(R)) && !IS(NAME_NOT_CHECKED))) ->
        /* A new name would be a new transaction: it is left out. */
        busy = busy & (255 - BIT(p)) } -> goto ended
    fi;
    do
    :: atomic { b < 2 && NEXT != 0 ->
        if
        /* N7.2: a hit.  A block that is verified under the lock stays,
         * so both are one step. */
        :: d_step { CAN_SHARE && FINDS_NOW(0, NEXT) &&
            !IS(VERIFIED_BEFORE_THE_LOCK) ->
            sharing = sharing | BIT(p); address[2 * R + b] = 1; b++ }
        :: d_step { CAN_SHARE && FINDS_NOW(1, NEXT) &&
            !IS(VERIFIED_BEFORE_THE_LOCK) ->
            sharing = sharing | BIT(p); address[2 * R + b] = 2; b++ }
        :: d_step { IS(VERIFIED_BEFORE_THE_LOCK) && FINDS(0, NEXT) -> s = 1 };
            goto lock_late
        /* The same by a cached store. */
        :: d_step { CAN_SHARE && b == 0 && cached_slot[p] != 0 &&
            ((cached_file[p] == file &&
              cached_generation[p] == generation[file]) ||
             IS(STORE_BELIEVED)) ->
            sharing = sharing | BIT(p); address[2 * R] = cached_slot[p]; b++ }
        /* N7.3: a miss.  Two tries of locks are one step: they succeed, or
         * are given up. */
        :: d_step { CAN_SHARE && !owns && lease == NOBODY && HAS_ROOM &&
            (!poisoned || IS(POISONED_GROUP_USED)) &&
            ((may_happen & MISSES) ||
             !(FINDS(0, NEXT) || FINDS(1, NEXT))) ->
            sharing = sharing | BIT(p); lease = ME(p); owns = 1;
            settle_tail(); append(R) }
        :: d_step { owns && top < SLOTS -> append(R) }
        /* There is no other group to go to. */
        :: else -> goto give_up
        fi }
    :: else -> break
    od;
    goto stored;
lock_late:
    if
    :: d_step { CAN_SHARE -> sharing = sharing | BIT(p); address[2 * R + b] = s;
        b++ }
    :: d_step { !CAN_SHARE -> skip } -> goto give_up
    fi;
stored:
    if
    :: owns && IS(PUBLISHED_BEFORE_THE_SYNC) -> d_step { publish() }
    :: else
    fi;
    if
    :: owns ->
        if
        :: d_step { true -> sync_blocks() }
        :: d_step { (may_happen & FAILURES) ->
            failing_fdatasync(file) };
            d_step { poisoned = !IS(POISONED_GROUP_USED) };
            goto give_up
        fi;
        d_step {
            publish();
            lease = NOBODY;
            owns = 0;
            if
            :: IS(SHARED_LOCK_RELEASED_EARLY) ->
                sharing = sharing & (255 - BIT(p))
            :: else
            fi }
    :: else
    fi;
    /* N8.2: while byte 0 and the groups are held, an incomplete recipe, one
     * that a crash may tear, and a name that it may take are the same to all
     * processes: writing and both fsyncs are one step. */
    if
    :: (may_happen & ABORTS) -> goto give_up
    :: d_step { true ->
        whole = whole | BIT(R);
        torn = (IS(RECIPE_NOT_SYNCED) -> torn | BIT(R) : torn);
        if
        :: !IS(SPOOL_NOT_SYNCED) -> fsync_spool()
        :: else
        fi }
    fi;
    /* N8.3, N14.4: the link and the lock around it are one step. */
    if
    :: d_step { CAN_NAME(id_of[R]) && (IS_ABSENT(id_of[R]) ||
        IS(LINK_REPLACES)) -> set_image(id_of[R], R); check() }
    :: d_step { CAN_NAME(id_of[R]) && !IS_ABSENT(id_of[R]) &&
        !IS(LINK_REPLACES) -> skip } -> goto give_up
    fi;
    if
    :: d_step { true ->
        if
        :: !IS(IMAGES_NOT_SYNCED) -> fsync_images()
        :: else
        fi;
        /* The commit is acknowledged.  A delete may have come between.  N8.4: a
         * lock that is held longer only refuses more: this is one step. */
        promise[R] = (promise[R] == NOT_PROMISED -> PROMISED : promise[R]);
        release_all(p, R) }
    :: d_step { (may_happen & FAILURES) ->
        /* N8.5, N8.6: an error after the link; the image stays. */
        if
        :: IS(ABORTED_AFTER_THE_LINK) -> unlink_own(R)
        :: IS(UNLINKED_AFTER_THE_LINK) && images[id_of[R]] == R ->
            set_image(id_of[R], 0)
        :: else
        fi;
        release_all(p, R) }
    fi;
    goto ended;
give_up: /* N8.5 */
    atomic { skip; d_step { unlink_own(R) } };
    d_step { release_all(p, R) }
    } UNLESS_KILLED(p);
ended:
    atomic { skip; d_step { b = 0; top = 0; s = 0; owns = 0; cached_slot[p] = 0;
        cached_generation[p] = 0; cached_file[p] = 0; running-- } }
}

/* ---- deletes ---- */

inline end_delete(p, r, i)
{
    using[r] = using[r] & (255 - BIT(p));
    image_lock[i] = (image_lock[i] == ME(p) -> NOBODY : image_lock[i]);
    busy = busy & (255 - BIT(p))
}

/* Sets the promise of the transaction that made the image. */
inline promise_of(i, new)
{
    if
    :: images[i] != 0 -> promise[ORIGIN(images[i])] = new
    :: else
    fi
}

#define FOUND_BY_DELETE(i) \
    (IS(DELETE_DOES_NOT_SETTLE) -> images[i] : SEEN(i))

/* Deletes image i. */
proctype Delete(byte p; byte i)
{
    byte r;    /* the recipe */
    byte k;    /* of the entry */
    byte u;    /* the transaction that made the image */
    {
    /* N9.1.  It waits: if its wait could not end, that would be found.
     * N9.2.  Under the image lock the name of an image keeps its inode:
     * waiting, opening, locking and revalidating are one step.  A delete that
     * finds no image does nothing. */
    if
    :: d_step { FOUND_BY_DELETE(i) != 0 &&
        (image_lock[i] == NOBODY || IS(NO_IMAGE_LOCK)) ->
        busy = busy | BIT(p);
        if
        :: !IS(DELETE_DOES_NOT_SETTLE) -> settle_name(i) /* N14.3 */
        :: else
        fi;
        image_lock[i] = (IS(NO_IMAGE_LOCK) -> image_lock[i] : ME(p));
        r = images[i];
        u = ORIGIN(r);
        N11_live_recipe_does_not_refuse = !(settling & BIT(r)) &&
            !(IS(ONE_BYTE) && (judging & BIT(r)));
        assert(N11_live_recipe_does_not_refuse);
        if
        :: !IS(DELETER_WITHOUT_BYTE_1) -> using[r] = using[r] | BIT(p)
        :: else
        fi }
    :: FOUND_BY_DELETE(i) == 0 -> goto ended
    fi;
    /* N9.3: by name.  Without the image lock it may lead elsewhere. */
    if
    :: IS(DELETED_BY_RENAME) -> goto by_rename
    :: d_step { !IS(DELETED_BY_RENAME) && ENTRY_IS_FREE(0) &&
        images[i] != 0 -> k = 0;
        set_entry(0, images[i]) }
    :: d_step { !IS(DELETED_BY_RENAME) && !ENTRY_IS_FREE(0) &&
        ENTRY_IS_FREE(1) && images[i] != 0 ->
        k = 1; set_entry(1, images[i]) }
    :: d_step { images[i] == 0 || !(ENTRY_IS_FREE(0) || ENTRY_IS_FREE(1)) ->
        end_delete(p, r, i) } -> goto ended
    fi;
    /* N9.4 */
    d_step {
        if
        :: !IS(DELETE_SPOOL_NOT_SYNCED) -> fsync_spool()
        :: else
        fi };
    /* The server was out of reach, and has dropped the locks meanwhile. */
    if
    :: d_step { (may_happen & DROPS) -> drop_locks(p) }
    :: d_step { true -> skip }
    fi;
    /* N9.4 and N9.5 in one step, which does not come while the entry is being
     * settled.  A delete that goes on without its locks just then leaves space
     * that only a rebuild brings back ("A host that lost its locks" in
     * hosts.rst). */
    if
    :: d_step { (may_happen & DROPS) && entry[k] == 0 &&
        !IS(ENTRY_NOT_LOOKED_FOR) -> end_delete(p, r, i) } -> goto ended
    :: d_step { !(may_happen & DROPS) || IS(ENTRY_NOT_LOOKED_FOR) ||
        (entry[k] != 0 && !(judging & BIT(r))) ->
        u = (images[i] != 0 -> ORIGIN(images[i]) : u);
        promise_of(i, GOING);
        set_image(i, 0);
        check() }
    fi;
    goto unlinked;
by_rename:
    atomic { skip; d_step {
        promise_of(i, GOING);
        if
        :: spool & BIT(r) -> skip /* two names of one file: nothing happens */
        :: else -> link_own(r); fsync_spool(); set_image(i, 0)
        fi } };
unlinked:
    /* N9.6 */
    if
    :: d_step { true ->
        if
        :: !IS(DELETE_IMAGES_NOT_SYNCED) -> fsync_images()
        :: else
        fi;
        promise[u] = GONE;
        /* N9.7: as N8.4. */
        end_delete(p, r, i);
        check() }
    :: d_step { (may_happen & FAILURES) ->
        if
        :: IS(FAILED_DELETE_TAKEN_BACK) -> set_entry(k, 0)
        :: else
        fi;
        end_delete(p, r, i) }
    fi
    } UNLESS_KILLED(p);
ended:
    atomic { skip; d_step { r = 0; k = 0; u = 0; running-- } }
}

/* ---- reading ---- */

#define FOUND(i) (IS(SECOND_NAME_NOT_LOOKED_FOR) -> images[i] : SEEN(i))

proctype Read(byte p; byte i)
{
    byte r;
    byte b;
    bit stays;
    {
    skip;
again: /* N11 */
    if
    :: d_step { FOUND(i) != 0 -> r = FOUND(i); busy = busy | BIT(p) }
    :: d_step { FOUND(i) == 0 -> r = 0; busy = busy & (255 - BIT(p));
        /* Recipe 1 is of image 0. */
        I8_acknowledged_image_is_there = (i != 0 || promise[1] != PROMISED);
        assert(I8_acknowledged_image_is_there) } ->
        goto ended
    fi;
    if
    :: d_step { !(settling & BIT(r)) || IS(READ_WITHOUT_A_LOCK) ->
        if
        :: !IS(READ_WITHOUT_A_LOCK) -> using[r] = using[r] | BIT(p)
        :: else
        fi;
        N11_live_recipe_does_not_refuse = !(IS(ONE_BYTE) &&
            (judging & BIT(r)) && FOUND(i) == r);
        assert(N11_live_recipe_does_not_refuse) }
    :: d_step { (settling & BIT(r)) && !IS(READ_WITHOUT_A_LOCK) ->
        N11_live_recipe_does_not_refuse = FOUND(i) != r;
        assert(N11_live_recipe_does_not_refuse) } -> goto again
    fi;
    if
    :: d_step { FOUND(i) == r || IS(READERS_NAME_NOT_CHECKED) -> skip }
    :: d_step { FOUND(i) != r && !IS(READERS_NAME_NOT_CHECKED) ->
        using[r] = using[r] & (255 - BIT(p)) } -> goto again
    fi;
    do
    :: d_step { b < 2 && WANT(r, b) != 0 ->
        I12_reader_finds_its_blocks = CAN_READ(r, b);
        assert(I12_reader_finds_its_blocks);
        b++ }
    :: else -> break
    od;
    if
    :: d_step { (may_happen & STAYS) -> stays = 1; running-- };
        end_reading: false
    :: else
    fi;
    d_step { using[r] = using[r] & (255 - BIT(p));
        busy = busy & (255 - BIT(p)) }
    } UNLESS_KILLED(p);
ended:
    skip;
    d_step { r = 0; b = 0; running = (stays -> running : running - 1) }
}
