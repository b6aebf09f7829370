/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk.pml - the file system, the locks, and what a crash leaves of them.
 *
 * Two states of the disk are kept apart.  The visible one is what processes
 * see.  Of the durable one the model knows everything that a crash of the
 * machine may leave (design.rst, "What a crash may do"):
 *
 *   a name      a set of what it may lead to: it grows with each change, and
 *               an fsync of the directory leaves only the present value
 *   an entry,   the value at the last fdatasync, or the present one, each
 *   a block     sector for itself
 *   the record  the same: one sector
 *   the fence   a set, as a name has
 *   a recipe    if it was not fsynced, it may be torn
 *
 * Temporary names (X, G) are left out.  What is left of one after a crash is a
 * name in the spool that no rule reads, and that accounting unlinks.
 */

/* ---- recipes ---- */

/* Recipes 1 to 3 are of transactions, one each.  A merge makes recipe 4. */
#define RECIPES 4
#define MERGED 4
#define BIT(n) (1 << (n))

/* Constants of a scenario.  They are hidden from the state. */
hidden byte mutant;
hidden byte parts;     /* the processes that take part */
hidden short may_happen;
hidden byte alone;     /* there is no maintainer */
hidden byte id_of[4];  /* image id, by transaction */
hidden byte first[4];  /* contents of the first block: 1 or 2 */
hidden byte second[4]; /* of the second block; 0: there is none */

#define IS(m) (mutant == (m))

/* Events that a scenario allows. */
#define CACHES 1   /* writers have old stores in memory */
#define FAILURES 2 /* an fsync may fail */
#define LOSSES 4   /* a crash may take back a synced batch of the catalog */
#define MERGES 8   /* the maintainer merges once */
#define MISSES 16  /* a writer may miss a block that is stored */
#define STAYS 32   /* the reader never goes away */
#define SUSPENDS 64 /* the helper may lose its lease without noticing */
#define ABORTS 128 /* transactions may be given up */
#define DROPS 256  /* a delete may lose its locks without noticing */
#define PAGES 1024 /* a host keeps old pages, in files that it opens, too */
#define GAPS 512   /* a rename over a name of an image has a moment without it */

byte merged_from;   /* the transaction whose recipe the merge replaces */
byte whole;         /* recipes that are complete, by bits */
byte torn;          /* complete recipes that were not fsynced */
byte address[10];   /* of block b of recipe r, at 2r + b: slot + 1 */

#define ORIGIN(r) ((r) == MERGED -> merged_from : (r))
#define ID(r) id_of[ORIGIN(r)]
#define WANT(r, b) ((b) == 0 -> first[ORIGIN(r)] : second[ORIGIN(r)])

/* ---- names ---- */

byte images[2];     /* images/<id>: the recipe; 0: no such name */
byte images_may[2]; /* bits: what a crash may leave; bit 0: no name */
byte second_name[2]; /* images/<id>~ (N14); scenarios with it have no crash */
#define SEEN(i) (images[i] != 0 -> images[i] : second_name[i])
byte spool;         /* bits: recipes whose own name (T or M) exists */
byte spool_there;   /* bits: own names that a crash may leave */
byte spool_gone;    /* bits: own names that a crash may take */
/* Names of deletes and merges (D, O).  Each is random, and so is never used
 * twice.  Here a number is used again once no crash can bring the old name
 * back, which makes it as good as a new name. */
byte entry[2];
byte entry_may[2];

inline fsync_images()
{
    images_may[0] = BIT(images[0]);
    images_may[1] = BIT(images[1])
}

inline fsync_spool()
{
    spool_there = spool;
    spool_gone = 255 - spool;
    entry_may[0] = BIT(entry[0]);
    entry_may[1] = BIT(entry[1])
}

inline set_image(i, r)
{
    images[i] = r;
    images_may[i] = images_may[i] | BIT(r)
}

/* N14.3 */
inline settle_name(i)
{
    if
    :: images[i] == 0 && second_name[i] != 0 -> set_image(i, second_name[i])
    :: else
    fi;
    second_name[i] = 0
}

inline link_own(r)
{
    spool = spool | BIT(r);
    spool_there = spool_there | BIT(r)
}

inline unlink_own(r)
{
    spool = spool & (255 - BIT(r));
    spool_gone = spool_gone | BIT(r)
}

inline set_entry(k, r)
{
    entry[k] = r;
    entry_may[k] = entry_may[k] | BIT(r)
}

