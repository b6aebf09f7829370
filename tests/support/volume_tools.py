# SPDX-License-Identifier: Apache-2.0

"""Volumes for tests, and servers of them.

An empty volume is written from ``format-volumes.rst``, with
parts so small that a test has many of them.
"""

import json
import os
import pathlib
import secrets
import signal
import struct
import subprocess
import sys
import time

import xxhash

from glance_dedup.client import volume_control
from tests.support import daemons
from tests.support import nbd
from tests.support import repositories

FUA, NO_HOLE, FAST_ZERO = 1, 2, 1 << 4
ENOSPC = 28


def create_repository(path, **options):
    """Create a repository with small groups."""
    return repositories.create(path, group_slots=512, **options)


def set_feature(repository, name):
    """Set a feature of the format, as the engine does."""
    (repository / 'features' / name).touch(mode=0o600)


def create(repository, name, size, part_size=1 << 20):
    """Create a volume of zeros, in the scope of all."""
    parameters = json.loads((repository / 'repository.json').read_text())
    set_feature(repository, 'volumes')
    directory = repository / 'volumes' / name
    directory.mkdir(mode=0o700, parents=True)
    directory.parent.chmod(0o700)
    seed = secrets.randbits(64)
    head = bytearray(4096)
    struct.pack_into(
        '<8sHHI16s16s16sQQQQIIQQIIQ', head, 0, b'GDVOLJ', 1, 0, 1,
        bytes.fromhex(parameters['repository_id']), secrets.token_bytes(16),
        bytes(16), seed, size, 0, part_size, 2, 1, 0, int(time.time()), 0, 0,
        xxhash.xxh3_64_intdigest(b'', seed))
    struct.pack_into('<Q', head, 4088,
                     xxhash.xxh3_64_intdigest(bytes(head[:4088])))
    for file, content in (('lock', b''), ('journal-00000001', bytes(head))):
        (directory / file).write_bytes(content)
        (directory / file).chmod(0o600)
    return directory


class Server:
    """A process ``glance-dedup volume serve`` of one volume.

    :param place: for the socket and the log
    :param before: Python that its process runs first
    """

    def __init__(self, repository, place, name='disk', before='',
                 **environment):
        self.repository = pathlib.Path(repository)
        self.name = name
        self.socket = place / 'nbd.sock'
        self.log = place / f'{name}.log'
        self.control = volume_control.VolumeControl(
            str(repository), name, timeout=60)
        self.process = None
        self._program = f'{before}\nfrom glance_dedup.cli import entry\n' + (
            'raise SystemExit(entry.main())')
        self._environment = {
            **os.environ, 'PYTHONPATH': str(daemons.ROOT), **environment,
            'GLANCE_DEDUP_FILTER_DIR': str(place / 'filter'),
            'GLANCE_DEDUP_REPOSITORY': str(repository)}

    def start(self, *options, wait=True):
        if '--port' not in options:
            options += '--nbd-socket', self.socket
        with open(self.log, 'ab') as log:
            self.process = subprocess.Popen(
                [sys.executable, '-c', self._program, 'volume', 'serve',
                 self.name, *map(str, options)],
                cwd=daemons.ROOT, env=self._environment, stderr=log,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if wait:
            repositories.eventually(self.is_up)
        return self

    def is_up(self):
        assert self.process.poll() is None, (self.process, self.text())
        try:
            self.control.status()
        except volume_control.NotServed:
            return False
        return True

    def text(self):
        return self.log.read_text()

    def end(self, signal_number):
        """End it; return its exit status."""
        process, self.process = self.process, None
        process.send_signal(signal_number)
        try:
            return process.wait(60)
        finally:
            process.kill()

    def stop(self):
        """Stop it properly, with a last checkpoint."""
        assert self.end(signal.SIGTERM) == 0, self.text()
        # A server whose checkpoint fails, or is late, ends with 0, too.
        assert 'last checkpoint' not in self.text(), self.text()

    def kill(self):
        self.end(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        if self.process is not None:
            self.kill()

    @property
    def uri(self):
        return f'nbd+unix:///{self.name}?socket={self.socket}'

    def session(self):
        return nbd.Session(self.socket).go(self.name.encode())

    def number(self, key):
        return int(self.control.status()[key])


def ask(session, command, offset=0, length=0, **fields):
    """Send a request that must succeed; return its data."""
    error, found = session.answer(command, offset, length, **fields)
    assert not error, (command, offset, length, fields, error, found)
    return found


def write(session, offset, data, flags=0):
    ask(session, nbd.WRITE, offset, len(data), data=data, flags=flags)
