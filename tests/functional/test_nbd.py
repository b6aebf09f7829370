# SPDX-License-Identifier: Apache-2.0

"""Images over NBD: other projects' clients, guests, and hostile clients."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import threading
import time

import pytest

from dedupd.http import limited
from tests.cloud import disk_images
from tests.support import daemons
from tests.support import nbd
from tests.support import repositories

BLOCK = 4096
MIB = 1 << 20
#: The daemons of most tests allow no more connections.
MAX_CONNECTIONS = 300


def images():
    return {'image': repositories.mixture(6_000_000, seed=7)
            + repositories.noise(777),
            'other': repositories.noise(2 * MIB, 8) + bytes(3 * MIB)
            + repositories.noise(MIB, 9),
            'zeros': bytes(5_000_000), 'empty': b''}


@pytest.fixture(scope='module')
def content():
    return images()


@pytest.fixture(scope='module')
def repository(tmp_path_factory, content):
    path = repositories.create(tmp_path_factory.mktemp('r') / 'repository',
                               group_slots=512)
    with repositories.open_repository(path) as opened:
        for image_id, data in content.items():
            repositories.put(opened, image_id, data)
    return path


class Daemon(daemons.Daemon):
    """A daemon that serves NBD, too."""

    def __init__(self, repository, **options):
        super().__init__(repository, **options)
        self.nbd = self.directory / 'nbd'
        self.write_config(nbd_socket=self.nbd)

    def uri(self, image_id):
        return f'nbd+unix:///{image_id}?socket={self.nbd}'

    def session(self):
        return nbd.Session(self.nbd)

    def export(self, image_id, **options):
        return nbd.Session(self.nbd).go(image_id.encode(), **options)

    def counts(self):
        return self.status()['nbd']


@pytest.fixture(scope='module')
def daemon(repository):
    """A daemon that waits as long as the tests do."""
    with Daemon(repository, header_timeout=nbd.LIMIT, write_timeout=nbd.LIMIT,
                max_connections=MAX_CONNECTIONS) as process:
        yield process.start().wait_for_catalog()


@pytest.fixture
def own(tmp_path, content):
    """A repository and a daemon that a test may harm."""
    path = repositories.create(tmp_path / 'own', group_slots=512)
    with repositories.open_repository(path) as opened:
        for image_id in ('image', 'other'):
            repositories.put(opened, image_id, content[image_id])
    with Daemon(path) as process:
        yield process.start().wait_for_catalog()


def require_alive(daemon):
    assert daemon.request('GET', '/healthcheck').status == 200
    assert 'Traceback' not in daemon.text()


def run(program, *arguments, status=0, limit=nbd.LIMIT):
    nbd.need(program)
    done = subprocess.run(
        [program, *map(str, arguments)], stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=limit)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- other projects' clients --------------------------------------------------

@pytest.mark.needs('qemu')
def test_qemu_img(daemon, content, tmp_path):
    for image_id, data in content.items():
        uri, file = daemon.uri(image_id), tmp_path / image_id
        file.write_bytes(data)
        facts = json.loads(run('qemu-img', 'info', '--output=json', '-f',
                               'raw', uri))
        # qemu-img counts in sectors.
        assert facts['virtual-size'] == -(-len(data) // 512) * 512
        run('qemu-img', 'compare', '-f', 'raw', '-F', 'raw', file, uri)
        run('qemu-img', 'convert', '-f', 'raw', '-O', 'raw', uri,
            tmp_path / 'copy')
        assert (tmp_path / 'copy').read_bytes()[:len(data)] == data
    assert 'there is no image' in run(
        'qemu-img', 'info', daemon.uri('nothing'), status=1)


@pytest.mark.needs('qemu')
def test_qemu_skips_zeros(daemon, content, tmp_path):
    """qemu-img finds the zeros by the metadata context, and skips them."""
    before = daemon.counts()['bytes']
    run('qemu-img', 'convert', '-f', 'raw', '-O', 'raw', daemon.uri('other'),
        tmp_path / 'copy')
    assert (tmp_path / 'copy').read_bytes() == content['other']
    # Some bytes at the start are read to find the image's format.
    assert daemon.counts()['bytes'] - before < 3 * MIB + 65536
    assert os.stat(tmp_path / 'copy').st_blocks * 512 < 4 * MIB


@pytest.mark.needs('nbd')
def test_libnbd(daemon, content, tmp_path):
    for image_id, data in content.items():
        facts = json.loads(run('nbdinfo', '--json', daemon.uri(image_id)))
        found, = facts['exports']
        assert found['export-size'] == len(data)
        assert found['is_read_only'] and found['can_multi_conn']
        assert found['can_cache'] and found['can_df']
        assert found['block_size_minimum'] == 1
        assert found['block_size_preferred'] == BLOCK
        assert found['block_size_maximum'] == 32 * MIB
        assert found['contexts'] == ['base:allocation']
        copy = tmp_path / image_id
        run('nbdcopy', daemon.uri(image_id), copy)
        assert copy.read_bytes() == data
    listed = json.loads(run('nbdinfo', '--list', '--json', daemon.uri('')))
    assert {e['export-name'] for e in listed['exports']} == set(content)
    assert 'for export: nothing' in run('nbdinfo', daemon.uri('nothing'),
                                        status=1)


@pytest.mark.needs('nbd')
def test_nbdinfo_map(daemon, repository):
    with repositories.open_repository(repository) as opened, (
            opened.open_image('image')) as image:
        expected = []
        for extent in image.extents():
            kind = 3 if extent.kind == 'zeros' else 0
            if expected and expected[-1][2] == kind:
                expected[-1][1] += extent.length
            else:
                expected.append([extent.offset, extent.length, kind])
    found = json.loads(run('nbdinfo', '--map', '--json',
                           daemon.uri('image')))
    assert [[e['offset'], e['length'], e['type']] for e in found] == expected
    assert len(expected) > 100


@pytest.mark.needs('qemu')
def test_qemu_io_writes_nothing(daemon):
    assert 'Permission denied' in run(
        'qemu-io', '-f', 'raw', '-c', 'write 0 512', daemon.uri('image'),
        status=1)
    text = run('qemu-io', '-r', '-f', 'raw', '-c', 'read 0 512', '-c',
               'write 0 512', daemon.uri('image'), status=1)
    assert 'read 512/512' in text and 'wrote' not in text, text


# -- haggling -----------------------------------------------------------------

@pytest.mark.parametrize('flags,zeros', [(1, 124), (3, 0)])
def test_export_name(daemon, content, flags, zeros):
    data = content['image']
    with daemon.session() as session:
        session.haggle(flags)
        session.send_option(nbd.EXPORT_NAME, b'image')
        assert struct.unpack('>QH', session.receive(10))[0] == len(data)
        assert session.receive(zeros) == bytes(zeros)
        assert session.read(77, 1000) == data[77:1077]


def test_export_name_that_there_is_not(daemon):
    with daemon.session() as session:
        session.haggle().send_option(nbd.EXPORT_NAME, b'nothing')
        with pytest.raises(EOFError):
            session.receive(1)
    require_alive(daemon)


def test_options(daemon, content):
    with daemon.session() as session:
        option = session.haggle().option
        names = [data[4:].decode() for kind, data in option(nbd.LIST)
                 if kind == nbd.SERVER]
        assert names == sorted(content)
        for unknown in (0, nbd.STARTTLS, 4, 11, 77, 1 << 32 - 1):
            assert option(unknown, b'x')[0][0] == nbd.UNSUPPORTED
        # Before structured replies there are no contexts.
        for context in (nbd.LIST_CONTEXTS, nbd.SET_CONTEXTS):
            assert option(context, nbd.contexts(b'image'))[0][0] == (
                nbd.INVALID)
        for bare in (nbd.LIST, nbd.STRUCTURED):
            assert option(bare, b'x')[0][0] == nbd.INVALID
        assert option(nbd.STRUCTURED) == [(nbd.ACK, b'')]
        replies = option(nbd.INFO, nbd.name_and(b'image', 0, 1, 2, 3, 99))
        assert [kind for kind, _ in replies] == [nbd.INFORMATION] * 4 + [
            nbd.ACK]
        told = {data[:2]: data[2:] for _, data in replies[:4]}
        upload = daemon.request('HEAD', '/v1/images/image').headers['etag']
        assert told[b'\0\1'] == b'image'
        assert told[b'\0\2'].decode() == f'upload {upload[1:-1]}'
        assert told[b'\0\3'] == struct.pack('>III', 1, BLOCK, 32 * MIB)
        # After INFO the negotiation continues.
        assert [kind for kind, _ in option(nbd.INFO, nbd.name_and(
            b'empty'))] == [nbd.INFORMATION, nbd.ACK]
        assert option(nbd.ABORT, b'ignored') == [(nbd.ACK, b'')]
        assert session.gone()


@pytest.mark.parametrize('name', [
    b'', b'nothing', b'../images/image', b'image\0', b'i' * 129, b'i' * 4096,
    b'\xff\xfe', '\u00e9'.encode(), b'image\n', b'/', b'.', b'..'])
def test_names_that_there_are_not(daemon, name):
    with daemon.session() as session:
        session.haggle()
        for option in (nbd.INFO, nbd.GO):
            (kind, text), = session.option(option, nbd.name_and(name))
            assert kind == nbd.UNKNOWN and text.decode()
        # The negotiation continues.
        assert session.option(nbd.GO, nbd.name_and(b'image'))[-1][0] == (
            nbd.ACK)
    require_alive(daemon)


def test_contexts(daemon):
    with daemon.session() as session:
        session.haggle().option(nbd.STRUCTURED)

        def ask(option, *queries, name=b'image'):
            return session.option(option, nbd.contexts(name, *queries))

        none = [(nbd.ACK, b'')]
        listed = [(nbd.CONTEXT, b'\0\0\0\0base:allocation'), *none]
        for queries in ((), (b'base:',), (b'x:', b'base:allocation')):
            assert ask(nbd.LIST_CONTEXTS, *queries) == listed
        for queries in ((b'base:x',), (b'x:y', b'')):
            assert ask(nbd.LIST_CONTEXTS, *queries) == none
        for queries in ((), (b'base:',), (b'qemu:dirty-bitmap:x',)):
            assert ask(nbd.SET_CONTEXTS, *queries) == none
        assert ask(nbd.SET_CONTEXTS, b'x:y', b'base:allocation')[0] == (
            nbd.CONTEXT, b'\0\0\0\1base:allocation')
        # The last setting counts; no context is set now.
        assert ask(nbd.SET_CONTEXTS) == none
        session.structured = True
        assert session.option(nbd.GO, nbd.name_and(b'image'))[-1] == none[0]
        assert session.answer(nbd.STATUS, 0, 512)[0] == nbd.EINVAL


def test_a_context_is_of_one_export(daemon):
    with daemon.session() as session:
        session.haggle().option(nbd.STRUCTURED)
        session.structured = True
        session.option(nbd.SET_CONTEXTS,
                       nbd.contexts(b'other', b'base:allocation'))
        session.option(nbd.GO, nbd.name_and(b'image'))
        assert session.answer(nbd.STATUS, 0, 512)[0] == nbd.EINVAL


# -- requests -----------------------------------------------------------------

@pytest.mark.parametrize('structured,flags', [
    (False, 0), (True, 0), (True, nbd.DF)])
def test_reads(daemon, content, structured, flags):
    data = content['image']
    rng = random.Random(5)
    with daemon.export('image', structured=structured) as session:
        assert session.size == len(data)
        # HAS_FLAGS, READ_ONLY, FLUSH, MULTI_CONN, CACHE; DF.
        assert session.flags == 0x507 | (0x80 if structured else 0)
        ranges = [(0, 1), (0, len(data)), (len(data) - 1, 1), (4095, 2)]
        for _ in range(60):
            first, end = sorted(rng.sample(range(len(data)), 2))
            ranges.append((first, end - first))
        for offset, length in ranges:
            assert session.read(offset, length, flags=flags, cookie=rng
                                .getrandbits(64)) == (
                data[offset:offset + length])


def send_all(session, asked):
    for cookie, (offset, length) in asked.items():
        session.send_request(nbd.READ, offset, length, cookie=cookie)


def test_many_requests_at_once(daemon, content):
    """Answers come in any order, each complete."""
    data = content['other']
    rng = random.Random(6)
    for structured in (False, True):
        with daemon.export('other', structured=structured) as session:
            asked = {}
            for cookie in range(300):
                length = rng.randrange(1, 100_000)
                asked[cookie] = rng.randrange(len(data) - length), length
            lengths = {cookie: n for cookie, (_, n) in asked.items()}
            sending = threading.Thread(target=send_all, args=(
                session, dict(asked)), daemon=True)
            sending.start()
            while asked:
                cookie, error, found = session.reply(lengths)
                assert not error
                offset, length = asked[cookie]
                if structured:
                    (at, found), last = found
                    # Each read has a reply of one chunk, as they are that
                    # small.
                    assert last and at == offset
                assert found == data[offset:offset + length]
                del asked[cookie]
            sending.join(nbd.LIMIT)


def test_extents(daemon, content):
    data = content['image']
    rng = random.Random(7)
    with daemon.export('image') as session:
        for _ in range(100):
            first, end = sorted(rng.sample(range(len(data)), 2))
            for flags in (0, nbd.ONE):
                error, extents = session.answer(
                    nbd.STATUS, first, end - first, flags=flags)
                assert not error
                assert flags == 0 or len(extents) == 1
                at = first
                for length, status in extents:
                    assert length and status in (0, 3)
                    assert not status or not any(data[at:at + length])
                    at += length
                assert at == end if flags == 0 else at <= end
        # The status shows every block of zeros.
        zeros = sum(length for length, status in session.answer(
            nbd.STATUS, 0, len(data))[1] if status)
        with repositories.open_repository(
                pathlib.Path(daemon.options['datadir'])) as opened:
            assert zeros == opened.stat('image').zero_bytes > 0


@pytest.mark.parametrize('structured', [False, True])
def test_what_is_refused(daemon, content, structured):
    """Wrong requests are refused, and the session stays usable."""
    data = content['image']
    size = len(data)
    with daemon.export('image', structured=structured) as session:
        for command, offset, length, flags, error in [
                (nbd.READ, size, 1, 0, nbd.EINVAL),
                (nbd.READ, size - 1, 2, 0, nbd.EINVAL),
                (nbd.READ, 1 << 63, 1 << 31, 0, nbd.EINVAL),
                (nbd.READ, (1 << 64) - 1, (1 << 32) - 1, 0, nbd.EINVAL),
                (nbd.READ, 0, (1 << 32) - 1, 0, nbd.EINVAL),
                (nbd.READ, 0, 0, 0, nbd.EINVAL),
                (nbd.READ, 0, 1, 1, nbd.EINVAL),
                (nbd.READ, 0, 1, nbd.ONE, nbd.EINVAL),
                (nbd.STATUS, size, 1, 0, nbd.EINVAL),
                (nbd.STATUS, 0, 0, 0, nbd.EINVAL),
                (nbd.STATUS, 0, 512, nbd.DF, nbd.EINVAL),
                (nbd.CACHE, size - 1, 2, 0, nbd.EINVAL),
                (nbd.TRIM, 0, 512, 0, nbd.EPERM),
                (nbd.ZEROES, 0, 512, 0, nbd.EPERM),
                (8, 0, 512, 0, nbd.EINVAL), (65535, 1, 1, 65535, nbd.EINVAL)]:
            assert session.answer(command, offset, length, flags=flags)[
                0] == error, (command, offset, length)
        for length in (0, 1, 100_000, 32 * MIB):
            session.send_request(nbd.WRITE, 0, length, data=bytes(length))
            assert session.reply({1: 0})[1] == nbd.EPERM
        # Requests that change no data are carried out.
        assert session.answer(nbd.FLUSH) == (0, b'')
        assert session.answer(nbd.CACHE, 5, size - 5) == (0, b'')
        assert session.read(0, 100) == data[:100]
        session.send_request(nbd.READ, 0, 1000)
        session.send_request(nbd.DISC)
        # Requests from before the end are answered.
        assert session.reply({1: 1000})[1] == 0
        assert session.gone()
    require_alive(daemon)


def test_large_images(tmp_path):
    """Offsets beyond 32 bits work; long zeros take no memory."""
    path = repositories.create(tmp_path / 'large')
    end = repositories.noise(10_000)
    size = (9 << 30) + len(end)
    with repositories.open_repository(path) as opened, (
            opened.begin('large')) as transaction:
        transaction.add_zeros(9 << 30)
        transaction.write(end)
        transaction.commit()
    with Daemon(path) as daemon:
        daemon.start()
        with daemon.export('large') as session:
            assert session.size == size
            assert session.read(size - 5000, 5000) == end[-5000:]
            assert session.answer(nbd.STATUS, 5, (1 << 32) - 1) == (
                0, [((1 << 32) - 1, 3)])
            # A single piece cannot have so many bytes.
            assert session.answer(nbd.READ, 0, 32 * MIB + 1, flags=nbd.DF)[
                0] == nbd.EINVAL
            before = daemon.memory('VmHWM')
            session.send_request(nbd.CACHE, 0, 128 * MIB)
            # The answer comes in as many chunks as it takes.
            session.send_request(nbd.READ, 1, 128 * MIB, cookie=2)
            left, over = 128 * MIB, False
            while not over:
                cookie, error, found = session.reply({1: 0})
                assert not error
                if cookie == 2:
                    (_, piece), over = found
                    left -= len(piece)
            assert left == 0
            assert daemon.memory('VmHWM') - before < 32 * MIB


# -- hostile clients ----------------------------------------------------------

def beginnings():
    """Yield possible beginnings of a session, piece by piece."""
    flags = struct.pack('>I', 3)
    yield flags, b''
    for option, data in (
            (nbd.EXPORT_NAME, b'image'), (nbd.LIST, b''), (nbd.ABORT, b''),
            (nbd.INFO, nbd.name_and(b'image', 3)),
            (nbd.GO, nbd.name_and(b'image', 0, 1, 3)),
            (nbd.STRUCTURED, b''),
            (nbd.LIST_CONTEXTS, nbd.contexts(b'image', b'base:')),
            (nbd.SET_CONTEXTS, nbd.contexts(b'image', b'base:allocation'))):
        yield flags, b'IHAVEOPT' + struct.pack(
            '>II', option, len(data)) + data


def test_every_beginning_cut_off(daemon):
    """The daemon survives a session that ends at any byte of these."""
    for flags, option in beginnings():
        whole = flags + option
        for end in range(len(whole)):
            with daemon.session() as session:
                session.send(whole[:end])
    daemon.wait_for(lambda: daemon.counts()['exports'] == 0)
    require_alive(daemon)


def test_every_option_with_wrong_lengths(daemon):
    """Options whose data is cut off, too long or inconsistent are refused."""
    for option, data in ((nbd.INFO, nbd.name_and(b'image', 1, 3)),
                         (nbd.GO, nbd.name_and(b'image', 1, 3)),
                         (nbd.SET_CONTEXTS, nbd.contexts(
                             b'image', b'base:allocation', b'x:')),
                         (nbd.LIST_CONTEXTS, nbd.contexts(b'i', b'base:'))):
        with daemon.session() as session:
            session.haggle().option(nbd.STRUCTURED)
            for end in range(len(data)):
                (kind, _), = session.option(option, data[:end])
                assert kind == nbd.INVALID, (option, end)
            (kind, _), = session.option(option, data + b'\0')
            assert kind == nbd.INVALID
            for at in (0, 4 + 5):
                # Such a length, or count, is impossible.
                wrong = data[:at] + b'\xff\xff\xff\xff' + data[at + 4:]
                (kind, _), = session.option(option, wrong)
                assert kind == nbd.INVALID, (option, at)
    require_alive(daemon)


@pytest.mark.parametrize('begin', ['haggling', 'reading'])
def test_hung_up_on(own, begin):
    """The daemon disconnects such a client, and logs a line."""
    beginnings = [
        struct.pack('>I', 0), struct.pack('>I', 2), struct.pack('>I', 7),
        b'\xff\xff\xff\xff', b'GET / HTTP/1.1\r\n\r\n' * 2,
        struct.pack('>I', 3) + b'IHAVEOPX' + bytes(8),
        struct.pack('>I', 3) + b'IHAVEOPT' + struct.pack('>II', 7, 65537),
        struct.pack('>I', 3) + b'IHAVEOPT' + b'\xff' * 8]
    requests = [
        bytes(28), b'\xff' * 28, b'\x25\x60\x95\x14' + bytes(24),
        struct.pack('>IHHQQI', 0x25609513, 0, nbd.WRITE, 1, 0, 32 * MIB + 1),
        struct.pack('>IHHQQI', 0x25609513, 0, nbd.WRITE, 1, 0, (1 << 32) - 1)]
    line = 'An NBD client' + (' of image image' if begin == 'reading' else '')
    for number, data in enumerate(
            requests if begin == 'reading' else beginnings):
        with (own.export('image') if begin == 'reading'
              else own.session()) as session:
            if begin == 'haggling':
                session.receive(18)
            session.send(data)
            assert session.gone()
        own.wait_for(lambda: own.text().count(line) == number + 1)
    require_alive(own)


def test_a_flood_of_bad_clients(own):
    """The log stays short."""
    begin = time.monotonic()
    for _ in range(300):
        with own.session() as session:
            session.receive(18)
            session.send(b'\xff\xff\xff\xff')
            assert session.gone()
    require_alive(own)
    periods = 2 + (time.monotonic() - begin) // limited.SECONDS
    assert 0 < own.text().count('An NBD client') <= (
        limited.MESSAGES * periods)


def test_any_bytes(daemon):
    """The daemon survives seeded noise, and messages with changed bytes."""
    rng = random.Random(11)
    good = [flags + option for flags, option in beginnings()]
    requests = b''.join(
        struct.pack('>IHHQQI', 0x25609513, 0, rng.choice((0, 3, 5, 7)),
                    cookie, rng.randrange(100_000), rng.randrange(1, 9999))
        for cookie in range(20))
    for number in range(200):
        data = bytearray(rng.choice(good[5:6] + good) + requests)
        if number % 3 == 0:
            data = bytearray(struct.pack('>I', 3)
                             + rng.randbytes(rng.randrange(200)))
        else:
            for _ in range(rng.randrange(4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        with daemon.session() as session:
            session.socket.settimeout(0.02 if number % 20 else 5)
            with contextlib.suppress(OSError, EOFError):
                session.send(data)
                session.receive(rng.randrange(100_000))
    daemon.wait_for(lambda: daemon.counts()['exports'] == 0)
    require_alive(daemon)


def ask_much(stack, daemon, sessions):
    """Send thousands of requests, and read none of the answers."""
    for number in range(sessions):
        session = stack.enter_context(daemon.export(
            'other', structured=number % 2))
        session.socket.setblocking(False)
        # The daemon takes no more, or it has ended the session already.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for cookie in range(2000):
                session.send_request(nbd.READ, 0, 5 * MIB, cookie=cookie)


def test_who_reads_no_answers(repository, content):
    """Memory is bounded, and others are served meanwhile."""
    with Daemon(repository, write_timeout=3600) as daemon, (
            contextlib.ExitStack()) as stack:
        daemon.start()
        before = daemon.memory()
        ask_much(stack, daemon, 100)
        with daemon.export('image') as session:
            assert session.read(0, 6_000_000) == (
                content['image'][:6_000_000])
        # The limit is the shared memory, a piece for each, and 6,400 requests.
        assert daemon.memory() - before < (256 + 25 + 180) * MIB
        require_alive(daemon)


def test_who_reads_no_answers_is_cut_off(repository):
    with Daemon(repository, write_timeout=3) as daemon, (
            contextlib.ExitStack()) as stack:
        daemon.start()
        ask_much(stack, daemon, 4)
        daemon.wait_for(lambda: daemon.counts()['exports'] == 0)
        require_alive(daemon)


def test_deadlines(repository, content):
    """A message has a time limit, and a pause between two has none."""
    with Daemon(repository, header_timeout=2) as daemon:
        daemon.start()
        with (daemon.export('image') as idle, daemon.export('image') as half,
              daemon.session() as silent, daemon.session() as slow):
            since = time.monotonic()
            half.send(b'\x25\x60')
            # After a pause of this test the session may be over already here.
            with contextlib.suppress(BrokenPipeError):
                slow.haggle().send(b'IHAVE')
            for session in (silent, slow, half):
                assert session.gone()
            time.sleep(max(0, 5 - (time.monotonic() - since)))
            assert idle.read(0, 10) == content['image'][:10]
        require_alive(daemon)


def test_limit_of_connections(daemon, content):
    with contextlib.ExitStack() as stack:
        # Sessions without a request are closed in favour of others.
        haggling = [stack.enter_context(daemon.session())
                    for _ in range(MAX_CONNECTIONS)]
        stack.enter_context(daemon.export('image'))
        assert haggling[0].gone()
        for _ in range(MAX_CONNECTIONS - 1):
            stack.enter_context(daemon.export('image'))
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                stack.enter_context(daemon.session()).receive(18)
        # The other socket has a limit of its own.
        assert daemon.request('GET', '/v1/status').status == 200

    def served():
        with contextlib.suppress(EOFError), daemon.export('image') as session:
            return session.read(5, 5) == content['image'][5:10]

    daemon.wait_for(served)


@pytest.mark.skipif(os.geteuid() != 0, reason='only root becomes others')
def test_wrong_user(daemon):
    assert os.stat(daemon.nbd).st_mode & 0o777 == 0o600
    path = str(daemon.nbd)
    assert daemons.connect_as(path, 65534, b'') is None
    os.chmod(path, 0o666)
    try:
        assert daemons.connect_as(path, 65534, b'x') == b''
        assert daemons.connect_as(path, 0, b'x') == b'NBDMAGICI'
        assert 'User 65534 was refused' in daemon.text()
    finally:
        os.chmod(path, 0o600)


@pytest.mark.skipif(os.geteuid() != 0, reason='only root becomes others')
def test_users(own):
    """The socket has users of its own; SIGHUP changes them."""
    path = str(own.nbd)
    assert daemons.connect_as(path, 65534, b'x') is None
    own.write_config(nbd_users='65534')
    own.process.send_signal(signal.SIGHUP)
    own.wait_for(lambda: daemons.connect_as(path, 65534, b'x') == (
        b'NBDMAGICI'))
    assert daemons.connect_as(path, 65533, b'x') == b''
    assert daemons.connect_as(own.socket, 65534, b'x') is None
    own.write_config(nbd_users=None)
    own.process.send_signal(signal.SIGHUP)
    own.wait_for(lambda: daemons.connect_as(path, 65534, b'x') is None)


# -- images that change -------------------------------------------------------

def damage_last_block(path, group=1):
    found = repositories.Group(path, group)
    found.data[-64:] = bytes(byte ^ 0xff for byte in found.data[-64:])
    found.save()


@pytest.mark.parametrize('structured', [False, True])
def test_damage(tmp_path, structured):
    """Reading a damaged block is an error; the rest can be read (I7)."""
    data = repositories.noise(400 * BLOCK)
    path = repositories.create(tmp_path / 'damaged', group_slots=512)
    with repositories.open_repository(path, codec='none') as opened:
        repositories.put(opened, 'image', data)
    damage_last_block(path)
    with Daemon(path, cache_mib=0) as daemon:
        daemon.start()
        with daemon.export('image', structured=structured) as session:
            bad = []
            for offset in range(0, len(data), BLOCK):
                error, found = session.answer(nbd.READ, offset, BLOCK)
                if error:
                    assert error == nbd.EIO
                    assert not structured or 'groups/00000001' in found
                    bad.append(offset)
                else:
                    assert found == data[offset:offset + BLOCK]
            # It is one block, of the last that were stored.
            assert len(bad) == 1
            # A read over it fails, but reads beside it succeed.
            for _ in range(3):
                error, found = session.answer(nbd.READ, 0, len(data))
                assert error == nbd.EIO
            assert session.answer(nbd.CACHE, 0, len(data))[0] == nbd.EIO
            assert session.read(0, bad[0]) == data[:bad[0]]
        assert daemon.counts()['errors'] == 5
        # The damage is logged once, with the file.
        lines = [line for line in daemon.text().splitlines()
                 if 'cannot be read at' in line]
        assert len(lines) == 1 and 'groups/00000001' in lines[0]
        require_alive(daemon)


def test_failed_reads_do_not_fill_the_log(tmp_path):
    """The lines of all connections are counted together."""
    path = repositories.create(tmp_path / 'damaged', group_slots=512)
    with repositories.open_repository(path, codec='none') as opened:
        repositories.put(opened, 'image', repositories.noise(8 * BLOCK))
    damage_last_block(path)
    with Daemon(path, cache_mib=0) as daemon:
        daemon.start()
        began = time.monotonic()
        for _ in range(2 * limited.MESSAGES):
            with daemon.export('image') as session:
                assert session.answer(nbd.READ, 0, 8 * BLOCK)[0] == nbd.EIO
        windows = 1 + (time.monotonic() - began) // limited.SECONDS
        lines = [line for line in daemon.text().splitlines()
                 if 'cannot be read at' in line]
        assert 0 < len(lines) <= windows * limited.MESSAGES
        assert 'groups/00000001' in lines[0]
        assert daemon.counts()['errors'] == 2 * limited.MESSAGES


@pytest.mark.needs('nbd')
def test_deleted_while_exported(own, content):
    """It stays readable, and its space comes back afterwards (I12)."""
    with own.export('other') as session:
        with repositories.open_repository(own.options['datadir']) as opened:
            opened.delete('other')
        run('nbdinfo', own.uri('other'), status=1)
        for _ in range(2):
            assert own.run('collect')['last']['error'] is None
            assert session.read(0, len(content['other'])) == content['other']
        before = own.status()['space']['unique_bytes']
    own.wait_for(lambda: own.counts()['exports'] == 0)

    def came_back():
        own.run('collect')
        return own.status()['space']['unique_bytes'] <= before - 2 * MIB

    own.wait_for(came_back)
    with own.export('image') as session:
        assert session.read(0, len(content['image'])) == content['image']


# -- images that arrive -------------------------------------------------------

def test_on_a_compute_host(tmp_path):
    """An absent image is fetched when it is named, any part first."""
    data = repositories.noise(48 * MIB)
    with nbd.compute_host(tmp_path, image=data, other=b'other') as (
            cache, link):
        path = cache.options['nbd_socket']
        with nbd.Session(path) as session:
            # No image is here, and an image that exists nowhere is unknown.
            assert session.haggle().option(nbd.LIST) == [(nbd.ACK, b'')]
            assert session.option(nbd.GO, nbd.name_and(b'nothing'))[0][
                0] == nbd.UNKNOWN
        # This is as much as is requested at once, and some more.
        link.allow(24 * MIB)
        with nbd.Session(path).go(b'image') as session:
            assert session.size == len(data)
            assert session.read(0, BLOCK) == data[:BLOCK]
            repositories.eventually(lambda: link.left < 65536)
            # A read of the end does not wait for all bytes before it.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                end = pool.submit(session.read, len(data) - BLOCK, BLOCK)
                link.allow(16 * MIB)
                assert end.result(nbd.LIMIT) == data[-BLOCK:]
            assert not cache.client().images()
            link.allow(None)
            rng = random.Random(4)
            for offset in (len(data) - BLOCK, 0, *(
                    rng.randrange(len(data) - MIB) for _ in range(10))):
                assert session.read(offset, BLOCK) == (
                    data[offset:offset + BLOCK])
            error, extents = session.answer(nbd.STATUS, 0, len(data))
            assert not error and sum(n for n, _ in extents) == len(data)
            assert session.read(0, len(data)) == data
            repositories.eventually(lambda: 'image' in [
                image['image_id'] for image in cache.client().images()])
            # The same session continues with the image that is here.
            assert session.read(5, MIB) == data[5:MIB + 5]
        with nbd.Session(path) as session:
            assert len(session.haggle().option(nbd.LIST)) == 2
        assert cache.status()['cache']['arrivals']['received_bytes'] < (
            1.2 * len(data))
        require_alive(cache)


# -- the daemon's end ---------------------------------------------------------

def test_stop(own, content):
    """A waiting guest does not keep the daemon from ending."""
    with own.export('image') as session, own.session() as other:
        assert session.read(0, 10) == content['image'][:10]
        assert own.stop() == 0
        assert session.gone() and other.gone()
    assert not own.nbd.exists()
    assert 'cut off' not in own.text()


def test_stop_in_the_middle(own, content):
    """A running answer is completed."""
    with own.export('image', structured=False) as session:
        session.send_request(nbd.READ, 0, 6_000_000)
        session.receive(16)
        own.process.send_signal(signal.SIGTERM)
        # The answer is more than the kernel's buffers: it cannot be over yet.
        repositories.eventually(lambda: not own.nbd.exists())
        assert session.receive(6_000_000) == content['image'][:6_000_000]
        assert session.gone()
        # The daemon is ending: a second SIGTERM might meet no handler any
        # more.
        assert own.process.wait(nbd.LIMIT) == 0
    assert 'cut off' not in own.text()


class QemuIO:
    """An interactive qemu-io."""

    def __init__(self, image):
        nbd.need('qemu-io')
        self._process = subprocess.Popen(
            ['qemu-io', '-r', image], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            bufsize=1)

    def send(self, command):
        self._process.stdin.write(f'{command}\n')
        self._process.stdin.flush()

    def end(self):
        """Return all its output, when it has done everything."""
        return self._process.communicate('quit\n', timeout=nbd.LIMIT)[0]


def described(daemon, image_id, **fields):
    """Return QEMU's options for an image."""
    return 'json:' + json.dumps({'driver': 'raw', 'file': {
        'driver': 'nbd', 'export': image_id,
        'server': {'type': 'unix', 'path': str(daemon.nbd)}, **fields}})


