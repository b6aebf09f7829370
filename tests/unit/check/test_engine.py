# SPDX-License-Identifier: Apache-2.0

"""The checker and the engine agree on which repositories are valid."""

import io
import multiprocessing
import os
import random
import sys
import time

import pytest

from glance_dedup.check import checker
from glance_dedup.check import files
from glance_dedup.repository import image_repository
from tests.support import repositories
from tests.unit.repository import format_writer

MIB = 1 << 20


def text(seed, size):
    """Return bytes that compress about as well as a text."""
    rnd = random.Random(seed)
    words = [rnd.randbytes(rnd.randrange(2, 9)) for _ in range(200)]
    parts, left = [], size
    while left > 0:
        parts.append(rnd.choice(words))
        left -= len(parts[-1])
    return b''.join(parts)[:size]


def contents():
    """Return images of many shapes, by name."""
    rnd = random.Random(1)
    unique = rnd.randbytes(MIB)
    words = text(2, MIB)
    return {
        'unique': unique,
        'again': unique,
        'shifted': unique[8192:] + unique[:8192],
        'words': words,
        'zeros': bytes(3 * MIB),
        'mixed': unique[:70000] + bytes(90000) + words[:50000] + unique,
        'itself': 40 * rnd.randbytes(5000),
        'empty': b'',
        'one': b'x',
        'zero': b'\0',
        'short': b'y' * 511,
        'block': b'z' * 512,
        'longer': b'a' * 513,
    }


@pytest.fixture
def make(tmp_path):
    """Create a repository and open it with the requested codec."""
    path = tmp_path / 'repository'
    (tmp_path / 'filter').mkdir()

    def make(codec='lz4', **parameters):
        if not path.exists():
            image_repository.Repository.create(path, **parameters)
        return image_repository.Repository(
            path, codec=codec, filter_dir=str(tmp_path / 'filter'),
            filter_mib=1)
    return make


@pytest.mark.parametrize('codec', ['none', 'lz4', 'zstd'])
@pytest.mark.parametrize('parameters', [
    {}, {'block_size': 512, 'group_slots': 64, 'segment_size': 2048},
    {'block_size': 65536, 'group_slots': 80, 'segment_size': MIB},
    {'fingerprint': 'sha512-256'}, {'fingerprint': 'blake2s256'},
    {'fingerprint': 'sha1', 'verify': 'bytes'}, {'fingerprint': 'sha512'},
    {'fingerprint': 'xxh3-128', 'verify': 'bytes'}],
    ids=lambda parameters: ' '.join(map(str, parameters.values())))
def test_what_the_engine_writes_is_valid(make, codec, parameters):
    images = contents()
    with make(codec, **parameters) as repo:
        for name, data in images.items():
            repo.put(name, io.BytesIO(data), project='a project')
        report = checker.check(repo.path)
        assert report.findings == []
        figures = report.figures
        stats = [repo.stat(name) for name in repo.images()]
        assert figures['images'] == len(images) == len(stats)
        assert figures['logical_bytes'] == sum(map(len, images.values()))
        assert figures['zero_bytes'] == sum(s.zero_bytes for s in stats)
        assert figures['referenced_bytes'] == sum(
            s.new_bytes for s in stats)
        assert figures['stored_bytes'] == sum(
            s.stored_bytes for s in stats)
        assert figures['garbage_bytes'] == 0
        if parameters.get('group_slots') != 64:
            # With many small groups the engine misses some duplicates.
            assert figures['duplicate_blocks'] == 0
        # Deleted, but not collected.
        repo.delete('unique')
        repo.delete('words')
        report = checker.check(repo.path)
        assert report.findings == []
        assert report.figures['images'] == len(images) - 2
        assert report.figures['stored_bytes'] == figures['stored_bytes']
        # Given up.
        with repo.begin('given-up') as transaction:
            transaction.write(random.Random(3).randbytes(MIB))
    report = checker.check(repo.path)
    assert report.ok


def test_codecs_side_by_side(make):
    for codec in ('none', 'lz4', 'zstd', 'lz4'):
        with make(codec) as repo:
            repo.put(f'image{len(repo.images())}',
                     io.BytesIO(text(len(repo.images()), 100000)))
    assert checker.check(repo.path).findings == []


def test_while_an_image_is_stored(make):
    with make(group_slots=64) as repo:
        repo.put('one', io.BytesIO(text(1, MIB)))
        with repo.begin('two') as transaction:
            for seed in range(8):
                transaction.write(random.Random(seed).randbytes(MIB))
                assert checker.check(repo.path).ok
            transaction.commit()
        report = checker.check(repo.path)
        assert report.findings == []
        assert report.figures['logical_bytes'] == 9 * MIB


