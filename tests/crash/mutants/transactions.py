# SPDX-License-Identifier: Apache-2.0

"""Bugs in committing and deleting."""

from tests.crash.mutants.mutant import c_tests
from tests.crash.mutants.mutant import Edit
from tests.crash.mutants.mutant import Mutant

_TRANSACTION = 'glance_dedup/engine/write/transaction.c'
_IMAGE_DELETE = 'glance_dedup/engine/files/image_delete.c'
_APPENDER = 'glance_dedup/engine/write/appender.c'
_TAIL = 'glance_dedup/engine/write/tailrecovery.c'
_GROUP = 'glance_dedup/engine/files/group.c'
_CHECK = 'glance_dedup/check/group_reader.py'


# One checksum over the whole fingerprint store, besides those of the entries.
_PAGE_CHECKSUM = '''\
/* The store's own checksum is in what are zeros otherwise. */
enum { STORE = 8 * GD_SECTOR, PAGE_AT = 2048, PAGE_SIZE = 2048 + STORE };

static gd_status
read_page(const gd_group *group, uint8_t page[PAGE_SIZE], gd_error *err)
{
    return gd_read_full(group->env, group->fd, page, PAGE_SIZE, PAGE_AT,
                        group->name, err);
}

static gd_status
write_in_page(const gd_group *group, const uint8_t *raw, size_t span,
              uint64_t start, gd_error *err)
{
    uint8_t page[PAGE_SIZE];
    gd_status s = read_page(group, page, err);
    if (s == GD_OK) {
        memcpy(page + start - PAGE_AT, raw, span);
        gd_put64(page, gd_checksum(page + 2048, STORE, 0));
        s = gd_write_full(group->env, group->fd, page, PAGE_SIZE, PAGE_AT,
                          group->name, err);
    }
    return s;
}

static gd_status
verify_page(const gd_group *group, gd_error *err)
{
    uint8_t page[PAGE_SIZE];
    gd_status s = read_page(group, page, err);
    if (s == GD_OK && gd_get64(page) != 0 &&
        gd_get64(page) != gd_checksum(page + 2048, STORE, 0)) {
        s = gd_fail(err, GD_CORRUPT, "%s: its store is torn", group->name);
    }
    return s;
}

'''


