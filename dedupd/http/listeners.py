# SPDX-License-Identifier: Apache-2.0

"""Listening sockets, and the peers that connect to them."""

from collections.abc import Callable
from collections.abc import Hashable
import contextlib
import dataclasses
import errno
import ipaddress
import os
import socket
import ssl
import stat
import struct
from typing import Any
from typing import Protocol
import urllib.parse

from dedupd.http import connection_limits
from dedupd.http import routing
from glance_dedup.base import sockets


class Connection(Protocol):
    """Serves one connection."""

    @property
    def idle(self) -> bool:
        """Return whether the connection may be cut off now."""

    async def run(self) -> None:
        """Serve the connection to its end, and close its socket."""


@dataclasses.dataclass
class Listener:
    """A listening socket, and its service.

    :ivar router: finds handlers; None: the protocol is not HTTP
    :ivar allowed: for a Unix socket: returns whether a user id may connect
    :ivar tls: returns the context for a new connection, and the current
        trust, for comparison; None: no TLS
    :ivar other: makes a connection of another protocol
    """

    name: str
    sock: socket.socket
    router: routing.Router | routing.Relay | None
    allowed: Callable[[int], bool] | None = None
    tls: Callable[[], tuple[ssl.SSLContext, bytes]] | None = None
    other: Callable[[socket.socket, connection_limits.Place],
                    Connection] | None = None
    places: connection_limits.Places = dataclasses.field(
        default_factory=connection_limits.Places)

    @property
    def handlers(self) -> routing.Router | routing.Relay:
        """Return the handlers of HTTP requests, if the protocol is HTTP."""
        if self.router is None:
            raise TypeError(f'{self.name} does not speak HTTP')
        return self.router

    def is_meant(self, host: str) -> bool:
        """Return whether a request with this Host seems meant for this daemon.

        A foreign web page can make its own name point to the loopback
        interface of its reader, and then send requests to this daemon. Where
        other hosts reach the daemon, it has no name to compare with.
        """
        if self.tls is not None or self.sock.family == socket.AF_UNIX or (
                not is_loopback(self.sock.getsockname()[0])):
            return True
        try:
            name = urllib.parse.urlsplit(f'//{host}').hostname or ''
        except ValueError:
            return False
        return name in ('', 'localhost') or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Return whether this is an address of the loopback interface."""
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def is_path(address: str) -> bool:
    """Return whether this is a Unix socket's path, not ADDRESS:PORT."""
    return address.startswith('/')


def require_loopback(option: str, address: str) -> None:
    """Refuse an option with an address that other hosts reach.

    :param address: or the path of a Unix socket
    :raises ValueError: names the option, and a remedy
    """
    if is_path(address):
        return
    host = address.rpartition(':')[0].strip('[]')
    if host != 'localhost' and not is_loopback(host):
        raise ValueError(
            f'[cache] {option}: {address} is not an address of the loopback '
            'interface. Tokens go over it in clear; use one such as '
            '127.0.0.1:9292')


def require_distinct(listen: str, relay_listen: str | None) -> None:
    """Refuse addresses at which a cache and its relay cannot both listen.

    :raises ValueError: names the options, and a remedy
    """
    require_loopback('listen', listen)
    if listen == relay_listen:
        raise ValueError('[cache] listen and relay_listen are the same '
                         'address. Nova asks at relay_listen; have listen '
                         'name a Unix socket, such as '
                         '/run/dedupd-cache/relay.sock')


def begin(where: str, listen: Callable[[str], socket.socket]
          ) -> socket.socket:
    """Call one of the functions below for an address.

    :raises OSError: if it fails; the message names the address and the cause
    """
    try:
        return listen(where)
    except OSError as e:
        raise OSError(f'cannot listen on {where}: {e.strerror}') from e


def listen_unix(path: str, mode: int) -> socket.socket:
    """Listen at a path; this replaces a socket that no process serves.

    :raises OSError: EADDRINUSE if a process serves the socket there; EEXIST if
        the path is not a socket, which is left alone
    """
    temporary = f'{path}.{os.getpid()}'
    for place in (path, temporary):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(place).st_mode):
                raise OSError(errno.EEXIST,
                              f'{place} exists and is not a socket')
    if sockets.is_served(path):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    sock = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        umask = os.umask(0o177)
        try:
            sock.bind(temporary)
        finally:
            os.umask(umask)
        os.chmod(temporary, mode)
        sock.listen(1024)
        # The socket gets its name once it has its mode and answers.
        os.rename(temporary, path)
    except BaseException:
        sock.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sock.setblocking(False)
    return sock


def listen_tcp(address: str) -> socket.socket:
    """Listen at ADDRESS:PORT."""
    host, _, port = address.rpartition(':')
    found = socket.getaddrinfo(host.strip('[]'), int(port),
                               type=socket.SOCK_STREAM,
                               flags=socket.AI_PASSIVE)
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def peer_uid(sock: socket.socket) -> int:
    """The user id of a Unix socket's peer when it connected."""
    _, uid, _ = struct.unpack('iII', sock.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid


def peer_of(uid: int | None, address: Any) -> Hashable:
    """The name under which a peer's connections are limited.

    All addresses of an IPv6 network of 64 bits are one peer, because one host
    may have them all.
    """
    if uid is not None:
        return uid
    ip = ipaddress.ip_address(address[0].partition('%')[0])
    ip = getattr(ip, 'ipv4_mapped', None) or ip
    return ipaddress.ip_network((ip, 32 if ip.version == 4 else 64),
                                strict=False)
