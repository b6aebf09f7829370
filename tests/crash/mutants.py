# SPDX-License-Identifier: Apache-2.0

"""Bugs put in on purpose, to show that the tests find them.

A mutant is a small change to the engine or to the maintainer by which a rule
of the guide is broken. :data:`MUTANTS` has them all; a new rule of ordering
gets a mutant there, and a new layout one in ``layout_mutants.py``. Each names
the test that must notice it: a workload of the crash explorer, or, if a crash
alone shows nothing, ordinary tests. ``test_mutants.py`` verifies it.

:class:`Builder` makes a tree with one mutant in it: a copy of the sources, and
an engine in which only the changed files are compiled again. By hand::

    python -m tests.crash.mutants                   # lists them
    python -m tests.crash.mutants NAME DIRECTORY    # makes a tree of one
    cd DIRECTORY; PYTHONPATH=. python -m pytest tests/...

An edit's old text must be found exactly once, otherwise the mutant is outdated
and its test fails: it must be updated to the code.
"""

import concurrent.futures
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

from tests.crash import layout_mutants
from tests.crash.mutant import Edit
from tests.crash.mutant import Mutant

TOP = pathlib.Path(__file__).resolve().parent.parent.parent

_COPIED = ('glance_dedup', 'dedupd', 'tests')
_ALONGSIDE = ('bindep.txt', 'pyproject.toml', 'setup.cfg', 'tox.ini')
_ENGINE = 'glance_dedup/_engine.abi3.so'
# The options of the tests in C: a mutant that does not compile with them would
# only seem to be found.
_COMPILE = ['gcc', '-std=c11', '-O1', '-g', '-fPIC', '-fvisibility=hidden',
            '-Wall', '-Wextra', '-Werror', '-pthread', '-D_GNU_SOURCE',
            '-DPy_LIMITED_API=0x030B0000']
_LIBRARIES = ['-lcrypto', '-lxxhash', '-llz4', '-lzstd']
_BUILD_TIMEOUT = 100    # seconds for one file


_SPOOL = 'glance_dedup/engine/files/spool.c'
_TRANSACTION = 'glance_dedup/engine/write/transaction.c'
_IMAGE_DELETE = 'glance_dedup/engine/files/image_delete.c'
_APPENDER = 'glance_dedup/engine/write/appender.c'
_PACKER = 'glance_dedup/engine/write/packer.c'
_ADD_RUNS = 'glance_dedup/engine/write/addruns.c'
_LOOKUP = 'glance_dedup/engine/write/lookup.c'
_BLOCK_COPY = 'glance_dedup/engine/maintenance/blockcopy.c'
_INDEX = 'glance_dedup/engine/format/index.c'
_TAIL = 'glance_dedup/engine/write/tailrecovery.c'
_DIRECT = 'glance_dedup/engine/write/directio.c'
_GROUP = 'glance_dedup/engine/files/group.c'
_OWNED_GROUP = 'glance_dedup/engine/maintenance/ownedgroup.c'
_REWRITE = 'glance_dedup/engine/maintenance/grouprewrite.c'
_EXCHANGE = 'glance_dedup/engine/maintenance/groupexchange.c'
_PLACEHOLDER = 'glance_dedup/engine/maintenance/placeholder.c'
_MERGE = 'glance_dedup/engine/maintenance/merge.c'
_RECIPE_EXCHANGE = 'glance_dedup/engine/maintenance/recipeexchange.c'
_DUPLICATE_SEARCH = 'glance_dedup/engine/files/duplicate_search.c'
_FENCE = 'glance_dedup/engine/files/fence.c'
_FEATURES = 'glance_dedup/engine/files/features.c'
_REPO = 'glance_dedup/engine/repo/repo.c'
_JOURNAL = 'glance_dedup/engine/volume/journal.c'
_JOURNAL_TAIL = 'glance_dedup/engine/volume/journaltail.c'
_VOLUME_NAMES = 'glance_dedup/engine/volume/volumenames.c'
_VOLUME_STATE = 'glance_dedup/engine/volume/state.c'
_VOLUME_NEWEST = 'glance_dedup/engine/volume/newest.c'
_CHECKPOINT = 'glance_dedup/engine/volume/checkpoint.c'
_VOLUME_CREATE = 'glance_dedup/engine/volume/create.c'
_VOLUME_DELETE = 'glance_dedup/engine/volume/delete.c'
_RECOVERY = 'glance_dedup/engine/volume/recovery.c'
_OPEN = 'glance_dedup/engine/volume/open.c'
_EDITION = 'glance_dedup/engine/volume/edition.c'
_RESIZE = 'glance_dedup/engine/volume/resize.c'
_VOLUME_DIRECTORY = 'glance_dedup/engine/volume/directory.c'
_ACCOUNTING = 'dedupd/tasks/accounting.py'
_DAMAGED_BLOCKS = 'dedupd/tasks/damaged_blocks.py'
_MERGER = 'dedupd/tasks/merger.py'
_TIERER = 'dedupd/tasks/tierer.py'
_ACCOUNTS = 'glance_dedup/maintenance/refcounts.py'
_CHECK = 'glance_dedup/check/group_reader.py'
_KEYED_DIGEST = 'glance_dedup/engine/format/keyeddigest.c'
_DIGESTS = 'glance_dedup/backup/digests.py'
_VOLUME_TESTS = ('tests/unit/test_c.py::TestPlain::test_c[test_journal-plain]',
                 'tests/unit/test_c.py::TestPlain::test_c[test_open-plain]',
                 'tests/unit/test_c.py::TestPlain::'
                 'test_c[test_state_unsynced-plain]')
_FEATURE_TESTS = (
    'tests/unit/test_c.py::TestPlain::test_c[test_features-plain]',)
