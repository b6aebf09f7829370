# SPDX-License-Identifier: Apache-2.0

"""Swift's proxy and its three kinds of storage server, in one process.

Run by the Python of Swift's environment::

    python swift_process.py DIRECTORY ADDRESS PROXY ACCOUNT CONTAINER OBJECT

where DIRECTORY has what ``swift_server.py`` writes, ADDRESS is the proxy's,
and the rest is ports, on loopback but for the proxy's. One process starts in a
quarter of the time of four. Rings have one device, and there is one replica.
"""

import pathlib
import sys

import eventlet

eventlet.monkey_patch()

from eventlet import wsgi  # noqa: E402
from swift.common.ring import builder  # noqa: E402
from swift.common import storage_policy  # noqa: E402
from swift.common import utils  # noqa: E402
from swift.common import wsgi as swift_wsgi  # noqa: E402

KINDS = 'account', 'container', 'object'


def make_ring(directory, kind, port):
    ring = builder.RingBuilder(4, 1, 1)
    ring.add_dev({'id': 0, 'region': 1, 'zone': 1, 'ip': '127.0.0.1',
                  'port': port, 'device': 'one', 'weight': 1.0,
                  'replication_ip': '127.0.0.1', 'replication_port': port})
    ring.rebalance()
    ring.get_ring().save(str(directory / f'{kind}.ring.gz'))


def main():
    directory = pathlib.Path(sys.argv[1])
    address = sys.argv[2]
    proxy, *storage = map(int, sys.argv[3:])
    for kind, port in zip(KINDS, storage, strict=True):
        make_ring(directory, kind, port)
    # These settings are otherwise in /etc/swift.
    utils.SWIFT_CONF_FILE = str(directory / 'swift.conf')
    utils.validate_configuration()
    storage_policy.reload_storage_policies()
    servers = []
    for kind, port in zip((*KINDS, 'proxy'), (*storage, proxy), strict=True):
        application = swift_wsgi.loadapp(str(directory / f'{kind}.conf'))
        listener = eventlet.listen(
            (address if kind == 'proxy' else '127.0.0.1', port))
        servers.append(eventlet.spawn(
            wsgi.server, listener, application, log_output=False,
            protocol=swift_wsgi.SwiftHttpProtocol))
    print('ready', flush=True)
    for server in servers:
        server.wait()


if __name__ == '__main__':
    main()
