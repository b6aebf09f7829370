# SPDX-License-Identifier: Apache-2.0

"""Volumes whose blocks are in cold groups, and such images as disks."""

from concurrent import futures
import contextlib
import os
import random
import subprocess
import threading
import time

import pytest

from dedupd.tasks import collector
from glance_dedup.base import exceptions
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.repository import openvolumes
from tests.support import cold_repositories
from tests.support import daemons
from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

pytestmark = [pytest.mark.slow, pytest.mark.needs('nbdkit')]

pytest_plugins = ['tests.support.object_fixtures']

MIB = 1 << 20
GROUP = cold_repositories.GROUP
SIZE = 2 * GROUP
gets = cold_repositories.gets


@pytest.fixture
def cold(server, proxy, faults, tmp_path):
    """A volume `disk` that is a clone of a cold image."""
    made = cold_repositories.ColdRepository(
        tmp_path / 'r', server, proxy.url)
    made.put('one', repositories.noise(SIZE, 1))
    clone(made, 'disk')
    assert made.cool() == 2
    faults.seen.clear()
    return made


def clone(cold, name, **options):
    with cold.open(**options) as repo, repo.open_image('one') as image:
        return openvolumes.create(repo, name, image=image, part_size=MIB)


@pytest.fixture
def daemon(cold):
    with daemons.Daemon(cold.path) as daemon:
        yield daemon.start()
        assert 'Traceback' not in daemon.text()


@pytest.fixture
def disk(cold, daemon, tmp_path):
    """A server of the volume."""
    with serving(cold, daemon, tmp_path) as server:
        yield server.start()


def serving(cold, daemon, tmp_path, **options):
    return volume_tools.Server(cold.path, tmp_path,
                               GLANCE_DEDUP_SOCKET=daemon.socket, **options)


def require_clean(cold, content):
    """The volume has these bytes, and no block is damaged or marked."""
    with cold.open() as repo, openvolumes.open_volume(repo, 'disk') as volume:
        assert volume.read(SIZE, 0) == content
    with cold.open() as repo, contextlib.closing(
            maintainer_role.Maintainer(repo)) as maintainer:
        assert not maintainer.damaged_groups()
    assert not os.listdir(cold.path / 'quarantine')


# -- without a server ---------------------------------------------------------

def test_a_clone_of_a_cold_image(cold, faults):
    """A clone fetches no bytes before they are read."""
    assert clone(cold, 'second') == 0
    assert not gets(faults)
    require_clean(cold, cold.images['one'])


def test_a_clone_in_another_scope(cold, faults):
    """For a clone in another scope, the object store's bytes are read."""
    with cold.open() as repo, repo.open_image('one') as image:
        openvolumes.create(repo, 'other', image=image, project='p',
                           scope='project', part_size=MIB)
        with openvolumes.open_volume(repo, 'other') as volume:
            assert volume.read(SIZE, 0) == cold.images['one']
    assert gets(faults)


def test_a_checkpoint_over_cold_blocks(cold, faults):
    """A partial write of a cold block fetches its other bytes."""
    content = bytearray(cold.images['one'])
    with cold.open() as repo:
        with openvolumes.open_volume(repo, 'disk') as volume:
            for offset in range(1000, SIZE, 777_777):
                volume.write(b'written', offset)
                content[offset:offset + 7] = b'written'
            volume.checkpoint()
            assert volume.read(SIZE, 0) == content
            volume.snapshot('taken')
        with repo.open_image('taken') as image:
            assert image.read() == content
    cold.forget()
    require_clean(cold, content)


def test_a_checkpoint_while_the_store_does_not_answer(cold, faults):
    """Written data stays in the journal, and no block counts as damaged."""
    content = bytearray(cold.images['one'])
    with cold.open() as repo:
        with openvolumes.open_volume(repo, 'disk') as volume:
            volume.write(b'written', 1000)
            content[1000:1007] = b'written'
            faults.always = 503
            with pytest.raises(exceptions.UnavailableError):
                volume.checkpoint()
            assert volume.read(7, 1000) == b'written'
            with pytest.raises(exceptions.UnavailableError):
                volume.read(4096, MIB)
            volume.write(b'more', 5000)
            content[5000:5004] = b'more'
            volume.flush()
            faults.always = None
            volume.checkpoint()
            assert volume.read(SIZE, 0) == content
    require_clean(cold, content)


