/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ext_fixture.c - see ext_fixture.h.
 */
#include "tests/c/support/ext_fixture.h"

#include "engine/base/coding.h"

enum {
    SUPERBLOCK = 1024, /* bytes from the beginning */
    HAS_JOURNAL = 4,
    JOURNAL_BACKUP = 1, /* the copy is that of the journal's blocks */
    EXTENT_MAGIC = 0xf30a,
    EXTENT = 12,
};

uint8_t *
ext_make(uint8_t *fs, const ext_fields *fields)
{
    uint8_t *sb = fs + SUPERBLOCK;
    gd_put32(sb + EXT_BLOCKS, fields->blocks);
    gd_put32(sb + 0x14, fields->log_block_size == 0);
    gd_put32(sb + 0x18, fields->log_block_size);
    gd_put32(sb + EXT_BLOCKS_PER_GROUP, fields->blocks_per_group);
    gd_put32(sb + 0x28, fields->inodes_per_group);
    gd_put16(sb + 0x38, 0xef53);
    gd_put32(sb + 0x4c, 1);
    gd_put16(sb + 0x58, fields->inode_size);
    gd_put32(sb + EXT_INCOMPAT, fields->incompat);
    gd_put16(sb + 0xfe, fields->desc_size);
    return sb;
}

void
ext_add_journal(uint8_t *superblock, uint16_t extents)
{
    gd_put32(superblock + EXT_COMPAT, HAS_JOURNAL);
    superblock[0xfd] = JOURNAL_BACKUP;
    gd_put16(superblock + EXT_JOURNAL_EXTENTS, EXTENT_MAGIC);
    gd_put16(superblock + EXT_JOURNAL_EXTENTS + 2, extents);
}

void
ext_put_extent(uint8_t *node, unsigned i, uint16_t blocks, uint32_t first)
{
    uint8_t *extent = node + EXTENT * (i + 1);
    gd_put16(extent + 4, blocks);
    gd_put32(extent + 8, first);
}
