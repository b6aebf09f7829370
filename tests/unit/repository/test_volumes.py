# SPDX-License-Identifier: Apache-2.0

"""Recipes of volumes are no images, except to the store itself."""

import asyncio
import concurrent.futures
import contextlib
import fcntl
import io
import json
import pathlib
import time

import pyfuse3
import pytest

from dedupd.compute.cache import cache_catalog
from dedupd.http import messages
from dedupd.serve import image_handlers
from dedupd.serve import replica_receiver
from dedupd.serve import upload_rights
from dedupd.status import repository_stats
from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import scrubber
from glance_dedup.base import exceptions
from glance_dedup.base import filesystem
from glance_dedup.base import imageids
from glance_dedup.base import pacing
from glance_dedup.base import thread_pool
from glance_dedup.check import ondisk
from glance_dedup.cli import entry
from glance_dedup import fuse_operations
from glance_dedup.maintenance import block_addresses
from glance_dedup.repository import openvolumes
from glance_dedup.repository import volumes
from tests.support import maintenance
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.support import volume_writer
from tests.unit.dedupd.tasks import scrubbing

pytest_plugins = ['tests.support.maintainer_fixtures']

ID = 'a' * 32


@pytest.fixture
def path(tmp_path):
    return maintenance.create(tmp_path)


@pytest.fixture
def volume(path, repo):
    """A volume with a recipe of part 3, and an image in the repository."""
    found = volume_writer.Volume(path, bytes.fromhex(repo.repository_id))
    found.journal(marks={3: 7}).save()
    volume_writer.store_recipe(repo, found.recipe(3, 7),
                               maintenance.content(2))
    put(repo, 'image', maintenance.content(1))
    return found


@pytest.fixture
def part(volume):
    return volume.recipe(3, 7)


#: Names that begin like a volume's recipes, and their meanings.
OF_VOLUME = {
    f'v_{ID}_base_0': 'the base',
    f'v_{ID}_0_1': 'part 0',
    f'v_{ID}_262143_18446744073709551615': 'part 262143',
    **{f'v_{ID}_{rest}': 'a recipe' for rest in (
        '', 'base_1', '1', '-1_1', '0_1_', '0_0', '00_1', '0_01', 'a_1',
        '0_' + '1' * 21, 'base_0_0', 'x' * 93)}}
#: Names that resemble them, of which some are no ids at all.
OTHERS = (
    'image', f'v_{ID}', f'v_{ID}-0_1', f'V_{ID}_0_1', f'v{ID}_0_1',
    f'v_{ID[:-1]}_0_1', f'v_{ID}a_0_1', f'v_{ID.upper()}_0_1',
    f'v_{ID[:-1]}g_0_1', f'xv_{ID}_0_1', f'_v_{ID}_0_1', f'v__{ID}_0_1',
    f'v_{ID}_0_1\n', f'v_{ID}_0_1 ', f'v_{ID}_0.1', f'v_{ID}_\u0661_1',
    f'v_{ID}_' + 'x' * 94, '')


@pytest.mark.parametrize('image_id', [*OF_VOLUME, *OTHERS])
def test_ids(image_id):
    what = OF_VOLUME.get(image_id)
    assert imageids.of_volume(image_id) == (None if what is None else (
        ID, what))
    assert imageids.is_image(image_id) == (
        what is None and bool(imageids.is_valid(image_id)))
    # The checker has this rule in its own code.
    assert bool(ondisk.VOLUME_RECIPE.match(image_id)) == (what is not None)


def test_the_engine_has_the_same_ids(repo):
    """The engine refuses ids that the volume's owner would delete."""
    openvolumes.create(repo, 'other', 512)
    volume = repo.handle().open_volume('other')
    with contextlib.closing(volume):
        for image_id in filter(imageids.is_valid, [*OF_VOLUME, *OTHERS]):
            if imageids.is_image(image_id):
                volume.snapshot(image_id, '')
                continue
            with pytest.raises(exceptions.InvalidParameter,
                               match="a name for a volume's recipe"):
                volume.snapshot(image_id, '')
    assert repo.recipes() == sorted(filter(imageids.is_image, OTHERS))


