# SPDX-License-Identifier: Apache-2.0

"""Volumes work while the maintainer runs, and while the disk is full."""

import contextlib
import random
import threading
import time

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.repository import openvolumes
from tests.support import maintenance
from tests.support import repositories
from tests.support.repositories import noise
from tests.support.repositories import put

pytest_plugins = ['tests.support.maintainer_fixtures']

MIB = 1 << 20
PART = 65536
SIZE = 4 * PART


@pytest.fixture
def path(tmp_path):
    return maintenance.create(tmp_path)


def collect(repo):
    with maintenance.maintaining(repo) as maintainer:
        maintenance.account(maintainer)
        result = collector.run_once(maintainer, pacing.Pace())
        maintenance.account(maintainer)
        assert not maintainer.warnings
        return result


def require_collected(repo, *volumes):
    """Require that exactly the blocks named by recipes are in use.

    A later collection frees an evacuated block, once the recipes from before
    the evacuation are closed.
    """
    for _ in range(4):
        for volume in volumes:
            volume.renew()
        collect(repo)
        named = {address for recipe in repo.recipes()
                 for address in addresses_of(repo, recipe)}
        live = maintenance.live_slots(repo.path)
        if live == named:
            break
    assert live == named


def addresses_of(repo, recipe):
    image = repo.handle().open_image(recipe)
    found = [(group, slot + i) for page in range(1000)
             for _, _, _, group, slot, blocks in image.extents(page)
             for i in range(blocks)]
    image.close()
    return found


def test_blocks_are_kept_and_freed(path, repo, other):
    data = noise(2 * PART, 1)
    put(repo, 'image', data)
    with repo.open_image('image') as image:
        openvolumes.create(repo, 'disk', SIZE, image=image, part_size=PART)
    repo.delete('image')
    require_collected(other)
    volume = openvolumes.open_volume(repo, 'disk')
    model = bytearray(data + bytes(SIZE - len(data)))
    assert volume.read(SIZE, 0) == model
    # The next owner removes the base once no part needs it.
    for n in range(3):
        fresh = noise(2 * PART, 10 + n)
        volume.write(fresh, 512 * n)
        model[512 * n:512 * n + len(fresh)] = fresh
        volume.checkpoint()
        require_collected(other, volume)
        assert volume.read(SIZE, 0) == model
    volume.close()
    volume = openvolumes.open_volume(repo, 'disk')
    assert not [name for name in repo.recipes() if name.endswith('base_0')]
    require_collected(other)
    volume.snapshot('kept')
    volume.zero(SIZE, 0)
    volume.checkpoint()
    require_collected(other, volume)
    assert repositories.read_all(repo, 'kept') == model
    repo.delete('kept')
    require_collected(other)
    assert maintenance.live_slots(path) == set()
    volume.write(b'x', 0)
    volume.close()
    openvolumes.delete(repo, 'disk')
    require_collected(other)
    assert maintenance.live_slots(path) == set()
    repositories.require_clean(path)


def test_collecting_while_the_volume_is_written(path, repo, other):
    openvolumes.create(repo, 'disk', SIZE, part_size=PART)
    volume = openvolumes.open_volume(repo, 'disk')
    model = bytearray(SIZE)
    stop = threading.Event()
    errors = []

    def work():
        rng = random.Random(1)
        try:
            while not stop.is_set():
                offset = rng.randrange(SIZE - 5000)
                # Many of these blocks repeat.
                data = noise(rng.randrange(1, 9) * 512, rng.randrange(40))
                offset -= offset % rng.choice((1, 512, 512))
                volume.write(data, offset)
                model[offset:offset + len(data)] = data
                if rng.randrange(9) == 0:
                    volume.checkpoint()
                if rng.randrange(5) == 0:
                    at = rng.randrange(SIZE - 9000)
                    assert volume.read(9000, at) == model[at:at + 9000]
        except BaseException as e:
            errors.append(e)
    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        collect(other)
        volume.renew()
    stop.set()
    thread.join()
    assert not errors, errors
    volume.checkpoint()
    assert volume.read(SIZE, 0) == model
    require_collected(other, volume)
    volume.close()
    repositories.require_clean(path)


