# SPDX-License-Identifier: Apache-2.0
"""Services that Glance needs die while images are stored and read.

The user gets Glance's own answer, as in the page on troubleshooting; the data
in the repository is whole; and once the service is back, the same works.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from tests.functional import glance_server
from tests.support import repositories

pytestmark = pytest.mark.slow

MIB = 1 << 20
SIZE = 24 * MIB
# Seconds from a service's return until its clients notice it.
BACK = 120
LIMIT = 120

#: Glance's answers while a service is down. `begun`: to an upload that was
#: half there when the service was killed; the rest began later. `unknown`: to
#: a token that Glance has not seen before.
WHILE_DOWN = {
    'keystone': {'begun': 204, 'show': 200, 'download': 200, 'create': 201,
                 'upload': 204, 'delete': 204, 'unknown': 401},
    'mariadb': {'begun': 500, 'show': 500, 'download': 500, 'create': 500,
                'upload': 500, 'delete': 500, 'unknown': 401},
    'rabbitmq': {'begun': 204, 'show': 200, 'download': 200, 'create': 201,
                 'upload': 204, 'delete': 204, 'unknown': 200},
    'dedupd': {'begun': 204, 'show': 200, 'download': 200, 'create': 201,
               'upload': 204, 'delete': 204, 'unknown': 200},
}


class Client(glance_server.Client):
    """A user with a token; an unexpected status is returned, too."""

    def __init__(self, url, token):
        super().__init__(url, timeout=LIMIT, headers={'X-Auth-Token': token})

    def status(self, method, path):
        return self.request(method, path, expect=())[0]


class Begun:
    """An upload and a download that are half done."""

    def __init__(self, client, target, source, data):
        self._go = threading.Event()
        self._half = threading.Event()
        self._client = client
        self._target = target
        self._data = data
        self.status = None
        self._thread = threading.Thread(target=self._upload)
        self._thread.start()
        self._download = contextlib.ExitStack()
        self._response = self._download.enter_context(client.open(source))
        self._read = self._response.read(MIB)
        assert self._half.wait(LIMIT), 'the upload did not begin'

    def _pieces(self):
        for start in range(0, SIZE, MIB):
            if start == SIZE // 2:
                self._half.set()
                self._go.wait(LIMIT)
            yield self._data[start:start + MIB]

    def _upload(self):
        self.status = self._client.upload(
            self._target, self._pieces(), expect=())

    def finish(self):
        """Finish both; return the upload's status, and the bytes read."""
        self._go.set()
        with self._download:
            read = self._read + self._response.read()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), 'the upload does not end'
        return self.status, read


def token(cloud):
    with contextlib.closing(cloud.connect('demo')) as user:
        return user.session.get_token()


@pytest.fixture
def user(cloud):
    """A client whose token both workers of Glance have cached."""
    client = Client(cloud.glance.url, token(cloud))
    for _ in range(10):
        client.request('GET', '/v2/images?limit=1')
    return client


def recorded(cloud):
    """Return the images of the repository; no upload is unfinished."""
    repositories.require_clean(cloud.repository)
    # The daemon counts committed images, and removes dead uploads.
    repositories.eventually(
        lambda: repositories.spool(cloud.repository) == [], 120)
    with repositories.open_repository(cloud.repository) as repo:
        return set(repo.images())


@contextlib.contextmanager
def down(cloud, name, how='kill'):
    """Stop a service for the ``with`` block."""
    service = cloud.services[name]
    getattr(service, how)()
    try:
        assert not service.running()
        yield
    finally:
        service.start()
        # Clients of the service take a while to reach it again.
        for other in cloud.services.values():
            if other.processes:
                other.wait_for(other.answers)


def wait_until_back(cloud):
    """Wait until every worker serves a new user again."""
    deadline = time.monotonic() + BACK
    good = 0
    while good < 4:
        try:
            good += 1
            Client(cloud.glance.url, token(cloud)).list()
        except (OSError, http.client.HTTPException,
                glance_server.HTTPError):
            good = 0
        assert time.monotonic() < deadline, 'Glance does not come back'


