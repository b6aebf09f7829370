# SPDX-License-Identifier: Apache-2.0
"""A real Glance on loopback, without Keystone and without a broker.

:class:`GlanceServer` writes the configuration, creates the SQLite database
and runs ``glance.wsgi.api`` under uWSGI with several worker processes, from
the Python environment that runs this module. :class:`Client` speaks the Image
API v2 over ``http.client``, with control over how an upload is sent. Used by
the functional tests and by tools/demo::

    stores = {'dedup1': {'type': 'dedup', 'dedup_store_datadir': path}}
    with GlanceServer(directory, stores) as server:
        client = Client(server.url)
        image = client.create(name='one')
        client.upload(image['id'], data)

SQLite takes one writer at a time. Transactions wait for each other up to
``DATABASE_TIMEOUT`` seconds: see :mod:`tests.functional.sqlite_locks`.
"""

import contextlib
import http.client
from importlib import metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse

from tests.support import ports

# Seconds
DATABASE_TIMEOUT = 30
MANAGE_TIMEOUT = 120
START_TIMEOUT = 90
STOP_TIMEOUT = 30
REQUEST_TIMEOUT = 120

CHUNK = 1 << 20

#: A directory below the checkout for results that take long to make.
KEPT = pathlib.Path(__file__).resolve().parents[2] / '.build'


class ServerError(Exception):
    """Glance did not start, or ended by itself."""


class HTTPError(Exception):
    """Glance answered with a status that was not expected."""

    def __init__(self, method, path, status, body):
        self.status = status
        self.body = body
        text = body[:400].decode(errors='replace')
        super().__init__(f'{method} {path}: {status}: {text}')


def _tail(path, lines=20):
    try:
        text = path.read_text(errors='replace')
    except OSError as exc:
        return str(exc)
    return '\n'.join(text.splitlines()[-lines:])


def ini(sections):
    """`sections`, a mapping of mappings, in the format of oslo.config."""
    return '\n'.join(
        f'[{section}]\n'
        + ''.join(f'{name} = {value}\n' for name, value in options.items())
        for section, options in sections.items())


def uwsgi_options(application, port, processes, threads,
                  address='127.0.0.1', loader='module', lazy_apps=True):
    """uWSGI's options for an OpenStack API.

    :param loader: the option that has `application` for its value
    :param lazy_apps: load the application in each worker, after the fork
    """
    return {
        loader: application,
        'http-socket': f'{address}:{port}',
        'master': 'true',
        'processes': processes,
        'threads': threads,
        'enable-threads': 'true',
        'lazy-apps': 'true' if lazy_apps else 'false',
        'need-app': 'true',
        'die-on-term': 'true',
        'http-chunked-input': 'true',
        # Clients send chunks of up to their own size; 1 MiB by default.
        'chunked-input-limit': 16 << 20,
        'buffer-size': 65535,
        # This limit ends no client that is only slow.
        'http-timeout': REQUEST_TIMEOUT,
        'socket-timeout': REQUEST_TIMEOUT,
        # uWSGI closes the connection after each answer; without this header a
        # client may send its next request into the closing connection.
        'add-header': 'Connection: close',
        'listen': 100,
        'thunder-lock': 'true',
        # A signal ends Python from whichever thread takes it, which crashes
        # now and then.
        'skip-atexit-teardown': 'true',
    }


