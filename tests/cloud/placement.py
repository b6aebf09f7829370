# SPDX-License-Identifier: Apache-2.0
"""Placement, which finds hosts with room for a server for Nova."""

from tests.cloud import cloud_service


class Placement(cloud_service.WsgiService):
    name = 'placement'
    environment_name = 'placement'
    title = 'Placement'
    needs = ('mariadb',)
    application = 'placement.wsgi.api:application'
    catalogue = ('placement', '')
    user = 'placement'

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
