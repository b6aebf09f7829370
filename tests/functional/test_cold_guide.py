# SPDX-License-Identifier: Apache-2.0

"""The guide's page on cold groups: its commands, files and figures.

The commands run with other paths, on a real object store. Those for Keystone
and Swift run in ``tests/cloud/test_cold.py``.
"""

import fnmatch
import json
import os
import re
import subprocess
import sys
import urllib.parse

from oslo_config import cfg
import pytest

from dedupd import opts
from glance_dedup.base import pacing
from glance_dedup.maintenance import maintainer_role
from glance_dedup.objects import slice_cache
from glance_dedup.repository import cold_settings
from tests.support import documents
from tests.support import maintenance
from tests.support import objects
from tests.support import repositories

pytestmark = pytest.mark.slow

pytest_plugins = ['tests.support.object_fixtures']

PAGE = documents.SOURCE / 'admin' / 'object-storage.rst'
MEASURED = (documents.SOURCE / 'contributor' / 'measurements'
            / 'hosts-and-sites.rst')
REPOSITORY = '/var/lib/glance/dedup'
CREDENTIALS = '/etc/glance-dedup/cold.conf'
ENDPOINT = 'https://s3.example.org'
LIMIT = 120
SLOTS = 256
SIZE = 4 * SLOTS * 4096


def blocks(section, language):
    return [block for block in documents.blocks(PAGE)
            if (block.section, block.language) == (section, language)]


def commands(section):
    return [line.text for block in blocks(section, 'console')
            for line in documents.commands(block)]


@pytest.fixture(scope='module')
def bucket(server):
    objects.make_bucket(server.url, 'images', server.key, server.secret)


class Host:
    """A host whose paths differ from the page's."""

    def __init__(self, directory, endpoint, server):
        self.repository = directory / 'dedup'
        self.credentials = directory / 'cold.conf'
        self._replaced = {
            'sudo -u glance ': '', ENDPOINT: endpoint,
            'glance-dedup ': f'{sys.executable} -m glance_dedup.cli.entry ',
            'AKIAEXAMPLE': server.key, 'the secret': server.secret}

    def replace(self, old, new):
        self._replaced[old] = new

    def run(self, text):
        # The command's name is in the path of the credentials, too.
        text = text.replace(REPOSITORY, str(self.repository)).replace(
            CREDENTIALS, str(self.credentials))
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        done = subprocess.run(
            ['bash', '-c', text], cwd=documents.TOP, timeout=LIMIT,
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env={**os.environ, 'GLANCE_DEDUP_REPOSITORY':
                 str(self.repository), 'GLANCE_DEDUP_FILTER_DIR':
                 str(self.repository.parent / 'dedup-filter')})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def write_credentials(self):
        block, = blocks('Credentials for S3', 'ini')
        text = block.text
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        self.credentials.write_text(text)
        self.credentials.chmod(0o640)


@pytest.fixture
def host(server, bucket, proxy, faults, tmp_path):
    return Host(tmp_path, proxy.url, server)


def allowed(policy, method, url):
    """Return true if the page's policy lets S3 do what a request needs."""
    parts = urllib.parse.urlsplit(url)
    query = urllib.parse.parse_qs(parts.query)
    _, name, key = parts.path.split('/', 2) if parts.path.count('/') > 1 else (
        *parts.path.split('/', 1), '')
    if method == 'GET' and not key:
        action, resource = 's3:ListBucket', f'arn:aws:s3:::{name}'
    else:
        action = {'GET': 's3:GetObject', 'HEAD': 's3:GetObject',
                  'PUT': 's3:PutObject',
                  'DELETE': 's3:DeleteObject'}[method]
        resource = f'arn:aws:s3:::{name}/{key}'
    for one in policy['Statement']:
        prefix = one.get('Condition', {}).get('StringLike', {}).get(
            's3:prefix')
        actions = one['Action']
        if (action in ([actions] if isinstance(actions, str) else actions)
                and fnmatch.fnmatchcase(resource, one['Resource'])
                and (prefix is None or fnmatch.fnmatchcase(
                    query['prefix'][0], prefix))):
            return True
    return False


