# SPDX-License-Identifier: Apache-2.0

"""The figures on a repository's content."""

import contextlib
import random

import pytest

from dedupd.status import repository_stats
from dedupd.tasks import collector
from glance_dedup.base import pacing
from tests.support import cold_repositories
from tests.support import maintenance
from tests.support import repositories

pytest_plugins = ['tests.support.object_fixtures']


class Watched:
    """An engine's maintenance that records the groups whose facts are read."""

    def __init__(self, engine, seen):
        self._engine, self._seen = engine, seen

    def group_facts(self, number):
        self._seen.append(number)
        return self._engine.group_facts(number)

    def __getattr__(self, name):
        return getattr(self._engine, name)


def test_sums_are_known_as_soon_as_the_catalog_is(tmp_path):
    """The sums appear as soon as the catalog is available."""
    path = maintenance.create(tmp_path)
    catalogs = []
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'a', maintenance.content(1))
        found = repository_stats.Figures(
            repo, lambda: catalogs[-1] if catalogs else None)
        with contextlib.closing(found), maintenance.maintaining(
                repo) as maintainer:
            assert found.space()['images'] is None
            catalogs.append(maintainer.catalog)
            assert found.space()['images'] == 1
            # The sums are cached for a while.
            repositories.put(repo, 'b', maintenance.content(2))
            maintainer.rebuild()
            catalogs.append(maintainer.catalog)
            assert found.space()['images'] == 1
            found.forget()
            assert found.space()['images'] == 2
            assert found.space()['uncounted'] == 0
            repositories.put(repo, 'c', maintenance.content(3))
            found.forget()
            assert found.space()['images'] == 2
            assert found.space()['uncounted'] == 1


def hit(found):
    """Return the damage of each image."""
    return {image['image_id']: image['damaged'] for image in found.images()}


def test_damage_is_known_or_unknown_but_not_denied(tmp_path):
    """A figure of damage stays while the catalog is missing or rebuilt."""
    path = maintenance.create(tmp_path)
    catalogs = []
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'a', maintenance.content(1))
        repositories.put(repo, 'b', maintenance.content(2))
        found = repository_stats.Figures(
            repo, lambda: catalogs[-1] if catalogs else None)
        with contextlib.closing(found), maintenance.maintaining(
                repo) as maintainer:
            assert found.damage() == (None, set())
            assert hit(found) == {'a': None, 'b': None}
            catalog = maintainer.catalog
            batch = catalog.batch()
            catalog.set_damaged(batch, 1 << 15, {
                'found': 1, 'fingerprint': '00' * 32, 'quarantine': '',
                'images': ['a']})
            maintainer.write(batch)
            catalogs.append(catalog)
            assert found.damage() == (1, {'a'})
            assert hit(found) == {'a': True, 'b': False}
            catalogs.append(None)
            assert found.damage() == (1, {'a'})
            assert hit(found) == {'a': True, 'b': False}


def test_a_recipe_that_cannot_be_read_is_damage(tmp_path):
    """An unreadable recipe counts as damage even without a catalog."""
    path = maintenance.create(tmp_path)
    with repositories.open_repository(path) as repo:
        for number, image_id in enumerate(('a', 'b')):
            repositories.put(repo, image_id, maintenance.content(number))
        recipe = path / 'images' / 'a'
        recipe.write_bytes(bytes(recipe.stat().st_size))
        with contextlib.closing(repository_stats.Figures(
                repo, lambda: None)) as found:
            assert hit(found) == {'a': True, 'b': None}


def test_replaced_images_have_their_own_figures(tmp_path):
    """The figures of a new image do not come from its predecessor."""
    path = maintenance.create(tmp_path)
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'a', maintenance.content(1))
        with maintenance.maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            found = repository_stats.Figures(repo, lambda: maintainer.catalog)
            with contextlib.closing(found):
                old = found.images()[0]['size']
                assert maintainer.catalog.images()['a'][1]['size'] == old
                repo.delete('a')
                assert found.images() == []
                repositories.put(repo, 'a', maintenance.content(1) * 2)
                assert found.images()[0]['size'] == 2 * old


def test_images_compared_have_bounded_extents(tmp_path, monkeypatch):
    """Scattered images are left out, since all their runs are in memory."""
    path = maintenance.create(tmp_path)
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'scattered', maintenance.scattered(1, 2))
        repositories.put(repo, 'a', maintenance.content(3))
        repositories.put(repo, 'b', maintenance.content(3, 4))
        found = repository_stats.Figures(repo, lambda: None)
        with contextlib.closing(found):
            assert set(found.sharing()['images']) == {'scattered', 'a', 'b'}
        monkeypatch.setattr(repository_stats, 'SHARING_PAGES', 2)
        found = repository_stats.Figures(repo, lambda: None)
        with contextlib.closing(found):
            assert found.sharing() == {'images': ['b', 'a'],
                                       'shared': [[20, 10], [10, 10]]}


