# Licensed under the Apache License, Version 2.0 (the "License"); you may
# not use this file except in compliance with the License. You may obtain
# a copy of the License at
#
#      http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS, WITHOUT
# WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the
# License for the specific language governing permissions and limitations
# under the License.
"""dedupd, on the repository of the cloud's first store of the type dedup."""

import sys

from dedupd import client as client_module
from tests.cloud import service


class Dedupd(service.Service):
    name = 'dedupd'
    title = 'dedupd'
    needs = ('rabbitmq',)

    @property
    def socket(self):
        return self.cloud.directory / 'dedupd.sock'

    @property
    def address(self):
        """Of the status page."""
        return f'{self.url}/'

    @property
    def repository(self):
        return self.cloud.repository

    def client(self):
        return client_module.Client(f'unix:{self.socket}')

    def launch(self):
        self.cloud.make_repositories()
        path = self.write('dedupd.conf', {
            'DEFAULT': {
                'debug': True,
                'transport_url': self.cloud.services['rabbitmq'].transport_url,
            },
            'dedupd': {
                'datadir': self.repository,
                'socket': self.socket,
                'status_listen': f'127.0.0.1:{self.port}',
                'filter_dir': self.cloud.directory / 'filter',
                'filter_mib': 16,
                'glance_notifications': True,
            },
        })
        self.spawn([sys.executable, '-m', 'dedupd.main', '--config-file',
                    path], cwd=service.TOP)

    def answers(self):
        status = self.client().status()
        return (status['daemon']['role'] == 'maintainer'
                and status['catalog']['state'] == 'ready')
