# SPDX-License-Identifier: Apache-2.0
"""Barbican, which stores the certificates of users who sign images.

Only a cloud that requests it runs it.
"""

import base64
import os
import shutil

from tests.cloud import cloud_service


class Barbican(cloud_service.WsgiService):
    name = 'barbican'
    environment_name = 'barbican'
    title = 'Barbican'
    needs = ('mariadb',)
    optional = True
    catalogue = ('key-manager', '')
    user = 'barbican'
    loader = 'paste'

    @property
    def application(self):
        return f'config:{self.etc}/barbican-api-paste.ini'

    def environment(self):
        # Barbican looks for its configuration here: no variable names another
        # place.
        return {**super().environment(), 'HOME': str(self.etc)}

    def _key(self):
        """Return the key that encrypts its secrets in the database."""
        path = self.directory / 'key'
        if not path.exists():
            path.write_bytes(base64.urlsafe_b64encode(os.urandom(32)))
        return path.read_text()

    def _configure(self):
        self.write('barbican.conf', {
            'DEFAULT': {'use_stderr': True, 'host_href': self.url},
            'database': {'connection': self.cloud.database('barbican')},
            'simple_crypto_plugin': {'kek': self._key()},
            'keystone_authtoken':
                self.cloud.services['keystone'].middleware(self.user),
        })
        name = 'barbican-api-paste.ini'
        shutil.copyfile(self.prefix / 'etc' / 'barbican' / name,
                        self.etc / name)

    def prepare(self):
        self._configure()
        self.cloud.services['mariadb'].provide(
            self, 'barbican', ['barbican'], lambda: self.run(
                [self.prefix / 'bin' / 'barbican-manage', 'db', 'upgrade']))

    def launch(self):
        self._configure()
        self.serve({})
