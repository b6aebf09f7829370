# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of many blocks at once, through the whole engine.

Whatever computes a fingerprint, it is the one that hashlib computes, and the
engine builds and works without the library. The code itself is tested by
tests/c/format/test_sha256mb.c and test_fingerprint.c.
"""

import hashlib
import os
import re
import subprocess

import pytest

from glance_dedup.base import scopes
from glance_dedup.repository import repository
from tests.unit import test_c
from tests.unit.test_c import objects

assert objects      # the fixture, for the tests below

BLOCK = 4096


@pytest.mark.parametrize('scope', ['global', 'project'])
@pytest.mark.parametrize('threads', [0, 2])
def test_stored_fingerprints(tmp_path, scope, threads):
    # Some blocks more than the lanes are filled with, and half a block.
    data = os.urandom(203 * BLOCK + BLOCK // 2)
    path = tmp_path / 'repository'
    repository.Repository.create(path)
    with repository.Repository(path, filter_dir=tmp_path,
                               threads=threads) as repo:
        with repo.begin('image', 'some project', scope) as transaction:
            transaction.write(data)
            transaction.commit()
    scope_id = scopes.choose(scope, 'some project')
    before = b'' if scope == 'global' else scope_id
    group = (path / 'groups' / '00000001').read_bytes()
    for slot in range(204):
        at = 4096 + slot // 9 * 512 + slot % 9 * 56
        block = data[slot * BLOCK:(slot + 1) * BLOCK]
        assert group[at:at + 32] == hashlib.sha256(before + block).digest()


@pytest.mark.slow
@pytest.mark.parametrize('concept', ['fingerprint', 'sha256mb'])
def test_build_without_the_library(concept, objects, tmp_path):
    source = test_c.ENGINE / 'format' / 'sha256mb.c'
    without = tmp_path / test_c.object_name(source)
    compiler = [*test_c.COMPILE, *test_c.VARIANTS['plain'],
                '-DGD_WITHOUT_IPSEC_MB']
    test_c.build([*compiler, '-c', source, '-o', without])
    symbols = subprocess.run(['nm', without], check=True, text=True,
                             capture_output=True).stdout
    assert 'dlopen' not in symbols
    others = [path for path in objects('plain')
              if path.name != without.name]
    program = tmp_path / concept
    test_c.build([*compiler, test_c.program_of(concept), *others, without,
                  '-o', program, *test_c.LIBRARIES])
    status, output = test_c.run(program)
    assert status == 0, output
    assert re.search(r'^[1-9]\d* passed, 0 failed$', output, re.MULTILINE)
