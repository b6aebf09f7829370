# SPDX-License-Identifier: Apache-2.0

"""A daemon that is watched by its status listener, or over a broker."""

import contextlib

from tests.support import daemons
from tests.support import ports


class Daemon(daemons.Daemon):
    """A daemon with a status listener.

    :param default: lines for ``[DEFAULT]``
    :param sections: further sections
    :param options: of ``[dedupd]``
    """

    def __init__(self, repository, default='', sections='', **options):
        self.port = ports.free_port()
        self.url = f'http://127.0.0.1:{self.port}/'
        self._default = default
        self._sections = sections
        super().__init__(repository, status_listen=f'127.0.0.1:{self.port}',
                         **options)

    def write_config(self, **options):
        super().write_config(**options)
        text = self.config.read_text().replace(
            '[DEFAULT]\ndebug = true\n', f'[DEFAULT]\n{self._default}\n')
        self.config.write_text(text + self._sections)

    def get(self, path):
        """Return the JSON of a request that must succeed."""
        response = self.request('GET', path)
        assert response.status == 200, response.body
        return response.json()

    def perform(self, task, **arguments):
        """Run a task that must end well, and return its result."""
        last = self.run(task, **arguments)['last']
        assert last['error'] is None, last
        return last['result']


@contextlib.contextmanager
def running(repository, **options):
    """A daemon that serves requests, and has its catalog."""
    with Daemon(repository, **options) as daemon:
        daemon.start()
        daemon.wait_for_catalog()
        yield daemon
        daemon.stop()
