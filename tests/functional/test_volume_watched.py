# SPDX-License-Identifier: Apache-2.0

"""The figures of a volume that nbdkit serves, in a daemon and commands."""

import pytest

from dedupd.status import volume_stats
from tests.support import daemons
from tests.support import repositories
from tests.support import volume_tools

pytestmark = pytest.mark.needs('nbdkit')

MIB = 1 << 20
WARNING = 'no process maintains'


@pytest.fixture
def server(tmp_path):
    path = volume_tools.create_repository(tmp_path / 'repository')
    volume_tools.create(path, 'disk', 4 * MIB)
    with volume_tools.Server(path, tmp_path) as found:
        yield found


def get(daemon, path):
    response = daemon.request('GET', path)
    assert response.status == 200, response.body
    return response


def test_figures_of_now(server):
    """The figures are current before any checkpoint."""
    with daemons.Daemon(server.repository) as daemon:
        daemon.start().wait_for_catalog()
        server.start()
        assert WARNING not in server.text()
        with server.session() as session:
            volume_tools.write(session, 0, b'x' * 1000)
            session.read(0, 4096)

            def volume():
                found, = get(daemon, '/v1/volumes').json()['volumes']
                return found

            repositories.eventually(
                lambda: volume()['counters']['read_bytes'] == 4096,
                2 * volume_stats.FRESH + 10)
            found = volume()
            assert (found['name'], found['state']) == ('disk', 'ready')
            assert found['counters']['written_bytes'] == 1000
            assert found['in_use'] and found['is_live']
            assert found['broken'] == ''
            sums = daemon.status()['volumes']
            assert (sums['in_use'], sums['read_bytes']) == (1, 4096)
            metrics = get(daemon, '/metrics').body.decode()
            assert 'dedupd_volumes_in_use 1.0\n' in metrics
            assert 'dedupd_volumes_read_bytes 4096.0\n' in metrics
            series = ('dedupd_volume_request_duration_seconds_count{'
                      'operation="%s",volume="disk"} %s\n')
            for operation, count in (('read', 1.0), ('write', 1.0),
                                     ('flush', 0.0)):
                assert series % (operation, count) in metrics


def test_no_process_maintains_the_repository(server):
    """The server warns once that no process frees blocks."""
    server.start()
    assert server.text().count(WARNING) == 1
    assert 'glance-dedup task collect' in server.text()
