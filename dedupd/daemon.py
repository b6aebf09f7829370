# SPDX-License-Identifier: Apache-2.0

"""The daemon's process: ``dedupd --config-file /etc/dedupd/dedupd.conf``.

There is one process with four kinds of threads. The first runs an event
loop, which has all sockets and never touches the repository; a bounded set of
threads reads for it; one thread runs the tasks
(``task_scheduler.py``); and one keeps the host's filter up to date
(``filter_follower.py``). The daemon needs no service framework, because it has
no worker processes to supervise: the loop handles signals, and systemd
restarts a daemon that died. Reading needs no more processes either, because
the engine works without the GIL.

SIGTERM and SIGINT end the process: it stops listening, lets running responses
finish, and stops the task after its step. After eight seconds it cuts off the
rest, which does no harm: every step survives a crash. SIGHUP reads the
changeable options and the certificates again. SIGUSR2 has a report written
(``guru_report.py``).
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

from oslo_config import cfg
from oslo_log import log

from dedupd.compute.cache import cache_service
from dedupd.endpoints import http_api
from dedupd.endpoints import operations
from dedupd.http import glance_tokens
from dedupd.http import http_server
from dedupd.http import listeners
from dedupd.http import tls_context
from dedupd.http import upstream_client
from dedupd import opts
from dedupd.process import guru_report
from dedupd.process import logs
from dedupd.process import systemd
from dedupd.schedule import task_scheduler
from dedupd.serve import image_handlers
from dedupd.serve import image_source
from dedupd.serve import nbd
from dedupd.serve import replica_receiver
from dedupd.serve import replica_uploads
from dedupd.serve import slice_fetching
from dedupd.serve import upload_rights
from dedupd import settings
from dedupd.status import expiry
from dedupd.sync import filter_follower
from dedupd.tasks import registry
from glance_dedup.base import exceptions
from glance_dedup.base import thread_pool
from glance_dedup.repository import image_repository

LOG = log.getLogger('dedupd.daemon')

_DESCRIPTION = (
    'Maintain a repository of glance-dedup and serve reads from it, or keep a '
    "compute host's cache of images (--mode cache).")
# From glibc's malloc.h.
_M_ARENA_MAX = -8
# The options that name Unix sockets, each with the option for its users.
_SOCKETS = {'socket': 'socket_users', 'nbd_socket': 'nbd_users'}
#: Seconds at the end for responses to finish, and for the task to stop.
DRAIN_SECONDS = 8.0
#: Seconds after these for keeping the blocks of arriving images.
ARRIVALS_SECONDS = 1.0
#: Seconds after these for the last notifications and answers.
MESSAGING_SECONDS = 1.0
#: Seconds after which the process ends, even if a disk or a thread hangs.
END_SECONDS = 9.5


def read_options(arguments: list[str],
                 description: str = _DESCRIPTION) -> cfg.ConfigOpts:
    """Read the options, and check the value of each.

    :param description: of the program, for ``--help``
    :raises cfg.Error, ValueError: if an option is invalid
    """
    conf = settings.parse(arguments, description)
    for group, options in opts.GROUPS.items():
        for option in options:
            conf[group][option.dest]
    cache_service.require_options(conf)
    require_replication(conf.replication)
    require_rights(conf.dedupd)
    return conf


def warn_of_unknown(conf: cfg.ConfigOpts) -> None:
    """Log settings without effect, such as mistyped names."""
    for sentence in opts.unknown(conf):
        LOG.warning('%s', sentence)


def require_replication(options: Any) -> None:
    """Check conditions that the bounds of single options cannot express.

    :param options: the group ``[replication]``
    :raises ValueError: if ``target_url`` is set, and an option that it needs
        is not
    """
    if options.target_url:
        for name in ('cert', 'from_cloud', 'to_cloud'):
            if not options[name]:
                raise ValueError(f'[replication] target_url needs {name}')


def require_rights(options: Any) -> None:
    """Refuse rights to store images without the scope of these images.

    :param options: the group ``[dedupd]``
    :raises ValueError: names the options, and what to do
    """
    for right in upload_rights.RIGHTS:
        if options[right.option] and not options.scope:
            raise ValueError(
                f'[dedupd] {right.option} needs scope: set it as '
                "dedup_store_scope of Glance's store")


def user_ids(names: list[str],
             option: str = 'socket_users') -> frozenset[int]:
    """The ids of these users, of root, and of the daemon's own user.

    :raises ValueError: if a user does not exist
    """
    return frozenset({0, os.geteuid(), *(
        upload_rights.user_id(name, option) for name in names)})


class Daemon:
    """The parts of the daemon: makes, starts and ends them."""

    def __init__(self, conf: cfg.ConfigOpts, arguments: list[str]) -> None:
        self._conf = conf
        self._arguments = arguments
        self._options = options = conf.dedupd
        self._users = self._find_users()
        self._rights = upload_rights.Rights(options)
        self._tls_context = tls_context.TLSContext(
            options) if options.listen else None
        self._sockets: dict[str, int] = {}
        self._repository = image_repository.Repository(
            options.datadir, filter_dir=options.filter_dir,
            filter_mib=options.filter_mib,
            index=options.index, index_dir=options.index_dir or None,
            segment_cache_mib=options.cache_mib,
            reserve_mib=options.reserve_mib)
        self._cache: cache_service.Cache | None = None
        cached: dict[str, Any] = {}
        if conf.mode == 'cache':
            self._cache = cache_service.Cache(
                conf, self._repository,
                evict=lambda: self._scheduler.request('evict'))
            cached = {'held': self._cache.held,
                      'coming': self._cache.arrivals.coming}
        self._scheduler = task_scheduler.Scheduler(self._repository, conf,
                                                   **cached)
        self._follower = filter_follower.Follower(self._repository)
        self._receiving = replica_receiver.Receiving(
            self._repository, self._rights, options.scope)
        self._replicator = None
        if conf.replication.target_url:
            # Imported only where images are replicated.
            from dedupd.sync import replicator
            self._replicator = replicator.Replicator(
                self._repository, conf, lambda: self._scheduler.is_maintainer,
                self._scheduler.errors, self._scheduler.watchers,
                self._scheduler.past)
        self._readers = thread_pool.Workers(
            'dedupd-read', options.read_threads)
        self._server = http_server.Server(options)
        self._names = None
        if options.glance_cloud:
            # Imported only where names come from Glance.
            from dedupd.sync import image_names
            self._names = image_names.Names(self._repository,
                                            options.glance_cloud)
        self._control = operations.Control(
            self._repository, self._scheduler, self._make_services(),
            self._replicator)
        self._messaging = None
        if conf.transport_url:
            from dedupd.endpoints import messaging
            self._messaging = messaging.Messaging(
                conf, self._control, self._scheduler)

    def _make_services(self) -> operations.Sources:
        """Make the listeners' services; return the sources of their status."""
        options, server = self._options, self._server
        tokens = None
        if options.glance_url:
            tokens = glance_tokens.Tokens(options.glance_url,
                                          options.glance_ca)
        self._reads = image_handlers.Reads(
            self._repository, self._readers, tokens,
            None if self._cache is None else self._cache.arrive, options)
        self._uploads = replica_uploads.Uploads(
            self._receiving, self._reads,
            None if not options.glance_url else upstream_client.Upstream(
                options.glance_url, options.glance_ca))
        self._lending = (None if self._cache is None
                         else self._cache.lending(self._reads))
        optional: dict[str, Any] = {}
        if options.nbd_socket:
            self._exports = nbd.Exports(
                options.nbd_socket, self._repository, self._open_reading,
                options, server.shared.stopping)
            optional['nbd'] = self._exports.status
        if self._cache is not None:
            self._proxy = self._cache.proxy(self._reads)
            optional['cache'] = self._cache.status
        if self._names is not None:
            optional['name'] = self._names.get
        return operations.Sources(
            reads=lambda: {'connections': server.connections,
                           'requests': server.shared.requests,
                           'bytes': server.shared.sent},
            receiving=self._receiving.status,
            certificates=lambda: expiry.certificates(self._conf), **optional)

    async def run(self) -> None:
        """Serve until a signal to end."""
        loop = asyncio.get_running_loop()
        ending = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        guru_report.setup('dedupd', self._conf, {
            'Daemon': self._control.summary,
            'Queues': lambda: {'waiting_reads': self._readers.waiting,
                               'connections': self._server.listening()},
            'Event loop': lambda: guru_report.tasks_of(loop)})
        try:
            self._listen()
            self._scheduler.start()
            self._follower.start()
            if self._names is not None:
                self._names.start()
            if self._replicator is not None:
                self._replicator.start()
            if self._messaging is not None:
                self._messaging.start()
            self._readers.submit(replica_uploads.drop_leftovers,
                                 self._repository)
            self._control.ready = True
            systemd.notify('READY=1')
            self._readers.submit(registry.load)
            LOG.info('Serving %s on %s', self._repository.path,
                     self._options.socket)
            trial = self._repository.trial
            if trial is not None and not trial.is_valid:
                LOG.warning(
                    "Other hosts may use the file system of %s, and this "
                    "host's mount is %s: run 'glance-dedup repository "
                    "test-filesystem' on two hosts at the same time.",
                    self._repository.path, trial.verdict)
            if self._cache is not None:
                LOG.info('Answering for %s on %s, with blocks from %s',
                         self._options.glance_url, self._conf.cache.listen,
                         self._conf.cache.upstream_url)
            await systemd.live_until(ending)
        finally:
            await self._end()

    def _listen(self) -> None:
        options, server = self._options, self._server
        endpoints = http_api.API(self._control, self._reads, self._receiving,
                                 self._uploads,
                                 slice_fetching.Fetching(
                                     self._repository,
                                     server.shared.stopping),
                                 self._lending, self._repository.path,
                                 self._scheduler.watchers,
                                 server.shared.stopping,
                                 metrics_projects=options.metrics_projects)
        server.add(listeners.Listener(
            'unix', self._listen_unix('socket'), endpoints.unix,
            allowed=lambda uid: uid in self._users['socket']))
        if options.nbd_socket:
            server.add(listeners.Listener(
                'nbd', self._listen_unix('nbd_socket'), None,
                allowed=lambda uid: uid in self._users['nbd_socket'],
                other=self._exports.connection))
        if self._tls_context is not None:
            server.add(listeners.Listener(
                'tls', listeners.begin(options.listen, listeners.listen_tcp),
                endpoints.tls, tls=self._tls_context.current))
        if options.status_listen:
            server.add(listeners.Listener(
                'status', listeners.begin(options.status_listen,
                                          listeners.listen_tcp),
                endpoints.status))
        if self._cache is not None:
            server.add(self._cache_listener(self._conf.cache.listen))

    def _open_reading(self, image_id: str) -> image_source.Reading:
        """Open an image for reading over NBD. Blocks the thread."""
        if self._cache is not None:
            # A guest reads a disk's end before anything else.
            return self._cache.arrive(image_id, held_back=False)
        return image_source.Present(self._repository.open_image(image_id))

    def _listen_unix(self, option: str) -> socket.socket:
        """Listen on the Unix socket that an option names."""
        return self._listen_at(self._options[option],
                               self._socket_mode(option))

    def _cache_listener(self, where: str) -> listeners.Listener:
        """Listen for Nova; on a Unix socket, only for the relay and root."""
        if listeners.is_path(where):
            return listeners.Listener(
                'cache', self._listen_at(where, 0o600), self._proxy.serve,
                allowed=user_ids([]).__contains__)
        return listeners.Listener(
            'cache', listeners.begin(where, listeners.listen_tcp),
            self._proxy.serve)

    def _listen_at(self, path: str, mode: int) -> socket.socket:
        sock = listeners.begin(path, lambda where: listeners.listen_unix(
            where, mode))
        self._sockets[path] = os.stat(path).st_ino
        return sock

    def _find_users(self) -> dict[str, frozenset[int]]:
        """The user ids that each Unix socket admits, by its option."""
        return {option: user_ids(self._options[users], users)
                for option, users in _SOCKETS.items()}

    def _socket_mode(self, option: str) -> int:
        # With 0600 only the owner could connect. The server checks the user
        # id of each client.
        return 0o666 if self._options[_SOCKETS[option]] else 0o600

    def _reload(self) -> None:
        """Read the changeable options, and the certificates, again."""
        LOG.info('Reading the options again.')
        systemd.notify('RELOADING=1\n'
                       f'MONOTONIC_USEC={time.monotonic_ns() // 1000}')
        try:
            # Invalid options must not replace valid ones.
            warn_of_unknown(read_options(self._arguments))
            self._conf.mutate_config_files()
            users = self._find_users()
            self._rights.load()
            if self._tls_context is not None:
                self._tls_context.load()
        except Exception as e:
            LOG.error('Some options stay as they were: %s', e)
        else:
            self._users = users
            for option in _SOCKETS:
                if self._options[option] in self._sockets:
                    os.chmod(self._options[option],
                             self._socket_mode(option))
        self._repository.handle().set_segment_cache(
            self._options.cache_mib << 20)
        self._scheduler.reload()
        if self._replicator is not None:
            self._replicator.reload()
        systemd.notify('READY=1')

    async def _end(self) -> None:
        LOG.info('Ending.')
        systemd.notify('STOPPING=1')
        self._control.ready = False
        # The process ends in time, even if a disk or a thread hangs.
        timer = threading.Timer(END_SECONDS, os._exit, (0,))
        timer.daemon = True
        timer.start()
        deadline = time.monotonic() + DRAIN_SECONDS
        self._scheduler.stop()
        self._follower.stop()
        if self._names is not None:
            self._names.stop()
        if self._replicator is not None:
            self._replicator.stop()
        self._remove_sockets()
        await self._server.stop(DRAIN_SECONDS)
        await self._receiving.stop()
        if self._cache is not None:
            await self._stop_cache(self._cache, deadline)
        while not (self._scheduler.join(0) and self._follower.join(0)):
            if time.monotonic() > deadline:
                LOG.warning('The running task is cut off.')
                return
            await asyncio.sleep(0.02)
        if self._cache is not None:
            self._cache.close()
        if self._messaging is not None:
            self._messaging.stop(MESSAGING_SECONDS)
        self._scheduler.figures.close()
        self._repository.close()

    async def _stop_cache(self, cache: cache_service.Cache,
                          deadline: float) -> None:
        """End the pulls of arriving images, and keep the blocks that came."""
        left = max(0.0, deadline - time.monotonic())
        try:
            async with asyncio.timeout(left + ARRIVALS_SECONDS):
                await asyncio.wrap_future(
                    self._readers.submit(cache.arrivals.stop, left))
        except TimeoutError:
            LOG.warning('Pulls of arriving images are cut off.')

    def _remove_sockets(self) -> None:
        for path, inode in self._sockets.items():
            with contextlib.suppress(OSError):
                # Another daemon may have put its own there.
                if os.stat(path).st_ino == inode:
                    os.unlink(path)


def _share_one_heap() -> None:
    """Have all threads allocate from one heap, where the C library can.

    By default glibc gives each thread a heap of its own, which keeps the
    memory that the thread has freed. Together the heaps keep as much again as
    the segment cache may have. The daemon allocates few and large pieces, so
    threads hardly wait for the lock of the one heap.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon; the console script ``dedupd``.

    :returns: 1 or 2 if it cannot start; otherwise it ends the process itself
    """
    _share_one_heap()
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        conf = read_options(arguments)
        logs.setup(conf)
        warn_of_unknown(conf)
        # A connection needs a descriptor, and so do open images and groups.
        with contextlib.suppress(OSError, ValueError):
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        asyncio.run(Daemon(conf, arguments).run())
    except (exceptions.RepositoryError, cfg.Error, OSError, ValueError) as e:
        LOG.critical('dedupd cannot start: %s', e)
        print(f'dedupd: {e}', file=sys.stderr)
        return systemd.exit_status(e)
    logging.shutdown()
    # This does not wait for a thread that hangs.
    os._exit(0)


if __name__ == '__main__':
    sys.exit(main())
