# SPDX-License-Identifier: Apache-2.0

"""The control socket of a served volume, its client, and hostile peers."""

import contextlib
import os
import pathlib
import random
import socket
import subprocess
import threading
import time

import pytest

from glance_dedup.base import exceptions
from glance_dedup.client import volume_control
from tests.functional import clocks
from tests.support import daemons
from tests.support import nbd
from tests.support import repositories
from tests.support import volume_tools

pytestmark = pytest.mark.needs('nbdkit')

MIB = 1 << 20
SIZE = 4 * MIB
#: A user without any rights to the repository.
STRANGER = 12345
#: Seconds that the server waits for a request (control.h).
PATIENCE = 5
LATE_LOCKS = pathlib.Path(__file__).with_name('late_locks.c')


@pytest.fixture
def repository(tmp_path):
    return volume_tools.create_repository(tmp_path / 'repository')


@pytest.fixture
def server(repository, tmp_path):
    volume_tools.create(repository, 'disk', SIZE)
    with volume_tools.Server(repository, tmp_path) as found:
        yield found.start()


def image(server, image_id):
    with repositories.open_repository(server.repository) as repo:
        return repositories.read_all(repo, image_id)


# -- requests -----------------------------------------------------------------

def test_status(server):
    with server.session() as session:
        volume_tools.write(session, 0, b'x' * 1000)
        volume_tools.ask(session, nbd.TRIM, 500, 100)
        session.read(0, 10)
    found = server.control.status()
    assert found['size'] == str(SIZE) and found['broken'] == ''
    assert found['pid'] == str(server.process.pid)
    assert found['project'] == found['source'] == ''
    assert found['written'] == '1000' and found['zeroed'] == '100'
    assert found['read'] == '10' and found['journal_records'] == '2'
    assert int(found['journal_bytes']) > 1000
    server.control.checkpoint()
    assert server.number('journal_records') == 0


def test_times_of_requests(server):
    """The server counts each request once, by its kind and its time."""
    def counted():
        return volume_control.latencies(server.control.status())

    assert {operation: sum(times.counts) for operation, times
            in counted().items()} == {'read': 0, 'write': 0, 'flush': 0}
    began = time.monotonic()
    with server.session() as session:
        for _ in range(5):
            session.read(0, 4096)
        for flags in (0, 0, volume_tools.FUA):
            volume_tools.write(session, 0, b'x', flags)
        volume_tools.ask(session, nbd.FLUSH)
        # Neither is a write of bytes.
        volume_tools.ask(session, nbd.TRIM, 0, 4096)
        volume_tools.ask(session, nbd.ZEROES, 0, 4096)
    passed = time.monotonic() - began
    found = counted()
    assert {operation: sum(times.counts) for operation, times
            in found.items()} == {'read': 5, 'write': 3, 'flush': 1}
    assert 0 < sum(times.seconds for times in found.values()) <= passed


def test_snapshot(server):
    data = repositories.mixture(SIZE, 5)
    with server.session() as session:
        volume_tools.write(session, 0, data)
        found = server.control.snapshot('one', 'a project')
        assert found['image_id'] == 'one' and found['size'] == str(SIZE)
        volume_tools.write(session, 100, b'changed')
        assert image(server, 'one') == data
        with pytest.raises(exceptions.ImageExists, match='one'):
            server.control.snapshot('one')
        server.control.snapshot('two')
        assert image(server, 'two') == (
            data[:100] + b'changed' + data[107:])
    with repositories.open_repository(server.repository) as repo:
        assert repo.stat('one').project == 'a project'
        assert repo.stat('one').upload_id == found['upload_id']
        assert repo.stat('two').new_bytes == 0
    # The last is the name of a volume's recipe.
    for wrong in ('', 'a/b', 'x' * 129, '..', f'v_{"0" * 32}_base_0'):
        with pytest.raises(exceptions.InvalidParameter):
            server.control.snapshot(wrong)
    with pytest.raises(exceptions.InvalidParameter):
        server.control.snapshot('three', 'x' * 129)


def shrink(server, size):
    """Shrink it, once the server has seen that its clients disconnected."""
    def is_smaller():
        try:
            server.control.resize(size)
        except exceptions.BusyError:
            return False
        return True
    repositories.eventually(is_smaller)


