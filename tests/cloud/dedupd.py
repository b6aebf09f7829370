# SPDX-License-Identifier: Apache-2.0
"""dedupd as the daemon of the cloud's first dedup store, and as a cache.

A cache runs on each compute host.
"""

import contextlib
import os
import shutil
import subprocess
import sys

from dedupd.compute.novabase import base_links
from glance_dedup.client import daemon_client
from glance_dedup.repository import image_repository
from tests.cloud import cloud_service
from tests.support import certificates
from tests.support import daemons

#: Where a cache listens, on each host's own loopback.
CACHE_PORT = 9292
#: With Swift, a group moves once it has not changed for an hour, or if the
#: disk is nearly full. It need not be recompressed first.
TIERING = {'tier_interval': 60, 'tier_age_hours': 1, 'tier_free_mib': 1024,
           'recompress_codec': 'none'}


class _Dedupd(cloud_service.Service):
    """Base of the daemon's services in both modes."""

    def client(self):
        return daemon_client.Client(f'unix:{self.socket}')

    def _launch(self, sections):
        path = self.write('dedupd.conf', sections)
        self.spawn([sys.executable, '-m', 'dedupd.daemon', '--config-file',
                    path], cwd=cloud_service.TOP)

    def answers(self):
        status = self.client().status()
        return (status['daemon']['role'] == 'maintainer'
                and status['catalog']['state'] == 'ready')


class Dedupd(_Dedupd):
    name = 'dedupd'
    title = 'dedupd'
    needs = ('rabbitmq',)

    def __init__(self, cloud, host=None):
        super().__init__(cloud, host)
        if self._has_swift:
            self.needs += ('swift',)

    @property
    def _has_swift(self):
        """Return whether groups of its repository move to Swift."""
        return self.cloud.state.swift

    @property
    def socket(self):
        return self.cloud.directory / 'dedupd.sock'

    @property
    def url(self):
        return f'http://127.0.0.1:{self.port}'

    @property
    def address(self):
        """Return the URL of the status page."""
        return f'{self.url}/'

    @property
    def repository(self):
        return self.cloud.repository

    @property
    def listen(self):
        """Return the address for other hosts."""
        return (f'{self.cloud.address}:'
                f'{self.cloud.state.port(f"{self.name}-listen")}')

    @property
    def authority(self):
        """Return the file of the authority that signs all certificates."""
        return self.etc / 'authority.pem'

    @property
    def operator(self):
        """Return the file of a certificate that may read every image."""
        return self.etc / 'operator.pem'

    @property
    def told(self):
        return {name: str(value)
                for name, value in self._of_the_store().items()}

    def prepare(self):
        authority = certificates.Authority(self.etc)
        authority.issue('server', self.cloud.address)
        authority.issue('operator')

    def _of_the_store(self):
        """Return the settings that it shares with the store."""
        return {name: self.cloud.dedup_store.get(f'dedup_store_{name}')
                for name in ('datadir', 'filter_dir', 'filter_mib')}

    def _sections(self):
        """Return its configuration."""
        return {
            'DEFAULT': {
                'debug': True,
                'transport_url': self.cloud.services['rabbitmq'].transport_url,
            },
            'dedupd': {
                **self.common(self._of_the_store()),
                'glance_url': self.cloud.url('glance'),
                'glance_notifications': True,
                **(TIERING if self._has_swift else {}),
            },
        }

    def common(self, store):
        """Return the daemon's settings in [dedupd] for any site.

        :param store: the settings of the store
        """
        certificate = self.etc / 'server.pem'
        return {
            **store,
            'socket': self.socket,
            'status_listen': f'127.0.0.1:{self.port}',
            'listen': self.listen,
            'tls_cert': certificate,
            'tls_key': certificate,
            'tls_client_ca': self.authority,
            # All hosts and sites of a test have the same certificate.
            'replicate_from': self.operator.stem,
            'upload_from': self.operator.stem,
            'scope': 'global',
        }

    def launch(self):
        self.cloud.make_repositories()
        if self._has_swift:
            self.cloud.services['swift'].attach(self.repository)
        self._launch(self._sections())


