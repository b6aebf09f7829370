# SPDX-License-Identifier: Apache-2.0

import errno
import os
import random
import stat

import pytest

from glance_dedup.cli import targets

DATA = random.Random(1).randbytes(300001) + bytes(1 << 20) + b'end'


@pytest.fixture
def stored(created, tmp_path):
    (tmp_path / 'content').write_bytes(DATA)
    assert created('image', 'put', 'one', tmp_path / 'content').status == 0
    return created


@pytest.fixture
def place(tmp_path):
    """A directory to which another user may write."""
    (tmp_path / 'place').mkdir()
    return tmp_path / 'place'


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def while_it_is_written(monkeypatch):
    """Have a function called while the file has no name yet."""
    def arrange(work):
        fill = targets.Target.fill

        def fill_and_work(self, *arguments):
            fill(self, *arguments)
            work()
        monkeypatch.setattr(targets.Target, 'fill', fill_and_work)
    return arrange


# -- links --------------------------------------------------------------------

@pytest.mark.parametrize('force', [[], ['--force']])
@pytest.mark.parametrize('exists', [False, True])
def test_a_link_is_not_followed(stored, place, tmp_path, exists, force):
    victim = tmp_path / 'victim'
    if exists:
        victim.write_text('precious')
    (place / 'out').symlink_to(victim)
    stored('image', 'get', 'one', place / 'out', *force).refused(
        'symbolic link', 'name the file')
    assert victim.exists() == exists
    assert not exists or victim.read_text() == 'precious'
    assert os.listdir(place) == ['out']


@pytest.mark.parametrize('name', ['x' * 255, 'ü' * 127, 'x\udcff' * 127])
def test_a_long_name(stored, place, name):
    """The limit on a name counts bytes, not characters."""
    assert stored('image', 'get', 'one', place / name).status == 0
    assert os.listdir(place) == [name]
    assert (place / name).read_bytes() == DATA


def test_export_follows_no_link(stored, place, tmp_path):
    (place / 'one').symlink_to(tmp_path / 'victim')
    assert stored('glance', 'export', place, 'one').status != 0
    assert not (tmp_path / 'victim').exists()


@pytest.mark.parametrize('force', [[], ['--force']])
def test_a_link_that_comes_meanwhile(stored, place, tmp_path, force,
                                     while_it_is_written):
    victim = tmp_path / 'victim'
    victim.write_text('precious')
    while_it_is_written(lambda: (place / 'out').symlink_to(victim))
    stored('image', 'get', 'one', place / 'out', *force).refused(
        'symbolic link')
    assert victim.read_text() == 'precious'
    assert os.listdir(place) == ['out']


def test_a_directory_that_is_replaced_meanwhile(stored, place, tmp_path,
                                                while_it_is_written):
    """The file is written to the directory that had the name at first."""
    def replace():
        place.rename(tmp_path / 'renamed')
        (tmp_path / 'elsewhere').mkdir()
        place.symlink_to(tmp_path / 'elsewhere')
    while_it_is_written(replace)
    assert stored('image', 'get', 'one', place / 'out').status == 0
    assert (tmp_path / 'renamed' / 'out').read_bytes() == DATA
    assert not os.listdir(tmp_path / 'elsewhere')


def test_a_file_that_comes_meanwhile(stored, place, while_it_is_written):
    while_it_is_written(lambda: (place / 'out').write_text('precious'))
    stored('image', 'get', 'one', place / 'out').refused('--force')
    assert (place / 'out').read_text() == 'precious'
    assert os.listdir(place) == ['out']


# -- permissions --------------------------------------------------------------

def test_others_may_not_read_a_new_file(stored, place):
    before = os.umask(0)
    try:
        for number, (options, mode) in enumerate([
                ([], 0o600), (['--mode', '640'], 0o640),
                (['--mode', '0444'], 0o444)]):
            out = place / f'out{number}'
            assert stored('image', 'get', 'one', out, *options).status == 0
            assert mode_of(out) == mode
        (place / 'images').mkdir()
        assert stored('glance', 'export', place / 'images', 'one').status == 0
        assert mode_of(place / 'images' / 'one') == 0o600
    finally:
        os.umask(before)


def test_whose_file_is_replaced(stored, place):
    """A replaced file keeps its permissions only if it was the user's own."""
    out = place / 'out'
    for owner, options, mode in [
            (os.geteuid(), [], 0o640), (65534, [], 0o600),
            (65534, ['--mode', '644'], 0o644)]:
        out.write_text('old')
        out.chmod(0o640)
        if owner != os.geteuid():
            if os.geteuid() != 0:
                pytest.skip('only root can give files away')
            os.chown(out, owner, owner)
        assert stored('image', 'get', 'one', out, '--force',
                      *options).status == 0
        assert mode_of(out) == mode
        assert out.stat().st_uid == os.geteuid()
        assert out.read_bytes() == DATA


@pytest.mark.parametrize('mode', ['9', '-1', '1777', 'u+r', ''])
def test_no_mode(stored, place, mode):
    found = stored('image', 'get', 'one', place / 'out', f'--mode={mode}')
    assert found.status == 2 and 'is not a mode such as 640' in found.err


# -- errors -------------------------------------------------------------------

def test_bad_targets(stored, tmp_path):
    stored('image', 'get', 'one', tmp_path).refused('regular')
    stored('image', 'get', 'one', tmp_path, '--force').refused('regular')
    stored('image', 'get', 'one', '/dev/null', '--force').refused('regular')
    stored('image', 'get', 'one', tmp_path / 'missing/out').failed(
        'missing')
    stored('image', 'get', 'one', f'{tmp_path}/out/').refused('names no file')
    stored('image', 'get', 'one', 'x\0y').refused()
    stored('image', 'get', 'one', '').refused('names no file')


def test_a_directory_that_cannot_be_synced(stored, place, monkeypatch):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)
    monkeypatch.setattr(os, 'fsync', fsync)
    stored('image', 'get', 'one', place / 'out').failed(
        'Input/output error', str(place / 'out'))