def test_no_client_finds_its_disk_smaller(server):
    with server.session() as one, server.session():
        with pytest.raises(exceptions.BusyError, match=r'connected \(2\)'):
            server.control.resize(SIZE - 512)
        server.control.resize(SIZE)         # no less than before
        with pytest.raises(exceptions.InvalidParameter):
            server.control.resize(SIZE - 1)
        assert one.read(SIZE - 1, 1) == b'\0'
    shrink(server, SIZE - 512)
    with server.session() as session:
        assert session.size == SIZE - 512


def editions(server):
    """Return the recipes that hold parts of the volume."""
    return {path.name for path in (server.repository / 'images').rglob('v_*')}


def test_who_connects_while_it_becomes_smaller_sees_the_new_size(server):
    """A client that connects while a volume shrinks gets the new size.

    Its owner is stopped where the old edition of a part is deleted.
    """
    for _ in range(2):
        with server.session() as session:
            volume_tools.write(session, 0, b'x')
        if not (old := editions(server)):
            server.control.checkpoint()
    images = server.repository / 'locks' / 'images'
    sizes = []

    def connect():
        with server.session() as session:
            sizes.append(session.size)

    shrinking = threading.Thread(target=shrink, args=(server, SIZE - MIB))
    connecting = threading.Thread(target=connect)
    with repositories.holding(
            images, *map(repositories.image_lock_byte, old)):
        shrinking.start()
        repositories.eventually(lambda: editions(server) > old)
        connecting.start()
        connecting.join(1)      # long enough for a server that lets it in
    shrinking.join(nbd.LIMIT)
    connecting.join(nbd.LIMIT)
    assert sizes == [SIZE - MIB]
    assert not editions(server) & old


def test_resize(server):
    with server.session() as old:
        volume_tools.write(old, SIZE - 10, b'the end...')
        server.control.resize(SIZE + 2 * MIB)
        with server.session() as session:
            assert session.size == SIZE + 2 * MIB
            assert session.read(SIZE - 10, 20) == b'the end...' + bytes(10)
            volume_tools.write(session, SIZE + MIB, b'beyond')
    shrink(server, SIZE - 2 * MIB)
    server.control.resize(SIZE + 2 * MIB)
    with server.session() as session:
        assert not any(session.read(SIZE - 2 * MIB, 4 * MIB))
    for wrong in (0, 1, SIZE + 1, 1 << 47, -1):
        with pytest.raises(exceptions.InvalidParameter):
            server.control.resize(wrong)
    assert server.number('size') == SIZE + 2 * MIB


def test_disconnect(server):
    """All clients of NBD are disconnected, and nobody else."""
    assert server.control.disconnect() == 0
    with (server.session() as one, server.session() as two,
          socket.socket(socket.AF_UNIX) as control):
        connect(server, control)
        volume_tools.write(one, 0, b'kept', volume_tools.FUA)
        assert server.control.disconnect() == 2
        assert one.gone() and two.gone()
        control.settimeout(nbd.LIMIT)
        control.sendall(b'status\n')
        assert control.recv(3) == b'ok\n'
    with server.session() as session:
        assert session.read(0, 4) == b'kept'
    assert 'error' not in server.text()


def test_no_request_of_before_a_disconnect_comes_late(repository, tmp_path):
    """A client repeats a write and writes again: the last write stays.

    The server's thread for the old connection waits for the lock meanwhile.
    """
    volume_tools.create(repository, 'disk', SIZE)
    library = tmp_path / 'late_locks.so'
    subprocess.run(
        ['gcc', '-std=c11', '-D_GNU_SOURCE', '-Wall', '-Wextra', '-Werror',
         '-shared', '-fPIC', str(LATE_LOCKS), '-o', str(library)],
        check=True, timeout=60)
    with volume_tools.Server(repository, tmp_path,
                             LD_PRELOAD=str(library)) as server:
        server.start()
        with server.session() as before, contextlib.suppress(
                BrokenPipeError, ConnectionResetError, EOFError):
            end = threading.Thread(target=server.control.disconnect)
            end.start()
            while end.is_alive():
                volume_tools.write(before, 0, b'old')
        end.join(nbd.LIMIT)
        with server.session() as session:
            volume_tools.write(session, 0, b'new')
            # Longer than the thread of before needs.
            time.sleep(3)
            assert session.read(0, 3) == b'new'


# -- the socket ---------------------------------------------------------------

