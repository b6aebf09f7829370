# SPDX-License-Identifier: Apache-2.0

"""Runs the commands of the page on a compute host's cache, as written.

They run as root, in a root of its own (``tests/devstack/roots.py``), whose
network has nothing but a loopback interface: there ``controller`` is another
address, at which a real Glance and its daemon are. pip finds the wheel's
dependencies, and fetches nothing.
"""

import json
import pathlib
import select
import subprocess
import sys

import pytest

from tests.devstack.conftest import machine     # noqa: F401
from tests.devstack import roots
from tests.support import documents

pytestmark = pytest.mark.slow

PAGE = documents.SOURCE / 'admin' / 'image-cache.rst'
VENV = '/opt/glance-dedup'
CONF = '/etc/dedupd/dedupd-cache.conf'
CACHE = 'http://127.0.0.1:9292'
START_SECONDS = 120

# The storing host: the directory is the argument; prints the image's id.
CONTROLLER = """
import asyncio, pathlib, random, sys
from tests.support import cache_harness as caching

async def relay(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def both(reader, writer):
    there = await asyncio.open_connection('127.0.0.1', storing.glance.port)
    await asyncio.gather(relay(reader, there[1]), relay(there[0], writer))

async def serve():
    await asyncio.start_server(both, 'controller', 9292)
    print(image['id'], flush=True)
    await asyncio.to_thread(sys.stdin.read)

place = pathlib.Path(sys.argv[1])
place.mkdir()
storing = caching.Storing(place)
storing.daemon.write_config(
    listen='127.0.0.2:9393',
    tls_cert=storing.authority.issue('controller', 'controller'))
with storing:
    alice = storing.glance.client('alice')
    image = alice.create(name='an image')
    alice.upload(image['id'], [random.Random(1).randbytes(3 << 20)])
    asyncio.run(serve())
"""


def blocks_of(section):
    return [block for block in documents.blocks(PAGE)
            if block.section == section]


def commands_of(section):
    return [command.text for block in blocks_of(section)
            if not block.text.startswith('[')
            for command in documents.commands(block)]


@pytest.fixture(scope='module')
def host(machine):      # noqa: F811
    """A host with a wheel, on which none of our packages is installed."""
    with machine.root() as root:
        root.write('/etc/hosts', '127.0.0.1 localhost\n127.0.0.2 controller\n')
        root.run('rm', '-f', '/usr/bin/dedupd', '/usr/bin/glance-dedup')
        root.run('env', 'PBR_VERSION=7.6.5', sys.executable, '-m', 'pip',
                 'wheel', '--no-deps', '--quiet', '--wheel-dir', 'wheels',
                 '.', directory=roots.CHECKOUT)
        yield root