def damage(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_the_engine_refuses_what_the_checker_calls_damage(
        make, tmp_path, monkeypatch):
    """The checker and the engine find the same images damaged."""
    monkeypatch.setattr(files, 'PAUSE', 0)
    path = tmp_path / 'repository'
    data = text(5, 20000) + bytes(5000) + text(6, 3000)
    with make(block_size=512, group_slots=64) as repo:
        repo.put('one', io.BytesIO(data))
    rnd = random.Random(7)
    paths = [path / 'images' / 'one', *sorted((path / 'groups').iterdir())]
    differing = []
    for file in paths:
        content = file.read_bytes()
        for offset in rnd.sample(range(len(content)), 120):
            damage(file, offset)
            try:
                with make() as repo, repo.open_image('one') as image:
                    whole = image.read() == data
                    assert whole, (file, offset, 'wrong bytes')
            except image_repository.exceptions.RepositoryError:
                whole = False
            hit = checker.check(path).damaged_images == ['one']
            if whole == hit:
                differing.append((file.name, offset, whole, hit))
            file.write_bytes(content)
    assert not differing


def test_the_engine_reads_what_the_writer_wrote(make, tmp_path):
    written = format_writer.Repository(tmp_path / 'repository')
    group = format_writer.Group(written, 1)
    blocks = [text(i, 512) for i in range(11)] + [b'short']
    group.append(blocks[:3])
    group.publish()
    group.append(blocks[3:7], format_writer.LZ4)
    group.garbage(b'garbage')
    group.append(blocks[7:], format_writer.ZSTD)
    group.publish()
    group.save()
    written.image('one', [(group, 0, 5), ('zeros', 1000), (group, 3, 9)],
                  project='p')
    with make() as repo:
        assert repo.images() == ['one']
        assert repo.stat('one').project == 'p'
        with repo.open_image('one') as image:
            assert image.read() == b''.join(
                blocks[:5] + [bytes(1000)] + blocks[3:])
        repo.put('two', io.BytesIO(b''.join(blocks) + b'more'))
    assert checker.check(repo.path).findings == []


def work(path, filter_directory, number, seconds):
    """Store and delete images until the time is over."""
    rnd = random.Random(number)
    end = time.monotonic() + seconds
    with image_repository.Repository(
            path, filter_dir=filter_directory, filter_mib=1) as repo:
        i = 0
        while time.monotonic() < end:
            name = f'image-{number}-{i % 3}'
            if name in repo.images():
                repo.delete(name)
            repo.put(name, io.BytesIO(
                text(rnd.randrange(50), 50000) + rnd.randbytes(30000)))
            i += 1
    sys.stdout.flush()
    os._exit(0)


def test_while_other_processes_store_and_delete(make, tmp_path):
    make(block_size=512, group_slots=64).close()
    context = multiprocessing.get_context('spawn')
    processes = [
        context.Process(target=work, args=(
            str(tmp_path / 'repository'), str(tmp_path / 'filter'), n, 4))
        for n in range(2)]
    for process in processes:
        process.start()
    checks = 0
    try:
        while any(process.is_alive() for process in processes):
            report = checker.check(tmp_path / 'repository')
            assert report.ok, report.findings
            checks += 1
    finally:
        for process in processes:
            process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert checks > 1
    report = checker.check(tmp_path / 'repository')
    assert report.ok
    assert report.figures['images'] == 6


@pytest.mark.parametrize('codec', ['none', 'lz4', 'zstd'])
def test_every_byte_of_a_segment_header(make, tmp_path, monkeypatch, codec):
    """A full check reports each changed byte of a segment's header."""
    monkeypatch.setattr(files, 'PAUSE', 0)
    with make(codec, block_size=512, group_slots=64,
              segment_size=2048) as repo:
        repo.put('one', io.BytesIO(text(5, 20000)))
        with repo.open_image('one') as image:
            whole = image.read()
    group = repositories.Group(tmp_path / 'repository', 1)
    content = group.path.read_bytes()
    unread = []
    for slot in (0, 4, 12):
        segment = group.entry(slot)[2]
        for at in range(32):
            for change in (1, 0x80):
                data = bytearray(content)
                data[segment + at] ^= change
                group.path.write_bytes(data)
                report = checker.check(tmp_path / 'repository')
                assert not report.ok, (slot, at)
                assert {f.file for f in report.findings} == {
                    'groups/00000001'}
                if not report.damaged_images:
                    unread.append(at)
                    with make() as repo, repo.open_image('one') as image:
                        assert image.read() == whole
    # No reader needs these: two reserved fields, and the checksum itself.
    assert set(unread) >= {5, *range(20, 32)}
    assert set(unread) <= {5, *range(6, 12), *range(20, 32)}
