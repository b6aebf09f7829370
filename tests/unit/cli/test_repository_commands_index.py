# SPDX-License-Identifier: Apache-2.0

"""The commands work with an index on a disk instead of the filter."""

import random

import pytest

from tests.unit.cli import conftest

cli = conftest.cli


@pytest.mark.parametrize('index', ['lmdb', 'dtb'])
def test_an_index_on_a_disk(cli, tmp_path, index):
    cli('repository', 'create')
    cli.options += ['--index', index, '--index-dir', str(tmp_path / 'index')]
    image = tmp_path / 'image.raw'
    image.write_bytes(random.Random(1).randbytes(1 << 20))
    for name in ('first', 'second'):
        assert cli('image', 'put', name, image).status == 0
    assert cli('image', 'show', '-f', 'json',
               'second').json()['new_bytes'] == 0
    assert len(list((tmp_path / 'index').glob(f'*.{index}/store'))) == 1
    assert cli('index', 'rebuild', '-f', 'json').json()


def test_no_directory(cli, tmp_path):
    cli('repository', 'create')
    cli.options += ['--index', 'lmdb']
    cli('repository', 'show').refused('index_dir')