# Long: each of the page's commands is a process.
def test_the_page(host, faults):
    attach, show = commands('Attach it')
    recompress, plan, move, move_all = commands('When groups move')
    repositories.create(host.repository, group_slots=SLOTS)
    host.write_credentials()
    host.run(attach)
    with repositories.open_repository(host.repository) as repo:
        repositories.put(repo, 'image', repositories.noise(SIZE, 1))
    host.run(recompress)
    host.run(plan)
    host.run(move)
    # All groups changed lately.
    assert not cold_groups(host.repository)
    said = host.run(move_all)
    assert re.search(r'groups +\| 4 ', said), said
    # The objects are four groups, a recipe and a manifest.
    assert re.search(r'objects +\| 6 ', host.run(show)), said
    with repositories.open_repository(host.repository) as repo:
        assert repositories.read_all(repo, 'image') == (
            repositories.noise(SIZE, 1))
        repo.delete('image')
    host.run(move_all)
    # The page's policy allows each request that S3 got above.
    policy = json.loads(blocks('Credentials for S3', 'json')[0].text)
    assert len(faults.seen) > 20
    for method, path in faults.seen:
        assert allowed(policy, method, path), (method, path)
    assert not allowed(policy, 'PUT', '/images/other/x')
    assert not allowed(policy, 'GET', '/images?prefix=other/')


def cold_groups(path):
    with repositories.open_repository(path) as repo, (
            maintainer_role.Maintainer(repo)) as maintainer:
        return [number for number in maintainer.engine.groups()
                if maintainer.engine.group_facts(number)['is_cold']]


def test_the_options_are_dedupds(tmp_path):
    block, = blocks('When groups move', 'ini')
    path = tmp_path / 'dedupd.conf'
    path.write_text(block.text)
    conf = cfg.ConfigOpts()
    conf.register_opts(opts.dedupd_opts, group='dedupd')
    conf(['--config-file', str(path)], default_config_files=[])
    assert conf.dedupd.tier_free_mib == 102400
    assert conf.dedupd.tier_keep == [
        'project:6f7a3c8e5d8b4a09a2f1d0c3b4e5f607']


def costs():
    """Return the rows of the measured table: PUT, GET, and HEAD and LIST."""
    text = MEASURED.read_text().partition('\nAn object store\n')[2]
    rows = re.findall(r'   \* - (.+)\n     - (.+)\n     - (.+)\n     - (.+)\n',
                      text)
    return {row[0]: row[1:] for row in rows}


def asked(faults):
    methods = ['LIST' if method == 'GET' and 'list-type' in path else method
               for method, path in faults.seen]
    faults.seen.clear()
    return tuple(map(str, (
        methods.count('PUT'), methods.count('GET'),
        methods.count('HEAD') + methods.count('LIST'))))


def less(more, fewer, number=1):
    """Return the difference of each pair, divided by a number of things."""
    return tuple(str((int(one) - int(other)) // number)
                 for one, other in zip(more, fewer))


def test_the_requests_are_those_of_the_table(host, faults):
    from dedupd.tasks import tierer

    rows = costs()
    host.replace('s3://images/glance', 's3://images/costs')
    repositories.create(host.repository, group_slots=SLOTS)
    host.write_credentials()
    faults.seen.clear()
    host.run(commands('Attach it')[0])
    assert asked(faults) == rows['``object-store attach``, for the first time']
    with repositories.open_repository(host.repository) as repo:
        with maintainer_role.Maintainer(repo) as maintainer:
            def run(*images):
                for name, size in images:
                    repositories.put(repo, name, repositories.noise(
                        size, name))
                maintenance.account(maintainer)
                faults.seen.clear()
                tierer.run_once(maintainer, pacing.Pace(),
                                tierer.Policy(everything=True))
                return asked(faults)

            run(('image', SIZE))
            run()       # the second metadata backup
            idle = run()
            four = run(('four', SIZE))
            second = run()
            eight = run(('eight', 2 * SIZE))
            run()
            two = run(('one', 4096), ('two', 4096))
        assert idle == rows['a run that finds nothing to do']
        assert less(eight, four, 4) == rows['a group becomes cold']
        assert less(second, idle) == rows['a metadata backup']
        assert less(two, second, 2) == rows['the recipe of a new image']
        assert repositories.read_all(repo, 'image')
        with cold_settings.connect(cold_settings.require(repo.path)) as store:
            sizes = [size for key, size in store.keys('')
                     if re.search('/g/0000000[1-4]-', key)]
        faults.seen[:] = [one for one in faults.seen if 'list' not in one[1]]
        slices = sum(-(-size // slice_cache.SLICE) for size in sizes)
        assert asked(faults) == ('0', str(slices), '0')
    assert rows['an image is read past the cache'][1].startswith(
        '1 for each MiB')
    host.run(commands('Attach it')[1])
    assert asked(faults) == ('0', '0', '1')
