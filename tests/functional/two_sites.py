# SPDX-License-Identifier: Apache-2.0
"""Two sites, each with a Glance, a repository and a daemon; and one Keystone.

The first site is a cloud of tests/cloud, the region RegionOne of its Keystone;
the other's Glance has the endpoint of the region RegionTwo. The other's daemon
serves over TLS, to operators of its own authority.
"""

import concurrent.futures
import contextlib
import hashlib
import pathlib
import shutil
import subprocess
import tempfile
import time

import yaml

from tests.cloud import glance_service
from tests.cloud import local_cloud
from tests.functional import glance_server
from tests.support import daemons
from tests.support import documents
from tests.support import ports
from tests.support import repositories

REGION = 'RegionTwo'
LIMIT = 120     # seconds
MIB = 1 << 20


class _Glance(glance_service._Server):
    """The other site's Glance, which refuses requests without a token."""

    def _wait(self):
        deadline = time.monotonic() + glance_server.START_TIMEOUT
        client = glance_server.Client(self.url, timeout=10)
        while True:
            with contextlib.suppress(OSError):
                client.request('GET', '/', expect=(200, 300))
                return
            if self._process.poll() is not None or (
                    time.monotonic() > deadline):
                raise glance_server.ServerError(self.log_tail())
            time.sleep(0.1)


