# SPDX-License-Identifier: Apache-2.0

import os
import random
import threading
import types

import pytest

from glance_dedup.base import exceptions
from glance_dedup.cli import copying

PIECE = 1000


class Image:
    """The part of an image that a Copier uses."""

    disk = None

    def __init__(self, data, holes=()):
        self.data = data
        self.size = len(data)
        self.stat = types.SimpleNamespace(image_id='one')
        self.reads = 0
        self.holes = holes

    def readinto(self, view, offset):
        self.reads += 1
        found = self.data[offset:offset + len(view)]
        view[:len(found)] = found
        return len(found)

    def extents(self):
        for offset, length, kind in self.holes:
            yield types.SimpleNamespace(offset=offset, length=length,
                                        kind=kind)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(copying, 'PIECE', PIECE)


@pytest.fixture
def image():
    return Image(random.Random(1).randbytes(10 * PIECE + 7))


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / 'out', os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


class Told:
    def __init__(self):
        self.done = []

    def update(self, done):
        self.done.append(done)


def test_ranges_are_copied_to_their_places(image, file):
    told = Told()
    with copying.Copier(file, image, told) as copier:
        copier.copy(10, 2500)
        copier.copy(4000, image.size)
    expected = bytes(10) + image.data[10:2500] + bytes(1500) + (
        image.data[4000:])
    assert os.pread(file, image.size + 1, 0) == expected
    assert told.done == sorted(told.done) and told.done[-1] == image.size


def test_a_buffer_is_not_filled_while_it_is_written(image, file, monkeypatch):
    pwrite, readinto = os.pwrite, image.readinto
    read = threading.Condition()

    def reading(view, offset):
        with read:
            done = readinto(view, offset)
            read.notify()
        return done

    def slow(fd, data, offset):
        # The next piece is read before this one is written, if there is one.
        with read:
            assert read.wait_for(
                lambda: image.reads > min(10, offset // PIECE + 1), 30)
        return pwrite(fd, data, offset)

    image.readinto = reading
    monkeypatch.setattr(os, 'pwrite', slow)
    with copying.Copier(file, image, Told()) as copier:
        copier.copy(0, image.size)
    assert os.pread(file, image.size, 0) == image.data


def test_an_error_of_writing_is_raised(image, file, monkeypatch):
    def full(fd, data, offset):
        raise OSError(28, 'full')

    monkeypatch.setattr(os, 'pwrite', full)
    with pytest.raises(OSError, match='full'):
        with copying.Copier(file, image, Told()) as copier:
            copier.copy(0, image.size)
    # The same holds for the last piece.
    with pytest.raises(OSError, match='full'):
        with copying.Copier(file, image, Told()) as copier:
            copier.copy(0, 10)


def test_the_disk_takes_what_is_written_meanwhile(image, file, monkeypatch):
    fdatasync, begun = os.fdatasync, threading.Event()
    synced = []

    def slow(fd):
        begun.wait(30)
        synced.append(os.fstat(fd).st_size)
        fdatasync(fd)

    monkeypatch.setattr(copying, '_FLUSHED', 2 * PIECE)
    monkeypatch.setattr(os, 'fdatasync', slow)
    with copying.Copier(file, image, Told()) as copier:
        # While the disk takes the first pieces, the others are written.
        copier.copy(0, 9 * PIECE)
        begun.set()
        copier.copy(9 * PIECE, image.size)
    assert synced
    assert os.pread(file, image.size, 0) == image.data


def test_an_error_of_the_disk_is_raised(image, file, monkeypatch):
    """The kernel reports the error once: the last sync would succeed."""
    def failing(fd):
        raise OSError(5, 'broken')

    monkeypatch.setattr(os, 'fdatasync', failing)
    for pieces in 2, 10:
        monkeypatch.setattr(copying, '_FLUSHED', pieces * PIECE)
        with pytest.raises(OSError, match='broken'):
            with copying.Copier(file, image, Told()) as copier:
                copier.copy(0, image.size)


def test_an_image_that_ends_early_is_damaged(image, file):
    image.size += 1
    with pytest.raises(exceptions.DamagedError, match='one'):
        with copying.Copier(file, image, Told()) as copier:
            copier.copy(0, image.size)


def test_nothing_is_written_after_an_error(image, file, monkeypatch):
    pwrite, release = os.pwrite, threading.Event()

    def slow(fd, data, offset):
        release.wait(30)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, 'pwrite', slow)
    with pytest.raises(KeyboardInterrupt):
        with copying.Copier(file, image, Told()) as copier:
            copier.copy(0, PIECE)
            threading.Timer(0.05, release.set).start()
            raise KeyboardInterrupt
    assert os.pread(file, PIECE, 0) == image.data[:PIECE]


def test_only_long_runs_of_zeros_become_holes():
    long, short = 1 << 16, (1 << 16) - 4096
    image = Image(b'', [(0, 4096, 'blocks'), (4096, short, 'zeros'),
                        (4096 + short, 4096, 'blocks'),
                        (8192 + short, long, 'zeros'),
                        (8192 + short + long, 10, 'blocks')])
    assert list(copying.filled_ranges(image)) == [
        (0, 8192 + short), (8192 + short + long, 8192 + short + long + 10)]


def test_writing_goes_on_after_a_part(file, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, 'pwrite', lambda fd, data, offset: pwrite(
        fd, data[:3], offset))
    copying.write_all(file, b'0123456789', 5)
    assert os.pread(file, 20, 5) == b'0123456789'
