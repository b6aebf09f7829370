/* SPDX-License-Identifier: Apache-2.0 */
/*
 * packer.h - packs a transaction's new blocks into segments, compresses them on
 * the pool, and hands them to the appender.
 *
 * When a group is full, the packer goes on to the next.  While the pool packs
 * and writes one bundle of segments, the next is filled.
 *
 * The packer holds the shared lock of every group that it appended to until it
 * is closed (I6).  Belongs to one transaction, one thread at a time.
 */
#ifndef GD_PACKER_H
#define GD_PACKER_H

#include "engine/format/address.h"
#include "engine/repo/repo.h"

typedef struct gd_packer gd_packer;

/* The message if a block no longer matches its fingerprint. */
#define GD_CHANGED_IN_MEMORY                                                  \
    "a block changed in memory while it was stored: its buffer was written "  \
    "to, or the memory is faulty"

/* For blocks of this scope, until another is set. */
gd_status gd_packer_open(gd_repo *repo, const gd_scope *scope,
                         gd_packer **packer, gd_error *err);
/* Cuts off data that is not synced, ends the lease and releases the shared
 * locks.
 * REQUIRES: the recipe is committed or given up. */
void gd_packer_close(gd_packer *packer);

/* Sets the scope of the blocks added from now on.  If the scope changes, syncs
 * the blocks added before. */
gd_status gd_packer_set_scope(gd_packer *packer, const gd_scope *scope,
                              gd_error *err);
/* From now on adds nothing to this group.  If the group is open, syncs the
 * blocks added to it. */
gd_status gd_packer_avoid(gd_packer *packer, uint32_t group, gd_error *err);

/* Sets whether blocks added from now on get the mark nodedup (I14).  They do
 * not while a program that does not know the mark has the repository open: they
 * are counted then. */
void gd_packer_set_nodedup(gd_packer *packer, bool nodedup);

/* Adds a copy of a new block and returns its address.  checksum was computed
 * before the fingerprint.  If the copy has another checksum, a flush or the
 * sync fails with GD_IO. */
gd_status gd_packer_add(gd_packer *packer, const uint8_t *data,
                        uint32_t length, const gd_fingerprint *fp,
                        uint64_t checksum, gd_address *address,
                        gd_error *err);
/* The address of an equal block (I5) that was added to the open group, or group
 * 0.  Finds blocks that nobody else can see yet. */
gd_address gd_packer_find(gd_packer *packer, const uint8_t *data,
                          uint32_t length, const gd_fingerprint *fp);
/* Returns whether a block with this address, fingerprint and length was added
 * to the open group. */
bool gd_packer_added(gd_packer *packer, gd_address address,
                     const gd_fingerprint *fp, uint32_t length);
/* Returns whether the packer holds the group's shared lock. */
bool gd_packer_holds(const gd_packer *packer, uint32_t group);
/* Waits until earlier segments are written, then starts to write all full
 * ones.  So an error may come from earlier segments.  Makes a sync point
 * where the appender wants one. */
gd_status gd_packer_flush(gd_packer *packer, gd_error *err);
/* Writes out everything, without a sync point. */
gd_status gd_packer_write(gd_packer *packer, gd_error *err);
/* Writes out everything and makes a sync point (N8.1). */
gd_status gd_packer_sync(gd_packer *packer, gd_error *err);

/* Plain bytes added, and bytes written for them; complete after a write or a
 * sync. */
void gd_packer_count(const gd_packer *packer, uint64_t *new_bytes,
                     uint64_t *stored_bytes);
/* Those of the written bytes that a sync point may have published. */
uint64_t gd_packer_kept(const gd_packer *packer);

#endif
