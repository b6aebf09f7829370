# SPDX-License-Identifier: Apache-2.0

"""A repository's ownership: modes, users and groups."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile

import pytest

from dedupd.http import listeners
from glance_dedup.base import exceptions
from glance_dedup.check import checker
from glance_dedup.repository import image_repository
from tests.support import daemons
from tests.support import hostile_names
from tests.support import other_users
from tests.support import repositories

OWNER, MEMBER, STRANGER = 65531, 65532, 65533
GROUP, OTHER_GROUP = 65530, 65529

needs_root = pytest.mark.skipif(os.geteuid() != 0,
                                reason='only root becomes others')


@pytest.fixture
def place():
    """A directory that every user can reach."""
    path = tempfile.mkdtemp(prefix='glance-dedup-')
    os.chmod(path, 0o777)
    yield path
    shutil.rmtree(path)


def modes(path):
    """Return kind and mode of each file in a repository but the catalog."""
    found = {(os.path.relpath(path, path), stat.S_IMODE(
        os.stat(path).st_mode))}
    for directory, directories, files in os.walk(path):
        for name in directories + files:
            file = os.path.join(directory, name)
            if os.path.basename(directory) != 'catalog':
                found.add((os.path.relpath(file, path),
                           stat.S_IMODE(os.lstat(file).st_mode)))
    return found


@pytest.mark.parametrize('umask', [0, 0o777])
@pytest.mark.parametrize('shared', [False, True])
def test_modes_whatever_the_umask(place, umask, shared):
    path = os.path.join(place, 'repository')
    commands = ['create-shared' if shared else 'create', 'use']
    if umask != 0o777:
        # LevelDB's own files follow the umask, and must be readable.
        commands += ['maintain', 'check']
    # The parent directory and the filter's directory are outside the
    # repository.
    os.mkdir(f'{path}-filter')
    assert set(other_users.run(path, *commands, umask=umask)) == {'ok'}
    for name, mode in modes(path):
        directory = os.path.isdir(os.path.join(path, name))
        assert (name, oct(mode)) == (name, oct(
            (0o2770 if directory else 0o660) if shared
            else (0o700 if directory else 0o600)))
    assert {'fence', 'catalog', 'catalog-reserve', 'locks/maintainer',
            'images/of-0' if os.geteuid() == 0 else '.'} <= {
                name for name, _ in modes(path)} or umask == 0o777


def test_an_empty_directory_gets_its_mode(tmp_path):
    path = tmp_path / 'repository'
    for shared, before, after in ((False, 0o2775, 0o700),
                                  (True, 0o755, 0o2770)):
        path.mkdir()
        path.chmod(before)
        image_repository.Repository.create(path, group_access=shared)
        assert stat.S_IMODE(path.stat().st_mode) == after
        with repositories.open_repository(path) as repo:
            assert repo.group_access == shared
        shutil.rmtree(path)


@pytest.mark.parametrize('shared', [False, True])
def test_check_tells_of_wrong_modes(tmp_path, shared):
    path = tmp_path / 'repository'
    image_repository.Repository.create(path, group_access=shared)
    assert not checker.check(path).findings
    (path / 'key').chmod(0o644)
    (path / 'images').chmod(0o755)
    found = {(f.file, f.sentence) for f in checker.check(path).findings}
    assert found == {
        ('key', f'has mode 0644 instead of {"0660" if shared else "0600"}'),
        ('images', f'has mode 0755 instead of {"2770" if shared else "0700"}')}


@needs_root
def test_check_tells_of_wrong_owners(place):
    path = os.path.join(place, 'repository')
    image_repository.Repository.create(path)
    os.chown(os.path.join(path, 'spool'), OWNER, -1)
    found = [(f.file, f.sentence) for f in checker.check(path).findings]
    assert found == [('spool', f'belongs to uid {OWNER} instead of uid 0')]


@needs_root
def test_a_wrong_user_is_refused(place):
    path = os.path.join(place, 'repository')
    private = dict(uid=OWNER, gid=GROUP)
    assert other_users.run(path, 'create', 'use', 'maintain', **private) == [
        'ok'] * 3
    before = modes(path)
    for uid, me in ((0, 'root (uid 0)'), (STRANGER, f'uid {STRANGER}')):
        # Others than root may not be able to read the interpreter's files.
        commands = ['use', 'maintain'] + ['command-line'] * (not uid)
        for answer in other_users.run(path, *commands, uid=uid, gid=GROUP):
            assert f'belongs to uid {OWNER}' in answer
            assert f'runs as {me}:' in answer
            assert f'sudo -u \\#{OWNER}' in answer
    # root may read the repository and check it; the stranger may do neither.
    assert other_users.run(path, 'check', uid=0) == ['ok']
    assert 'AccessDenied' in other_users.run(path, 'check', uid=STRANGER)[0]
    with pytest.raises(exceptions.AccessDenied, match='Create the repository'):
        os.mkdir(f'{path}-2')
        os.chown(f'{path}-2', OWNER, GROUP)
        image_repository.Repository.create(f'{path}-2')
    assert modes(path) == before
    assert other_users.run(path, 'use', 'maintain', 'check', **private) == [
        'ok'] * 3


@needs_root
def test_the_daemon_is_refused(place):
    path = os.path.join(place, 'repository')
    assert other_users.run(path, 'create', uid=OWNER, gid=GROUP) == ['ok']
    daemon = daemons.Daemon(path)
    done = subprocess.run(
        [sys.executable, '-m', 'dedupd.daemon', '--config-file',
         str(daemon.config)], cwd=daemons.ROOT, capture_output=True,
        text=True, timeout=60)
    assert done.returncode == 1
    assert f'belongs to uid {OWNER}, and this process runs as' in done.stderr
    assert 'Traceback' not in done.stderr
    assert not os.path.lexists(daemon.socket)


@needs_root
def test_a_group(place):
    """Members and root store, read and delete; the owner maintains."""
    path = os.path.join(place, 'repository')
    os.mkdir(path)
    os.chown(path, OWNER, GROUP)
    owner = dict(uid=OWNER, gid=GROUP, umask=0o077)
    member = dict(uid=MEMBER, gid=GROUP, umask=0o077)
    assert other_users.run(path, 'create-shared', 'use', 'maintain',
                           **owner) == ['ok'] * 3
    assert other_users.run(path, 'use', **member) == ['ok']
    assert other_users.run(path, 'use', uid=0, umask=0o077) == ['ok']
    refused = (other_users.run(path, 'maintain', **member)
               + other_users.run(path, 'maintain', uid=0))
    for answer in refused:
        assert f'only uid {OWNER}, to whom the directory {path}' in answer
    stranger = other_users.run(path, 'use', uid=STRANGER, gid=OTHER_GROUP)[0]
    assert f'runs as uid {STRANGER}, who is not in the group' in stranger
    assert f'the group gid {GROUP}' in stranger
    # Every file belongs to the group, no matter which user created it.
    for directory, directories, files in os.walk(path):
        for name in directories + files:
            file = os.path.join(directory, name)
            assert os.lstat(file).st_gid == GROUP, file
    assert sorted(os.listdir(os.path.join(path, 'images'))) == [
        'of-0', f'of-{OWNER}', f'of-{MEMBER}']
    # A member can delete images of other users, and the owner collects them.
    assert other_users.run(path, 'empty', **member) == ['ok']
    assert other_users.run(path, 'maintain', 'check', **owner) == ['ok'] * 2
    assert os.listdir(os.path.join(path, 'spool')) == []


@needs_root
def test_a_group_that_is_not_ones_own(place):
    """Creation fails if the system silently drops the setgid bit."""
    path = os.path.join(place, 'repository')
    os.mkdir(path)
    os.chown(path, OWNER, OTHER_GROUP)
    answer, = other_users.run(path, 'create-shared', uid=OWNER, gid=GROUP)
    assert f'cannot be shared by the group gid {OTHER_GROUP}' in answer
    assert not os.path.exists(os.path.join(path, 'repository.json'))


# -- files that other users plant ---------------------------------------------

def examine(cases):
    place = tempfile.mkdtemp(prefix='glance-dedup-planting-', dir='/dev/shm'
                             if os.path.isdir('/dev/shm') else None)
    try:
        done = subprocess.run(
            [sys.executable, '-m', 'tests.support.hostile_names', place,
             *cases],
            cwd=daemons.ROOT, capture_output=True, text=True,
            timeout=60 + 4 * len(cases))
    finally:
        shutil.rmtree(place)
    answers = [line for line in done.stdout.splitlines()
               if line.split(': ')[0] in cases]
    wrong = [answer for answer in answers if not answer.endswith(': ok')]
    assert not wrong, '\n'.join(wrong)
    assert len(answers) == len(cases), done.stdout + done.stderr


# Long: three kinds of files are planted at each name of a repository.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_planted_files():
    """Planted links and FIFOs cause a readable error and no damage."""
    examine([f'{name}={kind}' for name in hostile_names.NAMES
             for kind in ('link', 'hard-link', 'fifo')]
            + [f'{name}=link' for name in hostile_names.DIRECTORIES])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_planted_files():
    examine([f'{name}={kind}' for name in hostile_names.NAMES
             for kind in hostile_names.KINDS
             if kind != 'device' or os.geteuid() == 0]
            + [f'{name}={kind}' for name in hostile_names.DIRECTORIES
               for kind in hostile_names.KINDS if kind != 'hard-link'
               and (kind != 'device' or os.geteuid() == 0)])


def test_the_repositorys_own_path_may_be_a_link(tmp_path):
    image_repository.Repository.create(tmp_path / 'repository')
    (tmp_path / 'link').symlink_to('repository')
    with repositories.open_repository(tmp_path / 'link') as repo:
        repositories.put(repo, 'image', b'data')
        assert repositories.read_all(repo, 'image') == b'data'
    assert not checker.check(tmp_path / 'link').findings


@pytest.mark.parametrize('name', ['locks/groups', 'groups', 'locks'])
def test_creating_follows_no_link(tmp_path, name):
    victim = tmp_path / 'victim'
    if name == 'locks/groups':
        victim.write_bytes(b'foreign')
    else:
        victim.mkdir()
    before = hostile_names.state(victim)
    path = tmp_path / 'repository'
    (path / name).parent.mkdir(parents=True)
    (path / name).symlink_to(victim)
    with pytest.raises(exceptions.RepositoryError):
        image_repository.Repository.create(path)
        repositories.open_repository(path)
    assert hostile_names.state(victim) == before


# -- the daemon's socket ------------------------------------------------------

@pytest.mark.parametrize('where', ['socket', f'socket.{os.getpid()}'],
                         ids=['socket', 'new'])
@pytest.mark.parametrize('kind', ['file', 'link', 'fifo'])
def test_a_socket_takes_no_others_place(tmp_path, kind, where):
    victim = tmp_path / 'victim'
    victim.write_bytes(b'foreign')
    place = tmp_path / where
    if kind == 'file':
        place.write_bytes(b'foreign')
    elif kind == 'link':
        place.symlink_to(victim)
    else:
        os.mkfifo(place)
    before = hostile_names.state(victim), os.lstat(place)
    with pytest.raises(OSError, match=f'{where} exists and is not a socket'):
        listeners.listen_unix(str(tmp_path / 'socket'), 0o600)
    assert hostile_names.state(victim) == before[0]
    assert os.lstat(place).st_ino == before[1].st_ino


def test_a_socket_that_nobody_serves_is_replaced(tmp_path):
    path = str(tmp_path / 'socket')
    for mode in (0o600, 0o666):
        listeners.listen_unix(path, mode).close()
        assert stat.S_IMODE(os.stat(path).st_mode) == mode
