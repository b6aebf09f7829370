# SPDX-License-Identifier: Apache-2.0

"""A snapshot is a volume at one moment, whatever runs beside it."""

import contextlib
import threading

import pytest

from glance_dedup.repository import openvolumes
from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

PART = 1 << 16
PARTS = 1200            # more than are open at a time, so copying takes longer
SIZE = PARTS * PART
PLACES = (0, SIZE - 8)  # in the first part and the last, written in this order


class Library:
    """A volume that this process has open."""

    def __init__(self, repo, volume):
        self.repo = repo
        self.write = volume.write
        self.snapshot = volume.snapshot
        self.checkpoint = volume.checkpoint


class Served:
    """A volume that nbdkit has open."""

    def __init__(self, repo, server, session):
        self.repo = repo
        self.session = session
        self.snapshot = server.control.snapshot
        self.checkpoint = server.control.checkpoint

    def write(self, data, offset):
        volume_tools.write(self.session, offset, data)


@contextlib.contextmanager
def opened(how, repository, place):
    volume_tools.create(repository, 'disk', SIZE, PART)
    with repositories.open_repository(repository) as repo:
        if how == 'library':
            with openvolumes.open_volume(repo, 'disk') as volume:
                yield Library(repo, volume)
        else:
            with (volume_tools.Server(repository, place) as server,
                  server.start().session() as session):
                yield Served(repo, server, session)


@contextlib.contextmanager
def again_and_again(*functions):
    """Run each function in a thread of its own, without a pause."""
    end = threading.Event()
    errors = []

    def run(function):
        try:
            while not end.is_set():
                function()
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(function,))
               for function in functions]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join(nbd.LIMIT)
    assert not errors


# Long: checkpoints continue while fifty snapshots are made.
@pytest.mark.needs('nbdkit')
@pytest.mark.parametrize('count', [
    pytest.param(50, marks=pytest.mark.slow),
    pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize('how', ['library', 'served'])
def test_snapshots(how, count, tmp_path):
    """A snapshot never has the second of two writes without the first.

    The writes are in two parts of the volume.

    Only a checkpoint changes what a snapshot copies. So checkpoints are made
    all the time, and copying takes long enough for one to end meanwhile.
    """
    repository = volume_tools.create_repository(tmp_path / 'repository')
    with opened(how, repository, tmp_path) as volume:
        for part in range(PARTS):
            volume.write(b'x', part * PART + 100)
        written = 0

        def write():
            nonlocal written
            for place in PLACES:
                volume.write((written + 1).to_bytes(8), place)
            written += 1

        with again_and_again(write, volume.checkpoint):
            for _ in range(count):
                before = written
                volume.snapshot('image')
                with volume.repo.open_image('image') as image:
                    first, second = (int.from_bytes(image.read(8, place))
                                     for place in PLACES)
                volume.repo.delete('image')
                assert before <= second <= first <= second + 1
        assert written > count
    repositories.require_clean(repository)
