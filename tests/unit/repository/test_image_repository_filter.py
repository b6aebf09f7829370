# SPDX-License-Identifier: Apache-2.0

"""The API: the filter in memory, and its directory."""

import fcntl
import os
import pathlib
import pwd
import secrets
import shutil
import stat
import subprocess
import threading
import warnings

import pytest

from glance_dedup import _engine
from glance_dedup.base import closing
from glance_dedup.base import exceptions
from glance_dedup.base import filesystem
from glance_dedup.repository import hostfilter
from glance_dedup.repository import image_repository
from tests.support import repositories
from tests.support.repositories import create
from tests.support.repositories import mixture
from tests.support.repositories import noise
from tests.support.repositories import open_repository
from tests.support.repositories import put
from tests.support.repositories import read_all
from tests.unit.repository import fixtures
from tests.unit.repository.fixtures import NOBODY

MIB = 1 << 20
TOP = pathlib.Path(__file__).resolve().parents[3]

path = fixtures.path
public_tmp = fixtures.public_tmp


def filter_file(path):
    file, = (path.parent / f'{path.name}-filter').glob('*.filter')
    return file


def test_filter_that_was_deleted(path):
    data = noise(512 * 200)
    with open_repository(path) as repo:
        put(repo, 'first', data)
        filter_file(path).unlink()
        # Processes that have the deleted filter open continue to use it.
        assert put(repo, 'second', data).new_bytes == 0
    with open_repository(path) as repo:
        # The filter is rebuilt before something is stored.
        assert put(repo, 'third', data).new_bytes == 0
        assert repo.statistics()['filter_complete']


@pytest.mark.parametrize('content', [b'', b'nonsense' * 1000, bytes(1 << 20)])
def test_filter_that_is_something_else(path, content):
    data = noise(512 * 100)
    with open_repository(path) as repo:
        put(repo, 'first', data)
    filter_file(path).write_bytes(content)
    with open_repository(path) as repo:
        assert put(repo, 'second', data).new_bytes == 0
        assert read_all(repo, 'second') == data


def test_filter_of_lies(path):
    """A filter with false hints costs comparisons; the contents are right."""
    data = mixture(512 * 300, unit=512)
    with open_repository(path) as repo:
        put(repo, 'first', data)
    file = filter_file(path)
    content = bytearray(file.read_bytes())
    content[4096:] = noise(len(content) - 4096, 3)
    file.write_bytes(content)
    with open_repository(path) as repo:
        for i in range(3):
            put(repo, f'image-{i}', data + noise(30000, i))
            assert read_all(repo, f'image-{i}') == data + noise(30000, i)
        assert repo.statistics()['false_candidates'] >= 0
    repositories.require_clean(path)


def test_filter_of_many_groups_is_rebuilt_in_the_background(path):
    data = noise(512 * 64 * 80)
    with open_repository(path) as repo:
        put(repo, 'first', data)
    assert len(os.listdir(path / 'groups')) > 64
    filter_file(path).unlink()
    with open_repository(path) as repo:
        put(repo, 'image', b'x')
        repositories.eventually(
            lambda: repo.statistics()['filter_complete'])
        assert put(repo, 'second', data[-512 * 64:]).new_bytes == 0


def test_large_filter_is_not_waited_for(path, monkeypatch):
    """A large filter is built during uploads, and is complete in the end."""
    monkeypatch.setattr(hostfilter, '_MADE_AT_ONCE', 0)
    go = threading.Event()

    class Handle:
        def __init__(self, engine):
            self.engine = engine

        def attach_filter(self, *args):
            assert go.wait(60)
            self.engine.attach_filter(*args)

        def __getattr__(self, name):
            return getattr(self.engine, name)

    first, second, third = (noise(512 * 100, n) for n in range(3))
    with open_repository(path) as repo:
        put(repo, 'before', first)
    filter_file(path).unlink()
    with open_repository(path) as repo:
        repo._engine = Handle(repo._engine)
        put(repo, 'meanwhile', second)
        with repo.begin('under-way') as transaction:
            transaction.write(third[:512 * 70])
            assert repo.statistics()['filter_bytes'] == 0
            go.set()
            repositories.eventually(
                lambda: repo.statistics()['filter_complete'])
            transaction.write(third[512 * 70:])
            transaction.commit()
        repo.delete('under-way')
        for number, data in enumerate((first, second, third)):
            assert put(repo, f'again-{number}', data).new_bytes == 0
    # A filter that exists is opened at once.
    with open_repository(path) as repo:
        put(repo, 'image', b'x')
        assert repo.statistics()['filter_bytes'] > 0


