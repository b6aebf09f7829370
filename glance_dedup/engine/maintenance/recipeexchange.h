/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recipeexchange.h - puts a whole, durable recipe of the spool in the place of
 * an image's recipe, under the image lock (N10.4 to 7; merge.h has the order).
 */
#ifndef GD_RECIPEEXCHANGE_H
#define GD_RECIPEEXCHANGE_H

#include "engine/files/spool.h"
#include "engine/format/recipe.h"
#include "engine/repo/repo.h"

/* Gives M the name of the old recipe, which is open.  *done: M is the image's
 * recipe now, even if an error is returned too.  Otherwise the image was
 * deleted or replaced, or somebody is about to do so.  REQUIRES: M is counted,
 * and the fence written (N10.3). */
gd_status gd_recipe_exchange(gd_repo *repo, const gd_recipe *old,
                             const gd_spool_writer *m, bool *done,
                             gd_error *err);

#endif