def make_certificates(place):
    """Make certificates as the guide does, for a daemon on the loopback."""
    page = documents.SOURCE / 'admin' / 'replication.rst'
    commands = [command.text for block in documents.blocks(page)
                if (block.section, block.language) == ('Certificates',
                                                       'console')
                for command in documents.commands(block)]
    assert len(commands) == 9, commands
    done = subprocess.run(
        ['bash', '-euc', '\n'.join(commands).replace(
            'DNS:image.other.example', 'IP:127.0.0.1')],
        cwd=place, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


class Site:
    """A site's repository and Glance.

    :ivar glance: a client of openstacksdk, as an administrator
    """

    def __init__(self, path, glance):
        self.path = path
        self.glance = glance

    def record(self, image_id):
        """Return Glance's record of an image; None if there is none."""
        answer = self.glance.get(f'/images/{image_id}')
        return None if answer.status_code == 404 else answer.json()

    def digest(self, image_id):
        """Return the digest of the bytes that Glance serves."""
        answer = self.glance.get(f'/images/{image_id}/file')
        assert answer.status_code == 200, answer.text
        return hashlib.sha256(answer.content).hexdigest()

    def create(self, **properties):
        answer = self.glance.post('/images', json={
            'name': 'image', 'disk_format': 'raw',
            'container_format': 'bare', **properties})
        assert answer.status_code == 201, answer.text
        return answer.json()['id']

    def upload(self, data, store=None, **properties):
        image_id = self.create(**properties)
        headers = {'Content-Type': 'application/octet-stream'}
        if store is not None:
            headers['X-Image-Meta-Store'] = store
        answer = self.glance.put(f'/images/{image_id}/file', data=data,
                                 headers=headers)
        assert answer.status_code == 204, answer.text
        return image_id

    def share(self, image_id, **members):
        """Share an image with projects, each with its answer."""
        path = f'/images/{image_id}/members'
        for project, status in members.items():
            assert self.glance.post(
                path, json={'member': project}).status_code == 200
            assert self.glance.put(
                f'{path}/{project}', json={'status': status}
            ).status_code == 200

    def members(self, image_id):
        return {found['member_id']: found['status'] for found in
                self.glance.get(f'/images/{image_id}/members').json()[
                    'members']}

    def change(self, image_id, **properties):
        for name, value in properties.items():
            answer = self.glance.patch(
                f'/images/{image_id}', headers={
                    'Content-Type':
                    'application/openstack-images-v2.1-json-patch'},
                json=[{'op': 'add', 'path': f'/{name}', 'value': value}])
            assert answer.status_code == 200, answer.text

    def delete(self, image_id):
        if self.record(image_id)['protected']:
            self.change(image_id, protected=False)
        deadline = time.monotonic() + LIMIT
        # While a task of Glance's works on it, Glance answers 500.
        while self.record(image_id) is not None:
            answer = self.glance.delete(f'/images/{image_id}',
                                        raise_exc=False)
            assert answer.status_code in (204, 404, 500), answer.text
            assert time.monotonic() < deadline

    def held(self):
        with repositories.open_repository(self.path) as repo:
            return repo.images()


class Sites:
    """Both sites, as a context.

    :ivar home, away: a :class:`Site` each
    :ivar daemon: the one at the other site
    :ivar cert, key, ca_file: of an operator of that daemon
    """

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info):
        self._stack.close()

    def _start(self, stack):
        # This is not pytest's own directory: a socket's path has to be short.
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix='sites-'))
        stack.callback(shutil.rmtree, self.directory)
        self.cloud = cloud = local_cloud.Cloud(self.directory / 'home')
        stack.callback(cloud.down)
        place = self.directory / 'away'
        place.mkdir()
        path = repositories.create(place / 'repository', group_slots=1024)
        self.daemon = stack.enter_context(self._daemon(path, place))
        self.server = _Glance(
            place / 'glance', {'dedup2': {
                'type': 'dedup', 'dedup_store_datadir': path,
                'dedup_store_filter_dir': place / 'filter',
                'dedup_store_filter_mib': 1,
                'dedup_store_dedupd_socket': ''}},
            processes=1, options={
                'DEFAULT': {'property_protection_file': self._protection()},
                'keystone_authtoken':
                    cloud.services['keystone'].middleware('glance'),
                'paste_deploy': {'flavor': 'keystone'}})
        stack.callback(self.server.stop)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for started in [
                    pool.submit(cloud.up, ['glance', 'keystone']),
                    pool.submit(self.server.start),
                    pool.submit(self.daemon.start)]:
                started.result()
        # The tests have their own, or none.
        cloud.services['dedupd'].stop()
        self._register(stack)
        self.home = Site(cloud.repository, self._glance('home', stack))
        self.away = Site(path, self._glance('away', stack))

    def _protection(self):
        """No user of the other site may set the property `guarded`."""
        path = self.directory / 'away' / 'protection.conf'
        path.write_text(glance_server.ini({
            name: dict.fromkeys(('create', 'read', 'update', 'delete'), rule)
            for name, rule in (('^guarded$', '!'), ('.*', '@'))}))
        return path

    def _daemon(self, path, place):
        make_certificates(place)
        self.cert, self.key, self.ca_file = (
            place / name for name in ('home.pem', 'home.key',
                                      'daemons-ca.pem'))
        port = ports.free_port()
        self.url = f'https://127.0.0.1:{port}'
        return daemons.Daemon(
            path, place / 'dedupd', listen=f'127.0.0.1:{port}',
            tls_cert=place / 'server.pem', tls_key=place / 'server.key',
            tls_client_ca=place / 'operators-ca.pem', replicate_from='home',
            scope='global')

    def _register(self, stack):
        """Register the other site with Keystone, and in clients' files."""
        identity = stack.enter_context(contextlib.closing(
            self.cloud.connect('admin'))).identity
        identity.create_region(id=REGION)
        service = next(identity.services(type='image'))
        identity.create_endpoint(
            service_id=service.id, interface='public', region_id=REGION,
            url=self.server.url)
        clouds = yaml.safe_load(self.cloud.clouds_yaml.read_text())['clouds']
        home = clouds['admin']
        auth = {**home['auth'], 'username': 'glance',
                'project_name': 'service'}
        self.clouds_yaml = self.directory / 'clouds.yaml'
        self.clouds_yaml.write_text(yaml.safe_dump({'clouds': {
            'home': home,
            'away': {**home, 'auth': auth, 'region_name': REGION},
            # This user may not give an image a location, or is no
            # administrator.
            'admin': {**home, 'region_name': REGION},
            # No server answers there.
            'nobody': {**home, 'image_endpoint_override':
                       f'http://127.0.0.1:{ports.free_port()}'},
            'demo': clouds['demo']}}))

    def _glance(self, name, stack):
        import openstack
        from openstack.config import loader

        config = loader.OpenStackConfig(
            config_files=[str(self.clouds_yaml)], load_envvars=False)
        connection = stack.enter_context(contextlib.closing(
            openstack.connection.Connection(
                config=config.get_one(cloud=name))))
        return connection.image

    @property
    def environment(self):
        """Return the environment variables of the command and the daemon."""
        return {'OS_CLIENT_CONFIG_FILE': str(self.clouds_yaml),
                'no_proxy': '127.0.0.1',
                'GLANCE_DEDUP_FILTER_DIR': str(self.directory / 'filter')}

    def options(self, **others):
        """Return the command's arguments."""
        options = {'to': self.url, 'cert': self.cert,
                   'key': self.key, 'ca-file': self.ca_file,
                   'from-cloud': 'home', 'to-cloud': 'away', **others}
        return [word for name, value in options.items() if value is not None
                for word in (f'--{name}', str(value))]
