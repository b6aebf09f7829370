#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""Daemons for tests: the real one as a process, and servers that misbehave."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

from dedupd import client as client_module

TOP = pathlib.Path(__file__).resolve().parents[1]


class Daemon:
    """A dedupd of a repository, as a process of its own.

    :param directory: where its socket, options and log are to lie
    :param options: of [dedupd], beyond those that it needs
    """

    def __init__(self, directory, repository, **options):
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(exist_ok=True)
        self.path = self.directory / 'socket'
        self.log = self.directory / 'log'
        options = {'datadir': repository, 'socket': self.path,
                   'filter_dir': self.directory / 'filter', 'filter_mib': 1,
                   **options}
        self.options = self.directory / 'conf'
        self.options.write_text('[dedupd]\n' + ''.join(
            f'{name} = {value}\n' for name, value in options.items()))
        self.process = None

    @property
    def address(self):
        return f'unix:{self.path}'

    def client(self, **options):
        return client_module.Client(self.address, **options)

    def start(self):
        with open(self.log, 'ab') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'dedupd.main',
                 '--config-file', str(self.options)], stdout=log, stderr=log,
                env={**os.environ, 'PYTHONPATH': str(TOP)})
        end = time.monotonic() + 60
        while True:
            try:
                with self.client() as client:
                    status = client.status()
                if status['catalog']['state'] == 'ready':
                    return self
            except client_module.DaemonUnavailable:
                pass
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def kill(self):
        """As kill -9."""
        self.process.kill()
        self.process.wait(30)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc_info):
        self.stop()


@contextlib.contextmanager
def scripted(path, behave):
    """A server on a Unix socket; `behave(connection, request)` is all it does.

    Gives the list of what was received first on each connection.
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
    """An answer's bytes; a header of None is left out."""
    headers.setdefault('Content_Length', len(body))
    lines = [f'HTTP/1.1 {status} Because'] + [
        f'{name.replace("_", "-")}: {value}'
        for name, value in headers.items() if value is not None]
    return '\r\n'.join((*lines, '', '')).encode() + body
