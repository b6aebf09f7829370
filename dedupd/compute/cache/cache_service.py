# SPDX-License-Identifier: Apache-2.0

"""The additional parts of a daemon in the mode ``cache``, put together.

The proxy (``glance_proxy.py``) serves images that arrive (``arrival_list.py``)
or are held (``cache_catalog.py``). The evictor (``evictor.py``) removes images
when there are too many; it is a task like others.
"""

from collections.abc import Callable
import contextlib
import os
from typing import Any

from oslo_config import cfg

from dedupd.compute.cache import arrival_list
from dedupd.compute.cache import arriving_image
from dedupd.compute.cache import block_lending
from dedupd.compute.cache import cache_catalog
from dedupd.compute.cache import cached_uploads
from dedupd.compute.cache import glance_proxy
from dedupd.compute.cache import neighbour_caches
from dedupd.compute.cache import offered_images
from dedupd.http import listeners
from dedupd.http import upstream_client
from dedupd.serve import image_handlers
from dedupd.serve import image_source
from glance_dedup.base import exceptions
from glance_dedup.client import client_errors
from glance_dedup.client import daemon_client
from glance_dedup.repository import image_repository


def require_options(conf: cfg.ConfigOpts) -> None:
    """Refuse options that do not go together.

    :raises ValueError: names the options, and a remedy
    """
    if conf.profiler.enabled:
        _tracing(conf)
    if conf.mode != 'cache':
        return
    listeners.require_distinct(conf.cache.listen, conf.cache.relay_listen)
    if not conf.dedupd.glance_url:
        raise ValueError('mode = cache needs [dedupd] glance_url, the Image '
                         'service that requests are passed on to')
    if not conf.cache.upstream_url:
        raise ValueError('mode = cache needs [cache] upstream_url, the '
                         "storing host's daemon, such as "
                         'https://controller:9393')
    if conf.cache.nova_base:
        require_nova_options(conf)
    if conf.cache.upstream_key and not conf.cache.upstream_cert:
        raise ValueError('[cache] upstream_key needs upstream_cert, whose key '
                         'it is')
    try:
        _connect(conf, conf.cache.upstream_url).close()
    except (OSError, ValueError) as e:
        raise ValueError('[cache] upstream_url, upstream_ca, upstream_cert: '
                         f'{e}') from e
    require_neighbours(conf)


def _tracing(conf: cfg.ConfigOpts) -> tuple[Any, Any]:
    """The module that continues traces, and the options of OSProfiler.

    :raises ValueError: if traces cannot be continued
    """
    if conf.mode != 'cache':
        raise ValueError('[profiler] enabled is only for mode = cache. '
                         'Elsewhere Glance traces the store: unset it')
    try:
        from dedupd.http import tracing
    except ImportError:
        raise ValueError('[profiler] enabled needs the package osprofiler: '
                         'install it, or unset the option')
    return tracing, tracing.read_options(conf.config_file, conf.config_dir)


def require_neighbours(conf: cfg.ConfigOpts) -> None:
    """Refuse addresses that no neighbour can have.

    :raises ValueError: names the address
    """
    addresses = conf.cache.neighbours
    if len(addresses) > neighbour_caches.MAX_COUNT:
        raise ValueError(
            f'[cache] neighbours: {neighbour_caches.MAX_COUNT} are '
            'the most; name the hosts of one rack')
    for address in addresses:
        try:
            _connect(conf, address).close()
        except (OSError, ValueError) as e:
            raise ValueError(f'[cache] neighbours: {e}') from e


def require_nova_options(conf: cfg.ConfigOpts) -> None:
    """Refuse options that do not go together with ``nova_base``.

    :raises ValueError: names the options, and a remedy
    """
    options = conf.cache
    for name, missing, why in (
            ('[cache] cloud', not options.cloud,
             'the account that lists the images to offer'),
            ('[cache] upstream_cert', not options.upstream_cert,
             'without which no image is fetched before a token asks for it'),
            ('[dedupd] nbd_socket', not conf.dedupd.nbd_socket,
             'through which the files are read')):
        if missing:
            raise ValueError(f'[cache] nova_base needs {name}, {why}')
    for name in ('nova_base', 'nova_mount'):
        if not os.path.isabs(options[name]):
            raise ValueError(f'[cache] {name}: {options[name]} is not an '
                             'absolute path')


def _connect(conf: cfg.ConfigOpts, address: str, token: str | None = None,
             connect_timeout: float = 10.0, timeout: float = 60.0
             ) -> daemon_client.Client:
    """A client of the storing host's daemon, or of a neighbour's.

    :param token: the user's token, if this host is not an operator
    """
    options = conf.cache
    return daemon_client.Client(
        address, ca_file=options.upstream_ca, cert=options.upstream_cert,
        key=options.upstream_key,
        token=None if options.upstream_cert else token,
        connect_timeout=connect_timeout, timeout=timeout)


