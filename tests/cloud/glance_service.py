# SPDX-License-Identifier: Apache-2.0
"""Glance, with the given stores, and with Keystone."""

from tests.cloud import cloud_service
from tests.functional import glance_server


class _Server(glance_server.GlanceServer):
    """Glance's configuration, with its own policy."""

    @staticmethod
    def policy():
        return ''


class Glance(cloud_service.WsgiService):
    name = 'glance'
    title = 'Glance'
    needs = ('mariadb', 'rabbitmq', 'dedupd')
    application = 'glance.wsgi.api:application'
    catalogue = ('image', '')
    user = 'glance'
    #: Its database's name.
    database = 'glance'

    @property
    def told(self):
        return self.cloud.state.glance

    def reconfigure(self, stores=None, default_store=None, options=None):
        """Restart with other stores or options; None leaves them."""
        self.stop()
        self.cloud.configure_glance(stores, default_store, options)
        self.start()

    def options(self):
        """Return the options of glance-api.conf, by section."""
        cloud = self.cloud
        options = self.common_options()
        options['DEFAULT']['transport_url'] = cloud.services[
            'rabbitmq'].transport_url
        # By default a request waits for a broker that is down, for ever.
        options['oslo_messaging_notifications'] = {
            'driver': 'messagingv2', 'retry': 0}
        for section, values in cloud.glance_options.items():
            options.setdefault(section, {}).update(values)
        return options

    def common_options(self):
        """Return the options of every Glance in the cloud."""
        keystone = self.cloud.services['keystone']
        return {
            'DEFAULT': {
                'enabled_import_methods':
                    '[glance-direct,web-download,copy-image]',
                'worker_self_reference_url': self.url,
            },
            'keystone_authtoken': keystone.middleware(self.user),
            # Certificates of signed images come from Barbican, by default.
            'barbican': {'auth_endpoint': f'{keystone.url}/v3'},
            'paste_deploy': {'flavor': 'keystone'},
        }

    def stores(self):
        """Return the stores by name, and the default one."""
        return self.cloud.stores, self.cloud.default_store

    def _configure(self):
        self.cloud.make_repositories()
        server = _Server(
            self.directory, *self.stores(), options=self.options(),
            database=self.cloud.database(self.database))
        server.etc, server.log = self.etc, self.log
        server.configure()

    def prepare(self):
        self._configure()
        self.cloud.services['mariadb'].provide(
            self, 'glance', [self.database], lambda: self.run(
                [self.prefix / 'bin' / 'glance-manage', '--config-file',
                 self.etc / 'glance-api.conf', 'db', 'sync']))

    def launch(self):
        self._configure()
        self.serve({'OS_GLANCE_CONFIG_DIR': str(self.etc)})