def test_an_owner_deletes_what_it_does_not_need(path, repo, volume, part):
    """An owner deletes its unneeded recipes, also those with unknown names."""
    names = [f'v_{volume.id.hex()}_{rest}' for rest in (
        '', 'x', '3_07', '03_7', '3_7_', 'base_0')]
    for name in names:
        volume_writer.store_recipe(repo, name, maintenance.content(2))
    stranger = f'v_{ID}_3_7'
    volume_writer.store_recipe(repo, stranger, maintenance.content(2))
    openvolumes.open_volume(repo, 'disk').close()
    assert repo.recipes() == sorted(['image', part, stranger])


def test_only_the_store_sees_them(repo, part):
    assert repo.images() == ['image']
    assert repo.recipes() == ['image', part]
    assert repo.stat(part).image_id == part


@pytest.mark.parametrize('call', [
    lambda repo, part: repo.begin(part),
    lambda repo, part: repo.begin(part.replace('_7', '_8')),
    lambda repo, part: repo.put(part, io.BytesIO(b'x')),
    lambda repo, part: repo.open_image(part),
    lambda repo, part: repo.delete(part),
    lambda repo, part: repo.copy(repo.open_image('image'), part),
    lambda repo, part: repo.require_image(part)])
def test_calls_on_images_refuse_them(repo, part, call):
    with pytest.raises(exceptions.InvalidParameter,
                       match='is no image: .* part 3 of volume disk'):
        call(repo, part)
    assert repo.recipes() == ['image', part]


def test_the_name_of_a_volume(path, repo, volume, part):
    digits = volume.id.hex()
    assert volumes.names(repo.path) == ['disk']
    assert volumes.name_of(repo, digits) == 'disk'
    assert volumes.words(repo, part) == 'part 3 of volume disk'
    assert volumes.words(repo, volume.recipe(None)) == (
        'the base of volume disk')
    assert volumes.words(None, part) == f'part 3 of volume {digits}'
    assert volumes.words(repo, 'image') is None
    assert volumes.described(repo, 'image') == 'image'
    assert volumes.described(repo, part) == (
        f'{part} (part 3 of volume disk)')
    assert volumes.apart(repo, ['z', part, 'b', volume.recipe(None)]) == (
        ['b', 'z'], ['disk'])
    # The newest journal has the current state.
    volume.journal(2, volume_id=volume_writer.some_id('another')).save()
    assert volumes.name_of(repo, digits) is None
    assert volumes.words(repo, part) == f'part 3 of volume {digits}'


@pytest.mark.parametrize('missed', ['during a look', 'in a list'])
def test_a_rename_of_a_host_that_was_cut_off(repo, monkeypatch, missed):
    """A volume is found although a disconnected host renames it meanwhile."""
    openvolumes.create(repo, 'old', 512)
    volume_id = openvolumes.look(repo, 'old').volume_id
    real = volumes.names
    lists = []

    def names(path):
        found = real(path)
        lists.append(found)
        if len(lists) == 1:
            directory = pathlib.Path(path, 'volumes')
            (directory / 'old').rename(directory / 'new')
            return found if missed == 'during a look' else []
        return found
    monkeypatch.setattr(volumes, 'names', names)
    assert volumes.name_of(repo, volume_id) == 'new'
    assert volumes.name_of(repo, '0' * 32) is None


def test_nobody_renames_while_a_volume_is_looked_for(repo, monkeypatch):
    """Renames wait for a lookup: otherwise its recipes could be deleted.

    Each list misses a volume that is renamed during the listing.
    """
    openvolumes.create(repo, 'name0', 512)
    volume_id = openvolumes.look(repo, 'name0').volume_id
    real = volumes.names
    renames = []

    def names(path):
        found = real(path)
        number = len(renames)
        renames.append(pool.submit(
            openvolumes.rename, repo, f'name{number}', f'name{number + 1}'))
        done, _ = concurrent.futures.wait(renames, 0.3)
        return found if len(done) < len(renames) else []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(volumes, 'names', names)
        assert volumes.name_of(repo, volume_id) == 'name0'
        for rename in renames:
            rename.result(60)
    assert real(repo.path) == [f'name{len(renames)}']


