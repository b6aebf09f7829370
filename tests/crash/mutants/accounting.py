# SPDX-License-Identifier: Apache-2.0

"""Bugs in accounting (I9, N1 to N5)."""

from tests.crash.mutants.mutant import c_tests
from tests.crash.mutants.mutant import Edit
from tests.crash.mutants.mutant import Mutant

_FENCE = 'glance_dedup/engine/files/fence.c'
_ACCOUNTING = 'dedupd/tasks/accounting.py'


MUTANTS = (
    Mutant(
        'counted-twice', 'N1', (
            Edit(_ACCOUNTING,
                 'if txid is None or (counted == entry.live and not begun):',
                 'if txid is None or (not counted and not begun '
                 'and not entry.live):'),
            Edit('glance_dedup/maintenance/refcounts.py',
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
        tests=c_tests('fence'),
        why_not='the fence tells of a catalog that lost what it had synced, '
        'which the explorer\'s does not'),
)
