# SPDX-License-Identifier: Apache-2.0

"""The process ``dedupd-relay``: an address for Nova that always answers.

It reads the options of a daemon in the mode ``cache``. It is not part of the
daemon because it must run while the daemon does not. So it opens no
repository, imports nothing of the engine, and reads no option that it does not
need: an invalid one stops the daemon, and not the relay.

SIGTERM and SIGINT end the process: it accepts no more connections, and lets
running responses finish for a while. If systemd holds the socket, further
connections wait there for the next process.
"""

import asyncio
import logging
import signal
import socket
import sys

from oslo_config import cfg
from oslo_log import log

from dedupd.compute.relay import liveness
from dedupd.compute.relay import request_relay
from dedupd.http import http_server
from dedupd.http import listeners
from dedupd.http import upstream_client
from dedupd.process import guru_report
from dedupd.process import logs
from dedupd.process import systemd
from dedupd import settings

LOG = log.getLogger('dedupd.compute.relay')

#: The most seconds without a byte from a cache that lives. It limits its own
#: waits, of which those for the end of an upload are the longest.
PATIENCE = 86400.0
#: Seconds at the end for responses to finish.
DRAIN_SECONDS = 8.0


def _sockets(conf: cfg.ConfigOpts) -> list[socket.socket]:
    """The passed sockets, or a new one.

    :raises OSError, ValueError: if there is none that only this host reaches
    """
    passed = systemd.passed_sockets()
    for sock in passed:
        host, port = sock.getsockname()[:2]
        if not listeners.is_loopback(host):
            raise ValueError(f'the passed socket listens on {host}, port '
                             f'{port}, which is not an address of the '
                             'loopback interface')
    if passed:
        return passed
    address = conf.cache.relay_listen
    if not address:
        raise ValueError('[cache] relay_listen is not set, and systemd passed '
                         'no socket')
    listeners.require_loopback('relay_listen', address)
    return [listeners.begin(address, listeners.listen_tcp)]


def _check(conf: cfg.ConfigOpts) -> None:
    """Refuse options that name no server to pass requests on to.

    :raises ValueError: names the options
    """
    if conf.mode != 'cache' or not conf.dedupd.glance_url:
        raise ValueError('dedupd-relay needs mode = cache, and [dedupd] '
                         'glance_url')
    listeners.require_distinct(conf.cache.listen, conf.cache.relay_listen)


async def _run(conf: cfg.ConfigOpts, sockets: list[socket.socket]) -> None:
    """Serve until a signal to end."""
    loop = asyncio.get_running_loop()
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    guru_report.setup('dedupd-relay', conf, {
        'Event loop': lambda: guru_report.tasks_of(loop)})
    pulse = liveness.Pulse(conf.dedupd.socket)
    where = conf.cache.listen
    cache = upstream_client.Upstream(
        f'unix:{where}' if listeners.is_path(where) else f'http://{where}',
        patience=PATIENCE, watch=pulse.watch)
    glance = upstream_client.Upstream(conf.dedupd.glance_url,
                                      conf.dedupd.glance_ca)
    relay = request_relay.Relay(cache, glance, pulse)
    server = http_server.Server(conf.dedupd)
    looking = asyncio.create_task(pulse.run())
    for sock in sockets:
        server.add(listeners.Listener('relay', sock, relay.serve))
    systemd.notify('READY=1')
    LOG.info('Passing requests on to %s, or to %s.', cache.url, glance.url)
    await systemd.live_until(ending)
    LOG.info('Ending.')
    systemd.notify('STOPPING=1')
    await server.stop(DRAIN_SECONDS)
    looking.cancel()
    cache.close()
    glance.close()


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal ends it."""
    try:
        conf = settings.parse(
            sys.argv[1:] if arguments is None else arguments,
            "Pass Nova's requests on to a cache of dedupd, or to Glance while "
            'the cache is away.')
        logs.setup(conf)
        _check(conf)
        asyncio.run(_run(conf, _sockets(conf)))
    except (cfg.Error, OSError, ValueError) as e:
        LOG.critical('dedupd-relay cannot start: %s', e)
        print(f'dedupd-relay: {e}', file=sys.stderr)
        return systemd.exit_status(e)
    logging.shutdown()
    return 0


if __name__ == '__main__':
    sys.exit(main())
