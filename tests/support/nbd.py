# SPDX-License-Identifier: Apache-2.0

"""A client of NBD and a guest, for tests of images as disks.

The client is written from the protocol's document, apart from the daemon's own
code, and sends any bytes that a test gives it. The guest is a real one, in
QEMU.
"""

import contextlib
import hashlib
import pathlib
import shutil
import socket
import struct
import subprocess
import threading
import time

from tests.cloud import boot
from tests.cloud import disk_images
from tests.support import cache_harness
from tests.support import certificates
from tests.support import daemons
from tests.support import ports
from tests.support import repositories

LIMIT = 60
#: Seconds for a guest, whose processor is emulated.
BOOT_LIMIT = 180

EXPORT_NAME, ABORT, LIST, STARTTLS, INFO, GO, STRUCTURED = 1, 2, 3, 5, 6, 7, 8
LIST_CONTEXTS, SET_CONTEXTS = 9, 10
ACK, SERVER, INFORMATION, CONTEXT = 1, 2, 3, 4
UNSUPPORTED, INVALID, UNKNOWN = (1 << 31 | n for n in (1, 3, 6))
READ, WRITE, DISC, FLUSH, TRIM, CACHE, ZEROES, STATUS = range(8)
DF, ONE = 1 << 2, 1 << 3
EPERM, EIO, EINVAL = 1, 5, 22
NONE, DATA, EXTENTS, ERROR = 0, 1, 5, 1 << 15 | 1

REQUEST, SIMPLE, CHUNK = 0x25609513, 0x67446698, 0x668e33ef


def need(program):
    """Fail a test if programs of the distribution are missing."""
    assert shutil.which(program), f'{program} is missing: see bindep.txt, test'


def name_and(name, *numbers):
    """Return the data of INFO and GO: a name, and information types."""
    data = struct.pack('>I', len(name)) + name
    return data + struct.pack(f'>H{len(numbers)}H', len(numbers), *numbers)


def contexts(name, *queries):
    data = struct.pack('>I', len(name)) + name
    data += struct.pack('>I', len(queries))
    return data + b''.join(struct.pack('>I', len(q)) + q for q in queries)


