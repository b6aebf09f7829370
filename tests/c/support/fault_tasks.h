/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault_tasks.h - tasks, and the requirements of each when the nth call of
 * some kind fails, once or from then on.
 *
 * A task is one row of a table: its preparation, its work, and the outcomes
 * that only it may have. To add one, write its functions and add the row to
 * the table of test_faults.c (tasks of writers, readers and deleters) or of
 * test_faults_maintainer.c (the maintainer's tasks). All else is here, and the
 * same for all:
 *
 *   - an error has words that name its subject, and the errno's status;
 *   - no lock is left, nor a descriptor, mapping or memory;
 *   - images that were acknowledged are intact, others absent or whole;
 *   - the same handle does the task again, now without faults, and stores
 *     another image;
 *   - the machine crashes, at once after the fault or after all that, and loses
 *     bytes as in disk_shadow.h: acknowledged images are intact all the same.
 *     So a failed sync was neither trusted, nor repeated in vain.
 *
 * By default a part of the cases is tried, chosen by GLANCE_DEDUP_SEED (1),
 * with GLANCE_DEDUP_FAULTS=all every one, and with all:TASK every one of a
 * task. A failure prints its case; GLANCE_DEDUP_FAULTS=<that> tries it alone.
 */
#ifndef FAULT_TASKS_H
#define FAULT_TASKS_H

#include "tests/c/support/scratch_repository.h"

enum {
    FAULT_BLOCK = 512,
    FAULT_BLOCKS = 90,
    FAULT_LENGTH = FAULT_BLOCKS * FAULT_BLOCK + 33,
};

typedef enum image_state {
    IMAGE_ABSENT,
    IMAGE_MAYBE, /* absent or whole */
    IMAGE_PRESENT,
    IMAGE_LOST, /* its state does not matter */
} image_state;

/* A third of NEW's blocks are KEPT's, a third OLD's; TWIN's are KEPT's. */
typedef enum image_name { KEPT, OLD, NEW, TWIN, NEXT, IMAGES } image_name;

typedef struct world {
    scratch x;
    gd_repo *repo;
    image_state states[IMAGES];
    /* Facts that the setup found for the work. */
    uint64_t numbers[FAULT_BLOCKS + 1]; /* addresses, group << 15 | slot */
    size_t count;
} world;

typedef struct fault_task {
    const char *name;
    /* The handle is open, and KEPT and OLD are stored.  May be NULL. */
    void (*setup)(world *w);
    /* Leaves nothing open but the handle. */
    gd_status (*work)(world *w);
    /* Statuses that are allowed when it is done again, and under a fault,
     * besides those that are right for all. */
    gd_status again;
    gd_status also;
    bool by_value;
    gd_direct_io direct_io;
    bool gear; /* blocks are cut by their content */
} fault_task;

/* Tries all tasks; returns the number of failed checks. */
unsigned run_fault_tasks(const fault_task *tasks, size_t count);

/* ---- for the tasks ---- */

const char *image_id_of(image_name which);
const uint8_t *image_data(image_name which);
/* These record the outcome in w->states. */
gd_status store_image(world *w, image_name which);
gd_status delete_image(world *w, image_name which);
/* Returns GD_CORRUPT, if no other error occurred and the bytes are others. */
gd_status fetch_image(world *w, image_name which);
/* Returns the addresses of its blocks, in order, and their number. */
size_t image_blocks(world *w, image_name which,
                    uint64_t numbers[FAULT_BLOCKS + 1]);
/* Ends the program on an error: the test is impossible. */
void require_ok(world *w, gd_status s, const char *what);

#endif