def test_closing_while_a_large_filter_is_made(path, monkeypatch):
    monkeypatch.setattr(hostfilter, '_MADE_AT_ONCE', 0)
    for number in range(20):
        with open_repository(path) as repo:
            put(repo, f'image-{number}', noise(5000, number))
        filter_file(path).unlink(missing_ok=True)


def test_rebuild_filter(path):
    data = noise(512 * 64 * 2)
    with open_repository(path) as repo:
        put(repo, 'first', data)
        assert repo.statistics()['filter_hints'] == 128
        file = filter_file(path)
        with open(file, 'r+b') as f:
            f.seek(4096)
            f.write(bytes(file.stat().st_size - 4096))
        assert put(repo, 'missed', data).new_bytes == len(data)
        seen = []
        repo.rebuild_filter(progress=lambda *done: seen.append(done))
        assert seen[-1] == (4, 4)
        assert repo.statistics()['filter_complete']
        assert put(repo, 'found', data).new_bytes == 0


def test_rebuilding_waits_for_another_process(path):
    """Rebuilding waits while another process holds the filter's lock."""
    data = noise(512 * 64 * 2)
    with open_repository(path) as repo:
        put(repo, 'first', data)
        lock = os.open(filter_file(path), os.O_RDWR)
        assert filesystem.lock(lock, fcntl.F_WRLCK, 0)
        waiting = threading.Thread(target=repo.rebuild_filter)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        os.close(lock)
        waiting.join(60)
        assert repo.statistics()['filter_complete']
        assert repo.statistics()['filter_refresh_age_seconds'] < 60
        assert put(repo, 'second', data).new_bytes == 0


def test_rebuilding_gives_up(path, monkeypatch):
    monkeypatch.setattr(hostfilter, '_REBUILD_WAIT', 0.2)
    with open_repository(path) as repo:
        put(repo, 'first', noise(5000))
        with closing.descriptor(os.open(filter_file(path),
                                        os.O_RDWR)) as lock:
            assert filesystem.lock(lock, fcntl.F_WRLCK, 0)
            with pytest.raises(exceptions.BusyError, match='does not go on'):
                repo.rebuild_filter()


def other_filter(path):
    """Return options of another host: the same repository, another filter."""
    return {'filter_dir': str(path.parent / 'other-host')}


def test_blocks_of_another_host(path, monkeypatch):
    """A complete filter gets another host's blocks at the next upload."""
    first, second = noise(512 * 200), noise(512 * 200, 2)
    with (open_repository(path) as here,
          open_repository(path, **other_filter(path)) as there):
        put(there, 'first', first)
        put(here, 'one', b'x')
        assert here.statistics()['filter_complete']
        assert here.statistics()['filter_refresh_age_seconds'] < 60
        # The filter was refreshed too recently, so the upload misses them.
        put(there, 'second', second)
        assert put(here, 'missed', second).new_bytes == len(second)
        put(there, 'third', noise(512 * 200, 3))
        monkeypatch.setattr(hostfilter, '_FOLLOW_MS', 0)
        assert put(here, 'found', noise(512 * 200, 3)).new_bytes == 0
        assert here.statistics()['filter_behind'] == 0


def test_more_than_one_upload_reads_at_once(path, monkeypatch):
    """A thread reads the groups beyond an upload's limit."""
    data = noise(512 * 64 * 20)
    monkeypatch.setattr(hostfilter, '_READ_AT_ONCE', 64)
    monkeypatch.setattr(hostfilter, '_FOLLOW_MS', 0)
    with (open_repository(path) as here,
          open_repository(path, **other_filter(path)) as there):
        put(here, 'one', b'x')
        put(there, 'first', data)
        put(here, 'two', b'y')
        repositories.eventually(lambda: not here.filter._filling)
        monkeypatch.setattr(hostfilter, '_FOLLOW_MS', 1 << 30)
        assert put(here, 'second', data[-512 * 64:]).new_bytes == 0
        assert put(here, 'third', data[:512 * 64]).new_bytes == 0


def test_following_makes_no_filter(path):
    with open_repository(path) as repo:
        assert not repo.follow()
        assert repo.statistics()['filter_bytes'] == 0
        assert repo.statistics()['filter_refresh_age_seconds'] is None