MUTANTS = (
    # -- committing (I1, N7, N8) ------------------------------------------
    Mutant(
        'recipe-not-fsynced', 'N8.2', (
            Edit('glance_dedup/engine/files/spool.c',
                 'int rc = env->fsync(env, file->fd); /* N8.2 */',
                 'int rc = env == NULL && file->fd < 0;'),),
        workload='store', quick=True),
    Mutant(
        'only-the-first-recipe-fsynced', 'N8.2', (
            Edit(_TRANSACTION,
                 '        GD_TRY(gd_spool_sync_recipe(repo->env, '
                 '&image->spool, image->image_id,\n'
                 '                                    err));\n',
                 '        if (i == 0) {\n'
                 '            GD_TRY(gd_spool_sync_recipe(repo->env, '
                 '&image->spool, image->image_id,\n'
                 '                                        err));\n'
                 '        }\n'),),
        workload='volume'),
    Mutant(
        'spool-not-fsynced', 'N8.2', (
            Edit(_TRANSACTION,
                 '    GD_TRY(gd_sync_dir(repo->env, repo->root, '
                 'GD_DIR_SPOOL, err)); /* N8.2 */\n',
                 ''),),
        workload='delete'),
    Mutant(
        'images-not-fsynced', 'N8.3', (
            Edit(_TRANSACTION,
                 'return gd_sync_dir(repo->env, repo->root, GD_DIR_IMAGES, '
                 'err); /* N8.3 */',
                 'return GD_OK;'),),
        workload='store', quick=True),
    Mutant(
        'group-not-synced', 'I1, N8.1', (
            Edit(_APPENDER,
                 'GD_TRY(sync_group(appender, err));\n', ''),),
        workload='store', quick=True),
    Mutant(
        'published-before-the-sync', 'I1, N7.4', (
            Edit(_APPENDER,
                 'GD_TRY(sync_group(appender, err));\n',
                 'gd_published early = appender->published;\n'
                 '    early.sequence++;\n'
                 '    early.count = count;\n'
                 '    early.end = appender->end;\n'
                 '    (void)gd_group_write_published(group, &early, NULL);\n'
                 '    GD_TRY(sync_group(appender, err));\n'),),
        workload='store',
        tests=c_tests('appender')),
    Mutant(
        'hints-before-the-sync', 'I1, N7.4', (
            Edit(_APPENDER,
                 '    appender->cannot_cut = true;\n'
                 '    GD_TRY(gd_group_write_entries(appender->group, base, '
                 'count,\n',
                 '    appender->cannot_cut = true;\n'
                 '    insert_hints(appender, base, count, '
                 'appender->entries);\n'
                 '    GD_TRY(gd_group_write_entries(appender->group, base, '
                 'count,\n'),),
        tests=c_tests('appender'),
        why_not='a hint leads to the fingerprint store, of which only what is '
        'published is believed'),
    Mutant(
        'groups-not-fsynced', 'I1', (
            Edit(_GROUP,
                 '    return gd_sync_dir(env, root, GD_DIR_GROUPS, err);\n',
                 '    return GD_OK;\n'),
            # The next process that appends to it, which is the same one, syncs
            # it, too.
            Edit(_GROUP,
                 'return gd_sync_dir(group->env, root, GD_DIR_GROUPS, err);',
                 '(void)group, (void)root, (void)err;\n'
                 '    return GD_OK;')),
        workload='store'),
    Mutant(
        'entries-under-one-checksum', 'I8', (
            Edit(_GROUP,
                 '/* ---- entries ---- */\n\n',
                 '/* ---- entries ---- */\n\n' + _PAGE_CHECKSUM),
            Edit(_GROUP,
                 '    gd_status s = gd_write_full(env, group->fd, raw, span, '
                 'start, group->name,\n'
                 '                                err);\n',
                 '    gd_status s = write_in_page(group, raw, span, start, '
                 'err);\n'),
            Edit(_GROUP,
                 '    gd_status s = gd_group_read_file(group, raw, span, '
                 'start, err);\n',
                 '    gd_status s = gd_group_read_file(group, raw, span, '
                 'start, err);\n'
                 '    if (s == GD_OK) {\n'
                 '        s = verify_page(group, err);\n'
                 '    }\n'),
            Edit(_CHECK,
                 'areas = [(3 * ondisk.SECTOR, head[3 * ondisk.SECTOR:], '
                 'ondisk.DAMAGE)]',
                 'areas = []')),
        workload='store'),
    Mutant(
        'tail-not-verified', 'N7.3', (
            Edit(_TAIL,
                 'blocks[k].good ? GD_ENTRY_LIVE : GD_ENTRY_DAMAGED;',
                 'GD_ENTRY_LIVE;'),),
        workload='store'),
    Mutant(
        'tail-not-written-again', 'N7.3', (
            Edit(_TAIL,
                 '            *any |= blocks[k].good;\n',
                 ''),),
        tests=c_tests('appender_tail'),
        why_not='the new owner\'s own fdatasync makes the tail durable, '
        'unless an earlier one failed'),
    Mutant(
        'torn-segments-not-mended', 'N7.3', (
            Edit(_TAIL,
                 '    mend_checksum(own->in, &header, group->bounds.seed);\n',
                 '    (void)mend_checksum;\n'),),
        tests=c_tests('tailrecovery'),
        why_not='check only notes a segment that is not whole, unless all of '
        'its blocks live; then a tear must have hit no more than a checksum'),
    Mutant(
        'what-is-dead-must-be-whole', 'N7.3', (
            Edit(_TAIL,
                 '    mend_checksum(own->in, &header, group->bounds.seed);\n',
                 '    (void)mend_checksum;\n'),
            Edit(_CHECK,
                 '            elif sum(block[2] for block in blocks) < '
                 'plain_length:\n',
                 '            elif plain_length == 0:\n')),
        workload='store'),
    Mutant(
        'page-without-its-head', 'I2', (
            Edit('glance_dedup/engine/write/directio.c',
                 '    return gd_group_read_file(direct->group, direct->room, '
                 'direct->used,\n'
                 '                              direct->start, NULL) == '
                 'GD_OK;\n',
                 '    memset(direct->room, 0, direct->used);\n'
                 '    return true;\n'),),
        workload='store-direct'),
    # -- deleting (N9) ----------------------------------------------------
    Mutant(
        'delete-spool-not-fsynced', 'N9.4', (
            Edit(_IMAGE_DELETE,
                 'GD_TRY(gd_sync_dir(env, root, GD_DIR_SPOOL, err)); '
                 '/* N9.4 */',
                 ''),),
        workload='delete'),
    Mutant(
        'delete-images-not-fsynced', 'N9.6', (
            Edit(_IMAGE_DELETE,
                 'gd_status s = gd_sync_dir(env, root, GD_DIR_IMAGES,\n'
                 '                                  worst == GD_OK ? err : '
                 '&none); /* N9.6 */',
                 'gd_status s = GD_OK;\n'
                 '        (void)none;'),),
        workload='delete'),
)
