# SPDX-License-Identifier: Apache-2.0

"""The model of a disk counts requests; the other layouts work."""

import argparse
import ctypes
import subprocess

import pytest

from glance_dedup.check import checker
from tests.benchmarks import papers

pytestmark = pytest.mark.long

PAGE = 4096
MIB = 1 << 20
BLOCKS = 4 * MIB // PAGE    # of the stored images


livedfs = papers.fixture('livedfs')


# -- the model ----------------------------------------------------------------

class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64)
                for name in ('requests', 'near', 'far', 'bytes')]


@pytest.fixture(scope='module')
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp('model') / 'diskmodel.so'
    subprocess.run(['gcc', '-std=c11', '-shared', '-fPIC', '-D_GNU_SOURCE',
                    f'-I{papers.FOLDER.parents[1]}', '-o', path,
                    papers.FOLDER.parent / 'diskmodel.c', '-lpthread'],
                   check=True, timeout=60)
    library = ctypes.CDLL(str(path))
    library.dm_open.restype = ctypes.c_void_p
    library.dm_get_counts.restype = Counts
    return library


class Model:
    def __init__(self, library):
        self._library = library
        self._disk = ctypes.c_void_p(library.dm_open())
        self._last = Counts()

    def __getattr__(self, name):
        def call(*args):
            """Return the call's requests to the disk, seeks and pages."""
            getattr(self._library, 'dm_' + name)(
                self._disk, *map(ctypes.c_uint64, args))
            now = self._library.dm_get_counts(self._disk)
            last, self._last = self._last, now
            return (now.requests - last.requests, now.near - last.near,
                    now.far - last.far, (now.bytes - last.bytes) // PAGE)
        return call

    def close(self):
        self._library.dm_close(self._disk)


@pytest.fixture
def model(library):
    found = Model(library)
    yield found
    found.close()


NOTHING = (0, 0, 0, 0)


def test_what_was_read_is_not_read_again(model):
    assert model.read(1, 0, 3 * PAGE) == (1, 0, 1, 3)
    assert model.read(1, PAGE, PAGE) == NOTHING
    assert model.read(1, 0, 5 * PAGE) == (1, 0, 0, 2)   # on from there
    assert model.read(1, 6 * PAGE, 1) == (1, 1, 0, 1)
    # Two runs, around the cached pages; the second begins away from the end of
    # the first.
    assert model.read(1, 5 * PAGE, 3 * PAGE) == (2, 2, 0, 2)


def test_what_is_written_waits(model):
    assert model.write(1, 0, 2 * PAGE) == NOTHING
    assert model.read(1, 0, 2 * PAGE) == NOTHING
    assert model.flush(1, PAGE, PAGE) == (1, 0, 1, 1)
    assert model.flush(1, 0, 2 * PAGE) == (1, 1, 0, 1)
    assert model.flush(1, 0, 2 * PAGE) == NOTHING
    assert model.read(1, 0, 2 * PAGE) == NOTHING


def test_a_part_of_a_page_is_a_page(model):
    model.write(1, 0, PAGE + 1)
    assert model.flush(1, 0, PAGE + 1) == (1, 0, 1, 2)
    # The same page again: the disk has turned.
    model.write(1, PAGE + 1, PAGE)
    assert model.flush(1, PAGE + 1, PAGE) == (1, 1, 0, 2)


def test_a_sync_writes_the_journal(model):
    model.write(1, 0, PAGE)
    model.write(2, 0, PAGE)
    assert model.sync(1) == (2, 0, 2, 2)
    assert model.sync(1) == (1, 0, 0, 1)
    assert model.sync(2) == (2, 0, 2, 2)


def test_far_is_another_file_or_a_long_way(model):
    model.read(1, 0, PAGE)
    assert model.read(2, PAGE, PAGE) == (1, 0, 1, 1)
    assert model.read(2, (256 * MIB) + 2 * PAGE, PAGE) == (1, 1, 0, 1)
    assert model.read(2, (512 * MIB) + 4 * PAGE, PAGE) == (1, 0, 1, 1)


def test_what_is_cut_off_is_not_written(model):
    model.write(1, 0, 4 * PAGE)
    assert model.cut(1, PAGE + 1) == NOTHING
    assert model.sync(1) == (2, 0, 2, 3)


# -- arithmetic ---------------------------------------------------------------

def test_seconds_of_the_model(livedfs):
    args = argparse.Namespace(seek_ms=10, near_ms=4, mb_s=100)
    done = livedfs.Done(wall=1, cpu=1, open=0, requests=9, near=50, far=20,
                        bytes=300_000_000)
    assert done.modelled(args) == pytest.approx(0.2 + 0.2 + 3)


def test_ratios_are_of_the_round(livedfs):
    rounds = livedfs.Rounds()
    for plain, ours in ((1, 2), (3, 4), (10, 5)):
        for name, wall in ((livedfs.PLAIN, plain), ('x', ours)):
            rounds.add(name, livedfs.Done(wall, 0, 0, 0, 0, 0, 0))
    assert rounds.rates('x', 8_000_000) == [4, 2, 1.6]
    assert rounds.ratio('x') == 0.75


def test_space(livedfs):
    one = livedfs.Space(size=100 * MIB, zeros=20 * MIB, new=40 * MIB,
                        stored=20 * MIB)
    none = livedfs.Space(size=20 * MIB, zeros=20 * MIB, new=0, stored=0)
    assert one.cells() == ['100.0', '80.0', '40.0', '20.0', '60.0%', '50.0%',
                           '75.0%']
    assert none.cells()[4:] == ['100.0%', '0.0%', '0.0%']
    assert livedfs.add_up([one, none]) == (120 * MIB, 40 * MIB, 40 * MIB,
                                           20 * MIB)


def test_distributions(livedfs):
    by = livedfs.common.by_distribution
    assert by(['/x/b/one', '/x/a/two', '/x/b/three']) == [
        ('b', '/x/b/one'), ('b', '/x/b/three'), ('a', '/x/a/two')]
    assert by(['/x/sid-web.raw', '/x/stable.raw', '/x/sid-mail-old.raw']) == [
        ('sid', '/x/sid-web.raw'), ('sid', '/x/sid-mail-old.raw'),
        ('stable', '/x/stable.raw')]


def test_variants(livedfs):
    def asked(**wanted):
        found = livedfs.variants(argparse.Namespace(**{
            'stores_elsewhere': False, 'single_loads': False,
            'no_combining': False, **wanted}))
        return {v.name: [e for e in ('A1', 'A2', 'A3', 'A4') if v.differs(e)]
                for v in found}

    assert asked() == {}
    assert asked(single_loads=True) == {'single loads': ['A3']}
    assert asked(no_combining=True, stores_elsewhere=True) == {
        'stores elsewhere': ['A1', 'A2', 'A3', 'A4'], 'no combining': ['A1'],
        'all of these': ['A1', 'A2', 'A3', 'A4']}


# -- the engine, built otherwise ----------------------------------------------

@pytest.fixture(scope='module')
def program(livedfs, tmp_path_factory):
    return livedfs.synthetic.build(str(tmp_path_factory.mktemp('program')),
                                   'livedfs', 'diskmodel')


@pytest.fixture
def subject(livedfs, program, tmp_path):
    def make(**how):
        return livedfs.Subject(program, str(tmp_path / 'subject'),
                               str(tmp_path),
                               livedfs.Variant('it', **how) if how else None)
    return make


def test_a_plain_file(subject, tmp_path):
    it = subject()
    done = it.run(True, 'one', 4, 1)
    assert (done.requests, done.near, done.far) == (3, 0, 2)
    assert done.bytes == 4 * MIB + 2 * PAGE
    content = (tmp_path / 'subject' / 'one').read_bytes()
    assert len(content) == 4 * MIB
    assert len({content[i:i + 64] for i in range(0, 4 * MIB, 64)}) == MIB / 16
    done = it.run(False, 'one', 4, 1)
    assert (done.near, done.far, done.bytes) == (0, 1, 4 * MIB)


@pytest.mark.parametrize('how', [
    {'single': False}, {'single': True}, {'alone': True},
    {'elsewhere': True}, {'elsewhere': True, 'single': True, 'alone': True}])
def test_what_is_stored_is_read_back(subject, how, tmp_path):
    it = subject(**how)
    first, again = (it.run(True, image, 4, 1) for image in ('one', 'two'))
    for image in ('one', 'two'):
        it.run(False, image, 4, 1)
    # All blocks were found: a store was read, and only a recipe written.
    assert first.bytes > 4 * MIB
    assert again.bytes < 2 * MIB
    stores = tmp_path / 'subject' / 'stores'
    if 'elsewhere' in how:
        assert len(list(stores.iterdir())) == 1
    else:
        assert not stores.exists()
        report = checker.check(str(tmp_path / 'subject' / 'repository'))
        assert not report.findings
        assert report.figures['blocks_verified'] == BLOCKS


def test_other_data_is_noticed(subject, capfd):
    it = subject(single=False)
    it.run(True, 'one', 4, 1)
    with pytest.raises(SystemExit):
        it.run(False, 'one', 4, 2)
    assert 'is not what was written' in capfd.readouterr().err


@pytest.fixture
def stored(livedfs, program, tmp_path):
    def done(name, **how):
        """Store an image, and store it again, in separate steps."""
        it = livedfs.Subject(program, str(tmp_path / name), str(tmp_path),
                             livedfs.Variant(name, **how))
        return [it.run(True, image, 4, 1) for image in ('one', 'two')]
    return done


def test_no_combining(stored):
    """Between blocks the head moves to the store, and back."""
    base, _ = stored('base', single=False)
    near, _ = stored('near', alone=True)
    far, _ = stored('far', alone=True, elsewhere=True)
    assert base.near + base.far < 20
    assert near.near - base.near == pytest.approx(2 * BLOCKS, rel=0.02)
    assert abs(near.far - base.far) < 5
    assert far.far - base.far == pytest.approx(2 * BLOCKS, rel=0.02)
    assert far.near < 20


def test_single_loads(stored):
    """Each page of the store is a request, and no more is read."""
    _, base = stored('base', single=False)
    _, single = stored('single', single=True)
    pages = -(-BLOCKS // 9) * 512 / PAGE
    assert base.requests < 10
    assert single.requests - base.requests == pytest.approx(pages, abs=3)
    assert single.bytes < base.bytes


def test_stores_elsewhere(stored):
    """Stores elsewhere cost a seek per sync point, and per loaded store."""
    base = stored('base', single=False)
    elsewhere = stored('elsewhere', elsewhere=True)
    assert [e.far - b.far for b, e in zip(base, elsewhere)] == [2, 1]
