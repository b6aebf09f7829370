# SPDX-License-Identifier: Apache-2.0

"""QEMU's monitor protocol, QMP: requests, and their answers."""

import contextlib
import json
import socket

from tests.support import repositories

LIMIT = 60


class Refused(Exception):
    """QEMU answered with an error."""


def option(path):
    """Return QEMU's option for a monitor at a socket."""
    return '-qmp', f'unix:{path},server=on,wait=off'


def describe(monitor):
    """Return the state of a guest that does not go on as it should."""
    answers = [monitor.ask('query-status'),
               monitor.ask('query-named-block-nodes')]
    with contextlib.suppress(Refused):
        answers += [monitor.ask('human-monitor-command',
                                **{'command-line': f'info {name}'})
                    for name in ('registers', 'lapic', 'pic', 'irq')]
    return '\n'.join(map(str, answers))


class Monitor:
    """A connection to the monitor of a QEMU that is just starting."""

    def __init__(self, path):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(LIMIT)
        repositories.eventually(lambda: self._connect(path))
        self._file = self._socket.makefile()
        self._file.readline()       # the greeting
        self.ask('qmp_capabilities')

    def _connect(self, path):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            self._socket.connect(str(path))
            return True
        return False

    def ask(self, command, **arguments):
        """Return the result of a command. Events are left out."""
        request = {'execute': command, 'arguments': arguments}
        self._socket.sendall(json.dumps(request).encode() + b'\n')
        while line := self._file.readline():
            answer = json.loads(line)
            if 'error' in answer:
                raise Refused(answer['error']['desc'])
            if 'return' in answer:
                return answer['return']
        raise EOFError('QEMU has ended')

    def close(self):
        self._file.close()
        self._socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()
