/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ext_fixture.h - the superblock of an ext4 file system, as a test requires
 * it.
 */
#ifndef EXT_FIXTURE_H
#define EXT_FIXTURE_H

#include <stdint.h>

/* Fields of the superblock, by their names in the kernel's documentation. */
typedef struct ext_fields {
    uint32_t blocks;
    uint32_t log_block_size; /* 0: 1024 bytes, and the first group begins with
                              * block 1; 2: 4096 bytes */
    uint32_t blocks_per_group;
    uint32_t inodes_per_group;
    uint16_t inode_size;
    uint32_t incompat; /* features */
    uint16_t desc_size;
} ext_fields;

/* Parts of the superblock that tests change. */
enum {
    EXT_BLOCKS = 4, /* offsets in it */
    EXT_BLOCKS_PER_GROUP = 0x20,
    EXT_COMPAT = 0x5c,
    EXT_INCOMPAT = 0x60,
    EXT_RO_COMPAT = 0x64,
    EXT_FIRST_META_BG = 0x104,
    EXT_JOURNAL_EXTENTS = 0x10c, /* of the journal's inode */
    EXT_BLOCKS_HIGH = 0x150,
    EXT_BACKUP_GROUPS = 0x24c,
};

/* Writes it for a file system that begins at fs; returns its address. */
uint8_t *ext_make(uint8_t *fs, const ext_fields *fields);
/* Adds a journal, whose inode's copy has this many extents, yet to be
 * written. */
void ext_add_journal(uint8_t *superblock, uint16_t extents);
/* Writes the extent number i of a node: so many blocks from a block on. */
void ext_put_extent(uint8_t *node, unsigned i, uint16_t blocks,
                    uint32_t first);

#endif
