# SPDX-License-Identifier: Apache-2.0

"""Messages between a service and systemd through the environment."""

import asyncio
import contextlib
import os
import socket

from oslo_config import cfg

# The first descriptor that systemd passes, and the most that are taken.
_FIRST, _MAX_COUNT = 3, 64


def notify(state: str) -> None:
    """Notify systemd, if it requested notifications."""
    address = os.environ.get('NOTIFY_SOCKET')
    if not address:
        return
    if address.startswith('@'):
        address = '\0' + address[1:]
    with contextlib.suppress(OSError), socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        sock.send(state.encode())


def exit_status(error: Exception) -> int:
    """Return the exit status of a service that cannot start.

    :returns: 2 if it must be changed first, so that starting again is of no
        use: the units have ``RestartPreventExitStatus=2``; otherwise 1
    """
    return 2 if isinstance(error, (cfg.Error, ValueError)) else 1


async def live_until(ending: asyncio.Event) -> None:
    """Wait for an event, and send systemd signs of life meanwhile."""
    seconds = _watchdog_seconds()
    while not ending.is_set():
        try:
            await asyncio.wait_for(ending.wait(), seconds)
        except TimeoutError:
            notify('WATCHDOG=1')


def _watchdog_seconds() -> float | None:
    """Seconds between two signs of life; None: systemd expects none.

    They are half of what systemd allows.
    """
    if os.environ.get('WATCHDOG_PID', str(os.getpid())) != str(os.getpid()):
        return None
    try:
        return int(os.environ['WATCHDOG_USEC']) / 2e6
    except (KeyError, ValueError):
        return None


def passed_sockets() -> list[socket.socket]:
    """The listening TCP sockets that systemd has passed to this process.

    They are taken once: the environment does not name them any more.

    :raises ValueError: if one is not such a socket
    """
    values = [os.environ.pop(name, '') for name in (
        'LISTEN_PID', 'LISTEN_FDS', 'LISTEN_FDNAMES')]
    if values[0] != str(os.getpid()):
        return []   # They are another process's.
    if not values[1].isdecimal() or int(values[1]) > _MAX_COUNT:
        raise ValueError(f'LISTEN_FDS={values[1]} is not a number of sockets')
    return [_taken(number)
            for number in range(_FIRST, _FIRST + int(values[1]))]


def _taken(number: int) -> socket.socket:
    """A passed socket, which no program that we start inherits."""
    try:
        sock = socket.socket(fileno=number)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as e:
        raise ValueError(f'the passed descriptor {number} is not a socket: '
                         f'{e.strerror}') from e
    if (sock.family not in (socket.AF_INET, socket.AF_INET6)
            or sock.type != socket.SOCK_STREAM or not listens):
        raise ValueError(f'the passed descriptor {number} is not a TCP socket '
                         'that listens')
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock
