#    Licensed under the Apache License, Version 2.0 (the "License"); you may
#    not use this file except in compliance with the License. You may obtain
#    a copy of the License at
#
#         http://www.apache.org/licenses/LICENSE-2.0
#
#    Unless required by applicable law or agreed to in writing, software
#    distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
#    WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
#    License for the specific language governing permissions and limitations
#    under the License.

"""A daemon that others watch: by its status listener, or over a broker."""

import contextlib

from tests.support import daemons
from tests.support import ports


class Daemon(daemons.Daemon):
    """One with a status listener.

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
        """JSON of a request that must succeed."""
        response = self.request('GET', path)
        assert response.status == 200, response.body
        return response.json()

    def perform(self, task, **arguments):
        """Have a task run that must end well; its result."""
        last = self.run(task, **arguments)['last']
        assert last['error'] is None, last
        return last['result']


@contextlib.contextmanager
def running(repository, **options):
    """A daemon that serves, and has its catalog."""
    with Daemon(repository, **options) as daemon:
        daemon.start()
        daemon.wait_for_catalog()
        yield daemon
        daemon.stop()
