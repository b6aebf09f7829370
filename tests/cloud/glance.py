# SPDX-License-Identifier: Apache-2.0
"""Glance, with the stores that are given, and Keystone to ask."""

import sys

from tests.cloud import service
from tests.functional import glance_server


class _Server(glance_server.GlanceServer):
    """Its configuration; Glance's own policy."""

    @staticmethod
    def policy():
        return ''


class Glance(service.WsgiService):
    name = 'glance'
    title = 'Glance'
    needs = ('mariadb', 'rabbitmq', 'dedupd')
    application = 'glance.wsgi.api:application'
    catalogue = ('image', '')
    user = 'glance'
    prefix = sys.prefix

    def reconfigure(self, stores=None, default_store=None, options=None):
        """Go on with other stores or options; None leaves what there is."""
        self.stop()
        self.cloud.configure_glance(stores, default_store, options)
        self.start()

    def _configure(self):
        cloud = self.cloud
        cloud.make_repositories()
        keystone = cloud.services['keystone']
        options = {
            'DEFAULT': {
                'transport_url': cloud.services['rabbitmq'].transport_url,
                'enabled_import_methods':
                    '[glance-direct,web-download,copy-image]',
                'worker_self_reference_url': self.url,
            },
            # By default a request waits for a broker that is down, for ever.
            'oslo_messaging_notifications': {
                'driver': 'messagingv2', 'retry': 0},
            'keystone_authtoken': keystone.middleware(self.user),
            # Certificates of signed images come from Barbican, by default.
            'barbican': {'auth_endpoint': f'{keystone.url}/v3'},
            'paste_deploy': {'flavor': 'keystone'},
        }
        for section, values in cloud.glance_options.items():
            options.setdefault(section, {}).update(values)
        server = _Server(
            self.directory, cloud.stores, cloud.default_store,
            options=options, database=cloud.database('glance'))
        server.etc, server.log = self.etc, self.log
        server.configure()

    def prepare(self):
        self._configure()
        self.cloud.services['mariadb'].provide(
            self, 'glance', ['glance'], lambda: self.run(
                [f'{self.prefix}/bin/glance-manage', '--config-file',
                 self.etc / 'glance-api.conf', 'db', 'sync']))

    def launch(self):
        self._configure()
        self.serve({'OS_GLANCE_CONFIG_DIR': str(self.etc)})
