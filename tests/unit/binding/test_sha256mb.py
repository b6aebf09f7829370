# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of many blocks at once, through the whole engine.

Each implementation computes the fingerprint that hashlib computes, and the
engine builds and works without the library. The C tests
tests/c/format/test_sha256mb.c and test_fingerprint.c check the code itself.
"""

import hashlib
import os
import re
import subprocess

import pytest

from glance_dedup.base import scopes
from glance_dedup.repository import image_repository
from tests.support import native
from tests.unit import test_c

BLOCK = 4096


@pytest.mark.parametrize('scope', ['global', 'project'])
@pytest.mark.parametrize('threads', [0, 2])
def test_stored_fingerprints(tmp_path, scope, threads):
    # The data has some blocks more than the lanes hold, and half a block.
    data = os.urandom(203 * BLOCK + BLOCK // 2)
    path = tmp_path / 'repository'
    image_repository.Repository.create(path)
    with image_repository.Repository(path, filter_dir=tmp_path,
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


# Long: the test compiles the program and, the first time, the engine.
@pytest.mark.slow
@pytest.mark.parametrize('concept', ['fingerprint', 'sha256mb'])
def test_build_without_the_library(concept, tmp_path):
    source = test_c.ENGINE / 'format' / 'sha256mb.c'
    without = tmp_path / 'sha256mb.o'
    compiler = ['gcc', '-std=c11', '-D_GNU_SOURCE', '-O2', '-Wall', '-Wextra',
                '-Werror', f'-I{test_c.ENGINE.parent}', f'-I{native.TOP}',
                '-DGD_WITHOUT_IPSEC_MB']
    subprocess.run([*compiler, '-c', source, '-o', without], check=True,
                   timeout=60)
    symbols = subprocess.run(['nm', without], check=True, text=True,
                             capture_output=True).stdout
    assert 'dlopen' not in symbols
    # The program's own functions replace those of the engine.
    program = tmp_path / concept
    place = native.directory('plain')
    subprocess.run(
        [*compiler, test_c.program_of(concept), without, '-rdynamic', '-o',
         program, f'-L{place}', f'-Wl,-rpath,{place}', '-lsupport', '-lengine',
         '-lcrypto', '-lxxhash', '-llz4', '-lzstd', '-lpthread'], check=True,
        timeout=60)
    status, output = native.run(program)
    assert status == 0, output
    assert re.search(r'^[1-9]\d* passed, 0 failed$', output, re.MULTILINE)