#define ENTRY_IS_FREE(k) (entry[k] == 0 && entry_may[k] == 1)

/* ---- the group ---- */

/* One group of two slots.  File 0 is the group's first file, and file 1 the one
 * that the helper writes.  All arrays have slot s of file f at 2f + s. */
#define SLOTS 2
#define AT(f, s) (2 * (f) + (s))

#define EMPTY 0 /* 1 and 2: live, with the fingerprint of these contents */
#define FREED 3
#define DAMAGED 4
#define VOID 5
#define LIVE(e) ((e) == 1 || (e) == 2)

byte state[4];         /* of entries */
byte durable_state[4];
byte data[4];          /* contents of blocks; 0: a hole */
byte durable_data[4];
byte dirty;            /* bits, by index: to be written at the next sync */
byte published[2];     /* the record, by file */
byte durable_published[2];
byte generation[2];
byte durable_generation[2];
bit poisoned;          /* flag of the record of file 0 */
bit unsettled;         /* flag of the record of file 1 */
byte file;             /* which file the group's name leads to */
byte file_may = 1;     /* bits: to which a crash may lead it */

hidden byte at_;       /* counters within a step */
hidden byte id_;
hidden byte slot_;
hidden byte recipe_;

inline fdatasync(f)
{
    at_ = AT(f, 0);
    do
    :: at_ < AT(f, 0) + SLOTS ->
        if
        :: dirty & BIT(at_) ->
            durable_state[at_] = state[at_];
            durable_data[at_] = data[at_]
        :: else
        fi;
        at_++
    :: else -> break
    od;
    dirty = dirty & (255 - (3 << AT(f, 0)));
    durable_published[f] = published[f];
    durable_generation[f] = generation[f]
}

/* Dirty bytes stay readable, are not on the disk, and are no longer dirty. */
inline failing_fdatasync(f)
{
    dirty = dirty & (255 - (3 << AT(f, 0)))
}

/* ---- caches ---- */

/* A process may have an old copy of the group's store in memory.  Idle
 * processes of other hosts outlive the crash of this machine, so a crash does
 * not take it from those that have not begun. */
byte cached_slot[3];       /* slot + 1 that has what writer w wants */
byte cached_generation[3];
byte cached_file[3];

/* The pages of a host at some moment, of the group's first file and of all
 * recipes (N13).  A process that reads beside them gets the present bytes. */
bit over;          /* the last collection is done */
bit kept;
byte old_published;
byte old_state[SLOTS];
byte old_whole;
#define READS_OLD(m) (IS(m) && kept && file == 0)

proctype Keep()
{
end_keep:
    d_step { (may_happen & PAGES) && !over ->
        kept = 1;
        old_published = published[0];
        old_state[0] = state[0];
        old_state[1] = state[1];
        old_whole = whole }
}

/* A generation is random, so all that matters is whether two are equal.  A new
 * one is the lowest number that neither a process nor the disk has. */
inline new_generation(f)
{
    slot_ = 1;
    do
    :: slot_ == generation[0] || slot_ == generation[1] ||
       slot_ == durable_generation[0] || slot_ == durable_generation[1] ||
       slot_ == cached_generation[0] || slot_ == cached_generation[1] ||
       slot_ == cached_generation[2] || slot_ == helpers_generation ->
        slot_++
    :: else -> break
    od;
    generation[f] = slot_
}

byte helpers_generation; /* that the helper saw when it opened the group */

/* ---- the catalog and the fence ---- */

/* All changes of a batch are one assignment.  Bits 0 to 2 and 3 to 5 count the
 * recipes that name slots 0 and 1; two bits for each recipe are its ledger: 0
 * not counted, 1 begun, 2 counted. */
short catalog = 0;
short older_catalog;  /* before the last batch, if that may be lost */
#define COUNT(s) ((catalog >> (3 * (s))) & 7)
#define ONE(s) (1 << (3 * (s)))
#define LEDGER(r) ((catalog >> (4 + 2 * (r))) & 3)
#define LEDGER_ONE(r) (1 << (4 + 2 * (r)))
/* The collector has seen the group since a count fell to 0, or since blocks
 * were published. */
#define JUDGED (1 << 14)
bit valid = 1;        /* the rebuild of the catalog ended */
bit older_valid;
bit behind;           /* the catalog is behind the fence */
/* The fence, compared with the catalog: 1: it has the catalog's sequence,
 * 0: an older one. */
