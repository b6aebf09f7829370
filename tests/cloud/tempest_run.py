# SPDX-License-Identifier: Apache-2.0
"""Runs tempest against a cloud, and reads the results.

:class:`Tempest` is a workspace of tempest, its configuration and its users.
:class:`Images` serves the files that the tests download, and lets commands
that tempest runs stop and start services: these belong to the process that
started the cloud.
"""

import collections
import contextlib
import functools
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import urllib.parse

import yaml

from tests.cloud import boot
from tests.cloud import cloud_service
from tests.cloud import disk_images
from tests.cloud import glance_service
from tests.cloud import keystone_service
from tests.functional import glance_server

WORKERS = 2
# Seconds. Of one run; a loaded machine needs minutes.
TIMEOUT = 1500
LIST_TIMEOUT = 300

OK, FAILED, SKIPPED = 'ok', 'failed', 'skipped'

#: Outcome of a test, and tempest's message about it.
Result = collections.namedtuple('Result', 'outcome words')

_LINE = re.compile(
    r'^\{\d+\} (?P<name>.+?)(?: \[[\d.]+s\])? \.\.\. '
    r'(?P<outcome>ok|FAILED|SKIPPED)(?:: (?P<words>.*))?$')
_CLASS = re.compile(r'^(?:setUp|tearDown)Class \((?P<name>.+)\)$')
_TOTAL = re.compile(r'^ - (?P<what>Passed|Failed|Skipped): (?P<number>\d+)$',
                    re.MULTILINE)


class RemoteGlance(glance_service.Glance):
    """A second Glance on the same database and stores, as another host's."""

    name = 'glance-remote'
    title = 'the other Glance'
    needs = ('glance', 'keystone')
    catalogue = ('image_remote', '')
    user = 'glance_remote'

    def prepare(self):
        """Use the first Glance's database."""


def prefix():
    """Return the root of the environment that tempest runs from."""
    return cloud_service.environment('tempest')


def options_of(cloud):
    """Return the options of tempest.conf that follow from a running cloud.

    Servers are tested if it has a compute host, with an image that is built.
    """
    daemon = cloud.services['dedupd']
    options = {'dedup': {
        'store': cloud.default_store,
        'daemon_url': daemon.url,
        'collect_command': f'{sys.prefix}/bin/glance-dedup --socket '
                           f'{daemon.socket} collect',
        'timeout': 900,
        'console_marker': 'glance-dedup: up',
    }}
    if not any(name.endswith('nova-compute') for name in cloud.state.wanted):
        return options
    with contextlib.closing(cloud.connect()) as admin:
        flavor = admin.compute.find_flavor(boot.FLAVOR, ignore_missing=False)
    return {
        **options,
        'service_available': {'nova': True},
        'compute': {'flavor_ref': flavor.id, 'build_timeout': 900},
        'compute-feature-enabled': {'console_output': True},
        'scenario':
            {'img_file': disk_images.images().raw, 'img_disk_format': 'raw'},
    }


class Tempest:
    """A workspace: configuration, locks, logs and results in a directory.

    :param cloud: one that is up
    :param directory: empty, missing, or an earlier workspace of the cloud
    :param options: of tempest.conf, by section, besides those that any run
        against the cloud needs
    """

    def __init__(self, cloud, directory, options):
        self.cloud = cloud
        self.directory = pathlib.Path(directory)
        self.prefix = prefix()
        self.etc = self.directory / 'etc'
        self.output = self.directory / 'output'
        for path in (self.etc, self.directory / 'lock'):
            path.mkdir(parents=True, exist_ok=True)
        self._write_stestr()
        self._make_accounts()
        self.configure(options)

    def _write_stestr(self):
        packages = next((self.prefix / 'lib').glob('python*/site-packages'))
        (self.directory / '.stestr.conf').write_text(glance_server.ini({
            'DEFAULT': {
                'test_path': packages / 'tempest' / 'test_discover',
                'top_dir': packages,
                # Tests of one class stay together, since its set-up takes
                # long.
                'group_regex': r'([^\.]*\.)*',
            }}))
        if not (self.directory / '.stestr').exists():
            self._call(['stestr', 'init'], LIST_TIMEOUT)

    def configure(self, options):
        """Write tempest.conf."""
        auth_url = f'{self.cloud.url("keystone")}/v3'
        sections = {
            'DEFAULT': {'log_dir': self.directory, 'log_file': 'tempest.log'},
            'oslo_concurrency': {'lock_path': self.directory / 'lock'},
            'auth': {
                # Making users for each class takes longer than its tests.
                'use_dynamic_credentials': False,
                'test_accounts_file': self.etc / 'accounts.yaml',
            },
            'identity': {
                'uri_v3': auth_url, 'auth_version': 'v3',
                'region': keystone_service.REGION},
            # As in the whole cloud, except for Nova, if it is up.
            'service_available': {
                name: False for name in
                ('cinder', 'neutron', 'nova', 'swift', 'horizon')},
            'service-clients': {'http_timeout': 300},
        }
        for section, values in options.items():
            sections.setdefault(section, {}).update(values)
        (self.etc / 'tempest.conf').write_text(glance_server.ini(sections))

    def _make_accounts(self):
        """Make enough users for all workers: tempest gives each out once.

        A class may need a member and a reader of one project, a member of
        another, and an administrator. Members come first, because tempest
        takes the first user if a test needs just any user.
        """
        accounts = []
        with contextlib.closing(self.cloud.connect()) as admin:
            identity = admin.identity
            roles = {role.name: role for role in identity.roles()}
            for role, count in (('member', 2 * WORKERS),
                                ('reader', 2 * WORKERS), ('admin', WORKERS)):
                for number in range(count):
                    name = f'tempest-{role}-{number}'
                    # The reader is of the member's project.
                    project = (f'tempest-{number}' if role != 'admin'
                               else f'tempest-admin-{number}')
                    there = (identity.find_project(project)
                             or identity.create_project(
                                 name=project, domain_id='default'))
                    user = identity.find_user(name) or identity.create_user(
                        name=name, password=self.cloud.password,
                        domain_id='default', default_project_id=there.id)
                    identity.assign_project_role_to_user(
                        there, user, roles[role])
                    accounts.append({
                        'username': name, 'password': self.cloud.password,
                        'project_name': project,
                        'user_domain_name': 'Default',
                        'project_domain_name': 'Default',
                        'domain_name': 'Default', 'roles': [role],
                        **({'types': ['admin']} if role == 'admin' else {})})
        (self.etc / 'accounts.yaml').write_text(yaml.safe_dump(accounts))

    # -- running -----------------------------------------------------------

    def _call(self, command, seconds):
        """Run a program of tempest's environment; return its output."""
        with open(self.output, 'wb') as output:
            process = subprocess.Popen(
                [self.prefix / 'bin' / command[0], *command[1:]],
                cwd=self.directory, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
                env={'PATH': f'{self.prefix}/bin:{os.environ["PATH"]}',
                     'HOME': str(self.directory), 'LANG': 'C.UTF-8',
                     'TMPDIR': str(self.directory)})
            try:
                process.wait(seconds)
            finally:
                # Kill its workers, too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
        return self.output.read_text(errors='replace')

    def _run(self, *arguments, seconds=TIMEOUT):
        return self._call(
            ['tempest', 'run', '--config-file', str(self.etc / 'tempest.conf'),
             *arguments], seconds)

    def list(self, regex):
        """Return the ids of tests, in tempest's form."""
        text = self._run('--regex', regex, '--list-tests',
                         seconds=LIST_TIMEOUT)
        ids = [line for line in text.splitlines()
               if re.match(r'^[\w.]+\.test_\w+(\[.*\])?(\([\w-]+\))?$',
                           line)]
        assert ids, f'tempest knows no tests {regex}:\n{text[-4000:]}'
        return ids

    def run(self, ids, workers=WORKERS):
        """Run tests; return their results by name."""
        chosen = self.directory / 'chosen'
        chosen.write_text(''.join(f'{one}\n' for one in ids))
        text = self._run('--load-list', str(chosen),
                         '--concurrency', str(workers))
        return read(text, [short(one) for one in ids])