_MOMENTS = ('tests/functional/test_volume_moments.py::'
            'test_snapshots[library-50]',)


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
            Edit(_SPOOL,
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
        tests=('tests/unit/test_c.py::'
               'TestPlain::test_c[test_appender-plain]',)),
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
        tests=('tests/unit/test_c.py::'
               'TestPlain::test_c[test_appender-plain]',),
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
        tests=('tests/unit/test_c.py::'
               'TestPlain::test_c[test_appender_tail-plain]',),
        why_not='the new owner\'s own fdatasync makes the tail durable, '
        'unless an earlier one failed'),
    Mutant(
        'torn-segments-not-mended', 'N7.3', (
            Edit(_TAIL,
                 '    mend_checksum(own->in, &header, group->bounds.seed);\n',
                 '    (void)mend_checksum;\n'),),
        tests=('tests/unit/test_c.py::'
               'TestPlain::test_c[test_tailrecovery-plain]',),
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
            Edit(_DIRECT,
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
    # -- accounting (I9, N1 to N5) ----------------------------------------
    Mutant(
        'counted-twice', 'N1', (
            Edit(_ACCOUNTING,
                 'if txid is None or (counted == entry.live and not begun):',
                 'if txid is None or (not counted and not begun '
                 'and not entry.live):'),
            Edit(_ACCOUNTS,
                 '        if self.counted(txid, batch):\n'
                 '            raise database.CatalogError(\n'
                 '                f\'the recipe {txid.hex()} is counted '
                 'already\')\n',
                 ''),),
        workload='delete'),
    Mutant(
        'no-second-look', 'N4.3', (
            Edit(_ACCOUNTING,
                 '    entry.writer_gone = True\n'
                 '    entry.live = _is_live(maintainer, entry)'
                 '                    # N4.3\n',
                 '    entry.writer_gone = True\n'),),
        tests=('tests/unit/dedupd/tasks/test_accounting.py', '-k', 'n4_3'),
        why_not='it takes a commit between look and lock'),
    Mutant(
        'no-fsync-after-the-look', 'N5.1', (
            Edit(_ACCOUNTING,
                 "        maintainer.engine.sync('images')"
                 '                        # N5.1\n',
                 ''),),
        workload='deleter-killed',
        tests=('tests/unit/dedupd/tasks/test_accounting_order.py',
               '-k', 'n5_1')),
    Mutant(
        'entry-removed-before-the-fence', 'N5.4', (
            Edit(_ACCOUNTING,
                 '        self._maintainer.settle(self._batch)'
                 '                    # N5.2, N5.3\n'
                 '        for entry in self._settled:',
                 '        for entry in self._settled:'),
            Edit(_ACCOUNTING,
                 '                entry.recipe.unlink()'
                 '                           # N5.4\n'
                 '                self._removed += 1\n',
                 '                entry.recipe.unlink()\n'
                 '                self._removed += 1\n'
                 '        self._maintainer.settle(self._batch)\n')),
        workload='delete',
        tests=('tests/unit/dedupd/tasks/test_accounting_order.py',
               '-k', 'n5_order')),
    Mutant(
        'counted-in-part-not-taken-back', 'N5.2', (
            Edit(_ACCOUNTING,
                 'if txid is None or (counted == entry.live and not begun):',
                 'if txid is None or counted == entry.live:'),),
        workload='accounting-in-steps',
        tests=('tests/unit/dedupd/tasks/test_accounting_steps.py', '-k',
               'deleted_in_the_middle')),
    Mutant(
        'counted-in-part-not-pinned', 'N6.3', (
            Edit(_ACCOUNTING,
                 '            if not self._maintainer.catalog.counted(txid)'
                 ':\n',
                 '            if not (self._maintainer.catalog.counted(txid)\n'
                 '                    or self._maintainer.catalog.begun(txid))'
                 ':\n'),
            Edit(_ACCOUNTING,
                 'if txid not in pinned}',
                 'if txid in pinned}')),
        tests=('tests/unit/dedupd/tasks/test_accounting_steps.py',
               '-k', 'n6_3'),
        why_not='it takes a reader of an image that was deleted before all of '
        'it was counted'),
    Mutant(
        'fence-not-fsynced', 'N5.3', (
            Edit(_FENCE,
                 'return gd_fsync(env, file->fd, GD_FILE_FENCE, err);\n'
                 '}\n\n/* Writes a later',
                 'return GD_OK;\n'
                 '}\n\n/* Writes a later'),
            Edit(_FENCE,
                 'return gd_fsync(env, file->fd, GD_FILE_FENCE, err);\n'
                 '}\n\nstatic gd_status\nwrite_fence(',
                 'return GD_OK;\n'
                 '}\n\nstatic gd_status\nwrite_fence(')),
        tests=('tests/unit/test_c.py::TestPlain::test_c[test_fence-plain]',),
        why_not='the fence tells of a catalog that lost what it had synced, '
        'which the explorer\'s does not'),
    # -- collecting (N6) --------------------------------------------------
    Mutant(
        'holes-before-the-entries-are-synced', 'N6.4', (
            Edit(_OWNED_GROUP,
                 '        s = write_changes(owned, entries, err);\n'
                 '    }\n'
                 '    if (s == GD_OK) {\n'
                 '        s = sync_group(owned->leased->group, err);\n'
                 '    }\n',
                 '        s = write_changes(owned, entries, err);\n'
                 '    }\n'),),
        workload='collection'),
    Mutant(
        'entries-before-the-generation', 'N6.4', (
            Edit(_OWNED_GROUP,
                 '    gd_status s = next_generation(owned, err);\n'
                 '    if (s == GD_OK) {\n'
                 '        s = write_changes(owned, entries, err);\n'
                 '    }\n',
                 '    gd_status s = write_changes(owned, entries, err);\n'
                 '    if (s == GD_OK) {\n'
                 '        s = next_generation(owned, err);\n'
                 '    }\n'),),
        tests=('tests/unit/test_c.py::'
               'TestPlain::test_c[test_ownedgroup_free-plain]',),
        why_not='it takes a process that outlives the collector, with a '
        'fingerprint store that it believes'),
    Mutant(
        'rewritten-group-not-fsynced', 'I4', (
            Edit(_REWRITE,
                 's = gd_fsync(env, r->target.fd, r->target.name, err);',
                 's = GD_OK;'),),
        workload='rewriting'),
    Mutant(
        'recompressed-group-not-fsynced', 'I4', (
            Edit(_REWRITE,
                 's = gd_fsync(env, r->target.fd, r->target.name, err);',
                 's = GD_OK;'),),
        workload='recompressing'),
    Mutant(
        'cold-group-exchanged-before-its-object-is-sent', 'becoming cold', (
            Edit(_TIERER,
                 '            self._send(key, name, length)\n'
                 '            rewriting.cut()\n',
                 '            import shutil, tempfile\n'
                 '            kept = shutil.copy(os.path.join(\n'
                 '                self._maintainer.repository.path, name),\n'
                 '                tempfile.mkdtemp())\n'
                 '            rewriting.cut()\n'),
            Edit(_TIERER,
                 '        if not moved:\n',
                 '        self._send(key, kept, length)\n'
                 '        if not moved:\n')),
        workload='tiering'),
    Mutant(
        'slices-trusted', 'I7', (
            Edit(_GROUP,
                 '        gd_slices_forget(group->slices, &group->object, '
                 'offset, length);',
                 '        (void)offset, (void)length;'),),
        workload='tiering'),
    Mutant(
        'partial-group-exchanged-unmarked', 'I4', (
            Edit(_EXCHANGE,
                 'GD_TRY(gd_owned_group_keep_writers_out(owned, err));', ''),),
        tests=('tests/unit/test_c.py::'
               'TestPlain::test_c[test_grouprewrite_partial-plain]',),
        why_not='it takes a process that lost its locks before its rename'),
    Mutant(
        'placeholder-not-fsynced', 'I4', (
            Edit(_PLACEHOLDER,
                 ': gd_fsync(env, target->fd, target->name, err);',
                 ': GD_OK;'),),
        workload='collection-of-all'),
    Mutant(
        'exchange-beside-transactions', 'I4, I6', (
            Edit(_OWNED_GROUP,
                 '    GD_TRY(exclude_others(leased, err));\n', ''),),
        tests=('tests/unit/test_c.py'
               '::TestPlain::test_c[test_grouprewrite_stages-plain]',),
        why_not='the addresses and blocks are the same in both files, so it '
        'takes a process that compares bytes in the old one'),
    # -- merging (N10) ----------------------------------------------------
    Mutant(
        'merged-recipe-not-fsynced', 'N10.2', (
            Edit(_MERGE,
                 'GD_TRY(gd_fsync(repo->env, merge->m.fd, merge->m.name, '
                 'err)); /* N10.2 */',
                 ''),),
        workload='merging'),
    Mutant(
        'exchange-before-the-counts', 'N10.3', (
            Edit(_MERGER,
                 '        _count(maintainer, pace, merge)'
                 '                         # N10.3\n'
                 '        return Merged(merge.replaced, merge.exchange(),'
                 '         # N10.4 to 7\n'
                 '                      merge.collisions)\n',
                 '        done = merge.exchange()\n'
                 '        _count(maintainer, pace, merge)\n'
                 '        return Merged(merge.replaced, done, '
                 'merge.collisions)\n'),),
        tests=('tests/unit/dedupd/tasks/test_merger.py::'
               'test_counted_before_it_takes_the_name',),
        why_not='after a crash M is still in the spool, and is counted '
        'before anything is freed'),
    Mutant(
        'replaced-recipe-not-in-the-spool', 'N10.5', (
            Edit(_RECIPE_EXCHANGE,
                 '    GD_TRY(gd_sync_dir(repo->env, repo->root, '
                 'GD_DIR_SPOOL, err));\n',
                 ''),),
        workload='merging'),
    # -- volumes (V1 to V11) ----------------------------------------------
    Mutant(
        'journal-named-before-its-head', 'V2', (
            Edit(_JOURNAL,
                 'gd_status s = gd_journal_sync(journal, err);',
                 'gd_status s = GD_OK;'),),
        workload='volume'),
    Mutant(
        'journal-written-before-its-name', 'V2', (
            Edit(_JOURNAL,
                 '    return gd_sync_dir(env, journal->root, directory, '
                 'err);\n',
                 '    return GD_OK;\n'),),
        workload='volume'),
    Mutant(
        'flush-without-a-sync', 'V3', (
            Edit(_VOLUME_STATE,
                 'gd_status s = gd_journal_sync(journal, err);',
                 'gd_status s = GD_OK;'),),
        workload='volume'),
    Mutant(
        'recovered-records-not-copied', 'V4', (
            Edit(_RECOVERY,
                 'GD_TRY(gd_journal_tail_copy(&tail, to, enter_copy, copies, '
                 'err));',
                 '(void)tail, (void)to, (void)enter_copy, (void)copies;'),),
        workload='volume'),
    Mutant(
        'copies-behind-the-name', 'V4', (
            Edit(_RECOVERY,
                 '    gd_status s =\n'
                 '        copy ? copy_tails(volume, *made, copies, err) : '
                 'GD_OK;\n'
                 '    if (s != GD_OK) {\n'
                 '        gd_journal_abandon(*made);\n'
                 '        return s;\n'
                 '    }\n'
                 '    return gd_journal_publish(*made, volume->name, named, '
                 'err);\n',
                 '    GD_TRY(gd_journal_publish(*made, volume->name, named, '
                 'err));\n'
                 '    return copy ? copy_tails(volume, *made, copies, err) : '
                 'GD_OK;\n'),),
        workload='volume'),
    Mutant(
        'frozen-journal-not-synced', 'V11', (
            Edit(_VOLUME_STATE,
                 'gd_volume_unsynced_bytes(active) > 0 ? active : NULL;',
                 'NULL;'),),
        workload='volume-unsynced', quick=True),
    Mutant(
        'records-behind-a-torn-journal', 'V11', (
            Edit(_RECOVERY,
                 '    gd_journal_forget(journal);\n',
                 ''),),
        workload='volume-unsynced'),
    Mutant(
        'records-behind-a-torn-journal-read', 'V11', (
            Edit(_RECOVERY,
                 '        gd_overlay_clear(&volume->fresh);\n'
                 '        r->count = 0;\n',
                 '        r->count = 0;\n'),),
        tests=_VOLUME_TESTS, why_not='the disk must be full'),
    Mutant(
        'marks-behind-a-torn-journal', 'V11', (
            Edit(_RECOVERY,
                 '        gd_overlay_clear(&volume->fresh);\n'
                 '        r->count = 0;\n',
                 '        gd_overlay_clear(&volume->fresh);\n'),),
        workload='volume-unsynced'),
    Mutant(
        'unproven-journal-not-copied', 'V4', (
            Edit(_RECOVERY,
                 '(reaches[i].durable == reaches[i].end ||\n'
                 '                                   proves_earlier(next));',
                 'next != NULL;'),),
        tests=_VOLUME_TESTS,
        why_not='a process must be killed, and then the machine crash'),
    Mutant(
        'active-journal-synced-first', 'V11', (
            Edit(_VOLUME_STATE,
                 'volume->unsynced != NULL ? volume->unsynced : '
                 'volume->active;',
                 'volume->unsynced != NULL &&\n'
                 '                    volume->active->durable == '
                 'volume->active->end\n'
                 '                ? volume->unsynced : volume->active;'),),
        tests=_VOLUME_TESTS, why_not='another thread must write meanwhile'),
    Mutant(
        'flush-before-the-record-of-the-end', 'V11', (
            Edit(_CHECKPOINT,
                 '        s = gd_volume_sync_stored(volume, err);\n',
                 '        volume->unsynced = NULL;\n'
                 '        s = gd_volume_sync_stored(volume, err);\n'),),
        tests=_VOLUME_TESTS,
        why_not='a thread must have waited since before the checkpoint'),
    Mutant(
        'loss-behind-a-proof-not-noticed', 'V5', (
            Edit(_RECOVERY,
                 '    if (proves_earlier(journal)) {\n'
                 '        return gd_journal_lost(torn, err);\n'
                 '    }\n',
                 '    (void)torn, (void)err;\n'),),
        tests=_VOLUME_TESTS, why_not='a disk must lose what was synced'),
    Mutant(
        'frozen-journal-dropped-before-the-marks', 'V6', (
            Edit(_VOLUME_STATE,
                 '    GD_TRY(make_next(volume, change, needed, &head, &made, '
                 'err));\n'
                 '    volume->head = head;\n'
                 '    if (fate == GD_REPLACE) {\n'
                 '        gd_volume_drop_frozen(volume);\n'
                 '    }\n',
                 '    if (fate == GD_REPLACE) {\n'
                 '        gd_volume_drop_frozen(volume);\n'
                 '    }\n'
                 '    GD_TRY(make_next(volume, change, needed, &head, &made, '
                 'err));\n'
                 '    volume->head = head;\n'),),
        workload='volume-unsynced'),
    Mutant(
        'larger-before-its-writes', 'V11', (
            Edit(_RESIZE,
                 '    gd_status s = gd_volume_sync(volume, err);\n',
                 '    gd_status s = GD_OK;\n'),),
        workload='volume-resized'),
    Mutant(
        'marks-not-synced', 'V6', (
            Edit(_CHECKPOINT,
                 '        s = gd_volume_sync_stored(volume, err);\n',
                 ''),),
        workload='volume'),
    Mutant(
        'editions-deleted-before-the-marks', 'V6', (
            Edit(_CHECKPOINT,
                 '    GD_TRY(replace_frozen(volume, go_on, err));\n',
                 '    size_t made = volume->made_count;\n'
                 '    delete_old(volume);\n'
                 '    volume->made_count = made;\n'
                 '    GD_TRY(replace_frozen(volume, go_on, err));\n'),),
        workload='volume'),
    Mutant(
        'journals-unlinked-before-they-are-stored', 'V6', (
            Edit(_CHECKPOINT,
                 '    GD_TRY(append_marks(volume, err));\n',
                 '    for (size_t i = 0; i < volume->frozen_count; i++) {\n'
                 '        GD_TRY(gd_volume_unlink_journal(\n'
                 '            volume->repo->env, volume->repo->root, '
                 'volume->name,\n'
                 '            volume->frozen[i]->number, err));\n'
                 '    }\n'
                 '    GD_TRY(append_marks(volume, err));\n'),),
        workload='volume'),
    Mutant(
        'editions-kept-without-marks', 'V7', (
            Edit(_RECOVERY,
                 '    (void)gd_volume_delete_recipes(volume->repo, head, '
                 'marks, head->marks,\n'
                 '                                   NULL);\n',
                 '    (void)marks;\n'),),
        workload='volume'),
    Mutant(
        'clone-ready-before-its-base', 'V9', (
            Edit(_VOLUME_CREATE,
                 '.state = plan->base == NULL ? GD_VOLUME_READY : '
                 'GD_VOLUME_MAKING,',
                 '.state = GD_VOLUME_READY,'),),
        workload='volume-cloned'),
    Mutant(
        'deleted-while-ready', 'V9', (
            Edit(_VOLUME_DELETE,
                 '    if (head->state != GD_VOLUME_READY) {\n'
                 '        /* It is',
                 '    if (head->state == GD_VOLUME_READY) {\n'
                 '        return GD_OK;\n'
                 '    }\n'
                 '    if (head->state != GD_VOLUME_READY) {\n'
                 '        /* It is'),),
        workload='volume-deleted'),
    Mutant(
        'newest-journal-removed-first', 'V9', (
            Edit(_VOLUME_DIRECTORY,
                 '        if (i + 1 == count) {\n'
                 '            s = gd_sync_dir(env, root, directory, err);\n'
                 '        }\n',
                 '        (void)directory;\n'),),
        workload='volume-deleted'),
    Mutant(
        'lock-not-the-first-name', 'V9', (
            Edit(_VOLUME_DIRECTORY,
                 'return gd_sync_dir(env, root, directory, err);\n'
                 '}\n\nstatic gd_status\nlock_file(',
                 'return GD_OK;\n'
                 '}\n\nstatic gd_status\nlock_file('),),
        workload='volume-deleted'),
    Mutant(
        'lock-not-the-last-name', 'V9', (
            Edit(_VOLUME_DIRECTORY,
                 '        if (i + 1 == sizeof files / sizeof *files) {\n'
                 '            s = gd_sync_dir(env, root, directory, err);\n'
                 '        }\n',
                 ''),),
        workload='volume-deleted'),
    Mutant(
        'cut-part-not-zeroed', 'volumes.rst, "Operations"', (
            Edit(_RESIZE,
                 '    if (end == size) {\n',
                 '    if (end >= size) {\n'),),
        workload='volume-resized'),
    Mutant(
        'checkpoint-amid-a-snapshot', 'volumes.rst, "Operations"', (
            Edit(_CHECKPOINT,
                 '    if (s == GD_OK) {\n'
                 '        gd_volume_copy_head(volume, &head);\n'
                 '        s = gd_edition_snapshot(',
                 '    pthread_mutex_unlock(&volume->checkpointing);\n'
                 '    if (s == GD_OK) {\n'
                 '        gd_volume_copy_head(volume, &head);\n'
                 '        s = gd_edition_snapshot('),
            Edit(_CHECKPOINT,
                 '                                header, err);\n'
                 '    }\n'
                 '    pthread_mutex_unlock(&volume->checkpointing);\n',
                 '                                header, err);\n'
                 '    }\n')),
        tests=_MOMENTS, why_not='another thread must do something meanwhile'),
    Mutant(
        'failed-append-left', 'V3', (
            Edit(_JOURNAL,
                 '    if (journal->reached > journal->end) {\n',
                 '    if (journal->reached > UINT64_MAX - 1) {\n'),),
        tests=_VOLUME_TESTS, why_not='a write must fail'),
    Mutant(
        'durable-behind-the-sync', 'V3', (
            Edit(_VOLUME_STATE,
                 '        journal->durable = journal->durable < end ? end : '
                 'journal->durable;\n',
                 '        journal->durable = journal->end;\n'),),
        tests=_VOLUME_TESTS,
        why_not='another thread must write during a sync'),
    Mutant(
        'end-that-is-not-proven', 'V4', (
            Edit(_RECOVERY,
                 ': last             ? journal->durable',
                 ': last             ? journal->end'),),
        workload='volume'),
    Mutant(
        'chain-without-ends-kept', 'V4', (
            Edit(_RECOVERY,
                 'return reaches[i].end != 0 && (',
                 'return reaches[i].end == 0 || ('),),
        tests=_VOLUME_TESTS, why_not='it takes an older program'),
    Mutant(
        'lost-records-not-noticed', 'V5', (
            Edit(_JOURNAL,
                 '               : look_behind(scan, err);\n',
                 '               : (void)look_behind, GD_OK;\n'),),
        tests=_VOLUME_TESTS, why_not='a disk must lose what was synced'),
    Mutant(
        'needed-journal-forgotten', 'V8', (
            Edit(_VOLUME_STATE,
                 'head->needed = needed ? active->number : head->journal;',
                 'head->needed = head->journal;'),),
        workload='volume'),
    Mutant(
        'deleting-not-durable', 'V9', (
            Edit(_VOLUME_DELETE,
                 '        return gd_sync_dir(repo->env, repo->root, '
                 'directory, err);\n',
                 '        return GD_OK;\n'),),
        tests=_VOLUME_TESTS,
        why_not='a process must be killed, and then the machine crash'),
    Mutant(
        'recycled-with-the-old-seed', 'V10', (
            Edit(_JOURNAL,
                 '    GD_TRY(gd_random(env, &head->seed, sizeof head->seed, '
                 'err));\n',
                 '    if (head->seed == 0) {\n'
                 '        GD_TRY(gd_random(env, &head->seed, '
                 'sizeof head->seed, err));\n'
                 '    }\n'),),
        workload='volume-recycled'),
    Mutant(
        'recycled-before-it-is-stored', 'V10', (
            Edit(_CHECKPOINT,
                 '    GD_TRY(append_marks(volume, err));\n',
                 '    for (size_t i = 0; i < volume->frozen_count; i++) {\n'
                 '        gd_journal *frozen = volume->frozen[i];\n'
                 '        if (volume->spare == NULL &&\n'
                 '            gd_journal_retire(frozen, volume->name)) {\n'
                 '            frozen->users++;\n'
                 '            volume->spare = frozen;\n'
                 '        }\n'
                 '    }\n'
                 '    GD_TRY(append_marks(volume, err));\n'),),
        workload='volume-recycled'),
    Mutant(
        'recycled-while-it-is-read', 'V10', (
            Edit(_VOLUME_STATE,
                 '!journal->made || journal->users > 1 || volume->spare',
                 '!journal->made || volume->spare'),),
        tests=_VOLUME_TESTS,
        why_not='another thread must read meanwhile'),
    Mutant(
        'recycled-without-a-sync', 'V10', (
            Edit(_VOLUME_STATE,
                 '        gd_volume_unsynced_bytes(journal) > '
                 'GD_VOLUME_LITTLE ||\n',
                 ''),),
        tests=_VOLUME_TESTS, why_not='it costs time only'),
    Mutant(
        'head-of-a-recycled-journal-believed', 'V10', (
            Edit(_VOLUME_NEWEST,
                 'if (s != GD_NOTFOUND && s != GD_CORRUPT) {',
                 'if (s != GD_NOTFOUND) {'),),
        tests=_VOLUME_TESTS,
        why_not='another process must read meanwhile'),
    Mutant(
        'one-name-for-all-new-journals', 'V2', (
            Edit(_VOLUME_NAMES,
                 '    GD_TRY(gd_random(env, &number, sizeof number, err));\n',
                 '    number = env == NULL && err == NULL;\n'),),
        tests=_VOLUME_TESTS, why_not='it takes an owner that was cut off'),
    Mutant(
        'copies-beyond-the-size', 'V4', (
            Edit(_JOURNAL_TAIL,
                 '    if (record.offset >= c->to->size) {\n',
                 '    if (record.offset >= UINT64_MAX - 1) {\n'),),
        tests=_VOLUME_TESTS, why_not='no program shrinks a volume so'),
    Mutant(
        'former-owner-stores', 'V6', (
            Edit(_CHECKPOINT,
                 '    GD_TRY(gd_volume_confirm_owner(volume, err));\n'
                 '    gd_edition_hints *hints',
                 '    gd_edition_hints *hints'),),
        tests=_VOLUME_TESTS, why_not='it takes an owner that was cut off'),
    Mutant(
        'edition-of-the-next-owner-deleted', 'V6', (
            Edit(_EDITION,
                 '    GD_TRY(owner->confirm(owner->volume, err));\n',
                 '    (void)owner;\n'),),
        tests=_VOLUME_TESTS, why_not='it takes an owner that was cut off'),
    Mutant(
        'former-owner-commits', 'V6', (
            Edit(_EDITION,
                 '    GD_TRY(batch->owner.confirm(batch->owner.volume, '
                 'err));\n',
                 ''),),
        tests=_VOLUME_TESTS, why_not='it takes an owner that was cut off'),
    Mutant(
        'first-head-without-the-marks', 'V4', (
            Edit(_RECOVERY,
                 'stored && i < volume->made_count; i++) {',
                 'stored && i > volume->made_count; i++) {'),),
        workload='volume-without-room'),
    Mutant(
        'journals-removed-before-the-first-head', 'V4', (
            Edit(_RECOVERY,
                 '    gd_status s = gd_parts_marks(&volume->parts, ',
                 '    if (stored) {\n'
                 '        volume->head.needed = head.journal;\n'
                 '        remove_unneeded(volume);\n'
                 '    }\n'
                 '    gd_status s = gd_parts_marks(&volume->parts, '),),
        workload='volume-without-room'),
    Mutant(
        'former-owner-opens', 'V4', (
            Edit(_OPEN,
                 '    bool lost = volume->broken.status != GD_OK && '
                 '!volume->waiting;\n',
                 '    bool lost = false;\n'),),
        tests=_VOLUME_TESTS, why_not='it takes an owner that was cut off'),
    Mutant(
        'former-owner-takes-writes', 'V4', (
            Edit(_RECOVERY,
                 'gd_status s = gd_volume_revalidate(volume, made, err);',
                 'gd_status s = err == NULL ? GD_BUSY : GD_OK;'),),
        tests=_VOLUME_TESTS, why_not='it takes an owner that was cut off'),
    # -- features (N15) ---------------------------------------------------
    Mutant(
        'volumes-without-the-feature', 'N15.1', (
            Edit(_VOLUME_CREATE,
                 's = gd_repo_use_feature(repo, GD_FEATURE_VOLUMES, err);',
                 's = GD_OK;'),),
        workload='volume'),
    Mutant(
        'lists-without-the-feature', 'N15.1', (
            Edit(_REWRITE,
                 'if (cold || (packing != NULL && packing->similar)) {',
                 'if (cold && (packing == NULL || packing->similar)) {'),),
        workload='ordering'),
    Mutant(
        'cold-group-without-the-feature', 'N15.1', (
            Edit(_REWRITE,
                 '? gd_repo_use_feature(repo, GD_FEATURE_COLD, err)',
                 '? GD_OK'),),
        tests=('tests/unit/test_c.py::'
               'TestPlain::test_c[test_grouprewrite_cold-plain]',),
        why_not='it was set when the repository was attached'),
    Mutant(
        'mark-without-the-feature', 'N15.1', (
            Edit(_PACKER,
                 's = gd_repo_try_feature(packer->repo, GD_FEATURE_NODEDUP,\n'
                 '                                packer->has_waited ? 0 : '
                 'MARK_WAIT_MS, err);',
                 's = err == NULL ? GD_IO : GD_OK;'),),
        workload='nodedup'),
    Mutant(
        'features-not-fsynced', 'N15.1', (
            Edit(_FEATURES,
                 's = gd_sync_dir(env, root, GD_DIR_FEATURES, err);',
                 's = GD_OK;'),),
        workload='ordering'),
    Mutant(
        'feature-of-another-not-fsynced', 'N15.1', (
            Edit(_FEATURES,
                 'if (s == GD_OK) {\n        s = gd_sync_dir',
                 'if (s == GD_OK && is_new) {\n        s = gd_sync_dir'),),
        workload='first-volume'),
    Mutant(
        'feature-beside-older-programs', 'N15.2', (
            Edit(_FEATURES,
                 's = exclude_others(env, root, locks, feature, '
                 'timeout_ms, &is_new, err);',
                 '(void)exclude_others, (void)timeout_ms, is_new = true;'),),
        tests=_FEATURE_TESTS,
        why_not='it takes an older program'),
    Mutant(
        'features-read-before-the-lock', 'N15.3', (
            Edit(_REPO,
                 '    gd_status s = '
                 'gd_locks_lock_features_shared(repo->locks, '
                 'GD_FEATURE_COUNT,\n'
                 '                                                err);\n',
                 '    GD_TRY(gd_features_require_known(repo->env, repo->root, '
                 'err));\n'
                 '    gd_status s = '
                 'gd_locks_lock_features_shared(repo->locks, '
                 'GD_FEATURE_COUNT, err);\n'),
            Edit(_REPO,
                 '    return s == GD_OK ? '
                 'gd_features_require_known(repo->env, repo->root, err)\n'
                 '                      : s;\n',
                 '    return s;\n')),
        tests=_FEATURE_TESTS,
        why_not='it takes a newer program'),
    # -- copies that are meant as copies (I14) ----------------------------
    Mutant(
        'index-has-marked-blocks', 'I14', (
            Edit(_INDEX,
                 'entry[GD_LISTED_NODEDUP] == 0) {',
                 'entry[GD_LISTED_NODEDUP] <= 1) {'),),
        tests=('tests/unit/dedupd/tasks/test_nodedup.py',),
        why_not='no crash is needed'),
    Mutant(
        'mark-is-lost-by-a-move', 'I14', (
            Edit(_BLOCK_COPY,
                 '? entry.nodedup',
                 '? false'),),
        workload='nodedup'),
    Mutant(
        'mark-is-lost-by-a-rewrite', 'I14', (
            Edit(_REWRITE,
                 '    entry->plain_offset = at;\n'
                 '    memcpy(',
                 '    entry->plain_offset = at;\n'
                 '    entry->nodedup = false;\n'
                 '    memcpy('),),
        workload='nodedup'),
    Mutant(
        'mark-is-lost-by-a-copy', 'I14', (
            Edit(_ADD_RUNS,
                 'p->nodedup ? GD_DEDUP_OFF : GD_DEDUP_ALL',
                 'GD_DEDUP_ALL'),),
        tests=('tests/unit/test_c.py::TestPlain::'
               'test_c[test_addruns-plain]',),
        why_not='no crash is needed'),
    Mutant(
        'copies-stored-in-one-segment', 'I14', (
            Edit(_PACKER,
                 'fits = !gd_entry_is_copy(',
                 'fits = fits || gd_entry_is_copy('),),
        tests=('tests/unit/dedupd/tasks/test_nodedup.py',),
        why_not='no crash is needed'),
    Mutant(
        'copies-rewritten-into-one-segment', 'I14', (
            Edit(_REWRITE,
                 'has_copy(r, one, slots[one->count])) {',
                 '(has_copy(r, one, slots[one->count]) && false)) {'),),
        tests=('tests/unit/dedupd/tasks/test_nodedup.py',),
        why_not='no crash is needed'),
    Mutant(
        'healed-block-is-merged-to-the-copy', 'I14', (
            Edit(_DAMAGED_BLOCKS,
                 'apart = {address: mapping.pop(address) '
                 'for address in [*mapping]\n',
                 'apart = {address: mapping.pop(address) for address in []\n'),
        ),
        workload='nodedup-healed'),
    Mutant(
        'unknown-mark-is-lost', 'I14', (
            Edit(_DAMAGED_BLOCKS,
                 'return features.NODEDUP in '
                 'self._maintainer.repository.features',
                 'return features.NODEDUP is None'),),
        tests=('tests/damage/test_damage.py', '-k', 'healing_copies'),
        why_not='a crash damages no entry'),
    Mutant(
        'copy-is-found-at-its-address', 'I14', (
            Edit(_LOOKUP,
                 'gd_entry_is_shareable(entry)',
                 'entry->state == GD_ENTRY_LIVE'),),
        tests=('tests/unit/dedupd/tasks/test_nodedup.py',),
        why_not='no crash is needed'),
    # -- the exact index --------------------------------------------------
    Mutant(
        'shard-before-the-pairs', 'I8', (
            Edit(_DUPLICATE_SEARCH,
                 '        s = publish_pairs(m, err);\n'
                 '    }\n'
                 '    m->ns',
                 '        s = publish_shards(m, err);\n'
                 '    }\n'
                 '    m->ns'),
            Edit(_DUPLICATE_SEARCH,
                 '        s = publish_shards(m, err);\n'
                 '    }\n'
                 '    /* Last',
                 '        s = publish_pairs(m, err);\n'
                 '    }\n'
                 '    /* Last')),
        workload='merging'),
    Mutant(
        'runs-removed-before-the-shard', 'I8', (
            Edit(_DUPLICATE_SEARCH,
                 '    gd_status s = require_count(m, &m->sources[0].id, '
                 'err);\n',
                 '    gd_status s = require_count(m, &m->sources[0].id, '
                 'err);\n'
                 '    for (size_t i = 1; s == GD_OK && i < m->source_count; '
                 'i++) {\n'
                 '        s = gd_shards_remove(m->shards, &m->sources[i].id, '
                 'err);\n'
                 '    }\n'),),
        workload='merging-on-two-hosts'),
    Mutant(
        'runs-removed-by-a-late-merge', 'I8', (
            Edit(_DUPLICATE_SEARCH,
                 '        s = require_count(m, &m->made[i], err);\n',
                 '        (void)require_count(m, &m->made[i], err);\n'),),
        tests=('tests/unit/test_c.py::'
               'TestPlain::test_c[test_duplicate_search-plain]',),
        why_not='others must go on while a host is cut off'),
    Mutant(
        'pairs-not-synced', 'I8', (
            Edit(_DUPLICATE_SEARCH,
                 '    GD_TRY(gd_index_writer_publish(m->pairs, err));\n'
                 '    return gd_shards_sync(m->shards, err);\n',
                 '    return gd_index_writer_publish(m->pairs, err);\n'),),
        workload='merging'),
    Mutant(
        'cursors-before-the-runs', 'I8', (
            Edit('dedupd/tasks/exactindex.py',
                 '        self._flush()\n'
                 '        if moved != cursors:\n'
                 '            write(moved)\n',
                 '        if moved != cursors:\n'
                 '            write(moved)\n'
                 '        self._flush()\n'),),
        workload='merging'),
    # -- the list of a cache ----------------------------------------------
    Mutant(
        'list-not-fsynced', 'I8', (
            Edit('glance_dedup/base/files.py',
                 '        f.flush()\n'
                 '        os.fsync(f.fileno())\n',
                 '        f.flush()\n'),),
        workload='evicting'),
    # -- backups (B3) -----------------------------------------------------
    Mutant(
        'digest-without-its-end', 'B3', (
            Edit(_KEYED_DIGEST,
                 'EVP_MAC_update(context, data, len) == 1',
                 'EVP_MAC_update(context, data, len & ~(size_t)15) == 1'),),
        tests=('tests/unit/test_c.py::'
               'TestPlain::test_c[test_keyeddigest-plain]',),
        why_not='a crash does not change how bytes are compared'),
    Mutant(
        'digest-without-its-key', 'B3', (
            Edit(_KEYED_DIGEST,
                 'EVP_MAC_init(context, key, GD_KEYED_KEY_SIZE, params) == 1',
                 'EVP_MAC_init(context, ((void)key, (const uint8_t['
                 'GD_KEYED_KEY_SIZE]){0}),\n'
                 '                        GD_KEYED_KEY_SIZE, params) == 1'),),
        tests=('tests/unit/test_c.py::'
               'TestPlain::test_c[test_keyeddigest-plain]',),
        why_not='a crash does not change how bytes are compared'),
    Mutant(
        'digests-without-their-seal', 'B3', (
            Edit(_DIGESTS,
                 'whole = seal == _seal(self._head.key, page, digests)',
                 'whole = len(seal) == _SEAL'),),
        tests=('tests/unit/backup/test_digests.py', '-k',
               'no_bit or another_order'),
        why_not='the file is replaced as a whole, so that it is torn by '
        'damage alone'),
    Mutant(
        'digests-of-no-backup', 'B3', (
            Edit(_DIGESTS,
                 '        if not all(found[1].base):\n',
                 '        if found[1].base is None:\n'),),
        tests=('tests/unit/backup/test_digests.py', '-k', 'nonsense'),
        why_not='a file without a backup gets its name after the commit '
        'alone'),
    *layout_mutants.MUTANTS,
)


def named(name: str) -> Mutant:
    for mutant in MUTANTS:
        if mutant.name == name:
            return mutant
    raise LookupError(f'there is no mutant {name!r}')


class RottenError(Exception):
    """An edit does not fit the code any more."""


def edited(mutant: Mutant, top: pathlib.Path = TOP) -> dict[str, str]:
    """The changed files' new texts.

    :raises RottenError: unless each old text is found exactly once
    """
    texts: dict[str, str] = {}
    for edit in mutant.edits:
        text = texts.get(edit.file)
        if text is None:
            text = (top / edit.file).read_text()
        found = text.count(edit.old)
        if found != 1:
            raise RottenError(
                f'{mutant.name}: {edit.file} has this {found} times, not '
                f'once:\n{edit.old}')
        texts[edit.file] = text.replace(edit.old, edit.new)
    return texts


class Builder:
    """Makes trees with a mutant in each.

    :param directory: for the objects; must exist. They are compiled once
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory

    def build(self, mutant: Mutant | None, tree: pathlib.Path) -> None:
        """Make a tree that must not exist yet; without a mutant all is good.

        :raises RottenError: as its name says
        :raises subprocess.CalledProcessError: if it does not compile
        """
        texts = {} if mutant is None else edited(mutant)
        for name in _COPIED:
            shutil.copytree(
                TOP / name, tree / name,
                ignore=shutil.ignore_patterns('__pycache__', '*.so',
                                              'corpus', '*.tar.xz'))
        for name in _ALONGSIDE:
            shutil.copy(TOP / name, tree / name)
        for name, text in texts.items():
            (tree / name).write_text(text)
        objects = dict(self._objects)
        if any(name.endswith('.c') for name in texts):
            changed = tree / 'mutated'
            changed.mkdir()
            for name in texts:
                if name.endswith('.c'):
                    objects[name] = self._compile(tree, name, changed)
        _run(['gcc', '-shared', '-pthread', *objects.values(), *_LIBRARIES,
              '-o', tree / _ENGINE])

    @functools.cached_property
    def _objects(self) -> dict[str, pathlib.Path]:
        names = [str(path.relative_to(TOP)) for path in sorted(
            [*TOP.glob('glance_dedup/binding/*.c'),
             *TOP.glob('glance_dedup/engine/*/*.c')])]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(zip(names, pool.map(
                lambda name: self._compile(TOP, name, self._directory),
                names)))

    @staticmethod
    def _compile(tree: pathlib.Path, name: str, directory: pathlib.Path
                 ) -> pathlib.Path:
        result = directory / name.replace('/', '-').replace('.c', '.o')
        _run([*_COMPILE, f'-I{tree}/glance_dedup',
              f'-I{sysconfig.get_paths()["include"]}',
              '-c', tree / name, '-o', result])
        return result


def environment(tree: pathlib.Path) -> dict[str, str]:
    """Return the environment for a Python that runs a tree's code."""
    return {**os.environ, 'PYTHONPATH': str(tree),
            'PYTHONDONTWRITEBYTECODE': '1'}


def _run(command: list) -> None:
    subprocess.run([str(part) for part in command], check=True,
                   timeout=_BUILD_TIMEOUT, capture_output=True, text=True)


def main(arguments: list[str]) -> None:
    if not arguments:
        for mutant in MUTANTS:
            print(f'{mutant.name:40} {mutant.rule:10} '
                  f'{mutant.workload or mutant.why_not}')
        return
    name, directory = arguments
    tree = pathlib.Path(directory).resolve()
    objects = tree.with_name(tree.name + '-objects')
    objects.mkdir()
    try:
        Builder(objects).build(named(name), tree)
    except subprocess.CalledProcessError as e:
        print(e.stderr, file=sys.stderr)
        raise
    finally:
        shutil.rmtree(objects)


if __name__ == '__main__':
    main(sys.argv[1:])
