# SPDX-License-Identifier: Apache-2.0
"""The known duplicates: what the catalog has, and in which order."""

import struct

import pytest

from dedupd.tasks import duplicates
from dedupd.tasks import exactindex
from glance_dedup.maintenance import catalog as catalog_module
from tests.support import repositories
from tests.unit.dedupd.tasks import test_exactindex
from tests.unit.dedupd.tasks import test_merger

pytest_plugins = ['tests.support.maintainer_fixtures']

path, repo = test_exactindex.path, test_exactindex.repo
DATA, OTHER = test_exactindex.DATA, test_exactindex.OTHER


def test_pairs_are_durable_before_their_file_goes(repo, maintainer,
                                                  monkeypatch):
    """A crash may lose a batch that was not synced."""
    monkeypatch.setattr(exactindex, 'PAIRS_AT_ONCE', 100)
    test_merger.put_at_once(repo, a=DATA, b=DATA)
    done = []
    write = catalog_module.Catalog.write

    def watching_write(catalog, batch, sync=False, **options):
        if any(key.startswith(b'p') for key, _ in batch.items()):
            done.append(sync)
        write(catalog, batch, sync=sync, **options)
    monkeypatch.setattr(catalog_module.Catalog, 'write', watching_write)

    def before(name, arguments):
        if name == 'remove' and arguments[0][0] == 'pairs':
            done.append('removed')
    with test_exactindex.watched(monkeypatch, before):
        test_merger.merge(maintainer, exclude=lambda facts: True)
    assert done == [True] * 3 + ['removed']


def test_others_are_in_a_run_before_they_are_forgotten(repo, maintainer,
                                                       monkeypatch):
    test_merger.put_at_once(repo, a=DATA, b=DATA, c=DATA)
    repo.delete('a')
    test_merger.merge(maintainer, exclude=lambda facts: True)
    test_merger.collect(maintainer)
    done = []
    write = catalog_module.Catalog.write

    def watching_write(catalog, batch, **options):
        if any(key.startswith(b'p') for key, _ in batch.items()):
            done.append('forgotten')
        write(catalog, batch, **options)
    monkeypatch.setattr(catalog_module.Catalog, 'write', watching_write)
    with test_exactindex.watched(
            monkeypatch, lambda name, _: done.append(name)):
        test_merger.merge(maintainer)
    assert 'add' in done[:done.index('forgotten')]
    test_merger.need_exact(maintainer, {'b': DATA, 'c': DATA})


def older_program(maintainer, pairs=b''):
    """What one that keeps pages leaves; how it would go on."""
    batch = maintainer.catalog.batch()
    for number, _ in maintainer.catalog.groups():
        maintainer.catalog.set_group(batch, number, indexed=256)
    for page in range(8):
        batch.put(struct.pack('>cI', b'f', page),
                  struct.pack('>Q', page << 61) + b'\0\x80\0\0\0')
    maintainer.catalog.write(batch, index_bits=3)


def test_pages_of_an_older_program(repo, maintainer, monkeypatch):
    """Their cursors go first: a crash leaves none in front of a page."""
    test_merger.put_at_once(repo, a=DATA, b=DATA)
    older_program(maintainer)
    seen = []
    write = catalog_module.Catalog.write

    def watching_write(catalog, batch, sync=False, **options):
        if any(key.startswith(b'f') for key, _ in batch.items()):
            seen.append('pages' if sync else 'not synced')
            assert not any(f.get('indexed') for _, f in catalog.groups())
        elif 'index_bits' in options:
            seen.append('bits')
        write(catalog, batch, sync=sync, **options)
    monkeypatch.setattr(catalog_module.Catalog, 'write', watching_write)
    monkeypatch.setattr(duplicates, 'PAGES_AT_ONCE', 3)
    assert test_merger.merge(maintainer).scanned == 512
    assert seen == ['pages'] * 3 + ['bits']
    assert not maintainer.catalog.has_index_pages()
    test_merger.need_exact(maintainer, {'a': DATA, 'b': DATA})
    test_merger.need_settled(maintainer)


def test_older_program_that_was_at_work_between(repo, maintainer):
    """It forgets pairs, and has the other blocks in its own index only."""
    test_merger.put_at_once(repo, a=DATA, b=DATA, c=DATA)
    test_merger.merge(maintainer, exclude=lambda facts: True)
    repo.delete('a')
    test_merger.collect(maintainer)
    older_program(maintainer)
    batch = maintainer.catalog.batch()
    for group in maintainer.catalog.groups_with_duplicates():
        maintainer.catalog.set_duplicates(batch, group, b'')
    maintainer.catalog.write(batch)
    test_merger.merge(maintainer)
    test_merger.need_exact(maintainer, {'b': DATA, 'c': DATA})
    test_merger.need_settled(maintainer)


@pytest.mark.parametrize('rounds', [1, 8])
def test_rounds(repo, maintainer, monkeypatch, rounds):
    """What is left of a bounded run, the next one does."""
    monkeypatch.setattr(duplicates, 'ROUNDS', rounds)
    repositories.put(repo, 'a', DATA)
    test_merger.merge(maintainer)
    repo.delete('a')
    test_merger.collect(maintainer)
    repositories.put(repo, 'keep', OTHER)
    test_merger.put_at_once(repo, b=DATA, c=DATA)
    test_merger.merge(maintainer)
    if rounds == 1:
        test_merger.merge(maintainer)
    test_merger.need_exact(maintainer, {'keep': OTHER, 'b': DATA, 'c': DATA})
    test_merger.need_settled(maintainer)