# Long: the killed service starts again, and Glance has to reach it.
@pytest.mark.timeout(900)
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.long if name in (
        'mariadb', 'rabbitmq') else []) for name in WHILE_DOWN])
def test_killed(cloud, user, name):
    """A service is killed during an upload and a download.

    Requests that begin later get the expected answers, too.
    """
    expected = WHILE_DOWN[name]
    before = recorded(cloud)
    old, new = [repositories.noise(SIZE, seed) for seed in (1, 2)]
    source, doomed = [user.create(name=f'down-{name}')['id']
                      for _ in range(2)]
    for image_id in (source, doomed):
        user.upload(image_id, old)
    target, later = [user.create(name=f'down-{name}')['id']
                     for _ in range(2)]
    stranger = Client(cloud.glance.url, token(cloud))
    begun = Begun(user, target, source, new)

    with down(cloud, name):
        status, read = begun.finish()
        assert read == old
        answers = {
            'begun': status,
            'show': user.status('GET', f'/v2/images/{source}'),
            'download': user.status('GET', f'/v2/images/{source}/file'),
            'create': user.request(
                'POST', '/v2/images', '{}',
                {'Content-Type': 'application/json'}, expect=())[0],
            'upload': user.upload(later, new, expect=()),
            'delete': user.status('DELETE', f'/v2/images/{doomed}'),
            'unknown': stranger.status('GET', f'/v2/images/{source}'),
        }
        assert answers == expected

    wait_until_back(cloud)
    kept = {source}
    # The rest of a failed upload can be deleted, but not used.
    if expected['begun'] != 204:
        assert user.show(target)['status'] == 'saving'
        assert user.upload(target, new, expect=()) == 409
    else:
        assert user.download(target) == new
        kept.add(target)
    if expected['upload'] != 204:
        user.upload(later, new)
    assert user.download(later) == new
    kept.add(later)
    assert user.status('DELETE', f'/v2/images/{doomed}') == (
        204 if expected['delete'] != 204 else 404)
    found = recorded(cloud) - before
    # Glance could not record the stored image: it is whole, but an orphan.
    lost = {target} if expected['begun'] != 204 else set()
    assert found == kept | lost
    for image_id in {source, target, later}:
        assert user.delete(image_id) == 204
    assert recorded(cloud) - before == lost
    with repositories.open_repository(cloud.repository) as repo:
        assert all(repositories.read_all(repo, image_id) == new
                   for image_id in lost)
    for image_id in lost:
        time.sleep(1.1)  # ages are in whole seconds
        assert delete_orphan(cloud, image_id)
    assert recorded(cloud) == before


def delete_orphan(cloud, image_id):
    """Delete as the operator does; return whether it was an orphan."""
    result = subprocess.run(
        [sys.executable, '-m', 'glance_dedup.cli.entry', '--repository',
         cloud.repository, 'glance', 'orphans', '--delete', '--older-than',
         '0s', '--os-cloud', 'admin', '-f', 'json', image_id],
        capture_output=True, text=True, timeout=LIMIT,
        env={**os.environ, 'OS_CLIENT_CONFIG_FILE': str(cloud.clouds_yaml),
             'no_proxy': '127.0.0.1'})
    assert result.returncode == 0, result.stderr
    return [one['deleted'] for one in json.loads(result.stdout)] == [True]


@pytest.mark.long
@pytest.mark.parametrize('name', WHILE_DOWN)
def test_a_user_who_comes_while_it_is_down(cloud, name):
    """Without Keystone or its database no login works; later all works."""
    data = os.urandom(MIB)
    with down(cloud, name, 'stop'):
        if name in ('keystone', 'mariadb'):
            with pytest.raises(Exception, match='Unable to establish|500'):
                token(cloud)
        else:
            user = Client(cloud.glance.url, token(cloud))
            image_id = user.create(name=f'down-{name}')['id']
            user.upload(image_id, data)
            assert user.download(image_id) == data
            user.delete(image_id)
    wait_until_back(cloud)
    user = Client(cloud.glance.url, token(cloud))
    image_id = user.create(name=f'down-{name}')['id']
    user.upload(image_id, data)
    assert user.download(image_id) == data
    user.delete(image_id)
    assert image_id not in recorded(cloud)
