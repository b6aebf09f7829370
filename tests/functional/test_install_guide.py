# SPDX-License-Identifier: Apache-2.0

"""The installation guide: its configuration, and its commands to verify it.

``tests/test_package.py`` makes and installs the package.
"""

import configparser
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.functional import glance_server
from tests.support import daemons
from tests.support import documents
from tests.support import repositories

pytestmark = pytest.mark.slow

PAGE = documents.SOURCE / 'install' / 'index.rst'
DIRECTORY = '/var/lib/glance'
COMMAND_SECONDS = 100


def block_of(section, number=0):
    return [block for block in documents.blocks(PAGE)
            if block.section == section][number]


def options_of(block, directory=DIRECTORY):
    """Return a configuration file of the page, in another directory."""
    parser = configparser.RawConfigParser()
    parser.read_string(block.text.replace(DIRECTORY, str(directory)))
    return {'DEFAULT': dict(parser.defaults()), **{
        name: {key: value for key, value in parser[name].items()
               if key not in parser.defaults()}
        for name in parser.sections()}}


@pytest.fixture
def site(tmp_path):
    """The page's Glance, with its stores, and the page's daemon."""
    options = options_of(block_of('Configure Glance'), tmp_path)
    stores = {
        name: {'type': kind, **options.pop(name)} for name, kind in (
            entry.strip().split(':')
            for entry in options['DEFAULT']['enabled_backends'].split(','))}
    default = options['glance_store']['default_backend']
    assert stores[default]['type'] == 'file'
    for store in stores.values():
        if store['type'] == 'dedup':
            store |= {'dedup_store_filter_mib': 1,
                      'dedup_store_filter_dir': tmp_path / 'filter',
                      'dedup_store_dedupd_socket': tmp_path / 'd' / 'socket'}
    with glance_server.GlanceServer(tmp_path / 'server', stores,
                                    default) as server:
        daemon_options = options_of(block_of('Start the daemon'), tmp_path)
        # glance-api has made the repository when it started.
        with daemons.running(
                daemon_options['dedupd']['datadir'], tmp_path / 'd',
                filter_dir=tmp_path / 'filter'):
            yield server, tmp_path


# Long: a Glance starts, and OpenStack's clients for each of the commands.
def test_verify(site):
    server, directory = site
    data = repositories.mixture(3 << 20)
    (directory / 'server.raw').write_bytes(data)
    answers = {}
    for block in documents.blocks(PAGE):
        if block.section != 'Verify':
            continue
        for command in documents.commands(block):
            answers[command.text] = run(command, server, directory)
    assert 'dedup1' in answers['glance stores-info']
    listed, = (text for command, text in answers.items()
               if command.endswith('image list'))
    assert re.search(r'\b3(\.0)? MiB', listed)
    assert 'maintainer' in answers['glance-dedup status']
    checked, = (text for command, text in answers.items()
                if command.endswith('repository check'))
    assert re.search(r'result *\| fine', checked)
    assert re.search(r'freed_blocks *\| [1-9]',
                     answers['glance-dedup task collect'])


def run(command, server, directory):
    # Without Keystone there are no tokens; each client has its option.
    cloud = {'glance': {'OS_AUTH_TOKEN': 'none', 'OS_IMAGE_URL': server.url},
             'openstack': {'OS_AUTH_TYPE': 'none', 'OS_ENDPOINT': server.url}}
    result = subprocess.run(
        ['bash', '-c', command.text.replace(DIRECTORY, str(directory))],
        cwd=directory, capture_output=True, text=True,
        timeout=COMMAND_SECONDS, env={
            **os.environ,
            'PATH': f'{pathlib.Path(sys.prefix) / "bin"}:'
                    f'{os.environ["PATH"]}',
            **cloud.get(command.text.split()[0], {}),
            'GLANCE_DEDUP_FILTER_DIR': str(directory / 'filter'),
            'GLANCE_DEDUP_SOCKET': str(directory / 'd' / 'socket')})
    assert result.returncode == 0, (
        f'{command.place}: {command.text}\n{result.stdout}{result.stderr}')
    return result.stdout


def test_options_of_uwsgi():
    """The page's options are those of all tests here."""
    ours = glance_server.uwsgi_options(
        'glance.wsgi.api:application', 0, 4, 8)
    page = options_of(block_of('Serve Glance'))['uwsgi']
    for name, value in page.items():
        if name != 'http-socket':
            assert str(ours[name]) == value, name
