# SPDX-License-Identifier: Apache-2.0

"""The daemon reports damage, closes broken transfers, and runs on."""

import http.client
import random

import pytest

from tests.damage import damages
from tests.damage import oracle
from tests.damage import server
from tests.damage import template
from tests.support import daemons


@pytest.fixture(scope='module')
def top(tmp_path_factory):
    top = tmp_path_factory.mktemp('template')
    with server.Server(tmp_path_factory.mktemp('scratch')) as asked:
        answer = asked.ask({'build': str(top), 'codec': 'none'})
        assert 'error' not in answer, answer['error']
    return top


def get(daemon, image_id):
    """Return status and body; the body ends where it is unreadable."""
    with daemon.connect() as sock:
        sock.sendall(daemons.raw('GET', f'/v1/images/{image_id}'))
        response = http.client.HTTPResponse(sock)
        response.begin()
        try:
            return response.status, response.read()
        except http.client.IncompleteRead as e:
            return response.status, e.partial
        finally:
            response.close()


def require_reads(daemon, hit, case):
    for image_id, data in template.IMAGES.items():
        status, body = get(daemon, image_id)
        if status == 200:
            assert data.startswith(body), (case, image_id)
        else:
            assert image_id in hit, (case, image_id, status, body)
            assert b'"message"' in body, (case, image_id, status, body)
        if image_id not in hit:
            assert status == 200 and body == data, (case, image_id, status)


def forms(rng, name, size):
    yield 'flip', [rng.randrange(size), 1]
    yield 'overwrite', [rng.randrange(size) // 512 * 512, 512]
    yield 'truncate', [rng.randrange(size)]
    yield 'missing', []


def test_reads_and_status(top, tmp_path):
    path = tmp_path / 'repository'
    template.copy(top / 'now', path)
    rng = random.Random(5)
    with daemons.running(path) as daemon:
        seen = oracle.Oracle(path)
        for name in sorted(
                f'{directory}/{p.name}' for directory in ('groups', 'images')
                for p in (path / directory).iterdir()):
            for damage, arguments in forms(
                    rng, name, (path / name).stat().st_size):
                case = name, damage, arguments
                start = arguments[0] if arguments else 0
                hit = seen.hit(name, start, {
                    'flip': start + 1, 'overwrite': start + 512}.get(
                        damage, oracle.END))
                undo = damages.DAMAGES[damage](damages.Target(
                    path, name, top / 'older', top / 'other'), *arguments)
                require_reads(daemon, hit, case)
                assert daemon.request('GET', '/v1/status').status == 200, case
                assert undo(), case
        require_reads(daemon, (), 'undone')
        assert daemon.process.poll() is None


def test_status_shows_the_damage(top, tmp_path):
    path = tmp_path / 'repository'
    template.copy(top / 'now', path)
    # A block that only one image has, and that has no spare copy.
    block = template.IMAGES['later'][:template.BLOCK]
    (name, at), = ((f'groups/{file.name}', file.read_bytes().index(block))
                   for file in (path / 'groups').iterdir()
                   if block in file.read_bytes())
    damages.flip(damages.Target(path, name, top, top), at)
    with daemons.running(path) as daemon:
        daemon.run('scrub')
        assert b'later' in daemon.request('GET', '/v1/status').body
        require_reads(daemon, ['later'], 'scrubbed')
        assert daemon.process.poll() is None
