# SPDX-License-Identifier: Apache-2.0

"""The commands work on this host's filter, or on the index instead."""

import os
import re

import pytest

from tests.support import repositories


@pytest.fixture
def filled(created, tmp_path):
    image = tmp_path / 'image.raw'
    image.write_bytes(repositories.noise(1 << 20))
    assert created('image', 'put', 'first', image).status == 0
    return created


@pytest.fixture(params=['filter', 'lmdb', 'dtb'])
def indexed(filled, request, tmp_path):
    if request.param != 'filter':
        filled.options += ['--index', request.param,
                           '--index-dir', str(tmp_path / 'index')]
    image = tmp_path / 'image.raw'
    assert filled('image', 'put', 'second', image).status == 0
    return filled


def test_remove(indexed, tmp_path):
    path = indexed('index', 'show', '-f', 'json').json()['path']
    assert indexed('index', 'remove', '-f', 'json').json() == {
        'path': path, 'removed': True}
    assert not list(tmp_path.glob(f'*/{path.split("/")[-1]}'))
    assert indexed('index', 'remove', '-f', 'json').json() == {
        'path': None, 'removed': False}
    # The next upload makes the index again, and finds the stored blocks.
    image = tmp_path / 'image.raw'
    assert indexed('image', 'put', 'third', image, '-f',
                   'json').json()['new_bytes'] == 0


def test_when_the_filter_was_refreshed(filled):
    found = filled('index', 'show')
    assert re.search(r'filter_refresh_age_seconds +\| (less than 1|\d+) '
                     '(s|min|h) ', found.out)
    found = filled('index', 'show', '-f', 'json').json()
    assert isinstance(found['filter_refresh_age_seconds'], float)


def test_an_empty_variable_is_none(created, monkeypatch, tmp_path):
    """The filter's place is the same as without the empty variable."""
    at = created.options.index('--filter-dir')
    del created.options[at:at + 2]
    file = tmp_path / 'dedupd.conf'
    file.write_text(f'[dedupd]\ndatadir = {created.path}\n'
                    f'filter_dir = {tmp_path}/filter\n')
    for name in 'FILTER_DIR', 'INDEX_DIR':
        monkeypatch.setenv(f'GLANCE_DEDUP_{name}', '')
    found = created('--config-file', file, 'index', 'show', '-f', 'json')
    assert found.err == '' and found.json()['error'] is None
    assert os.path.dirname(found.json()['path']) == f'{tmp_path}/filter'
    file.write_text(f'[dedupd]\ndatadir = {created.path}\nfilter_dir =\n')
    found = created('--config-file', file, 'index', 'show', '-f', 'json')
    assert found.json()['path'].startswith('/dev/shm/')


def test_one_in_use_stays(indexed):
    index = dict(zip(indexed.options[::2], indexed.options[1::2]))
    with repositories.open_repository(
            indexed.path, filter_dir=index['--filter-dir'],
            index=index.get('--index', 'filter'),
            index_dir=index.get('--index-dir')) as repo:
        assert repo.statistics()['filter_complete']
        indexed('index', 'remove').locked(
            'is in use', 'glance-api')
    assert indexed('index', 'remove', '-f', 'json').json()['removed']


def test_rebuild(filled):
    assert filled('index', 'remove').status == 0
    found = filled('index', 'rebuild', '-f', 'json').json()
    assert found['filter_hints'] == 256 and found['filter_complete']


def test_show_without_one(created):
    found = created('index', 'show', '-f', 'json').json()
    assert found['index'] == 'filter' and found['filter_bytes'] == 0
