# SPDX-License-Identifier: Apache-2.0

"""Volumes as disks: nbdkit with our plugin, libnbd's and others' clients."""

import contextlib
import itertools
import json
import os
import pathlib
import random
import re
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings

import pytest

from glance_dedup.base import exceptions
from glance_dedup.cli import volumeserve
from glance_dedup.repository import openvolumes
from tests.support import certificates
from tests.support import daemons
from tests.support import nbd
from tests.support import ports
from tests.support import repositories
from tests.support import volume_tools

pytestmark = pytest.mark.needs('nbdkit')

MIB = 1 << 20
SECTOR = 512
SIZE = 5 * MIB + 3 * SECTOR
# Seconds without a write, after which the server makes a checkpoint.
IDLE = 5


@pytest.fixture
def repository(tmp_path):
    return volume_tools.create_repository(tmp_path / 'repository')


@pytest.fixture
def server(repository, tmp_path):
    volume_tools.create(repository, 'disk', SIZE)
    with volume_tools.Server(repository, tmp_path) as found:
        yield found.start()


def run(program, *arguments, status=0, limit=120):
    nbd.need(program)
    done = subprocess.run(
        [program, *map(str, arguments)], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=limit)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


# -- others' clients ----------------------------------------------------------

@pytest.mark.needs('nbd')
def test_facts(server):
    found, = json.loads(run('nbdinfo', '--json', server.uri))['exports']
    assert found['export-size'] == SIZE and not found['is_read_only']
    for able in ('multi_conn', 'flush', 'fua', 'trim', 'zero', 'fast_zero',
                 'cache', 'df'):
        assert found[f'can_{able}'], able
    assert (found['block_size_minimum'], found['block_size_preferred'],
            found['block_size_maximum']) == (1, 4096, 32 * MIB)
    listed = json.loads(run('nbdinfo', '--list', '--json', server.uri))
    assert [e['export-name'] for e in listed['exports']] == ['disk']
    # The default export is the volume, too; there are no others.
    run('nbdinfo', f'nbd+unix:///?socket={server.socket}')
    run('nbdinfo', f'nbd+unix:///other?socket={server.socket}', status=1)


@pytest.mark.needs('nbd')
def test_read_only(repository, tmp_path):
    """Clients see the flag, writes are refused, and there is one owner."""
    data = repositories.mixture(SIZE, 4)
    volume_tools.create(repository, 'disk', SIZE)
    with repositories.open_repository(repository) as repo:
        with openvolumes.open_volume(repo, 'disk') as volume:
            volume.write(data, 0)       # this stays in the journal
    (tmp_path / 'other').write_bytes(bytes(SIZE))
    with volume_tools.Server(repository, tmp_path) as server:
        server.start('--read-only')
        found, = json.loads(run('nbdinfo', '--json', server.uri))['exports']
        assert found['is_read_only'] and not found['can_trim']
        run('nbdcopy', tmp_path / 'other', server.uri, status=1)
        with pytest.raises(exceptions.BusyError):
            with repositories.open_repository(repository) as repo:
                openvolumes.open_volume(repo, 'disk')
        run('nbdcopy', server.uri, tmp_path / 'back')
    assert (tmp_path / 'back').read_bytes() == data


@pytest.mark.needs('nbd')
def test_nbdcopy(server, tmp_path):
    """nbdcopy copies in both directions, without the zeros."""
    data = repositories.mixture(SIZE - 2 * MIB, 3) + bytes(2 * MIB)
    (tmp_path / 'image').write_bytes(data)
    run('nbdcopy', '--flush', tmp_path / 'image', server.uri)
    run('nbdcopy', server.uri, tmp_path / 'back')
    assert (tmp_path / 'back').read_bytes() == data
    assert os.stat(tmp_path / 'back').st_blocks * 512 < SIZE - MIB
    assert server.number('written') < SIZE - MIB
    server.stop()
    repositories.require_clean(server.repository)
    server.start()
    run('nbdcopy', server.uri, tmp_path / 'again')
    assert (tmp_path / 'again').read_bytes() == data


def run_while_it_works(server, *command):
    """Run a client of a server; return its output when it has ended.

    The machine may stand still for minutes, so checks are counted, not
    seconds.
    """
    nbd.need(command[0])
    with (tempfile.TemporaryFile('w+') as output,
          subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output
                           ) as process):
        idle, before = 0, None
        try:
            while process.poll() is None:
                done = server.number('written') + server.number('read')
                idle, before = (idle + 1 if done == before else 0), done
                assert idle < 100, f'{command[0]} has stopped'
                time.sleep(1)
        finally:
            process.kill()
        output.seek(0)
        text = output.read()
    assert process.returncode == 0, text
    return text


