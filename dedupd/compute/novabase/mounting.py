# SPDX-License-Identifier: Apache-2.0

"""Mounts for a process that cannot mount by itself.

The unit confines ``dedupd-nova-base``. The process gains no privileges, so
the set-user-id program fusermount3 cannot mount for it, and its mounts in its
own name space are not visible to Nova. systemd therefore runs
``dedupd-nova-base mount`` outside of these limits (``ExecStartPost``).
fusermount3 mounts there, and sends the descriptor of ``/dev/fuse`` through a
Unix socket to the confined process, which serves it.
"""

from collections.abc import Collection
import contextlib
import os
import socket
from typing import NoReturn

#: Seconds for the other process to mount.
SECONDS = 45
_PROGRAM = 'fusermount3'


def is_confined() -> bool:
    """Return whether this process, and those it starts, gain no privileges."""
    with open('/proc/self/status') as f:
        return os.geteuid() != 0 and 'NoNewPrivs:\t1\n' in f


@contextlib.contextmanager
def _address(directory: str):
    """Give a short name of the socket beside a mount point."""
    parent, name = os.path.split(directory)
    fd = os.open(parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f'/proc/self/fd/{fd}/{name}.socket'
    finally:
        os.close(fd)


@contextlib.contextmanager
def listening(directory: str):
    """Listen for the process that mounts a directory.

    Only this process's user and root can connect, as soon as there is a
    socket.

    :raises OSError: it cannot listen beside the directory
    """
    with _address(directory) as address, contextlib.closing(
            socket.socket(socket.AF_UNIX)) as listener:
        new = f'{address}.new'
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        # The file gets the mode of the socket.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(new)
        listener.listen(1)
        os.rename(new, address)
        try:
            yield listener
        finally:
            os.unlink(address)


def receive(listener: socket.socket) -> int:
    """Return the descriptor of the mount that another process has made.

    :raises OSError: it has not mounted within `SECONDS`
    """
    listener.settimeout(SECONDS)
    with contextlib.closing(listener.accept()[0]) as connection:
        connection.settimeout(SECONDS)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise OSError('fusermount3 has not mounted; its own message says why')
    return descriptors[0]


def mount(directory: str, options: Collection[str]) -> NoReturn:
    """Become fusermount3, which mounts for the process that listens.

    :raises OSError: no process listens, or there is no fusermount3
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        with _address(directory) as address:
            connection.connect(address)
        connection.setblocking(True)
        connection.set_inheritable(True)
        os.environ['_FUSE_COMMFD'] = str(connection.fileno())
        os.execvp(_PROGRAM, [_PROGRAM, '-o', ','.join(sorted(options)), '--',
                             directory])