def test_no_server(server):
    server.kill()
    control = server.repository / 'volumes/disk/control'
    assert control.exists()
    with pytest.raises(volume_control.NotServed, match='no process serves'):
        server.control.status()
    # The next owner replaces it.
    server.start()
    assert server.control.status()['pid'] == str(server.process.pid)
    assert control.stat().st_mode & 0o777 == 0o600
    server.stop()
    assert not control.exists()
    with pytest.raises(volume_control.NotServed):
        server.control.status()
    with pytest.raises(volume_control.NotServed, match='there is no volume'):
        volume_control.VolumeControl(str(server.repository), 'x').status()


def test_a_long_path(tmp_path):
    """An address of a socket has room for 107 bytes."""
    place = tmp_path / ('d' * 100) / ('e' * 100)
    place.mkdir(parents=True)
    path = volume_tools.create_repository(place / 'repository')
    name = 'n' * 64
    volume_tools.create(path, name, SIZE)
    with volume_tools.Server(path, tmp_path, name) as server:
        server.start()
        assert server.control.status()['size'] == str(SIZE)
        server.stop()
        assert not (path / 'volumes' / name / 'control').exists()


@pytest.mark.skipif(os.geteuid() != 0, reason='other users need root')
@pytest.mark.parametrize('shared', [False, True])
def test_other_users(tmp_path, shared):
    """Users of the group get an answer if the repository is shared."""
    path = volume_tools.create_repository(tmp_path / 'repository',
                                          group_access=shared)
    directory = volume_tools.create(path, 'disk', SIZE)
    with volume_tools.Server(path, tmp_path) as server:
        server.start()
        control = directory / 'control'
        assert control.stat().st_mode & 0o777 == (0o660 if shared else 0o600)
        # The mode lets everyone in, so that only the server itself decides.
        control.chmod(0o666)
        for place in (directory, *directory.parents):
            if place == tmp_path.parents[-1]:
                break
            place.chmod(place.stat().st_mode | 0o011)
        answer = daemons.connect_as(str(control), STRANGER, b'status\n')
        # The stranger keeps our group.
        assert answer == (b'ok\npid ' + b'%d' % server.process.pid)[:9] if (
            shared) else answer == b''


# -- hostile peers ------------------------------------------------------------

