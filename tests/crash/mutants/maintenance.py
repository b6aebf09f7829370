# SPDX-License-Identifier: Apache-2.0

"""Bugs in collecting, rewriting and merging, and in the exact index."""

from tests.crash.mutants.mutant import c_tests
from tests.crash.mutants.mutant import Edit
from tests.crash.mutants.mutant import Mutant

_OWNED_GROUP = 'glance_dedup/engine/maintenance/ownedgroup.c'
_REWRITE = 'glance_dedup/engine/maintenance/grouprewrite.c'
_DUPLICATE_SEARCH = 'glance_dedup/engine/files/duplicate_search.c'
_TIERER = 'dedupd/tasks/tierer.py'


MUTANTS = (
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
        tests=c_tests('ownedgroup_free'),
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
            Edit('glance_dedup/engine/files/group.c',
                 '        gd_slices_forget(group->slices, &group->object, '
                 'offset, length);',
                 '        (void)offset, (void)length;'),),
        workload='tiering'),
    Mutant(
        'partial-group-exchanged-unmarked', 'I4', (
            Edit('glance_dedup/engine/maintenance/groupexchange.c',
                 'GD_TRY(gd_owned_group_keep_writers_out(owned, err));', ''),),
        tests=c_tests('grouprewrite_partial'),
        why_not='it takes a process that lost its locks before its rename'),
    Mutant(
        'placeholder-not-fsynced', 'I4', (
            Edit('glance_dedup/engine/maintenance/placeholder.c',
                 ': gd_fsync(env, target->fd, target->name, err);',
                 ': GD_OK;'),),
        workload='collection-of-all'),
    Mutant(
        'exchange-beside-transactions', 'I4, I6', (
            Edit(_OWNED_GROUP,
                 '    GD_TRY(exclude_others(leased, err));\n', ''),),
        tests=c_tests('grouprewrite_stages'),
        why_not='the addresses and blocks are the same in both files, so it '
        'takes a process that compares bytes in the old one'),
    # -- merging (N10) ----------------------------------------------------
    Mutant(
        'merged-recipe-not-fsynced', 'N10.2', (
            Edit('glance_dedup/engine/maintenance/merge.c',
                 'GD_TRY(gd_fsync(repo->env, merge->m.fd, merge->m.name, '
                 'err)); /* N10.2 */',
                 ''),),
        workload='merging'),
    Mutant(
        'exchange-before-the-counts', 'N10.3', (
            Edit('dedupd/tasks/merger.py',
                 "        count(maintainer, pace, merge.header()"
                 "['transaction_id'])   # N10.3\n"
                 '        return Merged(merge.replaced, merge.exchange(),'
                 '         # N10.4 to 7\n'
                 '                      merge.collisions)\n',
                 '        done = merge.exchange()\n'
                 "        count(maintainer, pace, merge.header()"
                 "['transaction_id'])\n"
                 '        return Merged(merge.replaced, done, '
                 'merge.collisions)\n'),),
        tests=('tests/unit/dedupd/tasks/test_merger.py::'
               'test_counted_before_it_takes_the_name',),
        why_not='after a crash M is still in the spool, and is counted '
        'before anything is freed'),
    Mutant(
        'replaced-recipe-not-in-the-spool', 'N10.5', (
            Edit('glance_dedup/engine/maintenance/recipeexchange.c',
                 '    GD_TRY(gd_sync_dir(repo->env, repo->root, '
                 'GD_DIR_SPOOL, err));\n',
                 ''),),
        workload='merging'),
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
        tests=c_tests('duplicate_search'),
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
)