def test_merging_under_an_open_volume(tmp_path):
    """An open volume uses the merged recipes, and pins no old blocks."""
    path = repositories.create(tmp_path / 'r', block_size=4096,
                               group_slots=1024)
    data = noise(2 * MIB, 5)
    with repositories.open_repository(path) as repo:
        # Uploads at once do not find one another's blocks.
        with contextlib.ExitStack() as stack:
            both = [stack.enter_context(repo.begin(name))
                    for name in ('first', 'second')]
            for transaction in both:
                transaction.write(data)
            for transaction in both:
                transaction.commit()
        for name in ('first', 'second'):
            with repo.open_image(name) as image:
                openvolumes.create(repo, f'of-{name}', image=image,
                                   part_size=MIB)
        opened = [openvolumes.open_volume(repo, f'of-{name}')
                  for name in ('first', 'second')]
        for volume in opened:
            assert volume.read(len(data), 0) == data
            volume.write(b'changed', 100)
            volume.checkpoint()     # part 0 has a recipe, part 1 the base
        changed = data[:100] + b'changed' + data[107:]
        repo.delete('first')
        repo.delete('second')
        blocks = len(data) // 4096
        with maintenance.maintaining(repo) as maintainer:
            maintenance.account(maintainer)
            assert len(maintenance.live_slots(path)) >= 2 * blocks
            assert merger.run_once(maintainer, pacing.Pace()).images >= 2
        for volume in opened:
            assert volume.read(len(data), 0) == changed
            volume.renew()
        require_collected(repo)
        # The changed block, and its first version in the bases.
        assert len(maintenance.live_slots(path)) <= blocks + 2
        for volume in opened:
            assert volume.read(len(data), 0) == changed
            volume.write(b'again', 100)
            volume.checkpoint()
            assert volume.read(7, 100) == b'agained'
            volume.close()
    repositories.require_clean(path)


def test_a_checkpoint_lets_go_of_what_it_replaces(tmp_path):
    """After a checkpoint the owner does not pin the old recipe's blocks."""
    path = repositories.create(tmp_path / 'r', block_size=4096,
                               group_slots=512)
    with repositories.open_repository(path) as repo:
        openvolumes.create(repo, 'disk', 2 * MIB, part_size=MIB)
        with openvolumes.open_volume(repo, 'disk') as volume:
            for seed in (1, 2):
                volume.write(noise(2 * MIB, seed), 0)
                volume.checkpoint()
                assert volume.read(2 * MIB, 0) == noise(2 * MIB, seed)
            require_collected(repo)


def test_a_full_disk(tmp_path):
    """Writes are refused, nothing is lost, and there is a way out."""
    with repositories.small_disk(tmp_path / 'disk', '24m') as disk:
        path = repositories.create(disk / 'r', block_size=4096,
                                   group_slots=512)
        with repositories.open_repository(
                path, filter_dir=str(tmp_path / 'filter'),
                codec='none') as repo:
            put(repo, 'ballast', noise(6 * MIB, 9))
            openvolumes.create(repo, 'disk', 64 * MIB, part_size=MIB)
            volume = openvolumes.open_volume(repo, 'disk')
            model = {}
            with pytest.raises(exceptions.NoSpaceError):
                for n in range(64 * 4):
                    volume.write(noise(MIB // 4, n), n * MIB // 4)
                    model[n] = noise(MIB // 4, n)
                    if n % 8 == 7:
                        volume.checkpoint()
            filling = repositories.fill_disk(disk)
            for n, data in model.items():
                assert volume.read(len(data), n * MIB // 4) == data
            with pytest.raises(exceptions.NoSpaceError):
                volume.write(b'x', 0)
            assert volume.info().broken == ''
            filling.unlink()
            # Deleting an image, and collecting, makes room.
            repo.delete('ballast')
            collect(repo)
            volume.write(b'goes on', 0)
            volume.flush()
            volume.checkpoint()
            model[0] = b'goes on' + model[0][7:]
            volume.close()
            with openvolumes.open_volume(repo, 'disk') as volume:
                for n, data in model.items():
                    assert volume.read(len(data), n * MIB // 4) == data
            # The head with the state "deleting" needs a page: the catalog's
            # reserve is given up for it.
            filling = repositories.fill_disk(disk)
            openvolumes.delete(repo, 'disk')
            filling.unlink()
            collect(repo)
            assert maintenance.live_slots(path) == set()
        repositories.require_clean(path)