def test_blocks_of_cold_groups_are_freed(cold, faults):
    """A collection reads no object."""
    with cold.open() as repo:
        openvolumes.delete(repo, 'disk')
        repo.delete('one')
        with contextlib.closing(
                maintainer_role.Maintainer(repo)) as maintainer:
            collector.run_once(maintainer, pacing.Pace())
    assert not gets(faults)


# -- nbdkit -------------------------------------------------------------------

@pytest.mark.needs('nbd')
def test_nbdcopy(cold, daemon, disk, faults, tmp_path):
    nbd.need('nbdcopy')
    subprocess.run(['nbdcopy', disk.uri, tmp_path / 'out'], check=True,
                   timeout=nbd.LIMIT)
    assert (tmp_path / 'out').read_bytes() == cold.images['one']
    assert len(gets(faults)) == len(cold.slices())
    disk.stop()
    daemon.stop()
    require_clean(cold, cold.images['one'])


def test_reading_and_writing(cold, daemon, disk, faults):
    content = bytearray(cold.images['one'])
    rng = random.Random(5)
    with disk.session() as session:
        for number in range(60):
            offset = rng.randrange(SIZE - 50_000)
            if number % 3 == 0:
                data = rng.randbytes(rng.randrange(1, 50_000))
                volume_tools.write(session, offset, data)
                content[offset:offset + len(data)] = data
            assert session.read(offset, 50_000) == (
                content[offset:offset + 50_000])
            if number % 20 == 10:
                disk.control.checkpoint()
    disk.control.snapshot('taken')
    disk.stop()
    daemon.stop()
    cold.forget()
    with cold.open() as repo:
        assert repositories.read_all(repo, 'taken') == content
    require_clean(cold, content)


def test_it_announces_what_it_will_read(cold, daemon, disk, faults):
    """Several GETs are under way for one reader."""
    def read(session, start, end):
        for offset in range(start, end, MIB):
            assert session.read(offset, MIB) == (
                cold.images['one'][offset:offset + MIB])

    with disk.session() as session, futures.ThreadPoolExecutor(1) as pool:
        read(session, 0, MIB)       # the following read is sequential
        with faults.held():
            reading = pool.submit(read, session, MIB, SIZE)
            repositories.eventually(lambda: faults.most >= 3)
        reading.result(nbd.LIMIT)
    assert len(gets(faults)) == len(cold.slices())


def test_a_store_that_does_not_answer(cold, daemon, disk, faults):
    faults.always = 503
    with disk.session() as session:
        error, _ = session.answer(nbd.READ, 0, 4096)
        assert error == nbd.EIO
        assert 'dedupd answered 503' in disk.text()
        assert not disk.control.status()['broken']
        faults.always = None
        assert session.read(0, SIZE) == cold.images['one']


def test_a_daemon_that_is_killed(cold, daemon, disk, faults):
    """A read waits for the next daemon, and the guest notices no error.

    The next daemon runs already, and gets the killed one's socket: a start may
    take longer than a read waits.
    """
    with daemons.Daemon(cold.path) as following, disk.session() as session:
        following.start()
        assert session.read(0, 4096) == cold.images['one'][:4096]
        daemon.kill()
        cold.forget()
        found = []
        thread = threading.Thread(
            target=lambda: found.append(session.read(GROUP, MIB)))
        thread.start()
        time.sleep(1)
        assert not found
        os.replace(following.socket, daemon.socket)
        thread.join(nbd.LIMIT)
        assert found == [cold.images['one'][GROUP:GROUP + MIB]]


