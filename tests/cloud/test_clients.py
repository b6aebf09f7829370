# SPDX-License-Identifier: Apache-2.0
"""OpenStack's own client works with the files of a cloud."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

LIMIT = 600     # seconds, for a loaded machine


# Long: it waits for the whole cloud, and starts OpenStack's client.
@pytest.mark.timeout(3 * LIMIT)
def test_clients(cloud, tmp_path):
    """The client works with the cloud's openrc, despite any proxy."""
    path = tmp_path / 'image'
    path.write_bytes(os.urandom(1 << 20))

    def client(*words):
        result = subprocess.run(
            ['bash', '-c', '. "$0" && exec "$@"', cloud.directory / 'openrc',
             pathlib.Path(sys.prefix) / 'bin' / 'openstack', *words],
            env={**os.environ, 'http_proxy': 'http://127.0.0.1:9'},
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LIMIT)
        assert result.returncode == 0, result.stderr
        return result.stdout

    created = json.loads(client(
        '--os-cloud', 'demo', 'image', 'create', '--disk-format', 'raw',
        '--file', path, '-f', 'json', 'of-the-client'))
    assert created['properties']['stores'] == 'dedup'
    client('image', 'save', '--file', tmp_path / 'back', created['id'])
    assert (tmp_path / 'back').read_bytes() == path.read_bytes()
    client('image', 'delete', created['id'])
    flavors = json.loads(client('flavor', 'list', '-f', 'json'))
    assert {'m1.nano', 'm1.micro'} <= {one['Name'] for one in flavors}
    assert {cloud.services[name].state()
            for name in cloud.state.wanted} == {'up'}
