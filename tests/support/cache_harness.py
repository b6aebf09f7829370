# SPDX-License-Identifier: Apache-2.0

"""Servers around a compute host's cache, for tests.

A storing host has a repository, its daemon that listens with TLS, and a real
Glance over it that accepts tokens. The compute host has the cache's daemon.
"""

import contextlib
import pathlib
import socket
import sys
import threading

from tests.functional import glance_server
from tests.support import certificates
from tests.support import daemons
from tests.support import ports
from tests.support import repositories

#: Token, project and roles.
TOKENS = {'alice': ('alice', 'member,reader'), 'bob': ('bob', 'member,reader'),
          'carol': ('alice', 'member,reader'),
          'ops': ('ops', 'admin,member,reader')}


class Link:
    """Connection from a cache to a server, which can be held or cut.

    :param near: the address on which it listens
    :ivar received: bytes that came from the server
    """

    def __init__(self, target, near='127.0.0.1'):
        host, _, port = target.rpartition(':')
        self._target = host, int(port)
        self._listener = socket.create_server((near, 0))
        self.address = f'{near}:{self._listener.getsockname()[1]}'
        self._changed = threading.Condition()
        self._open = set()
        self._limit = None
        self.received = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_after(self, more):
        """Let so many more bytes of the server pass; None: all."""
        with self._changed:
            self._limit = None if more is None else self.received + more
            self._changed.notify_all()

    def wait_until_held(self):
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.received >= self._limit, daemons.LIMIT)

    def cut(self):
        """End all current connections."""
        with self._changed:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self._open.clear()
            self._changed.notify_all()

    def close(self):
        self._listener.close()
        self.hold_after(None)
        self.cut()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                with self._changed:
                    self._open |= {near, far}
                for arguments in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._copy, args=arguments,
                                     daemon=True).start()

    def _copy(self, source, target, counted):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counted:
                    self._let_through(target, data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _let_through(self, target, data):
        with self._changed:
            self.received += len(data)
            self._changed.notify_all()
            self._changed.wait_for(lambda: (
                self._limit is None or self.received < self._limit
                or target not in self._open))


class TokenServer(glance_server.GlanceServer):
    """A Glance with its own policy, where a token identifies the user."""

    headers = {'X-Auth-Token': 'ops'}

    def configure(self):
        pipelines = self.etc / 'paste.ini'
        self.tokens = self.directory / 'tokens'
        self.options = {
            **self.options,
            'paste_deploy': {'config_file': pipelines, 'flavor': 'keystone'}}
        self.environment = {**self.environment,
                            'PYTHONPATH': str(daemons.ROOT)}
        super().configure()
        self.allow(**TOKENS)
        paste = pathlib.Path(sys.prefix) / 'etc/glance/glance-api-paste.ini'
        text = paste.read_text().replace(
            'keystonemiddleware.auth_token:filter_factory',
            f'tests.functional.token_filter:factory\ntokens = {self.tokens}')
        assert 'token_filter' in text, f'{paste} has no filter for tokens'
        pipelines.write_text(text)

    @staticmethod
    def policy():
        """Use Glance's own policy."""
        return ''

    def allow(self, **tokens):
        """Accept these tokens from now on, and no others."""
        # Replace the file at once: each request reads it.
        new = self.tokens.with_suffix('.new')
        new.write_text(''.join(
            f'{token} {project} {roles}\n'
            for token, (project, roles) in tokens.items()))
        new.replace(self.tokens)

    def client(self, token, url=None):
        return glance_server.Client(url or self.url,
                                    headers={'X-Auth-Token': token})


class CacheDaemon(daemons.Daemon):
    """A daemon in the mode `cache`.

    :param cache: options of ``[cache]``
    :param options: of ``[dedupd]``
    """

    def __init__(self, repository, cache, directory=None, **options):
        self.cache = {'listen': f'127.0.0.1:{ports.free_port()}', **cache}
        super().__init__(repository, directory, **options)

    @property
    def url(self):
        return f'http://{self.cache["listen"]}'

    def write_config(self, **options):
        super().write_config(**options)
        text = self.config.read_text().replace(
            '[dedupd]', 'mode = cache\n[dedupd]', 1)
        self.config.write_text(text + '[cache]\n' + ''.join(
            f'{name} = {value}\n' for name, value in self.cache.items()))

    def counts(self):
        """Return the section `cache` of its status."""
        return self.status()['cache']

    def connect_proxy(self):
        """Return a connection to its proxy of the Image service."""
        host, _, port = self.cache['listen'].rpartition(':')
        if not host:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(daemons.LIMIT)
            sock.connect(port)
            return sock
        return socket.create_connection((host, int(port)), daemons.LIMIT)


class Storing:
    """The storing host: repository, daemon, Glance.

    :param parameters: of the repository
    :param store: further options of Glance's store
    :param options: of its daemon
    :ivar glance: the TokenServer
    :ivar daemon: the one that a cache pulls from
    """

    def __init__(self, place, parameters=None, store=None, **options):
        self.place = place
        self.authority = certificates.Authority(place)
        self.repository = repositories.create(place / 'storing',
                                              **(parameters or {}))
        self.listen = f'127.0.0.1:{ports.free_port()}'
        self.operator = self.authority.issue('operator')
        self.daemon = daemons.Daemon(
            self.repository, listen=self.listen,
            tls_cert=self.authority.issue('server'),
            tls_client_ca=self.authority.path, **options)
        self.glance = TokenServer(place / 'glance', {'dedup': {
            'type': 'dedup', 'dedup_store_datadir': self.repository,
            'dedup_store_filter_dir': self.daemon.directory / 'filter',
            'dedup_store_filter_mib': 1,
            'dedup_store_dedupd_socket': self.daemon.socket,
            **(store or {})},
            'plain': {'type': 'file',
                      'filesystem_store_datadir': place / 'plain'}},
            processes=2, threads=4)

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.glance.start()
            stack.callback(self.glance.stop)
            self.daemon.write_config(glance_url=self.glance.url)
            stack.enter_context(self.daemon)
            self.daemon.start().wait_for_catalog()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info):
        self._stack.close()

    def cache(self, path, cache=None, **options):
        """A cache's daemon, which is not started yet."""
        options.setdefault('glance_url', self.glance.url)
        return CacheDaemon(
            path, {'upstream_url': f'https://{self.listen}',
                   'upstream_ca': self.authority.path, **(cache or {})},
            **options)