class Session:
    """A connection; `haggle` and `option` first, then requests.

    :param path: of the socket; or a connected socket
    """

    def __init__(self, path):
        if isinstance(path, socket.socket):
            self.socket = path
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(LIMIT)
            self.socket.connect(str(path))
        self.structured = False
        self.size = self.flags = None

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def send(self, *pieces):
        self.socket.sendall(b''.join(pieces))

    def receive(self, length):
        data = bytearray()
        while len(data) < length:
            piece = self.socket.recv(min(length - len(data), 1 << 20))
            if not piece:
                raise EOFError(bytes(data))
            data += piece
        return bytes(data)

    def gone(self):
        """Return True once the server has closed; discard what it sent."""
        with contextlib.suppress(ConnectionResetError):
            while self.socket.recv(1 << 16):
                pass
        return True

    # -- haggling ----------------------------------------------------------

    def haggle(self, flags=3):
        assert self.receive(18) == b'NBDMAGICIHAVEOPT\0\3'
        self.send(struct.pack('>I', flags))
        return self

    def send_option(self, option, data=b'', length=None):
        self.send(b'IHAVEOPT', struct.pack(
            '>II', option, len(data) if length is None else length), data)

    def option(self, option, data=b''):
        """Return replies as (kind, data); the last is ACK or an error."""
        self.send_option(option, data)
        replies = []
        while not replies or not (replies[-1][0] == ACK
                                  or replies[-1][0] >> 31):
            magic, same, kind, length = struct.unpack(
                '>QIII', self.receive(20))
            assert magic == 0x3e889045565a9 and same == option
            replies.append((kind, self.receive(length)))
        return replies

    def start_tls(self, context):
        """Speak TLS from now on; `haggle` comes before this."""
        assert self.option(STARTTLS) == [(ACK, b'')]
        self.socket = context.wrap_socket(self.socket)
        return self

    def go(self, name, structured=True, status=True):
        """Enter the transmission phase."""
        return self.haggle().enter(name, structured, status)

    def enter(self, name, structured=True, status=True):
        """Enter the transmission phase, after `haggle`."""
        if structured:
            assert self.option(STRUCTURED) == [(ACK, b'')]
            self.structured = True
        if structured and status:
            found = self.option(SET_CONTEXTS,
                                contexts(name, b'base:allocation'))
            assert [kind for kind, _ in found] == [CONTEXT, ACK]
        replies = self.option(GO, name_and(name))
        assert replies[-1][0] == ACK, replies
        self.size, self.flags = struct.unpack('>2xQH', replies[0][1])
        return self

    # -- requests ----------------------------------------------------------

    def send_request(self, command, offset=0, length=0, flags=0, cookie=1,
                     data=b'', magic=REQUEST):
        self.send(struct.pack('>IHHQQI', magic, flags, command, cookie,
                              offset, length), data)

    def reply(self, lengths=()):
        """Return (cookie, error, data): bytes by offset, or extents.

        :param lengths: of the data of simple replies, by cookie
        """
        magic, = struct.unpack('>I', self.receive(4))
        if magic == SIMPLE:
            error, cookie = struct.unpack('>IQ', self.receive(12))
            length = 0 if error or not lengths else lengths[cookie]
            return cookie, error, self.receive(length)
        assert magic == CHUNK
        flags, kind, cookie, length = struct.unpack('>HHQI', self.receive(16))
        data = self.receive(length)
        error, found = 0, None
        if kind == ERROR:
            error, size = struct.unpack_from('>IH', data)
            found = data[6:6 + size].decode()
            assert error and len(data) == 6 + size
        elif kind == DATA:
            found = struct.unpack_from('>Q', data)[0], data[8:]
            assert found[1]
        elif kind == EXTENTS:
            assert data[:4] == b'\0\0\0\1' and len(data) >= 12
            found = list(struct.iter_unpack('>II', data[4:]))
        else:
            assert kind == NONE and not data
        return cookie, error, (found, bool(flags & 1))

    def answer(self, command, offset=0, length=0, **fields):
        """Return (error, data) of one request with its whole reply."""
        self.send_request(command, offset, length, **fields)
        simple = {fields.get('cookie', 1): length if command == READ else 0}
        data, last = {}, False
        if not self.structured:
            return self.reply(simple)[1:]
        while not last:
            cookie, error, found = self.reply(simple)
            assert cookie == fields.get('cookie', 1)
            if isinstance(found, bytes):
                return error, found
            found, last = found
            if error or command != READ:
                assert last
                return error, found
            if found is not None:
                data[found[0]] = found[1]
        assert len(data) == 1 or not fields.get('flags', 0) & DF
        at = offset
        for where, piece in sorted(data.items()):
            assert where == at
            at += len(piece)
        assert at == offset + length
        return 0, b''.join(piece for _, piece in sorted(data.items()))

    def read(self, offset, length, **fields):
        error, data = self.answer(READ, offset, length, **fields)
        assert not error, data
        return data


# -- a compute host -----------------------------------------------------------

