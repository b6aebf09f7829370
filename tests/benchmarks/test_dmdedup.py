# SPDX-License-Identifier: Apache-2.0

"""Dmdedup's experiments measure a disk that stores its writes."""

import contextlib
import io
import random
import subprocess
import sys
import tarfile
import types

import pytest

from glance_dedup.repository import image_repository
from glance_dedup.repository import openvolumes
from tests.benchmarks import papers

pytestmark = pytest.mark.long

BLOCKS = 500    # blocks of the disks
MAX_COUNT = 256      # that directmap.c takes at once


dmdedup = papers.fixture('dmdedup')


@pytest.fixture(scope='module')
def traces(dmdedup):
    return dmdedup.traces


@pytest.fixture(scope='module')
def program(dmdedup, tmp_path_factory):
    return dmdedup.synthetic.build(str(tmp_path_factory.mktemp('program')),
                                   'directmap', 'linearmap')


class Disk:
    """Writes to a disk, and their content to be read back."""

    def __init__(self, traces, seed=1):
        self._traces = traces
        self._rng = random.Random(seed)
        self.content = [bytes(16)] * BLOCKS
        self.written = set()
        self.data = b''

    def write(self, first, ids):
        self.data += self._traces.operation(
            self._traces.WRITE, first, b''.join(ids))
        self.content[first:first + len(ids)] = ids
        self.written.update(ids)

    def write_some(self, count, kinds):
        """Write blocks of a few contents, some twice in one write."""
        for _ in range(count):
            length = self._rng.choice((1, 1, 2, 40, MAX_COUNT + 10))
            self.write(self._rng.randrange(BLOCKS - length + 1),
                       [self._rng.randrange(1, kinds + 1).to_bytes(16, 'big')
                        for _ in range(length)])

    def checks(self):
        """Return a check that the disk has its writes, and zeros elsewhere."""
        return self._traces.operation(
            self._traces.CHECK, 0, b''.join(self.content))

    def work(self, data):
        return self._traces.Work(data, BLOCKS, 1, len(self.written))


@pytest.fixture
def disk(traces):
    found = Disk(traces)
    found.write_some(60, 300)
    return found


@pytest.fixture(params=[4096, 512])
def place(request, tmp_path):
    path = tmp_path / 'repository'
    image_repository.Repository.create(path, block_size=request.param)
    (tmp_path / 'stores').mkdir()
    return path, tmp_path / 'stores'


@pytest.fixture
def run(dmdedup, program, place):
    def run(backend, work, every=0, seconds=60):
        return dmdedup.run_direct(program, *map(str, place), backend, 1 << 20,
                                  work, every, seconds)
    return run


