# SPDX-License-Identifier: Apache-2.0

"""The parts of the comparison with peers; see ``benchmarks/peers.py``."""

import importlib.util
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

from tests.support import disks

pytestmark = [pytest.mark.slow, pytest.mark.needs('disks')]

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / 'benchmarks'
BLOCK = 4096
MIB = 1 << 20


@pytest.fixture
def load(monkeypatch):
    """Yields a function that imports a benchmark, with its modules."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def imported(name):
        spec = importlib.util.spec_from_file_location(
            name, BENCHMARKS / f'{name}.py')
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return imported


@pytest.fixture
def data():
    return random.Random(1).randbytes(MIB)


def show(arguments, directory, **environ):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / 'peers.py', '--rounds', '1',
         *arguments], cwd=directory, capture_output=True, text=True,
        timeout=200, env={**os.environ, **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# -- images -------------------------------------------------------------------

def test_bytes_that_are_not_zeros_are_counted_in_blocks(load, tmp_path):
    path = tmp_path / 'image'
    with open(path, 'wb') as f:
        f.truncate(MIB)
        f.seek(3 * BLOCK + 17)
        f.write(b'x')
        f.seek(100 * BLOCK)
        f.write(bytes(8 * BLOCK))   # written zeros
        f.seek(MIB)
        f.write(b'end')
    assert load('images').not_zeros(path) == BLOCK + 3


def test_a_moved_partition_has_the_same_bytes(load, tmp_path, data):
    if shutil.which('sfdisk') is None:
        pytest.skip('sfdisk is not installed')
    images = load('images')
    source, target = tmp_path / 'source', tmp_path / 'target'
    with open(source, 'wb') as f:
        f.write(data)               # the bytes before it stay behind
        f.write(data[::-1])
        f.truncate(4 * MIB)
    images.move_partition(source, MIB, target, 63)
    moved = target.read_bytes()
    assert moved[63 * 512:] == data[::-1] + bytes(2 * MIB)
    table = subprocess.run(['sfdisk', '--dump', target], timeout=60,
                           capture_output=True, text=True, check=True).stdout
    assert f'start=          63, size=        {3 * MIB // 512}' in table


def test_what_an_image_is_made_from_comes_before_it(load):
    images = load('images')
    assert len({image.file for image in images.ALL}) == len(images.ALL)
    for wanted in images.SMALL, images.ALL:
        for place, image in enumerate(wanted):
            assert image.source is None or image.source in wanted[:place]
            assert image.role in images.ROLES


def test_what_an_image_is_made_from_may_fail(load, tmp_path, monkeypatch):
    images = load('images')
    builder = images.Builder(str(tmp_path), {'': 'nowhere'})
    monkeypatch.setattr(builder, 'install', lambda image, work: 1 / 0)
    derived = []
    monkeypatch.setattr(builder, 'derive',
                        lambda image, work: derived.append(image))
    (tmp_path / 'bookworm-minimal.raw').write_bytes(b'x' * BLOCK)
    assert images.build_all(builder, images.SMALL, 2) == len(images.SMALL) - 1
    assert [image.name for image in builder.done] == ['bookworm-minimal']
    assert not derived
    assert '"not_zeros": 4096' in (tmp_path / 'manifest.json').read_text()


# -- peers --------------------------------------------------------------------

def test_all_that_a_directory_has_is_counted(load, tmp_path, data):
    (tmp_path / 'a').mkdir()
    (tmp_path / 'a' / 'b').write_bytes(data)
    os.link(tmp_path / 'a' / 'b', tmp_path / 'a' / 'c')
    with open(tmp_path / 'sparse', 'wb') as f:
        f.truncate(100 * MIB)
    assert MIB <= load('peers').allocated(tmp_path) <= MIB + 10 * BLOCK


@pytest.mark.parametrize('other', (b'', b'12', b'1234', b'12x'))
def test_other_bytes_are_noticed(load, tmp_path, other):
    peers = load('peers')
    wanted, given = tmp_path / 'wanted', tmp_path / 'given'
    wanted.write_bytes(b'123')
    given.write_bytes(other)
    with pytest.raises(peers.Failed, match='gave back'):
        peers.run('cat', str(given), reader=peers.compare_with(wanted))
    given.write_bytes(b'123')
    peers.run('cat', str(given), reader=peers.compare_with(wanted))


def test_a_command_has_a_limit(load, monkeypatch):
    peers = load('peers')
    monkeypatch.setattr(peers, 'LIMIT', 0.2)
    with pytest.raises(peers.Failed, match=r'sh \(-9\): not done after 0.2 s'):
        peers.run('sh', '-c', 'sleep 100; true', reader=peers.discard)


def test_the_memory_is_that_of_the_command():
    # A small process starts it: a new process counts its parent's memory, too.
    peak = subprocess.run(
        [sys.executable, '-c', 'import sys, peers; print(peers.run('
         'sys.executable, "-c", "x = bytearray(200 << 20)").peak)'],
        cwd=BENCHMARKS, check=True, capture_output=True, text=True).stdout
    assert 200 * MIB < int(peak) < 300 * MIB


# Long: each program stores and restores the images in new processes.
@pytest.mark.parametrize('name', (
    'plain', 'ours', 'ours-zstd-9', 'restic', 'borg-4k', 'borg', 'casync',
    'squashfs', 'btrfs', 'xfs', 'xfs-duperemove',
    *(pytest.param(name, marks=pytest.mark.long) for name in (
        'ours-zstd-3', 'ours-zstd-19', 'ours-gear'))))
def test_a_peer_is_measured(name, tmp_path, data):
    paths = [tmp_path / 'first.raw', tmp_path / 'second.raw']
    paths[0].write_bytes(data + bytes(MIB) + data[BLOCK:])
    paths[1].write_bytes(data[::-1] + data)
    table = show(['--only', name, '--restored', '1', '--dir', tmp_path,
                  *paths], tmp_path)
    assert table[0] == '2 images, 0.00 GB not zeros'
    _, *cells = table[-1].strip('| ').split(' | ')
    if cells[0].startswith(('not installed', 'needs root', 'mount (')):
        pytest.skip(cells[0])
    assert len(cells) == 13, cells
    assert 1 <= int(cells[0]) <= 64
    assert sorted(os.listdir(tmp_path)) == ['first.raw', 'second.raw']


def test_a_peer_that_is_not_there_says_so(tmp_path, data):
    (tmp_path / 'image').write_bytes(data)
    table = show(['--only', 'borg', 'image'], tmp_path, PATH='/nowhere')
    assert table[-1] == '| borg | not installed: borg |'


def test_a_peer_that_fails_says_so(tmp_path, data):
    (tmp_path / 'image').write_bytes(data)
    there = tmp_path / 'bin'
    there.mkdir()
    (there / 'borg').write_text('#!/bin/sh\n[ "$1" != create ] || exec sh -c '
                                "'echo no room; exit 3'\necho other bytes\n")
    (there / 'borg').chmod(0o755)
    path = f'{there}:{os.environ["PATH"]}'
    table = show(['--only', 'borg', '--only', 'plain', 'image'], tmp_path,
                 PATH=path)
    assert table[-2] == '| borg | borg (3): no room |'
    assert table[-1].startswith('| plain files | 1 | 100.4% |')
    (there / 'borg').write_text('#!/bin/sh\n[ "$1" != init ] || mkdir "$4"\n'
                                'echo other bytes\n')
    table = show(['--only', 'borg', 'image'], tmp_path, PATH=path)
    assert table[-1] == '| borg | gave back other bytes |'
    assert sorted(os.listdir(tmp_path)) == ['bin', 'image']


def test_ranges_are_shared(load, tmp_path, data):
    """On XFS, equal ranges are stored once, and no byte changes."""
    images = {'a': data, 'b': data[BLOCK:] + data, 'c': data[::-1] + data}
    with disks.mounted(tmp_path, 'xfs') as root:
        for name, content in images.items():
            (root / name).write_bytes(content)
        done = subprocess.run(
            [sys.executable, BENCHMARKS / 'dedupe_ranges.py', root],
            capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        shared = 3 * MIB - BLOCK
        assert done.stdout == f'{shared >> 20} MiB shared\n'
        for name, content in images.items():
            assert (root / name).read_bytes() == content


# -- plots --------------------------------------------------------------------

@pytest.fixture
def plot(load):
    pytest.importorskip('matplotlib')
    return load('plot')


def test_the_same_figures_give_the_same_drawing(plot, tmp_path):
    def draw(path, last):
        plot.bars(['one', 'two'], {'a': [1, None], 'b': [2, last]}, 'seconds',
                  'Title', path)
        bars = path.read_bytes()
        plot.lines({'a': ([1, 2], [3, 4]), 'b': ([1, 2], [4, last])}, 'x',
                   'y, MB/s', 'Title', path)
        return bars, path.read_bytes()
    first = draw(tmp_path / 'first', 3)
    assert first == draw(tmp_path / 'second', 3)
    assert all(a != b for a, b in zip(first, draw(tmp_path / 'third', 4)))
    assert all(word in first[0] for word in (b'one', b'two', b'seconds'))


def test_a_plot_is_refused_before_the_run(tmp_path):
    """Without matplotlib the option is an error at the start."""
    done = subprocess.run(
        [sys.executable, '-S', '-c', 'import sys, argparse;'
         f'sys.path.insert(0, {str(BENCHMARKS)!r}); import plot;'
         'p = argparse.ArgumentParser(); plot.argument(p);'
         "p.parse_args(['--plot', 'x'])"],
        capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert 'matplotlib is not installed' in done.stderr
