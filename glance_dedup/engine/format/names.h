/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names.h - the names of all files in a repository, made and parsed here.
 *
 * All are relative to the repository's directory.
 * doc/source/contributor/format.rst lists the content of each directory.
 */
#ifndef GD_NAMES_H
#define GD_NAMES_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"

#define GD_DIR_GROUPS "groups"
#define GD_DIR_IMAGES "images"
#define GD_DIR_SPOOL "spool"
#define GD_DIR_LOCKS "locks"
#define GD_FILE_GROUP_LOCKS "locks/groups"
#define GD_DIR_QUARANTINE "quarantine"
#define GD_DIR_SPARES "spares"
#define GD_DIR_VOLUMES "volumes"
#define GD_DIR_FEATURES "features"
#define GD_DIR_INDEX "index"
#define GD_FILE_INDEX_LOCKS "locks/index"
#define GD_FILE_IMAGE_LOCKS "locks/images"
#define GD_FILE_MAINTAINER_LOCK "locks/maintainer"
#define GD_FILE_FENCE "fence"

enum {
    GD_NAME_SIZE = 160, /* of a buffer that holds any of these names */
    GD_IMAGE_ID_MAX = 128,
    GD_PROJECT_MAX = 128,
    GD_ID_SIZE = 16,
};

/* Kinds of spool entries; see N4, N9, N10 and format.rst. */
typedef enum gd_spool_kind {
    GD_SPOOL_STORE = 'T',
    GD_SPOOL_DELETED = 'D',
    GD_SPOOL_GROUP = 'G',
    GD_SPOOL_MERGED = 'M',
    GD_SPOOL_REPLACED = 'O', /* what a merge took out of images/ */
    GD_SPOOL_EXCHANGE = 'X', /* a second name of an M, briefly */
} gd_spool_kind;

/* Exactly 8 lower-case hexadecimal digits. */
bool gd_names_parse_hex(const char *digits, uint32_t *value);

void gd_names_group(uint32_t group, char name[GD_NAME_SIZE]);
/* base is a name inside groups/. */
bool gd_names_parse_group(const char *base, uint32_t *group);

/* The second name that a file of a group or an image has while it is replaced
 * (N14).  No name of another file ends so. */
void gd_names_second(const char *name, char second[GD_NAME_SIZE]);
/* As gd_names_parse_group, of names and second names. */
bool gd_names_parse_any_group(const char *base, uint32_t *group);

/* GD_INVALID unless the id has 1 to 128 characters of A-Z a-z 0-9 _ -
 * (so it can be neither a path nor a temporary file). */
gd_status gd_names_image(const char *image_id, char name[GD_NAME_SIZE],
                         gd_error *err);

void gd_names_spool(gd_spool_kind kind, const uint8_t id[GD_ID_SIZE],
                    char name[GD_NAME_SIZE]);
/* base is a name inside spool/. */
bool gd_names_parse_spool(const char *base, gd_spool_kind *kind,
                          uint8_t id[GD_ID_SIZE]);

/* The file of the second copies of a group's blocks. */
void gd_names_spares(uint32_t group, char name[GD_NAME_SIZE]);

/* Kinds of files of the exact index, as in their heads; GD_INDEX_NEW has no
 * name of its own yet. */
typedef enum gd_index_kind {
    GD_INDEX_SHARD = 1,
    GD_INDEX_RUN = 2,
    GD_INDEX_GONE = 3,
    GD_INDEX_PAIRS = 4,
    GD_INDEX_CURSORS = 5,
    GD_INDEX_NEW = 6,
} gd_index_kind;

enum { GD_SHARD_BITS_MAX = 16 };

/* Fields of the name of a file of the exact index. */
typedef struct gd_index_id {
    gd_index_kind kind;
    uint32_t bits, shard; /* shard < 2^bits */
    uint64_t number;
} gd_index_id;

void gd_names_index(const gd_index_id *id, char name[GD_NAME_SIZE]);
/* base is a name inside index/. */
bool gd_names_parse_index(const char *base, gd_index_id *id);
/* The kind as names have it; NULL: there is no such kind. */
const char *gd_index_kind_name(unsigned kind);

enum { GD_RESERVE_FILES = 9 };
/* The files that are given up when the disk is full.  The first holds bytes;
 * each of them holds an inode. */
void gd_names_reserve(unsigned i, char name[GD_NAME_SIZE]);

#endif