def short(test_id):
    """Return a test's id as tempest prints it: without its tags."""
    return re.sub(r'\[.*\]', '', test_id)


def read(text, names):
    """Return the results in tempest's output, by name.

    A class that is skipped, or fails, before its tests has a result, and its
    tests have none.
    """
    found = {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if match := _LINE.match(line):
            words = match['words'] or ''
            if match['outcome'] == 'FAILED':
                words = _failure(lines[number + 1:])
            found[match['name']] = Result(match['outcome'].lower(), words)
    totals = {match['what']: int(match['number'])
              for match in _TOTAL.finditer(text)}
    counted = collections.Counter(one.outcome for one in found.values())
    assert totals == {'Passed': counted[OK], 'Failed': counted[FAILED],
                      'Skipped': counted[SKIPPED]}, (
        f'tempest did not run to its end:\n{text[-4000:]}')
    classes = {match['name']: found.pop(name) for name in list(found)
               if (match := _CLASS.match(name))}
    results = {}
    for name in names:
        results[name] = found.pop(name, None) or classes.get(
            name.rpartition('.')[0], Result('missing', ''))
    # These failed after the tests of a class.
    results.update((f'{name}.tearDownClass', result)
                   for name, result in classes.items()
                   if result.outcome == FAILED)
    assert not found, f'tempest ran what was not asked for: {sorted(found)}'
    return results


def _failure(lines):
    """Return the text below a test that failed."""
    words = []
    for line in lines:
        if _LINE.match(line) or line.startswith('====='):
            break
        words.append(line)
    return '\n'.join(words).strip()


class Images:
    """An HTTP server for the tests' downloads; stops and starts services.

    :param cloud: whose services are stopped and started
    :param directory: for the images
    """

    def __init__(self, cloud, directory):
        self.cloud = cloud
        self.directory = pathlib.Path(directory)
        self.directory.mkdir()
        (self.directory / 'raw').write_bytes(os.urandom(1 << 20))
        subprocess.run(
            ['qemu-img', 'create', '-q', '-f', 'qcow2', 'qcow2', '1M'],
            cwd=self.directory, check=True, timeout=60)
        self._server = http.server.ThreadingHTTPServer(
            ('127.0.0.1', 0),
            functools.partial(_Handler, self, directory=self.directory))
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def port(self):
        return self._server.server_address[1]

    @property
    def url(self):
        return f'http://127.0.0.1:{self.port}'

    def command(self, what, name):
        """Return a command that stops or starts a service, and waits."""
        return (f'curl --noproxy * --silent --show-error --fail-with-body '
                f'--max-time 300 --data {name} {self.url}/{what}')

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(http.server.SimpleHTTPRequestHandler):

    def __init__(self, images, *args, **kwargs):
        self.cloud = images.cloud
        super().__init__(*args, **kwargs)

    def do_POST(self):
        name = self.rfile.read(int(self.headers['Content-Length'])).decode()
        service_ = self.cloud.services[name]
        actions = {'/stop': service_.stop, '/start': service_.start}
        try:
            actions[urllib.parse.urlsplit(self.path).path]()
            status, words = 200, {}
        except Exception as exc:
            status, words = 500, {'error': str(exc)}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(words).encode() + b'\n')

    def log_message(self, *args):
        """Log nothing."""