def raw(server, data, shut=True):
    """Return the answer to these bytes."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(nbd.LIMIT)
        connect(server, sock)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(data)
            if shut:
                sock.shutdown(socket.SHUT_WR)
        answer = b''
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(65536):
                answer += piece
        return answer


def connect(server, sock):
    directory = os.open(server.repository / 'volumes' / server.name,
                        os.O_PATH)
    try:
        sock.connect(f'/proc/self/fd/{directory}/control')
    finally:
        os.close(directory)


@pytest.mark.parametrize('data', [
    b'', b'\n', b' status\n', b'status \n', b'status x\n', b'STATUS\n',
    b'status', b'status\nstatus\n', b'status\r\n', b'sta\0tus\n', b'\xff\n',
    b'resize\n', b'resize \n', b'resize -1\n', b'resize 1e9\n',
    b'resize 99999999999999999999999\n', b'resize 512 512\n',
    b'snapshot\n', b'snapshot  x\n', b'snapshot \x1b[2J\n',
    b'checkpoint now\n', b'disconnect all\n', b'delete\n',
    b'x' * 511 + b'\n', b'x' * 512 + b'\n',
    b'x' * 100_000, b'%s%n%x\n', b'snapshot ' + b'x' * 300 + b'\n'])
def test_what_is_no_request(server, data):
    answer = raw(server, data)
    assert answer.startswith(b'error invalid ') and answer.endswith(b'\n\n')
    assert answer.count(b'\n') == 2
    assert server.number('size') == SIZE


def test_any_bytes(server):
    rng = random.Random(3)
    words = [b'status', b'snapshot', b'resize', b'checkpoint', b' ', b'\n',
             b'512', b'\0', b'image']
    for _ in range(300):
        data = b''.join(rng.choice([*words, rng.randbytes(rng.randrange(9))])
                        for _ in range(rng.randrange(8)))
        answer = raw(server, data)
        assert answer.startswith((b'ok\n', b'error ')), data
        assert answer.endswith(b'\n\n')
    assert server.is_up()
    assert 'error' not in server.text()


def test_half_a_line_and_slow_ones(server):
    start = time.monotonic()
    with socket.socket(socket.AF_UNIX) as sock:
        connect(server, sock)
        sock.settimeout(nbd.LIMIT)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            # The bytes are so rare that the line does not become too long.
            while time.monotonic() < start + nbd.LIMIT:
                sock.sendall(b'x')
                time.sleep(0.2)
        assert time.monotonic() - start > PATIENCE - 1


# Long: the server gives up each silent client after PATIENCE seconds.
def test_silent_clients(server):
    """They hold their connections for some seconds, and no others."""
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            connect(server, sock)
        # The disk is not held up.
        with server.session() as session:
            volume_tools.write(session, 0, b'x')
        assert server.number('size') == SIZE


def test_silent_clients_do_not_hold_up_the_end(repository, tmp_path):
    """The server ends while its clock, and so its time limits, stand still."""
    volume_tools.create(repository, 'disk', SIZE)
    clock = clocks.Clock(tmp_path)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(volume_tools.Server(
            repository, tmp_path, **clock.environment)).start()
        clock.stop_monotonic()
        for _ in range(8):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            connect(server, sock)
        assert server.number('size') == SIZE    # it has accepted the others
        server.stop()


def test_clients_that_take_no_answer(server):
    for _ in range(100):
        with socket.socket(socket.AF_UNIX) as sock:
            connect(server, sock)
            sock.sendall(b'status\n')
    assert server.number('size') == SIZE


# -- a server that lies -------------------------------------------------------

@pytest.mark.parametrize('answer, error', [
    (b'', volume_control.NotServed), (b'ok\n', volume_control.NotServed),
    (b'o', volume_control.NotServed), (b'\n\n', volume_control.NotServed),
    (b'okay\n\n', volume_control.NotServed),
    (b'x' * 100_000, volume_control.NotServed),
    (b'error nospace full\n\n', exceptions.NoSpaceError),
    (b'error busy x\n\n', exceptions.BusyError),
    (b'error other x\n\n', exceptions.StorageError),
    (b'error\n\n', exceptions.StorageError), (None, volume_control.NotServed)])
def test_answers(tmp_path, answer, error):
    directory = tmp_path / 'volumes' / 'disk'
    directory.mkdir(parents=True)
    ended = threading.Event()

    def serve(listener):
        with listener.accept()[0] as sock:
            sock.recv(100)
            if answer is None:
                ended.wait(nbd.LIMIT)
            else:
                with contextlib.suppress(OSError):
                    sock.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(directory / 'control'))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        control = volume_control.VolumeControl(
            str(tmp_path), 'disk', nbd.LIMIT if answer is not None else 0.5)
        try:
            with pytest.raises(error):
                control.status()
        finally:
            ended.set()
            thread.join(nbd.LIMIT)


@pytest.mark.parametrize('line', [
    '', ' ', '5', '5' + 20 * ' 1', '5' + 22 * ' 1', '-5' + 21 * ' 1',
    '5' + 20 * ' 1' + ' x', '5' + 20 * ' 1' + ' 1e3', '5 ' + 21 * ' 1',
    '5' + 20 * ' 1' + ' ' + '9' * 5000, '5' + 5000 * ' 1'])
def test_times_in_another_form(line):
    """They are left out, and the others are not."""
    good = '16000' + 21 * ' 1'
    found = volume_control.latencies(
        {'read_latency': line, 'write_latency': good})
    assert found == {'write': volume_control.Latency(16e-6, (1,) * 21)}


def test_quantiles():
    """A quantile is the bound of its bucket."""
    bounds = volume_control.LATENCY_BOUNDS
    assert (bounds[0], bounds[-1]) == (16e-6, 8.388608)

    def quantiles(**counts):
        times = volume_control.Latency(1.0, tuple(
            counts.get(f'b{bucket}', 0) for bucket in range(21)))
        return [times.quantile(share) for share in (0.5, 0.99)]

    assert quantiles() == [None, None]
    assert quantiles(b3=1) == [bounds[3], bounds[3]]
    assert quantiles(b0=50, b7=49, b19=1) == [bounds[0], bounds[7]]
    assert quantiles(b0=49, b7=49, b19=2) == [bounds[7], bounds[19]]
    assert quantiles(b0=98, b20=2) == [bounds[0], None]


def test_requests_that_cannot_be_sent(tmp_path):
    control = volume_control.VolumeControl(str(tmp_path), 'disk')
    for request in (lambda: control.snapshot('a b'),
                    lambda: control.snapshot('a', 'two\nlines')):
        with pytest.raises(exceptions.InvalidParameter):
            request()
