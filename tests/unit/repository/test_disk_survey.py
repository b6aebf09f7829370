# SPDX-License-Identifier: Apache-2.0

"""The plain bytes of disks in files are those that a conversion would keep."""

import itertools
import random
import subprocess
import zlib

import pytest

from glance_dedup.base import confined
from glance_dedup.repository import disk_survey
from tests.support import qcow2files
from tests.support.repositories import mixture
from tests.support.repositories import noise

MIB = 1 << 20
CLUSTER = qcow2files.CLUSTER


def disk_in(file):
    return disk_survey.surveyed(
        lambda length, offset: file[offset:offset + length], len(file))


def plain_bytes(disk):
    """Return the plain bytes, and the bytes of the file that were used."""
    parts = []
    used = sum(disk.give(parts.append,
                         lambda length: parts.append(bytes(length))))
    return b''.join(parts), used


def words(length, seed):
    """Return bytes of which zlib makes a quarter or so."""
    return noise(length // 2, seed).hex().encode()[:length]


@pytest.mark.needs('qemu')
@pytest.mark.parametrize('name, options', [
    ('qcow2', ('-O', 'qcow2')),
    ('qcow2', ('-O', 'qcow2', '-c')),
    ('qcow2', ('-O', 'qcow2', '-c', '-o', 'cluster_size=4k')),
    ('vmdk', ('-O', 'vmdk', '-o', 'subformat=streamOptimized')),
    ('vmdk', ('-O', 'vmdk')), ('vdi', ('-O', 'vdi')),
    ('vpc', ('-O', 'vpc', '-o', 'force_size=on')), ('vhdx', ('-O', 'vhdx'))])
def test_disk_and_rest(tmp_path, name, options):
    raw = mixture(5 * MIB + 512, 1) + bytes(3 * MIB) + words(MIB, 2)
    (tmp_path / 'raw').write_bytes(raw)
    subprocess.run(['qemu-img', 'convert', *options, tmp_path / 'raw',
                    tmp_path / 'file'], check=True, timeout=120)
    file = (tmp_path / 'file').read_bytes()
    with disk_in(file) as disk:
        assert (disk.format, disk.size) == (
            {'vpc': 'vhd'}.get(name, name), len(raw))
        assert disk.equal == 1
        content, used = plain_bytes(disk)
    assert content[:len(raw)] == raw
    begin = -(-len(raw) // (2 * MIB)) * 2 * MIB
    assert not any(content[len(raw):begin])
    # The rest begins with the header, and the disk's bytes are not in it,
    # but for streams that are too short to be derived.
    rest = content[begin:]
    assert rest[:512] == file[:512]
    assert raw[-4096:] not in rest and used <= len(file) + len(rest)
    assert not disk.streams or len(rest) < 0.3 * len(file)


def streams_of(count, encoder, seed=0):
    return [encoder(words(CLUSTER, seed + i)) for i in range(count)]


def test_all_streams_are_equal():
    file = qcow2files.file_of(streams_of(40, qcow2files.deflated))
    with disk_in(file) as disk:
        assert disk.equal == 1 and disk.streams > 0.3 * 40 * CLUSTER
        content, _ = plain_bytes(disk)
    # The rest is the header and the tables.
    assert len(content) == 2 * MIB + 4 * CLUSTER


def test_streams_of_two_programs():
    """The search runs again for streams that come out unequal."""
    file = qcow2files.file_of(
        streams_of(20, qcow2files.deflated)
        + streams_of(20, lambda plain: qcow2files.deflated(plain, 1), 100))
    with disk_in(file) as disk:
        assert disk.equal == 1


def test_streams_without_an_encoder():
    file = qcow2files.file_of(streams_of(3, qcow2files.foreign))
    with pytest.raises(confined.RefusedError, match='zlib makes only 0 %'):
        disk_in(file)


def test_a_few_streams_without_an_encoder():
    """They are in the disk and in the rest."""
    streams = (streams_of(60, qcow2files.deflated)
               + streams_of(3, qcow2files.foreign, 100))
    with disk_in(qcow2files.file_of(streams)) as disk:
        assert disk.equal == pytest.approx(60 / 63, abs=0.01)
        content, _ = plain_bytes(disk)
    with disk_in(qcow2files.file_of(streams[:60])) as disk:
        without, _ = plain_bytes(disk)
    size = len(streams[0])
    assert len(content) - len(without) == pytest.approx(
        3 * size, abs=size + 1024)


def test_short_streams_are_in_the_rest():
    """Deriving them would cost much, and save little."""
    zeros = [qcow2files.deflated(b'\1' * CLUSTER)] * 31
    file = qcow2files.file_of(zeros + streams_of(1, qcow2files.deflated))
    with disk_in(file) as disk:
        content, used = plain_bytes(disk)
    assert zeros[0] * 3 in content
    assert used > len(file)


def test_a_sample_of_many(monkeypatch):
    monkeypatch.setattr(disk_survey, '_MAX_TRIED', 4)
    tried = []
    monkeypatch.setattr(
        disk_survey._engine, 'deflates_to',
        lambda params, sample: tried.append(sample[1]) or 1)
    streams = streams_of(30, qcow2files.deflated)
    with disk_in(qcow2files.file_of(streams)) as disk:
        assert disk.equal == 1
    assert 2 <= len({*tried}) <= 4
    assert set(tried) <= set(streams)


def test_streams_that_decode_to_much():
    """One stream with many names would be many times the file."""
    stream = qcow2files.deflated(bytes(CLUSTER))
    file = bytearray(qcow2files.file_of([stream] * 500))
    entry = file[2 * CLUSTER:2 * CLUSTER + 8]
    file[2 * CLUSTER:2 * CLUSTER + 4000] = entry * 500
    with pytest.raises(confined.RefusedError, match='64 times'):
        disk_in(bytes(file[:4 * CLUSTER + 512]))


def test_a_block_with_many_names():
    """Its disk would be many times the file (F8)."""
    file = bytearray(qcow2files.file_of(
        streams_of(400, qcow2files.deflated)))
    for count in 100, 400:
        for number in range(count):
            at = 2 * CLUSTER + 8 * number
            file[at:at + 8] = (4 * CLUSTER).to_bytes(8, 'big')
        if count * CLUSTER < len(file):
            with disk_in(file) as disk:
                assert disk.format == 'qcow2'
        else:
            with pytest.raises(confined.RefusedError, match='more bytes'):
                disk_in(file)
    assert 100 * CLUSTER < len(file) < 400 * CLUSTER


def test_a_survey_has_steps():
    """A task that must stop, or keep to a rate, can do so between them."""
    file = qcow2files.file_of(streams_of(300, qcow2files.deflated))
    reads = []

    def read(length, offset):
        reads.append(length)
        return file[offset:offset + length]
    most = 0
    with disk_survey.Disk(read, len(file), block_size=4096) as disk:
        for _ in disk.survey():
            most, reads[:] = max(most, len(reads)), []
        assert disk.equal == 1 and disk.new_bytes == 300 * CLUSTER
    # A stream is read twice, and the search takes eight of them.
    assert most <= 24


def test_streams_that_are_slow(monkeypatch):
    """Content can make zlib's search slow (F8)."""
    file = qcow2files.file_of(streams_of(30, qcow2files.deflated))
    monkeypatch.setattr(disk_survey.time, 'thread_time',
                        itertools.count(0, 10).__next__)
    with pytest.raises(confined.RefusedError, match='takes too long'):
        disk_in(file)


@pytest.mark.needs('qemu')
def test_more_pieces_than_the_file_is_worth(tmp_path):
    (tmp_path / 'raw').write_bytes(
        bytes(random.Random(1).choices(b'abcdefghijklm', k=2 * MIB)))
    subprocess.run(
        ['qemu-img', 'convert', '-O', 'qcow2', '-c', '-o', 'cluster_size=512',
         tmp_path / 'raw', tmp_path / 'file'], check=True, timeout=120)
    with pytest.raises(confined.RefusedError, match='pieces.* worth'):
        disk_in((tmp_path / 'file').read_bytes())


def test_a_damaged_stream():
    streams = streams_of(20, qcow2files.deflated)
    file = bytearray(qcow2files.file_of(streams))
    with disk_in(file) as disk:
        place = 4 * CLUSTER + len(streams[0]) + 20
        file[place:place + 500] = b'\xff' * 500
        with pytest.raises(confined.RefusedError, match='damaged'):
            plain_bytes(disk)
    with pytest.raises(confined.RefusedError, match='damaged'):
        disk_in(file)


def test_a_file_that_shrinks(monkeypatch):
    file = bytearray(qcow2files.file_of(streams_of(3, qcow2files.deflated)))
    with disk_in(file) as disk:
        del file[3 * CLUSTER:]
        with pytest.raises(confined.RefusedError, match='shorter'):
            plain_bytes(disk)


def test_not_zlib_at_all():
    file = bytearray(qcow2files.file_of([zlib.compress(b'x')]))
    file[4:8] = b'\0\0\0\3'
    file[72:104] = (b'\0\0\0\0\0\0\0\x08' + bytes(16)
                    + b'\0\0\0\4\0\0\0\x70')
    file[104] = 1
    with pytest.raises(confined.RefusedError, match='zstd'):
        disk_in(bytes(file))


def test_sectors_are_those_of_a_set():
    dice = random.Random(1)
    for _ in range(200):
        size = dice.randrange(1, 60_000)
        sectors = disk_survey._Sectors(size)
        left = set(range(-(-size // 512)))
        for _ in range(dice.randrange(12)):
            place = dice.randrange(size)
            length = dice.randrange(1, size - place + 1)
            sectors.remove(place, length)
            left -= set(range(place // 512, (place + length - 1) // 512 + 1))
        ranges = list(sectors.ranges())
        assert left == {sector for begin, end in ranges
                        for sector in range(begin // 512, -(-end // 512))}
        assert all(begin < end <= size for begin, end in ranges)
        assert all(end < begin for (_, end), (begin, _) in zip(
            ranges, ranges[1:]))
