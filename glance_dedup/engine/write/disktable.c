/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disktable.c - see disktable.h.
 */
#include "engine/write/disktable.h"

gd_status
gd_disk_table_begin(gd_disk_table *table, gd_recipe_writer *recipe,
                    const gd_recipe_disk *disk, uint64_t size, gd_error *err)
{
    *table = (gd_disk_table){.header = {.size = size, .disk = *disk}};
    gd_recipe_disk *whole = &table->header.disk;
    whole->plain_size = gd_recipe_length(recipe);
    whole->derived = 1; /* the true number is not known yet */
    whole->derived_bytes = 0;
    if (!gd_recipe_disk_is_valid(whole, size)) {
        return gd_fail(err, GD_INVALID,
                       "no image of %llu bytes, and %llu plain ones, has such "
                       "a disk, or such encoders", (unsigned long long)size,
                       (unsigned long long)whole->plain_size);
    }
    table->recipe = recipe;
    return GD_OK;
}

gd_status
gd_disk_table_add(gd_disk_table *table, const gd_extent *extents, size_t count,
                  gd_error *err)
{
    for (size_t i = 0; i < count; i++) {
        if (!gd_recipe_is_derived(&table->header, &extents[i]) ||
            extents[i].length > table->header.size - table->file) {
            return gd_fail(err, GD_INVALID,
                           "the derived extent for offset %llu is not within "
                           "the file and its plain bytes, or has no encoder",
                           (unsigned long long)table->file);
        }
        GD_TRY(gd_recipe_add_derived(table->recipe, &extents[i], err));
        table->file += extents[i].length;
    }
    return GD_OK;
}

gd_status
gd_disk_table_copy(gd_disk_table *table, const gd_recipe *source,
                   gd_error *err)
{
    gd_recipe_page page;
    uint64_t left = source->header.disk.derived;
    page.number = gd_recipe_pages(source->header.extents);
    while (left > 0) {
        GD_TRY(gd_recipe_next_page(source, table->file, &page, err));
        GD_TRY(gd_disk_table_add(table, page.extents, page.count, err));
        left -= page.count;
    }
    return GD_OK;
}

gd_status
gd_disk_table_require_whole(const gd_disk_table *table, gd_error *err)
{
    return table->file == table->header.size
               ? GD_OK
               : gd_fail(err, GD_INVALID,
                         "the table describes %llu bytes of a file of %llu",
                         (unsigned long long)table->file,
                         (unsigned long long)table->header.size);
}