def test_a_look_and_a_rename_wait_for_no_longer_than_they_may(
        path, repo, monkeypatch):
    openvolumes.create(repo, 'disk', 512)
    volume_id = openvolumes.look(repo, 'disk').volume_id
    monkeypatch.setattr(volumes, '_LIMIT', 0.02)
    # The lock's place is part of the format.
    with open(path / 'locks' / 'images', 'rb+') as f:
        filesystem.lock(f.fileno(), fcntl.F_WRLCK, 1 << 62)
        with pytest.raises(exceptions.BusyError, match='rename.* try again'):
            volumes.name_of(repo, volume_id)
        assert filesystem.lock(f.fileno(), fcntl.F_RDLCK, 1 << 62)
        assert volumes.name_of(repo, volume_id) == 'disk'
        with (repositories.open_repository(path, lock_timeout=0.02) as other,
              pytest.raises(exceptions.BusyError, match='id.* try again')):
            openvolumes.rename(other, 'disk', 'new')
    openvolumes.rename(repo, 'disk', 'new')
    assert volumes.names(repo.path) == ['new']


def test_a_look_ends_if_volumes_come_and_go(repo, monkeypatch):
    monkeypatch.setattr(volumes, '_LIMIT', 0.02)
    monkeypatch.setattr(volumes, 'names', lambda path: [
        str(time.monotonic_ns())])
    with pytest.raises(exceptions.BusyError, match='make or delete'):
        volumes.name_of(repo, '0' * 32)


@pytest.mark.parametrize('damage, kind', [
    (lambda head: head[:4000], exceptions.DamagedError),
    (lambda head: bytes(4096), exceptions.DamagedError),
    (lambda head: head[:50] + b'?' + head[51:], exceptions.DamagedError),
    (lambda head: head[:8] + b'\2' + head[9:], exceptions.VersionError)])
def test_a_volume_that_cannot_be_read(repo, volume, part, damage, kind):
    file = volume.journal().path
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(kind, match='journal'):
        volumes.look(repo, 'disk')
    assert volumes.words(repo, part) == (
        f'part 3 of volume {volume.id.hex()}')
    # The volume may need this recipe.
    with pytest.raises(kind):
        repo.delete(part)
    assert part in repo.recipes()


def test_no_volumes(repo):
    assert volumes.names(repo.path) == []
    with pytest.raises(exceptions.ImageNotFound):
        volumes.look(repo, 'disk')


def test_what_no_volume_has_can_be_deleted(repo, volume, part):
    volume.journal().path.unlink()
    assert volumes.look(repo, 'disk').volume_id is None
    repo.delete(part)
    assert repo.recipes() == ['image']


# -- commands -----------------------------------------------------------------

@pytest.fixture
def command(path, tmp_path, capfd):
    def run(*arguments):
        capfd.readouterr()
        status = entry.main([
            '--repository', str(path), '--filter-dir',
            str(tmp_path / 'filter'), '--socket', str(tmp_path / 'none'),
            *arguments])
        out, err = capfd.readouterr()
        return status, out, err
    return run


@pytest.mark.parametrize('words', [
    ('image', 'show', 'PART'), ('image', 'get', 'PART', '-'),
    ('image', 'delete', 'PART'), ('image', 'put', 'PART', '/dev/null'),
    ('image', 'copy', 'image', 'PART'), ('image', 'copy', 'PART', 'new'),
    ('image', 'verify', '--no-glance', 'PART'),
    ('glance', 'export', '/tmp', 'PART'),
    ('image', 'mark-lost', 'PART')])
def test_commands_say_what_it_is(command, repo, part, words):
    status, _, err = command(*(part if word == 'PART' else word
                               for word in words))
    assert status == 2
    assert 'part 3 of volume disk' in err
    assert repo.recipes() == ['image', part]


def test_lists_and_sums(command, part):
    status, out, _ = command('image', 'list', '-f', 'json')
    assert [row['image_id'] for row in json.loads(out)] == ['image']
    status, out, _ = command('repository', 'show', '-f', 'json')
    shown = json.loads(out)
    assert (shown['images'], shown['volumes']) == (1, 1)
    size = len(maintenance.content(1))
    assert shown['logical_bytes'] == 2 * size
    status, out, _ = command('status', '-f', 'json')
    shown = json.loads(out)
    assert (shown['space']['images'], shown['space']['volumes']) == (1, 1)
    assert shown['space']['logical_bytes'] == 2 * size
    assert shown['space']['journal_bytes'] == 8192


# -- figures and tasks --------------------------------------------------------

