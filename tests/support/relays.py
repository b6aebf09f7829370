# SPDX-License-Identifier: Apache-2.0

"""``dedupd-relay`` as a process, for tests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from tests.support import daemons
from tests.support import ports

#: A relay that detects a missing cache sooner.
PROGRAM = ['-c', 'import sys; '
           'from dedupd.compute.relay import liveness, main; '
           'liveness.LOOK_SECONDS = 0.1; liveness.QUIET_SECONDS = 0.5; '
           'liveness.ANSWER_SECONDS = 5; liveness.AWAY_SECONDS = 1; '
           'sys.exit(main.main())']

# Becomes a program that receives descriptors as from systemd; the first
# argument lists them.
_PASSING = """
import fcntl, os, sys
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 64)
        for number in sys.argv[1].split(',')]
for place, number in enumerate(high, 3):
    os.dup2(number, place)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(high)))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Relay:
    """A relay that runs from ``start`` to ``stop``; it can start again.

    :param cache: the CacheDaemon, whose options it reads
    """

    def __init__(self, cache):
        self._cache = cache
        self.listen = f'127.0.0.1:{ports.free_port()}'
        cache.cache['relay_listen'] = self.listen
        cache.write_config()
        self.log = cache.directory / 'relay-log'
        self.program = PROGRAM
        self.process = None

    @property
    def url(self):
        return f'http://{self.listen}'

    def launch(self, *passed):
        """Start the relay with some passed descriptors."""
        command = [*self.program, '--config-file', str(self._cache.config)]
        if passed:
            command = ['-c', _PASSING, ','.join(map(str, passed)), *command]
        with open(self.log, 'ab') as log:
            self.process = subprocess.Popen(
                [sys.executable, *command], cwd=daemons.ROOT,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=passed,
                env={**os.environ, 'PYTHONPATH': str(daemons.ROOT)})
        return self

    def start(self, *passed):
        """Start it, and wait until it accepts connections."""
        said = self.said()
        self.launch(*passed)
        deadline = time.monotonic() + daemons.LIMIT
        while 'Passing requests on' not in said():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)
        return self

    def connect(self):
        host, _, port = self.listen.rpartition(':')
        return socket.create_connection((host, int(port)), daemons.LIMIT)

    def text(self):
        return self.log.read_text() if self.log.exists() else ''

    def said(self):
        """Return a function that gives the log's text from here on."""
        before = len(self.text())
        return lambda: self.text()[before:]

    def memory(self, name='VmHWM'):
        """Return the process's memory in bytes."""
        for line in open(f'/proc/{self.process.pid}/status'):
            if line.startswith(f'{name}:'):
                return int(line.split()[1]) * 1024

    def stop(self, number=signal.SIGTERM):
        """End it; return the exit status, which has to come in time."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(daemons.LIMIT)

    def close(self):
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(daemons.LIMIT)
