/* SPDX-License-Identifier: Apache-2.0 */
/*
 * golden.h - compares the encoder's bytes with known ones.
 */
#ifndef GD_GOLDEN_H
#define GD_GOLDEN_H

#include "engine/deflate/deflate.h"

/* GD_VERSION if this build's encoder makes other bytes than zlib did once: then
 * nothing may be stored that depends on them (F3). Takes some milliseconds. */
gd_status gd_golden_compare(const gd_env *env, gd_error *err);

#endif
