# SPDX-License-Identifier: Apache-2.0

"""The daemon answers as ``openapi.yaml`` says, whatever the request."""

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading

import hypothesis
import jsonschema
import pytest
import schemathesis
from schemathesis import checks
import yaml

from dedupd.tasks import registry
from glance_dedup.base import exceptions
from glance_dedup.client import wire
from tests.support import daemons
from tests.support import repositories
from tests.support import volume_tools

PATH = daemons.ROOT / 'doc/source/reference/openapi.yaml'
DOCUMENT = yaml.safe_load(PATH.read_text())
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
CHECKS = [
    checks.not_a_server_error, checks.status_code_conformance,
    checks.content_type_conformance, checks.response_headers_conformance,
    checks.response_schema_conformance]


#: The header of an image that is sent.
HEADER = wire.RecipeHeader(4096, 100, 0, 1, 'sha256', bytes(16),
                           'fixed').pack()


class Relay:
    """A relay between a TCP port and a Unix socket."""

    def __init__(self, path):
        self.path = path
        self.listener = socket.create_server(('127.0.0.1', 0))
        self.url = f'http://127.0.0.1:{self.listener.getsockname()[1]}'
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self.path)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self.copy, args=pair,
                                     daemon=True).start()

    def copy(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self):
        self.listener.close()


@pytest.fixture(scope='module')
def url(tmp_path_factory):
    path = volume_tools.create_repository(tmp_path_factory.mktemp('r') /
                                          'repo')
    volume_tools.create(path, 'disk', 1 << 20)
    # The volume's head cannot be read.
    bad = volume_tools.create(path, 'bad', 1 << 20)
    (bad / 'journal-00000001').write_bytes(b'')
    with repositories.open_repository(path) as opened:
        repositories.put(opened, 'image', repositories.mixture(300_000))
    with daemons.Daemon(path, header_timeout=5) as daemon:
        daemon.start().wait_for_catalog()
        with contextlib.closing(Relay(daemon.socket)) as relay:
            yield relay.url
        assert daemon.request('GET', '/healthcheck').status == 200
        assert 'Traceback' not in daemon.text()
        assert daemon.stop() == 0


@pytest.fixture
def schema(request):
    # Schemathesis puts each operation here, where pytest 9.2 has no text.
    request.node._nodeid = request.node.nodeid
    return SCHEMA


# Each operation is a subtest, whose cases are made when it runs, and not when
# each process of a run collects the tests.
@schemathesis.pytest.from_fixture('schema').parametrize()
@hypothesis.settings(
    max_examples=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(hypothesis.HealthCheck))
def test_answers_are_as_described(case, url):
    # Waiting is not tested here, and takes long.
    case.query.pop('wait', None)
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=20)


def walk(operation_id, **arguments):
    """Return a case with given arguments rather than random ones."""
    for operation in SCHEMA.get_all_operations():
        found = operation.ok()
        if found.definition.raw['operationId'] == operation_id:
            return found.Case(**arguments)
    raise AssertionError(operation_id)


@pytest.mark.parametrize('operation_id,arguments,status', [
    ('image', {'path_parameters': {'image_id': 'image'}}, 200),
    ('image', {'path_parameters': {'image_id': 'image'},
               'headers': {'Range': 'bytes=1-5'}}, 206),
    ('image', {'path_parameters': {'image_id': 'image'},
               'headers': {'Range': 'bytes=5-1'}}, 416),
    ('recipe', {'path_parameters': {'image_id': 'image'}}, 200),
    ('blocks', {'path_parameters': {'image_id': 'image'},
                'body': {'ranges': [[0, 4096]]},
                'media_type': 'application/json'}, 200),
    ('blocks', {'path_parameters': {'image_id': 'image'},
                'body': {'ranges': [[0, 409600]]},
                'media_type': 'application/json'}, 416),
    ('mark_lost', {'path_parameters': {'image_id': 'image'}}, 400),
    ('start_task', {'path_parameters': {'name': 'collect'},
                    'body': {'dry_run': True},
                    'media_type': 'application/json'}, 202),
    ('start_task', {'path_parameters': {'name': 'merge'}}, 202),
    ('start_task', {'path_parameters': {'name': 'scrub'}}, 202),
    ('task', {'path_parameters': {'name': 'scrub'},
              'query': {'after': 1, 'wait': 5}}, 200),
    ('status', {}, 200), ('images', {}, 200), ('groups', {}, 200),
    ('volumes', {}, 200),
    ('begin_replica', {
        'path_parameters': {'image_id': 'sent'},
        'query': {'upload': 'ab' * 16, 'sender': 'cd' * 16},
        'body': HEADER, 'media_type': 'application/octet-stream'}, 201),
    ('begin_replica', {
        'path_parameters': {'image_id': 'image'},
        'query': {'upload': 'ab' * 16, 'sender': 'cd' * 16},
        'body': HEADER, 'media_type': 'application/octet-stream'}, 409),
    ('commit_replica', {'path_parameters': {'image_id': 'sent'},
                        'query': {'replica': 'ab' * 16}}, 404),
    ('slices', {'body': {'repository': 'ab' * 16, 'group': 1, 'first': 0,
                         'object': 'cd' * 16, 'count': 1, 'wait': 0},
                'media_type': 'application/json'}, 409),
    ('sharing', {}, 200), ('history', {}, 200), ('ready', {}, 200)])
