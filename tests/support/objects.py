# SPDX-License-Identifier: Apache-2.0

"""Real object stores, on loopback: Swift, and the S3 gateway of JuiceFS.

Each has ``location(prefix)``, and ``credentials(path)`` writes a file with the
right credentials. Its bucket or container exists.
"""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys

from botocore import session as botocore_session
from keystoneauth1 import loading
from keystoneauth1 import session
import requests
from swiftclient import client

from glance_dedup.objects import object_location
from tests.support import ports
from tests.support import repositories
from tests.support import swift_server

#: Maximum seconds for a server's start.
LIMIT = 120


class Server:
    """Processes that run from ``start`` to ``stop``, with one log."""

    #: Name of the bucket or container.
    container = 'cold'

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.port = ports.free_port()
        self.url = f'http://127.0.0.1:{self.port}'
        self._processes = []

    def start(self):
        self.launch()
        repositories.eventually(self._answers, LIMIT, 'it does not answer')
        self.furnish()
        return self

    def stop(self):
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes = []

    def __enter__(self):
        return self.start()

    def __exit__(self, *exc_info):
        self.stop()

    def spawn(self, *command, **environment):
        with open(self.directory / 'log', 'ab') as log:
            self._processes.append(subprocess.Popen(
                [str(part) for part in command], stdout=log, stderr=log,
                env={**os.environ, **environment}))

    def _answers(self):
        for process in self._processes:
            assert process.poll() is None, (
                self.directory / 'log').read_text()[-4000:]
        with contextlib.suppress(requests.RequestException):
            return requests.get(self.url, timeout=5).status_code < 500
        return False


class JuiceGateway(Server):
    """The S3 gateway of JuiceFS, which is MinIO's."""

    kind = 's3'
    key, secret = 'access-key', 'secret-key'

    def launch(self):
        juicefs = pathlib.Path(sys.executable).parent / 'juicefs'
        meta = f'sqlite3://{self.directory}/meta.db'
        if not (self.directory / 'meta.db').exists():
            subprocess.run(
                [juicefs, 'format', '--storage', 'file', '--bucket',
                 f'{self.directory}/data/', meta, 'volume'], check=True,
                timeout=LIMIT, capture_output=True)
        self.spawn(juicefs, 'gateway', '--no-usage-report', '--no-banner',
                   '--multi-buckets', '--keep-etag', '--cache-dir',
                   self.directory / 'cache', '--access-log', '/dev/null',
                   meta, f'127.0.0.1:{self.port}',
                   MINIO_ROOT_USER=self.key, MINIO_ROOT_PASSWORD=self.secret)

    def furnish(self):
        make_bucket(self.url, self.container, self.key, self.secret)

    def location(self, prefix):
        return object_location.parse(
            f's3://{self.container}/{prefix}', self.url)

    def credentials(self, path):
        return write_s3(path, self.key, self.secret)


class Swift(Server):
    """Swift, with users of its own, who may also use S3."""

    kind = 'swift'
    user, secret = 'test:tester', 'testing'

    def launch(self):
        memcached, swift = swift_server.commands(
            self.directory, '127.0.0.1', self.port, swift_server.own_users())
        self._memcached = '127.0.0.1', memcached[memcached.index('-p') + 1]
        for command in memcached, swift:
            self.spawn(*command)

    def end_tokens(self):
        """End the life of all tokens: memcached has them."""
        with socket.create_connection(self._memcached, LIMIT) as sock:
            sock.sendall(b'flush_all\r\n')
            assert sock.recv(4, socket.MSG_WAITALL) == b'OK\r\n'

    def _answers(self):
        with contextlib.suppress(requests.RequestException):
            return super()._answers() and requests.get(
                f'{self.url}/auth/v1.0', timeout=5, headers={
                    'X-Auth-User': self.user,
                    'X-Auth-Key': self.secret}).ok
        return False

    def furnish(self):
        plugin = loading.get_plugin_loader('v1password').load_from_options(
            auth_url=f'{self.url}/auth/v1.0', username=self.user,
            password=self.secret)
        with contextlib.closing(client.Connection(
                session=session.Session(plugin))) as connection:
            connection.put_container(self.container)

    def location(self, prefix):
        return object_location.parse(f'swift://{self.container}/{prefix}')

    def credentials(self, path):
        return write_swift(path, self.url, self.user, self.secret)


class SwiftAsS3(Swift):
    """The same Swift, used by S3."""

    kind = 's3'

    def location(self, prefix):
        return object_location.parse(
            f's3://{self.container}/{prefix}', self.url)

    def credentials(self, path):
        return write_s3(path, self.user, self.secret)


def make_bucket(url, name, key, secret):
    with contextlib.closing(botocore_session.Session().create_client(
            's3', endpoint_url=url, region_name='us-east-1',
            aws_access_key_id=key, aws_secret_access_key=secret)) as s3:
        s3.create_bucket(Bucket=name)


def _write(path, text):
    path = pathlib.Path(path)
    new = path.with_suffix('.new')
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)
    return str(path)


def write_s3(path, key, secret):
    return _write(path, f'[s3]\naccess_key = {key}\nsecret_key = {secret}\n')


def write_swift(path, url, user, secret):
    return _write(path, '[swift]\nauth_type = v1password\n'
                  f'auth_url = {url}/auth/v1.0\nusername = {user}\n'
                  f'password = {secret}\n')
