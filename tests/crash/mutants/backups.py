# SPDX-License-Identifier: Apache-2.0

"""Bugs in backups, and in the list of a cache."""

from tests.crash.mutants.mutant import c_tests
from tests.crash.mutants.mutant import Edit
from tests.crash.mutants.mutant import Mutant

_KEYED_DIGEST = 'glance_dedup/engine/format/keyeddigest.c'
_DIGESTS = 'glance_dedup/backup/digests.py'


MUTANTS = (
    # -- backups (B3) -----------------------------------------------------
    Mutant(
        'digest-without-its-end', 'B3', (
            Edit(_KEYED_DIGEST,
                 'EVP_MAC_update(context, data, len) == 1',
                 'EVP_MAC_update(context, data, len & ~(size_t)15) == 1'),),
        tests=c_tests('keyeddigest'),
        why_not='a crash does not change how bytes are compared'),
    Mutant(
        'digest-without-its-key', 'B3', (
            Edit(_KEYED_DIGEST,
                 'EVP_MAC_init(context, key, GD_KEYED_KEY_SIZE, params) == 1',
                 'EVP_MAC_init(context, ((void)key, (const uint8_t['
                 'GD_KEYED_KEY_SIZE]){0}),\n'
                 '                        GD_KEYED_KEY_SIZE, params) == 1'),),
        tests=c_tests('keyeddigest'),
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
    # -- the list of a cache ----------------------------------------------
    Mutant(
        'list-not-fsynced', 'I8', (
            Edit('glance_dedup/base/files.py',
                 '        f.flush()\n'
                 '        os.fsync(f.fileno())\n',
                 '        f.flush()\n'),),
        workload='evicting'),
)