@pytest.mark.needs('qemu')
@pytest.mark.parametrize('delay', [0, 60])
def test_killed(own, delay):
    """With a delay QEMU connects to the next daemon; without, reads fail."""
    reader = QemuIO(described(own, 'image', **{'reconnect-delay': delay}))
    reader.send('read 0 4096')
    own.wait_for(lambda: own.counts()['bytes'] >= 4096)
    own.kill()
    reader.send('read 1048576 4096')
    if not delay:
        text = reader.end()
        assert text.count('read 4096/4096') == 1
        assert 'read failed' in text
        return
    own.start()
    own.wait_for(lambda: own.counts()['bytes'] >= 4096)
    text = reader.end()
    assert text.count('read 4096/4096') == 2, text


# -- a guest ------------------------------------------------------------------

# Long: a guest boots, without KVM.
@pytest.mark.needs('bootimage', 'guest', 'qemu')
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_guest_boots_though_the_daemon_is_killed(tmp_path):
    """A guest with a file over the image boots, and reads little of it."""
    raw = disk_images.images().raw
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as opened:
        opened.put('boot', raw)
    read = []
    with Daemon(path) as daemon:
        daemon.start()
        image = described(daemon, 'boot', **{'reconnect-delay': 120})

        def kill_once():
            with contextlib.suppress(OSError, AttributeError):
                if not read and daemon.counts()['bytes'] > 4 * MIB:
                    read.append(daemon.counts()['bytes'])
                    daemon.kill()
                    daemon.start()

        with nbd.Guest(tmp_path, image) as guest:
            assert guest.wait_until_up(kill_once) == (
                'a disk of tools/boot_image', 1)
            read.append(daemon.counts()['bytes'])
    assert len(read) == 2
    assert 4 * MIB < sum(read) < raw.stat().st_size / 4


@pytest.mark.long
def test_a_guest_boots_from_an_image_on_its_way(tmp_path):
    """The guest runs before the image is on its host."""
    with nbd.compute_host(tmp_path, boot=disk_images.images().raw) as (cache,
                                                                       link):
        # The image's blocks, which take 54 MiB, come in 27 s at the soonest.
        link.slow(2 * MIB)
        image = f'nbd+unix:///boot?socket={cache.options["nbd_socket"]}'
        with nbd.Guest(tmp_path, image) as guest:
            assert guest.wait_until_up() == ('a disk of tools/boot_image', 1)
            assert not cache.client().images()
            link.allow(None)
            cache.wait_for(lambda: cache.client().images())
