/* SPDX-License-Identifier: Apache-2.0 */
/*
 * helper.pml - another host's daemon rewrites the group (N12).
 *
 * The new file has the same blocks at the same addresses.  A helper that was
 * suspended may have lost its lease without noticing.
 */

inline copy_group()
{
    at_ = 0;
    do
    :: at_ < SLOTS ->
        state[AT(1, at_)] = state[AT(0, at_)];
        data[AT(1, at_)] = (LIVE(state[AT(0, at_)]) -> data[AT(0, at_)] : 0);
        at_++
    :: else -> break
    od;
    dirty = dirty | 12;
    published[1] = published[0];
    unsettled = 1;
    if
    :: IS(GENERATION_KEPT) -> generation[1] = generation[0]
    :: else -> new_generation(1)
    fi
}

/* Header, records and entries: all that comes before the blocks. */
#define SEEN_AGAIN (generation[0] == helpers_generation && \
    published[0] == published[1] && state[0] == state[2] && \
    state[1] == state[3])
#define IS_SEALED (published[0] == SLOTS && !poisoned)

proctype Help()
{
    {
    /* N12.1 */
    if
    :: d_step { file == 0 && (IS_SEALED || (IS(HELPER_TAKES_ANY_GROUP) &&
            published[0] > 0 && !poisoned)) &&
        (lease == NOBODY || IS(HELPER_WITHOUT_LEASE)) ->
        busy = busy | BIT(HELPER);
        if
        :: !IS(HELPER_WITHOUT_LEASE) -> lease = ME(HELPER)
        :: else
        fi;
        helpers_generation = generation[0] }
    :: goto ended
    fi;
    /* N12.2 */
    d_step {
        if
        :: !IS(OLD_GROUP_NOT_SYNCED) -> fdatasync(0)
        :: else
        fi };
    d_step { copy_group() };
    d_step {
        if
        :: !IS(NEW_GROUP_NOT_SYNCED) -> fdatasync(1)
        :: else
        fi };
    if
    :: d_step { (may_happen & SUSPENDS) && lease == ME(HELPER) ->
        lease = NOBODY }
    :: true
    fi;
    /* N12.3 */
    if
    :: d_step { IS(HELPER_WITHOUT_EXCLUSIVE_LOCK) -> skip }
    :: d_step { !IS(HELPER_WITHOUT_EXCLUSIVE_LOCK) && owner == NOBODY &&
        sharing == 0 -> owner = ME(HELPER) }
    :: goto give_up
    fi;
    /* N12.4 */
    if
    :: d_step { (file == 0 && (SEEN_AGAIN || IS(GENERATION_NOT_COMPARED))) ||
        IS(GROUP_NOT_COMPARED) -> skip }
    :: d_step { !((file == 0 && (SEEN_AGAIN ||
        IS(GENERATION_NOT_COMPARED))) || IS(GROUP_NOT_COMPARED)) -> skip } ->
        goto give_up
    fi;
    /* N12.5 */
    d_step { file = 1; file_may = file_may | 2; check() };
    /* N12.6 */
    d_step { file_may = 2 };
    d_step { unsettled = 0 };
give_up:
    atomic { skip; d_step { drop_locks(HELPER);
        busy = busy & (255 - BIT(HELPER)) } }
    } UNLESS_KILLED(HELPER);
ended:
    atomic { skip; d_step { helpers_generation = 0; running-- } }
}
