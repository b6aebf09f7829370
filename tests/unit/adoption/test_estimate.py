# SPDX-License-Identifier: Apache-2.0

"""Estimates match the storing of the same files, of every kind."""

import os
import subprocess

import pytest

from dedupd.tasks import collector
from dedupd.tasks import merger
from dedupd.tasks import recompressor
from glance_dedup import _engine
from glance_dedup.adoption import estimate
from glance_dedup.base import confined
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.repository import space
from tests.support import maintenance
from tests.support import qcow2files
from tests.support import repositories
from tests.support.repositories import mixture
from tests.support.repositories import noise

BLOCK = 4096
MIB = 1 << 20


def text(length, seed):
    return (noise(length // 2 + 1, seed).hex().encode())[:length]


def image_files(place):
    """Two images that share, with text, noise and zeros, and a small one."""
    common = text(6 * MIB, 1) + noise(2 * MIB, 2)
    contents = {
        'a': common + bytes(3 * MIB) + mixture(4 * MIB, 3),
        'b': common[:4 * MIB] + text(MIB + 12345, 5) + common[4 * MIB:],
        'c': noise(777, 6)}
    for name, content in contents.items():
        (place / name).write_bytes(content)
    return [str(place / name) for name in contents]


@pytest.fixture
def place(tmp_path):
    directory = tmp_path / 'images'
    directory.mkdir()
    return directory


def du(path):
    found = subprocess.run(['du', '-s', '--block-size=1', path], check=True,
                           capture_output=True, text=True, timeout=60)
    return int(found.stdout.split()[0])


@pytest.mark.parametrize('codec', ['none', 'lz4', 'zstd'])
@pytest.mark.parametrize('chunking, block_size', [
    ('fixed', None), ('fixed', 512), ('fixed', 65536), ('content-defined',
                                                        None),
    ('content-defined 256 1024', 4096)])
def test_what_storing_makes_of_it(place, tmp_path, chunking, block_size,
                                  codec):
    files = image_files(place)
    path = repositories.create(
        tmp_path / 'repository', chunking=chunking, block_size=block_size)
    with repositories.open_repository(path, codec=codec, threads=0) as repo:
        stats = [repo.put(os.path.basename(file), file) for file in files]
    found = estimate.estimate(files, estimate.Options(
        block_size, chunking, codec))
    assert found.unreadable == []
    assert found.one_of == 1 and found.error_percent == 0
    assert [image.size for image in found.images] == [
        stat.size for stat in stats]
    assert [image.nonzero for image in found.images] == [
        stat.size - stat.zero_bytes for stat in stats]
    # Only storing finds a twin that begins a few bytes further on.
    assert sum(image.new for image in found.images) == pytest.approx(
        sum(stat.new_bytes for stat in stats), rel=0.02)
    assert found.stored == pytest.approx(
        sum(stat.stored_bytes for stat in stats), rel=0.02)


def test_what_du_says(place, tmp_path):
    files = image_files(place)
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as repo:
        for file in files:
            repo.put(os.path.basename(file), file)
        with maintenance.maintaining(repo) as maintainer:
            collector.run_once(maintainer, pacing.Pace())
            merger.run_once(maintainer, pacing.Pace())
    found = estimate.estimate(files, estimate.Options())
    assert found.on_disk == pytest.approx(du(path), rel=0.02)


def test_recompression_is_estimated(place, tmp_path):
    (place / 'a').write_bytes(text(3 * MIB, 1) + noise(MIB, 3)
                              + b'line of text\n' * (MIB // 13))
    found = estimate.estimate([str(place / 'a')], estimate.Options())
    # Only full groups are recompressed; this content fills several of them.
    path = repositories.create(tmp_path / 'repository', group_slots=256)
    with repositories.open_repository(path) as repo:
        repo.put('a', place / 'a')
        with maintenance.maintaining(repo) as maintainer:
            recompressor.run_once(maintainer, pacing.Pace(), 'zstd',
                                  estimate.LEVEL)
        parts = space.parts(repo)
    assert sum(part.bytes for part in parts if part.name.startswith(
        ('blocks', 'segment'))) == pytest.approx(found.recompressed, rel=0.03)
    assert found.recompressed < 0.8 * found.stored


def sampled(files, table):
    """Return the engine's numbers with a table of so many bytes."""
    engine = _engine.Estimate(
        block_size=512, cut_minimum=0, cut_average=0, segment_size=65536,
        codec='lz4', codec_level=0, again_codec='zstd', again_level=0,
        table_bytes=table)
    for content in files:
        assert engine.take(content, True) == len(content)
        engine.end()
    return engine.sum()


def test_a_sample_stands_for_all():
    """A sample gives nearly the numbers of all blocks.

    It has 20,000 blocks of 512 bytes in a table of some 3,000.
    """
    files = [noise(6 * MIB, 1), noise(6 * MIB, 1)[:3 * MIB] + text(MIB, 2)
             + noise(6 * MIB, 1)[3 * MIB:], noise(MIB, 3)]
    exact, level, _, _ = sampled(files, 0)
    assert level == 0
    assert [new for new, *_ in exact] == [6 * MIB, MIB, MIB]
    found, level, _, _ = sampled(files, 1 << 17)
    assert level > 1
    for (new, blocks, stored, squares), (all_new, *_, all_stored, _) in zip(
            found, exact):
        assert new == 512 * blocks
        error = 4 / blocks ** 0.5       # of four standard errors
        assert new << level == pytest.approx(all_new, rel=error)
        assert stored << level == pytest.approx(all_stored, rel=error)
    assert sampled(files, 1 << 17)[0] == found


def test_the_error_that_is_told(place, monkeypatch):
    monkeypatch.setattr(estimate, 'TABLE', 1 << 17)
    (place / 'a').write_bytes(noise(8 * MIB, 1))
    options = estimate.Options(block_size=512)
    found = estimate.estimate([str(place / 'a')], options)
    assert found.one_of > 1
    assert 1 < found.error_percent < 10
    assert found.stored == pytest.approx(
        8 * MIB, rel=2 * found.error_percent / 100)
    exact = estimate.estimate(
        [str(place / 'a')], estimate.Options(block_size=512, exact=True))
    assert exact.one_of == 1 and exact.images[0].new == 8 * MIB


def test_pieces_do_not_matter(place, monkeypatch):
    """Cuts are the same for any lengths of the reads."""
    content = mixture(900000, 1) + bytes(300001) + mixture(500000, 2)
    (place / 'a').write_bytes(content)
    for options in (estimate.Options(),
                    estimate.Options(chunking='content-defined')):
        expected = estimate.estimate([str(place / 'a')], options)
        with monkeypatch.context() as patched:
            patched.setattr(estimate, 'PIECE', 1 << 17)
            assert estimate.estimate([str(place / 'a')], options) == expected


@pytest.mark.parametrize('chunking', ['fixed', 'content-defined'])
def test_holes_are_zeros_and_not_read(place, chunking):
    with open(place / 'sparse', 'wb') as f:
        f.write(noise(100000, 1))
        f.seek(3 << 30)
        f.write(noise(100000, 2))
        f.truncate((4 << 30) + 17)
    done = []
    found = estimate.estimate(
        [str(place / 'sparse')], estimate.Options(chunking=chunking),
        done.append)
    image = found.images[0]
    assert image.size == (4 << 30) + 17
    assert image.new == pytest.approx(200000, abs=40000)
    assert sum(done[-1:]) < 20 * MIB


@pytest.mark.parametrize('chunking', ['fixed', 'content-defined'])
def test_holes_are_as_written_zeros(place, chunking):
    content = (noise(100001, 1) + bytes(20 * MIB) + noise(70000, 2)
               + bytes(9 * MIB + 5))
    (place / 'dense').write_bytes(content)
    with open(place / 'sparse', 'wb') as f:
        f.write(content[:100001])
        f.seek(100001 + 20 * MIB)
        f.write(content[100001 + 20 * MIB:][:70000])
        f.truncate(len(content))
    dense, sparse = (
        estimate.estimate([str(place / name)],
                          estimate.Options(chunking=chunking)).images[0]
        for name in ('dense', 'sparse'))
    sparse.path = dense.path
    assert sparse == dense and dense.new > 170000


def test_only_read(place):
    path = place / 'a'
    path.write_bytes(noise(MIB, 1))
    os.utime(path, (1, 1))
    path.chmod(0o400)
    before = path.stat()
    estimate.estimate([str(path)], estimate.Options())
    assert path.stat() == before


def test_files_of_directories(place, tmp_path):
    (place / 'b').write_bytes(b'')
    (place / 'a').write_bytes(b'')
    (place / 'directory').mkdir()
    (place / 'link').symlink_to('a')
    os.mkfifo(place / 'fifo')
    skipped = []
    (tmp_path / 'x').write_bytes(b'')
    assert estimate.files_of([str(place), str(tmp_path / 'x')],
                             skipped.append) == [
        str(place / 'a'), str(place / 'b'), str(tmp_path / 'x')]
    assert skipped == [str(place / name)
                       for name in ('directory', 'fifo', 'link')]


def test_what_cannot_be_read(place):
    os.mkfifo(place / 'fifo')
    (place / 'a').write_bytes(noise(5 * BLOCK, 1))
    files = [str(place / name) for name in ('none', 'fifo', 'a')]
    found = estimate.estimate(files, estimate.Options())
    assert [path for path, _ in found.unreadable] == files[:2]
    assert [image.new for image in found.images] == [0, 0, 5 * BLOCK]


def test_a_file_that_shrinks(place, monkeypatch):
    path = place / 'a'
    path.write_bytes(noise(MIB, 1))
    whole = estimate._File.read

    def read(self, offset):
        os.truncate(path, 1000)
        return whole(self, offset)[:0]
    monkeypatch.setattr(estimate._File, 'read', read)
    found = estimate.estimate([str(path)], estimate.Options())
    assert 'shorter' in str(found.unreadable[0][1])


def test_bad_options():
    for options in (estimate.Options(block_size=1000),
                    estimate.Options(chunking='rabin'),
                    estimate.Options(codec='zstd', level=99),
                    estimate.Options(codec='gzip')):
        with pytest.raises(exceptions.InvalidParameter):
            estimate.estimate([], options)
    assert estimate.estimate([], estimate.Options()).stored == 0


def test_memory_is_told_before(place):
    (place / 'a').write_bytes(noise(8 * MIB, 1))
    files = [str(place / 'a')]
    small = estimate.exact_memory(files, estimate.Options())
    assert 2048 * 16 < small < 2048 * 100
    assert estimate.exact_memory(
        files, estimate.Options(block_size=512)) == pytest.approx(8 * small)


def qcow2(path, plain):
    """Write a compressed qcow2 with whole clusters."""
    size = qcow2files.CLUSTER
    path.write_bytes(qcow2files.file_of([
        qcow2files.deflated(plain[at:at + size])
        for at in range(0, len(plain), size)]))


def test_disks_are_counted_as_raw_images(place):
    """A disk shares its blocks with the raw image, and other files stay."""
    raw = text(MIB, 1) + bytes(MIB // 2) + text(MIB // 4, 2)
    qcow2(place / 'a.qcow2', raw)
    (place / 'b.raw').write_bytes(raw)
    qcow2(place / 'c.qcow2', raw[:MIB])
    files = [str(place / name) for name in ('a.qcow2', 'b.raw', 'c.qcow2')]
    done = []
    found = estimate.estimate(files, estimate.Options(), done.append)
    alone = estimate.estimate(files[1:2], estimate.Options())
    assert found.images[1].new == alone.images[0].new
    assert all('100 % of the compressed bytes' in image.disk
               for image in found.images[::2])
    disks = found.with_disks
    assert [image.is_disk for image in disks.images] == [True, False, True]
    assert [image.size for image in disks.images] == [
        len(raw), len(raw), MIB]
    rest = 4 * qcow2files.CLUSTER + 8192
    assert alone.images[0].new <= disks.images[0].new <= (
        alone.images[0].new + rest)
    assert disks.images[1].new == 0 and disks.images[2].new <= rest
    assert disks.stored < 0.7 * found.stored
    sizes = [os.path.getsize(file) for file in files]
    assert 0.9 * (2 * sum(sizes) - sizes[1]) < done[-1] < (
        2 * sum(sizes) - sizes[1] + 2 * rest)


def test_long_holes_of_a_disk():
    """Zeros that are counted as such give the figures of those written."""
    raw = text(5000, 1) + bytes(9 * MIB) + text(70_000, 2) + bytes(5 * MIB)
    for options in (estimate.Options(),
                    estimate.Options(chunking='content-defined')):
        counts = [estimate._Count(options) for _ in range(2)]
        for count, hole in zip(counts, (counts[0].zeros, lambda length: (
                counts[1].data(bytes(length))))):
            count.data(raw[:5000])
            hole(9 * MIB)
            count.data(raw[5000 + 9 * MIB:][:70_000])
            hole(len(raw) - 5000 - 9 * MIB - 70_000)
            assert count.end_bytes() == len(raw)
            count.end(estimate.Image('', len(raw)), len(raw))
        one, other = (count.images for count in counts)
        assert one == other
        assert counts[0].engine.sum() == counts[1].engine.sum()


def test_a_disk_that_would_not_be_kept(place):
    """Such a file counts as it is, in all sums."""
    (place / 'a').write_bytes(qcow2files.file_of(
        [qcow2files.foreign(text(4096, 1))] * 3) + noise(5 * BLOCK))
    (place / 'b').write_bytes(b'QFI\xfb' + noise(5 * BLOCK))
    found = estimate.estimate(
        [str(place / 'a'), str(place / 'b')], estimate.Options())
    assert 'only 0 %' in found.images[0].disk
    assert 'would not be kept: it is qcow2 of' in found.images[1].disk
    assert found.with_disks.on_disk == found.on_disk


@pytest.mark.needs('qemu')
@pytest.mark.parametrize('subformat', ['dynamic', 'fixed'])
def test_the_disk_in_a_vhd(place, subformat):
    """A fixed one has its mark at the end."""
    (place / 'raw').write_bytes(noise(MIB, 1) + bytes(MIB))
    subprocess.run(
        ['qemu-img', 'convert', '-O', 'vpc', '-o',
         f'force_size=on,subformat={subformat}', place / 'raw',
         place / 'file'], check=True, timeout=120)
    found = estimate.estimate([str(place / 'file')], estimate.Options())
    assert [image.is_disk for image in found.with_disks.images] == [True]
    assert found.images[0].disk == 'the disk in this vhd would be kept'


def test_a_damaged_disk(place):
    raw = text(2 * MIB, 1)
    qcow2(place / 'a', raw)
    with (place / 'a').open('rb+') as f:
        f.seek(-3000, os.SEEK_END)
        f.write(b'\xff' * 3000)
    found = estimate.estimate([str(place / 'a')], estimate.Options())
    assert 'a compressed cluster of it is damaged' in found.images[0].disk
    assert found.images[0].size == (place / 'a').stat().st_size


def test_no_formats(place):
    found = estimate.estimate(image_files(place), estimate.Options())
    assert found.with_disks is None and found.unconfined is None


def test_no_program(place, monkeypatch):
    """The files are counted, and a sentence says what is missing."""
    monkeypatch.setattr(confined, 'PROGRAM', str(place / 'none'))
    qcow2(place / 'a', text(MIB // 4, 1))
    found = estimate.estimate([str(place / 'a')], estimate.Options())
    assert found.images[0].new > 0 and found.with_disks is None
    assert 'install the package again' in found.unconfined
