/* SPDX-License-Identifier: Apache-2.0 */
/*
 * seeks.h - counts what a disk with a head would do: a read that does not begin
 * where the last one of its kind ended is a seek (speed.rst, "Seeks").
 *
 * The reads of all threads form one sequence, as they would for the one head.
 * Thread-safe: the place is one word, changed by an atomic exchange.
 */
#ifndef GD_SEEKS_H
#define GD_SEEKS_H

#include <stdatomic.h>
#include <stdint.h>

/* Starts as all zeros. */
typedef struct gd_seeks {
    atomic_ullong reads;
    atomic_ullong seeks;
    atomic_ullong bytes;
    atomic_ullong place; /* where the last read ended */
} gd_seeks;

/* File and offset in one word.  The multiplier keeps the places of different
 * files apart. */
static inline uint64_t
gd_seeks_place(uint64_t file, uint64_t offset)
{
    return file * UINT64_C(0x9e3779b97f4a7c15) + offset;
}

/* file distinguishes the files of this kind: an inode or a number. */
static inline void
gd_seeks_note(gd_seeks *seeks, uint64_t file, uint64_t offset,
              uint64_t length)
{
    uint64_t last = atomic_exchange(&seeks->place,
                                    gd_seeks_place(file, offset + length));
    atomic_fetch_add(&seeks->reads, 1);
    atomic_fetch_add(&seeks->seeks, last != gd_seeks_place(file, offset));
    atomic_fetch_add(&seeks->bytes, length);
}

#endif
