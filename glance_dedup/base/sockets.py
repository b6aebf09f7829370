# SPDX-License-Identifier: Apache-2.0

"""Unix sockets whose server may be slow, stopped or flooded.

A socket with a time limit does not block, and a connection to a Unix socket
that cannot be queued at once then fails with EAGAIN (connect(2)), however long
the limit: the functions here wait.
"""

import contextlib
import os
import socket
import time

_PAUSE_SECONDS = 0.01


def connect_unix(path: str, seconds: float) -> socket.socket:
    """A connection to a Unix socket, with that time limit for each operation.

    While the server's queue of connections is full, this tries again.

    :raises OSError: nobody serves the socket; TimeoutError if the queue stayed
        full for `seconds`
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.settimeout(seconds)
        while True:
            try:
                sock.connect(path)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f'its queue of connections was full for {seconds:g} '
                        'seconds') from None
                time.sleep(_PAUSE_SECONDS)
            else:
                stack.pop_all()
                return sock


def is_served(path: str | os.PathLike[str]) -> bool:
    """Return whether a process listens on a Unix socket, though it is busy.

    :raises OSError: the socket cannot be examined
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            return True
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True
