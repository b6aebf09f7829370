# SPDX-License-Identifier: Apache-2.0

"""Hints of volumes: over NBD, and from real file systems."""

import fcntl
import re
import subprocess

import pytest

from glance_dedup.base import exceptions
from glance_dedup.repository import openvolumes
from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

MIB = 1 << 20
BLOCK = 4096


@pytest.fixture
def repository(tmp_path):
    return volume_tools.create_repository(tmp_path / 'repository')


def run(*command):
    return subprocess.run(
        [str(word) for word in command], check=True, capture_output=True,
        text=True, timeout=60).stdout


# -- over NBD -----------------------------------------------------------------

@pytest.mark.needs('nbdkit')
def test_no_dedup(repository, tmp_path):
    data = repositories.noise(MIB, 1)
    volume_tools.create(repository, 'disk', 4 * MIB)
    with volume_tools.Server(repository, tmp_path) as server:
        server.start('--no-dedup')
        with server.session() as session:
            for at in (0, MIB):
                volume_tools.write(session, at, data)
                server.control.checkpoint()
            assert (server.number('skipped'), server.number('unique')) == (
                2 * MIB, 2 * MIB)
            assert session.read(MIB, MIB) == data
        server.stop()
        server.start()
        with server.session() as session:
            before = server.number('skipped')
            volume_tools.write(session, 2 * MIB, data)
            server.control.checkpoint()
            assert server.number('skipped') == before
        server.stop()


@pytest.mark.needs('nbdkit')
@pytest.mark.parametrize('asks', [False, True])
def test_beside_an_older_program(repository, tmp_path, asks):
    """The server warns once, whichever thread makes the checkpoint."""
    volume_tools.create(repository, 'disk', 4 * MIB)
    with open(repository / 'locks' / 'groups', 'r+b') as older, (
            volume_tools.Server(repository, tmp_path)) as server:
        assert repositories.set_lock(
            older.fileno(), repositories.FEATURE_BYTE + 3, fcntl.F_RDLCK)
        server.start('--no-dedup')
        with server.session() as session:
            for at in (0, MIB):
                volume_tools.write(session, at, repositories.noise(MIB, at))
                if asks:
                    server.control.checkpoint()
        server.stop()
        assert server.text().count('blocks that were to stay copies') == 1


@pytest.mark.needs('nbdkit')
def test_cache(repository, tmp_path):
    """A written copy of a range that NBD_CMD_CACHE prefetched is found."""
    data = repositories.noise(MIB, 1)
    volume_tools.create(repository, 'disk', 8 * MIB)
    with volume_tools.Server(repository, tmp_path) as server:
        server.start()
        with server.session() as session:
            volume_tools.write(session, 0, data)
            server.control.checkpoint()
            volume_tools.ask(session, nbd.CACHE, 0, 8 * MIB)
            volume_tools.write(session, 5 * MIB, data)
            server.control.checkpoint()
            assert session.read(5 * MIB, MIB) == data
            assert (server.number('prefetches'), server.number('prefetched'),
                    server.number('duplicate')) == (1, MIB, MIB)
            assert server.number('skipped') == 0
            assert session.answer(nbd.CACHE, 8 * MIB, 1)[0]


# -- the API ------------------------------------------------------------------

def test_ranges(repository):
    volume_tools.create(repository, 'disk', MIB)
    with repositories.open_repository(repository) as repo, (
            openvolumes.open_volume(repo, 'disk')) as volume:
        volume.prefetch(MIB, 0)
        volume.prefetch(0, MIB)
        for length, offset in ((1, MIB), (MIB + 1, 0), (1 << 62, 1 << 62),
                               (-1, 0), (0, -1)):
            with pytest.raises(exceptions.InvalidParameter):
                volume.prefetch(length, offset)


# -- real file systems --------------------------------------------------------

def stored(repository, image):
    """Return the counters after a disk was written and stored."""
    data = image.read_bytes()
    volume_tools.create(repository, 'disk', len(data), 64 * MIB)
    with repositories.open_repository(repository) as repo, (
            openvolumes.open_volume(repo, 'disk')) as volume:
        for at in range(0, len(data), MIB):
            volume.write(data[at:at + MIB], at)
        volume.checkpoint()
        for at in range(0, len(data), MIB):
            assert volume.read(MIB, at) == data[at:at + MIB]
        return volume.info().counters


def nonzero(data, ranges):
    """Return the bytes of blocks that are in a range, wholly or partly."""
    blocks = {at for start, length in ranges
              for at in range(start // BLOCK * BLOCK, start + length, BLOCK)}
    return sum(BLOCK for at in blocks if any(data[at:at + BLOCK]))


def fill(image, start, length):
    with open(image, 'r+b') as f:
        f.seek(start)
        f.write(repositories.noise(length, start))


def ext_ranges(image, start, block):
    """Return the ranges of metadata, from dumpe2fs and debugfs.

    The journal is the last one. The inode tables of meta_bg are not searched
    for.
    """
    offset = f'{image}?offset={start}' if start else image
    text = run('dumpe2fs', offset)
    ranges = re.findall(r'superblock at (\d+)()', text)
    copies = len(ranges)
    ranges += re.findall(r'Group descriptors? at (\d+)(?:-(\d+))?', text)
    if 'meta_bg' not in text:
        ranges += re.findall(r'Inode table at (\d+)-(\d+)', text)
    journal = run('debugfs', '-R', 'stat <8>', offset)
    ranges += re.findall(r'\(\d+-\d+\):(\d+)-(\d+)', journal)
    return copies, [
        (start + int(first) * block,
         (int(last or first) - int(first) + 1) * block)
        for first, last in ranges]


@pytest.mark.needs('disks')
@pytest.mark.parametrize('start, block, group, features, superblocks', [
    (0, BLOCK, 32768, '64bit', 2),
    (MIB, BLOCK, 32768, '64bit', 2),
    (0, 1024, 8192, '^64bit', 6),
    (0, BLOCK, 256, 'meta_bg,^resize_inode', 11),
    (0, BLOCK, 1024, 'sparse_super2', 3),
    (0, BLOCK, 1024, '^sparse_super,^resize_inode', 45)])
def test_ext4(repository, tmp_path, start, block, group, features,
              superblocks):
    image = tmp_path / 'image'
    with open(image, 'wb') as f:
        f.truncate(192 * MIB)
    if start:
        subprocess.run(['sfdisk', image], input='label: gpt\n,\n', text=True,
                       check=True, capture_output=True, timeout=60)
    run('mkfs.ext4', '-q', '-b', block, '-g', group, '-O', features,
        '-J', 'size=4', '-E', f'offset={start}', image, '180M')
    copies, ranges = ext_ranges(image, start, block)
    assert copies == superblocks
    journal = ranges[-1]
    assert journal[1] >= 16 * BLOCK
    fill(image, *journal)
    counters = stored(repository, image)
    wanted = nonzero(image.read_bytes(), ranges)
    assert wanted > journal[1]
    assert counters['skipped'] == wanted


@pytest.mark.needs('disks')
def test_xfs(repository, tmp_path):
    image = tmp_path / 'image'
    with open(image, 'wb') as f:
        f.truncate(320 * MIB)
    run('mkfs.xfs', '-q', image)

    def number(field):
        return int(run('xfs_db', '-r', '-c', 'sb 0', '-c', f'p {field}',
                       image).split()[-1])
    log, bits = number('logstart'), number('agblklog')
    size, count = number('agblocks'), number('agcount')
    place = (log >> bits) * size + (log & (1 << bits) - 1)
    journal = place * BLOCK, number('logblocks') * BLOCK
    fill(image, *journal)
    counters = stored(repository, image)
    assert counters['skipped'] == journal[1] + count * BLOCK
