# SPDX-License-Identifier: Apache-2.0

"""Bugs in images that are kept as their disks."""

from tests.crash.mutants.mutant import Edit
from tests.crash.mutants.mutant import Mutant

_MERGE = 'glance_dedup/engine/maintenance/merge.c'
_TRANSACTION = 'glance_dedup/engine/write/transaction.c'
_DERIVE = 'glance_dedup/engine/read/derive.c'
_CONVERSION_TESTS = ('tests/unit/repository/test_conversion.py',)

MUTANTS = (
    Mutant(
        'derived-bytes-not-compared', 'F1', (
            Edit(_DERIVE,
                 'length != extent->length ||\n'
                 '        gd_checksum(deriver->out, length, 0) != '
                 'extent->digest',
                 'length == 0'),),
        tests=_CONVERSION_TESTS,
        why_not='it takes a wrong encoder'),
    Mutant(
        'table-is-lost-by-a-merge', 'F2', (
            Edit(_MERGE,
                 '    GD_TRY(copy_table(merge, err));\n',
                 '    (void)copy_table;\n'),),
        tests=_CONVERSION_TESTS,
        why_not='no crash is needed'),
    Mutant(
        'converted-recipe-not-fsynced', 'F2', (
            Edit(_TRANSACTION,
                 '    GD_TRY(gd_fsync(repo->env, image->spool.fd, '
                 'image->spool.name, err));\n',
                 ''),),
        workload='converting'),
    Mutant(
        'table-without-the-feature', 'F10', (
            Edit(_TRANSACTION,
                 '    GD_TRY(gd_repo_use_feature(transaction->repo, '
                 'GD_FEATURE_DISKS, err));\n',
                 ''),),
        workload='converting'),
)
