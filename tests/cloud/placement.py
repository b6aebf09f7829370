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
"""Placement, which tells Nova where there is room for a server."""

from tests.cloud import service


class Placement(service.WsgiService):
    name = 'placement'
    title = 'Placement'
    needs = ('mariadb',)
    application = 'placement.wsgi.api:application'
    catalogue = ('placement', '')
    user = 'placement'
    workers = 1

    def _configure(self):
        return self.write('placement.conf', {
            'DEFAULT': {'use_stderr': True},
            'placement_database': {
                'connection': self.cloud.database('placement')},
            'keystone_authtoken':
                self.cloud.services['keystone'].middleware(self.user),
        })

    def prepare(self):
        config = self._configure()
        self.cloud.services['mariadb'].provide(
            self, 'openstack-placement', ['placement'], lambda: self.run(
                [self.prefix / 'bin' / 'placement-manage',
                 '--config-file', config, 'db', 'sync']))

    def launch(self):
        self._configure()
        self.serve({'OS_PLACEMENT_CONFIG_DIR': str(self.etc)})
