/* SPDX-License-Identifier: Apache-2.0 */
/*
 * protocol.pml - the rules N1 to N14 of protocol.rst, for Spin.
 *
 * model.rst says what the model has and what it
 * leaves out.  disk.pml has the state, and what must hold.  One program serves
 * all scenarios and mutants: the environment chooses.
 */
#include "mutants.pml"
#include "disk.pml"
#include "users.pml"
#include "maintainer.pml"
#include "helper.pml"

c_decl {
    static int
    setting(const char *name)
    {
        const char *text = getenv(name);
        return text == (char *)0 ? 0 : atoi(text);
    }
}

hidden byte crashes;
hidden byte kills;
hidden byte same_id;  /* uploads 1 and 2 have one image id */
hidden byte other;    /* upload 2 has other contents */
hidden byte two;      /* upload 1 has two blocks */
hidden byte stored;   /* image 1 is there, was counted, and was promised */
hidden byte copy;     /* its block is there twice */
hidden byte tail;     /* a writer died, after its sync had failed */

inline store(slot, contents)
{
    address[2 + slot] = slot + 1;
    state[slot] = contents;
    data[slot] = contents;
    durable_state[slot] = contents;
    durable_data[slot] = contents;
    published[0] = slot + 1;
    durable_published[0] = slot + 1;
    catalog = catalog + ONE(slot)
}

init
{
    c_code {
        mutant = setting("MUTANT");
        parts = setting("PARTS");
        may_happen = setting("MAY_HAPPEN");
        crashes = setting("CRASHES");
        kills = setting("KILLS");
        same_id = setting("SAME_ID");
        other = setting("OTHER");
        two = setting("TWO");
        stored = setting("STORED");
        copy = setting("COPY");
        tail = setting("TAIL");
        alone = setting("ALONE");
    };
    atomic {
        id_of[1] = 0; id_of[2] = (same_id -> 0 : 1); id_of[3] = 0;
        first[1] = 1; first[2] = (other -> 2 : 1); first[3] = 1;
        second[1] = (two -> 2 : 0); second[2] = 0; second[3] = 0;
        images_may[0] = 1; images_may[1] = 1;
        spool_gone = 255; entry_may[0] = 1; entry_may[1] = 1;
        if
        :: stored ->
            set_image(0, 1);
            fsync_images();
            whole = BIT(1);
            promise[1] = PROMISED;
            catalog = (copy -> 0 : JUDGED) + 2 * LEDGER_ONE(1);
            store(0, first[1]);
            if
            :: two -> store(1, second[1])
            :: copy ->
                store(1, first[1]);
                address[3] = 0;
                catalog = catalog - ONE(1)
            :: else
            fi
        :: else
        fi;
        if
        :: tail -> state[0] = 1; data[0] = 1
        :: else
        fi;
        if
        :: parts & BIT(W1) -> running++; run Writer(W1)
        :: else
        fi;
        if
        :: parts & BIT(W2) -> running++; run Writer(W2)
        :: else
        fi;
        if
        :: parts & BIT(W3) -> running++; run Writer(W3)
        :: else
        fi;
        if
        :: parts & BIT(DELETER) -> running++; run Delete(DELETER, 0)
        :: else
        fi;
        if
        :: parts & BIT(DELETER2) -> running++; run Delete(DELETER2, 0)
        :: else
        fi;
        if
        :: parts & BIT(READER) -> running++; run Read(READER, 0)
        :: else
        fi;
        if
        :: parts & BIT(HELPER) -> running++; run Help()
        :: else
        fi;
        if
        :: may_happen & PAGES -> run Keep()
        :: else
        fi;
        if
        :: crashes > 0 || kills > 0 -> run Death(crashes, kills)
        :: else
        fi;
        if
        :: alone
        :: else -> run Maintain()
        fi
    }
}