class Cache:
    """The parts of a cache. It is made after the repository is opened.

    :param evict: requests the task of that name, or raises BusyError
    :ivar held: the images that the cache holds
    :ivar arrivals: the images that arrive from the storing host
    :ivar neighbours: the other caches of the rack
    :raises InvalidParameter: if the repository is not a cache's
    """

    def __init__(self, conf: cfg.ConfigOpts,
                 repository: image_repository.Repository,
                 evict: Callable[[], Any]) -> None:
        self._conf = conf
        self._repository = repository
        self.held = cache_catalog.Held(
            repository, lambda: conf.cache.limit_mib << 20)
        self.neighbours = neighbour_caches.Neighbours(
            conf.cache.neighbours, lambda address, token: _connect(
                conf, address, token,
                connect_timeout=neighbour_caches.CONNECT_SECONDS,
                timeout=neighbour_caches.SILENT_SECONDS),
            repository.repository_id)
        self.arrivals = arrival_list.Arrivals(
            repository,
            lambda token: _connect(conf, conf.cache.upstream_url, token),
            neighbours=self.neighbours, on_begin=self._begun,
            on_arrived=self._arrived, on_wrong=self._is_wrong)
        self._evict = evict
        self._offers = (offered_images.File(conf.dedupd.datadir)
                        if conf.cache.nova_base else None)
        self._upstream = upstream_client.Upstream(conf.dedupd.glance_url,
                                                  conf.dedupd.glance_ca)
        self._traces = None
        if conf.profiler.enabled:
            tracing, options = _tracing(conf)
            self._traces = tracing.Traces(options)

    def proxy(self, reads: image_handlers.Reads) -> glance_proxy.Proxy:
        """Make the proxy that answers for Glance."""
        # Only an operator may send blocks, since their fingerprints alone
        # would be enough to get them.
        uploads = None
        if self._conf.cache.upstream_cert:
            uploads = cached_uploads.Uploads(
                self._repository, self._upstream,
                lambda: _connect(self._conf, self._conf.cache.upstream_url))
        self._proxy = glance_proxy.Proxy(
            self._repository, self._upstream, self.arrivals, self.held,
            reads, uploads, self._is_offered, self._conf.cache.upstream_url,
            self._traces)
        return self._proxy

    def lending(self, reads: image_handlers.Reads) -> block_lending.Lending:
        """Make the part that gives neighbours blocks."""
        self._lending = block_lending.Lending(
            self._repository.repository_id, reads, self.arrivals,
            by_token=not self._conf.cache.upstream_cert)
        return self._lending

    def status(self) -> dict[str, Any]:
        """The cache's figures. REQUIRES: its proxy and lending were made."""
        return {**self._proxy.status(), 'neighbours': {
            **self.neighbours.status(), **self._lending.status()}}

    def _is_offered(self, image_id: str) -> bool:
        """Return whether servers, even shut off, may have it as their base."""
        return (self._offers is not None
                and image_id in self._offers.offers())

    def arrive(self, image_id: str, held_back: bool = True
               ) -> image_source.Reading:
        """Open an image that is here or begins to arrive, for this host.

        This sends no request to Glance, so only a host that the peer takes
        for an operator gets any. An image that is offered to Nova is compared
        with Glance's facts of that time.

        :param held_back: as for `arrival_list.Arrivals.open`
        :raises ImageNotFound: if the peer has none, or none for this host
        :raises ArrivalFailed, ClientError: if the image does not come
        """
        expected = self._expected(image_id)
        try:
            reading = self.arrivals.open(image_id, expected, None,
                                         held_back=held_back)
        except client_errors.Refused as e:
            if e.code in (401, 403, 404):
                raise exceptions.ImageNotFound(str(e)) from e
            raise
        self.held.used(image_id)
        return reading

    def _expected(self, image_id: str) -> arriving_image.Expected | None:
        """Glance's facts of an image that is offered to Nova.

        :raises ArrivalFailed: if the peer is known to have another image
        """
        if self._offers is None:
            return None
        offer = self._offers.offers().get(image_id)
        if offer is None:
            return None
        if self.held.is_wrong(image_id, offer.expected.mark):
            raise image_source.ArrivalFailed(
                f'image {image_id}: the storing host has another one')
        return offer.expected

    def _begun(self, image_id: str, size: int) -> None:
        # Another process may be the maintainer, or this one not yet.
        with contextlib.suppress(exceptions.BusyError):
            self._evict()

    def _arrived(self, image_id: str, expected: Any) -> None:
        if expected is not None:
            self.held.note(image_id, expected.size, expected.md5)
        else:
            self.held.note_uncompared(image_id)

    def _is_wrong(self, image_id: str, expected: arriving_image.Expected,
                  why: str) -> None:
        self.held.note_wrong(image_id, expected.size, expected.mark, why)

    def close(self) -> None:
        """Close all parts. REQUIRES: the event loop runs, and no task does."""
        self._upstream.close()
        self.held.close()
        if self._traces is not None:
            self._traces.close()
