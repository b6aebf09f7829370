# SPDX-License-Identifier: Apache-2.0

"""A repository refuses file systems without locks and leaves no trace there.

Mounts that a test cannot create are simulated here. The file
``tests/functional/test_hosts.py`` has tests with real file systems without
such locks.
"""

import errno
import fcntl
import io
import os

import pytest

from glance_dedup.base import exceptions
from glance_dedup.base import filesystem
from tests.support import repositories

LINE = ('36 25 {device} / /srv/images rw,relatime shared:1 - {kind} '
        'server:/export {options}\n')


@pytest.fixture
def path(tmp_path):
    return repositories.create(tmp_path / 'repository')


@pytest.fixture
def mounted(monkeypatch, path):
    """Return a function that has the kernel report another mount of a path."""
    real_stat, real_open = os.stat, open

    def mount(kind, options, device=77):
        def stat(where, **keywords):
            found = real_stat(where, **keywords)
            if os.fspath(where) != str(path):
                return found
            fields = list(found)
            fields[2] = os.makedev(0, device)
            return os.stat_result(fields)

        def opened(name, *arguments, **keywords):
            if name == '/proc/self/mountinfo':
                return io.StringIO(
                    LINE.format(device='0:76', kind='nfs4',
                                options='local_lock=all')
                    + LINE.format(device=f'0:{device}', kind=kind,
                                  options=options))
            return real_open(name, *arguments, **keywords)

        monkeypatch.setattr(filesystem.os, 'stat', stat)
        monkeypatch.setattr(filesystem, 'open', opened, raising=False)
    return mount


@pytest.mark.parametrize('kind, options, option', [
    ('nfs', 'rw,vers=3,nolock,local_lock=all', 'nolock'),
    ('nfs4', 'rw,vers=4.2,local_lock=posix', 'local_lock=posix'),
    ('nfs', 'rw,vers=3,local_lock=all', 'local_lock=all'),
    ('cifs', 'rw,nobrl,vers=3.0', 'nobrl'),
    ('lustre', 'rw,localflock', 'localflock'),
    ('gfs2', 'rw,lockproto=lock_nolock', 'lockproto=lock_nolock')])
def test_mount_whose_locks_stay_here_is_refused(
        path, mounted, kind, options, option):
    mounted(kind, options)
    with pytest.raises(exceptions.UnfitFileSystem) as caught:
        repositories.open_repository(path)
    assert f'{kind} on /srv/images, is mounted with {option}' in (
        str(caught.value))
    assert 'Mount it with' in str(caught.value)


@pytest.mark.parametrize('kind, options', [
    ('nfs4', 'rw,vers=4.2,local_lock=none'),
    ('nfs', 'rw,vers=3,local_lock=flock'),
    ('lustre', 'rw,flock'),
    ('ceph', 'rw,local_lock=all')])
def test_other_mounts_are_not(path, mounted, kind, options):
    mounted(kind, options)
    repositories.open_repository(path).close()


@pytest.mark.parametrize('number', [
    errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_locks_that_are_refused(path, monkeypatch, number):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(filesystem.fcntl, 'fcntl', refuse)
    with pytest.raises(exceptions.UnfitFileSystem,
                       match=f'F_OFD_SETLK: {os.strerror(number)}'):
        filesystem.require_locks(path)


def test_other_errors_are_for_who_opens_the_repository(path):
    (path / 'locks' / 'groups').unlink()
    filesystem.require_locks(path)
    with pytest.raises(exceptions.StorageError, match='locks/groups'):
        repositories.open_repository(path)


def test_bytes_that_others_try_are_left_alone(path, monkeypatch):
    """A process that opens a repository avoids the byte of another process."""
    drawn = iter([5, 5, 9])
    monkeypatch.setattr(filesystem.secrets, 'randbits',
                        lambda bits: next(drawn))
    with open(path / 'locks' / 'groups', 'r+b') as f:
        assert filesystem.lock(f.fileno(), fcntl.F_WRLCK, (1 << 34) + 5)
        filesystem.require_locks(path)
    assert list(drawn) == []


def test_byte_is_no_groups(path):
    """The first byte is above every group's byte and below 2^63.

    A group's number has 25 bits, and the code adds 2^33 at most.
    """
    assert filesystem._FIRST_BYTE > (1 << 33) + (1 << 25)
    assert filesystem._FIRST_BYTE + (1 << 32) < 1 << 63


def test_nothing_is_left(path):
    before = {name: os.stat(path / name) for name in os.listdir(path)}
    descriptors = os.listdir('/proc/self/fd')
    filesystem.require_locks(path)
    assert os.listdir('/proc/self/fd') == descriptors
    assert not repositories.lock_held(path / 'locks' / 'groups', 0)
    assert {name: os.stat(path / name).st_mtime_ns
            for name in os.listdir(path)} == {
                name: found.st_mtime_ns for name, found in before.items()}


def test_mount_with_strange_characters(path, monkeypatch):
    device = os.stat(path).st_dev
    line = (f'1 2 {os.major(device)}:{os.minor(device)} / /a\\040b rw - ext4 '
            '/dev/sda rw,errors=continue\n')
    monkeypatch.setattr(filesystem, 'open',
                        lambda *a, **k: io.StringIO(line), raising=False)
    found = filesystem.mount_of(path)
    assert (found.kind, found.place) == ('ext4', '/a b')
    assert 'errors=continue' in found.options