# Long: the plugin for nbdkit waits twenty seconds for a daemon.
def test_no_daemon(cold, tmp_path, faults):
    """Reads fail after a while, then at once, until there is a daemon."""
    with daemons.Daemon(cold.path) as daemon:
        with serving(cold, daemon, tmp_path) as disk:
            disk.start()
            assert 'dedupd does not answer on' in disk.text()
            with disk.session() as session:
                for _ in range(2):
                    error, _ = session.answer(nbd.READ, 0, 4096)
                    assert error == nbd.EIO
                assert (f'dedupd does not answer at {daemon.socket}'
                        in disk.text())
                assert 'No such file' in disk.text()
                assert 'Start it' in disk.text()
                # Blocks in the journal can be read, and written.
                volume_tools.write(session, 0, b'x' * 4096)
                assert session.read(0, 4096) == b'x' * 4096
                daemon.start()
                content = b'x' * 4096 + cold.images['one'][4096:]
                assert session.read(0, SIZE) == content
            disk.stop()
        daemon.stop()
    require_clean(cold, content)


def test_what_a_daemon_may_answer(cold, daemon, tmp_path, faults):
    """The plugin repeats its request after any wrong answer."""
    own = {'Dedup_Repository': 'ab' * 16}
    answers = iter([
        b'', b'HTTP/1.1 200 OK', b'x' * 100_000, b'HTTP/1.1 200\r\n\r\n',
        b'\0' * 9000, daemons.answer(b'', 200), daemons.answer(b'', 503),
        daemons.answer(b'{"error":{"message":"%n%s' + b'\\"' * 3000, 500),
        b'HTTP/1.1 99999999999999999999 x\r\n\r\n', None])
    ended = threading.Event()

    def behave(connection, request):
        found = next(answers, b'end')
        if found is None:
            ended.set()
            connection.sendall(daemons.answer(b'', 202, **own))
        elif found == b'end':
            with daemon.connect() as sock:
                sock.sendall(request)
                while data := sock.recv(65536):
                    connection.sendall(data)
        else:
            connection.sendall(found)

    path = daemon.directory / 'hostile'
    with daemons.scripted(path, behave):
        with volume_tools.Server(cold.path, tmp_path,
                                 GLANCE_DEDUP_SOCKET=str(path)) as disk:
            disk.start()
            with disk.session() as session:
                assert session.read(0, SIZE) == cold.images['one']
            assert ended.is_set()
            assert disk.text().count('\n') < 30
            disk.stop()


# Long: the plugin for nbdkit waits twenty seconds for a daemon.
def test_a_socket_whose_name_is_too_long(cold, tmp_path, faults):
    """After some patience, the log says why no daemon was found."""
    with volume_tools.Server(cold.path, tmp_path, GLANCE_DEDUP_SOCKET=str(
            tmp_path / ('x' * 200))) as disk:
        disk.start()
        with disk.session() as session:
            error, _ = session.answer(nbd.READ, 0, 4096)
        assert error == nbd.EIO
        assert 'File name too long' in disk.text()


# -- images -------------------------------------------------------------------

def test_images_over_nbd(cold, faults):
    """A read over NBD fails while the store fails, and works afterwards."""
    with daemons.Daemon(cold.path) as daemon:
        daemon.write_config(nbd_socket=daemon.directory / 'nbd')
        daemon.start()
        with nbd.Session(daemon.directory / 'nbd') as session:
            session.go(b'one')
            faults.always = 503
            error, _ = session.answer(nbd.READ, 0, 4096)
            assert error == nbd.EIO
            faults.always = None
            for offset in range(0, SIZE, MIB):
                assert session.read(offset, MIB) == (
                    cold.images['one'][offset:offset + MIB])
        assert daemon.status()['nbd']['errors'] == 1
        assert 'Traceback' not in daemon.text()
    assert len(gets(faults)) >= len(cold.slices())


@pytest.mark.slow
@pytest.mark.parametrize('direct', [True, False])
def test_mounted_images(cold, faults, tmp_path, direct):
    """Mounted images read back, through the daemon or from the repository."""
    from tests.functional import test_mount

    with daemons.Daemon(cold.path) as daemon:
        daemon.write_config(nbd_socket=daemon.directory / 'nbd')
        daemon.start()
        options = ['--socket', daemon.socket]
        if direct:
            options += ['--repository', cold.path]
        faults.always = 503
        with test_mount.Mount(tmp_path, *options) as mount:
            with open(mount / 'one', 'rb', buffering=0) as file:
                with pytest.raises(OSError):
                    file.read(4096)
            faults.always = None
            faults.seen.clear()
            assert (mount / 'one').read_bytes() == cold.images['one']
        assert len(gets(faults)) == len(cold.slices())
