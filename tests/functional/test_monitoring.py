# SPDX-License-Identifier: Apache-2.0

"""The dashboard and the rules, with a real Prometheus and real daemons.

One daemon belongs to a store, the other to a cache; they publish as many
metrics as they can without Glance. Prometheus requests them every second.
"""

import contextlib
import json
import shutil
import subprocess
import time

import pytest
import requests

from dedupd.status import forecast
from glance_dedup.repository import features
from tests.functional import dedupd_watched
from tests.support import cache_harness
from tests.support import certificates
from tests.support import maintenance
from tests.support import monitoring
from tests.support import nbd
from tests.support import ports
from tests.support import repositories
from tests.support import volume_tools

pytestmark = [pytest.mark.slow, pytest.mark.needs('nbdkit', 'prometheus')]

PATIENCE = 60
DAY = 86400
IMAGE = 3 << 20
#: Reasons why a query may have no result here, by its legend or title.
EMPTY = {
    'Progress {{task}} {{instance}}': 'no task runs',
    'Runs and failures failed: {{task}} {{instance}}':
        'the task failed before Prometheus came',
}


class Prometheus:
    """A server that requests some daemons' metrics, and has the rules.

    :param places: the addresses of the daemons
    """

    def __init__(self, directory, places):
        assert shutil.which('prometheus'), (
            'prometheus is missing; install the package prometheus')
        address = f'127.0.0.1:{ports.free_port()}'
        self._url = f'http://{address}/api/v1/'
        config = directory / 'prometheus.json'
        config.write_text(json.dumps({
            'global': {'scrape_interval': '1s', 'evaluation_interval': '1s'},
            'rule_files': [str(monitoring.RULES)],
            'scrape_configs': [{'job_name': 'dedupd', 'static_configs': [
                {'targets': places}]}]}))
        self._log = directory / 'prometheus.log'
        with open(self._log, 'wb') as log:
            self._process = subprocess.Popen(
                ['prometheus', f'--config.file={config}',
                 f'--storage.tsdb.path={directory / "data"}',
                 f'--web.listen-address={address}'],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def ask(self, query):
        """Return the series of a query's result, by all their labels."""
        answer = requests.get(self._url + 'query', {'query': query},
                              timeout=PATIENCE).json()
        assert answer['status'] == 'success', (query, answer)
        return answer['data']['result']

    def wait_for(self, query):
        """Wait until a query has a result."""
        deadline = time.monotonic() + PATIENCE
        while True:
            assert self._process.poll() is None, self._log.read_text()
            with contextlib.suppress(requests.ConnectionError, ValueError,
                                     AssertionError):
                if found := self.ask(query):
                    return found
            assert time.monotonic() < deadline, query
            time.sleep(0.1)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._process.terminate()
        self._process.wait(PATIENCE)


def fill(path):
    """Make images, a volume, and the history of two days in which it fills."""
    volume_tools.create(path, 'disk', 1 << 20)
    with repositories.open_repository(path) as repo:
        repositories.put(repo, 'image', repositories.noise(IMAGE, 1))
        with maintenance.maintaining(repo) as maintainer:
            now = int(time.time())
            for hour in range(48):
                maintainer.catalog.sample(now - (48 - hour) * 3600, {
                    'images': 1, 'logical_bytes': IMAGE,
                    'nonzero_bytes': IMAGE, 'unique_bytes': IMAGE,
                    'disk_bytes': IMAGE, forecast.USED: hour << 34})


@contextlib.contextmanager
def a_volume(repository, place):
    """Serve the volume, and write to it."""
    directory = place / 'volume'
    directory.mkdir()
    with volume_tools.Server(repository, directory) as server:
        server.start()
        with server.session() as session:
            volume_tools.write(session, 0, b'x' * 1000)
        yield


@contextlib.contextmanager
def a_store(place, authority):
    path = volume_tools.create_repository(place / 'store')
    volume_tools.set_feature(path, features.COLD)
    fill(path)
    listen = f'127.0.0.1:{ports.free_port()}'
    with dedupd_watched.Daemon(
            path, listen=listen, tls_cert=authority.issue('server'),
            tls_client_ca=authority.path, nbd_socket=place / 'nbd',
            scrub_interval=2592000, collect_interval=600, merge_interval=600,
            metrics_projects='true',
            sections='[replication]\ntarget_url = https://127.0.0.1:1\n'
            f'cert = {authority.issue("operator")}\nfrom_cloud = a\n'
            'to_cloud = b\n') as daemon, a_volume(path, place):
        daemon.start().wait_for_catalog()
        # The first process that stores on a host makes the filter.
        with repositories.open_repository(path, filter_dir=str(
                daemon.options['filter_dir'])) as repo:
            repositories.put(repo, 'another', repositories.noise(IMAGE, 2))
        for task in ('collect', 'merge', 'scrub', 'recompress', 'projects'):
            daemon.perform(task)
        yield daemon
        assert 'Traceback' not in daemon.text()
        assert daemon.stop() == 0


@contextlib.contextmanager
def a_cache(place, authority):
    """A cache whose storing host does not answer."""
    port = ports.free_port()
    with cache_harness.CacheDaemon(
            repositories.create(place / 'cache'), {
                'upstream_url': f'https://127.0.0.1:{ports.free_port()}',
                'upstream_ca': authority.path,
                'upstream_cert': authority.issue('host'), 'limit_mib': 4096},
            glance_url='http://127.0.0.1:1', nbd_socket=place / 'cache-nbd',
            status_listen=f'127.0.0.1:{port}') as daemon:
        daemon.port = port
        daemon.start().wait_for_catalog()
        yield daemon
        assert daemon.stop() == 0


@pytest.fixture(scope='module')
def watched(tmp_path_factory):
    """Prometheus, and the two daemons."""
    place = tmp_path_factory.mktemp('m')
    authority = certificates.Authority(place)
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(a_store(place, authority)),
                stack.enter_context(a_cache(place, authority))]
        server = stack.enter_context(Prometheus(
            place, [f'127.0.0.1:{daemon.port}' for daemon in both]))
        server.wait_for('count(count_over_time(dedupd_ready[1m]) > 1) == 2')
        # The filter's first scan comes after some seconds.
        server.wait_for('dedupd_filter_look_age_seconds')
        yield server, *both