@pytest.fixture(scope='module')
def controller(host):
    """The storing host; yields the id of its image."""
    process = subprocess.Popen(
        host.command(sys.executable, '-W', 'ignore', '-c', CONTROLLER,
                     '/srv/controller', directory=roots.TOP),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
        assert ready, 'the storing host did not start in time, see above'
        image_id = process.stdout.readline().strip()
        assert image_id, 'the storing host did not start, see above'
        host.run('cp', '/srv/controller/authority.pem',
                 roots.CHECKOUT / 'ca.pem')
        yield image_id
    finally:
        process.stdin.close()
        process.wait(START_SECONDS)
        process.stdout.close()


def say(host, command):
    """Run a command of the page, beside the wheel and the certificate."""
    said = host.run(
        'env', f'PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:'
        f'/sbin:/bin:{pathlib.Path(sys.prefix) / "bin"}',
        'OS_AUTH_TOKEN=alice', 'bash', '-c', command,
        directory=roots.CHECKOUT)
    if command.endswith(f'venv {VENV}'):
        # These are the packages that a registry would give.
        site = host.run(
            f'{VENV}/bin/python', '-c', 'import sysconfig; '
            'print(sysconfig.get_path("purelib"))').strip()
        host.write(f'{site}/packages.pth', f'{roots.STACK}/data/packages\n')
    return said


def status(host):
    return json.loads(host.run(
        'curl', '-sf', '--unix-socket', '/run/dedupd-cache/dedupd.sock',
        'http://dedupd/v1/status'))


def require_a_relay(host, image_id, configuration):
    """Nova's address stays; an image comes with the cache, and without it."""
    change = next(block.text for block in blocks_of('Without the cache')
                  if block.text.startswith('['))
    _, listen, relay = change.splitlines()
    assert relay == f'relay_listen = {CACHE.removeprefix("http://")}'
    for command in commands_of('Without the cache'):
        if command == 'systemctl restart dedupd-cache':
            host.write(CONF, configuration.replace(
                f'listen = {CACHE.removeprefix("http://")}',
                f'{listen}\n{relay}') + '\n')
        if command.startswith('curl'):
            host.run('curl', '-sf', '--retry', '50', '--retry-delay', '1',
                     '--retry-connrefused', '-o', '/dev/null', CACHE)
        said = say(host, command)
    assert '"versions"' in said
    for command in (), ('systemctl', 'stop', 'dedupd-cache'):
        if command:
            host.run(*command)
        host.run('curl', '-sf', '-H', 'X-Auth-Token: alice', '-o', '/tmp/got',
                 f'{CACHE}/v2/images/{image_id}/file')
        host.run('cmp', '/tmp/was', '/tmp/got')
    host.run('systemctl', 'start', 'dedupd-cache')
    host.run('curl', '-sf', '--retry', '50', '--retry-delay', '1',
             '--retry-all-errors', '-o', '/dev/null', '--unix-socket',
             listen.split()[-1], 'http://localhost/')


# Long: pip builds the wheel and installs it; Glance and two daemons start.
@pytest.mark.timeout(1200)
def test_the_page(host, controller):
    configuration, nova = (block.text for block in blocks_of('Set it up')
                           if block.text.startswith('['))
    assert f'endpoint_override = {CACHE}' in nova
    answers = {}
    for command in commands_of('Set it up'):
        if command.startswith('systemctl'):
            host.write(CONF, configuration + '\n')
        if command.startswith('curl'):
            host.run('curl', '-sf', '--retry', '50', '--retry-delay', '1',
                     '--retry-connrefused', '-o', '/dev/null', CACHE)
        answers[command] = say(host, command)
    assert '"versions"' in answers[f'curl {CACHE}/']
    assert controller in answers[f'glance --os-image-url {CACHE} image-list']

    for path, owner in ((f'{VENV}/bin/dedupd', 'root root 755'),
                        ('/var/lib/dedupd-cache/images', 'dedupd dedupd 700'),
                        ('/etc/dedupd/ca.pem', 'root root 644'),
                        ('/dev/shm/glance-dedup-dedupd', 'dedupd dedupd 700')):
        assert host.run('stat', '-c', '%U %G %a', path).strip() == owner, path
    assert not host.run('find', '/dev/shm', '-mindepth', '1', '-maxdepth', '1',
                        '!', '-name', 'glance-dedup-dedupd')

    for _ in range(2):
        for place, file in (('http://controller:9292', '/tmp/was'),
                            (CACHE, '/tmp/got')):
            host.run('curl', '-sf', '-H', 'X-Auth-Token: alice', '-o', file,
                     f'{place}/v2/images/{controller}/file')
        host.run('cmp', '/tmp/was', '/tmp/got')
    found = status(host)['cache']
    assert found['held']['images'] == 1
    assert found['held']['limit_bytes'] == 102400 << 20
    assert (found['fallbacks'], found['last_failure']) == (0, None)
    assert host.run('find', '/dev/shm/glance-dedup-dedupd', '-type', 'f')

    require_a_relay(host, controller, configuration)

    shown, plan, done = commands_of('Disk space')
    assert json.loads(say(host, shown))['cache']['held']['images'] == 1
    for command in plan, done:
        say(host, command)
    assert status(host)['cache']['held']['images'] == 1