@pytest.mark.parametrize('every', [0, 1, 7])
@pytest.mark.parametrize('backend', ['inram', 'dtb', 'lmdb', 'leveldb'])
def test_the_direct_disk_keeps_its_data(run, disk, backend, every):
    found = run(backend, disk.work(disk.data + disk.checks()), every)
    assert found['operations'] == 61
    assert found['new'] == len(disk.written)    # each content is written once
    assert found['points'] == 1 + (60 // every if every else 0)


@pytest.mark.parametrize('backend', ['dtb', 'lmdb', 'leveldb'])
def test_the_direct_disk_is_opened_again(run, disk, backend):
    run(backend, disk.work(disk.data))
    before = disk.written.copy()
    assert run(backend, disk.work(disk.checks()))['new'] == 0
    # The program finds the old blocks, and stores only new ones.
    disk.data = b''
    disk.write_some(20, 450)
    assert run(backend, disk.work(disk.data + disk.checks()))['new'] == len(
        disk.written - before)
    run(backend, disk.work(disk.checks()))


def test_another_content_is_noticed(run, disk, capfd):
    disk.content[3] = b'x' * 16
    with pytest.raises(SystemExit, match='with dtb failed'):
        run('dtb', disk.work(disk.data + disk.checks()))
    assert 'block 3 is not what was written' in capfd.readouterr().err


def test_the_time_is_limited(run, disk):
    assert run('inram', disk.work(disk.data), seconds=0)['operations'] == 0


def test_a_store_that_cannot_be_opened(run, disk, place, capfd):
    (place[1] / 'sparse').mkdir()
    with pytest.raises(SystemExit):
        run('dtb', disk.work(disk.data))
    assert 'sparse' in capfd.readouterr().err


# -- the other targets --------------------------------------------------------

def test_a_plain_file(dmdedup, disk, tmp_path):
    target = dmdedup.Plain(str(tmp_path / 'plain'), BLOCKS * 4096)
    done = dmdedup.replay(disk.work(disk.data + disk.checks()), 4096, target,
                          7, 60)
    target.close()
    assert done.operations == 61


def test_a_volume(dmdedup, disk, tmp_path):
    path = tmp_path / 'repository'
    image_repository.Repository.create(path)
    with image_repository.Repository(path, filter_dir=str(tmp_path)) as repo:
        openvolumes.create(repo, 'disk', BLOCKS * 4096)
        for data in (disk.data + disk.checks(), disk.checks()):
            with openvolumes.open_volume(repo, 'disk') as volume:
                dmdedup.replay(disk.work(data), 4096, dmdedup.Volume(volume),
                               7, 60)
                assert volume.info().journal_records == 0


def test_the_replay_notices_another_content(dmdedup, disk, tmp_path):
    target = dmdedup.Plain(str(tmp_path / 'plain'), BLOCKS * 4096)
    disk.content[0] = b'x' * 16
    with pytest.raises(AssertionError, match='block 0'):
        dmdedup.replay(disk.work(disk.data + disk.checks()), 4096, target, 0,
                       60)
    target.close()


# -- the traces, and the baselines --------------------------------------------

@pytest.mark.parametrize('way', ['sequential', 'random'])
@pytest.mark.parametrize('kind, different', [('unique', 640),
                                             ('duplicate', 1)])
def test_patterns(dmdedup, traces, way, kind, different):
    found = dmdedup.pattern(way, kind, 650)
    done = list(traces.operations(found.data))
    written = [ids[i:i + 16] for _, _, ids in done
               for i in range(0, len(ids), 16)]
    if way == 'sequential':
        assert [(first, len(ids) // 16) for _, first, ids in done] == [
            (0, 160), (160, 160), (320, 160), (480, 160)]
    else:
        if kind == 'unique':
            different += 10     # these do not fill a write in order
        assert len(done) == 650 and max(first for _, first, _ in done) < 650
    assert found.written == len(written)
    assert found.different == len(set(written)) == different


@pytest.mark.parametrize('data, backend, every, multiples', [
    ('sequential unique', 'inram', 0, (1, 1)),
    ('sequential unique', 'lmdb', 1, (3 / 147, 6 / 147)),
    ('random unique', 'dtb', 1, None),
    ('random unique', 'dtb', 0, (670 / 420, 11100 / 420)),
    ('sequential duplicate', 'dtb', 0, (1.4, 2)),
    ('sequential duplicate', 'lmdb', 1000, (1.4, 2)),
    ('sequential duplicate', 'lmdb', 1, (12 / 147, 12 / 147)),
    ('random duplicate', 'lmdb', 0, (2, 140)),
    ('sequential tar-512', 'inram', 1000, (1.11, 1.11)),
    ('random tar-4096', 'inram', 1000, None),
    ('sequential tar-4096', 'lmdb', 1000, None),
    ('trace web', 'inram', 1000, (1.6, 7.2)),
    ('trace web', 'leveldb', 1000, None),
    ('random unique', 'volume, filter', 1, None)])
def test_what_was_published(dmdedup, data, backend, every, multiples):
    assert dmdedup.published(data, backend, every) == multiples


def test_hints(dmdedup, monkeypatch, capsys, tmp_path):
    """The hints' smallest and largest gain is shown, if it was measured."""
    asked, drawn = [], []

    def measure(*args):
        asked.append(args)
        return dmdedup.common.Table()

    monkeypatch.setitem(sys.modules, 'hints', types.SimpleNamespace(
        measure=measure, DMDEDUP={'NODEDUP': (2.2, 5.4), 'else': (1.0, 2.0)},
        gains=lambda table: [
            types.SimpleNamespace(hint='NODEDUP', rate=rate)
            for rate in (1.5, 1.25, 2.0)]))
    monkeypatch.setattr(dmdedup.plot, 'bars',
                        lambda *args, **_: drawn.append(args))
    dmdedup.show_hints('/a', '/b', dmdedup.SCALES['tiny'], str(tmp_path))
    assert asked == [('/a', '/b', 64, 3)]
    assert ('NODEDUP: 1.25 to 2.00 times the rate without it; 2.2 to 5.4 with '
            'Dmdedup' in capsys.readouterr().out)
    assert drawn[0][:2] == (['NODEDUP'], {
        'here, lowest': [1.25], 'here, highest': [2.0],
        'Dmdedup, lowest': [2.2], 'Dmdedup, highest': [5.4]})
    assert drawn[0][4] == str(tmp_path / 'experiments-dmdedup-6.svg')


@pytest.mark.parametrize('pair, words', [
    ((1.6, 7.2), '1.6-7.2'), ((147, 147), '147'), ((670, 11100), '670-11,100'),
    ((0, 95), 'up to 95')])
def test_two_figures(dmdedup, pair, words):
    assert dmdedup.between(*pair) == words


def test_tar_files(dmdedup, traces, tmp_path):
    """The blocks of both formats are written in order, and anywhere."""
    path = tmp_path / 'a.tar'
    with tarfile.open(path, 'w') as tar:
        member = tarfile.TarInfo('noise')
        member.size = 200 * 4096
        tar.addfile(member, io.BytesIO(random.randbytes(member.size)))
    scale = dmdedup.SCALES['tiny']
    found = {data.name: data for data in dmdedup.tars([str(path)], scale)}
    assert [data.slug for data in found.values()] == [
        '4-3a-512', '4-3a-4096', '4-3b-512', '4-3b-4096']
    assert found['random tar-4096'].work.written == 201
    # Only whole writes of 160 blocks.
    assert found['sequential tar-4096'].work.written == 160
    assert not list(dmdedup.tars([], scale))


def test_targets_are_measured_in_turns(dmdedup, capsys, monkeypatch):
    """Multiples are of the plain file of the same round."""
    runs = []

    def row(name, seconds):
        def run(every):
            runs.append(name)
            return dmdedup.Done(100, 0, next(seconds))
        return dmdedup.Row(name, None, run, [[]])

    monkeypatch.setattr(dmdedup, 'targets', lambda *_: [
        row('plain file', iter((1, 2, 4))), row('other', iter((2, 1, 4)))])
    monkeypatch.setattr(dmdedup, 'Direct', lambda *_: types.SimpleNamespace(
        metadata=0, hashing=[1.0]))
    data = next(dmdedup.patterns(dmdedup.SCALES['tiny']))._replace(
        name='random unique', every=(7,))
    bench = types.SimpleNamespace(plain=lambda data: contextlib.nullcontext())
    dmdedup.measure(bench, data, 3)
    assert runs == ['plain file', 'other'] * 3
    line = next(line for line in capsys.readouterr().out.splitlines()
                if line.startswith('other'))
    assert line.split() == ['other', '-', '50', '1.00', '0.50-2.00']


@pytest.mark.parametrize('text, complaint', [
    ('1 2 p 0 0 W 6 0 ' + 32 * '0', ', line 1: its size is 0'),
    ('', ' has no lines')])
def test_a_bad_trace_ends_the_program_at_once(tmp_path, text, complaint):
    path = tmp_path / 'trace'
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, papers.FOLDER / 'dmdedup.py', '--scale', 'tiny',
         '--trace', str(path)], cwd=tmp_path, capture_output=True, text=True,
        timeout=100)
    assert done.returncode == 1
    assert f'{path}{complaint}' in done.stderr
    assert not done.stdout      # before anything is measured
