# SPDX-License-Identifier: Apache-2.0

"""Servers of volumes in the test's own process, without nbdkit."""

import contextlib
import os
import pathlib
import socket
import threading

from glance_dedup.base import exceptions
from glance_dedup.repository import openvolumes


class Server:
    """Answers on the control socket of a volume, as nbdkit does.

    :param answer: called with each client, instead of a right answer
    """

    def __init__(self, volume, directory, answer=None):
        self.volume = volume
        self._given = answer
        self.asked = []
        self.path = directory / 'control'
        self._listener = socket.socket(socket.AF_UNIX)
        # The path may be too long for an address.
        fd = os.open(directory, os.O_PATH)
        self._listener.bind(f'/proc/self/fd/{fd}/control')
        os.close(fd)
        self._listener.listen()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return          # it was shut down
            with client:
                line = client.recv(512).decode()
                self.asked.append(line.strip())
                with contextlib.suppress(OSError):  # it had enough
                    if self._given is not None:
                        self._given(client)
                        continue
                    # PROJECT may be empty in the protocol.
                    client.sendall((self._answer(
                        *line.rstrip('\n').split(' ', 2)) + '\n\n').encode())

    def _answer(self, word, *words):
        if word == 'status':
            info = self.volume.info()
            return '\n'.join([
                'ok', 'pid 1234', f'volume_id {info.volume_id}',
                f'size {info.size}',
                f'journal_bytes {info.journal_bytes}',
                'index lmdb', 'index_complete 0', 'index_bytes 4096',
                'index_dropped 5',
                f'broken {info.broken}',
                *(f'{key} {value}' for key, value in info.counters.items())])
        if word == 'snapshot':
            try:
                self.volume.snapshot(*words)
            except exceptions.InvalidParameter as e:
                return f'error invalid {e}'
        elif word == 'disconnect':
            return 'ok\nclients 1'
        else:
            self.volume.resize(int(words[0]))
        return 'ok'

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@contextlib.contextmanager
def serving(repo, name, answers=True, answer=None):
    """Own a volume, with a server unless none answers."""
    with openvolumes.open_volume(repo, name) as volume:
        server = None
        if answers:
            server = Server(volume, pathlib.Path(
                repo.path) / 'volumes' / name, answer)
        try:
            yield server or volume
        finally:
            if server is not None:
                server.close()