bit fence = 1;
byte fence_may = 2;   /* bits: which of these a crash may leave */
bit fence_known = 1;  /* the maintainer wrote it since the last batch */

inline write_batch(change)
{
    older_catalog = (may_happen & LOSSES -> catalog : 0);
    older_valid = (may_happen & LOSSES -> valid : 0);
    catalog = change;
    fence = 0;
    fence_may = 1;
    fence_known = 0
}

/* ---- processes and their locks ---- */

#define W1 0
#define W2 1
#define W3 2
#define DELETER 3
#define DELETER2 4
#define READER 5
#define MAINTAINER 6
#define HELPER 7
#define NOBODY 0
#define ME(p) ((p) + 1) /* how a lock names its one holder */

byte busy;      /* processes that hold or are doing something */
byte dead;      /* those that were killed and have not noticed */
byte running;    /* how many have not ended, apart from the maintainer */
byte writing;   /* bits of recipes: byte 0 is shared */
byte judging;   /* bits of recipes: the maintainer has byte 0 alone */
byte using[5];  /* by recipe, bits of processes: byte 1 is shared */
byte settling;  /* bits of recipes: the maintainer has byte 1 alone */
byte sharing;   /* bits of processes: the group's shared lock */
byte owner;     /* holder of the group's exclusive lock */
byte lease;     /* holder of the group's lease */
byte image_lock[2];

/* The recipes whose byte 0 a process may hold. */
#define MADE_BY(p) ((p) <= W3 -> BIT((p) + 1) : \
                    ((p) == MAINTAINER -> BIT(MERGED) : 0))

/* Locks fall with their holder. */
inline drop_locks(p)
{
    sharing = sharing & (255 - BIT(p));
    owner = (owner == ME(p) -> NOBODY : owner);
    lease = (lease == ME(p) -> NOBODY : lease);
    image_lock[0] = (image_lock[0] == ME(p) -> NOBODY : image_lock[0]);
    image_lock[1] = (image_lock[1] == ME(p) -> NOBODY : image_lock[1]);
    at_ = 1;
    do
    :: at_ <= RECIPES ->
        using[at_] = using[at_] & (255 - BIT(p));
        at_++
    :: else -> break
    od;
    writing = writing & (255 - MADE_BY(p));
    if
    :: p == MAINTAINER -> judging = 0; settling = 0
    :: else
    fi
}

/* ---- what must hold ---- */

#define NOT_PROMISED 0
#define PROMISED 1 /* acknowledged to the user */
#define GOING 2    /* a delete is under way */
#define GONE 3     /* the delete was acknowledged */
byte promise[4];   /* by transaction */

bit I1_committed_image_can_be_read = 1;
bit I8_acknowledged_image_is_there = 1;
bit I11_deleted_image_stays_away = 1;
bit I12_reader_finds_its_blocks = 1;
bit I9_no_count_is_too_low = 1;
bit I8_nothing_leaks = 1;
bit N11_live_recipe_does_not_refuse = 1;

#define HOLDS(f, s, c) (state[AT(f, s)] == (c) && data[AT(f, s)] == (c))
#define CAN_READ(r, b) (WANT(r, b) == 0 || (address[2 * (r) + (b)] != 0 && \
    HOLDS(file, address[2 * (r) + (b)] - 1, WANT(r, b))))
#define SHOWS(u) (SEEN(id_of[u]) == (u) || \
                  (SEEN(id_of[u]) == MERGED && merged_from == (u)))

/* Part of each step by which something of this could change. */
inline check()
{
    id_ = 0;
    do
    :: id_ < 2 ->
        recipe_ = SEEN(id_);
        I1_committed_image_can_be_read = (recipe_ == 0 ||
            ((whole & BIT(recipe_)) && CAN_READ(recipe_, 0) &&
             CAN_READ(recipe_, 1)));
        assert(I1_committed_image_can_be_read);
        id_++
    :: else -> break
    od;
    recipe_ = 1;
    do
    :: recipe_ < MERGED ->
        I8_acknowledged_image_is_there =
            (promise[recipe_] != PROMISED || SHOWS(recipe_));
        assert(I8_acknowledged_image_is_there);
        I11_deleted_image_stays_away =
            (promise[recipe_] != GONE || !SHOWS(recipe_));
        assert(I11_deleted_image_stays_away);
        recipe_++
    :: else -> break
    od;
    skip /* Spin wants a step behind a loop that ends a d_step */
}