def test_what_is_right_is_done(url, operation_id, arguments, status):
    response = walk(operation_id, **arguments).call_and_validate(
        base_url=url, checks=CHECKS, timeout=20)
    assert response.status_code == status


def test_who_only_reads_does_not_deny_damage(tmp_path):
    """A reading daemon does not know damage, and answers so."""
    path = repositories.create(tmp_path / 'repository')
    with repositories.open_repository(path) as opened:
        repositories.put(opened, 'image', repositories.mixture(300_000))
    with daemons.Daemon(path) as first, daemons.Daemon(path) as other:
        first.start().wait_for_catalog()
        other.start().wait_for_catalog('reader')
        for daemon, damaged in ((first, False), (other, None)):
            with contextlib.closing(Relay(daemon.socket)) as relay:
                shown, = walk('images').call_and_validate(
                    base_url=relay.url, checks=CHECKS,
                    timeout=20).json()['images']
            assert shown['damaged'] is damaged
            # The command requests it from the same daemon.
            done = subprocess.run(
                [sys.executable, '-m', 'glance_dedup.cli.entry',
                 '--repository', path, '--socket', daemon.socket,
                 'image', 'list', '-f', 'json'],
                capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            shown, = json.loads(done.stdout)
            assert shown['damaged'] is damaged


def test_every_endpoint_is_described():
    """The document describes all routes of the server, and no others."""
    import asyncio

    from dedupd.endpoints import http_api

    class Anything:
        def __getattr__(self, name):
            return lambda *args: None

    async def routes():
        found = http_api.API(*[Anything() for _ in range(6)], '/', [],
                             asyncio.Event())
        return {listener: {
            ('/' + '/'.join(segments), method.lower())
            for segments, methods in getattr(found, listener)._routes
            for method in methods if method != 'HEAD'}
            for listener in ('unix', 'tls', 'status')}

    served = asyncio.run(routes())
    described = {(path, method): operation['tags']
                 for path, item in DOCUMENT['paths'].items()
                 for method, operation in item.items()
                 if method in ('get', 'post', 'delete')}
    assert served['unix'] == set(described)
    assert served['tls'] == {k for k, v in described.items()
                             if v in (['read'], ['receive'])}
    assert served['status'] == {
        k for k, v in described.items() if v == ['show']}


#: Values of every type, within and beyond the bounds of each argument.
VALUES = (True, None, -1, 0, 1, 19, 20, 256, 1 << 30, (1 << 30) + 1, 0.5,
          'none', 'lz4', 'zstd', 'gzip', '')


@pytest.fixture(scope='module')
def bodies():
    """The validator of each task's request body, by the task's name."""
    content = DOCUMENT['paths']['/v1/tasks/{name}']['post']['requestBody'][
        'content']['application/json']['schema']
    return {schema['title']: jsonschema.Draft202012Validator(
        {'components': DOCUMENT['components'], **schema})
        for schema in content.get('anyOf', [])}


def test_every_task_is_described(bodies):
    names = DOCUMENT['components']['schemas']['task_name']['enum']
    assert names == list(registry.TASKS)
    assert list(bodies) == names


@pytest.mark.parametrize('name', registry.TASKS)
def test_a_tasks_arguments_are_those_of_its_row(name, bodies):
    """The document and the task accept the same one or two arguments."""
    row = registry.TASKS[name]

    def is_taken(arguments):
        try:
            row.check(arguments)
        except exceptions.InvalidParameter:
            return False
        return True

    singles = [(argument, value) for argument in sorted(
        {key for task in registry.TASKS.values() for key in task.arguments})
        for value in VALUES]
    assert bodies[name].is_valid({}) and is_taken({})
    for given in itertools.combinations_with_replacement(singles, 2):
        arguments = dict(given)
        assert bodies[name].is_valid(arguments) is is_taken(arguments), (
            arguments)