def test_figures(repo, maintainer, part):
    maintainer.rebuild()
    found = repository_stats.Figures(repo, lambda: maintainer.catalog)
    with contextlib.closing(found):
        space = found.space()
        assert (space['images'], space['volumes']) == (1, 1)
        assert space['logical_bytes'] == 2 * len(maintenance.content(1))
        assert [i['image_id'] for i in found.images()] == ['image']
        assert found.sharing()['images'] == ['image']


def test_their_blocks_stay(repo, maintainer, part):
    put(repo, 'other', maintenance.content(3))
    repo.delete('other')
    assert collector.run_once(maintainer, pacing.Pace()).freed_blocks
    with contextlib.closing(repo.handle().open_image(part)) as image:
        assert image.read(len(maintenance.content(2)), 0) == (
            maintenance.content(2))
    assert read_all(repo, 'image') == maintenance.content(1)


def test_damage_names_the_volume(path, repo, maintainer, part, caplog):
    recipe = path / 'images' / part
    recipe.write_bytes(bytes(4096) + recipe.read_bytes()[4096:])
    scrubber.run_once(maintainer, pacing.Pace())
    assert f'{part} (part 3 of volume disk)' in caplog.text
    caplog.clear()
    scrubber.mark_lost(maintainer, part)
    assert f'{part} (part 3 of volume disk)' in caplog.text
    assert repo.recipes() == ['image']


def test_scrub_says_which_volume_a_block_is_missing_in(
        path, repo, maintainer, volume, part, caplog):
    with contextlib.closing(maintainer.engine.open_recipe(part)) as recipe:
        group, slot, _ = next(iter(block_addresses.runs_in(recipe.runs())))
    scrubbing.damage(path, (group, slot))
    maintainer.rebuild()
    result = scrubber.run_once(maintainer, pacing.Pace(), full=True)
    assert (result.images, result.volumes) == ([], ['disk'])
    assert f'Images hit: {part} (part 3 of volume disk)' in caplog.text


def test_merging_has_them_share(repo, maintainer, volume):
    """Merging shares blocks between a recipe and a simultaneous image."""
    data = noise(3 << 20)
    name = volume.recipe(1, 1)
    handle = repo.handle()
    # Each transaction stores pieces of 1 MiB before its commit.
    transactions = [handle.begin(image_id, '', bytes(16))
                    for image_id in ('twin', name)]
    for transaction in transactions:
        transaction.write(data)
    for transaction in transactions:
        transaction.commit()
    maintainer.rebuild()
    merged = merger.run_once(maintainer, pacing.Pace())
    assert merged.images == 1
    runs = []
    for image_id in ('twin', name):
        with contextlib.closing(
                maintainer.engine.open_recipe(image_id)) as recipe:
            runs.append(recipe.runs())
    assert runs[0] == runs[1]


def test_a_good_part_is_not_lost(maintainer, part):
    with pytest.raises(exceptions.InvalidParameter,
                       match='part 3 of volume disk, which is not lost'):
        scrubber.mark_lost(maintainer, part)


# -- other ways in and out ----------------------------------------------------

def request(**query):
    return messages.Request('POST', query, {}, messages.Peer(0), b'')


def status_of(handler, *arguments):
    with pytest.raises(messages.HTTPError) as caught:
        asyncio.run(handler(*arguments))
    return caught.value.status


def test_no_replica_comes_under_such_an_id(repo, part):
    receiving = replica_receiver.Receiving(repo, upload_rights.Rights(
        {right.option: [] for right in upload_rights.RIGHTS}))
    assert status_of(receiving.begin, request(), part) == 400


def test_the_daemon_serves_none(repo, part):
    served = image_handlers.Reads(repo, thread_pool.Workers('read', 1))
    assert status_of(served.permit, request(), part) == 404


def test_the_cache_does_not_evict_them(path, repo, part):
    (path / cache_catalog.NAME).write_bytes(b'')
    with contextlib.closing(cache_catalog.Held(repo)) as held:
        assert held.candidates() == ['image']


def test_the_mount_shows_none(repo, part):
    assert fuse_operations.FromRepository(repo).names() == ['image']
    with pytest.raises(pyfuse3.FUSEError):
        asyncio.run(fuse_operations.Operations.lookup(
            None, pyfuse3.ROOT_INODE, part.encode(), None))