/* ---- crashes ---- */

/* n counts; it is the caller's own, since a counter that is hidden from the
 * state would not go back where another choice is tried. */

inline lose_names()
{
    if
    :: images_may[0] & 1 -> images[0] = 0
    :: images_may[0] & 2 -> images[0] = 1
    :: images_may[0] & 4 -> images[0] = 2
    :: images_may[0] & 8 -> images[0] = 3
    :: images_may[0] & 16 -> images[0] = MERGED
    fi;
    if
    :: images_may[1] & 1 -> images[1] = 0
    :: images_may[1] & 2 -> images[1] = 1
    :: images_may[1] & 4 -> images[1] = 2
    :: images_may[1] & 8 -> images[1] = 3
    :: images_may[1] & 16 -> images[1] = MERGED
    fi;
    n = 1;
    do
    :: n <= RECIPES ->
        if
        :: spool_there & BIT(n) -> spool = spool | BIT(n)
        :: spool_gone & BIT(n) -> spool = spool & (255 - BIT(n))
        fi;
        if
        :: torn & BIT(n) -> whole = whole & (255 - BIT(n))
        :: true
        fi;
        n++
    :: else -> break
    od;
    n = 0;
    do
    :: n < 2 ->
        if
        :: entry_may[n] & 1 -> entry[n] = 0
        :: entry_may[n] & 2 -> entry[n] = 1
        :: entry_may[n] & 4 -> entry[n] = 2
        :: entry_may[n] & 8 -> entry[n] = 3
        :: entry_may[n] & 16 -> entry[n] = MERGED
        fi;
        n++
    :: else -> break
    od;
    torn = 0;
    fsync_images();
    fsync_spool()
}

inline lose_blocks()
{
    n = 0;
    do
    :: n < 4 ->
        if
        :: true
        :: state[n] != durable_state[n] ->
            state[n] = durable_state[n]
        fi;
        if
        :: true
        :: data[n] != durable_data[n] ->
            data[n] = durable_data[n]
        fi;
        durable_state[n] = state[n];
        durable_data[n] = data[n];
        n++
    :: else -> break
    od;
    n = 0;
    do
    :: n < 2 ->
        if
        :: true
        :: published[n] != durable_published[n] ||
           generation[n] != durable_generation[n] ->
            published[n] = durable_published[n];
            generation[n] = durable_generation[n]
        fi;
        durable_published[n] = published[n];
        durable_generation[n] = generation[n];
        n++
    :: else -> break
    od;
    if
    :: file_may & 1 -> file = 0
    :: file_may & 2 -> file = 1
    fi;
    file_may = BIT(file);
    dirty = 0
}

inline lose_accounts()
{
    if
    :: fence_may & 1 -> fence = 0
    :: fence_may & 2 -> fence = 1
    fi;
    if
    :: true
    :: may_happen & LOSSES ->
        /* A fence with the lost batch's sequence shows the loss. */
        behind = behind || fence;
        catalog = older_catalog;
        valid = older_valid;
        fence = 0
    fi;
    fence_may = BIT(fence)
}

/* Processes are killed, or the machine crashes. */
proctype Death(byte crashes; byte kills)
{
    byte n;
    do
    :: over || (alone && running == 0) -> break
    :: atomic { crashes > 0 && !over ->
        crashes--;
        lose_names();
        lose_blocks();
        lose_accounts();
        d_step {
            n = 0;
            do
            :: n <= HELPER -> drop_locks(n); n++
            :: else -> break
            od;
            n = 0;
            dead = dead | busy;
            busy = 0;
            check()
        }
        }
    :: atomic { kills > 0 && busy && !over ->
        kills--;
        if
        :: busy & BIT(W1) -> n = W1
        :: busy & BIT(W2) -> n = W2
        :: busy & BIT(W3) -> n = W3
        :: busy & BIT(DELETER) -> n = DELETER
        :: busy & BIT(DELETER2) -> n = DELETER2
        :: busy & BIT(READER) -> n = READER
        :: busy & BIT(MAINTAINER) -> n = MAINTAINER
        :: busy & BIT(HELPER) -> n = HELPER
        fi;
        d_step {
            drop_locks(n);
            dead = dead | BIT(n);
            busy = busy & (255 - BIT(n));
            n = 0
        }
        }
    od
}
