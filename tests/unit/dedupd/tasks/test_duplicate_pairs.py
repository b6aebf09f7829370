# SPDX-License-Identifier: Apache-2.0
"""The known duplicates in the catalog and their order."""

import pytest

from dedupd.tasks import duplicate_pairs
from dedupd.tasks import exactindex
from glance_dedup.maintenance import catalog_db
from tests.support import repositories
from tests.unit.dedupd.tasks import test_exactindex
from tests.unit.dedupd.tasks import test_merger

pytest_plugins = ['tests.support.maintainer_fixtures']

path, repo = test_exactindex.path, test_exactindex.repo
DATA, OTHER = test_exactindex.DATA, test_exactindex.OTHER


def test_pairs_are_durable_before_their_file_goes(repo, maintainer,
                                                  monkeypatch):
    """Pairs are synced before their file is removed.

    A crash may lose a batch that was not synced.
    """
    monkeypatch.setattr(exactindex, 'PAIRS_AT_ONCE', 100)
    test_merger.put_at_once(repo, a=DATA, b=DATA)
    done = []
    write = catalog_db.Catalog.write

    def watching_write(catalog, batch, sync=False, **options):
        if any(key.startswith(b'p') for key, _ in batch.items()):
            done.append(sync)
        write(catalog, batch, sync=sync, **options)
    monkeypatch.setattr(catalog_db.Catalog, 'write', watching_write)

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
    write = catalog_db.Catalog.write

    def watching_write(catalog, batch, **options):
        if any(key.startswith(b'p') for key, _ in batch.items()):
            done.append('forgotten')
        write(catalog, batch, **options)
    monkeypatch.setattr(catalog_db.Catalog, 'write', watching_write)
    with test_exactindex.watched(
            monkeypatch, lambda name, _: done.append(name)):
        test_merger.merge(maintainer)
    assert 'add' in done[:done.index('forgotten')]
    test_merger.require_exact(maintainer, {'b': DATA, 'c': DATA})


@pytest.mark.parametrize('rounds', [1, 8])
def test_rounds(repo, maintainer, monkeypatch, rounds):
    """The next run does the rest of a bounded run."""
    monkeypatch.setattr(duplicate_pairs, 'ROUNDS', rounds)
    repositories.put(repo, 'a', DATA)
    test_merger.merge(maintainer)
    repo.delete('a')
    test_merger.collect(maintainer)
    repositories.put(repo, 'keep', OTHER)
    test_merger.put_at_once(repo, b=DATA, c=DATA)
    test_merger.merge(maintainer)
    if rounds == 1:
        test_merger.merge(maintainer)
    test_merger.require_exact(maintainer,
                              {'keep': OTHER, 'b': DATA, 'c': DATA})
    test_merger.require_settled(maintainer)