class Cache(_Dedupd):
    """The cache of a compute host, in front of Glance."""

    name = 'dedupd'
    title = 'the cache'
    needs = ('dedupd', 'glance')
    #: Whether it fetches blocks with the operator's certificate, not with the
    #: tokens of the users who request an image.
    trusted = False
    #: More options of ``[cache]`` in its configuration.
    options: dict = {}
    #: URLs of the caches of other hosts, which then may use this one.
    neighbours: list = []

    @property
    def socket(self):
        return self.directory / 'dedupd.sock'

    @property
    def nbd_socket(self):
        return self.directory / 'nbd.sock'

    @property
    def repository(self):
        return self.directory / 'repository'

    @property
    def url(self):
        """Return Glance's URL for processes on the host."""
        return f'http://127.0.0.1:{CACHE_PORT}'

    @property
    def listen(self):
        """Return the address for neighbours, on the host's own interface."""
        return f'{self.host.ip}:{CACHE_PORT + 2}'

    def prepare(self):
        self.clear()

    @contextlib.contextmanager
    def configured(self, options, trusted=False):
        """Run with other options in the ``with`` block.

        The cache is empty when the block begins, and when it has ended.
        """
        before = self.trusted, self.options
        try:
            self.restart_empty(trusted, options)
            yield self
        finally:
            self.restart_empty(*before)

    def restart_empty(self, trusted, options):
        """Remove the cache's content, and start it with these options."""
        self.stop()
        self.clear()
        self.trusted, self.options = trusted, options
        self.start()

    def clear(self):
        """Remove its content while it is down."""
        shutil.rmtree(self.repository, ignore_errors=True)
        shutil.rmtree(self.directory / 'filter', ignore_errors=True)
        image_repository.Repository.create(self.repository)

    def launch(self):
        storing = self.cloud.services['dedupd']
        self._launch({
            'DEFAULT': {'debug': True, 'mode': 'cache'},
            'dedupd': {
                'datadir': self.repository,
                'socket': self.socket,
                'nbd_socket': self.nbd_socket,
                'glance_url': self.cloud.url('glance'),
                'filter_dir': self.directory / 'filter',
                'filter_mib': 16,
                **(self._tls(storing) if self.neighbours else {}),
            },
            'cache': {
                'listen': f'127.0.0.1:{CACHE_PORT}',
                'upstream_url': f'https://{storing.listen}',
                'upstream_ca': storing.authority,
                **({'upstream_cert': storing.operator} if self.trusted
                   else {}),
                **({'neighbours': ','.join(self.neighbours)}
                   if self.neighbours else {}),
                **self.options,
            },
        })

    def _tls(self, storing):
        """Return the options of the listener; hosts share the certificate."""
        certificate = storing.etc / 'server.pem'
        return {'listen': self.listen, 'tls_cert': certificate,
                'tls_key': certificate, 'tls_client_ca': storing.authority}


class NovaBase:
    """The process ``dedupd-nova-base`` with a cache, while it is entered.

    It checks Glance's images each second.

    :param cache: which offers images once it was started with :attr:`options`,
        trusted
    :param account: whose images
    """

    PROGRAM = (
        'import sys; from dedupd.compute.novabase import link_sync, main; '
        'link_sync.INTERVAL = 1; sys.exit(main.main())')
    LIMIT = 60

    def __init__(self, cloud, cache, account='demo'):
        self._cloud = cloud
        self._cache = cache
        self.base = (cloud.services[f'{cache.host.name}/nova-compute']
                     .instances / '_base')
        self.mounted = cloud.directory / f'mounted-{cache.host.name}'
        self.options = {'cloud': account, 'nova_base': self.base,
                        'nova_mount': self.mounted}

    def __enter__(self):
        self.base.mkdir(parents=True, exist_ok=True)
        log = (self._cloud.directory / 'log'
               / f'{self._cache.host.name}-nova-base')
        with open(log, 'ab') as output:
            self._process = subprocess.Popen(
                [*self._cache.host.enter(), sys.executable, '-c',
                 self.PROGRAM, '--config-file',
                 self._cache.etc / 'dedupd.conf'],
                cwd=daemons.ROOT, stdin=subprocess.DEVNULL, stdout=output,
                stderr=output, env={
                    **os.environ, 'PYTHONPATH': str(daemons.ROOT),
                    'OS_CLIENT_CONFIG_FILE': str(self._cloud.clouds_yaml)})
        self._cache.wait_for(self.mounted.is_mount)
        return self

    def __exit__(self, *exc_info):
        self._process.kill()
        self._process.wait(self.LIMIT)
        subprocess.run(['umount', '-l', self.mounted], timeout=self.LIMIT)

    def link(self, image):
        """Wait until Nova's file of an image is a link; return its path."""
        path = self.base / base_links.name_of(image)
        self._cache.wait_for(path.is_symlink)
        return path
