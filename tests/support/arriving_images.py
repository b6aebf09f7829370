# SPDX-License-Identifier: Apache-2.0

"""Two hosts, and images that arrive at one from the other, for tests."""

import collections
import contextlib
import hashlib
import socket
import threading

import pytest

from dedupd.compute.cache import arrival_list
from dedupd.compute.cache import arriving_image
from dedupd.compute.cache import image_pull
from glance_dedup.base import hashes
from glance_dedup.client import daemon_client
from glance_dedup.transfer import image_assembly
from glance_dedup.transfer import pull
from tests.support import daemons
from tests.support import repositories

noise = repositories.noise
mixture = repositories.mixture
BLOCK = 4096
MIB = 1 << 20
LIMIT = 60      # seconds for anything


class Relay:
    """A relay between a client and a daemon that counts every request.

    :ivar left: bytes of blocks that may still pass; None: all. At 0 the relay
        holds back the rest
    :ivar refused: tokens that get 401
    :ivar change: changes the bytes from the daemon
    """

    def __init__(self, path, target):
        self._target = target
        self._changed = threading.Condition()
        self.left = None
        self.refused = set()
        self.change = lambda data: data
        self.requests = collections.Counter()
        self.passed = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self.address = f'unix:{path}'
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def allow(self, left):
        """Let this many more bytes of blocks pass; None: all."""
        with self._changed:
            self.left = left
            self._changed.notify_all()

    def connect(self, token):
        return daemon_client.Client(self.address, token=token)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                threading.Thread(target=self._relay, args=(client,),
                                 daemon=True).start()

    def _relay(self, client):
        server = socket.socket(socket.AF_UNIX)
        self._sockets.append(server)
        kind = ['']
        try:
            server.connect(self._target)
            threading.Thread(target=self._back, args=(server, client, kind),
                             daemon=True).start()
            stream = client.makefile('rb')
            while request := self._request(stream):
                head, body = request
                kind[0] = head.split()[1].partition(b'?')[0].rpartition(
                    b'/')[2].decode()
                self.requests[kind[0]] += 1
                if any(f'x-auth-token: {token}\r\n'.encode() in head.lower()
                       for token in self.refused):
                    self.requests['refused'] += 1
                    client.sendall(b'HTTP/1.1 401 Unauthorized\r\n'
                                   b'Content-Length: 0\r\n\r\n')
                else:
                    server.sendall(head + body)
        except OSError:
            pass
        finally:
            for sock in (client, server):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    @staticmethod
    def _request(stream):
        head = b''
        while not head.endswith(b'\r\n\r\n'):
            line = stream.readline()
            if not line:
                return None
            head += line
        length = [line for line in head.lower().split(b'\r\n')
                  if line.startswith(b'content-length:')]
        return head, stream.read(int(length[0][15:])) if length else b''

    def _back(self, server, client, kind):
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if kind[0] == 'blocks':
                    data = self._hold(client, data)
                client.sendall(self.change(data))
                self.passed += len(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _hold(self, client, data):
        """Send as many bytes as may pass now; return those to send later."""
        while True:
            with self._changed:
                if self.left is None:
                    return data
                now = min(self.left, len(data))
                self.left -= now
                if now == len(data):
                    return data
                if not now:
                    self._changed.wait(LIMIT)
            client.sendall(self.change(data[:now]))
            self.passed += now
            data = data[now:]

    def close(self):
        self.allow(None)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def hashes_of(data):
    return {name: hashlib.new(name, data).hexdigest()
            for name in ('sha512', 'md5')}


class Hosts:
    """A storing host, and a host that lacks its images."""

    def __init__(self, tmp_path, **parameters):
        self.there = repositories.create(tmp_path / 'there')
        self.here = repositories.create(tmp_path / 'here', **parameters)
        self.theirs = repositories.open_repository(self.there)
        self.ours = repositories.open_repository(self.here)
        self.daemon = daemons.Daemon(self.there)
        self.begun, self.arrived = [], []

    def put(self, data, image_id='one', known=None, **options):
        """Store an image on the storing host.

        :param known: the hashes of its bytes, as the storing host records them
        """
        stat = repositories.put(self.theirs, image_id, data, **options)
        if known is None:
            known = hashes_of(data)
        for item in known.items():
            hashes.record(self.theirs.path, stat, hashes.Hash(*item))
        return arriving_image.Expected(
            len(data), hash_name='sha512',
            hash_value=hashlib.sha512(data).hexdigest())

    def require_nothing_of(self, image_id):
        """Require that no image and no recipe in flight is left."""
        assert image_id not in self.ours.images()
        repositories.eventually(lambda: not any(
            map(self.is_in_flight, repositories.spool(self.here))), LIMIT)

    def is_in_flight(self, name):
        """Return True for a recipe that has no name in images/."""
        try:
            return (self.here / 'spool' / name).stat().st_nlink != 2
        except FileNotFoundError:
            return False

    def ended(self):
        repositories.eventually(lambda: not self.arrivals._arrivals, LIMIT)


@pytest.fixture
def hosts(tmp_path):
    with serving(Hosts(tmp_path)) as hosts:
        yield hosts


@contextlib.contextmanager
def serving(hosts):
    with hosts.daemon as daemon:
        daemon.start()
        hosts.relay = Relay(daemon.directory / 'relay', daemon.socket)
        hosts.arrivals = arrival_list.Arrivals(
            hosts.ours, hosts.relay.connect,
            on_begin=lambda *args: hosts.begun.append(args),
            on_arrived=lambda *args: hosts.arrived.append(args))
        yield hosts
        hosts.arrivals.stop(LIMIT)
        hosts.relay.close()
    hosts.ours.close()
    hosts.theirs.close()


@pytest.fixture
def small(monkeypatch):
    """Set lots, memory and sync points so small that there are many."""
    monkeypatch.setattr(image_assembly, 'READ_LOT_BYTES', 64 << 10)
    monkeypatch.setattr(pull, 'SYNC_BYTES', 256 << 10)
    monkeypatch.setattr(image_pull, 'AHEAD_BYTES', 256 << 10)
    monkeypatch.setattr(image_pull, 'NEAR_BYTES', 16 << 10)


def read_at(reading, offset, length):
    data = bytearray(length)
    return bytes(data[:reading.readinto(memoryview(data), offset)])


def follow(reading, piece=100_000):
    """Read in order, and only the bytes that are available without waiting."""
    rung = threading.Event()
    reading.on_more(rung.set)
    found = b''
    while len(found) < reading.size:
        rung.clear()
        ready = reading.available(len(found))
        if not ready:
            assert rung.wait(LIMIT), 'nothing came, and nothing was told'
            continue
        found += read_at(reading, len(found), min(ready, piece))
    return found


def at_once(number, function):
    """Call a function in several threads at once and return the results."""
    barrier = threading.Barrier(number)
    results = []

    def call():
        barrier.wait(LIMIT)
        try:
            results.append(function())
        except Exception as e:
            results.append(e)

    threads = [threading.Thread(target=call) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return results