def test_filter_budget(tmp_path):
    """The sampling level rises if there are more blocks than hints."""
    path = create(tmp_path / 'r', block_size=512)
    data = noise(512 * 150000)
    with open_repository(path, codec='none') as repo:
        put(repo, 'first', data)
        figures = repo.statistics()
        assert figures['filter_bytes'] <= MIB
        assert figures['filter_places'] * 8 <= MIB
        assert figures['filter_level'] >= 1
        assert figures['filter_hints'] <= figures['filter_places']
        # Whole stores are loaded, so sampling loses next to nothing.
        again = put(repo, 'again', data)
        assert again.new_bytes < len(data) / 50
        assert filter_file(path).stat().st_size <= MIB


def test_filter_without_room(tmp_path):
    path = create(tmp_path / 'r')
    data = noise(100000)
    with repositories.small_disk(tmp_path / 'disk', 1 << 18) as disk:
        with open_repository(path, filter_dir=str(disk)) as repo:
            with pytest.warns(RuntimeWarning, match='no fingerprint filter'):
                put(repo, 'image', data)
            put(repo, 'again', data)
            assert read_all(repo, 'image') == data
            assert repo.statistics()['filter_bytes'] == 0
            repo.rebuild_filter()
            repo.delete('image')
        assert os.listdir(disk) == []


def test_filter_that_may_not_be_made(public_tmp):
    closed = public_tmp / 'closed'
    closed.mkdir(mode=0o755)
    path = create(public_tmp / 'r')
    for directory, _, files in os.walk(public_tmp / 'r'):
        for name in [*files, '.']:
            os.chown(os.path.join(directory, name), NOBODY, NOBODY)

    def attempt():
        with open_repository(path, filter_dir=str(closed)) as repo:
            with pytest.warns(RuntimeWarning, match='no fingerprint filter'):
                put(repo, 'image', noise(100000))
            return read_all(repo, 'image') == noise(100000)
    assert repositories.in_child(repositories.as_user(NOBODY, attempt))


@pytest.fixture
def shm(public_tmp, monkeypatch):
    """A directory like /dev/shm, in which all users may make theirs."""
    path = public_tmp / 'shm'
    path.mkdir()
    path.chmod(0o1777)
    monkeypatch.setattr(hostfilter, '_SHM', str(path))
    monkeypatch.setattr(hostfilter, '_AGAIN', 0.0)
    return path


def test_somebody_else_made_the_filters_directory(shm, tmp_path):
    """The warning names the directory, and no new process is needed later."""
    path = create(tmp_path / 'r')
    taken = shm / f'glance-dedup-{os.geteuid()}'
    taken.mkdir()
    os.chown(taken, NOBODY, NOBODY)
    data = noise(512 * 200)
    with image_repository.Repository(path) as repo:
        assert repo.filter.error is None
        with pytest.warns(RuntimeWarning, match='no fingerprint filter'):
            put(repo, 'image', data)
        for word in (str(taken), f'uid {NOBODY}', 'tmpfiles'):
            assert word in repo.filter.error
        with warnings.catch_warnings():
            warnings.simplefilter('error')      # the warning came before
            put(repo, 'again', b'x')
            assert repo.statistics()['filter_bytes'] == 0
        taken.rmdir()
        assert put(repo, 'third', data).new_bytes == 0
        assert repo.filter.error is None
        assert repo.statistics()['filter_complete']


def test_whoever_only_reads_knows_of_it(shm, tmp_path):
    """A daemon that makes no filter reports that glance-api has none."""
    path = create(tmp_path / 'r')
    taken = shm / f'glance-dedup-{os.geteuid()}'
    os.symlink('/', taken)
    with image_repository.Repository(path) as repo:
        with pytest.warns(RuntimeWarning, match='no fingerprint filter'):
            repo.statistics()
        assert str(taken) in repo.filter.error
        taken.unlink()
        repo.statistics()
        assert repo.filter.error is None
        assert list(taken.iterdir()) == []


def test_whoever_only_reads_sees_that_there_is_no_room(shm, tmp_path):
    path = create(tmp_path / 'r')
    with image_repository.Repository(path, filter_mib=1 << 20) as repo:
        repo.statistics()
        assert 'MiB' in repo.filter.error
        assert str(shm) in repo.filter.error
    with image_repository.Repository(path, filter_mib=1) as repo:
        repo.statistics()
        assert repo.filter.error is None


