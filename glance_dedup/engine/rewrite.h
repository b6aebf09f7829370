/*
 * rewrite.h - a group's rewriting: a new file with the same addresses and only
 * what lives, put in the old one's place (I4).
 *
 *     fsync old | write new, fsync | rename | fsync groups/
 *
 * Until groups/ is fsynced a crash may bring the old file back, so the new one is
 * marked as unsettled (blockgroup.h), before it gets the name: whoever comes
 * after an error, or a crash of this process, makes the name durable before he
 * appends or frees.  Its generation is new: a store cached from a file that a
 * crash took away again fits no other.
 *
 * Filter hints and recipes name addresses, so both stay right.  Readers that
 * have the old file open read on in it.
 */
#ifndef GD_REWRITE_H
#define GD_REWRITE_H

#include "collect.h"

/* Segments all of whose blocks live are copied as they are, unless codec is
 * given (NULL: not); of others the live blocks are packed anew.  Every block is
 * verified: GD_CORRUPT names the first that is not what its entry says, and the
 * old file stays, as after any other error.  GD_BUSY, with words, while there
 * are entries that are not published.  *bytes are those of the disk that were
 * given back.  held goes on with the new file. */
gd_status gd_held_rewrite(gd_held *held, const gd_codec *codec, int level,
                          uint64_t *bytes, gd_error *err);

#endif
