# SPDX-License-Identifier: Apache-2.0

"""Uploads: the path of a source's bytes to the engine and to the hashes."""

import hashlib
import io
import random
import struct
import time
import uuid

from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
from oslo_utils.imageutils import format_inspector
import pytest

from glance_dedup.base import thread_pool
from glance_dedup.driver import upload
from glance_dedup.repository import image_repository

MIB = 1 << 20
READ = 65536


@pytest.fixture(scope='module')
def repo(tmp_path_factory):
    path = tmp_path_factory.mktemp('upload')
    image_repository.Repository.create(str(path / 'repository'))
    with image_repository.Repository(str(path / 'repository'),
                                     filter_dir=str(path),
                                     filter_mib=1) as opened:
        yield opened


@pytest.fixture
def store(repo):
    """Return a function that stores a source and reads it back."""
    storage = thread_pool.Workers('test', 4)

    def _store(source, *watchers, seconds=0):
        size = upload.store(repo, 'image', repo.begin('image'), source, 0,
                            list(watchers), storage,
                            thread_pool.TimeLimit(seconds, storage)).size
        with repo.open_image('image') as image:
            data = image.read(size, 0)
        repo.delete('image')
        assert len(data) == size
        return data

    return _store


class Body:
    """A request's body with short reads."""

    def __init__(self, data, length=READ):
        self.data = data
        self.at = 0
        self.length = length

    def read(self, length):
        begin = self.at
        self.at += min(length, self.length)
        return self.data[begin:self.at]


def vhdx(metadata, item, size):
    """Return the part of a VHDX image that gives its virtual size.

    :param metadata: where the metadata region begins
    :param item: where in it the virtual size is
    """
    image = bytearray(metadata + item + 8)
    image[:8] = b'vhdxfile'
    struct.pack_into(
        '<4s4xI4x16sQII', image, 192 << 10, b'regi', 1,
        uuid.UUID('8b7ca206-4790-4b9a-b8fe-575f050f886e').bytes_le,
        metadata, MIB, 1)
    struct.pack_into(
        '<8s2xH20x16sII', image, metadata, b'metadata', 1,
        uuid.UUID('2fa54224-cd1b-4876-b211-5dbed83bf4b8').bytes_le, item, 8)
    struct.pack_into('<Q', image, metadata + item, size)
    return bytes(image)


def test_a_buffer_is_not_filled_again_while_a_sink_uses_it(store):
    """A buffer is kept until each watcher has read it.

    One watcher is slow; the other reads at full speed.
    """
    data = random.Random(1).randbytes(40 * MIB)
    md5, sha1 = hashlib.md5(), hashlib.sha1()

    def slow(piece):
        time.sleep(0.05)
        md5.update(piece)

    assert store(Body(data), slow, sha1.update) == data
    assert md5.digest() == hashlib.md5(data).digest()
    assert sha1.digest() == hashlib.sha1(data).digest()


def test_nor_while_the_engine_uses_it(store, repo):
    """A buffer is kept until the engine, the slowest reader, has used it."""
    data = random.Random(2).randbytes(40 * MIB)
    transaction = repo.begin('slow')

    class Slow:
        upload_id = transaction.upload_id
        abort = transaction.abort
        commit = transaction.commit

        def write(self, piece):
            time.sleep(0.05)
            transaction.write(piece)

    storage = thread_pool.Workers('test', 4)
    upload.store(repo, 'slow', Slow(), Body(data), len(data), [], storage,
                 thread_pool.TimeLimit(10, storage))
    with repo.open_image('slow') as image:
        assert image.read(len(data), 0) == data


def test_buffers_are_few_and_used_again(store):
    buffers, lengths = {}, []

    def watch(piece):
        buffers[id(piece.obj)] = piece.obj  # kept for distinct ids
        lengths.append(len(piece))

    store(Body(bytes(50 * MIB + 5)), watch)
    assert len(buffers) <= upload.DEPTH + 1
    assert lengths == [upload.PIECE] * 12 + [2 * MIB + 5]


def test_long_reads_are_not_copied(store):
    data = [bytes([n]) * upload.LONG for n in range(5)]
    seen = []
    store(iter(data), seen.append)
    assert all(a is b for a, b in zip(data, seen, strict=True))


def test_bytes_that_can_change_are_copied(store):
    def source():
        buffer = bytearray(2 * MIB)
        for n in range(9):
            buffer[:] = bytes([n]) * len(buffer)
            yield buffer
            yield memoryview(buffer)[::1]

    md5 = hashlib.md5()

    def slow(piece):
        time.sleep(0.02)
        md5.update(piece)

    expected = b''.join(bytes([n]) * 4 * MIB for n in range(9))
    assert store(source(), slow) == expected
    assert md5.digest() == hashlib.md5(expected).digest()


@given(strategies.lists(
    strategies.tuples(
        strategies.sampled_from([bytes, bytearray, memoryview]),
        strategies.sampled_from([0, 1, READ, upload.LONG - 1, upload.LONG,
                                 upload.PIECE, upload.PIECE + 1, 9 * MIB])),
    max_size=6), strategies.booleans())
@settings(max_examples=60, deadline=None)
def test_any_reads_come_out_as_the_same_bytes(reads, known):
    rng = random.Random(len(reads))
    data = [kind(rng.randbytes(length)) for kind, length in reads]
    free, seen = [], []
    size = sum(length for _kind, length in reads) if known else 0
    for piece in upload._pieces(iter(data), size, free):
        assert len(piece)
        seen.append(bytes(piece))
        if isinstance(piece, memoryview) and len(piece) == upload.PIECE:
            free.append(piece)
    assert b''.join(seen) == b''.join(data)


# A region begins at a multiple of 1 MiB, but not at 0. An item begins 64 KiB
# or more behind the beginning of its region.
@given(strategies.integers(1, 9),
       strategies.integers(64 << 10, MIB - 8),
       strategies.sampled_from([1000, READ, 300 << 10, MIB, 99 * MIB]))
@example(1, 64 << 10, 99 * MIB)
@example(2, 64 << 10, 99 * MIB)
@settings(max_examples=60, deadline=None)
def test_glance_finds_the_virtual_size_of_vhdx(metadata, item, length):
    image = vhdx(metadata * MIB, item, 7 << 30)
    source = format_inspector.InspectWrapper(Body(image, length))
    pieces = [bytes(piece) for piece in upload._pieces(source, 0, [])]
    source.close()
    assert b''.join(pieces) == image
    source.format.safety_check()
    assert (str(source.format), source.format.virtual_size) == (
        'vhdx', 7 << 30)


def test_the_whole_descriptor_of_vmdk_is_judged():
    """A bad line at the end of a long VMDK descriptor is found.

    The size of the first read sets how much of it the inspector gets.
    """
    lines = '# Disk DescriptorFile\ncreateType="monolithicSparse"\n'
    lines += '#' * (MIB - 100) + '\nRW 1 FLAT "/etc/passwd" 0\n'
    source = format_inspector.InspectWrapper(io.BytesIO(lines.encode()))
    for _piece in upload._pieces(source, 0, []):
        pass
    source.close()
    with pytest.raises(format_inspector.SafetyCheckFailed):
        source.format.safety_check()


def test_later_reads_are_long():
    """Each read but the first has full length.

    Each read passes three objects of Glance's.
    """
    lengths = []

    class Source(io.BytesIO):
        def read(self, length):
            lengths.append(length)
            return super().read(length)

    for _piece in upload._pieces(Source(bytes(13 * MIB)), 0, []):
        pass
    assert lengths == [upload.HEAD] + 4 * [upload.PIECE]