def test_a_directory_made_at_boot_is_taken(shm, tmp_path):
    """A directory with the user's name is used if the user owns it.

    Otherwise the process makes one with the user's number.
    """
    path = create(tmp_path / 'r')
    prepared = shm / f'glance-dedup-{pwd.getpwuid(os.geteuid()).pw_name}'
    own = shm / f'glance-dedup-{os.geteuid()}'
    prepared.mkdir(mode=0o700)
    with image_repository.Repository(path, filter_mib=1) as repo:
        put(repo, 'image', b'x')
    assert len(list(prepared.iterdir())) == 1 and not own.exists()
    for change in (lambda: prepared.chmod(0o777),
                   lambda: (prepared.chmod(0o700),
                            os.chown(prepared, NOBODY, NOBODY))):
        change()
        shutil.rmtree(own, ignore_errors=True)
        with image_repository.Repository(path, filter_mib=1) as repo:
            put(repo, secrets.token_hex(4), b'x')
            assert repo.filter.error is None
        assert len(list(own.iterdir())) == 1


@pytest.mark.needs('systemd')
@pytest.mark.parametrize('name', ('glance-dedup', 'glance-dedup-cache'))
@pytest.mark.parametrize('taken', (False, True))
def test_tmpfiles(shm, name, taken):
    """systemd makes the directory at boot, also if one exists already."""
    text = (TOP / 'etc' / 'tmpfiles.d' / f'{name}.conf').read_text()
    line = text.splitlines()[-1]
    kind, where, mode, user, group, age = line.split()
    assert (kind, mode, age) == ('d', '0700', '-')
    # The directory is for the unit's user.
    unit = {'glance-dedup': 'dedupd', 'glance-dedup-cache': 'dedupd-cache'}
    service = (TOP / 'etc' / f'{unit[name]}.service').read_text()
    assert f'User={user}\nGroup={group}\n' in service
    assert where == f'/dev/shm/glance-dedup-{user}'
    made = shm / f'glance-dedup-{user}'
    if taken:
        made.mkdir(mode=0o777)
        os.chown(made, NOBODY, NOBODY)
    conf = shm.parent / 'test.conf'
    conf.write_text(f'd {made} {mode} 12345 12345 -\n')
    subprocess.run(['systemd-tmpfiles', '--create', conf], check=True,
                   timeout=60)
    found = os.lstat(made)
    assert stat.S_ISDIR(found.st_mode)
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (
        12345, 12345, 0o700)


def test_filter_is_private(path):
    with open_repository(path) as repo:
        put(repo, 'first', noise(5000))
    file = filter_file(path)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o666)
    with open_repository(path) as repo:
        put(repo, 'image', noise(5000))
    assert filter_file(path).stat().st_mode & 0o777 == 0o600


def test_a_process_id_used_again(path):
    """A fork invalidates the open objects, whatever process id comes next."""
    repo = open_repository(path)
    put(repo, 'image', noise(5000))
    image = repo.open_image('image')
    transaction = repo.begin('other')
    _engine.after_fork()
    for call in (lambda: image.read(), lambda: transaction.write(b'x'),
                 transaction.commit, lambda: repo.handle().statistics()):
        with pytest.raises(exceptions.ClosedError, match='before a fork'):
            call()
    transaction.abort()
    assert len(os.listdir(path / 'spool')) == 2  # the other's, untouched


def test_nobody_reads_groups_before_the_filter_is_there(path):
    """Groups are not read before the filter is attached."""
    order, opening, go = [], threading.Event(), threading.Event()

    class Handle:
        def __init__(self, engine):
            self.engine = engine

        def attach_filter(self, *args):
            opening.set()
            assert go.wait(60)
            self.engine.attach_filter(*args)
            order.append('attached')

        def follow(self, *args):
            order.append('read')
            return self.engine.follow(*args)

        def __getattr__(self, name):
            return getattr(self.engine, name)

    with open_repository(path) as repo:
        repo._engine = Handle(repo._engine)
        first, second = (
            threading.Thread(target=put, args=(repo, name, noise(5000)))
            for name in ('first', 'second'))
        first.start()
        assert opening.wait(60)
        second.start()
        second.join(0.3)
        go.set()
        for thread in (first, second):
            thread.join(60)
        assert order[0] == 'attached' and 'read' in order