@pytest.mark.needs('fio')
@pytest.mark.parametrize('options', [
    pytest.param(('--io_size=8m',), id='once'),
    pytest.param(('--time_based', '--runtime=1800'), id='half an hour', marks=[
        pytest.mark.long, pytest.mark.timeout(7200)])])
def test_fio(repository, tmp_path, options):
    """fio verifies each of its random writes when it reads."""
    volume_tools.create(repository, 'disk', 64 * MIB, 16 * MIB)
    with volume_tools.Server(repository, tmp_path) as server:
        server.start()
        text = run_while_it_works(
            server, 'fio', '--name=random', '--ioengine=nbd',
            f'--uri={server.uri}', '--rw=randwrite', '--bs=4k',
            '--iodepth=16', '--size=64m', '--fsync=32', '--randseed=7',
            '--verify=xxhash', '--verify_fatal=1', '--verify_backlog=512',
            '--verify_state_save=0', '--output-format=json', *options)
        job, = json.loads(text[text.index('{'):])['jobs']
        assert job['error'] == 0
        assert job['write']['total_ios'] >= 8 * MIB // 4096
        server.stop()
    repositories.require_clean(repository)


# -- an oracle ----------------------------------------------------------------

class Oracle:
    """A volume and its expected bytes; each request is checked."""

    def __init__(self, server, seed):
        self.server = server
        self.model = bytearray(SIZE)
        self.rng = random.Random(seed)
        self.sessions = []

    def connect(self):
        for session in self.sessions:
            session.close()
        self.sessions = [self.server.session() for _ in range(3)]

    def some(self):
        """Return a range of any alignment; most are short."""
        longest = self.rng.choice([3, 700, 5000, 70_000, 300_000])
        length = self.rng.randrange(1, longest)
        offset = self.rng.choice([
            self.rng.randrange(SIZE - length),
            # It crosses the border of two parts, or is at the end.
            self.rng.randrange(1, 6) * MIB - length // 2, SIZE - length])
        return min(offset, SIZE - length), length

    def data(self, length):
        rng = self.rng
        return rng.choice([
            lambda: rng.randbytes(length), lambda: bytes(length),
            # The repository may have this data already.
            lambda: repositories.noise(length, rng.randrange(5))])()

    def step(self):
        rng, session = self.rng, self.rng.choice(self.sessions)
        offset, length = self.some()
        end = offset + length
        flags = rng.choice([0, 0, 0, volume_tools.FUA])
        kind = rng.choice(['read', 'read', 'write', 'write', 'write', 'trim',
                           'zero', 'flush', 'cache', 'extents'])
        if kind == 'read':
            assert session.read(offset, length) == self.model[offset:end]
        elif kind == 'write':
            data = self.data(length)
            volume_tools.write(session, offset, data, flags)
            self.model[offset:end] = data
        elif kind in ('trim', 'zero'):
            if kind == 'zero':
                flags |= rng.choice([0, volume_tools.NO_HOLE,
                                     volume_tools.FAST_ZERO])
            volume_tools.ask(session,
                             nbd.TRIM if kind == 'trim' else nbd.ZEROES,
                             offset, length, flags=flags)
            self.model[offset:end] = bytes(length)
        elif kind == 'extents':
            self.require_extents(session, offset, length,
                                 rng.choice([0, nbd.ONE]))
        else:
            volume_tools.ask(session,
                             nbd.FLUSH if kind == 'flush' else nbd.CACHE,
                             *
                             ((0, 0) if kind == 'flush' else (offset, length)))

    def require_extents(self, session, offset, length, flags=0):
        found = volume_tools.ask(session, nbd.STATUS, offset, length,
                                 flags=flags)
        assert flags == 0 or len(found) == 1
        at = offset
        for count, status in found:
            assert count and status in (0, 3)
            assert not status or not any(self.model[at:at + count])
            at += count
        assert at >= offset + length if flags == 0 else at > offset

    def check(self):
        for session in self.sessions:
            assert session.read(0, SIZE) == self.model
            self.require_extents(session, 0, SIZE)


@pytest.mark.parametrize('seed, steps', [
    (1, 1200), pytest.param(2, 1_000_000, marks=[
        pytest.mark.long, pytest.mark.timeout(7200)])])
def test_oracle(server, seed, steps):
    oracle = Oracle(server, seed)
    oracle.connect()
    for step in range(steps):
        oracle.step()
        if step % 150 == 70:
            server.control.checkpoint()
        if step % 400 == 399:
            oracle.check()
            oracle.rng.choice([server.stop, server.kill])()
            server.start()
            oracle.connect()
            oracle.check()
    oracle.check()
    server.stop()
    repositories.require_clean(server.repository)


def test_overlapping_writes_at_once(server):
    """A record is written whole, whatever is written beside it."""
    length, rounds = 60_000, 60
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        with server.session() as session:
            for _ in range(rounds):
                volume_tools.write(session, 12_345, bytes([rng.randrange(256)])
                                   * length)
                found = session.read(12_345, length)
                if found != found[:1] * length:
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(nbd.LIMIT)
    assert not wrong
    assert 'error' not in server.text()


def test_many_requests_at_once(server):
    """Requests on one connection are answered in any order."""
    count, length = 256, 3000
    expected = [repositories.noise(length, n) for n in range(count)]
    with server.session() as session:
        for cookie in range(count):
            session.send_request(nbd.WRITE, cookie * length, length,
                                 cookie=cookie, data=expected[cookie])
        replies = [session.reply({n: 0 for n in range(count)})
                   for _ in range(count)]
        assert sorted(cookie for cookie, _, _ in replies) == [*range(count)]
        assert not any(error for _, error, _ in replies)
        assert session.read(0, count * length) == b''.join(expected)


# -- durability ---------------------------------------------------------------

@pytest.mark.parametrize('seed', range(3))
def test_killed(server, seed):
    """Flushed sectors are there; each of the others is old or new."""
    rng = random.Random(seed)
    history = [[bytes(SECTOR)] for _ in range(64)]

    def writing(session, sector):
        data = rng.randbytes(SECTOR)
        history[sector].append(data)
        session.send_request(nbd.WRITE, sector * SECTOR, SECTOR, data=data)

    for _ in range(3):
        with server.session() as session:
            for _ in range(rng.randrange(1, 40)):
                writing(session, rng.randrange(64))
                session.reply({1: 0})
            volume_tools.ask(session, nbd.FLUSH)
            for states in history:
                del states[:-1]
            if rng.random() < 0.5:
                server.control.checkpoint()
            for _ in range(rng.randrange(20)):
                writing(session, rng.randrange(64))
            time.sleep(rng.random() / 50)
            server.kill()
        server.start()
        with server.session() as session:
            found = session.read(0, 64 * SECTOR)
        for sector, states in enumerate(history):
            now = found[sector * SECTOR:(sector + 1) * SECTOR]
            assert now in states, sector
            states[:] = [now]


def test_fua_and_flush_are_counted(server):
    with server.session() as session:
        before = server.number('flushes')
        volume_tools.write(session, 0, b'x', volume_tools.FUA)
        volume_tools.ask(session, nbd.TRIM, 0, 1, flags=volume_tools.FUA)
        volume_tools.ask(session, nbd.ZEROES, 0, 1, flags=volume_tools.FUA)
        volume_tools.ask(session, nbd.FLUSH)
        assert server.number('flushes') == before + 4
        volume_tools.write(session, 0, b'x')
        assert server.number('flushes') == before + 4


def test_a_checkpoint_when_idle(server):
    """A checkpoint comes a while after the last write, not before."""
    with server.session() as session:
        volume_tools.write(session, 0, b'x' * 10_000)
        time.sleep(IDLE + 2)
        # It would cost more than it is worth.
        assert server.number('journal_records') == 1
        data = b'x' * (3 << 20)
        began = time.monotonic()
        volume_tools.write(session, 0, data)
        repositories.eventually(
            lambda: not server.number('journal_records'))
        assert time.monotonic() - began >= IDLE
        assert session.read(0, len(data)) == data
    assert server.number('checkpoints') == 1


# Long: it waits for five minutes.
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_checkpoint_of_old_records(server):
    with server.session() as session:
        began = time.monotonic()
        volume_tools.write(session, 0, b'x' * 10_000)
        repositories.eventually(
            lambda: not server.number('journal_records'), 400)
        assert time.monotonic() - began >= 300


def test_the_last_checkpoint(server):
    """A client that stays connected does not keep the server from ending."""
    with server.session() as session:
        volume_tools.write(session, 0, b'x' * 10_000)
        server.stop()
    directory = server.repository / 'volumes/disk'
    assert not (directory / 'control').exists()
    left = [(path.name, path.stat().st_size) for path in directory.iterdir()]
    server.start()
    status = server.control.status()
    assert status['journal_records'] == '0', (status, left, server.text())
    with server.session() as session:
        assert session.read(0, 10_000) == b'x' * 10_000


class Stream(threading.Thread):
    """A client that writes to its sectors until the server ends.

    :ivar number: of the writes that were acknowledged
    :ivar errors: of all answers
    """

    PER_STREAM = 512            # sectors
    AT_ONCE = 16

    def __init__(self, server, first):
        super().__init__()
        self._session = server.session()
        self._first = first
        self.number = 0
        self.errors = set()

    def place(self, number):
        return (self._first + number % self.PER_STREAM) * SECTOR

    @staticmethod
    def data(number):
        return number.to_bytes(8, 'little') * (SECTOR // 8)

    def run(self):
        waiting = set()
        with self._session as session, contextlib.suppress(OSError, EOFError):
            for number in itertools.count():
                session.send_request(nbd.WRITE, self.place(number), SECTOR,
                                     cookie=number, data=self.data(number))
                waiting.add(number)
                while len(waiting) == self.AT_ONCE:
                    cookie, error, _ = session.reply()
                    self.errors.add(error)
                    waiting.remove(cookie)
                # All writes before it are acknowledged.
                self.number = min(waiting)


def test_an_end_is_no_error(server):
    """A client can reconnect later; an error would reach a guest."""
    streams = [Stream(server, 2000 * i) for i in range(4)]
    for stream in streams:
        stream.start()
    repositories.eventually(lambda: all(s.number > 1000 for s in streams))
    server.stop()
    for stream in streams:
        stream.join(60)
        assert not stream.is_alive() and stream.errors == {0}
    server.start()
    with server.session() as session:
        for stream in streams:
            for number in range(stream.number - stream.PER_STREAM,
                                stream.number):
                data = session.read(stream.place(number), SECTOR)
                later = int.from_bytes(data[:8], 'little')
                assert data == stream.data(later) and later >= number


def test_blocks_are_shared_with_images(repository, tmp_path):
    """The server uses the host's filter, and fills a new one."""
    data = repositories.noise(2 * MIB, 9)
    with repositories.open_repository(
            repository, filter_dir=str(tmp_path / 'elsewhere')) as repo:
        repositories.put(repo, 'image', data)
    volume_tools.create(repository, 'disk', SIZE)
    with volume_tools.Server(repository, tmp_path) as server:
        server.start()
        repositories.eventually(lambda: server.number('index_complete'))
        with server.session() as session:
            volume_tools.write(session, MIB, data)
            server.control.checkpoint()
            found = server.control.status()
            assert found['unique'] == '0'
            assert found['duplicate'] == str(2 * MIB)
            assert session.read(MIB, 2 * MIB) == data
        assert 'error' not in server.text()


# -- harmful clients ----------------------------------------------------------

def test_what_is_refused(server):
    with server.session() as session:
        for command in (nbd.READ, nbd.TRIM, nbd.ZEROES, nbd.CACHE,
                        nbd.STATUS):
            for offset, length in ((SIZE, 1), (SIZE - 1, 2), (1 << 63, 1)):
                error, _ = session.answer(command, offset, length)
                assert error in (nbd.EINVAL, volume_tools.ENOSPC), command
        error, _ = session.answer(nbd.WRITE, SIZE - 1, 2, data=b'xy')
        assert error in (nbd.EINVAL, volume_tools.ENOSPC)
        assert session.read(SIZE - 1, 1) == b'\0'


def test_garbage(server):
    rng = random.Random(11)
    for n in range(40):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(nbd.LIMIT)
            sock.connect(str(server.socket))
            sock.sendall(rng.randbytes(rng.randrange(1, 3000)))
    for n in range(20):
        # This is in the transmission phase: half a request, or half of its
        # data.
        with server.session() as session:
            session.send_request(nbd.WRITE, 0, 1000, data=b'x' * n)
            session.send(rng.randbytes(n))
    with server.session() as session:
        assert len(session.read(0, SIZE)) == SIZE
        volume_tools.write(session, 0, b'still')
        assert session.read(0, 5) == b'still'


# -- the command --------------------------------------------------------------

def command(repository, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
         repository, 'volume', 'serve', *map(str, arguments)],
        cwd=daemons.ROOT, env={
            **os.environ, 'PYTHONPATH': str(daemons.ROOT), **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert 'Traceback' not in done.stderr
    return done.returncode, done.stderr


def test_a_second_owner(server, tmp_path):
    status, text = command(server.repository, 'disk', '--nbd-socket',
                           tmp_path / 'second')
    assert status == 11 and 'the volume disk is in use' in text
    assert not (tmp_path / 'second').exists()
    # The engine refuses it, too, if nbdkit is started by hand.
    line = pathlib.Path(f'/proc/{server.process.pid}/cmdline').read_bytes()
    arguments = [word for word in line.decode().split('\0') if word]
    done = subprocess.run(
        [*arguments, '--unix', tmp_path / 'third'], capture_output=True,
        text=True, timeout=60)
    assert done.returncode == 1 and 'disk' in done.stderr, done.stderr
    with server.session() as session:
        volume_tools.write(session, 0, b'still')


def test_the_socket(server, tmp_path):
    """The socket has its mode; only a dead socket is replaced."""
    assert server.socket.stat().st_mode & 0o777 == 0o600
    volume_tools.create(server.repository, 'other', SIZE)
    status, text = command(server.repository, 'other', '--nbd-socket',
                           server.socket)
    assert status == 11 and 'another process serves' in text
    (tmp_path / 'file').write_text('mine')
    status, text = command(server.repository, 'other', '--nbd-socket',
                           tmp_path / 'file')
    assert status == 2 and 'is not a socket' in text
    assert (tmp_path / 'file').read_text() == 'mine'
    server.kill()
    server.start('--socket-mode', '660')
    assert server.socket.stat().st_mode & 0o777 == 0o660
    server.session().close()


def test_what_the_command_refuses(repository, tmp_path):
    volume_tools.create(repository, 'disk', SIZE)
    sock = tmp_path / 'sock'
    for arguments, words in [
            (['none', '--nbd-socket', sock], 'there is no volume none in'),
            (['disk', '--nbd-socket', tmp_path / 'no' / 'x'],
             'cannot listen at')]:
        status, text = command(repository, *arguments)
        assert status == 3 and words in text, (arguments, text)
    for arguments, words in [
            (['../disk', '--nbd-socket', sock], 'is no name of a volume'),
            (['disk'], 'one of the arguments'),
            (['disk', '--port', 1], '--port needs --tls-certificates'),
            (['disk', '--port', 0], 'is not 1 to 65535'),
            (['disk', '--nbd-socket', sock, '--address', '::1'],
             '--address needs --port'),
            (['disk', '--nbd-socket', 'x' * 100], 'longer than'),
            (['disk', '--nbd-socket', sock, '--max-rate', 0],
             '--max-rate is not 1M to 1T'),
            (['disk', '--nbd-socket', sock, '--max-rate', '2T'],
             '--max-rate is not 1M to 1T'),
            (['disk', '--nbd-socket', sock, '--max-rate', '1500K'],
             'no whole number of MiB'),
            (['disk', '--nbd-socket', sock, '--burst', '64M'],
             '--burst needs --max-rate'),
            (['disk', '--nbd-socket', sock, '--max-rate', '1M', '--burst',
              '31M'], '--burst is not 32M'),
            (['disk', '--nbd-socket', sock, '--socket-mode', '999'],
             'is not a mode'),
            (['disk', '--nbd-socket', sock, '--threads', 0],
             'is not 1 to 256')]:
        status, text = command(repository, *arguments)
        assert status == 2 and words in text, (arguments, text)
    status, text = command(repository, 'disk', '--nbd-socket', sock,
                           PATH='/nowhere')
    assert status == 3 and 'install the package nbdkit' in text
    assert not sock.exists()


def test_without_the_plugin(monkeypatch):
    monkeypatch.setattr(volumeserve, 'PLUGIN', '/nowhere/plugin.so')
    with pytest.raises(Exception, match='was not built. Install the package'):
        volumeserve._find_programs()


def test_the_unit_is_valid():
    unit = daemons.ROOT / 'etc' / 'glance-dedup-volume@.service'
    line, = re.findall('^ExecStart=/usr/bin/glance-dedup volume serve (.*)$',
                       unit.read_text(), re.MULTILINE)
    parser = volumeserve.Serve(None, None).get_parser('volume serve')
    args = parser.parse_args(line.replace('%i', 'disk').split())
    assert args.name == 'disk'
    assert args.nbd_socket == '/run/glance-dedup-volume-disk/nbd.sock'
    # A client that makes the server end must not make systemd give up.
    before, _, _ = unit.read_text().partition('[Service]')
    assert '\nStartLimitIntervalSec=0\n' in before


def test_a_damaged_volume(server):
    """A damaged volume is not served; the log names the damage."""
    server.stop()
    journal, = (server.repository / 'volumes/disk').glob('journal-*')
    repositories.ruin(journal, 100)
    status, text = command(server.repository, 'disk', '--nbd-socket',
                           server.socket)
    assert status == 1 and journal.name in text and 'damaged' in text


def test_parameters_that_changed(server):
    """The plugin refuses parameters that changed after the command's read."""
    line = pathlib.Path(f'/proc/{server.process.pid}/cmdline').read_bytes()
    arguments = [word for word in line.decode().split('\0') if word]
    server.stop()
    file = server.repository / 'repository.json'
    file.write_bytes(file.read_bytes() + b'\n')
    done = subprocess.run(
        [*arguments, '--unix', server.socket.with_suffix('.new')],
        capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and 'has changed just now' in done.stderr


@pytest.mark.parametrize('keys, words', [
    (['block-size=4097'], 'is not a power of two'),
    (['block-size=-1'], 'is not a number from 512 to 65536'),
    (['block-size=4096x'], 'is not a number'),
    (['repository-id=xyz'], 'has not 32 hexadecimal digits'),
    (['parameters=0'], 'has not 16 hexadecimal digits'),
    (['major=1'], "there is no key 'major'"),
    (['verify=other'], 'is neither fingerprint nor bytes'),
    (['dedup=maybe'], 'is neither yes nor no'),
    (['color=red'], "there is no key 'color'"),
    (['codec=none'], 'the key repository is missing')])
def test_keys(keys, words):
    done = subprocess.run(
        ['nbdkit', '-f', '-U', '-', volumeserve.PLUGIN,
         *(['repository=/', 'volume=x', f'repository-id={"0" * 32}',
            f'parameters={"0" * 16}', 'group-slots=64',
            'segment-size=4096', 'fingerprint=sha256']
           if 'block-size=4097' in keys else []), *keys],
        capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and words in done.stderr, done.stderr


@pytest.mark.needs('nbd')
def test_tls(server, tmp_path):
    """The volume is served by TLS; a client needs a certificate of ours."""
    place = tmp_path / 'pki'
    for authority in ('ours', 'theirs'):
        certificates.make_pki(place / authority)
    server.stop()
    port = ports.free_port()
    server.start('--port', port, '--address', '127.0.0.1',
                 '--tls-certificates', place / 'ours')
    address = f'localhost:{port}/disk'
    assert run('nbdinfo', '--size', f'nbds://{address}?tls-certificates='
               f'{place / "ours"}') == f'{SIZE}\n'
    for refused in (f'nbd://{address}', f'nbds://{address}?tls-certificates='
                    f'{place / "theirs"}'):
        run('nbdinfo', refused, status=1)


def served_over_tcp(server, place, threads=1):
    """Serve the volume at a port; return its number, and the PKI's place."""
    certificates.make_pki(place / 'pki')
    server.stop()
    port = ports.free_port()
    server.start('--port', port, '--address', '127.0.0.1', '--threads',
                 threads, '--tls-certificates', place / 'pki')
    return port, place / 'pki'


# This program has a file open when the command listens, and closes it
# afterwards, as a thread may do.
_CLOSES_LATE = """
from glance_dedup.cli import volumeserve
import os
_listen = volumeserve._listen
def listen(*arguments):
    fd = os.open(os.devnull, os.O_RDONLY)
    _listen(*arguments)
    os.close(fd)
volumeserve._listen = listen
"""


def test_a_thread_that_closes_a_file_late(repository, tmp_path):
    """The thread does not close the socket that nbdkit inherits."""
    volume_tools.create(repository, 'disk', SIZE)
    with volume_tools.Server(repository, tmp_path,
                             before=_CLOSES_LATE) as server:
        assert server.start().session().read(0, 10) == bytes(10)


@pytest.mark.needs('nbd')
def test_strangers_who_are_silent(repository, tmp_path):
    """Silent strangers keep no other host out, and are disconnected."""
    volume_tools.create(repository, 'disk', SIZE)
    before = 'import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, 256))'
    with (volume_tools.Server(repository, tmp_path, before=before) as server,
          contextlib.ExitStack() as stack):
        port, pki = served_over_tcp(server.start(), tmp_path)
        strangers = []
        for _ in range(300):
            strangers.append(stack.enter_context(socket.create_connection(
                ('127.0.0.1', port), 60, ('127.0.0.2', 0))))
            # For the server this is the youngest connection.
            assert strangers[-1].recv(18, socket.MSG_WAITALL)
            if len(strangers) > 64:
                wait_for_end(strangers.pop(0))
        assert run('nbdinfo', '--size', f'nbds://localhost:{port}/disk'
                   f'?tls-certificates={pki}') == f'{SIZE}\n'
        for stranger in strangers:
            wait_for_end(stranger)


def wait_for_end(sock):
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(4096):
            pass


@contextlib.contextmanager
def dripping(sock, data):
    """Have a client send data byte by byte, which takes an hour."""
    ended = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            for byte in data:
                sock.sendall(bytes([byte]))
                if ended.wait(0.2):
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(nbd.LIMIT)


def descriptors(server):
    return len(os.listdir(f'/proc/{server.process.pid}/fd'))


# Slow: a handshake has ten seconds.
@pytest.mark.slow
def test_strangers_who_stop_at_any_step(server, tmp_path):
    """Or who send something now and then: no handshake takes longer.

    A client with a certificate may be silent for as long as it wants.
    """
    port, pki = served_over_tcp(server, tmp_path)
    repositories.eventually(lambda: server.number('index_complete'))
    context = client_context(pki)
    option = b'IHAVEOPT' + struct.pack('>II', nbd.LIST, 0)
    # The longest record of TLS.
    record = b'\x16\3\1\x40\0' + bytes(1 << 14)
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(tls_session(port, context))
        before = descriptors(server)

        def stranger(*data, tls=False, slow=b''):
            session = stack.enter_context(connect_over_tcp(port, '127.0.0.2'))
            if tls:
                assert session.option(nbd.STARTTLS) == [(nbd.ACK, b'')]
            session.send(*data)
            stack.enter_context(dripping(session.socket, slow))
            return session.socket

        strangers = [
            stranger(), stranger(option), stranger(option[:9]),
            stranger(slow=1000 * option), stranger(tls=True),
            stranger(record[:100], tls=True), stranger(tls=True, slow=record)]
        # They keep no client from working.
        with tls_session(port, context) as client:
            assert client.read(0, SECTOR) == bytes(SECTOR)
        for sock in strangers:
            wait_for_end(sock)
        repositories.eventually(lambda: descriptors(server) <= before)
        assert silent.read(0, SECTOR) == bytes(SECTOR)


def client_context(pki, verify=True):
    """TLS of a client that has the certificate of a PKI; None: it has none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_ciphers('ALL:@SECLEVEL=0')
    context.check_hostname = False
    if not verify:
        context.verify_mode = ssl.CERT_NONE
    if pki is not None:
        context.load_verify_locations(pki / 'ca-cert.pem')
        context.load_cert_chain(pki / 'client-cert.pem',
                                pki / 'client-key.pem')
    return context


def connect_over_tcp(port, near='127.0.0.1'):
    """A client that has said which flags it knows."""
    return nbd.Session(socket.create_connection(
        ('127.0.0.1', port), nbd.LIMIT, (near, 0))).haggle()


def tls_session(port, context):
    """A client in transmission."""
    session = connect_over_tcp(port)
    try:
        return session.start_tls(context).enter(b'disk')
    except BaseException:
        session.close()
        raise


@pytest.mark.parametrize('version', ['TLSv1_2', 'TLSv1_3'])
def test_versions_of_tls(server, tmp_path, version):
    port, pki = served_over_tcp(server, tmp_path)
    context = client_context(pki)
    context.minimum_version = context.maximum_version = (
        ssl.TLSVersion[version])
    with tls_session(port, context) as session:
        assert session.socket.version() == version.replace('_', '.')


@pytest.mark.parametrize('version, number', [
    ('TLSv1', b'\3\1'), ('TLSv1_1', b'\3\2')])
def test_old_versions_of_tls(server, tmp_path, version, number):
    """The server hangs up on a client that speaks no newer one."""
    port, pki = served_over_tcp(server, tmp_path)
    context = client_context(pki)
    with warnings.catch_warnings(action='ignore'):
        context.minimum_version = context.maximum_version = (
            ssl.TLSVersion[version])
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    hello = sent.read()
    # The client offers this version, and no other.
    assert hello[:1] == b'\x16' and hello[9:11] == number
    with connect_over_tcp(port) as session:
        assert session.option(nbd.STARTTLS) == [(nbd.ACK, b'')]
        session.send(hello)
        with contextlib.suppress(ConnectionResetError):
            # Nothing, or an alert.
            assert session.socket.recv(1) in (b'', b'\x15')


@pytest.mark.parametrize('authority', [None, 'theirs'])
def test_a_certificate_that_we_did_not_sign(server, tmp_path, authority):
    """The server refuses it, even if the client does not mind the server."""
    if authority:
        certificates.make_pki(tmp_path / authority)
    port, pki = served_over_tcp(server, tmp_path)
    context = client_context(authority and tmp_path / authority, verify=False)
    # With TLS 1.3, a client learns this when it receives something.
    with pytest.raises((OSError, EOFError)):
        tls_session(port, context)
    with tls_session(port, client_context(pki)) as session:
        assert session.read(0, SECTOR) == bytes(SECTOR)


def test_the_policy_of_the_host(monkeypatch, tmp_path):
    """The host's policy stays in force, and old TLS is refused, too."""
    policy = tmp_path / 'policy'
    monkeypatch.setenv('GNUTLS_SYSTEM_PRIORITY_FILE', str(policy))

    def limited(text):
        policy.write_text(text)
        monkeypatch.setenv('GNUTLS_SYSTEM_PRIORITY_FILE', str(policy))
        volumeserve._limit_tls()
        path = os.environ['GNUTLS_SYSTEM_PRIORITY_FILE']
        assert os.get_inheritable(int(path.rpartition('/')[2]))
        return pathlib.Path(path).read_text()

    found = limited('[overrides]\ninsecure-hash = sha1')
    assert found.startswith('[overrides]\ninsecure-hash = sha1\n')
    assert 'disabled-version = tls1.1\n' in found
    listed = '[global]\noverride-mode = allowlist\n'
    assert limited(listed) == listed


# -- misbehaving clients ------------------------------------------------------

@pytest.mark.parametrize('magic', [nbd.REQUEST, 1])
def test_others_stay_when_a_client_hangs_up(server, magic):
    """Some versions of nbdkit would abort."""
    with server.session() as other:
        for _ in range(50):
            with server.session() as session:
                for cookie in range(16):
                    session.send_request(nbd.READ, 0, MIB, cookie=cookie)
                session.send_request(nbd.READ, 0, MIB, magic=magic)
        assert other.read(0, 512) == bytes(512)
    server.session().close()


@pytest.mark.parametrize('end', ['hangs up', 'false magic', 'no record'])
def test_others_stay_when_a_client_over_tls_hangs_up(server, tmp_path, end):
    port, pki = served_over_tcp(server, tmp_path, threads=16)
    context = client_context(pki)
    with tls_session(port, context) as other:
        for _ in range(20):
            with tls_session(port, context) as session:
                for cookie in range(16):
                    session.send_request(nbd.READ, 0, MIB, cookie=cookie)
                if end == 'false magic':
                    session.send_request(nbd.READ, 0, MIB, magic=1)
                elif end == 'no record':
                    os.write(session.socket.fileno(), b'nonsense' * 100)
        assert other.read(0, SECTOR) == bytes(SECTOR)
    tls_session(port, context).close()


def test_disconnect_over_tls(server, tmp_path):
    port, pki = served_over_tcp(server, tmp_path, threads=16)
    context = client_context(pki)
    with tls_session(port, context) as session:
        assert server.control.disconnect() == 1
        assert session.gone()
    with tls_session(port, context) as session:
        assert session.read(0, 512) == bytes(512)


def test_strangers_who_send_nonsense_in_place_of_tls(server, tmp_path):
    port, pki = served_over_tcp(server, tmp_path)
    rng = random.Random(13)
    with tls_session(port, client_context(pki)) as other:
        for _ in range(100):
            with connect_over_tcp(port, '127.0.0.2') as session:
                assert session.option(nbd.STARTTLS) == [(nbd.ACK, b'')]
                session.send(rng.randbytes(rng.randrange(1, 3000)))
        assert other.read(0, SECTOR) == bytes(SECTOR)
    tls_session(port, client_context(pki)).close()


def test_too_many_connections(repository, tmp_path):
    volume_tools.create(repository, 'disk', SIZE)
    with (volume_tools.Server(repository, tmp_path) as server,
          contextlib.ExitStack() as stack):
        server.start('--threads', 1)
        sessions = [stack.enter_context(server.session())
                    for _ in range(256)]
        with pytest.raises(AssertionError):
            server.session()
        assert '256 connections to the volume disk are the most' in (
            server.text())
        for session in sessions:
            assert session.read(0, 512) == bytes(512)
        sessions[0].close()
        repositories.eventually(lambda: connects(server))


def connects(server):
    with contextlib.suppress(AssertionError, EOFError):
        server.session().close()
        return True
    return False


@pytest.mark.parametrize('version, threads', [
    ('1.32.3', 16), ('1.32.4', 1), ('1.32.5', 1), ('1.33.9', 1),
    ('1.33.10', 16), ('1.42.2', 16)])
def test_a_version_that_aborts_gets_one_thread(repository, tmp_path, version,
                                               threads):
    volume_tools.create(repository, 'disk', SIZE)
    program = tmp_path / 'bin' / 'nbdkit'
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nif [ "$1" = --dump-config ]; then\n'
                       f'echo version={version}\nelse echo "$2"; fi\n')
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
         repository, '--filter-dir', tmp_path / 'filter', 'volume', 'serve',
         'disk', '--nbd-socket', tmp_path / 's'], cwd=daemons.ROOT,
        env={**os.environ, 'PATH': f'{program.parent}:{os.environ["PATH"]}'},
        capture_output=True, text=True, timeout=60)
    assert done.stdout == f'--threads={threads}\n', done.stderr
    assert (f'nbdkit {version} aborts' in done.stderr) == (threads == 1)