def names(daemon):
    """Return the names of the metrics that a daemon publishes now."""
    return monitoring.names_in(' '.join(
        line.split('{')[0] for line in daemon.request(
            'GET', '/metrics').body.decode().splitlines()
        if line and not line.startswith('#')))


#: Metrics that only a daemon on a shared file system publishes (see
#: test_trial.py).
ELSEWHERE = {'dedupd_mount_tried'}


def test_every_metric_exists(watched):
    """Every metric of the rules and the dashboard exists; some are caches'."""
    _, store, cache = watched
    store.wait_for(lambda: store.status()['space']['full_in_seconds'])
    named = monitoring.names_in(monitoring.RULES.read_text()) | {
        name for target in monitoring.targets()
        for name in monitoring.names_in(target['expr'])}
    assert len(named) > 80
    assert named <= names(store) | names(cache) | ELSEWHERE
    assert any(name not in names(store) for name in named)
    # Nor does the source name a metric that the daemons do not have.
    assert monitoring.published_names() == (
        names(store) | names(cache) | ELSEWHERE)


def test_every_panel_has_something_to_show(watched):
    server, store, _ = watched
    server.wait_for('dedupd_space_full_timestamp_seconds')
    # The daemon serves an image while Prometheus scrapes it.
    before, = server.wait_for(
        f'dedupd_cache_misses_total{{instance="127.0.0.1:{store.port}"}}')
    assert len(store.request('GET', '/v1/images/image').body) == IMAGE
    server.wait_for('dedupd_cache_misses_total{instance="127.0.0.1:'
                    f'{store.port}"}} > {before["value"][1]}')
    empty = set()
    for panel in monitoring.panels():
        for target in panel['targets']:
            if not server.ask(monitoring.filled(target['expr'])):
                empty.add(f'{panel["title"]} {target["legendFormat"]}')
    assert empty <= set(EMPTY), empty
    # The list names only queries that exist.
    assert set(EMPTY) <= {
        f'{panel["title"]} {target["legendFormat"]}'
        for panel in monitoring.panels() for target in panel['targets']}


def test_one_line_for_each_legend(watched):
    """Two lines of one panel with the same name cannot be distinguished."""
    server = watched[0]
    for panel in monitoring.panels():
        shown = []
        for target in panel['targets']:
            for series in server.ask(monitoring.filled(target['expr'])):
                legend = target['legendFormat']
                for label, value in series['metric'].items():
                    legend = legend.replace(f'{{{{{label}}}}}', value)
                assert '{{' not in legend, (panel['title'], legend)
                shown.append(legend)
        if panel['type'] != 'table':
            assert len(shown) == len(set(shown)), (panel['title'], shown)


def test_rules_are_loaded(watched):
    """The rules use the same series, and report this site's problems."""
    server, store, cache = watched
    # The prediction is that the test's disk is full soon.
    server.wait_for('ALERTS{alertname="DedupDiskFilling", instance='
                    f'"127.0.0.1:{store.port}"}}')
    # The certificates of the test are valid for a day.
    for daemon in (store, cache):
        server.wait_for('ALERTS{alertname="DedupCertificateExpiring", '
                        f'instance="127.0.0.1:{daemon.port}"}}')
    server.wait_for('ALERTS{alertname="DedupTaskFailing", task="replicate"}')
    assert not server.ask('ALERTS{alertname="DedupCacheWithoutOrigin"}')
    # A client requests an image that the storing host does not give.
    with nbd.Session(cache.options['nbd_socket']) as session:
        with contextlib.suppress(AssertionError, OSError, EOFError):
            session.go(b'image')
    server.wait_for('ALERTS{alertname="DedupCacheWithoutOrigin", instance='
                    f'"127.0.0.1:{cache.port}"}}')


def test_a_daemon_that_is_down(watched):
    """An alert names a daemon that is down; the last test, as it ends one."""
    server, _, cache = watched
    # A daemon may have answered late once.
    server.wait_for('absent(ALERTS{alertname="DedupDaemonDown"})')
    assert cache.stop() == 0
    server.wait_for('ALERTS{alertname="DedupDaemonDown", instance='
                    f'"127.0.0.1:{cache.port}"}}')
