# SPDX-License-Identifier: Apache-2.0
"""Swift, to which groups of the first store of the type dedup may move.

Only a cloud that requests it runs it: ``tools/cloud up --swift`` attaches the
repository to a container, too.
"""

import contextlib

import requests

from glance_dedup.objects import object_location
from glance_dedup.repository import cold_settings
from glance_dedup.repository import image_repository
from glance_dedup.repository import prefix_owners
from tests.cloud import cloud_service
from tests.cloud import keystone_service
from tests.support import swift_server

#: Role of the users who may use the containers of their project.
ROLE = 'swiftoperator'
#: User, project and container of the repository.
OWNER = 'glance-dedup'
#: Prefix of the repository's objects.
PREFIX = 'cold'


class Swift(cloud_service.Service):
    name = 'swift'
    environment_name = 'swift'
    title = 'Swift'
    needs = ('keystone',)
    optional = True
    catalogue = ('object-store', '/v1/AUTH_%(project_id)s')
    user = 'swift'

    @property
    def credentials(self):
        """Return the file for ``glance-dedup object-store attach``."""
        return self.etc / 'glance-dedup.conf'

    @property
    def location(self):
        """Return the location of the repository's objects."""
        return object_location.parse(f'swift://{OWNER}/{PREFIX}',
                                     region=keystone_service.REGION)

    def launch(self):
        options = {**self.cloud.services['keystone'].middleware(self.user),
                   # Swift refuses a token soon after Keystone has revoked it.
                   'token_cache_time': 10}
        for command in swift_server.commands(
                self.directory, self.cloud.address, self.port,
                swift_server.users_of_keystone(options, [ROLE])):
            self.spawn(command)

    def answers(self):
        with contextlib.closing(requests.Session()) as web:
            web.trust_env = False
            return web.get(f'{self.url}/info', timeout=30).ok

    def furnish(self):
        """Make the repository's user, its credentials, and its container."""
        keystone = self.cloud.services['keystone']
        with contextlib.closing(self.cloud.connect()) as admin:
            identity = admin.identity
            role = identity.find_role(ROLE) or identity.create_role(name=ROLE)
            project = identity.find_project(OWNER) or identity.create_project(
                name=OWNER, domain_id='default')
            user = identity.find_user(OWNER) or identity.create_user(
                name=OWNER, password=self.cloud.password,
                domain_id='default', default_project_id=project.id)
            identity.assign_project_role_to_user(project, user, role)
        self.write(self.credentials.name, {'swift': {
            'auth_type': 'password',
            'auth_url': f'{keystone.url}/v3',
            'username': OWNER,
            'password': self.cloud.password,
            'user_domain_name': 'Default',
            'project_name': OWNER,
            'project_domain_name': 'Default',
        }})
        with contextlib.closing(keystone.connect(OWNER, OWNER)) as own:
            own.object_store.create_container(name=OWNER)

    def attach(self, path):
        """Attach a repository that has no maintainer."""
        with image_repository.Repository(path) as repo:
            # The whole cloud is on this machine, and has no TLS.
            prefix_owners.attach(repo, self.location, str(self.credentials),
                                 cold_settings.Options(allow_http=True))
