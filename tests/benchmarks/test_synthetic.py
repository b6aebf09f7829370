# SPDX-License-Identifier: Apache-2.0

"""The benchmarks' synthetic repository is like any other."""

import importlib.util
import os
import pathlib
import struct

import pytest

from glance_dedup.check import checker
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import image_repository

pytestmark = pytest.mark.long

FILE = (pathlib.Path(__file__).resolve().parent.parent.parent / 'benchmarks'
        / 'synthetic.py')
BLOCKS = 300        # in groups of 64: the last one is not full
SLOTS = 64
IMAGES = 7


@pytest.fixture(scope='module')
def synthetic():
    spec = importlib.util.spec_from_file_location('synthetic', FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def program(synthetic, tmp_path_factory):
    return synthetic.build(str(tmp_path_factory.mktemp('program')))


def opened(path, tmp_path):
    return image_repository.Repository(path,
                                       filter_dir=str(tmp_path / 'filter'))


def test_with_data_nothing_is_wrong(synthetic, program, tmp_path):
    path = str(tmp_path / 'repository')
    seen = []
    synthetic.make(path, BLOCKS, images=IMAGES, data=True,
                   group_slots=SLOTS, program=program,
                   progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, BLOCKS) for n in (64, 128, 192, 256, 300)]
    with opened(path, tmp_path) as repo:
        assert repo.images() == [synthetic.image_id(n) for n in range(IMAGES)]
        content = b''.join(
            repo.open_image(synthetic.image_id(n)).read()
            for n in range(IMAGES))
        with maintainer_role.Maintainer(repo):
            pass    # counts them
    assert content == b''.join(map(synthetic.content, range(BLOCKS)))
    report = checker.check(path)
    assert not report.findings
    assert report.figures['blocks_verified'] == BLOCKS


def test_what_is_there_is_found(synthetic, program, tmp_path):
    path = str(tmp_path / 'repository')
    synthetic.make(path, BLOCKS, images=IMAGES, group_slots=SLOTS,
                   program=program)
    # There are no blocks.
    assert sum(os.stat(os.path.join(path, 'groups', name)).st_blocks * 512
               for name in os.listdir(os.path.join(path, 'groups'))
               ) < BLOCKS * 4096 // 4
    with opened(path, tmp_path) as repo, repo.begin('image') as transaction:
        found = transaction.find(
            b''.join(map(synthetic.fingerprint, range(BLOCKS + 1))),
            struct.pack('<I', 4096) * (BLOCKS + 1))
    addresses = struct.unpack(f'<{BLOCKS + 1}Q', found)
    assert addresses[BLOCKS] == 0
    known = {i: (a >> 15, a & 0x7fff) for i, a in enumerate(addresses) if a}
    # At most four stores are loaded at a time.
    assert len(known) >= 4 * SLOTS
    assert all(known[i] == synthetic.address(i, SLOTS) for i in known)


def test_only_images_that_have_blocks_are_made(synthetic, tmp_path):
    with pytest.raises(ValueError, match='8 images cannot have 7 blocks'):
        synthetic.make(tmp_path / 'repository', 7, images=8)
