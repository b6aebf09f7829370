/* SPDX-License-Identifier: Apache-2.0 */
/*
 * remake.h - corrects the checksums of spoiled files, so that a fuzzer gets
 * behind them: they detect damage, and are no defence.
 *
 * Each function takes the file's bytes, of any length, and changes checksums
 * only.
 */
#ifndef REMAKE_H
#define REMAKE_H

#include <stddef.h>
#include <stdint.h>

/* Corrects a block group, or a file of spares/: header, records, the entries
 * that are not empty, and the segments that these name. */
void remake_group(uint8_t *data, size_t length);
/* Corrects a recipe: header page and extent pages, which get their numbers
 * too. */
void remake_recipe(uint8_t *data, size_t length);
void remake_fence(uint8_t *data, size_t length);
void remake_filter(uint8_t *data, size_t length);
/* Corrects the kind of file that the bytes begin like. */
void remake_any(uint8_t *data, size_t length);

#endif
