# SPDX-License-Identifier: Apache-2.0

"""Ports for servers that tests start."""

import socket


def free_port():
    """Return a loopback port that the system gives out to nothing else.

    So tests that run side by side never get the same one. The server must
    bind it with SO_REUSEADDR, as servers do.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(('127.0.0.1', 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        # A connection that this side closes first leaves the port in
        # TIME_WAIT: the system does not choose it, but a server that requests
        # this port gets it.
        with socket.create_connection(('127.0.0.1', port)) as client:
            listener.accept()[0].close()
            client.recv(1)
    return port
