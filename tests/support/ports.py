# SPDX-License-Identifier: Apache-2.0

"""Ports for servers that tests start."""

import fcntl
import os
import pathlib
import socket

# The lowest port that a test's server gets. Most services of a machine
# listen at lower ones.
_FIRST = 20000

_EPHEMERAL = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')


def free_port(file=None):
    """Return a loopback port that nothing else gets before its server starts.

    The port is below the ephemeral range, out of which the system gives
    ports to connections and to servers that request any port. The tests of
    this user that run side by side share a file with the port that was given
    out last; each gets the next. So a port comes again only after all
    others, although its server may start minutes later.

    :param file: with the last port; the user's in /tmp if absent
    """
    end = int(_EPHEMERAL.read_text().split()[0])
    assert _FIRST < end, (
        f'{_EPHEMERAL} begins at {end}: tests need the ports from {_FIRST} '
        f'on; set net.ipv4.ip_local_port_range to "32768 60999"')
    descriptor = os.open(
        file or f'/tmp/glance-dedup-tests-{os.getuid()}.port',
        os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, 'r+') as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        port = int(f.read() or _FIRST)
        for _ in range(_FIRST, end):
            port = port + 1 if _FIRST <= port < end - 1 else _FIRST
            if _is_free(port):
                f.seek(0)
                f.write(f'{port:5}')
                f.flush()
                return port
    raise OSError(f'no port from {_FIRST} to {end - 1} is free')


def _is_free(port):
    """Return whether a server could listen on all addresses now."""
    with socket.socket() as server:
        try:
            server.bind(('', port))
        except OSError:
            return False
    return True
