# SPDX-License-Identifier: Apache-2.0

"""Daemons for tests: the real one as a process, and servers that misbehave."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from glance_dedup.client import daemon_client

ROOT = pathlib.Path(__file__).resolve().parents[2]

#: Maximum seconds for any operation.
LIMIT = 60
#: Maximum seconds for a task.
TASK_LIMIT = 300


# -- raw requests -------------------------------------------------------------

class Response:
    """Status, headers by name in lower case, and body."""

    def __init__(self, status, headers, body):
        self.status = status
        self.headers = headers
        self.body = body

    def json(self):
        return json.loads(self.body)


def read_response(stream, head=False):
    """Parse a response from a file; None if there is none."""
    line = stream.readline()
    if not line:
        return None
    status = int(line.split()[1])
    headers = {}
    while (line := stream.readline()) not in (b'\r\n', b''):
        name, _, value = line.decode('latin-1').partition(':')
        headers[name.lower()] = value.strip()
    body = b''
    if head or status == 100:
        pass
    elif headers.get('transfer-encoding') == 'chunked':
        while size := int(stream.readline(), 16):
            body += stream.read(size)
            stream.readline()
        stream.readline()
    elif 'content-length' in headers:
        body = stream.read(int(headers['content-length']))
    else:
        body = stream.read()
    return Response(status, headers, body)


def raw(method, path, body=None, **headers):
    """Return the bytes of a request; underscores in names become hyphens."""
    lines = [f'{method} {path} HTTP/1.1', 'Host: x']
    if body is not None:
        headers['Content-Length'] = len(body)
    lines += [f'{name.replace("_", "-")}: {value}'
              for name, value in headers.items()]
    return '\r\n'.join(lines).encode() + b'\r\n\r\n' + (body or b'')


def connect_as(path, uid, data):
    """Return a user's answer to these bytes; None if it cannot connect."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresuid(uid, uid, uid)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(LIMIT)
                try:
                    sock.connect(path)
                except PermissionError:
                    os.write(writer, b'\0')
                else:
                    with contextlib.suppress(OSError):
                        sock.sendall(data)
                    with contextlib.suppress(OSError):
                        os.write(writer, sock.recv(9))
                        # A connection closed before the end is no request.
                        sock.shutdown(socket.SHUT_WR)
                        while sock.recv(65536):
                            pass
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, 'rb') as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return None if answer == b'\0' else answer


# -- the real one -------------------------------------------------------------

class Daemon:
    """A daemon that runs from ``start`` to ``stop``; it can start again.

    :param repository: path of the repository
    :param directory: for its socket, options and log; one of its own if there
        is none
    :param options: of ``[dedupd]``
    """

    def __init__(self, repository, directory=None, **options):
        self._place = None
        if directory is None:
            # The directory's path is short, because a socket's path must be,
            # and every user may enter it.
            self._place = tempfile.TemporaryDirectory(prefix='dedupd-')
            directory = self._place.name
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(exist_ok=True)
        self.directory.chmod(0o755)
        self.socket = str(self.directory / 'socket')
        self.config = self.directory / 'dedupd.conf'
        self.log = self.directory / 'log'
        self.environment = {}
        self.program = ['-m', 'dedupd.daemon']
        self.prefix = []        # a command that runs it
        self.options = {
            'datadir': repository, 'socket': self.socket, 'filter_mib': 1,
            'filter_dir': self.directory / 'filter', 'collect_interval': 0,
            'merge_interval': 0, 'scrub_interval': 0, **options}
        self.process = None
        self.write_config()

    def write_config(self, **options):
        self.options.update(options)
        self.config.write_text(
            '[DEFAULT]\ndebug = true\n[dedupd]\n' + ''.join(
                f'{name} = {value}\n'
                for name, value in self.options.items()
                if value is not None))

    def start(self, wait=True):
        with open(self.log, 'ab') as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, *self.program,
                 '--config-file', str(self.config)],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={
                    **os.environ, 'PYTHONPATH': str(ROOT),
                    **self.environment})
        if wait:
            self.wait_for(lambda: self.request(
                'GET', '/healthcheck/ready').status == 200)
        return self

    def wait_for(self, condition, limit=LIMIT):
        """Wait until a condition is true; errors of sockets mean not yet."""
        deadline = time.monotonic() + limit
        while True:
            assert self.process.poll() is None, self.text()
            with contextlib.suppress(OSError, AttributeError):
                if condition():
                    return
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def wait_for_catalog(self, role='maintainer', limit=LIMIT):
        """Wait until it maintains the repository, or has another role."""
        self.wait_for(lambda: (
            self.status()['daemon']['role'] == role and (
                role != 'maintainer'
                or self.status()['catalog']['state'] == 'ready')), limit)
        return self

    def text(self):
        return self.log.read_text()

    def stop(self, number=signal.SIGTERM, limit=LIMIT):
        """End it; return the exit status, which has to come in time."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(limit)

    def kill(self):
        """Kill the daemon, as kill -9 does."""
        self.process.kill()
        self.process.wait(LIMIT)

    def close(self):
        if self.process is not None:
            self.kill()
        if self._place is not None:
            self._place.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    # -- requests ----------------------------------------------------------

    @property
    def address(self):
        return f'unix:{self.socket}'

    def client(self, **options):
        return daemon_client.Client(self.address, **options)

    def connect(self):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(LIMIT)
        sock.connect(self.socket)
        return sock

    def send(self, data, head=False):
        """Send bytes on their own connection; return the first response."""
        with self.connect() as sock, sock.makefile('rb') as stream:
            # The response may come, and the connection end, before this.
            with contextlib.suppress(BrokenPipeError):
                sock.sendall(data)
            return read_response(stream, head)

    def request(self, method, path, body=None, **headers):
        return self.send(raw(method, path, body, **headers),
                         head=method == 'HEAD')

    def status(self):
        return self.request('GET', '/v1/status').json()

    def memory(self, name='VmRSS'):
        """Return the process's memory in bytes."""
        for line in open(f'/proc/{self.process.pid}/status'):
            if line.startswith(f'{name}:'):
                return int(line.split()[1]) * 1024

    def run(self, task, **arguments):
        """Run a task, and wait for its end; return its status."""
        number = self.request(
            'POST', f'/v1/tasks/{task}',
            json.dumps(arguments).encode()).json()['number']
        deadline = time.monotonic() + TASK_LIMIT
        while True:
            status = self.request(
                'GET', f'/v1/tasks/{task}?after={number}&wait=10').json()
            if (status['finished'] >= number
                    or time.monotonic() > deadline):
                return status


def impatient(**intervals):
    """Return a daemon program with other intervals of the scheduler.

    :param intervals: seconds, by the names of constants and of tasks
    """
    return ['-c', f"""
import dataclasses, sys
from dedupd import daemon
from dedupd.schedule import maintainer_takeover, task_scheduler
from dedupd.tasks import registry

for name, seconds in {intervals}.items():
    if name in registry.TASKS:
        registry.TASKS[name] = dataclasses.replace(
            registry.TASKS[name], interval=seconds)
    else:
        owner, = (module for module in (maintainer_takeover, task_scheduler)
                  if hasattr(module, name))
        setattr(owner, name, seconds)
sys.exit(daemon.main())
"""]


@contextlib.contextmanager
def running(repository, directory=None, **options):
    """Run a daemon that serves, and has its catalog."""
    with Daemon(repository, directory, **options) as daemon:
        daemon.start().wait_for_catalog()
        yield daemon
        if daemon.process.poll() is None:
            assert daemon.stop() == 0, daemon.text()


# -- servers that misbehave ---------------------------------------------------

@contextlib.contextmanager
def scripted(path, behave):
    """Run a server on a Unix socket that calls `behave(connection, request)`.

    Gives the list of the first data received on each connection.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    requests = []
    connections = []

    def serve(connection):
        with contextlib.suppress(OSError):
            request = connection.recv(65536)
            requests.append(request)
            if request:
                behave(connection, request)
        connection.close()

    def accept():
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                connections.append(connection)
                threading.Thread(target=serve, args=(connection,),
                                 daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield requests
    finally:
        for sock in (listener, *connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        thread.join(10)
        os.unlink(path)


def answer(body=b'', status=200, **headers):
    """Return an answer's bytes; a header of None is left out."""
    headers.setdefault('Content_Length', len(body))
    lines = [f'HTTP/1.1 {status} Because'] + [
        f'{name.replace("_", "-")}: {value}'
        for name, value in headers.items() if value is not None]
    return '\r\n'.join((*lines, '', '')).encode() + body