class Link:
    """Connection between two hosts: a port that leads to another.

    :ivar left: bytes that still come from there; None: all. At 0 they wait
    """

    def __init__(self, port):
        self._port = port
        self._changed = threading.Condition()
        self.left = None
        self._listener = socket.create_server(('127.0.0.1', 0))
        self._sockets = [self._listener]
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def allow(self, left):
        with self._changed:
            self.left = left
            self._changed.notify_all()

    def slow(self, rate):
        """Let so many bytes come in a second, until `close`."""
        self.allow(0)

        def let():
            while True:
                time.sleep(0.05)
                with self._changed:
                    if self.left is None:
                        return
                    self.left += rate // 20
                    self._changed.notify_all()

        threading.Thread(target=let, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here = self._listener.accept()[0]
                there = socket.create_connection(('127.0.0.1', self._port))
                self._sockets += here, there
                for ends in ((here, there, False), (there, here, True)):
                    threading.Thread(target=self._pass, args=ends,
                                     daemon=True).start()

    def _pass(self, source, target, counted):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counted:
                    self._take(len(data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _take(self, length):
        with self._changed:
            self._changed.wait_for(
                lambda: self.left is None or self.left >= length)
            if self.left is not None:
                self.left -= length

    def close(self):
        self.allow(None)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def compute_host(place, **images):
    """A daemon with NBD in the mode `cache`, which holds nothing yet.

    It shows the storing host's daemon an operator's certificate. Gives it, and
    the link between the two.

    :param images: of the storing host: bytes, or the path of a file
    """
    authority = certificates.Authority(place)
    storing = repositories.create(place / 'storing')
    with repositories.open_repository(storing) as repo:
        for image_id, data in images.items():
            if not isinstance(data, bytes):
                data = pathlib.Path(data).read_bytes()
            with repo.begin(image_id) as transaction:
                transaction.write(data)
                # Without the hash no guest gets a byte before the last one has
                # arrived.
                transaction.set_hash('sha512', hashlib.sha512(data).digest())
                transaction.commit()
    port = ports.free_port()
    listen = f'127.0.0.1:{port}'
    with daemons.Daemon(
            storing, listen=listen, tls_cert=authority.issue('server'),
            tls_client_ca=authority.path) as daemon, (
            contextlib.closing(Link(port))) as link:
        daemon.start()
        cache = cache_harness.CacheDaemon(
            repositories.create(place / 'cache'), {
                'upstream_url': f'https://127.0.0.1:{link.port}',
                'upstream_ca': authority.path,
                'upstream_cert': authority.issue('operator')},
            # No test uses Glance here.
            glance_url='http://127.0.0.1:9')
        with cache:
            cache.write_config(nbd_socket=cache.directory / 'nbd')
            yield cache.start(), link


# -- guests -------------------------------------------------------------------

class Machine:
    """A QEMU with a disk of the boot image.

    :param command: of QEMU
    :param console: the file that it writes the console into
    """

    def __init__(self, command, console, **options):
        self._console = console
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, **options)

    def wait_until_up(self, meanwhile=lambda: None):
        """Return the output on its console, once the guest is up.

        :param meanwhile: called again and again
        """
        deadline = time.monotonic() + BOOT_LIMIT
        text = ''
        while not (found := boot.read(text)):
            assert self.process.poll() is None, text
            assert time.monotonic() < deadline, text
            meanwhile()
            time.sleep(0.1)
            with contextlib.suppress(FileNotFoundError):
                text = self._console.read_text(errors='replace')
        return found

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait(LIMIT)


class Guest(Machine):
    """A server of the boot image, in an emulated machine.

    :param directory: for its disk, a file over the image, and its console
    :param image: QEMU's source of the image: a path, or a URI, or json:
    """

    def __init__(self, directory, image):
        for program in ('qemu-img', 'qemu-system-x86_64'):
            need(program)
        console = directory / 'console'
        overlay = directory / 'overlay.qcow2'
        subprocess.run(
            ['qemu-img', 'create', '-q', '-f', 'qcow2', '-F', 'raw', '-b',
             str(image), str(overlay),
             str(disk_images.images().raw.stat().st_size)],
            check=True, timeout=LIMIT)
        super().__init__(
            ['qemu-system-x86_64', '-machine', 'pc,accel=tcg', '-m', '128',
             '-nodefaults', '-display', 'none', '-serial', f'file:{console}',
             '-drive', f'file={overlay},if=virtio'], console)