def test_what_is_forgotten_while_it_is_measured(tmp_path, monkeypatch):
    """Figures from before the end of a task are not returned after it."""
    path = maintenance.create(tmp_path)
    with repositories.open_repository(path) as repo:
        found = repository_stats.Figures(repo, lambda: None)
        measure = found._measure
        with contextlib.closing(found):
            def measure_and_change():
                space = measure()
                repositories.put(repo, 'a', maintenance.content(1))
                found.forget()      # the task would do this
                return space

            monkeypatch.setattr(found, '_measure', measure_and_change)
            before = found.space()['disk_bytes']
            monkeypatch.setattr(found, '_measure', measure)
            assert found.space()['disk_bytes'] > before


def test_metadata_is_part_of_what_is_on_the_disk(tmp_path):
    """The size on the disk includes metadata after all images are deleted."""
    path = repositories.create(tmp_path / 'r', group_slots=32768)
    with (repositories.open_repository(path) as repo,
          maintenance.maintaining(repo) as maintainer):
        repositories.put(repo, 'a', repositories.noise(40 << 20))
        repo.delete('a')
        maintenance.account(maintainer)
        collector.run_once(maintainer, pacing.Pace(), live_share=0)
        with contextlib.closing(repository_stats.Figures(
                repo, lambda: maintainer.catalog)) as found:
            space = found.space()
    assert space['unique_blocks'] == 0
    assert 0 < space['metadata_bytes'] <= space['disk_bytes']


@pytest.mark.parametrize('seed', range(3))
def test_metadata_is_a_part_whatever_was_deleted(tmp_path, seed):
    """Groups are filled, emptied, evacuated and removed."""
    rng = random.Random(seed)
    path = repositories.create(tmp_path / 'r', group_slots=2048)
    with (repositories.open_repository(path) as repo,
          maintenance.maintaining(repo) as maintainer,
          contextlib.closing(repository_stats.Figures(
              repo, lambda: maintainer.catalog)) as found):
        def measure():
            found.forget()
            space = found.space()
            assert 0 < space['metadata_bytes'] <= space['disk_bytes']
            return space

        def collect():
            maintenance.account(maintainer)
            collector.run_once(maintainer, pacing.Pace(),
                               evacuate_share=rng.choice([0, 50, 90]))
            return measure()

        stored = []
        for number in range(12):
            stored.append(f'image-{number}')
            repositories.put(repo, stored[-1], repositories.noise(
                rng.randrange(1, 6 << 20), 100 * seed + number))
            measure()
            for _ in range(rng.randrange(min(3, len(stored)))):
                repo.delete(stored.pop(rng.randrange(len(stored))))
            collect()
        for image_id in stored:
            repo.delete(image_id)
            measure()
        assert [collect()['unique_blocks'] for _ in range(2)] == [0, 0]
    repositories.require_clean(path)


def test_saved_is_of_the_bytes_that_are_not_zero(tmp_path):
    """Zeros do not count as saved bytes.

    The command line counts images in the same way.
    """
    path = maintenance.create(tmp_path)
    data = b''.join([maintenance.content(1, blocks=400)] * 4)
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'a', data + bytes(10 * len(data)))
        with maintenance.maintaining(repo) as maintainer:
            found = repository_stats.Figures(repo, lambda: maintainer.catalog)
            with contextlib.closing(found):
                space = found.space()
    assert space['nonzero_bytes'] == len(data)
    for name, base in (('saved_percent', space['nonzero_bytes']),
                       ('saved_of_logical_percent', space['logical_bytes'])):
        assert space[name] == round(100 * (1 - space['disk_bytes'] / base), 2)
    assert space['saved_percent'] < space['saved_of_logical_percent']


def test_what_is_in_objects_is_not_saved(tmp_path, server, monkeypatch):
    """Each group's file is read once, and again after a change."""
    cold = cold_repositories.ColdRepository(
        tmp_path / 'r', server, server.url, group_slots=256)
    cold.put('a', repositories.noise(1 << 20, 1))
    cold.put('b', repositories.noise(3 << 19, 2))
    with cold.open() as repo:
        figures = repository_stats.Figures(repo, lambda: None)
        with contextlib.closing(figures) as found:
            assert found.space()['object_bytes'] == 0
            assert cold.cool() == 2
            read = []
            monkeypatch.setattr(found, '_engine', Watched(found._engine, read))
            found.forget()
            assert found.space()['object_bytes'] == sum(
                facts['end'] for facts in cold.groups.values()) > 2 << 20
            assert sorted(read) == [1, 2]
            cold.put('c', repositories.noise(1 << 20, 3))
            assert cold.cool() == 3
            found.forget()
            assert found.space()['object_bytes'] > 3 << 20
            assert sorted(read) == [1, 2, 3]
