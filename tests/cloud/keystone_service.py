# SPDX-License-Identifier: Apache-2.0
"""Keystone, with the users, projects and endpoints of the whole cloud.

All users have the checkout's one password. Users are `admin`, `demo`, and one
in the project `service` for each service that validates tokens in Keystone.
"""

import base64
import contextlib
import os

from keystoneauth1.identity import v3
from keystoneauth1 import session as session_module
from openstack import connection
import requests

from tests.cloud import cloud_service

REGION = 'RegionOne'


class Keystone(cloud_service.WsgiService):
    name = 'keystone'
    environment_name = 'keystone'
    title = 'Keystone'
    needs = ('mariadb',)
    application = 'keystone.wsgi.api:application'
    #: Seconds for which a token is valid.
    token_life = 3600

    def _configure(self):
        return self.write('keystone.conf', {
            'DEFAULT': {'use_stderr': True},
            'database': {
                'connection': self.cloud.database('keystone')},
            'token': {'provider': 'fernet', 'expiration': self.token_life},
            'fernet_tokens': {'key_repository': self.directory / 'fernet'},
            'fernet_receipts': {
                'key_repository': self.directory / 'receipts'},
            'credential': {'key_repository': self.directory / 'credential'},
            # Otherwise each log-in takes a quarter of a second.
            'identity': {'password_hash_rounds': 4},
            # Without a cache, a check of a token takes half a second of a slow
            # processor. This one is the process's own, of which there is one.
            'cache': {'enabled': True, 'backend': 'dogpile.cache.memory'},
        })

    def prepare(self):
        config = self._configure()
        manage = [self.prefix / 'bin' / 'keystone-manage',
                  '--config-file', config]
        for name in ('fernet', 'receipts'):
            self._make_keys(self.directory / name)
        mariadb = self.cloud.services['mariadb']
        mariadb.provide(self, 'keystone', ['keystone'],
                        lambda: self.run([*manage, 'db_sync']))
        if mariadb.restore(self, self._furnished):
            self._move_endpoints(mariadb)
            self.cloud.state.set_prepared(self.step(self.furnish))
            return
        self.run([*manage, 'bootstrap',
                  '--bootstrap-username', 'admin',
                  '--bootstrap-project-name', 'admin',
                  '--bootstrap-region-id', REGION,
                  '--bootstrap-public-url', f'{self.url}/v3',
                  '--bootstrap-internal-url', f'{self.url}/v3',
                  '--bootstrap-admin-url', f'{self.url}/v3'],
                 {'OS_BOOTSTRAP_PASSWORD': self.cloud.password})

    @property
    def _furnished(self):
        """Return the path of the database with users and services.

        Keystone takes half a minute of a processor to make them.
        """
        return self.cloud.services['mariadb'].kept(
            self, 'keystone',
            '-'.join(['keystone', *(user for user, *_ in self._catalogue())]))

    def _catalogue(self):
        """Return users, types and URLs of the services besides Keystone."""
        return [(one.user, one.catalogue[0], f'{one.url}{one.catalogue[1]}')
                for one in self.cloud.services.values()
                if one.catalogue is not None]

    def _move_endpoints(self, mariadb):
        """Set the URLs, which differ from cloud to cloud."""
        urls = {'identity': f'{self.url}/v3'}
        urls |= {kind: url for _, kind, url in self._catalogue()}
        with mariadb.connect() as connection, connection.cursor() as cursor:
            for kind, url in urls.items():
                cursor.execute(
                    'UPDATE keystone.endpoint JOIN keystone.service '
                    'ON service.id = endpoint.service_id '
                    'SET endpoint.url = %s WHERE service.type = %s',
                    [url, kind])

    @staticmethod
    def _make_keys(directory):
        """Make the files of `keystone-manage fernet_setup`, but faster."""
        directory.mkdir(mode=0o700, exist_ok=True)
        for name in ('0', '1'):
            (directory / name).write_bytes(
                base64.urlsafe_b64encode(os.urandom(32)))

    def launch(self):
        self._configure()
        self.serve({'OS_KEYSTONE_CONFIG_DIR': str(self.etc)})

    def furnish(self):
        """Make users, projects and endpoints, of which some may exist."""
        with contextlib.closing(self.connect('admin', 'admin')) as admin:
            identity = admin.identity
            roles, users, projects, services = (
                {one.name: one for one in listed} for listed in (
                    identity.roles(), identity.users(), identity.projects(),
                    identity.services()))

            def project(name):
                return projects.get(name) or identity.create_project(
                    name=name, domain_id='default')

            def user(name, project, *names):
                one = users.get(name) or identity.create_user(
                    name=name, password=self.cloud.password,
                    domain_id='default', default_project_id=project.id)
                for role in names:
                    identity.assign_project_role_to_user(
                        project, one, roles[role])

            user('demo', project('demo'), 'member', 'reader')
            service_project = project('service')
            for name, kind, url in self._catalogue():
                user(name, service_project, 'admin', 'service')
                entry = services.get(name) or identity.create_service(
                    name=name, type=kind)
                if not any(identity.endpoints(service_id=entry.id)):
                    identity.create_endpoint(
                        service_id=entry.id, interface='public',
                        region_id=REGION, url=url)
        self.cloud.services['mariadb'].keep(
            self, ['keystone'], self._furnished)

    def connect(self, user, project):
        """Return the SDK's connection, which ignores proxy variables."""
        web = requests.Session()
        web.trust_env = False
        auth = v3.Password(
            auth_url=f'{self.url}/v3', username=user, project_name=project,
            password=self.cloud.password, user_domain_id='default',
            project_domain_id='default')
        return connection.Connection(
            session=session_module.Session(auth, session=web, timeout=600),
            region_name=REGION)

    def middleware(self, user):
        """Return the settings of keystonemiddleware, or another client."""
        return {
            'auth_type': 'password',
            'auth_url': f'{self.url}/v3',
            'www_authenticate_uri': f'{self.url}/v3',
            'username': user,
            'password': self.cloud.password,
            'user_domain_name': 'Default',
            'project_name': 'service',
            'project_domain_name': 'Default',
            'region_name': REGION,
            'service_token_roles': 'service',
            'service_token_roles_required': True,
        }