class GlanceServer:
    """One Glance API service.

    The server writes only into `directory`: configuration in ``etc/``, the
    database, ``log/uwsgi.log`` with Glance's own log in it, and ``staging/``.
    A server made on a directory that was used before continues with its
    database.

    :param directory: where to put everything; created if it is missing
    :param stores: the stores by name; of each, its ``type`` and its options
    :param default_store: name of the default store; the first if not given
    :param processes: number of worker processes
    :param threads: number of threads in each of them
    :param options: more of glance-api.conf, by section
    :param database: URL of the database; SQLite in `directory` if not given
    :param environment: environment variables for the server, beside ours
    :param lazy_apps: as for `uwsgi_options`
    """

    #: The headers of the requests that poll whether Glance answers.
    headers = None

    #: The module that each process imports if the database is SQLite.
    module = 'tests.functional.sqlite_locks'

    def __init__(self, directory, stores, default_store=None, processes=2,
                 threads=4, options=None, database=None, environment=None,
                 lazy_apps=True):
        self.directory = pathlib.Path(directory).absolute()
        self.stores = stores
        self.default_store = default_store or next(iter(stores))
        self.processes = processes
        self.threads = threads
        self.options = options or {}
        self.database = database or (
            f'sqlite:///{self.directory}/glance.sqlite'
            f'?timeout={DATABASE_TIMEOUT}')
        self.environment = environment or {}
        self.lazy_apps = lazy_apps
        self.etc = self.directory / 'etc'
        self.log = self.directory / 'log' / 'uwsgi.log'
        self.port = None
        self._process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exc_info):
        self.stop()

    @property
    def url(self):
        return f'http://127.0.0.1:{self.port}'

    @property
    def pid(self):
        """The uWSGI master's pid; SIGTERM or SIGINT ends all processes."""
        return self._process and self._process.pid

    def worker_pids(self):
        """The worker processes, in no particular order."""
        children = pathlib.Path(f'/proc/{self.pid}/task/{self.pid}/children')
        return [int(pid) for pid in children.read_text().split()]

    def start(self):
        """Start, and return when Glance answers."""
        if self._process is not None:
            raise ServerError('already started')
        self.configure()
        self._sync_database()
        for attempt in range(3):
            if self.port is None:
                self.port = ports.free_port()
            self._launch()
            try:
                self._wait()
                return
            except BaseException as exc:
                self.stop()
                # Between choosing the port and using it another may take it.
                if (not isinstance(exc, ServerError) or attempt == 2
                        or 'already in use' not in str(exc)):
                    raise
                self.port = None

    def stop(self):
        """End the server and its workers; by force after some seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Workers may outlive the master; the group holds only ours.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_TIMEOUT)

    def restart(self):
        """Stop and start again, at the same port, with the same images."""
        self.stop()
        self.start()

    def kill(self):
        """End everything at once, as a crash would."""
        process, self._process = self._process, None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT)

    def detach(self):
        """Leave the server running when this process ends; return its pid."""
        process, self._process = self._process, None
        # Python neither complains about it nor waits for it when collected.
        process.returncode = 0
        return process.pid

    def log_tail(self, lines=20):
        return _tail(self.log, lines)

    def configure(self):
        """Write the configuration, and make the directories it names."""
        for path in (self.etc, self.log.parent, self.directory / 'staging',
                     self.directory / 'tasks', self.directory / 'lock'):
            path.mkdir(parents=True, exist_ok=True)
        prefix = pathlib.Path(sys.prefix)
        sections = {
            'DEFAULT': {
                'enabled_backends': ','.join(
                    f'{name}:{options["type"]}'
                    for name, options in self.stores.items()),
                'use_stderr': True,
                'log_dir': '',
                'image_cache_dir': self.directory / 'cache',
            },
            'database': {'connection': self.database},
            'glance_store': {'default_backend': self.default_store},
            'os_glance_staging_store': {
                'filesystem_store_datadir': self.directory / 'staging'},
            'os_glance_tasks_store': {
                'filesystem_store_datadir': self.directory / 'tasks'},
            'oslo_concurrency': {'lock_path': self.directory / 'lock'},
            'oslo_policy': {'policy_file': self.etc / 'policy.yaml'},
            'paste_deploy': {
                'config_file': prefix / 'etc/glance/glance-api-paste.ini'},
        }
        for name, options in self.stores.items():
            sections[name] = {
                option: value for option, value in options.items()
                if option != 'type'}
        for section, options in self.options.items():
            sections.setdefault(section, {}).update(options)
        (self.etc / 'glance-api.conf').write_text(ini(sections))
        (self.etc / 'policy.yaml').write_text(self.policy())

    @staticmethod
    def policy():
        """Allow everything: without Keystone no client has a role."""
        from glance import policies
        return ''.join(
            f'{json.dumps(rule.name)}: "@"\n'
            for rule in policies.list_rules())

    def _sync_database(self):
        """Make the database's tables; those of SQLite are made once, and kept.

        Glance's migrations take seconds of a processor.
        """
        if not self.database.startswith('sqlite:'):
            self._run_migrations()
            return
        path = self.directory / 'glance.sqlite'
        if path.exists():
            return
        kept = KEPT / f'glance-{metadata.version("glance")}.sqlite'
        if not kept.exists():
            self._run_migrations()
            if not os.access(KEPT.parent, os.W_OK):
                return              # a root that cannot change the tree
            KEPT.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=KEPT) as place:
                shutil.copy(path, place)
                os.replace(pathlib.Path(place, path.name), kept)
            return
        shutil.copy(kept, path)

    def _run_migrations(self):
        log = self.log.parent / 'db_sync.log'
        with open(log, 'wb') as f:
            result = subprocess.run(
                [pathlib.Path(sys.prefix) / 'bin' / 'glance-manage',
                 '--config-file', self.etc / 'glance-api.conf', 'db', 'sync'],
                stdin=subprocess.DEVNULL, stdout=f, stderr=f,
                timeout=MANAGE_TIMEOUT)
        if result.returncode:
            (self.directory / 'glance.sqlite').unlink(missing_ok=True)
            raise ServerError(
                f'glance-manage db sync failed; {log} ends:\n{_tail(log)}')

    def _launch(self):
        path = self.etc / 'uwsgi.ini'
        options = uwsgi_options(
            'glance.wsgi.api:application', self.port, self.processes,
            self.threads, lazy_apps=self.lazy_apps)
        if self.database.startswith('sqlite:'):
            options |= {'pythonpath': pathlib.Path(__file__).parents[2],
                        'import': self.module}
        path.write_text(ini({'uwsgi': options}))
        environment = dict(
            os.environ, OS_GLANCE_CONFIG_DIR=str(self.etc),
            **self.environment)
        with open(self.log, 'ab') as f:
            self._process = subprocess.Popen(
                [pathlib.Path(sys.prefix) / 'bin' / 'uwsgi', '--ini', path],
                stdin=subprocess.DEVNULL, stdout=f, stderr=f,
                cwd=self.directory, env=environment, start_new_session=True)

    def _wait(self):
        deadline = time.monotonic() + START_TIMEOUT
        client = Client(self.url, headers=self.headers, timeout=10)
        while True:
            if self._process.poll() is not None:
                raise ServerError(
                    f'Glance ended while starting; {self.log} ends:\n'
                    + self.log_tail())
            try:
                client.request('GET', '/v2/images?limit=1', expect=(200,))
                return
            except (OSError, http.client.HTTPException, HTTPError) as exc:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f'Glance does not answer after {START_TIMEOUT} s '
                        f'({exc}); {self.log} ends:\n{self.log_tail()}')
            time.sleep(0.1)


class Client:
    """The Image API v2 of one server. Every call opens a connection.

    :param url: the server's, without ``/v2``
    :param timeout: seconds that a single send or receive may take
    :param headers: of every request, beside its own
    """

    def __init__(self, url, timeout=REQUEST_TIMEOUT, headers=None):
        self.address = urllib.parse.urlsplit(url).netloc
        self.timeout = timeout
        self.headers = headers or {}

    def connection(self):
        """A new connection, for a test that wants to do it by hand."""
        return http.client.HTTPConnection(
            self.address, timeout=self.timeout, blocksize=CHUNK)

    def request(self, method, path, body=None, headers=None, chunked=False,
                expect=(200, 201, 202, 204)):
        """Return (status, headers, body).

        :raises HTTPError: if the status is not one of `expect`; an empty
            `expect` takes any
        """
        with contextlib.closing(self.connection()) as connection:
            try:
                connection.request(
                    method, path, body, {**(headers or {}), **self.headers},
                    encode_chunked=chunked)
            except (BrokenPipeError, ConnectionResetError):
                # Glance may answer before it has read the body, and close. Its
                # answer can still be read.
                pass
            response = connection.getresponse()
            content = response.read()
            if expect and response.status not in expect:
                raise HTTPError(method, path, response.status, content)
            return response.status, response.headers, content

    def _json(self, method, path, document=None):
        body = headers = None
        if document is not None:
            body = json.dumps(document)
            headers = {'Content-Type': 'application/json'}
        return json.loads(self.request(method, path, body, headers)[2])

    def create(self, **properties):
        """Create an image record; return it as Glance shows it."""
        properties.setdefault('disk_format', 'raw')
        properties.setdefault('container_format', 'bare')
        return self._json('POST', '/v2/images', properties)

    def upload(self, image_id, data, size=None, store=None, headers=None,
               expect=(204,)):
        """Upload `data` and return the status.

        :param data: bytes, a binary file, or an iterable of bytes
        :param size: its length in bytes, sent as Content-Length. If it is not
            given and `data` is not bytes, the length is left unknown and
            `data` is sent in chunks.
        :param store: name of the store; the default store if not given
        """
        if isinstance(data, (bytes, bytearray, memoryview)):
            size = len(data) if size is None else size
        headers = {'Content-Type': 'application/octet-stream',
                   **(headers or {})}
        if store is not None:
            headers['X-Image-Meta-Store'] = store
        if size is None:
            headers['Transfer-Encoding'] = 'chunked'
        else:
            headers['Content-Length'] = str(size)
        return self.request(
            'PUT', f'/v2/images/{image_id}/file', data, headers,
            chunked=size is None, expect=expect)[0]

    @contextlib.contextmanager
    def open(self, image_id, first=None, last=None):
        """Open the data of an image for reading, as an HTTPResponse.

        With `first` and `last`, offsets of the first and the last byte, only
        a part of it: Glance answers 206.
        """
        path = f'/v2/images/{image_id}/file'
        headers = dict(self.headers)
        if first is not None:
            headers['Range'] = f'bytes={first}-{"" if last is None else last}'
        with contextlib.closing(self.connection()) as connection:
            connection.request('GET', path, headers=headers)
            # The response holds the socket, too: a download is dropped only
            # when both are closed.
            with contextlib.closing(connection.getresponse()) as response:
                if response.status not in (200, 204, 206):
                    raise HTTPError('GET', path, response.status,
                                    response.read())
                yield response

    def download(self, image_id, first=None, last=None):
        """The data of an image, or of a part of it, as bytes."""
        with self.open(image_id, first, last) as response:
            return response.read()

    def show(self, image_id):
        return self._json('GET', f'/v2/images/{image_id}')

    def list(self):
        """List all images; Glance answers page by page."""
        path, images = '/v2/images', []
        while path:
            page = self._json('GET', path)
            images += page['images']
            path = page.get('next')
        return images

    def stores(self):
        return self._json('GET', '/v2/info/stores')['stores']

    def delete(self, image_id, expect=(204,)):
        return self.request(
            'DELETE', f'/v2/images/{image_id}', expect=expect)[0]


class ProjectServer(GlanceServer):
    """A Glance that takes the user from the headers, as after Keystone.

    Glance's own policy holds, but a request without a user may poll whether
    the server answers.
    """

    def configure(self):
        pipelines = self.etc / 'paste.ini'
        self.options = {
            **self.options,
            'DEFAULT': {**self.options.get('DEFAULT', {}),
                        'allow_anonymous_access': True},
            'paste_deploy': {'config_file': pipelines}}
        super().configure()
        paste = pathlib.Path(sys.prefix) / 'etc/glance/glance-api-paste.ini'
        pipelines.write_text(paste.read_text().replace(
            'unauthenticated-context rootapp', 'context rootapp'))

    @staticmethod
    def policy():
        return '"get_images": "@"\n' + ''.join(
            f'"{name}": "role:admin or project_id:%(project_id)s"\n'
            for name in ('get_image_location', 'set_image_location'))


class ProjectClient(Client):
    """A client of a project's member, at a :class:`ProjectServer`."""

    def __init__(self, url, project, roles='member,reader'):
        super().__init__(url, headers={
            'X-Identity-Status': 'Confirmed', 'X-User-Id': project,
            'X-Project-Id': project, 'X-Tenant-Id': project,
            'X-Roles': roles})
